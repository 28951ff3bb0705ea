"""The log of a run as the rules read it: one number per rollout, the smoothed reward, and the held-out reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from troll.lab.runs.folder import Line, Run
from troll.lab.runs.formatting import score
from troll.lab.runs.statistics import finite
from troll.trl.robust.fingerprint import bound_kind

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class History:
    """The logged lines by rollout: R lists of lines, each beginning with the line that has the reward."""

    rollouts: Sequence[Sequence[Line]]
    evaluations: Sequence[Line]
    settings: Line
    engine: str = "trl"

    @classmethod
    def of(cls, lines: Sequence[Line], evaluations: Sequence[Line], settings: Line) -> History:
        """From the lines of training and of evaluation, by step; lines before the first reward belong to no rollout."""
        starts = [i for i, line in enumerate(lines) if "reward" in line] or [0] * bool(lines)  # null: it was NaN
        ends = [*starts, len(lines)][1:]
        return cls([lines[a:b] for a, b in zip(starts, ends, strict=True)], evaluations, settings)

    @classmethod
    def read(cls, run: Run) -> History:
        """The present contents of a folder."""
        return cls.of_run(run.about, run.metrics(), run.evaluations())

    @classmethod
    def of_run(cls, about: Line, lines: Sequence[Line], evaluations: Sequence[Line]) -> History:
        """From ``run.json`` and the lines of training and of evaluation."""
        history = cls.of(lines, evaluations, about.get("settings") or {})
        return replace(history, engine=str(about.get("engine", "trl")))

    def __len__(self) -> int:
        return len(self.rollouts)

    def begins(self, i: int) -> int:
        """The first update on a rollout. verl logs one line per rollout, with the number of its last update."""
        if self.engine == "verl":
            return self.ends(i - 1) + 1 if i else 1
        return int(self.rollouts[i][0]["step"])

    def ends(self, i: int) -> int:
        """The last logged update on a rollout."""
        return int(self.rollouts[i][-1]["step"])

    def first(self, name: str) -> Array:
        """A metric at the first update on every rollout [R]; NaN where it was not logged."""
        return self._column(name, lambda values: values[0])

    def last(self, name: str) -> Array:
        """A metric at the last update on every rollout [R], where the network is farthest from the old policy."""
        return self._column(name, lambda values: values[-1])

    def mean(self, name: str) -> Array:
        """Mean of a metric over the updates on every rollout [R]."""
        return self._column(name, lambda values: math.fsum(values) / len(values))

    def most(self, name: str) -> Array:
        """Maximum of a metric over the updates on every rollout [R]."""
        return self._column(name, max)

    def _column(self, name: str, reduce: Callable[[list[float]], float]) -> Array:
        values = [[x for line in lines if (x := finite(line.get(name))) is not None] for lines in self.rollouts]
        return np.array([reduce(row) if row else math.nan for row in values], dtype=np.float64)

    def has(self, name: str) -> bool:
        """Whether a metric was logged as a finite number at least once."""
        return any(finite(line.get(name)) is not None for line in self.evaluations) or bool(self.logged(name).any())

    def logged(self, name: str) -> Mask:
        """On which rollouts a metric was logged as a finite number [R]."""
        return np.isfinite(self.most(name))

    @property
    def evaluated(self) -> int:
        """Evaluations with a held-out reward after the start of training."""
        return sum(x["step"] > 0 and finite(x.get("eval_reward")) is not None for x in self.evaluations)

    def setting(self, name: str) -> float | None:
        """A setting as a number; None if it is not a finite number."""
        return finite(self.settings.get(name))

    @property
    def updates(self) -> float | None:
        """Updates per rollout."""
        return self.setting("updates_per_generation")

    @property
    def adapts(self) -> bool:
        """Whether the bound may exceed ``kl_bound`` for some tokens or updates."""
        return self.region == "troll" and bound_kind(self.settings) not in ("fixed", "sequence")

    @property
    def bound(self) -> float | None:
        """The bound on the KL of a token; None without a bound, or if it is not one number."""
        return self.setting("kl_bound") if self.region == "troll" and not self.adapts else None

    @property
    def region(self) -> str:
        """``troll``, ``clip`` or ``none``."""
        return str(self.settings.get("trust_region", "none"))

    @cached_property
    def reward(self) -> Array:
        """Mean over the completions of every rollout [R]."""
        return self.first("reward")

    @cached_property
    def entropy(self) -> Array:
        """Mean token entropy [R]: the one that TRL logs, otherwise the lower bound from the kept tokens."""
        own = self.mean("entropy")
        return own if np.isfinite(own).any() else self.mean("troll/entropy")


def trailing(y: Array, n: int, how: Callable[..., Any] = np.mean) -> Array:
    """``how`` over the last n values at each rollout [R]; NaN for the first n − 1."""
    if y.size < n:
        return np.full(y.size, math.nan)
    inner = how(np.lib.stride_tricks.sliding_window_view(y, n), axis=-1)
    return np.concatenate([np.full(n - 1, math.nan), inner])


def throughout(condition: Mask, n: int) -> Mask:
    """Whether a condition held on each of the last n rollouts [R]."""
    return np.asarray(trailing(condition.astype(np.float64), n, np.min) == 1.0)


def highest(y: Array) -> Array:
    """Running maximum [R]; NaN before the first number."""
    return np.asarray(np.fmax.accumulate(y), dtype=np.float64) if y.size else y


def before(y: Array, n: int) -> Array:
    """The value n rollouts earlier [R]; NaN for the first n."""
    return np.concatenate([np.full(min(n, y.size), math.nan), y[: max(0, y.size - n)]])


# ---------------------------------------------------------------------- the reward

SMOOTH = 3
"""Rollouts over which the reward is averaged: a single one has the noise of its completions."""
STALLED = 5
"""Rollouts without a new highest reward after which it has plateaued: about twice as many as are averaged."""
NEAR_TOP = 0.85
"""Of rewards between 0 and 1: above it, a plateau and an entropy near 0 mean that learning is complete."""
FALL = 1.5
"""Steps of the reward, of mean size, below its highest mean at which it is called fallen instead of plateaued."""


def smoothed(history: History) -> Array:
    """Mean reward of the last ``SMOOTH`` rollouts [R]."""
    return trailing(history.reward, SMOOTH)


def noise(history: History) -> Array:
    """Mean absolute change of the reward from rollout to rollout so far [R]; NaN before there are two changes."""
    sizes = np.abs(np.diff(history.reward))
    number = np.cumsum(np.isfinite(sizes))  # a rollout without a reward has no step
    means = np.where(number > 1, np.nancumsum(sizes) / np.maximum(number, 1), math.nan)
    return np.concatenate([np.full(min(1, history.reward.size), math.nan), means])


def stalled(history: History) -> Mask:
    """No new highest smoothed reward, by more than the noise, in the last ``STALLED`` rollouts [R]."""
    best = highest(smoothed(history))
    return np.asarray(best <= before(best, STALLED) + noise(history))


def fallen(history: History) -> Mask:
    """Smoothed reward below its highest value by more than ``FALL`` × the noise [R]."""
    now = smoothed(history)
    return np.asarray(highest(now) - now > FALL * noise(history))


def trend(history: History, i: int) -> str:
    """The end of a sentence about a reward that no longer rises: where it has plateaued, or to what it fell."""
    verb = "fell to" if fallen(history)[i] else "has plateaued at"
    return f"the reward {verb} {score(smoothed(history)[i])}"


def near_top(history: History) -> Mask:
    """Rewards within [0, 1] so far, with a median over the last ``SMOOTH`` rollouts of at least ``NEAR_TOP`` [R]."""
    reward = history.reward
    within = (highest(reward) <= 1) & (highest(-reward) <= 0)
    return np.asarray(within & (trailing(reward, SMOOTH, np.median) >= NEAR_TOP))


def held_out(history: History) -> Array:
    """The latest held-out reward at each rollout [R]; NaN before the first evaluation after step 0."""
    values = np.full(len(history), math.nan)
    ends = [history.ends(i) for i in range(len(history))]
    for line in history.evaluations:
        i = int(np.searchsorted(ends, line["step"]))
        if line["step"] > 0 and i < len(ends) and (value := finite(line.get("eval_reward"))) is not None:
            values[i:] = value
    return values


def held_out_rise(history: History) -> Array:
    """Highest held-out reward so far minus the one before training [R]; NaN without that evaluation."""
    start = [finite(line.get("eval_reward")) for line in history.evaluations[:1] if line["step"] == 0]
    return highest(held_out(history)) - (math.nan if start in ([], [None]) else float(start[0] or 0.0))
