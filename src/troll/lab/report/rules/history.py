"""A run as its rules see it: one number per rollout, from the lines of ``metrics.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from troll.lab.runs.folder import Line, Run

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class History:
    """What was logged, by rollout: R lists of lines, each of which begins with the line that has a reward."""

    rollouts: Sequence[Sequence[Line]]
    evaluations: Sequence[Line]
    settings: Line

    @classmethod
    def of(cls, lines: Sequence[Line], evaluations: Sequence[Line], settings: Line) -> History:
        """From the lines of training and of evaluation, by step; lines before the first reward belong to no rollout."""
        starts = [i for i, line in enumerate(lines) if line.get("reward") is not None] or [0] * bool(lines)
        ends = [*starts, len(lines)][1:]
        return cls([lines[a:b] for a, b in zip(starts, ends, strict=True)], evaluations, settings)

    @classmethod
    def read(cls, run: Run) -> History:
        """Everything a folder holds now."""
        return cls.of(run.metrics(), run.evaluations(), run.about.get("settings") or {})

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

    def setting(self, name: str) -> float | None:
        """A setting that is a number."""
        return finite(self.settings.get(name))

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


def finite(value: Any) -> float | None:
    """The number a value is, if it is one."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


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
