"""Write the report of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from troll.errors import InputError, require_choice
from troll.lab.report.comparison import ComparisonData
from troll.lab.report.data import RunData
from troll.lab.report.page import comparison_page, paper_figures, read_config, run_page
from troll.lab.runs import Comparison, Run

FORMATS = ("svg", "png", "pdf")


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
    if (folder / "comparison.json").is_file():
        data = ComparisonData.read(Comparison.open(folder))
        page = comparison_page(data)
    else:
        data = RunData.read(Run.open(folder))
        page = run_page(data, read_config(folder / "config.yaml"))
    output = Path(output) if output is not None else folder / "report.html"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page, encoding="utf-8", errors="replace")
        if figures:
            (output.parent / "figures").mkdir(exist_ok=True)
            for name, content in paper_figures(data, tuple(formats)):
                (output.parent / "figures" / name).write_bytes(content)
    except OSError as error:
        raise InputError(
            f"the output {output} ({error.strerror})", "a file that can be written", "--output FILE"
        ) from error
    return output
