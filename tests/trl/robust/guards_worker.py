"""Goes wrong on one of two processes: ``torchrun guards_worker.py FOLDER``. Writes what each process came to."""

from __future__ import annotations

import faulthandler
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import trl_cases
from accelerate.state import PartialState

from troll.errors import InputError

SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 4, "max_skipped_updates": 1}


def outcome(run: Any) -> dict[str, Any]:
    """Train, and say how it ended."""
    start, error = trl_cases.weights(run), None
    try:
        run.train()
    except InputError as raised:
        error = str(raised)
    total = sum(float(p.double().sum()) for p in trl_cases.weights(run).values())
    moved = trl_cases.furthest(start, trl_cases.weights(run))
    about = {"error": error, "updates": run.state.global_step, "skipped": run.guards.skipped_updates}
    return {**about, "weights": total, "moved": moved, "losses": trl_cases.logged(run, "loss")}


def bad_loss(folder: Path, rank: int, updates: set[int]) -> Any:
    """The loss of the second process is not finite, and its gradient is."""
    run = trl_cases.trainer(folder, **SETTINGS)
    own = run._compute_loss

    def spoilt(model: Any, inputs: Any) -> torch.Tensor:
        loss: torch.Tensor = own(model, inputs)
        bad = rank == 1 and run.state.global_step + 1 in updates
        return loss + torch.full_like(loss, float("inf")) if bad else loss

    run._compute_loss = spoilt
    return run


def bad_policy(folder: Path, rank: int) -> Any:
    """One state of the first process is no number: the projection leaves it out, and all else is finite."""
    run = trl_cases.trainer(folder, **SETTINGS)

    def spoil(module: Any, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and rank == 0 and run.state.global_step == 2:
            output.last_hidden_state[1, -3] = float("nan")

    run.model.model.register_forward_hook(spoil)
    return run


def bad_reward(folder: Path, rank: int) -> Any:
    """The reward function raises on the second process."""

    def fails(completions: list[Any], **_: Any) -> list[float]:
        if rank == 1:
            raise ConnectionError("no answer")
        return trl_cases.lower_case(completions)

    return trl_cases.trainer(folder, reward_funcs=fails, **SETTINGS)


def main(folder: Path) -> None:
    """All cases, one after another."""
    faulthandler.dump_traceback_later(300, exit=True)  # whatever hangs
    rank = PartialState(cpu=True, timeout=timedelta(minutes=2)).process_index
    cases = {
        "skips": lambda at: bad_loss(at, rank, {2}),
        "stops": lambda at: bad_loss(at, rank, {2, 3}),
        "policy": lambda at: bad_policy(at, rank),
        "reward": lambda at: bad_reward(at, rank),
    }
    for name, case in cases.items():
        (folder / f"{name}.{rank}.json").write_text(json.dumps(outcome(case(folder / name))))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
