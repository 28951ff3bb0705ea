"""The rollout a trainer is in the middle of, and where it is in the data: saved with a checkpoint, restored from it.

TRL makes several updates on a rollout and forgets it on resume: it generates again, and the run is another one; and its
sampler begins every resumed epoch with the order of the first one. Here both are written next to the model, as
safetensors, one file per process.
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

OLD_POLICY = "troll_old_policy"
BOUND_MEAN = "troll_bound_mean"
"""Of what the bound of a token is relative to, over the counted tokens of the whole rollout, []."""
ADVANTAGE_SIZE = "troll_advantage_size"
"""Mean |A| over the counted tokens of the whole rollout, []."""
_SAMPLER = "sampler"
_TENSORS = tuple(f.name for f in fields(PackedPolicy) if f.type == "Tensor")


def file_name(process: int) -> str:
    """Name of the file of one process inside a checkpoint."""
    return f"troll_rollout_{process:05d}.safetensors"


class Sampler(torch.utils.data.Sampler[int]):
    """TRL's sampler, and the state its generator had before the order of the epoch was drawn."""

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
        """Of the generator; None if nothing is shuffled."""
        return self.stock.generator.get_state() if self.stock.shuffle else None

    def resume(self, state: Tensor) -> None:
        """Go on from a saved state."""
        if self.stock.shuffle:
            self.stock.generator.set_state(state)


def save(path: Path, batches: list[dict[str, Any]], facts: dict[str, float], sampler: Tensor | None = None) -> None:
    """Write the batches of a rollout, ``facts`` that must agree when it is read, and the place of the sampler."""
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
    about = {"facts": facts, "batches": len(batches), "plain": plain}
    path.parent.mkdir(parents=True, exist_ok=True)  # another process may not have made it yet
    save_file(tensors, path, metadata={"troll": json.dumps(about)})


def facts(path: Path) -> dict[str, float]:
    """What ``save`` was told."""
    return dict(_about(path)["facts"])


def sampler(path: Path) -> Tensor | None:
    """The place of the sampler, if it was saved."""
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
            packed.unpack()  # checks it
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
            f"{path}, which cannot be read ({error})",
            "the rollout of a checkpoint",
            "an earlier checkpoint; or deleting this file: the rollout is generated again then",
        ) from error
