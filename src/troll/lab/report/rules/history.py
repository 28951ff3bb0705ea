"""The log of a run by rollout, and the rules that are applied to it: a rule, its finding, the changes it suggests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from troll.lab.runs.folder import Line, Run
from troll.lab.runs.formatting import plural
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


# ---------------------------------------------------------------------- rules, findings and changes

WARNING, NOTE = "warning", "note"
"""A problem to fix; a fact to know."""


@dataclass(frozen=True)
class Change:
    """A suggested change."""

    flags: str
    """Flags of ``troll train``; empty where no flag does it."""
    why: str

    def __str__(self) -> str:
        return f"{self.flags} ({self.why})" if self.flags else self.why


@dataclass(frozen=True)
class Finding:
    """A sign of trouble: since when, the numbers, what they mean and what to change, the best change first."""

    name: str
    level: str
    since: int
    """The first update of the window in which the condition held first."""
    said: int
    """The update after which the condition was certain; later lines of the log do not affect it."""
    until: int | None
    """The last update at which the condition held; None if it still does."""
    seen: str
    means: str
    changes: tuple[Change, ...]

    @property
    def when(self) -> str:
        """The updates at which the condition held, in words."""
        return f"since update {self.since}" if self.until is None else f"updates {self.since} to {self.until}"

    @property
    def statement(self) -> str:
        """Level, time, numbers and meaning, without the changes."""
        return f"{self.level.capitalize()} ({self.when}): {self.seen}. {self.means}."

    def line(self) -> str:
        """The statement and the first change, in one line."""
        if not self.changes:
            return self.statement
        first = self.changes[0]
        return f"{self.statement} {f'Try {first}.' if first.flags else f'{first.why[:1].upper()}{first.why[1:]}.'}"

    def as_json(self) -> Line:
        """Every field."""
        return {**asdict(self), "changes": [asdict(change) for change in self.changes]}


@dataclass(frozen=True)
class Rule:
    """A condition on the log of a run, and the data it needs."""

    name: str
    """The identifier in JSON and in ``docs/explain.md``."""
    title: str
    """What is checked, in words."""
    check: Callable[[History], Finding | None]
    needs: tuple[tuple[str, ...], ...]
    """Metrics without which the condition cannot be checked; of each tuple one suffices."""
    rollouts: int
    """Rollouts without which the condition cannot hold."""
    evaluations: int
    """Evaluations after the start of training without which it cannot hold."""
    when: Callable[[History], bool]
    """Whether the rule concerns a run with these settings."""

    def __call__(self, history: History) -> Finding | None:
        """The finding in a run; None if the condition never holds."""
        finding = self.check(history)
        return None if finding is None else replace(finding, name=self.name)

    def lacks(self, history: History) -> str:
        """Why the condition cannot be checked in a run; empty if it can, or if the rule does not concern the run."""
        if not len(history) or not self.when(history):
            return ""
        if missing := [" or ".join(names) for names in self.needs if not any(map(history.has, names))]:
            return f"the log has no {' and no '.join(missing)}"
        if len(history) < self.rollouts:
            return f"{plural(self.rollouts, 'rollout')} needed, the run has {len(history)}"
        for names in self.needs:
            logged = int(np.any([history.logged(name) for name in names], axis=0).sum())
            if logged < self.rollouts and "eval_reward" not in names:
                return f"{plural(self.rollouts, 'rollout')} with {' or '.join(names)} needed, the log has {logged}"
        if history.evaluated < self.evaluations:
            return f"{plural(self.evaluations, 'evaluation')} during training needed, the run has {history.evaluated}"
        return ""


def rule(
    name: str,
    title: str,
    *needs: str | tuple[str, ...],
    rollouts: int = 1,
    evaluations: int = 0,
    when: Callable[[History], bool] = lambda _: True,
) -> Callable[[Callable[[History], Finding | None]], Rule]:
    """Make a rule of a function; ``needs`` are the metrics without which it cannot be checked."""
    tuples = tuple((x,) if isinstance(x, str) else x for x in needs)
    return lambda check: Rule(name, title, check, tuples, rollouts, evaluations, when)


def found(
    history: History,
    holds: Mask,
    seen: Callable[[int], str],
    means: str,
    changes: Sequence[Change | None],
    window: int = 1,
    level: str = WARNING,
) -> Finding | None:
    """The finding if a condition ``holds`` [R] on some rollout, otherwise None.

    The condition on a rollout depends on the last ``window`` rollouts and on nothing later, so a longer log does not
    revoke a finding. ``seen`` states the numbers of a rollout; it is called for the last one on which it holds.
    """
    at = np.flatnonzero(holds)
    if not at.size:
        return None
    i, j = int(at[0]), int(at[-1])
    return Finding(
        name="",
        level=level,
        since=history.begins(max(0, i - window + 1)),
        said=history.ends(i),
        until=None if j == len(history) - 1 else history.ends(j),
        seen=seen(j),
        means=means,
        changes=tuple(change for change in changes if change is not None),
    )


def scaled(history: History, name: str, factor: float, why: str) -> Change | None:
    """A setting multiplied by ``factor``; None if it is 0 or no number."""
    value = history.setting(name)
    return Change(f"--{name} {value * factor:.3g}", why) if value else None


def slower(history: History, why: str, factor: float = 1 / 2) -> Change:
    """A lower learning rate."""
    return scaled(history, "learning_rate", factor, why) or Change("", f"a lower learning rate: {why}")


def fewer_updates(history: History, why: str) -> Change | None:
    """Half the updates per rollout, if at least two remain: with one, no trust region acts."""
    updates = history.setting("updates_per_generation") or 0
    return Change(f"--updates_per_generation {int(updates) // 2}", why) if updates >= 4 else None


def larger_groups(history: History, why: str) -> Change | None:
    """Twice as many completions per prompt."""
    size = history.setting("num_generations")
    return Change(f"--num_generations {2 * size:.0f}", why) if size else None
