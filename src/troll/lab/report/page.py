"""The report: one self-contained HTML file about a run or a comparison, and its figures for papers."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from troll.errors import InputError, require_choice
from troll.lab.report import narrator
from troll.lab.report.figures import COMPARISON_FIGURES, RUN_FIGURES, Entry
from troll.lab.report.rules import find, no_findings, unchecked
from troll.lab.report.run_data import (
    MOST_TOKENS,
    ComparisonData,
    Missing,
    RunData,
    colour_legend,
    sample_steps,
    visible,
)
from troll.lab.report.style import PAPER, SMALL, css_palette, inline_svg, save, style
from troll.lab.runs import Comparison, Run
from troll.lab.runs.folder import COMPARISON, CONFIG
from troll.lab.runs.formatting import count, digits, duration, number, percent
from troll.lab.runs.statistics import finite

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("troll.lab.report", "templates"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.ChainableUndefined,  # missing fields are left out
)
_TEMPLATES.filters |= {
    "number": number,
    "digits": digits,
    "percent": percent,
    "visible": visible,
}
FORMATS = ("svg", "png", "pdf")
_NO_SCALE = 0.2  # the colour scale of runs without a bound: that of the default bound, so that runs compare


def write_report(
    folder: str | Path, output: str | Path | None = None, figures: bool = True, formats: Sequence[str] = ("svg", "png")
) -> Path:
    """Write one self-contained HTML file about a run or a comparison; the same folder gives the same bytes.

    Args:
        folder: of a run (``run.json``) or of a comparison (``comparison.json``).
        output: the file to write; None: ``report.html`` in the folder.
        figures: also write every figure for papers, to ``figures/`` beside the file.
        formats: of those figures: svg, png, pdf.
    """
    folder = Path(folder)
    for kind in formats:
        require_choice("formats", kind, FORMATS)
    data: RunData | ComparisonData
    if (folder / COMPARISON).is_file():
        data = ComparisonData.read(Comparison.open(folder))
        page = comparison_page(data)
    else:
        data = RunData.read(Run.open(folder))
        page = run_page(data, _read_config(folder / CONFIG))
    output = Path(output) if output is not None else folder / "report.html"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page, encoding="utf-8", errors="replace")
        if figures:
            (output.parent / "figures").mkdir(exist_ok=True)
            for name, content in paper_figures(data, tuple(formats)):
                (output.parent / "figures" / name).write_bytes(content)
    except OSError as error:
        raise InputError(f"the report cannot be written to {output} ({error.strerror})", "Set --output FILE") from error
    return output


def run_page(run: RunData, config: str | None) -> str:
    """The page of a run."""
    scale = run.bound or _NO_SCALE
    return _render(
        "run.html",
        run=run,
        about=run.about,
        facts=_facts(run.about),
        cards=narrator.cards(run.history),
        sentences=narrator.lede(run.about, run.history),
        findings=find(run.history),
        no_findings=no_findings(unchecked(run.history)),
        unchecked=unchecked(run.history),
        figures=_figures(run, RUN_FIGURES),
        shown=[{"id": "samples", "title": None, "steps": sample_steps(run, scale), "projects": run.projects}],
        legend=colour_legend(scale),
        bound=run.bound,
        scale=scale,
        config=config,
    )


def comparison_page(data: ComparisonData) -> str:
    """The page of a comparison."""
    bounds = [run.bound for arm in data.arms for run in arm.runs if run.bound is not None]
    scale = bounds[0] if bounds else _NO_SCALE
    drawn = [arm for arm in data.arms if arm.runs]
    share = MOST_TOKENS // max(1, len(drawn))
    shown = [
        {
            "id": f"samples-{i}",
            "title": f"{arm.label}, seed {arm.runs[0].about.get('seed')}",
            "steps": sample_steps(arm.runs[0], scale, share),
            "projects": arm.runs[0].projects,
        }
        for i, arm in enumerate(drawn)
    ]
    labels = {arm.arm: arm.label for arm in data.arms}
    return _render(
        "comparison.html",
        data=data,
        about=data.about,
        labels=labels,
        lede=narrator.verdicts(data.measures, labels),
        verdict=narrator.verdict,
        figures=_figures(data, COMPARISON_FIGURES),
        shown=shown,
        legend=colour_legend(scale),
        bound=bounds[0] if bounds else None,
        scale=scale,
    )


def paper_figures(data: RunData | ComparisonData, formats: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """File names and bytes of the figures that can be drawn, in the size and colours of a paper."""
    entries = RUN_FIGURES if isinstance(data, RunData) else COMPARISON_FIGURES
    for name, entry in entries.items():
        try:
            with style():
                figure = entry.draw(data, PAPER)
        except Missing:
            continue
        for kind in formats:
            yield f"{name}.{kind}", save(figure, kind, name)


def _figures(data: RunData | ComparisonData, entries: Mapping[str, Entry]) -> dict[str, dict[str, Any]]:
    """Every figure as SVG; one that is wide a second time, narrow; or why it is missing."""
    made: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        shape = "small" if entry.size.width < 400 else "large" if entry.size.width < 1000 else "full"
        made[name] = {"title": entry.title, "caption": entry.caption, "shape": shape, "missing": None, "narrow": None}
        try:
            made[name]["svg"] = Markup(inline_svg(lambda e=entry: e.draw(data, e.size), name, entry.title))  # type: ignore[misc]
            if entry.size is not SMALL:
                made[name]["narrow"] = Markup(
                    inline_svg(lambda e=entry: e.draw(data, SMALL), f"{name}-narrow", entry.title)  # type: ignore[misc]
                )
        except Missing as why:
            made[name]["missing"] = str(why)
    return made


def _facts(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was run, in a line of name and value each."""
    task, model, machine = (about.get(key) or {} for key in ("task", "model", "machine"))
    size = finite(model.get("parameters"))
    parts = [f"{machine.get('cores')} cores"] if machine.get("cores") else []
    parts += [f"{finite(machine.get('memory_gb')):.0f} GB"] if finite(machine.get("memory_gb")) else []
    seconds = finite(about.get("seconds"))
    facts = [
        ("model", f"{model.get('name', 'unknown')}" + (f", {count(size)} parameters" if size else "")),
        ("task", f"{task.get('name', 'unknown')}" + (f": {task['description']}" if task.get("description") else "")),
        ("trust region", str(about.get("arm_label") or about.get("arm", "unknown"))),
        ("seed", str(about.get("seed", "unknown"))),
        ("time", duration(seconds) if seconds is not None else ""),
        ("machine", ", ".join([str(machine.get("gpu") or machine.get("processor") or ""), *parts]).strip(", ")),
    ]
    return [(name, value) for name, value in facts if value]


def _render(template: str, **values: Any) -> str:
    script = _TEMPLATES.get_template("page.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _TEMPLATES.get_template(template).render(
        script=Markup(script), script_hash=digest, palette=Markup(css_palette()), **values
    )


def _read_config(path: Path) -> str | None:
    """The text of a config file, if there is one."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
