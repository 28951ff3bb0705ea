"""The state of a run besides the model, as safetensors: optimizer, random generators, metrics, the current rollout.

``save_state`` writes a tree of dictionaries, lists and tuples with tensors, arrays, numbers and text at its leaves.
Tensors go into the body of a safetensors file, the tree into its header as JSON: loading it runs no code.

``save_rollout`` writes the current rollout and the position in the dataset, one file per process. TRL drops the rollout
on resume and generates another one, so the run differs from an uninterrupted one; and its sampler starts every resumed
epoch with the order of the first.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from trl.trainer.utils import RepeatSampler

from troll.errors import InputError
from troll.policy import PackedPolicy
from troll.trl.passes import OLD_POLICY

_HEADER = "troll"
_TEXTS = ("prompt", "completion", "advantages")
_TABLES = ("rewards", "extra")


def save_state(path: Path, tree: Any) -> None:
    """Write a tree to a file."""
    tensors: dict[str, Tensor] = {}
    header = json.dumps(_encode(tree, tensors))
    save_file(_separate(tensors), path, metadata={_HEADER: header})


def load_state(path: Path) -> Any:
    """Read a tree from a file, on the CPU: same types, same bits."""
    try:
        with safe_open(path, framework="pt") as file:
            # a copy: the file may be deleted during the run, and a mapping would keep its space on the disk
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return _decode(json.loads(file.metadata()[_HEADER]), tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error})", "Resume from an earlier checkpoint") from error


def state_bytes(tree: Any) -> int:
    """Number of bytes of the tensors in a tree."""
    tensors: dict[str, Tensor] = {}
    _encode(tree, tensors)
    return sum(x.nbytes for x in tensors.values())


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {"dict": [[k, _encode(v, tensors)] for k, v in value.items() if _is_key(k)]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(x, tensors) for x in value]}
    if type(value) in (Tensor, torch.nn.Parameter, np.ndarray):
        kind = "array" if isinstance(value, np.ndarray) else "tensor"
        tensor = torch.from_numpy(value) if kind == "array" else value.detach()
        name = str(len(tensors))
        tensors[name] = tensor
        return {kind: name}
    raise InputError(
        f"the optimizer's state contains a {type(value).__name__}, which cannot be saved without pickle",
        "Use another optimizer, for example optim='adamw_torch'",
    )


def _is_key(key: Any) -> bool:
    if not isinstance(key, str | int):
        raise InputError(
            f"the optimizer's state has a key of type {type(key).__name__}, not a string or an integer",
            "Use another optimizer, for example optim='adamw_torch'",
        )
    return True


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that share no memory, as safetensors requires."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        place = whole.untyped_storage().data_ptr()
        separate[name] = whole.clone() if place in seen or whole.untyped_storage().nbytes() != whole.nbytes else whole
        seen.add(place)
    return separate


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {k: _decode(v, tensors) for k, v in inner}
    if kind in ("list", "tuple"):
        items = [_decode(x, tensors) for x in inner]
        return items if kind == "list" else tuple(items)
    return tensors[inner].numpy() if kind == "array" else tensors[inner]


# ---------------------------------------------------------------------- one process: random generators, metrics


def random_state() -> dict[str, Any]:
    """State of the random generators of Python, numpy, torch, and torch on the accelerator of this process."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    state["numpy"] = np.random.get_state()  # noqa: NPY002, the global generator
    if torch.accelerator.is_available():
        state["accelerator"] = _accelerator().get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set all random generators to a saved state."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "accelerator" in state and torch.accelerator.is_available():
        _accelerator().set_rng_state(state["accelerator"])


def logging_state(trainer: Any) -> dict[str, Any]:
    """Metrics since the last log, the running loss, and the completions of TRL's table."""
    logs = trainer._logs if trainer.log_completions else {}
    return {
        "metrics": {mode: {name: list(x) for name, x in metrics.items()} for mode, metrics in trainer._metrics.items()},
        "loss": float(trainer._tr_loss),
        "total_loss": float(trainer._total_loss_scalar),
        "logged": trainer._globalstep_last_logged,
        "completions": {name: list(logs[name]) for name in _TEXTS if name in logs and _is_plain(logs[name])},
        "tables": {name: {k: list(x) for k, x in logs.get(name, {}).items() if _is_plain(x)} for name in _TABLES},
    }


def restore_logging(trainer: Any, state: dict[str, Any]) -> None:
    """Set the metrics, loss and completions to a saved state."""
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
    """Whether the values are text and numbers; images are not saved."""
    try:
        json.dumps(list(values))
    except TypeError:
        return False
    return True


# ---------------------------------------------------------------------- the current rollout, and the sampler

_SAMPLER = "sampler"
_TENSORS = tuple(f.name for f in fields(PackedPolicy) if f.type == "Tensor")


def rollout_file(process: int) -> str:
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


def save_rollout(
    path: Path, batches: list[dict[str, Any]], schedule: dict[str, float], sampler: Tensor | None = None
) -> None:
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


def rollout_schedule(path: Path) -> dict[str, float]:
    """The schedule that the batches in the file were made for."""
    return dict(_about(path)["facts"])


def sampler_state(path: Path) -> Tensor | None:
    """The sampler's state in the file, if any."""
    with _opened(path) as file:
        return file.get_tensor(_SAMPLER) if _SAMPLER in file.keys() else None  # noqa: SIM118, not a dictionary


def load_rollout(path: Path, device: torch.device) -> list[dict[str, Any]]:
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
