"""A task in a Python file of one's own: ``train`` and ``held_out``, and a ``reward``; or a function ``load``."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from troll.errors import InputError
from troll.lab.tasks.data import enough, splits
from troll.lab.tasks.records import Record, as_record, need, to_dataset
from troll.lab.tasks.task import Request, Task, first_line

_CONTRACT = "train, held_out (lists of {'prompt': …}) and reward(completions, **columns); or load() -> Task"


def load_file(path: Path) -> dict[str, Any]:
    """The names a Python file defines; it may import its neighbours. An error in it says the line."""
    if not path.is_file():
        raise InputError(f"{path}, which does not exist", "a Python file", "the path from the folder you are in")
    sys.path.insert(0, str(path.resolve().parent))
    try:
        return runpy.run_path(str(path))
    except SyntaxError as error:
        where, what = f"{error.filename}, line {error.lineno}", error.msg
        raise InputError(f"{where}: {what}", "Python that compiles", "mending that line") from error
    except (Exception, SystemExit) as error:
        raise InputError(_place(path, error), "a file that can be imported", "mending that line") from error
    finally:
        sys.path.pop(0)


def _place(path: Path, error: BaseException) -> str:
    """File, the last line of it that was reached, and what went wrong."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f"{path}, line {lines[-1] if lines else 1}: {type(error).__name__}: {error}"


def load(request: Request) -> Task:
    """The task a Python file defines."""
    request.refuse_data()
    request.choose({})
    path = Path(request.name)
    names = load_file(path)
    if "load" in names:
        return _returned(path, names["load"], request)
    missing = [name for name in ("train", "held_out", "reward") if name not in names]
    if missing:
        raise InputError(f"{path}, which does not define {' and '.join(missing)}", _CONTRACT, "examples/tasks")
    rewards = names["reward"] if isinstance(names["reward"], list | tuple) else [names["reward"]]
    if not rewards or not all(map(callable, rewards)):
        raise InputError(f"{path}, reward={names['reward']!r}", "a function, or a list of functions", _CONTRACT)
    train, held_out = splits(request, *(_records(path, name, names[name]) for name in ("train", "held_out")))
    doc = (names.get("__doc__") or f"the task in {path.name}").strip().splitlines()[0]
    return Task(
        name=names.get("name", path.stem),
        description=names.get("description", doc),
        train=to_dataset(train),
        held_out=to_dataset(held_out),
        reward_funcs=list(rewards),
        answer_of=names.get("answer_of", first_line),
        stop=names.get("stop"),
        settings=names.get("settings", {}),
    )


def _returned(path: Path, load: Any, request: Request) -> Task:
    try:
        task = load()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"load() of {_place(path, error)}", "a Task", "mending that line") from error
    if not isinstance(task, Task):
        raise InputError(f"{path}, where load() returned a {type(task).__name__}", "a troll.lab.tasks.Task", _CONTRACT)
    for name in ("train", "held_out"):
        data = getattr(task, name)
        if not isinstance(data, Dataset) or "prompt" not in data.column_names or not len(data):
            raise InputError(
                f"{path}, where {name} of the task is {data!r}", "a datasets.Dataset with 'prompt'", "Dataset.from_list"
            )
    sizes = {"train": request.train_size, "held_out": request.held_out_size}
    for name, size in sizes.items():
        if size is not None:
            enough(getattr(task, name), size, f"{name}_size", str(path))
            task = replace(task, **{name: getattr(task, name).select(range(size))})
    return task


def _records(path: Path, name: str, rows: Any) -> list[Record]:
    if isinstance(rows, Mapping | str) or not isinstance(rows, Iterable):
        raise InputError(f"{path}, {name} is a {type(rows).__name__}", "a list of {'prompt': …}", "examples/tasks")
    records = [as_record(row, f"{path}, {name}[{i}]") for i, row in enumerate(rows)]
    for record in records:
        need(record, "prompt", (str, list))
    if not records:
        raise InputError(f"{path}, where {name} is empty", "at least one problem", "examples/tasks")
    return records
