"""Reward functions, watched: for every completion a finite number or None, or it is known that there is none.

TRL lets NaN pass for None, makes every advantage of a group 0 where one reward is infinite, and stops with the bare
exception of a reward function. Here the functions TRL calls are wrapped for the time of the call. A wrapper never
raises, which would leave the other processes waiting: what cannot be used becomes ``inf``, travels to all processes
with the rewards, and is dealt with there, by all of them alike.
"""

from __future__ import annotations

import functools
import math
import reprlib
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor, nn
from trl import GRPOTrainer
from trl.trainer.utils import is_async_callable

from troll.errors import InputError, TrainingError
from troll.trl.robust.update_state import GuardState

logger = get_logger(__name__)

RewardErrors = Literal["stop", "mask"]

_LARGEST = 1e15  # the squares of larger ones, over which TRL takes a mean, leave float32: advantages would be 0
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 200


class Fault(NamedTuple):
    """What is wrong with the rewards of one function."""

    kind: tuple[str, str]
    """Of which function, and in which way: to be told once."""
    error: InputError


class Watch:
    """Stands around the reward functions of one call, and collects what is wrong."""

    def __init__(self, functions: list[Any], names: list[str]) -> None:
        self.faults: list[Fault] = []
        self.functions = [self._wrapped(function, name) for function, name in zip(functions, names, strict=True)]
        self._models = torch.tensor([isinstance(function, nn.Module) for function in functions])
        self._names = names

    def unusable(self, rewards: Tensor) -> Tensor:
        """[B] whether a reward of the completion is unusable, from the rewards of all processes [B, functions]."""
        of_models = self._models.to(rewards.device)
        bad = rewards.isinf() | ((rewards.isnan() | (rewards.abs() > _LARGEST)) & of_models)
        return bad.any(1)

    def explain(self, rewards: Tensor) -> InputError:
        """The first unusable reward, which is that of a model."""
        row = int(self.unusable(rewards).nonzero()[0])
        of = rewards[row]
        worst = int((~(of.abs() <= _LARGEST)).nonzero()[0])
        return _no_reward(float(of[worst]), self._names[worst], row, None)

    def _wrapped(self, function: Any, name: str) -> Any:
        if isinstance(function, nn.Module):
            return _Judge(function, functools.partial(self._failed, name))
        if is_async_callable(function):

            async def waiting(**given: Any) -> list[float | None]:
                try:
                    said = await function(**given)
                except Exception as error:
                    return self._raised(name, given["completions"], error)
                return self._checked(name, given["completions"], said)

            return waiting

        def plain(**given: Any) -> list[float | None]:
            try:
                said = function(**given)
            except Exception as error:
                return self._raised(name, given["completions"], error)
            return self._checked(name, given["completions"], said)

        return plain

    def _failed(self, name: str, error: Exception) -> None:
        if not isinstance(error, InputError):
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
            where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
            cause, error = (
                error,
                InputError(
                    f"the reward function {name!r}, which raised {type(error).__name__}: {error}{where}",
                    "a number or None for every completion, whatever the model wrote",
                    "catching it there and returning None to leave the completion out; or reward_errors='mask'",
                ),
            )
            error.__cause__ = cause
        self.faults.append(Fault((name, "raised"), error))

    def _raised(self, name: str, completions: list[Any], error: Exception) -> list[float | None]:
        returned = getattr(error, "returned", None)
        if returned is not None:  # it returned before somebody else who watches it raised
            return self._checked(name, completions, returned)
        self._failed(name, error)
        return [math.inf] * len(completions)

    def _checked(self, name: str, completions: list[Any], said: Any) -> list[float | None]:
        expected = f"a list of {len(completions)} numbers or None, one per completion, in their order"
        try:
            values = said.tolist() if hasattr(said, "tolist") else list(said)
            usable = isinstance(values, list) and not isinstance(said, str | bytes | dict | set | frozenset)
        except Exception:
            usable = False
        if not usable:
            given = f"the reward function {name!r}, which returned {_brief.repr(said)}"
            self.faults.append(Fault((name, "no list"), InputError(given, expected, "a list")))
            return [math.inf] * len(completions)
        if len(values) != len(completions):
            given = f"the reward function {name!r}, which returned {len(values)} rewards for {len(completions)}"
            self.faults.append(Fault((name, "length"), InputError(f"{given} completions", expected, "one for each")))
            return [math.inf] * len(completions)
        numbers: list[float | None] = []
        for i, (value, completion) in enumerate(zip(values, completions, strict=True)):
            number = None if value is None else _number(value)
            if number is not None and not abs(number) <= _LARGEST:
                self.faults.append(Fault((name, "value"), _no_reward(value, name, i, completion)))
                number = math.inf
            numbers.append(number)
        return numbers


class _Judge(nn.Module):
    """A reward model; where it raises, the rewards are unusable."""

    def __init__(self, model: nn.Module, failed: Any) -> None:
        super().__init__()
        self.model, self.failed = model, failed

    def forward(self, **inputs: Any) -> Any:
        try:
            return self.model(**inputs)
        except Exception as error:
            self.failed(error)
            ids = inputs["input_ids"]
            return SimpleNamespace(logits=torch.full((len(ids), 1), math.inf, device=ids.device))


def _number(value: Any) -> float:
    """NaN for what is none."""
    if isinstance(value, str | bytes | bytearray) or getattr(value, "ndim", 0) != 0:
        return math.nan
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def _no_reward(value: Any, name: str, row: int, completion: Any) -> InputError:
    shown = "" if completion is None else f" ({_brief.repr(completion)})"
    if isinstance(value, float | int) and math.isfinite(value):
        expected = f"rewards of at most {_LARGEST:.0e}, whose squares float32 can add"
        hint = "rewards of the size of 1"
    else:
        expected = "finite rewards, or None for a completion that cannot be scored"
        hint = "looking at that completion with log_completions=True; or reward_errors='mask'"
    return InputError(f"reward {_brief.repr(value)} from {name!r} for completion {row}{shown}", expected, hint)


class RewardValidation(GRPOTrainer):
    """Refuses or masks rewards that cannot be used."""

    guards: GuardState
    reward_funcs: list[Any]
    _told: set[tuple[str, str]]

    def _calculate_rewards(self, *args: Any, **named: Any) -> Tensor:
        """As TRL; NaN for what cannot be scored. A completion with one unusable reward has none at all."""
        watch = Watch(self.reward_funcs, self.reward_func_names)
        own, self.reward_funcs = self.reward_funcs, watch.functions
        try:
            rewards: Tensor = super()._calculate_rewards(*args, **named)
        finally:
            self.reward_funcs = own
        unusable = watch.unusable(rewards)
        if bool(unusable.any()):
            if self.args.reward_errors == "stop":
                raise self._first_fault(watch, rewards)
            for kind, error in watch.faults:
                if kind not in self._told:
                    self._told.add(kind)
                    masked = "Masked, and counted in troll/unscored_completions, this and all of its kind"
                    logger.warning(f"{masked}: {error.given}; expected: {error.expected}.", main_process_only=False)
            rewards = rewards.masked_fill(unusable[:, None], math.nan)
        unscored = int(rewards.isnan().all(1).sum())
        if unscored:
            metrics = self._metrics["train" if self.model.training else "eval"]
            metrics["troll/unscored_completions"].append(float(unscored))
        if unscored == len(rewards) and self.model.training:
            self._nothing_scored(unscored, watch.faults)
        return rewards

    def _first_fault(self, watch: Watch, rewards: Tensor) -> InputError:
        """That of this process, or where there is none, of another."""
        known = [(x.error.given, x.error.expected, x.error.hint) for x in watch.faults[:1]]
        if self.accelerator.num_processes > 1:
            known = gather_object(known)
        return watch.faults[0].error if watch.faults else InputError(*known[0]) if known else watch.explain(rewards)

    def _nothing_scored(self, completions: int, faults: list[Fault]) -> None:
        """Such a rollout teaches nothing: an error, or where rewards are masked, one when it has happened too often."""
        self.guards.unscored_rollouts += 1
        often, most = self.guards.unscored_rollouts, self.args.max_skipped_updates
        if self.args.reward_errors == "stop" or often > most:
            said = f" ({faults[0].error.given})" if faults else ""
            raise TrainingError(
                f"a rollout of {completions} completions, none of which could be scored{said}; such rollouts: {often}",
                "a reward for at least one completion",
                "looking at what the reward functions return, or whether what they ask for an answer still gives one",
            )
