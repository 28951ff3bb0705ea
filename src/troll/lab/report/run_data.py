"""The numbers that a report draws, read once from the folder of a run; missing values are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from troll.lab.report.rules import History
from troll.lab.runs import Run, TokenHistory
from troll.lab.runs.statistics import finite

Array = NDArray[np.float64]
Line = dict[str, Any]
QUANTILES = (0.5, 0.9, 0.99, 1.0)


class Missing(Exception):  # noqa: N818, not an error: the page says it instead of drawing
    """Why a figure cannot be drawn, in one sentence."""


@dataclass(frozen=True)
class RunData:
    """One reading of a run: a report stays consistent while the run goes on."""

    about: Line
    metrics: list[Line]
    evaluations: list[Line]
    tokens: TokenHistory | None
    samples: list[Line]
    evaluation: Line | None

    @classmethod
    def read(cls, run: Run) -> RunData:
        """The present contents of a folder."""
        return cls(run.about, run.metrics(), run.evaluations(), run.tokens(), run.samples(), run.evaluation())

    @property
    def arm(self) -> str:
        """Which trust region was used."""
        return str(self.about.get("arm", "custom"))

    @property
    def bound(self) -> float | None:
        """The bound on the KL of a token; None without a bound, or if it is not one number."""
        return self.history.bound

    @property
    def projects(self) -> bool:
        """Whether the run projects onto a KL trust region."""
        return self.history.region == "troll"

    @cached_property
    def history(self) -> History:
        """The log as the rules and the narrator read it."""
        settings = {"trust_region": self.arm, **(self.about.get("settings") or {})}
        return History.of_run({**self.about, "settings": settings}, self.metrics, self.evaluations)

    @property
    def updates_per_rollout(self) -> int:
        """How many updates were made on a rollout."""
        if self.tokens and self.tokens.updates:
            return 1 + max(int(x.get("update") or 0) for x in self.tokens.updates)
        return int((self.about.get("settings") or {}).get("updates_per_generation") or 1)

    @property
    def rollout_starts(self) -> list[int]:
        """Steps that are the first on their rollout, where a rollout serves several."""
        if self.tokens is None or self.updates_per_rollout == 1:
            return []
        return [x["step"] for x in self.tokens.updates if x.get("update") == 0]

    def series(self, *keys: str) -> tuple[Array, Array]:
        """Steps and values of the first of ``keys`` that was logged."""
        for key in keys:
            x, y = series(self.metrics, key)
            if x.size:
                return x, y
        raise Missing(f"Not logged: {keys[0]}." if self.metrics else "No update has been logged yet.")

    def held_out(self) -> tuple[Array, Array]:
        """Steps and held-out reward."""
        return series(self.evaluations, "eval_reward")


def series(rows: Iterable[Line], key: str) -> tuple[Array, Array]:
    """Steps and values of what was logged under a name, without what is no number."""
    pairs = [(row["step"], value) for row in rows if (value := finite(row.get(key))) is not None]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def window(run: RunData, x: Array) -> int:
    """Over how many values to average a curve: about a twelfth of it, in whole rollouts; 1 for a short one."""
    spacing = float(np.median(np.diff(x))) if x.size > 1 else 1.0
    per_rollout = max(1, round(run.updates_per_rollout / spacing))
    size = -(-x.size // (12 * per_rollout)) * per_rollout
    return size if x.size >= 3 * size else 1


def smooth(y: Array, window: int) -> Array:
    """Centred mean over ``window`` neighbours, fewer at the ends."""
    total = np.concatenate([[0.0], np.cumsum(y)])
    left = np.maximum(np.arange(y.size) - window // 2, 0)
    right = np.minimum(np.arange(y.size) + (window + 1) // 2, y.size)
    return np.asarray((total[right] - total[left]) / (right - left), dtype=np.float64)


def group_size(count: int, most: int, multiple: int = 1) -> int:
    """How many neighbours to draw as one so that at most ``most`` are drawn: 1, or whole rollouts."""
    size = -(-count // most)
    return size if size == 1 else -(-size // multiple) * multiple


def grouped(y: Array, size: int, how: Callable[..., Any] = np.mean) -> Array:
    """``how`` over every ``size`` neighbours (the last group may be smaller); along the first axis."""
    return np.array([how(y[i : i + size], axis=0) for i in range(0, len(y), size)], dtype=np.float64)


@dataclass(frozen=True)
class Spread:
    """Quantiles ``QUANTILES`` of the KL of the tokens of every update: values [U, 4]."""

    steps: Array
    values: Array


def kl_spread(run: RunData, when: str) -> Spread:
    """The spread of token KL ``when`` = "before" or "after" projection; the largest value is the logged one, exact."""
    logged = {int(x["step"]): finite(x.get(f"troll/kl_{when}/max")) for x in run.metrics}
    rows: list[tuple[float, ...]] = []
    for line in run.tokens.updates if run.tokens else []:
        inner = _quantiles(line, when, run.tokens.kl_edges) if run.tokens else None
        if inner is not None:
            top = logged.get(line["step"])
            top = inner[3] if top is None else top
            rows.append((line["step"], *(min(q, top) for q in inner[:3]), top))
    if not rows:
        raise Missing(f"No histogram of token KL {when} projection was recorded (tokens.jsonl).")
    table = np.array(rows, dtype=np.float64)
    return Spread(table[:, 0], table[:, 1:])


def _quantiles(line: Line, when: str, edges: list[float]) -> tuple[float, ...] | None:
    exact = [finite(x) for x in line.get("kl_quantiles") or []] if when == "before" else []
    if len(exact) == 4 and None not in exact:
        return tuple(x for x in exact if x is not None)
    counts = line.get("kl" if when == "before" else "kl_after")
    return histogram_quantiles(counts, edges) if counts and sum(counts) else None


def histogram_quantiles(counts: list[int], edges: list[float]) -> tuple[float, ...]:
    """The quantiles a histogram with logarithmic bins allows: the place in a bin by its logarithm, 0 in the first."""
    total = np.cumsum(counts)
    found = []
    for q in QUANTILES:
        wanted = q * total[-1]
        j = int(np.searchsorted(total, wanted))
        low, high = edges[j], edges[j + 1]
        inside = 1 - (total[j] - wanted) / counts[j]
        found.append(0.0 if low <= 0 else low * (high / low) ** inside)
    return tuple(found)


def log_ratio_counts(run: RunData, keep: Callable[[Line], bool]) -> Array:
    """Tokens per bin of log ratio, over the updates to keep."""
    bins = len(run.tokens.log_ratio_edges) - 1 if run.tokens else 0
    rows = [x["log_ratio"] for x in (run.tokens.updates if run.tokens else []) if x.get("log_ratio") and keep(x)]
    return np.asarray(np.array(rows, dtype=np.float64).reshape(-1, bins).sum(axis=0), dtype=np.float64)
