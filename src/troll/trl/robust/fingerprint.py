"""What makes a run the run it is: its settings, the code it runs and the data it reads."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import troll
from troll.trl.robust.changes import decides

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "vllm")
APART = ("attacks", "cli", "report", "runs", "adapters/verl", "training/verl")
"""Parts of troll that no update runs through."""
_ROWS = 32  # of the data, whose text is hashed


def identity(trainer: Any) -> dict[str, Any]:
    """Of a ``TROLLTrainer``, as JSON takes it; two that are equal make the same updates, on the same hardware.

    Nothing in it depends on the folder the command is run in, the time, or the number of threads.
    """
    return {
        "settings": settings(trainer.args),
        "processes": trainer.accelerator.num_processes,
        "model": _model(trainer.model),
        "rewards": _rewards(trainer),
        "data": {"train": _data(trainer.train_dataset), "held_out": _data(trainer.eval_dataset)},
        "versions": versions(),
        "code": dict(sources()),
    }


def settings(args: Any) -> dict[str, Any]:
    """Those that can change the course of a run."""
    return {name: _plain(value) for name, value in args.to_dict().items() if decides(name)}


def versions() -> dict[str, str]:
    """Of Python, troll and the packages that decide what an update does."""
    found = {"python": platform.python_version(), "troll": troll.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def sources() -> tuple[tuple[str, str], ...]:
    """File → hash, of troll's own code."""
    root = Path(troll.__file__).parent
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    kept = sorted(name for name in files if not name.startswith(tuple(f"{x}/" for x in APART)))
    return tuple((name, _hash(files[name].read_bytes())) for name in kept)


def _model(model: Any) -> dict[str, Any]:
    """Its weights come from the checkpoint; this is what they have to fit."""
    parameters = list(model.parameters())
    return {
        "class": type(model).__name__.removeprefix("FSDP"),  # as fully_shard names it
        "parameters": sum(x.numel() for x in parameters),
        "trained": sum(x.numel() for x in parameters if x.requires_grad),
    }


def _rewards(trainer: Any) -> dict[str, Any]:
    """Name → hash of the code of every reward function; a reward model is its name."""
    found: dict[str, Any] = {}
    for name, reward in zip(trainer.reward_func_names, trainer.reward_funcs, strict=True):
        model: Any = getattr(reward, "config", None)
        found[name] = str(model._name_or_path) if hasattr(model, "_name_or_path") else _code(reward)
    return found


def _code(reward: Any) -> str:
    """Hash of the file a reward comes from; of the function alone where the file is the script that trains.

    Where there is no source, as of what is written in C, its name is all there is.
    """
    function = inspect.unwrap(reward if inspect.isroutine(reward) else getattr(reward, "func", type(reward)))
    try:
        if getattr(function, "__module__", None) == "__main__":
            return _hash(inspect.getsource(function).encode())
        return _hash(Path(inspect.getfile(function)).read_bytes())
    except (OSError, TypeError):
        return str(getattr(function, "__qualname__", type(function).__qualname__))


def _data(data: Any) -> Any:
    """Rows, columns, and a hash of the first rows; of what comes as a stream, the columns."""
    if data is None:
        return None
    if isinstance(data, Mapping):
        return {name: _data(part) for name, part in data.items()}
    columns = getattr(data, "column_names", None)
    if not hasattr(data, "__len__"):
        return {"columns": columns}
    plain = data.with_format(None) if hasattr(data, "with_format") else data  # without a transform that may be random
    rows = [plain[i] for i in range(min(_ROWS, len(data)))]
    text = json.dumps(_plain(rows), sort_keys=True)
    return {"rows": len(data), "columns": columns, "first_rows": _hash(text.encode())}


def _plain(value: Any) -> Any:
    """As JSON takes it; of what is neither text nor number nor made of these, the kind."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | type(None)) else f"<{type(value).__name__}>"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
