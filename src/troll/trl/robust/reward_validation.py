"""Validation of rewards: a finite number or None for every completion, else an error that names the place.

``RewardChecks`` wraps reward functions for training, evaluation and verl. A wrapped function never raises, since other
processes would wait forever: an invalid reward becomes ``inf``, travels to all processes with the valid ones, and is
handled there.

``RewardValidation`` is the part of the trainer that uses it. TRL treats NaN as None, gives every advantage of a group 0
if one reward is infinite, and stops with the reward function's bare exception. Here an invalid reward raises with the
function and the completion, or masks the completion and counts it.
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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor, nn

from troll.errors import InputError, TrainingError

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from troll.trl.robust.guards import GuardState
else:
    GRPOTrainer = object  # verl's reward workers import this module and have no use for TRL

logger = get_logger(__name__)

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


# ---------------------------------------------------------------------- in the trainer


class RewardValidation(GRPOTrainer):
    """Raises on invalid rewards, or masks them."""

    guards: GuardState
    reward_funcs: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._reported_faults: set[tuple[str, str]] = set()
        super().__init__(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Rewards as TRL computes them; NaN in all functions of a completion with an invalid one."""
        raises = self.args.on_invalid_reward == "raise"
        checks = RewardChecks(self.reward_funcs, self.reward_func_names, locate=raises)
        unwrapped, self.reward_funcs = self.reward_funcs, checks.functions
        try:
            rewards: Tensor = super()._calculate_rewards(*args, **kwargs)
        finally:
            self.reward_funcs = unwrapped
        invalid = checks.invalid(rewards)
        if bool(invalid.any()):
            if raises:
                raise self._first_fault(checks, rewards)
            for kind, error in checks.faults:
                if kind not in self._reported_faults:
                    self._reported_faults.add(kind)
                    logger.warning(
                        f"Masked, as will be all rewards like it (counted in troll/unscored_completions): "
                        f"{error.problem}.",
                        main_process_only=False,
                    )
            rewards[invalid] = math.nan  # in place: the tensor is also what the estimators of advantages read
        unscored = int(rewards.isnan().all(1).sum())
        if unscored:
            metrics = self._metrics["train" if self.model.training else "eval"]
            metrics["troll/unscored_completions"].append(float(unscored))
        if unscored == len(rewards) and self.model.training:
            self._nothing_scored(unscored, checks.faults)
        return rewards

    def _first_fault(self, checks: RewardChecks, rewards: Tensor) -> InputError:
        """The first fault of this process, or of another one."""
        faults = [(x.error.problem, x.error.fix) for x in checks.faults[:1]]
        if self.accelerator.num_processes > 1:
            faults = gather_object(faults)
        return (
            checks.faults[0].error if checks.faults else InputError(*faults[0]) if faults else checks.explain(rewards)
        )

    def _nothing_scored(self, completions: int, faults: list[Fault]) -> None:
        """Raise for a rollout without any reward; with masking, only after ``max_skipped_updates`` of them."""
        self.guards.unscored_rollouts += 1
        count, most = self.guards.unscored_rollouts, self.args.max_skipped_updates
        if self.args.on_invalid_reward == "raise" or count > most:
            reason = f" ({faults[0].error.problem})" if faults else ""
            raise TrainingError(
                f"None of the {completions} completions of a rollout has a reward{reason}; such rollouts: {count}",
                "Check what the reward functions return, and whether the services they call still answer",
            )
