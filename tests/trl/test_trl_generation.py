"""Generation with casts that are kept and queries in groups: the same tokens, with less work."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import GRPOTrainer
from trl_cases import trainer

from troll import modeling
from troll import modeling as grouped
from troll.modeling import gqa_attention


class Casts(TorchDispatchMode):
    """Counts how often each weight is rounded to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, then do what was asked."""
        if function is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.of[args[0].data_ptr()] += 1
        return function(*args, **(kwargs or {}))


def completions(trained: Any) -> tuple[Any, list[int]]:
    """What is generated for two prompts, and how often each of the weights was cast."""
    torch.manual_seed(0)
    with Casts() as casts:
        ids, _ = trained._generate_single_turn([[40, 41, 42], [50, 51, 52, 53, 54]], None, {}, 1)
    return ids, [casts.of[weight.data_ptr()] for name, weight in trained.model.named_parameters() if "proj" in name]


def test_weights_are_cast_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the completions are those of casts that are made again for every token."""
    trained = trainer(tmp_path, bf16=True, max_completion_length=6)
    trained.model_wrapped = trained.accelerator.prepare_model(trained.model)  # as train() does
    ids, casts = completions(trained)
    assert set(casts) == {1}
    monkeypatch.setattr(modeling, "_UNSHARDED", ())
    again, casts = completions(trained)
    assert min(casts) > 1
    assert ids == again


def test_rollouts_use_grouped_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token but the first of a completion, in every layer; and neither scoring nor training."""
    rows = []

    def attend(query: torch.Tensor, *rest: Any, **named: Any) -> Any:
        rows.append(query.shape[2])
        return scaled_dot_product_attention(query, *rest, **named)

    monkeypatch.setattr(grouped, "scaled_dot_product_attention", attend)
    trained = trainer(tmp_path, max_steps=1, max_completion_length=6, generation_kwargs={"min_new_tokens": 6})
    trained.train()
    config = trained.model.config
    assert rows == [config.num_attention_heads // config.num_key_value_heads] * (6 - 1) * config.num_hidden_layers


@pytest.mark.parametrize("elsewhere", ["use_vllm", "use_transformers_continuous_batching", None])
def test_what_is_generated_elsewhere_is_left_alone(
    elsewhere: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = []

    def generate(self: Any, *args: Any) -> Any:
        inside.append((ALL_ATTENTION_FUNCTIONS["sdpa"], torch.is_autocast_enabled("cpu")))

    trained = trainer(tmp_path, bf16=True)
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", generate)
    if elsewhere:
        monkeypatch.setattr(trained, elsewhere, True)
    trained._generate_single_turn([[40]], None, {}, 1)
    assert inside == [(sdpa_attention_forward, False) if elsewhere else (gqa_attention, True)]
