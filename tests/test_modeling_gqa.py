"""Attention with queries in groups is attention, without copies; what it does not do is left to transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from troll import modeling
from troll.modeling import gqa_attention, gqa_decoding

HEADS, GROUPS, LENGTH, SIZE = 12, 3, 7, 8


def cache(tokens: int = 1, heads: int = HEADS, groups: int = GROUPS) -> tuple[Any, ...]:
    """A module, queries, keys and values of five sequences, and a mask that hides where three of them are padded."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(5, n, length, SIZE, generator=draw, dtype=torch.float64)
        for n, length in ((heads, tokens), (groups, LENGTH), (groups, LENGTH))
    )
    module = torch.nn.Module()
    module.num_key_value_groups = heads // groups
    begins = torch.tensor([0, 3, 0, 5, 2])
    mask = (torch.arange(LENGTH) >= begins[:, None])[:, None, None, :].expand(-1, 1, tokens, -1)
    return module, query, key, value, mask


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_grouped_attention_is_attention(masked: bool, kind: torch.dtype, scaling: float | None) -> None:
    module, query, key, value, mask = cache()
    if kind == torch.float64:
        mask = torch.where(mask, 0.0, -torch.inf).double()
    inputs = module, query, key, value, mask if masked else None
    expected, _ = sdpa_attention_forward(*inputs, scaling=scaling)
    found, _ = gqa_attention(*inputs, scaling=scaling)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


def test_keys_and_values_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the attention is given is the cache itself."""
    module, query, key, value, mask = cache()
    seen = []

    def attend(query: Any, key: Any, value: Any, **_: Any) -> Any:
        seen.append((key.data_ptr(), value.data_ptr()))
        return query

    monkeypatch.setattr(modeling, "scaled_dot_product_attention", attend)
    gqa_attention(module, query, key, value, mask)
    assert seen == [(key.data_ptr(), value.data_ptr())]


@pytest.mark.parametrize(
    "case", ["several tokens", "a head of its own each", "a mask for each head", "dropout", "a bias of positions"]
)
def test_all_else_is_left_to_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = HEADS if case == "a head of its own each" else GROUPS
    module, query, key, value, mask = cache(tokens=3 if case == "several tokens" else 1, groups=groups)
    named: dict[str, Any] = {}
    if case == "a mask for each head":
        mask = mask.expand(-1, HEADS, -1, -1)
    elif case == "dropout":
        named["dropout"] = 0.1
    elif case == "a bias of positions":
        named["position_bias"] = torch.zeros(1, HEADS, 1, LENGTH)
    asked = []
    monkeypatch.setattr(modeling, "sdpa_attention_forward", lambda *args, **named: asked.append((args, named)))
    gqa_attention(module, query, key, value, mask, **named)
    assert len(asked) == 1
    assert asked[0][1] == named
    assert all(x is y for x, y in zip(asked[0][0], (module, query, key, value, mask), strict=True))


def test_the_attention_is_given_back() -> None:
    with gqa_decoding():
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is gqa_attention
        with gqa_decoding():
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is gqa_attention
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is gqa_attention
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    with pytest.raises(KeyError), gqa_decoding():
        raise KeyError
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_an_attention_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*args: Any, **named: Any) -> Any:
        return sdpa_attention_forward(*args, **named)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", own)
    with gqa_decoding():
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
