"""The figures of one run: a function each, from the data of the run to a matplotlib figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from troll.lab.report.region_figures import constrained, kl, kl_groups, ratio, sequence_kl, solver_steps
from troll.lab.report.run_data import Line, Missing, RunData, group_size, grouped
from troll.lab.report.style import (
    FULL,
    LARGE,
    PAPER,
    SMALL,
    TALL,
    End,
    Size,
    colour,
    columns,
    label_ends,
    panels,
    tick,
    trace,
)
from troll.lab.runs.statistics import finite

TIMES = ("generate", "reward", "score", "forward", "backward", "optimizer", "evaluate", "other")


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
    """Of each of ``TIMES``; what has another name counts as other."""
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


@dataclass(frozen=True)
class Entry:
    """A figure, its place on the page, and what is written below it."""

    draw: Callable[..., Figure]
    title: str
    caption: str
    size: Size = SMALL


RUN_FIGURES: dict[str, Entry] = {
    "reward": Entry(
        reward,
        "Reward",
        "Dots: mean reward of the completions of an update. Line: centred mean. Diamonds: problems never trained on.",
        LARGE,
    ),
    "entropy": Entry(
        entropy, "Entropy", "A steady fall to zero is a collapse: the policy always answers the same.", TALL
    ),
    "kl": Entry(
        kl,
        "How far tokens move",
        "One column per update, up to its largest token; stronger in colour where more tokens are. "
        "Strokes on the axis: a new rollout, where the KL starts again from 0.",
        FULL,
    ),
    "kl_groups": Entry(
        kl_groups,
        "Which tokens move",
        "Before projection. The negative line far above: the policy is driven away from what failed more than towards "
        "what worked. One quarter far above: most of the learning concerns that part of the answer.",
        FULL,
    ),
    "constrained": Entry(
        constrained,
        "How often the region acts",
        "A few percent is usual. The rules warn if the share stays high over several rollouts.",
    ),
    "sequence_kl": Entry(sequence_kl, "Whole completions", "Moves of single tokens add up over a completion."),
    "solver_steps": Entry(solver_steps, "Work of the solver", "3 to 5 steps are usual; the limit is 12."),
    "ratio": Entry(
        ratio,
        "Probability ratios of the sampled tokens",
        "As the loss used them. 1: as probable as when it was sampled. The outermost bins hold all that is beyond.",
        FULL,
    ),
    "times": Entry(
        times,
        "Where the time goes",
        "Means over a rollout, or over neighbouring updates. Shares are of the whole run; evaluation is not drawn.",
        FULL,
    ),
    "loss": Entry(loss, "Loss", "Advantages sum to 0 in a group: its size says little about learning."),
    "grad_norm": Entry(grad_norm, "Gradient", "Single spikes are usual; steady growth is not."),
    "learning_rate": Entry(learning_rate, "Learning rate", "As the schedule set it."),
}
