"""The current rollout and the position in the dataset, saved in a checkpoint as safetensors, one file per process.

TRL drops the rollout on resume and generates another one, so the run differs from an uninterrupted one; and its sampler
starts every resumed epoch with the order of the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from trl.trainer.utils import RepeatSampler

from troll.errors import InputError
from troll.policy import PackedPolicy
from troll.trl.passes import OLD_POLICY

_SAMPLER = "sampler"
_TENSORS = tuple(f.name for f in fields(PackedPolicy) if f.type == "Tensor")


def file_name(process: int) -> str:
    """Name of the rollout file of a process in a checkpoint."""
    return f"troll_rollout_{process:05d}.safetensors"


class Sampler(torch.utils.data.Sampler[int]):
    """TRL's sampler, and its generator's state before it drew the order of the epoch."""

    def __init__(self, stock: RepeatSampler) -> None:
        self.stock = stock
        self.before: Tensor | None = None

    def __len__(self) -> int:
        return len(self.stock)

    def __iter__(self) -> Iterator[int]:
        self.before = self.state
        return iter(self.stock)

    @property
    def state(self) -> Tensor | None:
        """The generator's state; None without shuffling."""
        return self.stock.generator.get_state() if self.stock.shuffle else None

    def resume(self, state: Tensor) -> None:
        """Set the generator to a saved state."""
        if self.stock.shuffle:
            self.stock.generator.set_state(state)


def save(path: Path, batches: list[dict[str, Any]], schedule: dict[str, float], sampler: Tensor | None = None) -> None:
    """Write the batches of a rollout, the ``schedule`` they were made for, and the sampler's state."""
    tensors: dict[str, Tensor] = {} if sampler is None else {_SAMPLER: sampler}
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
    about = {"facts": schedule, "batches": len(batches), "plain": plain}
    path.parent.mkdir(parents=True, exist_ok=True)  # another process may not have created it yet
    save_file(tensors, path, metadata={"troll": json.dumps(about)})


def schedule(path: Path) -> dict[str, float]:
    """The schedule that the batches in the file were made for."""
    return dict(_about(path)["facts"])


def sampler(path: Path) -> Tensor | None:
    """The sampler's state in the file, if any."""
    with _opened(path) as file:
        return file.get_tensor(_SAMPLER) if _SAMPLER in file.keys() else None  # noqa: SIM118, not a dictionary


def load(path: Path, device: torch.device) -> list[dict[str, Any]]:
    """Read the batches of a rollout."""
    about = _about(path)
    batches: list[dict[str, Any]] = [{} for _ in range(about["batches"])]
    parts: dict[str, dict[str, Tensor]] = {}
    with _opened(path) as file:
        for name in set(file.keys()) - {_SAMPLER}:
            number, key, *field = name.split("/")
            if field:
                parts.setdefault(f"{number}/{key}", {})[field[0]] = file.get_tensor(name).to(device)
            else:
                batches[int(number)][key] = file.get_tensor(name).to(device)
    for name, value in about["plain"].items():
        number, key = name.split("/")
        if key == OLD_POLICY:
            packed = _packed(parts[name], **value)
            packed.unpack()  # for its checks
            value = packed.sequences()
        batches[int(number)][key] = value
    return batches


def _packed(tensors: dict[str, Tensor], **numbers: Any) -> PackedPolicy:
    return PackedPolicy(**tensors, slots=max(1, int(tensors["counts"].max())), **numbers)  # type: ignore[arg-type]


def _about(path: Path) -> dict[str, Any]:
    with _opened(path) as file:
        return dict(json.loads(file.metadata()["troll"]))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise InputError(
            f"the rollout file {path} cannot be read ({error})",
            "Resume from an earlier checkpoint, or delete this file to generate the rollout again",
        ) from error
