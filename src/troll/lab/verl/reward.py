"""The rewards of a task as verl's ``custom_reward_function``: what TRL would give, one completion at a time."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from troll.lab.tasks import Task, load_task
from troll.rewards.workers import PoolError

_loading = threading.Lock()


def score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, *, task: str, **_: Any
) -> Any:
    """The weighted sum of the task's rewards for one completion, as ``score``, and each of them by its name.

    Args:
        data_source, extra_info: not used; verl hands them to every reward.
        solution_str: the completion.
        ground_truth: the columns of its problem, as ``data.write_task`` writes them.
        task: the file with the request that makes the task.

    Raises:
        PoolError: no reward is known. verl cannot leave a completion out, and 0 would be a lie.
    """
    functions, weights = _rewards(task)
    columns = {name: [value] for name, value in json.loads(ground_truth).items()}
    (prompt,) = columns.pop("prompt")
    completion = solution_str if isinstance(prompt, str) else [{"role": "assistant", "content": solution_str}]
    values: list[float | None] = []
    for function in functions:
        result = function(prompts=[prompt], completions=[completion], **columns)
        values += asyncio.run(result) if inspect.iscoroutine(result) else result
    known = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
    names = [function.__name__ for function in functions]
    if not known:
        raise PoolError(
            f"no reward for a completion ({', '.join(names)} returned None)",
            "one: verl cannot leave a completion out",
            "troll doctor, if a sandbox failed; or a reward that returns a number",
        )
    each = {f"rewards/{name}": value for name, value in zip(names, values, strict=True) if value is not None}
    return {"score": sum(known), **each}


def _rewards(path: str) -> tuple[Sequence[Any], Sequence[float]]:
    with _loading:  # verl calls from many threads
        return _loaded(path)


@functools.cache
def _loaded(path: str) -> tuple[Sequence[Any], Sequence[float]]:
    from troll.rewards.sandbox import allow_unsandboxed

    request = json.loads(Path(path).read_text(encoding="utf-8"))
    allow_unsandboxed(request["unsandboxed"])
    task: Task = load_task(**request["task"])
    return task.reward_funcs, request["weights"] or [1.0] * len(task.reward_funcs)
