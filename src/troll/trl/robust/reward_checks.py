"""Checks around reward functions: a finite number or None for every completion, else an error that names the place.

Training (``reward_validation``), evaluation and verl call rewards through this one wrapper. It needs no TRL. A wrapped
function never raises, since other processes would wait forever: an invalid reward becomes ``inf``, travels to all
processes with the valid ones, and is handled there.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import reprlib
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from troll.errors import InputError

OnInvalidReward = Literal["raise", "mask"]
LARGEST = 1e15  # the square of a larger reward leaves float32, and TRL's advantages would be 0
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 200


class Fault(NamedTuple):
    """An invalid result of a reward function."""

    kind: tuple[str, str]
    """Function and kind of failure; each kind is logged once."""
    error: InputError


class RewardChecks:
    """Wraps the reward functions of one call and collects their faults.

    Args:
        functions: reward functions or models, as TRL takes them.
        names: their names.
        locate: whether to call a failing function again, one completion at a time, to name the one it fails on.
    """

    def __init__(self, functions: Sequence[Any], names: Sequence[str], locate: bool = True) -> None:
        self.faults: list[Fault] = []
        self.functions = [self._wrapped(function, name) for function, name in zip(functions, names, strict=True)]
        self._models = torch.tensor([isinstance(function, nn.Module) for function in functions], dtype=torch.bool)
        self._names, self._locate = names, locate

    def invalid(self, rewards: Tensor) -> Tensor:
        """[B] whether a reward of the completion is invalid, from the rewards of all processes [B, functions]."""
        of_models = self._models.to(rewards.device)
        bad = rewards.isinf() | ((rewards.isnan() | (rewards.abs() > LARGEST)) & of_models)
        return bad.any(1)

    def explain(self, rewards: Tensor) -> InputError:
        """The error for the first invalid reward; for those of reward models, which report no fault."""
        row = int(self.invalid(rewards).nonzero()[0])
        values = rewards[row]
        worst = int((~(values.abs() <= LARGEST)).nonzero()[0])
        return _invalid_value(float(values[worst]), self._names[worst], row, None)

    def _wrapped(self, function: Any, name: str) -> Any:
        if isinstance(function, nn.Module):
            return _CheckedModel(function, functools.partial(self._failed, name))
        if is_async(function):

            async def awaited(**columns: Any) -> list[float | None]:
                try:
                    result = await function(**columns)
                except Exception as error:
                    return self._raised(function, name, columns, error)
                return self._checked(name, columns["completions"], result)

            return awaited

        def called(**columns: Any) -> list[float | None]:
            try:
                result = function(**columns)
            except Exception as error:
                return self._raised(function, name, columns, error)
            return self._checked(name, columns["completions"], result)

        return called

    def _failed(self, name: str, error: Exception, place: str = "") -> None:
        if not isinstance(error, InputError):
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
            line = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
            cause, error = (
                error,
                InputError(
                    f"the reward function {name!r} raised {type(error).__name__}: {error}{line}{place}",
                    "Catch the exception there and return None to leave the completion out, or set "
                    "on_invalid_reward='mask'",
                ),
            )
            error.__cause__ = cause
        self.faults.append(Fault((name, "raised"), error))

    def _raised(self, function: Any, name: str, columns: dict[str, Any], error: Exception) -> list[float | None]:
        completions = columns["completions"]
        place = f", on {_culprit(function, columns)}" if self._locate and not isinstance(error, InputError) else ""
        self._failed(name, error, place)
        return [math.inf] * len(completions)

    def _checked(self, name: str, completions: Sequence[Any], result: Any) -> list[float | None]:
        fix = f"Return a list of {len(completions)} numbers or None, one per completion, in their order"
        try:
            values = result.tolist() if hasattr(result, "tolist") else list(result)
            usable = isinstance(values, list) and not isinstance(result, str | bytes | dict | set | frozenset)
        except Exception:
            usable = False
        if not usable:
            problem = f"the reward function {name!r} returned {_brief.repr(result)} instead of a list"
            self.faults.append(Fault((name, "no list"), InputError(problem, fix)))
            return [math.inf] * len(completions)
        if len(values) != len(completions):
            count = f"{len(values)} rewards for {len(completions)} completions"
            problem = f"the reward function {name!r} returned {count}"
            self.faults.append(Fault((name, "length"), InputError(problem, fix)))
            return [math.inf] * len(completions)
        numbers: list[float | None] = []
        for i, (value, completion) in enumerate(zip(values, completions, strict=True)):
            number = None if value is None else _number(value)
            if number is not None and not abs(number) <= LARGEST:
                self.faults.append(Fault((name, "value"), _invalid_value(value, name, i, completion)))
                number = math.inf
            numbers.append(number)
        return numbers


def checked_rewards(functions: Sequence[Callable[..., Any]], **columns: Any) -> list[list[float | None]]:
    """Rewards of each function for ``columns["completions"]``, outside of a trainer; raises on the first fault."""
    names = [reward_name(function) for function in functions]
    checks = RewardChecks(functions, names)
    table = []
    for function in checks.functions:
        result = function(**columns)
        table.append(asyncio.run(result) if inspect.iscoroutine(result) else result)
        if checks.faults:
            raise checks.faults[0].error
    return table


def reward_name(reward: Any) -> str:
    """Name of a reward function; of a callable object, its class's."""
    return str(getattr(reward, "__name__", type(reward).__name__))


def is_async(reward: Any) -> bool:
    """Whether calling a reward function returns a coroutine."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


class _CheckedModel(nn.Module):
    """A reward model; if it raises, its rewards are invalid."""

    def __init__(self, model: nn.Module, failed: Callable[[Exception], None]) -> None:
        super().__init__()
        self.model, self.failed = model, failed

    def forward(self, **inputs: Any) -> Any:
        try:
            return self.model(**inputs)
        except Exception as error:
            self.failed(error)
            ids = inputs["input_ids"]
            return SimpleNamespace(logits=torch.full((len(ids), 1), math.inf, device=ids.device))


def _culprit(function: Any, columns: dict[str, Any]) -> str:
    """The first completion on which the function fails alone; if there is none, all of them."""
    completions = columns["completions"]
    if not is_async(function):
        for i, completion in enumerate(completions):
            try:
                function(**{name: _row(i, column, len(completions)) for name, column in columns.items()})
            except Exception:
                return f"completion {i} ({_brief.repr(completion)})"
    return f"{len(completions)} completions, the first {_brief.repr(completions[0]) if completions else 'missing'}"


def _row(i: int, column: Any, size: int) -> Any:
    """One row of a column; other arguments, such as TRL's trainer_state, unchanged."""
    return column[i : i + 1] if isinstance(column, list) and len(column) == size else column


def _number(value: Any) -> float:
    """The value as a number, NaN if it is not one."""
    if isinstance(value, str | bytes | bytearray) or getattr(value, "ndim", 0) != 0:
        return math.nan
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def _invalid_value(value: Any, name: str, row: int, completion: Any) -> InputError:
    shown = "" if completion is None else f" ({_brief.repr(completion)})"
    problem = f"the reward function {name!r} returned {_brief.repr(value)} for completion {row}{shown}"
    if isinstance(value, float | int) and math.isfinite(value):
        return InputError(problem, f"Rewards must be at most {LARGEST:.0e}; scale them to about 1")
    return InputError(
        problem, "Return a finite number, or None for a completion without a reward, or set on_invalid_reward='mask'"
    )
