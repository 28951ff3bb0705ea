"""``troll report``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from troll.errors import InputError
from troll.lab.cli.arguments import Parser, existing_folder, yes_or_no

DESCRIPTION = """\
Draw a run or a comparison: one HTML file that opens offline, and every figure for papers.

  troll report arithmetic-troll                       runs/arithmetic-troll/report.html and figures/
  troll report runs/arithmetic-comparison             all arms and seeds, with verdicts
  troll report arithmetic-troll --output my.html --figures false
  troll report arithmetic-troll --formats pdf         the figures as PDF

A run may still be going on: the report shows what is there. The same folder gives the same bytes.
"""


def run(argv: Sequence[str]) -> int:
    """Write the report and say where it is."""
    from troll.lab.report import write_report

    options = _parse(argv)
    folder = existing_folder(options.run, options.runs_dir)
    written = write_report(folder, options.output, figures=options.figures, formats=options.formats)
    print(f"Report: {written}")
    if options.figures:
        print(f"Figures: {written.parent / 'figures'}")
    return 0


def check(argv: Sequence[str]) -> None:
    """Raise if these flags cannot be."""
    if not {"-h", "--help"} & set(argv):
        _parse(argv)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("troll report", DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="the folder of a run or a comparison, or its name")
    parser.add_argument("--output", metavar="FILE.html", help="the file to write; else report.html in the folder")
    parser.add_argument(
        "--figures", type=yes_or_no, nargs="?", const=True, default=True, metavar="BOOL",
        help="also write the figures, to figures/ beside the file",
    )  # fmt: skip
    parser.add_argument(
        "--formats", nargs="+", choices=["svg", "png", "pdf"], default=["svg", "png"], help="of the figures"
    )
    parser.add_argument("--runs_dir", "--runs-dir", default="runs", help="where names of runs are looked for")
    options = parser.parse_args(argv)
    if options.output is not None and not options.output.endswith((".html", ".htm")):
        raise InputError(f"--output {options.output}", "a file that ends in .html", f"--output {options.output}.html")
    return options
