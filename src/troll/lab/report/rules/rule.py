"""A rule, its finding, and the changes it suggests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from troll.lab.report.rules.history import History, Mask
from troll.lab.runs.folder import Line
from troll.lab.runs.formatting import plural

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
