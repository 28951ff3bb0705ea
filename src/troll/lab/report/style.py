"""How figures look: one palette, a few sizes, axes without ornament, and SVG that follows the page's light or dark.

Figures are drawn in the light colours. For the page every colour of the palette becomes a CSS variable, so that one
drawing serves both; a paper gets the drawing as it is.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from troll.lab.report.run_data import Array, RunData, group_size, grouped, smooth, window

PALETTE: dict[str, tuple[str, str]] = {  # light, dark
    "ink": ("#1c2024", "#e9ebee"),
    "muted": ("#5f6871", "#a4acb6"),
    "grid": ("#e4e7eb", "#2f353c"),
    "rule": ("#b9c0c8", "#4a525b"),
    "surface": ("#fffffe", "#171a1e"),
    "troll": ("#197278", "#4fc1b7"),
    "clip": ("#c44536", "#f2836f"),
    "clip-higher": ("#a8437e", "#e58cc0"),
    "gspo": ("#6d5aa8", "#ab9ae6"),
    "none": ("#757d86", "#98a1ac"),
    "custom": ("#3d6fb4", "#7fb0ee"),
    "before": ("#b3761a", "#e3a94f"),
    "gain": ("#2a6f97", "#6bb3dd"),
    "loss": ("#a65628", "#e0935f"),
    "part-1": ("#a9c7cb", "#3d5f66"),
    "part-2": ("#74a3a9", "#5d8d95"),
    "part-3": ("#417f86", "#83bac2"),
    "part-4": ("#0f5a61", "#b4e3e9"),
    "time-generate": ("#2f5d8a", "#4f86bd"),
    "time-reward": ("#d9a441", "#e0b25c"),
    "time-score": ("#86b0d3", "#8fbbe0"),
    "time-forward": ("#2c7f6c", "#3f9c86"),
    "time-backward": ("#8bbf9f", "#86c9a2"),
    "time-optimizer": ("#b55d60", "#cf7377"),
    "time-evaluate": ("#9a7fb5", "#b196cf"),
    "time-other": ("#c3c8ce", "#68717b"),
}
DASHES: dict[str, Any] = {
    "clip": (0, (5, 1.5)),
    "clip-higher": (0, (1, 1.2)),
    "gspo": (0, (4, 1.5, 1, 1.5)),
    "none": (0, (3, 3)),
}
_STAMPS = {  # what matplotlib would write about itself and the day
    "svg": ("Date", "Creator", "Type", "Format"),
    "png": ("Software",),
    "pdf": ("CreationDate", "Creator", "Producer"),
}
_RC: Any = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: the same drawing on every machine
    "text.parse_math": False,
    "axes.unicode_minus": True,
    "svg.fonttype": "none",
    "path.simplify": True,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Size:
    """Width and height of a row of panels and the size of the text, in CSS pixels."""

    width: float
    height: float
    font: float

    def grid(self, panels: int) -> tuple[int, int]:
        """Rows and columns in which that many panels stand."""
        rows = -(-panels // max(1, int(self.width // 260)))
        return rows, -(-panels // rows)


PAPER = Size(594, 285, 12)  # at the width of a text, 5.5 inches, the letters are 8 points high
FULL, LARGE, TALL, SMALL = Size(1100, 320, 12), Size(726, 310, 12), Size(352, 310, 12), Size(352, 224, 11.5)


def colour(name: str) -> str:
    """A colour of the palette."""
    return PALETTE.get(name, PALETTE["custom"])[0]


def style() -> AbstractContextManager[None]:
    """In which figures are drawn."""
    return matplotlib.rc_context(_RC)


def panels(
    size: Size,
    titles: Sequence[str],
    *,
    labels: float = 0,
    share_y: bool = False,
    xlabel: str = "update",
    left: float = 4.2,
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel per title; ``labels`` is room to the right of each, in widths of a letter."""
    em = size.font
    rows, columns = size.grid(len(titles))
    height = size.height * rows
    figure = Figure(figsize=(size.width / 72, height / 72))
    axes: list[Axes] = []
    cell_w, cell_h = size.width / columns, size.height
    for i, title in enumerate(titles):
        x0 = (i % columns) * cell_w + left * em
        y0 = height - (i // columns + 1) * cell_h + 3.1 * em
        box = (x0, y0, (i % columns + 1) * cell_w - x0 - (0.62 * labels + 0.9) * em, cell_h - 5.3 * em)
        ax = figure.add_axes(
            (box[0] / size.width, box[1] / height, box[2] / size.width, box[3] / height),
            sharey=axes[0] if share_y and axes else None,
        )
        _plain(ax, size)
        ax.set_title(title, loc="left", fontsize=em, color=colour("muted"), pad=0.75 * em, x=-left * em / box[2])
        ax.set_xlabel(xlabel, fontsize=em, color=colour("muted"), labelpad=0.35 * em)
        axes.append(ax)
    return figure, axes


def _plain(ax: Axes, size: Size) -> None:
    ax.set_facecolor("none")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(colour("rule"))
    ax.tick_params(length=0, labelsize=size.font, labelcolor=colour("muted"), pad=0.4 * size.font)
    ax.grid(axis="y", color=colour("grid"), linewidth=0.8)
    ax.set_axisbelow(True)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(4))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: tick(y)))
    ax.margins(x=0.015, y=0.08)


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def tick(y: float) -> str:
    """A number on an axis."""
    if y == 0 or abs(y) < 1e-12:
        return "0"
    if abs(y) >= 1e5 or abs(y) < 2e-3:
        mantissa, exponent = f"{y:.2e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".").replace("-", "−")
        power = "10" + str(int(exponent)).translate(_RAISED)
        return {"1": power, "−1": "−" + power}.get(mantissa, f"{mantissa}·{power}")
    return f"{y:.4g}".replace("-", "−")


def percent_axis(ax: Axes) -> None:
    """Values are shares: 0.05 reads 5 %."""
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.3g} %"))


def log_axis(ax: Axes, low: float, high: float) -> None:
    """A logarithmic y axis from ``low`` to ``high``, with at most six powers of ten named."""
    ax.set_yscale("log")
    ax.set_ylim(low, high)
    first, last = int(np.ceil(np.log10(low) - 1e-9)), int(np.floor(np.log10(high) + 1e-9))
    step = max(1, -(-(last - first + 1) // 6))
    ticks = [10.0**k for k in range(last, first - 1, -step)]
    if len(ticks) < 3:
        ticks = [m * 10.0**k for k in range(first - 1, last + 1) for m in (1, 2, 5) if low <= m * 10.0**k <= high]
    ax.set_yticks(ticks)
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: tick(y)))


def mark_level(ax: Axes, y: float) -> None:
    """A dashed line across."""
    ax.axhline(y, color=colour("ink"), linewidth=1.1, linestyle=(0, (4, 2.5)), zorder=5)


def mark_starts(ax: Axes, starts: Sequence[float]) -> None:
    """Short strokes on the x axis where a new rollout begins, if they can be told apart."""
    if 1 < len(starts) <= 130:
        vertices = [(x, y) for x in starts for y in (-0.02, 0.0)]
        codes = [Path.MOVETO, Path.LINETO] * len(starts)
        stroke = PathPatch(Path(vertices, codes), transform=ax.get_xaxis_transform(), facecolor="none", clip_on=False)
        stroke.set(edgecolor=colour("rule"), linewidth=0.9)
        ax.add_artist(stroke)


def columns(ax: Axes, x: Array, low: Array, high: Array, width: float, name: str, alpha: float) -> None:
    """An upright bar per x from ``low`` to ``high``, all as one path; none where it would have no height."""
    drawn = high > low
    x, low, high = x[drawn], low[drawn], high[drawn]
    if not x.size:
        return
    left, right = x - width / 2, x + width / 2
    corners = np.stack([left, low, left, high, right, high, right, low, left, low], axis=-1).reshape(-1, 2)
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * x.size
    ax.add_patch(PathPatch(Path(corners, codes), facecolor=colour(name), edgecolor="none", linewidth=0, alpha=alpha))


def caps(ax: Axes, x: Array, y: Array, width: float, name: str) -> None:
    """A level stroke at each (x, y), all as one path."""
    ends = np.stack([x - width / 2, y, x + width / 2, y], axis=-1).reshape(-1, 2)
    stroke = PathPatch(Path(ends, [Path.MOVETO, Path.LINETO] * x.size), facecolor="none", linewidth=1.3)
    stroke.set(edgecolor=colour(name), capstyle="butt")
    ax.add_patch(stroke)


class End(NamedTuple):
    """The name of a line at its right end: text in a colour, with a square of another one before it if wanted."""

    y: float
    text: str
    name: str
    square: str | None = None


def label_ends(ax: Axes, size: Size, labels: Sequence[End]) -> None:
    """Names to the right of the axes, moved apart where they would touch; drawn once the limits are set."""
    height = ax.bbox.height
    gap = 1.2 * size.font / 72 * ax.figure.dpi / height
    em = size.font / 72 * ax.figure.dpi / ax.bbox.width
    rows = sorted(((_fraction(ax, label.y), label) for label in labels), key=lambda row: row[0])
    indent = 1.7 if any(label.square for label in labels) else 0.6
    places = [min(max(place, 0.0), 1.0) for place, _ in rows]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    ceiling = 1.0
    for i in reversed(range(len(places))):
        places[i] = min(places[i], ceiling)
        ceiling = places[i] - gap
    for place, (_, label) in zip(places, rows, strict=True):
        look = {"va": "center", "fontsize": size.font, "color": colour(label.name)}
        ax.text(1 + indent * em, place, label.text, transform=ax.transAxes, **look)  # type: ignore[arg-type]
        if label.square:
            (square,) = ax.plot([1 + 0.9 * em], [place], "s", transform=ax.transAxes, clip_on=False)
            square.set(color=colour(label.square), markersize=0.72 * size.font)


def _fraction(ax: Axes, y: float) -> float:
    """The height of a value as a fraction of the axes."""
    ax.get_ylim()  # transData is only right once pending changes of the limits are applied
    return float(ax.transAxes.inverted().transform(ax.transData.transform((0, y)))[1])


MOST_POINTS = 300


def trace(ax: Axes, run: RunData, x: Array, y: Array, name: str, points: bool = False) -> float:
    """A quantity as it was logged, faint, and its centred mean over a few updates; returns the mean's last value."""
    size, over = group_size(x.size, MOST_POINTS), window(run, x)
    line = smooth(y, over)
    x, y, line = grouped(x, size), grouped(y, size), grouped(line, size)
    look = {"linestyle": "", "marker": "o", "markersize": 4, "markeredgewidth": 0} if points else {"linewidth": 0.8}
    if points or over > 1:
        ax.plot(x, y, color=colour(name), alpha=0.45 if points else 0.25, **look)
    ax.plot(x, line, color=colour(name), linewidth=2, solid_capstyle="round", marker="o" if x.size == 1 else None)
    return float(line[-1])


def save(figure: Figure, kind: str, name: str) -> bytes:
    """The bytes of a figure: the same for the same figure."""
    buffer = io.BytesIO()
    empty = dict.fromkeys(_STAMPS[kind])
    with style(), matplotlib.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's own fonts have it
        extra: dict[str, Any] = {"dpi": 220, "facecolor": "white"} if kind == "png" else {}
        figure.savefig(buffer, format=kind, metadata=empty, **extra)
    return buffer.getvalue()


def inline_svg(draw: Callable[[], Figure], name: str, label: str) -> str:
    """A figure as an element of the page: colours by variable, ids of its own, no fixed size."""
    with style():
        text = save(draw(), "svg", name).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'xlink:href="#([^"]+)"', r'href="#\1"', text)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    for key, (light, _) in PALETTE.items():
        text = text.replace(light, f"var(--{key})")
    head = re.search(r'viewBox="0 0 ([\d.]+) [\d.]+"', text)
    width = f' style="max-width:{1.35 * float(head[1]):.0f}px"' if head else ""
    opening = f'<svg {head[0] if head else ""} role="img" aria-label="{label}"{width}>'
    text = re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1)
    return re.sub(r">\s+<", "><", text).strip()


def css_palette() -> str:
    """The palette as CSS variables that follow the colour scheme."""
    return " ".join(f"--{key}: light-dark({light}, {dark});" for key, (light, dark) in PALETTE.items())
