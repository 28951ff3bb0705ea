"""Figures of the trust region: KL of tokens and completions, share of constrained tokens, solver steps, ratios."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from troll.lab.report.run_data import (
    Array,
    Missing,
    RunData,
    Spread,
    group_size,
    grouped,
    kl_spread,
    log_ratio_counts,
    series,
)
from troll.lab.report.style import (
    PAPER,
    End,
    Size,
    caps,
    colour,
    columns,
    label_ends,
    log_axis,
    mark_level,
    mark_starts,
    panels,
    percent_axis,
    tick,
    trace,
)

_BANDS = (0.62, 0.46, 0.3, 0.16)  # how dark: up to the median, to 90 %, to 99 %, to the largest


def kl(run: RunData, size: Size = PAPER) -> Figure:
    """Spread of the token KL of every update, before and after projection."""
    spreads = {"before": kl_spread(run, "before")}
    titles = ["KL of each token to the policy that sampled it"]
    if run.projects:
        spreads["after"] = kl_spread(run, "after")
        titles = ["token KL before projection", "token KL after projection"]
    figure, axes = panels(size, titles, share_y=True, labels=9.5)
    everything = np.concatenate([s.values[:, 3] for s in spreads.values()])
    seen = everything[everything > 0]
    if not seen.size:
        once = ": each rollout is used for one update, before which no token has moved" * (run.history.updates == 1)
        raise Missing(f"Every token KL is 0{once}.")
    top = 2.5 * max(float(seen.max()), run.bound or 0.0)
    medians = np.concatenate([s.values[:, 0] for s in spreads.values()])
    low = np.median(medians[medians > 0]) / 10 if (medians > 0).any() else top / 1e5
    bottom = 10.0 ** np.floor(np.log10(min(max(low, top / 1e8), top / 100)))
    for ax, (when, spread) in zip(axes, spreads.items(), strict=True):
        log_axis(ax, bottom, top)
        name = "before" if run.projects and when == "before" else run.arm
        x, width = _kl_columns(ax, run, spread, name, bottom)
        ax.set_xlim(x[0] - 1.2 * width, x[-1] + 1.2 * width)
        if run.bound is not None:
            mark_level(ax, run.bound)
            label_ends(ax, size, [End(run.bound, f"bound {tick(run.bound)}", "ink")])
        if when == "before":
            _band_key(ax, size, name, run.bound)
        mark_starts(ax, run.rollout_starts)
    return figure


def _kl_columns(ax: Axes, run: RunData, spread: Spread, name: str, bottom: float) -> tuple[Array, float]:
    many = group_size(spread.steps.size, 200, run.updates_per_rollout)
    x = grouped(spread.steps, many)
    values = np.column_stack([grouped(spread.values[:, :3], many), grouped(spread.values[:, 3], many, np.max)])
    clipped = np.maximum(values, bottom)
    width = 0.78 * (float(np.median(np.diff(x))) if x.size > 1 else 1.0)
    floors = np.column_stack([np.full(x.size, bottom), clipped])
    for i, alpha in enumerate(_BANDS):
        columns(ax, x, floors[:, i], clipped[:, i], width, name, alpha)
    seen = values[:, 3] > bottom
    caps(ax, x[seen], values[seen, 3], width, name)
    return x, width


def _band_key(ax: Axes, size: Size, name: str, bound: float | None) -> None:
    """One column with its quantiles named, to the right of the axes, where the bound is not."""
    above = bound is not None and bound < np.sqrt(np.prod(ax.get_ylim()))
    em_x, em_y = (size.font / 72 * ax.figure.dpi / side for side in (ax.bbox.width, ax.bbox.height))
    left, foot = 1 + 0.6 * em_x, (0.96 - 5.4 * em_y) if above else 0.0
    for i, alpha in enumerate(_BANDS):
        box = Rectangle((left, foot + 1.35 * i * em_y), 0.8 * em_x, 1.35 * em_y, transform=ax.transAxes, clip_on=False)
        box.set(facecolor=colour(name), edgecolor="none", alpha=alpha)
        ax.add_artist(box)
    for i, text in enumerate(("median", "90 %", "99 %", "max")):
        at = (left + 1.2 * em_x, foot + 1.35 * (i + 1) * em_y)
        ax.text(*at, text, transform=ax.transAxes, va="center", fontsize=size.font, color=colour("muted"))


def constrained(run: RunData, size: Size = PAPER) -> Figure:
    """Share of tokens on which the trust region acted."""
    if run.projects:
        x, y = run.series("troll/projected_fraction")
        title = "share of tokens projected"
    else:
        x, y = run.series("clip_ratio/region_mean", "troll/clipped_fraction", "clip_ratio/high_mean")
        title = "share of tokens clipped"
    figure, (ax,) = panels(size, [title])
    trace(ax, run, x, y, run.arm)
    percent_axis(ax)
    ax.set_ylim(0, max(0.01, 1.1 * float(y.max())))
    mark_starts(ax, run.rollout_starts)
    return figure


def sequence_kl(run: RunData, size: Size = PAPER) -> Figure:
    """KL of whole completions, before and after projection."""
    x, y = run.series("troll/sequence_kl_before")
    figure, (ax,) = panels(size, ["KL of a completion, summed over its tokens"], labels=6 if run.projects else 0)
    labels = []
    if run.projects:
        labels.append(End(trace(ax, run, x, y, "before"), "before", "before"))
        x, y = run.series("troll/sequence_kl_after")
        labels.append(End(trace(ax, run, x, y, run.arm), "after", run.arm))
    else:
        trace(ax, run, x, y, run.arm)
    ax.set_ylim(bottom=0)
    label_ends(ax, size, labels)
    mark_starts(ax, run.rollout_starts)
    return figure


def ratio(run: RunData, size: Size = PAPER) -> Figure:
    """Probability ratios of the sampled tokens: by place in the rollout, and early against late in training."""
    if run.tokens is None or not run.tokens.updates:
        raise Missing("No histogram of ratios was recorded (tokens.jsonl).")
    last, steps = run.updates_per_rollout - 1, [x["step"] for x in run.tokens.updates]
    early, late = np.quantile(steps, [0.25, 0.75])
    pairs = {
        "over training": [
            ("first quarter", log_ratio_counts(run, lambda u: u["step"] <= early)),
            ("last quarter", log_ratio_counts(run, lambda u: u["step"] >= late)),
        ]
    }
    if last:
        by_place = [
            ("update 1", log_ratio_counts(run, lambda u: u.get("update") == 0)),
            (f"update {last + 1}", log_ratio_counts(run, lambda u: u.get("update") == last)),
        ]
        pairs = {"within a rollout": by_place, **pairs}
    edges = np.clip(np.array(run.tokens.log_ratio_edges, dtype=np.float64), -20, 20)
    total = sum(counts for pair in pairs.values() for _, counts in pair)
    full = np.flatnonzero(total)
    if not full.size:
        raise Missing("No ratio was recorded.")
    reach = max(math.log(1.5), -edges[full[0]], edges[full[-1] + 1])
    figure, axes = panels(
        size, [f"share of tokens, {title}" for title in pairs], share_y=True, xlabel="probability ratio π / π_old"
    )
    shares = [c[c > 0].min() / c.sum() for pair in pairs.values() for _, c in pair if c.sum()]
    for ax, pair in zip(axes, pairs.values(), strict=True):
        log_axis(ax, 0.5 * max(min(shares), 1e-7), 2.0)
        for (text, counts), name, place in zip(pair, ("muted", run.arm), (0.88, 0.74), strict=True):
            if counts.sum():
                top = np.maximum(counts / counts.sum(), 1e-9)
                ax.stairs(top, edges, color=colour(name), linewidth=1.6, baseline=1e-9, fill=False)
                ax.stairs(top, edges, color=colour(name), alpha=0.14, baseline=1e-9, fill=True)
            ax.text(0.985, place, text, transform=ax.transAxes, ha="right", fontsize=size.font, color=colour(name))
        _ratio_axis(ax, reach)
    return figure


def _ratio_axis(ax: Axes, reach: float) -> None:
    wanted = (
        [1, 1.2, 1.5, 2, 3]
        if reach < math.log(3)
        else [1, 2, 3, 5, 10]
        if reach < math.log(12)
        else [1, 3, 10, 100, 1e4]
    )
    ticks = [s * math.log(r) for r in wanted for s in (1, -1) if math.log(r) <= reach]
    ax.set_xlim(-reach, reach)
    ax.xaxis.set_major_locator(FixedLocator(sorted(set(ticks))))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{math.exp(x):.2g}"))
    ax.axvline(0, color=colour("rule"), linewidth=0.8, zorder=0)


def solver_steps(run: RunData, size: Size = PAPER) -> Figure:
    """How many steps the solver took for a projected token."""
    counts: dict[int, int] = {}
    for line in run.tokens.updates if run.tokens else []:
        for steps, tokens in (line.get("solver_steps") or {}).items():
            counts[int(steps)] = counts.get(int(steps), 0) + int(tokens)
    total = sum(counts.values())
    if not total:
        shares = run.history.most("troll/projected_fraction")
        unprojected = bool(shares.size) and not (shares != 0).any()  # NaN, where it was not logged, is not 0
        raise Missing("No token was projected." if unprojected else "No solver steps were recorded (tokens.jsonl).")
    figure, (ax,) = panels(size, ["share of projected tokens"], xlabel="solver steps")
    x = np.arange(min(counts), max(counts) + 1)
    y = np.array([counts.get(int(k), 0) / total for k in x])
    columns(ax, x.astype(np.float64), np.zeros_like(y), y, 0.72, run.arm, 0.9)
    for k, share in zip(x, y, strict=True):
        text = f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else "< 1 %"
        ax.text(float(k), share + 0.015, text, ha="center", va="bottom", fontsize=size.font, color=colour("ink"))
    ax.set(xlim=(x[0] - 0.9, x[-1] + 0.9), ylim=(0, 1.2 * y.max()))
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.yaxis.set_major_locator(NullLocator())
    return figure


_SIGNS = {"positive": ("positive", "gain"), "negative": ("negative", "loss")}
_QUARTERS = {
    "first": ("1", "part-1"),
    "second": ("2", "part-2"),
    "third": ("3", "part-3"),
    "last": ("4", "part-4"),
}
_PANELS = {
    "mean token KL, by sign of the advantage": ("troll/kl_by_sign", _SIGNS),
    "mean token KL, by quarter of the completion": ("troll/kl_by_quarter", _QUARTERS),
}


def kl_groups(run: RunData, size: Size = PAPER) -> Figure:
    """Mean KL before projection of the tokens of each group."""
    if not any(
        series(run.metrics, f"{stem}/{key}")[0].size for stem, lines in _PANELS.values() for key, _ in lines.values()
    ):
        raise Missing("Not logged: troll/kl_by_sign and troll/kl_by_quarter.")
    figure, axes = panels(size, list(_PANELS), share_y=True, labels=10)
    ends: list[list[End]] = []
    for ax, (stem, lines) in zip(axes, _PANELS.values(), strict=True):
        ends.append([])
        for text, (key, name) in lines.items():
            x, y = series(run.metrics, f"{stem}/{key}")
            if x.size:
                ends[-1].append(End(trace(ax, run, x, y, name), text, "ink", square=name))
        mark_starts(ax, run.rollout_starts)
    axes[0].set_ylim(bottom=0)
    for ax, labels in zip(axes, ends, strict=True):
        label_ends(ax, size, labels)
    return figure
