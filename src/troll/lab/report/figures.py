"""The figures of a run and of a comparison: functions from the data to a matplotlib figure.

Those of the trust region are in ``region_figures``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from troll.lab.report.region_figures import constrained, kl, kl_groups, ratio, sequence_kl, solver_steps
from troll.lab.report.run_data import (
    Array,
    ComparisonData,
    Line,
    Missing,
    RunData,
    group_size,
    grouped,
    series,
    smooth,
    window,
)
from troll.lab.report.style import (
    DASHES,
    FULL,
    LARGE,
    MOST_POINTS,
    PAPER,
    SMALL,
    TALL,
    End,
    Size,
    colour,
    columns,
    label_ends,
    log_axis,
    mark_level,
    panels,
    tick,
    trace,
)
from troll.lab.runs.statistics import finite

TIMES = ("generate", "reward", "score", "forward", "backward", "optimizer", "evaluate", "other")


@dataclass(frozen=True)
class Entry:
    """A figure with its title, caption and size."""

    draw: Callable[..., Figure]
    title: str
    caption: str
    size: Size = SMALL


# ---------------------------------------------------------------------- a run


def reward(run: RunData, size: Size = PAPER) -> Figure:
    """Reward of the sampled completions, and of the held-out problems."""
    x, y = run.series("reward")
    figure, (ax,) = panels(size, ["mean reward of a completion"], labels=8)
    last = trace(ax, run, x, y, run.arm, points=True)
    labels = [End(last, "sampled", run.arm)]
    steps, held_out = run.held_out()
    if steps.size:
        ax.plot(steps, held_out, color=colour("ink"), linewidth=1.4, marker="D", markersize=4.5, zorder=4)
        labels.append(End(float(held_out[-1]), "held out", "ink"))
    values = np.concatenate([y, held_out])
    if values.min() >= 0 and values.max() <= 1:
        ax.set_ylim(min(0.9, max(0.0, math.floor(10 * values.min() - 0.5) / 10)), 1.02)
    label_ends(ax, size, labels)
    return figure


def times(run: RunData, size: Size = PAPER) -> Figure:
    """Where the seconds of an update went."""
    table = np.array([_seconds(row) for row in run.metrics]).reshape(-1, len(TIMES))
    if not np.delete(table, TIMES.index("evaluate"), axis=1).sum():
        raise Missing("No times were logged.")
    shares = dict(zip(TIMES, table.sum(0) / table.sum(), strict=True))
    drawn = [i for i, part in enumerate(TIMES) if part != "evaluate" and shares[part]]
    steps = np.array([row["step"] for row in run.metrics], dtype=np.float64)
    gaps = np.diff(steps, prepend=2 * steps[0] - steps[1] if steps.size > 1 else 0)
    whole = run.updates_per_rollout if steps.size >= 5 * run.updates_per_rollout else 1
    many = whole * group_size(steps.size // whole, 60)
    x = grouped(steps, many)
    heights = np.cumsum(grouped(table[:, drawn] / np.maximum(gaps, 1)[:, None], many), axis=1)
    width = 0.86 * (float(np.median(np.diff(x))) if x.size > 1 else 1.0)
    figure, (ax,) = panels(size, ["seconds per update"], labels=14)
    top = 1.04 * float(heights[:, -1].max())
    ax.set(xlim=(x[0] - width, x[-1] + width), ylim=(0, top))
    parts = np.array([shares[TIMES[i]] for i in drawn])
    middles = top * (np.cumsum(parts) - parts / 2) / parts.sum()
    labels = []
    for k, i in enumerate(drawn):
        name = f"time-{TIMES[i]}"
        columns(ax, x, heights[:, k - 1] if k else np.zeros(x.size), heights[:, k], width, name, 1.0)
        labels.append(End(float(middles[k]), f"{TIMES[i]} {_share(parts[k])}", "ink", square=name))
    if shares["evaluate"]:
        labels.append(End(top, f"evaluate {_share(shares['evaluate'])}", "muted"))
    label_ends(ax, size, labels)
    return figure


def _seconds(row: Line) -> list[float]:
    """Seconds of each of ``TIMES``; unknown names count as other."""
    found = dict.fromkeys(TIMES, 0.0)
    for key, value in row.items():
        if key.startswith("time/"):
            part = key.removeprefix("time/")
            found[part if part in found else "other"] += finite(value) or 0.0
    return list(found.values())


def _share(value: float) -> str:
    return f"{100 * value:.0f} %" if value >= 0.01 else "< 1 %"


def _simple(key: str, title: str, smoothed: bool = True) -> Callable[..., Figure]:
    def draw(run: RunData, size: Size = PAPER) -> Figure:
        x, y = run.series(key)
        power = math.floor(math.log10(top)) if (top := float(np.abs(y).max())) else 0
        power = power if power < -2 or power > 4 else 0
        y = y / 10.0**power
        figure, (ax,) = panels(size, [title + (f", × {tick(10.0**power)}" if power else "")])
        if smoothed:
            trace(ax, run, x, y, run.arm)
        else:
            ax.plot(x, y, color=colour(run.arm), linewidth=2, marker="o" if x.size == 1 else None)
        if y.min() >= 0:
            ax.set_ylim(bottom=0)
        return figure

    draw.__doc__ = f"{title[0].upper()}{title[1:]}, by update."
    return draw


entropy = _simple("entropy", "entropy, nats per token")
loss = _simple("loss", "loss of an update")
grad_norm = _simple("grad_norm", "norm of the gradient, before clipping")
learning_rate = _simple("learning_rate", "learning rate", smoothed=False)


RUN_FIGURES: dict[str, Entry] = {
    "reward": Entry(
        reward,
        "Reward",
        "Dots: mean reward of each rollout. Line: running mean. Diamonds: held-out problems, which are not trained on.",
        LARGE,
    ),
    "entropy": Entry(entropy, "Entropy", "At zero the policy always gives the same answer.", TALL),
    "kl": Entry(
        kl,
        "How far tokens move",
        "One column per update, up to its largest token KL; darker where more tokens are. "
        "Ticks on the axis mark new rollouts, at which the KL is 0 again.",
        FULL,
    ),
    "kl_groups": Entry(
        kl_groups,
        "Which tokens move",
        "Before projection. If negative advantages have a much larger KL, the policy mostly moves away from failures. "
        "If one quarter has, most of the change is in that part of the completion.",
        FULL,
    ),
    "constrained": Entry(
        constrained,
        "How often the region acts",
        "A few percent is usual. A warning appears if the share stays high over several rollouts.",
    ),
    "sequence_kl": Entry(sequence_kl, "KL of whole completions", "The sum over the tokens of a completion."),
    "solver_steps": Entry(solver_steps, "Solver steps", "3 to 5 steps are usual; the limit is 12."),
    "ratio": Entry(
        ratio,
        "Probability ratios of the sampled tokens",
        "As used in the loss; 1 means as probable as under the old policy. The outermost bins include "
        "all values beyond them.",
        FULL,
    ),
    "times": Entry(
        times,
        "Where the time goes",
        "Means over a rollout or over neighbouring updates. Percentages are of the whole run; evaluation is not drawn.",
        FULL,
    ),
    "loss": Entry(loss, "Loss", "Advantages sum to 0 in a group, so the size of the loss says little about learning."),
    "grad_norm": Entry(grad_norm, "Gradient", "Single spikes are usual, steady growth is not."),
    "learning_rate": Entry(learning_rate, "Learning rate", "The value of the schedule."),
}


# ---------------------------------------------------------------------- a comparison

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
    "held_out": Entry(
        _curve_figure(lambda run: run.held_out(), "reward on held-out problems", unit=True),
        "Held-out reward",
        _BAND,
        LARGE,
    ),
    "entropy": Entry(_curve_figure(_logged("entropy"), "entropy, nats per token"), "Entropy", _BAND, TALL),
    "reward": Entry(
        _curve_figure(_logged("reward"), "reward of the sampled completions", unit=True),
        "Sampled reward",
        _BAND + " Averaged over neighbouring updates.",
        LARGE,
    ),
    "token_kl": Entry(
        _curve_figure(_logged("troll/kl_before/p99"), "token KL, 99th percentile, before projection", log=True),
        "Token KL",
        "KL to the old policy before projection or clipping.",
        TALL,
    ),
    "largest_kl": Entry(
        _curve_figure(_largest, "largest token KL of a rollout's updates", log=True),
        "Largest token KL",
        "Over the updates on a rollout, as used in the loss: "
        "after projection for TROLL, without a bound for the others.",
        FULL,
    ),
}
