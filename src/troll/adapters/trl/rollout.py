"""The rollout a trainer is in the middle of, saved with a checkpoint and restored from it.

TRL makes several updates on a rollout and forgets it on resume: it generates again, and the run is another one. Here it
is written next to the model, as safetensors, one file per process.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from troll.policy import PackedPolicy

OLD_POLICY = "troll_old_policy"
_TENSORS = tuple(f.name for f in fields(PackedPolicy) if f.type == "Tensor")


def file_name(process: int) -> str:
    """Name of the file of one process inside a checkpoint."""
    return f"troll_rollout_{process:05d}.safetensors"


def save(path: Path, batches: list[dict[str, Any]], facts: dict[str, int]) -> None:
    """Write the batches of a rollout, and ``facts`` that must agree when it is read."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for number, batch in enumerate(batches):
        for key, value in batch.items():
            name = f"{number}/{key}"
            if isinstance(value, Tensor):
                tensors[name] = value.detach().contiguous().clone()
            elif key == OLD_POLICY:
                packed = PackedPolicy.stack(value)
                tensors |= {f"{name}/{field}": getattr(packed, field).contiguous() for field in _TENSORS}
                plain[name] = {"vocab_size": packed.vocab_size, "temperature": packed.temperature}
            else:
                plain[name] = value
    about = {"facts": facts, "batches": len(batches), "plain": plain}
    save_file(tensors, path, metadata={"troll": json.dumps(about)})


def facts(path: Path) -> dict[str, int]:
    """What ``save`` was told."""
    return dict(_about(path)["facts"])


def load(path: Path, device: torch.device) -> list[dict[str, Any]]:
    """Read the batches of a rollout."""
    about = _about(path)
    batches: list[dict[str, Any]] = [{} for _ in range(about["batches"])]
    parts: dict[str, dict[str, Tensor]] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118, not a dictionary
            number, key, *field = name.split("/")
            if field:
                parts.setdefault(f"{number}/{key}", {})[field[0]] = file.get_tensor(name).to(device)
            else:
                batches[int(number)][key] = file.get_tensor(name).to(device)
    for name, value in about["plain"].items():
        number, key = name.split("/")
        if key == OLD_POLICY:
            packed = _packed(parts[name], **value)
            packed.unpack()  # checks it
            value = packed.sequences()
        batches[int(number)][key] = value
    return batches


def _packed(tensors: dict[str, Tensor], **numbers: Any) -> PackedPolicy:
    return PackedPolicy(**tensors, slots=max(1, int(tensors["counts"].max())), **numbers)  # type: ignore[arg-type]


def _about(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return dict(json.loads(file.metadata()["troll"]))
