"""Reward functions of the user, wrapped so that an error names the function and the completion."""

from __future__ import annotations

import functools
import inspect
import math
import reprlib
import traceback
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from troll.errors import InputError
from troll.lab.tasks.task import Reward, text_of

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 200


class RewardError(InputError):
    """A reward function failed, or returned what is not a reward; the failure itself is the cause of this error."""

    returned: list[Any] | None = None
    """All that it returned, if one of its rewards is the failure: whoever asked may take the others."""


def watched(reward: Reward) -> Reward:
    """The same reward; a failure, a wrong number of results and a result that is no number become a RewardError."""
    name = getattr(reward, "__name__", type(reward).__name__)
    if isinstance(reward, type) or not callable(reward):
        raise InputError(f"the reward {name}, a {type(reward).__name__}", "a function", "f(completions, **columns)")
    if _is_async(reward):

        @functools.wraps(reward)
        async def waiting(completions: Sequence[Any], **columns: Any) -> list[float | None]:
            try:
                result = await reward(completions=completions, **columns)
            except Exception as error:
                raise _failed(reward, name, error, completions, columns) from error
            return _checked(name, result, completions)

        waiting.__name__ = name
        return waiting

    @functools.wraps(reward)
    def plain(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        try:
            result = reward(completions=completions, **columns)
        except Exception as error:
            raise _failed(reward, name, error, completions, columns) from error
        return _checked(name, result, completions)

    plain.__name__ = name
    return plain


def _failed(
    reward: Reward, name: str, error: Exception, completions: Sequence[Any], columns: dict[str, Any]
) -> Exception:
    """What to raise for an error inside a reward function."""
    if isinstance(error, InputError):
        return error
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    culprit = _culprit(reward, completions, columns)
    return RewardError(
        f"the reward {name}, which raised {type(error).__name__}: {error}{where}, on {culprit}",
        "a number or None for every completion, whatever the model wrote",
        "catching it there and returning 0, or None to leave the completion out",
    )


def _is_async(reward: Reward) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


def _culprit(reward: Reward, completions: Sequence[Any], columns: dict[str, Any]) -> str:
    """The first completion on which the reward fails alone; where none does, all of them together."""
    if not _is_async(reward):
        for i, completion in enumerate(completions):
            one = {name: _only(i, column, len(completions)) for name, column in columns.items()}
            try:
                reward(completions=[completion], **one)
            except Exception:
                return f"the completion {_shown(completion)}"
    return f"{len(completions)} completions, the first of them {_shown(completions[0]) if completions else 'missing'}"


def _only(i: int, column: Any, size: int) -> Any:
    """One row of a column; what is no column, such as TRL's trainer_state, as it is."""
    return column[i : i + 1] if isinstance(column, list) and len(column) == size else column


def _shown(completion: Any) -> str:
    return _brief.repr(text_of(completion) if isinstance(completion, str | list) else completion)


def _checked(name: str, result: Any, completions: Sequence[Any]) -> list[float | None]:
    """The rewards as plain numbers; a failure names the first that is none."""
    expected = f"a list of {len(completions)} numbers or None, one per completion"
    try:
        values = list(result)
    except TypeError:
        raise RewardError(f"the reward {name}, which returned a {type(result).__name__}", expected, "a list") from None
    if len(values) != len(completions):
        raise RewardError(
            f"the reward {name}, which returned {len(values)} rewards for {len(completions)} completions",
            expected,
            "one result for every completion, in their order",
        )
    checked: list[float | None] = []
    for value, completion in zip(values, completions, strict=True):
        number = value.item() if hasattr(value, "item") else value
        if number is not None and not (isinstance(number, Real) and math.isfinite(number)):
            failure = RewardError(
                f"the reward {name}, which returned {_brief.repr(value)} for the completion {_shown(completion)}",
                "a finite number, or None to leave the completion out",
                "checking what the function returns for this one; or --reward_errors mask",
            )
            failure.returned = values
            raise failure
        checked.append(None if number is None else float(number))
    return checked
