"""State of optimizers, schedulers and random generators as safetensors and JSON: reading it runs no code.

Any tree of dictionaries, lists and tuples with tensors, arrays, numbers and text at its leaves. Tensors go into the
body of the file, the tree into its header.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from troll.errors import InputError

_HEADER = "troll"


def save_state(path: Path, tree: Any) -> None:
    """Write a tree to one file."""
    tensors: dict[str, Tensor] = {}
    header = json.dumps(_taken_apart(tree, tensors))
    save_file(_apart(tensors), path, metadata={_HEADER: header})


def load_state(path: Path) -> Any:
    """Read it again, on the CPU, as it was: same types, same bits."""
    try:
        with safe_open(path, framework="pt") as file:
            # a copy: the file may be deleted while the run goes on, and would keep its place on the disk
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return _put_together(json.loads(file.metadata()[_HEADER]), tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}, which cannot be read ({error})", "state as troll saves it", "an earlier checkpoint"
        ) from error


def state_bytes(tree: Any) -> int:
    """How many bytes its tensors take."""
    tensors: dict[str, Tensor] = {}
    _taken_apart(tree, tensors)
    return sum(x.nbytes for x in tensors.values())


def _taken_apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {"dict": [[k, _taken_apart(v, tensors)] for k, v in value.items() if _is_key(k)]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_taken_apart(x, tensors) for x in value]}
    if type(value) in (Tensor, torch.nn.Parameter, np.ndarray):
        kind = "array" if isinstance(value, np.ndarray) else "tensor"
        tensor = torch.from_numpy(value) if kind == "array" else value.detach()
        name = str(len(tensors))
        tensors[name] = tensor
        return {kind: name}
    raise InputError(
        f"state with a {type(value).__name__} in it",
        "tensors, numbers and text: nothing else is saved without pickle",
        "another optimizer, such as --optim adamw_torch",
    )


def _is_key(key: Any) -> bool:
    if not isinstance(key, str | int):
        raise InputError(f"state with a key of type {type(key).__name__}", "text or whole numbers", "another optimizer")
    return True


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, each in memory of its own: safetensors takes nothing else."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        place = whole.untyped_storage().data_ptr()
        apart[name] = whole.clone() if place in seen or whole.untyped_storage().nbytes() != whole.nbytes else whole
        seen.add(place)
    return apart


def _put_together(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {k: _put_together(v, tensors) for k, v in inner}
    if kind in ("list", "tuple"):
        items = [_put_together(x, tensors) for x in inner]
        return items if kind == "list" else tuple(items)
    return tensors[inner].numpy() if kind == "array" else tensors[inner]
