"""The batches of an update that was not made, to look at: exactly as safetensors, and as text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from troll.trl.robust import rollout_state as rollout

REWARDS = "troll_rewards"
"""[B] in a batch: the reward of each completion, NaN where there is none."""


def folder_of(output_dir: str, update: int) -> Path:
    """Where the batches of an update are written."""
    return Path(output_dir) / "skipped" / f"update-{update:06d}"


def dump(
    folder: Path,
    process: int,
    batches: list[dict[str, Any]],
    about: dict[str, Any],
    decode: Callable[[list[int]], str],
) -> None:
    """Write what one process made an update on; ``about`` says why the update was not made."""
    completions = [
        {"batch": number, "row": row, **_described(batch, row, decode)}
        for number, batch in enumerate(batches)
        for row in range(len(batch["completion_ids"]))
    ]
    rollout.save(folder / f"batch_{process:05d}.safetensors", batches, {})
    text = json.dumps(_plain({**about, "completions": completions}), indent=1, ensure_ascii=False)
    (folder / f"batch_{process:05d}.json").write_bytes(text.encode(errors="backslashreplace"))


def _described(batch: dict[str, Any], row: int, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """A completion as text, its reward and advantage, and which of its numbers are not finite."""
    prompt, counted = batch["prompt_mask"][row].bool(), batch["completion_mask"][row].bool()
    advantage = batch["advantages"][row]
    found: dict[str, Any] = {
        "prompt": decode(batch["prompt_ids"][row][prompt].tolist()),
        "completion": decode(batch["completion_ids"][row][counted].tolist()),
        "advantage": (advantage if advantage.dim() == 0 else advantage[counted]).tolist(),
    }
    if REWARDS in batch:
        found["reward"] = float(batch[REWARDS][row])
    per_row = {name: x for name, x in batch.items() if _is_number_per_token_or_row(x, batch)}
    not_finite = [name for name, x in per_row.items() if not bool(_shown(x[row], counted).isfinite().all())]
    return {**found, "not_finite": not_finite}


def _is_number_per_token_or_row(x: Any, batch: dict[str, Any]) -> bool:
    shape = batch["completion_ids"].shape
    return isinstance(x, Tensor) and x.is_floating_point() and x.shape in (shape, shape[:1])


def _shown(x: Tensor, counted: Tensor) -> Tensor:
    return x if x.dim() == 0 else x[counted]


def _plain(value: Any) -> Any:
    """JSON has no NaN: such numbers become words."""
    if isinstance(value, dict):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
