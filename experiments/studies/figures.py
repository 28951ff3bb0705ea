"""Results → figures, one panel or two per task. Small dots are seeds, lines and large dots their means.

Whiskers and the bands around rewards are Student's 95 % intervals over seeds; bands on a logarithmic axis are the range
of the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from scores import (
    BETTER,
    FEWEST,
    WORSE,
    Measure,
    at,
    by_seed,
    difference,
    end,
    labels,
    mean,
    over_seeds,
    planned,
    rewards,
    setting,
    smoothed,
    spread,
)

from troll.lab.report.run_data import Array, Missing
from troll.lab.report.style import DASHES, End, Size, colour, label_ends, log_axis, mark_level, panels, tick
from troll.lab.runs.comparison import ARMS
from troll.lab.runs.folder import Line

Groups = Mapping[str, Sequence[Line]]
"""Arm → its runs."""
SIZE = Size(760, 290, 12)
KL_BOUND = 0.05
"""Of a run without the flag."""
_TITLES = {end: "reward at the end", mean: "reward over the whole run"}
_SPARE = ("custom", "before", "time-generate", "time-optimizer", "time-evaluate", "time-reward", "time-backward")


def colours(arms: Sequence[str]) -> dict[str, str]:
    """Arm → a name in the palette: its own, or one that no arm has."""
    others = [arm for arm in arms if arm not in ARMS]
    return {arm: arm if arm in ARMS else _SPARE[others.index(arm) % len(_SPARE)] for arm in arms}


def score_over_rates(tasks: Groups, sweep: str, arms: str, measure: Measure = end) -> Figure:
    """Reward over what was swept, per arm."""
    return _over(tasks, sweep, arms, "learning rate", measure)


def over_updates(tasks: Groups, axis: str, arms: str) -> Figure:
    """Reward at the end over the number of updates per rollout, per arm."""
    return _over(tasks, axis, arms, "updates per rollout", end)


def _over(tasks: Groups, axis: str, arms: str, xlabel: str, measure: Measure) -> Figure:
    figure, axes = _panels([_title(task, _TITLES[measure]) for task in tasks], _all_labels(tasks, arms), xlabel)
    for ax, lines in zip(axes, tasks.values(), strict=True):
        values, names = labels(lines, axis), labels(lines, arms)
        shades, ends = colours(names), []
        for i, arm in enumerate(names):
            shift = 0.06 * (i - (len(names) - 1) / 2)
            cells = {x + shift: at(lines, **{arms: arm, axis: value}) for x, value in enumerate(values)}
            means = {x: found for x, cell in cells.items() if cell and (found := over_seeds(cell, measure))}
            shade = colour(shades[arm])
            for x, found in means.items():
                dots = list(by_seed(cells[x], measure).values())
                ax.plot([x] * len(dots), dots, "o", color=shade, markersize=3, alpha=0.5, markeredgewidth=0)
                if found.low is not None and found.high is not None:
                    ax.plot([x, x], [found.low, found.high], color=shade, linewidth=1.1)
            level = [found.mean for found in means.values()]
            ax.plot(list(means), level, color=shade, linestyle=_dashes(arm), linewidth=2, marker="o", markersize=5)
            ends.append(End(level[-1], arm, shades[arm]))
        ax.xaxis.set_major_locator(FixedLocator(list(range(len(values)))))
        ax.set_xticklabels(values)
        ax.set_xlim(-0.4, len(values) - 0.6)
        _within_reason(ax, [measure(line) or 0.0 for line in lines])
        label_ends(ax, SIZE, ends)
    return figure


def curves(tasks: Mapping[str, Groups]) -> Figure:
    """Sampled reward over the rollouts, mean of three neighbours, per arm."""
    figure, axes = _panels([_title(task, "sampled reward") for task in tasks], _names(tasks.values()), "rollout")
    for ax, groups in zip(axes, tasks.values(), strict=True):
        shades, ends, seen = colours(list(groups)), [], []
        alpha = 0.13 if len(groups) <= len(ARMS) else 0.06
        for arm, lines in groups.items():
            if not lines:
                continue
            many = [smoothed(rewards(line)) for line in lines]
            found = [spread(values) for values in zip(*many, strict=True)]
            x = np.arange(len(found), dtype=np.float64) + (2 if len(found) > 1 else 1)
            level = np.array([each.mean for each in found])
            if len(lines) >= FEWEST:
                low, high = np.array([(each.low, each.high) for each in found], dtype=np.float64).T
                ax.fill_between(x, low, high, color=colour(shades[arm]), alpha=alpha, linewidth=0)
            _line(ax, x, level, arm, shades[arm])
            ends.append(End(float(level[-1]), arm, shades[arm]))
            seen += [value for curve in many for value in curve]
        _within_reason(ax, seen)
        label_ends(ax, SIZE, ends)
    return figure


def changes(tasks: Groups, axis: str, base: str) -> Figure:
    """Differences to ``base`` at the end and over the whole run: thin bar Student's interval, thick bar bootstrap.

    With two seeds there is no thin bar: it would hide the rest.
    """
    rows = max(len(labels(lines, axis)) - 1 for lines in tasks.values())
    wide = max(len(x) for x in _all_labels(tasks, axis))
    size = replace(SIZE, height=(6.0 + 2.0 * rows) * SIZE.font)
    drawn = [(task, measure) for task in tasks for measure in (end, mean)]
    titles = [_title(task, f"{_TITLES[measure]}, against {base}") for task, measure in drawn]
    figure, axes = panels(size, titles, xlabel="", left=1.5 + 0.6 * wide)
    for ax, (task, measure) in zip(axes, drawn, strict=True):
        lines = tasks[task]
        names = [x for x in labels(lines, axis) if x != base]
        for i, name in enumerate(names):
            gap = difference(at(lines, **{axis: name}), at(lines, **{axis: base}), measure)
            if gap is None:
                continue
            shade = colour({BETTER: "troll", WORSE: "clip"}.get(gap.says, "none"))
            bars = [(gap.student, 1.2)] * (len(gap.values) >= FEWEST) + [(gap.bootstrap, 3.2)]
            for found, width in bars:
                if found.low is not None and found.high is not None:
                    ax.plot([found.low, found.high], [-i, -i], color=shade, linewidth=width, zorder=3)
            dots = list(gap.values.values())
            ax.plot(dots, [0.26 - i] * len(dots), "o", color=shade, markersize=3, alpha=0.55, markeredgewidth=0)
            ax.plot([gap.student.mean], [-i], "o", color=shade, markersize=7, zorder=4)
        ax.axvline(0, color=colour("ink"), linewidth=1.1, linestyle=(0, (4, 2.5)))
        ax.set_ylim(0.5 - max(1, len(names)), 0.6)
        ax.yaxis.set_major_locator(FixedLocator([-i for i in range(len(names))]))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.set_yticklabels(names)
        ax.grid(False)
        ax.grid(axis="x", color=colour("grid"), linewidth=0.8)
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(lambda x, _: tick(x))
        ax.margins(x=0.08)
    return figure


def network(tasks: Mapping[str, Groups]) -> Figure:
    """How far the network went from the old policy over the rollouts: largest token KL, and KL of a completion."""
    drawn = {
        "kl_before/max": "largest token KL of the updates",
        "sequence_kl_before": "KL of a completion, last update",
    }
    titles = [_title(task, title) for task in tasks for title in drawn.values()]
    names = [*_names(tasks.values()), "bound 0.05"]
    figure, axes = _panels(titles, names, "rollout")
    panel = iter(axes)
    for groups in tasks.values():
        for key in drawn:
            ax = next(panel)
            ends = _seed_curves(ax, groups, key)
            bounds = _bounds(groups) if key == "kl_before/max" else []
            low, high = min([ax.dataLim.minposy, *bounds]), max([ax.dataLim.y1, *bounds])
            log_axis(ax, low / 1.5, high * 1.6)
            for bound in bounds:
                mark_level(ax, bound)
                ends.append(End(bound, f"bound {tick(bound)}", "ink"))
            label_ends(ax, SIZE, ends)
    return figure


def solver(tasks: Mapping[str, Groups]) -> Figure:
    """Steps of the solver over the rollouts, mean and (thin) largest of a rollout, and the mass kept of the policy."""
    titles = [_title(task, title) for task in tasks for title in ("solver steps, mean and largest", "kept mass")]
    figure, axes = _panels(titles, _names(tasks.values()), "rollout")
    panel = iter(axes)
    for groups in tasks.values():
        steps, mass = next(panel), next(panel)
        ends = _seed_curves(steps, groups, "solver_steps/mean")
        _seed_curves(steps, groups, "solver_steps/max", thin=True)
        steps.set_ylim(bottom=0)
        label_ends(steps, SIZE, ends)
        label_ends(mass, SIZE, _seed_curves(mass, groups, "kept_mass/old"))
    return figure


def _seed_curves(ax: Axes, groups: Groups, key: str, thin: bool = False) -> list[End]:
    """Mean and range of the seeds that have a value, per arm."""
    shades, ends = colours(list(groups)), []
    for arm, lines in groups.items():
        table = _table(lines, key)
        kept = np.isfinite(table).any(axis=0)
        if not kept.any():
            continue
        x, y = np.arange(1.0, table.shape[1] + 1)[kept], table[:, kept]
        level = np.nanmean(y, axis=0)
        if len(lines) > 1 and not thin:
            ax.fill_between(x, np.nanmin(y, 0), np.nanmax(y, 0), color=colour(shades[arm]), alpha=0.13, linewidth=0)
        _line(ax, x, level, arm, shades[arm], linewidth=0.9 if thin else 2.0)
        ends.append(End(float(level[-1]), arm, shades[arm]))
    if not ends:
        raise Missing(f"No run logged {key}.")
    return ends


def _table(lines: Sequence[Line], key: str) -> Array:
    """Seeds × rollouts; NaN where there is no positive number."""
    rows = [line["rollouts"].get(key, []) for line in lines]
    table = np.full((len(rows), max(map(planned, lines), default=0)), np.nan)
    for i, row in enumerate(rows):
        table[i, : len(row)] = [x if x is not None and x > 0 else math.nan for x in row]
    return table


def _line(ax: Axes, x: Array, y: Array, arm: str, name: str, linewidth: float = 2.0) -> None:
    look: dict[str, Any] = {"marker": "o", "markersize": 3.5} if x.size < 4 else {}
    ax.plot(x, y, color=colour(name), linewidth=linewidth, linestyle=_dashes(arm), **look)


def _dashes(arm: str) -> Any:
    """Those of the arm, or of the one it varies: ``clip-0.4`` is a clip."""
    return DASHES.get(arm, DASHES.get(arm.split("-")[0], "-"))


def _within_reason(ax: Axes, seen: Sequence[float]) -> None:
    """Rewards between 0 and 1 have an axis between 0 and 1, however wide the interval of a few seeds."""
    low, high = ax.get_ylim()
    if min(seen) >= 0 and max(seen) <= 1:
        low, high = max(low, -0.02), min(high, 1.02)
    ax.set_ylim(low, high)


def _bounds(groups: Groups) -> list[float]:
    bounds = {
        setting(x, "kl_bound", KL_BOUND) for g in groups.values() for x in g if setting(x, "trust_region") == "troll"
    }
    return sorted(map(float, bounds))


def _panels(titles: Sequence[str], names: Iterable[str], xlabel: str) -> tuple[Figure, list[Axes]]:
    return panels(SIZE, titles, labels=max(map(len, names)) + 0.5, xlabel=xlabel)


def _names(tasks: Iterable[Groups]) -> list[str]:
    return [arm for groups in tasks for arm in groups]


def _all_labels(tasks: Groups, axis: str) -> list[str]:
    return [label for lines in tasks.values() for label in labels(lines, axis)]


def _title(task: str, what: str) -> str:
    return f"{task}: {what}" if task else what
