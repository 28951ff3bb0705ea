"""From the name of a task to the task."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from troll.errors import InputError
from troll.lab.tasks.rewards import find_reward, watched
from troll.lab.tasks.task import Request, Task

_TASKS = {  # name: (module, one line)
    "arithmetic": ("arithmetic", "sums as plain few-shot text; options digits, operations, shots"),
    "gym:NAME": ("gym", "any of reasoning-gym's problem makers, e.g. gym:gcd; its config is the options, and shots"),
    "gsm8k": ("word_problems", "grade-school word problems; --data for a file with question and answer"),
    "math": ("word_problems", "competition mathematics; --data for a file with problem and answer"),
    "mbpp": ("programs", "short Python functions, run against their tests in a sandbox"),
    "humaneval": ("programs", "Python functions from their signature and docstring, run in a sandbox"),
    "code": ("programs", "any programming problems: --data with prompt and tests, of functions or standard input"),
    "FILE.py": ("python_file", "a task of your own: train, held_out and reward in a Python file"),
    "data": ("data", "any data with a prompt column: needs --data and --reward"),
}


def task_names() -> dict[str, str]:
    """Every task, with one line about it."""
    return {name: line for name, (_, line) in _TASKS.items()}


def load_task(
    name: str = "arithmetic",
    *,
    data: str | None = None,
    eval_data: str | None = None,
    options: Mapping[str, Any] | None = None,
    reward: Sequence[str] = (),
    train_size: int | None = None,
    held_out_size: int | None = None,
    seed: int = 0,
) -> Task:
    """The task of this name, ready to train on.

    Args:
        name: one of ``task_names()``.
        data: the problems to train on: a .jsonl, .json, .parquet or .csv file, or a data set on the hub, as
            ``owner/name`` or ``owner/name:subset``, of which the split ``train`` is taken (``test`` for ``eval_data``).
        eval_data: the held-out problems; without it, some of ``data`` are held out, or the task's usual test set is.
        options: of the task, such as ``digits`` for arithmetic. Strings are read as the type the option has.
        reward: reward functions, ``module:function`` or ``file.py:function``, in place of the task's own.
        train_size, held_out_size: how many problems; without them all there are, or as many as the task usually makes.
        seed: of the problems to train on. The held-out problems do not depend on it.
    """
    given = [reward] if isinstance(reward, str) else list(reward)
    request = Request(name, data, eval_data, dict(options or {}), train_size, held_out_size, seed)
    functions = [find_reward(function) for function in given]
    kind = "FILE.py" if name.endswith(".py") else "gym:NAME" if name.startswith("gym:") else name
    if kind not in _TASKS or name in ("FILE.py", "gym:NAME"):
        close = difflib.get_close_matches(name, _TASKS, n=1)
        hint = close[0] if close else "arithmetic, or a file that ends in .py"
        raise InputError(f"the task {name!r}", ", ".join(_TASKS), hint)
    if kind == "data" and not functions:
        raise InputError('the task "data" without a reward', "a reward function", "--reward my_rewards.py:function")
    task: Task = importlib.import_module(f"troll.lab.tasks.{_TASKS[kind][0]}").load(request)
    return dataclasses.replace(task, reward_funcs=[watched(f) for f in functions or task.reward_funcs])
