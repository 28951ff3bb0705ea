"""``troll report`` and ``troll explain``: a run in figures and in words."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from troll.errors import InputError
from troll.lab.cli.main import Parser, existing_folder, yes_or_no
from troll.lab.report.narrator import Explanation, explain
from troll.lab.report.rules import no_findings
from troll.lab.runs import Comparison
from troll.lab.runs.folder import ABOUT, COMPARISON
from troll.lab.runs.formatting import one_line

REPORT = """\
Write a report of a run or a comparison: one HTML file that opens offline, and the figures as separate files.

  troll report arithmetic-troll                       runs/arithmetic-troll/report.html and figures/
  troll report runs/arithmetic-comparison             all arms and seeds, with their differences
  troll report arithmetic-troll --output my.html --figures false
  troll report arithmetic-troll --formats pdf         the figures as PDF

The run may still be running. The same folder always gives the same bytes.
"""
EXPLAIN = """\
Explain a run in words: what was trained, how the reward and the trust region behaved, problems with their numbers and
the update since which they exist, and which flags to change.

  troll explain arithmetic-troll            a run, by its name below --runs_dir or by its folder
  troll explain runs/a runs/b               several runs
  troll explain arithmetic-comparison       every run of a comparison
  troll explain arithmetic-troll --json     as JSON, for scripts

A run may be finished, interrupted, failed, killed or still running. Metrics that were not logged are listed as missing.
A warning asks for a change, a note is for information. docs/explain.md lists all rules with their thresholds.
"""
_WIDTH = 100


def run_report(argv: Sequence[str]) -> int:
    """Write the report and print its path."""
    from troll.lab.report import write_report

    options = _parse_report(argv)
    folder = existing_folder(options.run, options.runs_dir)
    written = write_report(folder, options.output, figures=options.figures, formats=options.formats)
    print(f"Report: {written}")
    if options.figures:
        print(f"Figures: {written.parent / 'figures'}")
    return 0


def check_report(argv: Sequence[str]) -> None:
    """Raise if these flags are invalid."""
    if not {"-h", "--help"} & set(argv):
        _parse_report(argv)


def _parse_report(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("troll report", REPORT)
    parser.add_argument("run", metavar="RUN", help="the name or folder of a run or a comparison")
    parser.add_argument(
        "--output", metavar="FILE.html", help="the file to write (default: report.html in the folder of the run)"
    )
    parser.add_argument(
        "--figures", type=yes_or_no, nargs="?", const=True, default=True, metavar="BOOL",
        help="also write the figures to figures/ beside the report",
    )  # fmt: skip
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=["svg", "png", "pdf"],
        default=["svg", "png"],
        help="file formats of the figures",
    )
    parser.add_argument(
        "--runs_dir", "--runs-dir", default="runs", help="the folder in which names of runs are looked up"
    )
    options = parser.parse_args(argv)
    if options.output is not None and not options.output.endswith((".html", ".htm")):
        raise InputError(f"--output {options.output} does not end in .html", f"Use --output {options.output}.html")
    return options


def run_explain(argv: Sequence[str]) -> int:
    """Print an explanation of each run."""
    options = _explain_parser().parse_args(list(argv))
    explained = [explain(folder) for name in options.run for folder in _runs(name, options.runs_dir)]
    if options.json:
        print(json.dumps([one.as_json() for one in explained], indent=1, ensure_ascii=False))
        return 0
    for i, one in enumerate(explained):
        print("\n" * (i > 0) + "\n".join(lines_of(one)))
    return 0


def check_explain(argv: Sequence[str]) -> None:
    """Raise if these flags are invalid."""
    if not {"-h", "--help"} & set(argv):
        _explain_parser().parse_args(list(argv))


def _explain_parser() -> Parser:
    parser = Parser("troll explain", EXPLAIN)
    parser.add_argument("run", metavar="RUN", nargs="+", help="Names or folders of runs or comparisons.")
    parser.add_argument(
        "--runs_dir", "--runs-dir", default="runs", help="The folder in which names of runs are looked up."
    )
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


def _runs(name: str, runs_dir: str) -> list[Path]:
    """The folder of a run, or the existing run folders of a comparison."""
    folder = existing_folder(name, runs_dir)
    if not (folder / COMPARISON).is_file():
        return [folder]
    names = [run for arm in Comparison.open(folder).about["arms"] for run in arm["runs"]]
    return [folder / run for run in names if (folder / run / ABOUT).is_file()]


def lines_of(one: Explanation) -> Iterator[str]:
    """The printed lines. Commands are on separate lines so that they can be copied."""
    yield f"{one_line(one.entry.name)}: {one.entry.state}"
    for title, sentences in (("", one.what), ("Reward", one.reward), ("Trust region", one.region)):
        if sentences:
            yield from _paragraph(title, [one_line(sentence) for sentence in sentences])
    if one.entry.state == "broken":
        return
    if not one.findings:
        yield from _paragraph("Findings", [no_findings(one.unchecked)])
    else:
        yield from ("", "Findings")
        for finding in one.findings:
            yield from _item("-", finding.statement)
    if one.unchecked:
        yield from ("", "Not checked")
        for rules in one.unchecked:
            yield from _item("-", f"{rules}.")
    if one.changes:
        yield from ("", "Suggested changes, the largest effect first")
        for i, change in enumerate(one.changes, 1):
            if change.flags:
                yield f"  {i}. {change.flags}"
                yield from textwrap.wrap(change.why, _WIDTH, initial_indent="     ", subsequent_indent="     ")
            else:
                yield from _item(f"{i}.", change.why)
    if one.commands:
        yield from ("", "Commands", *(f"  {command}" for command in one.commands))


def _paragraph(title: str, sentences: Sequence[str]) -> Iterator[str]:
    if title:
        yield from ("", title)
    yield from textwrap.wrap(
        " ".join(sentences), _WIDTH, initial_indent="  ", subsequent_indent="  ", break_long_words=False
    )


def _item(mark: str, text: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text, _WIDTH, initial_indent=f"  {mark} ", subsequent_indent=" " * (3 + len(mark)), break_long_words=False
    )
