"""``load_task``: a task by name, or from a Python file of the user."""

from __future__ import annotations

import importlib
import runpy
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from datasets import Dataset

from troll.errors import InputError, suggestion
from troll.lab.tasks.data import Record, as_record, check_size, field, split, to_dataset
from troll.lab.tasks.task import Request, Reward, Task, first_line

_TASKS = {  # name: (module, one line)
    "arithmetic": ("generated", "sums as plain few-shot text; options digits, operations, shots"),
    "gym:NAME": (
        "generated",
        "any problem generator of reasoning-gym, e.g. gym:gcd; its config fields are options, and shots",
    ),
    "gsm8k": ("problem_sets", "grade-school word problems; --data for a file with question and answer"),
    "math": ("problem_sets", "competition mathematics; --data for a file with problem and answer"),
    "mbpp": ("problem_sets", "short Python functions, tested in a sandbox"),
    "humaneval": ("problem_sets", "Python functions from their signature and docstring, tested in a sandbox"),
    "code": ("problem_sets", "programming problems: --data with prompt and tests (functions or standard input)"),
    "FILE.py": ("load", "your own task: train_dataset, eval_dataset and reward in a Python file"),
    "data": ("data", "any dataset with a prompt column: needs --data and --reward"),
}
_FILE_DEFINES = (
    "A task file defines train_dataset and eval_dataset (lists of {'prompt': …}) and reward(completions, **columns), "
    "or load() -> Task; see examples/tasks"
)


def task_names() -> dict[str, str]:
    """Every task with a one-line description."""
    return {name: line for name, (_, line) in _TASKS.items()}


def load_task(
    name: str = "arithmetic",
    *,
    data: str | None = None,
    eval_data: str | None = None,
    options: Mapping[str, Any] | None = None,
    reward: Sequence[str] = (),
    train_size: int | None = None,
    eval_size: int | None = None,
    seed: int = 0,
) -> Task:
    """The task of this name.

    Args:
        name: one of ``task_names()``.
        data: the training problems: a .jsonl, .json, .parquet or .csv file, or a dataset on the hub as ``owner/name``
            or ``owner/name:subset`` (its split ``train``; ``test`` for ``eval_data``).
        eval_data: the held-out problems. By default they are the task's test set, or a part of ``data``.
        options: options of the task, such as ``digits`` for arithmetic. Strings are converted to the option's type.
        reward: reward functions, ``module:function`` or ``file.py:function``, which replace those of the task.
        train_size, eval_size: the number of problems. By default all, or the usual number for a generated task.
        seed: for the training problems. The held-out problems do not depend on it.
    """
    names = [reward] if isinstance(reward, str) else list(reward)
    request = Request(name, data, eval_data, dict(options or {}), train_size, eval_size, seed)
    reward_funcs = [find_reward(function) for function in names]
    kind = "FILE.py" if name.endswith(".py") else "gym:NAME" if name.startswith("gym:") else name
    if kind not in _TASKS or name in ("FILE.py", "gym:NAME"):
        near = suggestion(name, _TASKS)
        fix = f"Did you mean {near!r}?" if near else f"The tasks are {', '.join(_TASKS)}"
        raise InputError(f"There is no task {name!r}", fix)
    if kind == "data" and not reward_funcs:
        raise InputError("--task data needs a reward function", "Pass --reward my_rewards.py:function")
    module = importlib.import_module(f"troll.lab.tasks.{_TASKS[kind][0]}")
    task: Task = _load_from_file(request) if kind == "FILE.py" else module.load(request)
    return replace(task, reward_funcs=[_as_reward(f) for f in reward_funcs or task.reward_funcs])


def find_reward(name: str) -> Reward:
    """The reward function named ``package.module:function`` or ``file.py:function``."""
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function.isidentifier():
        raise InputError(
            f"The reward {name!r} is not of the form module:function or file.py:function",
            "For example: --reward my_rewards.py:exact",
        )
    if place.endswith(".py"):
        value = load_file(Path(place)).get(function)
    else:
        try:
            value = getattr(importlib.import_module(place), function, None)
        except ImportError as error:
            raise InputError(
                f"Cannot import the module of the reward {name!r}: {error}", "Use its full name, or file.py:function"
            ) from error
    if value is None:
        raise InputError(f"{place} defines no function {function!r}", f"Define it, or correct --reward {name}")
    if not callable(value):
        raise InputError(f"The reward {name!r} is a {type(value).__name__}, not a function", "Name a function")
    return value  # type: ignore[no-any-return]


def _as_reward(reward: Any) -> Reward:
    """The reward with a ``__name__``, which TRL needs; a class is refused."""
    function = getattr(reward, "func", reward)  # of functools.partial
    name = getattr(function, "__name__", type(function).__name__)
    if isinstance(reward, type) or not callable(reward):
        raise InputError(
            f"The reward {name} is a {type(reward).__name__}, not a function",
            "Define it as f(completions, **columns), or use an instance of the class",
        )
    if not hasattr(reward, "__name__"):
        reward.__name__ = name
    return cast("Reward", reward)


def load_file(path: Path) -> dict[str, Any]:
    """The names that a Python file defines. It may import modules from its folder. Errors name the line."""
    if not path.is_file():
        raise InputError(f"The file {path} does not exist", f"Relative paths start in {Path.cwd()}")
    sys.path.insert(0, str(path.resolve().parent))
    try:
        return runpy.run_path(str(path))
    except SyntaxError as error:
        raise InputError(f"{error.filename}, line {error.lineno}: {error.msg}", "Correct this line") from error
    except (Exception, SystemExit) as error:
        raise InputError(_location(path, error), "Correct this line") from error
    finally:
        sys.path.pop(0)


def _location(path: Path, error: BaseException) -> str:
    """The file, its last line that was reached, and the error."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f"{path}, line {lines[-1] if lines else 1}: {type(error).__name__}: {error}"


def _load_from_file(request: Request) -> Task:
    """The task that a Python file defines."""
    request.refuse_data()
    request.choose({})
    path = Path(request.name)
    names = load_file(path)
    if "load" in names:
        return _load_returned(path, names["load"], request)
    missing = [name for name in ("train_dataset", "eval_dataset", "reward") if name not in names]
    if missing:
        raise InputError(f"{path} does not define {' and '.join(missing)}", _FILE_DEFINES)
    rewards = names["reward"] if isinstance(names["reward"], list | tuple) else [names["reward"]]
    if not rewards or not all(map(callable, rewards)):
        raise InputError(
            f"{path}: reward must be a function or a list of functions, got {names['reward']!r}", _FILE_DEFINES
        )
    train, held_out = split(request, *(_rows(path, name, names[name]) for name in ("train_dataset", "eval_dataset")))
    doc = (names.get("__doc__") or f"the task in {path.name}").strip().splitlines()[0]
    return Task(
        name=names.get("name", path.stem),
        description=names.get("description", doc),
        train_dataset=to_dataset(train),
        eval_dataset=to_dataset(held_out),
        reward_funcs=list(rewards),
        answer_of=names.get("answer_of", first_line),
        stop=names.get("stop"),
        settings=names.get("settings", {}),
    )


def _load_returned(path: Path, load: Any, request: Request) -> Task:
    """The task that ``load()`` of a file returns, cut to the requested sizes."""
    try:
        task = load()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"load() failed in {_location(path, error)}", "Correct this line") from error
    if not isinstance(task, Task):
        raise InputError(f"{path}: load() returned a {type(task).__name__}", "Return a troll.lab.tasks.Task")
    for name in ("train_dataset", "eval_dataset"):
        data = getattr(task, name)
        if not isinstance(data, Dataset) or "prompt" not in data.column_names or not len(data):
            raise InputError(
                f"{path}: {name} must be a non-empty datasets.Dataset with a column 'prompt', got {data!r}",
                "Build it with Dataset.from_list",
            )
    sizes = {"train_dataset": request.train_size, "eval_dataset": request.eval_size}
    for name, size in sizes.items():
        if size is not None:
            check_size(getattr(task, name), size, name.replace("dataset", "size"), str(path))
            task = replace(task, **{name: getattr(task, name).select(range(size))})
    return task


def _rows(path: Path, name: str, rows: Any) -> list[Record]:
    if isinstance(rows, Mapping | str) or not isinstance(rows, Iterable):
        raise InputError(
            f"{path}: {name} must be a list of {{'prompt': …}}, got a {type(rows).__name__}", _FILE_DEFINES
        )
    records = [as_record(row, f"{path}, {name}[{i}]") for i, row in enumerate(rows)]
    for record in records:
        field(record, "prompt", (str, list))
    if not records:
        raise InputError(f"{path}: {name} is empty", "At least one problem is needed")
    return records
