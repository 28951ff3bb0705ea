"""The figure of which tokens move: by what their completion earned, and by where they stand in it."""

from __future__ import annotations

from matplotlib.figure import Figure

from troll.lab.report.data import Missing, RunData, series
from troll.lab.report.style import PAPER, End, Size, label_ends, mark_starts, panels, trace

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
