"""Generation with casts that are kept and queries in groups: the same tokens, with less work."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl_cases import trainer

from troll.adapters.trl import generation
from troll.adapters.trl.generation import grouped_attention, token_by_token

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
    found, _ = grouped_attention(*inputs, scaling=scaling)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


def test_keys_and_values_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the attention is given is the cache itself."""
    module, query, key, value, mask = cache()
    seen = []

    def attend(query: Any, key: Any, value: Any, **_: Any) -> Any:
        seen.append((key.data_ptr(), value.data_ptr()))
        return query

    monkeypatch.setattr(generation, "scaled_dot_product_attention", attend)
    grouped_attention(module, query, key, value, mask)
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
    monkeypatch.setattr(generation, "sdpa_attention_forward", lambda *args, **named: asked.append((args, named)))
    grouped_attention(module, query, key, value, mask, **named)
    assert len(asked) == 1
    assert asked[0][1] == named
    assert all(x is y for x, y in zip(asked[0][0], (module, query, key, value, mask), strict=True))


class Casts(TorchDispatchMode):
    """Counts how often each weight is rounded to bf16."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.of = {weight.data_ptr(): 0 for name, weight in model.named_parameters() if "proj" in name}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, then do what was asked."""
        if function is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16:
            self.of[args[0].data_ptr()] = self.of.get(args[0].data_ptr(), 0) + 1
        return function(*args, **(kwargs or {}))


def completions(trained: Any) -> tuple[Any, list[int]]:
    """What is generated for two prompts, and how often each of the weights was cast."""
    torch.manual_seed(0)
    with Casts(trained.model) as casts:
        ids, _ = trained._generate_single_turn([[40, 41, 42], [50, 51, 52, 53, 54]], None, {}, 1)
    weights = [w.data_ptr() for name, w in trained.model.named_parameters() if "proj" in name]
    return ids, [casts.of[pointer] for pointer in weights]


def test_weights_are_cast_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the completions are those of casts that are made again for every token."""
    trained = trainer(tmp_path, bf16=True, max_completion_length=6)
    trained.model_wrapped = trained.accelerator.prepare_model(trained.model)  # as train() does
    ids, casts = completions(trained)
    assert set(casts) == {1}
    monkeypatch.setattr(generation, "_WHOLE", ())
    again, casts = completions(trained)
    assert min(casts) > 1
    assert ids == again


def test_the_attention_of_generation_is_given_back(tmp_path: Path) -> None:
    trained = trainer(tmp_path)
    for fails in (False, True):
        with pytest.raises(KeyError) if fails else nullcontext(), token_by_token(trained.accelerator):
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is grouped_attention
            if fails:
                raise KeyError
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
        assert not torch.is_autocast_enabled("cpu")


def test_an_attention_of_the_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*args: Any, **named: Any) -> Any:
        return sdpa_attention_forward(*args, **named)

    trained = trainer(tmp_path)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", own)
    with token_by_token(trained.accelerator):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own


def test_rollouts_use_grouped_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token but the first of a completion, in every layer; and neither scoring nor training."""
    rows = []

    def attend(query: torch.Tensor, *rest: Any, **named: Any) -> Any:
        rows.append(query.shape[2])
        return scaled_dot_product_attention(query, *rest, **named)

    monkeypatch.setattr(generation, "scaled_dot_product_attention", attend)
    trained = trainer(tmp_path, max_steps=1, max_completion_length=6, generation_kwargs={"min_new_tokens": 6})
    trained.train()
    config = trained.model.config
    assert rows == [config.num_attention_heads // config.num_key_value_heads] * (6 - 1) * config.num_hidden_layers
