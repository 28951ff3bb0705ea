"""The figures of a comparison: one curve per arm with its seeds, and every measure with its intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from troll.lab.report.figures import Entry
from troll.lab.report.run_data import Array, Line, Missing, RunData, group_size, grouped, series, smooth, window
from troll.lab.report.style import (
    DASHES,
    FULL,
    LARGE,
    MOST_POINTS,
    PAPER,
    TALL,
    End,
    Size,
    colour,
    label_ends,
    log_axis,
    mark_level,
    panels,
    tick,
)
from troll.lab.runs import Comparison
from troll.lab.runs.statistics import finite


@dataclass(frozen=True)
class Arm:
    """One way to train, and its runs."""

    arm: str
    label: str
    runs: list[RunData]


@dataclass(frozen=True)
class ComparisonData:
    """One reading of a comparison."""

    about: Line
    arms: list[Arm]

    @classmethod
    def read(cls, comparison: Comparison) -> ComparisonData:
        """The present contents of a folder."""
        about = comparison.about
        arms = [
            Arm(x["arm"], str(x.get("label", x["arm"])), [RunData.read(run) for run in comparison.runs(x["arm"])])
            for x in about["arms"]
        ]
        return cls(about, arms)

    @property
    def measures(self) -> list[Line]:
        """Tables and verdicts."""
        return list(self.about.get("measures") or [])


Read = Callable[[RunData], tuple[Array, Array]]


def _logged(key: str, smoothed: bool = True) -> Read:
    def read(run: RunData) -> tuple[Array, Array]:
        x, y = series(run.metrics, key)
        return x, smooth(y, window(run, x)) if smoothed and x.size else y

    return read


def _largest(run: RunData) -> tuple[Array, Array]:
    """The largest KL that reached the loss over the updates of each rollout."""
    x, y = series(run.metrics, "troll/kl_after/max" if run.projects else "troll/kl_before/max")
    many = run.updates_per_rollout
    return (grouped(x, many, np.max), grouped(y, many, np.max)) if x.size else (x, y)


def _curves(ax: Axes, data: ComparisonData, read: Read) -> list[End]:
    """Each arm's mean over its seeds, the range they span, and each seed thin, where all seeds have values."""
    labels = []
    for arm in data.arms:
        found = [dict(zip(*map(np.ndarray.tolist, read(run)), strict=True)) for run in arm.runs]
        found = [curve for curve in found if curve]
        x = np.array(sorted(set.intersection(*map(set, found))) if found else [], dtype=np.float64)
        if not x.size:
            continue
        y = np.array([[curve[step] for step in x] for curve in found])
        many = group_size(x.size, MOST_POINTS)
        x, y = grouped(x, many), grouped(y.T, many).T
        shade = colour(arm.arm)
        if len(y) > 1:
            ax.fill_between(x, y.min(0), y.max(0), color=shade, alpha=0.13, linewidth=0)
            for curve in y:
                ax.plot(x, curve, color=shade, alpha=0.45, linewidth=0.7)
        dashes = DASHES.get(arm.arm, "-")
        ax.plot(
            x,
            y.mean(0),
            color=shade,
            linewidth=2.1,
            linestyle=dashes,
            marker="o" if x.size < 12 else None,
            markersize=3.5,
        )
        labels.append(End(float(y.mean(0)[-1]), arm.arm if arm.arm != "troll" else "TROLL", arm.arm))
    if not labels:
        raise Missing("Nothing has been logged that could be drawn here.")
    return labels


def _curve_figure(read: Read, title: str, log: bool = False, unit: bool = False) -> Callable[..., Figure]:
    def draw(data: ComparisonData, size: Size = PAPER) -> Figure:
        figure, (ax,) = panels(size, [title], labels=max(len(a.arm) for a in data.arms) + (6 if log else 0.5))
        labels = _curves(ax, data, read)
        low, high = ax.dataLim.intervaly
        if log and high > 0:
            log_axis(ax, max(ax.dataLim.minposy / 1.5, high * 1e-6), high * 1.6)
            labels = [label._replace(y=max(label.y, ax.get_ylim()[0])) for label in labels]
        elif unit and low >= 0 and high <= 1:
            ax.set_ylim(max(0.0, np.floor(10 * low - 0.5) / 10), 1.02)
        bounds = {run.bound for arm in data.arms for run in arm.runs} - {None}
        if log and len(bounds) == 1:
            bound = float(next(iter(bounds)) or 0)
            mark_level(ax, bound)
            labels.append(End(bound, f"bound {tick(bound)}", "ink"))
        label_ends(ax, size, labels)
        return figure

    draw.__doc__ = f"{title[0].upper()}{title[1:]}, by arm."
    return draw


reward = _curve_figure(_logged("reward"), "reward of the sampled completions", unit=True)
held_out = _curve_figure(lambda run: run.held_out(), "reward on held-out problems", unit=True)
token_kl = _curve_figure(_logged("troll/kl_before/p99"), "token KL, 99th percentile, before projection", log=True)
largest_kl = _curve_figure(_largest, "largest token KL of a rollout's updates", log=True)
entropy = _curve_figure(_logged("entropy"), "entropy, nats per token")


def intervals(data: ComparisonData, size: Size = PAPER) -> Figure:
    """Every measure: seeds as dots, the mean and its interval, arm by arm."""
    measures = [m for m in data.measures if any(finite(row.get("mean")) is not None for row in m["table"])]
    if not measures:
        raise Missing("No measure has been computed yet.")
    rows = max(len(m["table"]) for m in measures)
    size = replace(size, height=(5.6 + 2.6 * rows) * size.font)
    wide = max(len(str(row["arm"])) for m in measures for row in m["table"])
    figure, axes = panels(size, [str(m["label"]) for m in measures], xlabel="", left=1.5 + 0.62 * wide)
    for ax, measure in zip(axes, measures, strict=True):
        _forest(ax, measure["table"], size)
    return figure


def _forest(ax: Axes, table: list[dict[str, Any]], size: Size) -> None:
    for i, row in enumerate(table):
        y, shade = -i, colour(row["arm"])
        values = [v for v in map(finite, row.get("values") or []) if v is not None]
        mean, low, high = (finite(row.get(key)) for key in ("mean", "low", "high"))
        if low is not None and high is not None:
            ax.plot([low, high], [y, y], color=shade, linewidth=2, solid_capstyle="round", zorder=3)
        ax.plot(values, [y + 0.24] * len(values), "o", color=shade, markersize=3.4, alpha=0.55, markeredgewidth=0)
        if mean is not None:
            look = {"markeredgecolor": colour("surface"), "markeredgewidth": 1.2}
            ax.plot([mean], [y], "o", color=shade, markersize=8, zorder=4, **look)  # type: ignore[arg-type]
    ax.set_ylim(-len(table) + 0.5, 0.6)
    ax.yaxis.set_major_locator(FixedLocator([-i for i in range(len(table))]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_yticklabels(["TROLL" if row["arm"] == "troll" else str(row["arm"]) for row in table], fontsize=size.font)
    for text, row in zip(ax.get_yticklabels(), table, strict=True):
        text.set_color(colour(row["arm"]))
    ax.grid(False)
    ax.grid(axis="x", color=colour("grid"), linewidth=0.8)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.margins(x=0.08)


_BAND = "Line: mean over seeds. Band: the range of the seeds."
COMPARISON_FIGURES: dict[str, Entry] = {
    "intervals": Entry(intervals, "Every measure", "Small dots: seeds. Large dot: mean. Bar: its 95 % interval.", FULL),
    "held_out": Entry(held_out, "Held-out reward", _BAND, LARGE),
    "entropy": Entry(entropy, "Entropy", _BAND, TALL),
    "reward": Entry(reward, "Sampled reward", _BAND + " Averaged over neighbouring updates.", LARGE),
    "token_kl": Entry(token_kl, "Token KL", "KL of the updates before the trust region acts.", TALL),
    "largest_kl": Entry(
        largest_kl,
        "What the region let through",
        "The largest KL of a token over the updates of a rollout, as the loss used it: "
        "after projection for TROLL, unbounded for the others.",
        FULL,
    ),
}
