"""A tiny trainer for the tests of the TRL adapter: a byte model, prompts, and a reward for lower-case letters."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import tiny_models
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from troll.trl import TROLLConfig, TROLLTrainer

DEFAULTS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


def prompts(n: int = 64) -> Dataset:
    return Dataset.from_dict({"prompt": [f"say {i}" for i in range(n)]})


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def lower_case(completions: list[Any], **_: Any) -> list[float]:
    """Share of lower-case letters: dense enough that groups differ."""
    return [sum(c.islower() for c in text_of(completion)) / 8 for completion in completions]


REGION: dict[str, Any] = {"kl_bound": 0.05, "updates_per_generation": 4}  # so that many tokens leave it


def config(folder: Path, **changes: Any) -> TROLLConfig:
    return TROLLConfig(str(folder), **{**DEFAULTS, **REGION, "max_steps": 4, **changes})


def trainer(folder: Path, kind: str = "dense", **changes: Any) -> TROLLTrainer:
    """A TROLLTrainer on a fresh tiny model. Keys of ``named`` below go to the trainer, all others to the config."""
    named = {"reward_funcs": lower_case, "train_dataset": prompts()}
    model, processing = tiny_models.build(kind)
    own = {k: changes.pop(k) for k in list(changes) if k in TRAINER_ARGUMENTS}
    args = config(folder, **changes)
    return TROLLTrainer(**{"model": model, "args": args, "processing_class": processing, **named, **own})


TRAINER_ARGUMENTS = (
    "model",
    "reward_funcs",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "reward_processing_classes",
    "callbacks",
    "peft_config",
    "tools",
)


def stock_trainer(folder: Path, **changes: Any) -> GRPOTrainer:
    """TRL's own trainer on the same model, data and schedule (``steps_per_generation=4`` unless changed)."""
    model, processing = tiny_models.build("dense")
    args = GRPOConfig(str(folder), **{**DEFAULTS, "steps_per_generation": 4, "max_steps": 4, **changes})
    return GRPOTrainer(model, lower_case, args, prompts(), processing_class=processing)


def weights(trained: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trained.model.named_parameters()}


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of any weight."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def logged(trained: Any, name: str) -> list[float]:
    """All values of a metric, in order."""
    return [entry[name] for entry in trained.state.log_history if name in entry]


def pairs(*options: list[Any]) -> list[tuple[Any, ...]]:
    return list(itertools.product(*options))
