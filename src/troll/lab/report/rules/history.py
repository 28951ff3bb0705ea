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
from troll.lab.runs.statistics import finite
from troll.trl.robust.renamed_settings import bound_kind

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class History:
    """The logged lines by rollout: R lists of lines, each of which begins with the line that has a reward."""

    rollouts: Sequence[Sequence[Line]]
    evaluations: Sequence[Line]
    settings: Line
    engine: str = "trl"

    @classmethod
    def of(cls, lines: Sequence[Line], evaluations: Sequence[Line], settings: Line) -> History:
        """From the lines of training and of evaluation, by step; lines before the first reward belong to no rollout."""
        starts = [i for i, line in enumerate(lines) if line.get("reward") is not None] or [0] * bool(lines)
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
        """The first logged update on a rollout."""
        return int(self.rollouts[i][0]["step"])

    def ends(self, i: int) -> int:
        """The last one."""
        return int(self.rollouts[i][-1]["step"])

    def first(self, name: str) -> Array:
        """Of the first update on every rollout [R]; NaN where it was not logged."""
        return self._column(name, lambda values: values[0])

    def last(self, name: str) -> Array:
        """Of the last one, before which the network is farthest from the old policy [R]."""
        return self._column(name, lambda values: values[-1])

    def mean(self, name: str) -> Array:
        """Over the updates on every rollout [R]."""
        return self._column(name, lambda values: math.fsum(values) / len(values))

    def most(self, name: str) -> Array:
        """The largest of the updates on every rollout [R]."""
        return self._column(name, max)

    def _column(self, name: str, reduce: Callable[[list[float]], float]) -> Array:
        values = [[x for line in lines if (x := finite(line.get(name))) is not None] for lines in self.rollouts]
        return np.array([reduce(row) if row else math.nan for row in values], dtype=np.float64)

    def has(self, name: str) -> bool:
        """Whether a metric was logged as a number at least once."""
        lines = [*(line for lines in self.rollouts for line in lines), *self.evaluations]
        return any(finite(line.get(name)) is not None for line in lines)

    def setting(self, name: str) -> float | None:
        """A setting that is a number."""
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
        """Of the network [R]: TRL's, or where that is not logged the lower bound from the kept tokens."""
        own = self.mean("entropy")
        return own if np.isfinite(own).any() else self.mean("troll/entropy")


def trailing(y: Array, n: int, how: Callable[..., Any] = np.mean) -> Array:
    """``how`` over the last n values up to each [R]; NaN before there are so many."""
    if y.size < n:
        return np.full(y.size, math.nan)
    inner = how(np.lib.stride_tricks.sliding_window_view(y, n), axis=-1)
    return np.concatenate([np.full(n - 1, math.nan), inner])


def throughout(condition: Mask, n: int) -> Mask:
    """Whether a condition held on each of the last n rollouts [R]."""
    return np.asarray(trailing(condition.astype(np.float64), n, np.min) == 1.0)


def highest(y: Array) -> Array:
    """The largest value up to each [R]; NaN before the first."""
    return np.asarray(np.fmax.accumulate(y), dtype=np.float64) if y.size else y


def before(y: Array, n: int) -> Array:
    """The value n rollouts earlier [R]; NaN where there is none."""
    return np.concatenate([np.full(min(n, y.size), math.nan), y[: max(0, y.size - n)]])


# ---------------------------------------------------------------------- the reward

SMOOTH = 3
"""Rollouts over which the reward is averaged: a single one has the noise of its completions."""
STALLED = 5
"""Rollouts without a new highest reward after which it has plateaued: about twice as many as are averaged."""
NEAR_TOP = 0.85
"""Of rewards between 0 and 1: above it, a plateau and an entropy near 0 mean that learning is complete."""


def smoothed(history: History) -> Array:
    """Mean reward of the last ``SMOOTH`` rollouts [R]."""
    return trailing(history.reward, SMOOTH)


def noise(history: History) -> Array:
    """Mean size of a step of the reward from rollout to rollout, up to each [R]; NaN before there are two steps."""
    sizes = np.abs(np.diff(history.reward))
    means = np.cumsum(sizes) / np.arange(1, sizes.size + 1)
    return np.concatenate([np.full(min(2, history.reward.size), math.nan), means[1:]])


def stalled(history: History) -> Mask:
    """No new highest smoothed reward, by more than the noise, in the last ``STALLED`` rollouts [R]."""
    best = highest(smoothed(history))
    return np.asarray(best <= before(best, STALLED) + noise(history))


def near_top(history: History) -> Mask:
    """Rewards that were between 0 and 1 so far, and are now near 1, but for one rollout in three at most [R]."""
    reward = history.reward
    within = (highest(reward) <= 1) & (highest(-reward) <= 0)
    return np.asarray(within & (trailing(reward, SMOOTH, np.median) >= NEAR_TOP))


def held_out(history: History) -> Array:
    """The held-out reward last measured up to each rollout [R]; NaN before the first evaluation after step 0."""
    values = np.full(len(history), math.nan)
    ends = [history.ends(i) for i in range(len(history))]
    for line in history.evaluations:
        i = int(np.searchsorted(ends, line["step"]))
        if line["step"] > 0 and i < len(ends) and (value := finite(line.get("eval_reward"))) is not None:
            values[i:] = value
    return values


def held_out_rise(history: History) -> Array:
    """Above the evaluation before training, at its highest [R]; NaN where there was none."""
    start = [finite(line.get("eval_reward")) for line in history.evaluations[:1] if line["step"] == 0]
    return highest(held_out(history)) - (math.nan if start in ([], [None]) else float(start[0] or 0.0))
