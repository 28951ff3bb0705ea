"""``troll explain``."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from troll.lab.cli.arguments import Parser, existing_folder
from troll.lab.report.rules import Explanation, explain
from troll.lab.runs import Comparison
from troll.lab.runs.folder import ABOUT, COMPARISON
from troll.lab.runs.formatting import one_line

DESCRIPTION = """\
What happened in a run, in words: what was trained, what the reward did, what the trust region did, signs of trouble
with numbers and since when, and what to change next, with the flags to type.

  troll explain arithmetic-troll            a run by its name below --runs_dir, or by its folder
  troll explain runs/a runs/b               one after the other
  troll explain arithmetic-comparison       every run of a comparison
  troll explain arithmetic-troll --json     the same for scripts

A run may be finished, interrupted, failed, killed or still going on; what was not logged is named as missing.
A warning is something to change, a note something to know. Each is a rule with a threshold: docs/explain.md lists them.
"""
_WIDTH = 100


def run(argv: Sequence[str]) -> int:
    """Explain each run in turn."""
    options = _parser().parse_args(list(argv))
    explained = [explain(folder) for name in options.run for folder in _runs(name, options.runs_dir)]
    if options.json:
        print(json.dumps([one.as_json() for one in explained], indent=1, ensure_ascii=False))
        return 0
    for i, one in enumerate(explained):
        print("\n" * (i > 0) + "\n".join(lines_of(one)))
    return 0


def check(argv: Sequence[str]) -> None:
    """Raise if these flags cannot be."""
    if not {"-h", "--help"} & set(argv):
        _parser().parse_args(list(argv))


def _parser() -> Parser:
    parser = Parser("troll explain", DESCRIPTION)
    parser.add_argument("run", metavar="RUN", nargs="+", help="Names or folders of runs or comparisons.")
    parser.add_argument("--runs_dir", "--runs-dir", default="runs", help="Where names are looked for.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


def _runs(name: str, runs_dir: str) -> list[Path]:
    """The folder of a run; of a comparison, those of its runs that are there."""
    folder = existing_folder(name, runs_dir)
    if not (folder / COMPARISON).is_file():
        return [folder]
    names = [run for arm in Comparison.open(folder).about["arms"] for run in arm["runs"]]
    return [folder / run for run in names if (folder / run / ABOUT).is_file()]


def lines_of(one: Explanation) -> Iterator[str]:
    """As it is printed: a paragraph each, commands on lines of their own so that they can be copied."""
    yield f"{one_line(one.entry.name)}: {one.entry.state}"
    for title, sentences in (("", one.what), ("Reward", one.reward), ("Trust region", one.region)):
        if sentences:
            yield from _paragraph(title, [one_line(sentence) for sentence in sentences])
    if one.entry.state == "broken":
        return
    if not one.findings:
        yield from _paragraph("Signs of trouble", ["None that a rule knows."])
    else:
        yield from ("", "Signs of trouble")
        for finding in one.findings:
            head = f"{finding.level.capitalize()}, {finding.when}: {finding.seen}."
            yield from _item("-", f"{head} {finding.means}.")
    if one.changes:
        yield from ("", "What to change, the greatest effect first")
        for i, change in enumerate(one.changes, 1):
            if change.flags:
                yield f"  {i}. {change.flags}"
                yield from textwrap.wrap(change.why, _WIDTH, initial_indent="     ", subsequent_indent="     ")
            else:
                yield from _item(f"{i}.", change.why)
    if one.commands:
        yield from ("", "To type", *(f"  {command}" for command in one.commands))


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
