"""A tiny trainer that is stopped and resumed, and everything its checkpoints hold, as hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cli_cases
from tortured import hash_of
from transformers import TrainerCallback
from trl_cases import prompts, trainer

UPDATES, ROLLOUT = 16, 8
_NOT_COMPARED = ("manifest.json", "training_args.bin", "README.md")  # checked elsewhere; names of folders; prose


class StopAfter(TrainerCallback):
    """Ends the training after so many updates, with a checkpoint in hand."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.updates:
            control.should_save = control.should_training_stop = True


class SaveOnlyLast(TrainerCallback):
    """How often a resumed run saves stands in its checkpoint; the last save is all that is compared."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step == state.max_steps


def start(folder: Path, **changes: Any) -> Any:
    """Sixteen updates, eight on each rollout; a checkpoint after the last."""
    usual: dict[str, Any] = {"max_steps": UPDATES, "updates_per_generation": ROLLOUT, "lr_scheduler_type": "cosine"}
    usual |= {"save_strategy": "steps", "save_steps": UPDATES}
    return trainer(folder, **{**usual, **changes})


def go_on(folder: Path, checkpoint: Path | bool, **changes: Any) -> Any:
    """A new trainer that goes on from a checkpoint; from the last good one if it is True."""
    run = start(folder, **changes)
    run.train(resume_from_checkpoint=checkpoint if checkpoint is True else str(checkpoint))
    return run


def contents(checkpoint: Path) -> dict[str, str]:
    """File → hash of what it holds, less the times in it: weights, optimiser, random numbers, log, rollout."""
    return {
        path.name: hash_of(path)
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name not in _NOT_COMPARED
    }


__all__ = ["ROLLOUT", "UPDATES", "SaveOnlyLast", "StopAfter", "cli_cases", "contents", "go_on", "prompts", "start"]
