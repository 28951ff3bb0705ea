"""State in a checkpoint besides the model: optimizer, scheduler, random generators, metrics not logged yet.

``save_state`` writes a tree of dictionaries, lists and tuples with tensors, arrays, numbers and text at its leaves.
Tensors go into the body of a safetensors file, the tree into its header as JSON: loading it runs no code.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from troll.errors import InputError

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
