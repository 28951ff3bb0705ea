"""``troll runs``, ``troll report`` and ``troll explain``: run folders in a list, in figures and in words."""

from __future__ import annotations

import argparse
import json
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from troll.errors import InputError
from troll.lab.cli.main import Parser, existing_folder, yes_or_no
from troll.lab.runs import Comparison
from troll.lab.runs.folder import ABOUT, COMPARISON
from troll.lab.runs.formatting import one_line
from troll.lab.runs.listing import Details, Entry, details, entries

if TYPE_CHECKING:
    from troll.lab.report.narrator import Explanation

RUNS = """\
List the runs and comparisons in a folder, their status and how to resume them.

  troll runs                             status, updates, reward, age and size of each
  troll runs arithmetic-troll            one run: its checkpoints, verified, and its error
  troll runs --runs_dir /data/runs       another folder
  troll runs --json                      as JSON, for scripts

  running       a process is writing it
  finished      all updates are done
  interrupted   Ctrl-C, SIGTERM or a closed terminal; there is a checkpoint unless it was stopped twice
  failed        it ended with an error; `troll runs NAME` shows it
  killed        the process ended abruptly: kill -9, out of memory, power failure
  broken        its files cannot be read

For runs that ended early, the last column is the update from which `troll train --resume NAME` continues.
"""
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
_COLOURS = {"running": "bold", "finished": "green", "interrupted": "yellow"}
_WIDTH = 100  # of the text of `troll explain`


def run(argv: Sequence[str]) -> int:
    """List all runs, or show one."""
    options = _parser().parse_args(list(argv))
    if options.name is None:
        found = entries(Path(options.runs_dir))
        if options.json:
            print(json.dumps([entry.as_json() for entry in found], indent=1))
        else:
            _show(found, options.runs_dir, Console())
        return 0
    one = details(existing_folder(options.name, options.runs_dir))
    if options.json:
        print(json.dumps(one.as_json(), indent=1))
        return 0
    for line in details_of(one):
        print(one_line(line) if line else "")
    for entry in one.runs:
        print("  " + "  ".join(filter(None, _cells(entry))))
    return 0


def check(argv: Sequence[str]) -> None:
    """Raise if these flags are invalid."""
    if not {"-h", "--help"} & set(argv):
        _parser().parse_args(list(argv))


def _parser() -> Parser:
    parser = Parser("troll runs", RUNS)
    parser.add_argument("name", nargs="?", help="The name or folder of a run or comparison to show in detail.")
    parser.add_argument("--runs_dir", default="runs", help="The folder that has one folder per run.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


def _show(found: Sequence[Entry], runs_dir: str, console: Console) -> None:
    """A table on a terminal; otherwise a header and one line per run, separated by tabs."""
    if not found:
        print(f"There are no runs in {runs_dir}. `troll train` starts one.")
        return
    headers = ("name", "state", "updates", "reward", "age", "size", "note")
    if not console.is_terminal:
        print("\t".join(headers))
        for entry in found:
            print("\t".join(cell or "–" for cell in _cells(entry)))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, overflow="fold")
    for entry in found:
        table.add_row(*map(Text, _cells(entry)), style=_COLOURS.get(entry.state, "red"))
    console.print(table, highlight=False)


def _cells(entry: Entry) -> tuple[str, ...]:
    done = "" if entry.step is None else f"{entry.step}{f'/{entry.max_steps}' if entry.max_steps else ''}"
    if entry.kind == "comparison" and done:
        done = f"{done} runs"
    reward = "" if entry.reward is None else f"{entry.reward:.3f}"
    age = "" if entry.age is None else age_of(entry.age)
    return (one_line(entry.name), entry.state, done, reward, age, size_of(entry.size), _note(entry))


def _note(entry: Entry) -> str:
    if entry.state == "broken":
        return one_line(entry.why or "")
    if entry.resumable_from is None:
        return ""
    if entry.kind == "comparison":
        return "resume with --resume"
    return f"resumes from update {entry.resumable_from}"


def details_of(one: Details) -> Iterator[str]:
    """The details of a run."""
    entry, about = one.entry, one.about
    name, state, done, reward, age, size, _ = _cells(entry)
    yield f"{name}: {state}"
    if entry.state == "broken":
        yield f"It cannot be read: {entry.why}."
        return
    yield f"  {'runs' if entry.kind == 'comparison' else 'updates'}  {done.removesuffix(' runs')}"
    if reward:
        yield f"  reward   {reward}, in the last rollout"
    yield f"  age      {age or 'unknown'}; on disk: {size}"
    for what in ("task", "model"):
        yield f"  {what:8} {about[what]['name']}"
    if entry.kind == "run":
        yield f"  region   {about.get('arm_label', '')}"
    if entry.why:
        yield f"  error    {entry.why}"
    for change in about.get("changes", []):
        yield f"  changed  after update {change['step']}: {'; '.join(change['differences'])}"
    for kept in one.checkpoints:
        yield f"  {kept.name}  {size_of(kept.size)}  {'good' if kept.wrong is None else kept.wrong}"
    if entry.kind == "run" and not one.checkpoints:
        yield "  no checkpoints"
    if entry.resumable_from is not None:
        good = max((kept.step for kept in one.checkpoints if kept.wrong is None), default=0)
        step = good if one.checkpoints else entry.resumable_from
        command = "compare" if entry.kind == "comparison" else "train"
        where = "" if entry.kind == "comparison" else f" from update {step}"
        yield f"Resume{where}: troll {command} --resume {shlex.quote(entry.path)}"


def age_of(seconds: float) -> str:
    """An age in the largest unit of which there are at least two.

    >>> age_of(30), age_of(125), age_of(5 * 3600), age_of(47 * 3600), age_of(60 * 3600)
    ('30 s', '2 min', '5 h', '47 h', '2 days')
    """
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def size_of(size: float) -> str:
    """Bytes in decimal units.

    >>> size_of(999), size_of(1_600_000_000), size_of(25_300_000)
    ('999 B', '1.6 GB', '25 MB')
    """
    value: Any = size
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.1f} {unit}" if value < 10 and unit != "B" else f"{value:.0f} {unit}"


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
    from troll.lab.report.narrator import explain

    options = _explain_parser().parse_args(list(argv))
    explained = [explain(folder) for name in options.run for folder in _runs(name, options.runs_dir)]
    if options.json:
        print(json.dumps([one.as_json() for one in explained], indent=1, ensure_ascii=False))
        return 0
    for i, one in enumerate(explained):
        print("\n" * (i > 0) + "\n".join(explanation_of(one)))
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


def explanation_of(one: Explanation) -> Iterator[str]:
    """The printed lines. Commands are on separate lines so that they can be copied."""
    from troll.lab.report.rules import no_findings

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
