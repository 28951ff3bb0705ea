"""What a rule has to say, and how a rule is made of a condition that holds or not on every rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from troll.lab.report.rules.history import History, Mask
from troll.lab.runs.folder import Line

WARNING, NOTE = "warning", "note"
"""Something to change; something to know."""


@dataclass(frozen=True)
class Change:
    """What to do otherwise."""

    flags: str
    """As one types them after ``troll train``; empty where no flag does it."""
    why: str

    def __str__(self) -> str:
        return f"{self.flags} ({self.why})" if self.flags else self.why


@dataclass(frozen=True)
class Finding:
    """A sign of trouble: since when, what was seen, what it means and what to try, the best first."""

    name: str
    level: str
    since: int
    """The first update of what was seen."""
    said: int
    """The update after which it was certain: what was logged up to there decides."""
    until: int | None
    """The last update it was seen at; None if it lasts."""
    seen: str
    means: str
    changes: tuple[Change, ...]

    @property
    def when(self) -> str:
        """In words."""
        return f"since update {self.since}" if self.until is None else f"updates {self.since} to {self.until}"

    def line(self) -> str:
        """All of it, with the first change, in one line."""
        advice = f" Try {self.changes[0]}." if self.changes and self.changes[0].flags else ""
        advice = advice or (f" {_sentence(self.changes[0].why)}" if self.changes else "")
        return f"{self.level.capitalize()} ({self.when}): {self.seen}. {self.means}.{advice}"

    def as_json(self) -> Line:
        """Every field."""
        return {**asdict(self), "changes": [asdict(change) for change in self.changes]}


def found(
    history: History,
    name: str,
    holds: Mask,
    seen: Callable[[int], str],
    means: str,
    changes: Sequence[Change | None],
    window: int = 1,
    level: str = WARNING,
) -> Finding | None:
    """What to say if a condition ``holds`` [R] somewhere; None if nowhere.

    Whether it holds on a rollout is decided by the last ``window`` ones, nothing later: what was said once stays true
    of a longer history. ``seen`` gives the numbers of a rollout, of the last one where it holds.
    """
    at = np.flatnonzero(holds)
    if not at.size:
        return None
    i, j = int(at[0]), int(at[-1])
    return Finding(
        name=name,
        level=level,
        since=history.begins(max(0, i - window + 1)),
        said=history.ends(i),
        until=None if j == len(history) - 1 else history.ends(j),
        seen=seen(j),
        means=means,
        changes=tuple(change for change in changes if change is not None),
    )


def scaled(history: History, name: str, factor: float, why: str) -> Change | None:
    """Another value of a setting that is a number other than 0."""
    value = history.setting(name)
    return Change(f"--{name} {value * factor:.3g}", why) if value else None


def slower(history: History, why: str, factor: float = 1 / 2) -> Change:
    """A lower learning rate."""
    return scaled(history, "learning_rate", factor, why) or Change("", f"a lower learning rate: {why}")


def fewer_updates(history: History, why: str) -> Change | None:
    """Half the updates on a rollout, where that leaves at least two: with one no trust region acts."""
    updates = history.setting("updates_per_generation") or 0
    return Change(f"--updates_per_generation {int(updates) // 2}", why) if updates >= 4 else None


def larger_groups(history: History, why: str) -> Change | None:
    """Twice as many completions of each prompt."""
    size = history.setting("num_generations")
    return Change(f"--num_generations {2 * size:.0f}", why) if size else None


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
