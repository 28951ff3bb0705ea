"""The figures of a run of kernels.py: times and roofline of the first size, and how the times grow.

    python benchmarks/kernels/figure.py kernels.json --folder benchmarks/kernels

Writes ``times.svg`` and ``growth.svg``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from work import roof

OURS, OTHERS, FLOOR = "#0b6e4f", "#9aa5b1", "#d1495b"
FLOORS = ("one read", "matrix product alone", "three matrix products")
TITLES = {"selection": "logits → sparse policy", "scoring": "scoring pass", "loss": "loss, forward and backward"}
GROWTH = {"N": "tokens", "V": "vocabulary", "K": "tokens kept per position"}


def main() -> None:
    """Draw both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent)
    options = parser.parse_args()
    results = json.loads(options.results.read_text())
    mpl.rcParams.update(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "svg.fonttype": "none",
            "svg.hashsalt": "troll",
        }
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    save(times(results), options.folder / "times.svg")
    if results.get("growth"):
        save(growth(results), options.folder / "growth.svg")


def save(figure: Any, path: Path) -> None:
    """Without a date, so that the same numbers give the same file."""
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    print(f"{path}: {path.stat().st_size // 1024} KiB")


def colour(way: str) -> str:
    """Ours, a floor, or another's."""
    return OURS if "troll, " in way else FLOOR if way.startswith(FLOORS) else OTHERS


def times(results: dict[str, Any]) -> Any:
    """Bars of each part, one per way, and the roofline."""
    shown = [part for part in TITLES if part in results["parts"]]
    first = {part: next(iter(results["parts"][part].values())) for part in shown}
    ways = {part: {w: r for w, r in first[part]["ways"].items() if "ms" in r} for part in shown}
    heights = [max(3, len(ways[part])) for part in shown]
    figure, axes = plt.subplots(
        len(shown) + 1, 1, figsize=(8, 0.28 * sum(heights) + 5.5), height_ratios=[*heights, 14], layout="constrained"
    )
    for axis, part in zip(axes, shown, strict=False):
        _bars(axis, part, first[part]["size"], ways[part])
    _roofline(axes[-1], results, ways)
    return figure


def _bars(axis: Any, part: str, size: dict[str, int], ways: dict[str, dict[str, Any]]) -> None:
    names = list(ways)[::-1]
    ms = [ways[name]["ms"] for name in names]
    spread = [[ways[n]["ms"] - ways[n]["low"] for n in names], [ways[n]["high"] - ways[n]["ms"] for n in names]]
    axis.barh(names, ms, color=[colour(name) for name in names], xerr=[[max(0.0, x) for x in s] for s in spread])
    for name, x in zip(names, ms, strict=True):
        memory = ways[name]["MiB"]
        text = f"  {x:.3g} ms" + ("" if memory is None or part != "loss" else f", {memory:,.0f} MiB")
        axis.text(x, name, text, va="center", fontsize=8)
    axis.set_xscale("log")
    axis.set_xlim(min(ms) / 2, max(ms) * 6)
    words = ", ".join(f"{letter} = {value:,}" for letter, value in size.items())
    axis.set_title(f"{TITLES[part]}: {words}", loc="left")


def _roofline(axis: Any, results: dict[str, Any], ways: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Operations per byte against operations per second, under the measured peaks."""
    peaks = results["peaks"]
    bandwidth, top = peaks["copy TB/s"], peaks["product TFLOP/s"]
    ridge = top / bandwidth
    x = [0.3, ridge, 30 * ridge]
    axis.plot(x, [min(top, bandwidth * i) for i in x], color="black", lw=1)
    markers = {"selection": "o", "scoring": "s", "loss": "^"}
    for part, rows in ways.items():
        for way, row in rows.items():
            intensity = row["flops"] / row["bytes"]
            height = roof(row, peaks, part)["TFLOP/s"]
            axis.plot(intensity, height, markers[part], color=colour(way), ms=6, alpha=0.8)
        axis.plot([], [], markers[part], color="black", label=TITLES[part])
    for label, paint in (("troll", OURS), ("floor: one read, or the products alone", FLOOR), ("others", OTHERS)):
        axis.plot([], [], "s", color=paint, label=label)
    axis.set(xscale="log", yscale="log", xlabel="operations per byte, counted", ylabel="TFLOP/s")
    axis.set_title(f"roofline: {bandwidth:.2f} TB/s, {top:.0f} TFLOP/s, {results['device']}", loc="left")
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def growth(results: dict[str, Any]) -> Any:
    """One row per part, one column per letter."""
    letters = [letter for letter, points in results["growth"].items() if any("failed" not in p for p in points)]
    figure, axes = plt.subplots(
        len(TITLES), len(letters), figsize=(3.6 * len(letters) + 2.4, 8), squeeze=False, layout="constrained"
    )
    for column, letter in enumerate(letters):
        points = [p for p in results["growth"][letter] if "failed" not in p]
        for axis, part in zip(axes[:, column], TITLES, strict=True):
            for i, way in enumerate(points[0][part]):
                line = [(p[letter], p[part][way]["ms"]) for p in points if "ms" in p[part].get(way, {})]
                if line:
                    style = ["-", "--", ":", "-."][i % 4]
                    axis.plot(*zip(*line, strict=True), style, marker=".", color=colour(way), label=way)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_title(f"{TITLES[part]}", loc="left", fontsize=9)
            axis.set_xlabel(f"{letter}, {GROWTH[letter]}")
            axis.set_ylabel("ms")
            if column == len(letters) - 1:
                axis.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


if __name__ == "__main__":
    main()
