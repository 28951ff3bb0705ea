"""JSON of a run → Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from work import roof

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
BASE = {"selection": "one read", "scoring": "TRL", "loss": "TRL, clip", "projection": "project, troll, reference"}
TITLE = {
    "selection": "Logits → sparse policy",
    "scoring": "Hidden states → log-probabilities, entropy and, for troll, the sparse policy; no gradient",
    "loss": "Hidden states → loss and gradients, forward and backward",
    "projection": "The projection, forward and backward",
}


def markdown(results: dict[str, Any]) -> str:
    """All tables."""
    peaks = results["peaks"]
    lines = [
        f"{results['device']}, torch {results['torch']}, Triton {results['triton']}, TRL {results['trl']}, "
        f"Liger {results['liger']}; {results['dtype']}. Measured peaks: copy {peaks['copy TB/s']:.2f} TB/s, matrix "
        f"product {peaks['product TFLOP/s']:.0f} TFLOP/s. {_verdict(results)}",
    ]
    for part, by_size in results["parts"].items():
        for found in by_size.values():
            lines += ["", f"### {TITLE[part]}: {_words(found['size'])}", "", *_table(part, found, peaks)]
    if results.get("growth"):
        lines += ["", "### How it grows (ms)"]
        for letter, points in results["growth"].items():
            lines += ["", *_growth(letter, points)]
    for name in ("failed", "skipped"):
        if results.get(name):
            lines += ["", f"{name.capitalize()}: " + "; ".join(results[name]) + "."]
    return "\n".join(lines)


def _verdict(results: dict[str, Any]) -> str:
    checked = [x for x in results["checks"] if x.get("ours") and "failed" not in x]
    good = sum(x["ok"] for x in checked)
    return f"Checks passed before timing: {good} of {len(checked)}."


def _words(size: dict[str, int]) -> str:
    return ", ".join(f"{letter} = {value:,}" for letter, value in size.items())


def _table(part: str, found: dict[str, Any], peaks: dict[str, float]) -> list[str]:
    ways = found["ways"]
    base = next((row["ms"] for way, row in ways.items() if way.startswith(BASE[part]) and "ms" in row), None)
    if part == "selection":  # the faster of the two reads
        reads = [row["ms"] for way, row in ways.items() if way.startswith("one read") and "ms" in row]
        base = min(reads, default=base)
    extra = [x for x in ("wall ms", "device ms", "kernels") if any(x in row for row in ways.values())]
    head = ["way", "ms", "quartiles", f"÷ {BASE[part]}", "peak MiB", *extra, "TB/s", "TFLOP/s", "share of roof"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for way, row in ways.items():
        if "failed" in row:
            lines.append(f"| {way} | failed: {row['failed']}" + " |" * (len(head) - 1))
            continue
        r = roof(row, peaks, part)
        peak = "–" if row["MiB"] is None else f"{row['MiB']:,.0f}"
        cells = [
            way,
            _ms(row["ms"]),
            f"{_ms(row['low'])} to {_ms(row['high'])}",
            "–" if base is None else f"{row['ms'] / base:.2f}",
            peak,
            *(_ms(row[x]) if x in row else "–" for x in extra),
            f"{r['TB/s']:.2f}",
            f"{r['TFLOP/s']:.0f}",
            f"{r['share']:.0%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _growth(letter: str, points: list[dict[str, Any]]) -> list[str]:
    good = [p for p in points if "failed" not in p]
    if not good:
        return []
    names = [(part, way) for part in ("selection", "scoring", "loss") for way in good[0][part]]
    lines = [f"| {letter} | " + " | ".join(f"{p[letter]:,}" for p in good) + " |", "|---" * (len(good) + 1) + "|"]
    for part, way in names:
        cells = [_ms(p[part][way]["ms"]) if "ms" in p[part].get(way, {}) else "failed" for p in good]
        lines.append(f"| {part}: {way} | " + " | ".join(cells) + " |")
    return lines


def _ms(x: float) -> str:
    return f"{x:.3f}" if x < 1 else f"{x:.2f}" if x < 10 else f"{x:.1f}"


def failures(results: dict[str, Any]) -> list[str]:
    """The ways that did not run, with the reason."""
    return [
        f"{way}: {row['failed']}"
        for by_size in results["parts"].values()
        for found in by_size.values()
        for way, row in found["ways"].items()
        if "failed" in row
    ]


def put(text: str, path: Path) -> None:
    """Replace what stands between the marks."""
    page = path.read_text()
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    path.write_text(f"{page[:start]}\n{text}\n{page[end:]}")
