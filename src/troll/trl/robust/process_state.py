"""What one process knows beyond weights and optimizer: its random generators, and what it will log next."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch

_TEXTS = ("prompt", "completion", "advantages")
_TABLES = ("rewards", "extra")


def random_state() -> dict[str, Any]:
    """Of Python, numpy, torch, and torch on the accelerator of this process."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    state["numpy"] = np.random.get_state()  # noqa: NPY002, the one that others draw from
    if torch.accelerator.is_available():
        state["accelerator"] = _accelerator().get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Draw on as from there."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "accelerator" in state and torch.accelerator.is_available():
        _accelerator().set_rng_state(state["accelerator"])


def logging_state(trainer: Any) -> dict[str, Any]:
    """What was measured since the last log, and the completions that TRL shows in its table."""
    logs = trainer._logs if trainer.log_completions else {}
    return {
        "metrics": {mode: {name: list(x) for name, x in of.items()} for mode, of in trainer._metrics.items()},
        "loss": float(trainer._tr_loss),
        "total_loss": float(trainer._total_loss_scalar),
        "logged": trainer._globalstep_last_logged,
        "completions": {name: list(logs[name]) for name in _TEXTS if name in logs and _is_plain(logs[name])},
        "tables": {name: {k: list(x) for k, x in logs.get(name, {}).items() if _is_plain(x)} for name in _TABLES},
    }


def restore_logging(trainer: Any, state: dict[str, Any]) -> None:
    """Log on as from there."""
    for mode, metrics in state["metrics"].items():
        trainer._metrics[mode].clear()
        trainer._metrics[mode].update(metrics)
    trainer._tr_loss.fill_(state["loss"])
    trainer._total_loss_scalar = state["total_loss"]
    trainer._globalstep_last_logged = state["logged"]
    for name, values in state["completions"].items():
        trainer._logs[name].extend(values)
    for name, columns in state["tables"].items():
        for column, values in columns.items():
            trainer._logs[name][column].extend(values)


def _accelerator() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())


def _is_plain(values: Any) -> bool:
    """Whether it is text and numbers; pictures are not kept."""
    try:
        json.dumps(list(values))
    except TypeError:
        return False
    return True
