"""``troll doctor --attack``: runs the attacks of ``troll.rewards.selftest`` on the sandbox of this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from troll.errors import InputError
from troll.lab.runs.formatting import one_line
from troll.rewards.sandbox import UNSANDBOXED_VARIABLE, Isolation, SandboxError, best, isolations
from troll.rewards.selftest import suite

if TYPE_CHECKING:
    from rich.table import Table

VERDICTS = {"held": "green", "known limit": "yellow", "SUCCEEDED": "bold red"}


def run(name: str | None, as_json: bool = False) -> int:
    """Run all attacks and print the results. Returns 1 if an unexpected one succeeded, or if there is no sandbox."""
    try:
        isolation = _isolation(name)
        results = list(_followed(isolation))
    except SandboxError as error:
        print(f"troll: {one_line(str(error))}", file=sys.stderr)
        return 1
    bad = [result for result in results if verdict(result) == "SUCCEEDED"]
    if as_json:
        print(
            json.dumps({"isolation": isolation.name, "held": not bad, "attacks": list(map(asdict, results))}, indent=2)
        )
    else:
        _show(results)
        print(summary(isolation, results))
    return 1 if bad else 0


def verdict(result: suite.Result) -> str:
    """``held``, ``known limit`` or ``SUCCEEDED``."""
    return "held" if result.held else "known limit" if result.known else "SUCCEEDED"


def summary(isolation: Isolation, results: Sequence[suite.Result]) -> str:
    """The counts in one sentence."""
    counts = {word: sum(verdict(result) == word for result in results) for word in VERDICTS}
    text = f"{isolation.name} held against {counts['held']} of {len(results)} attacks"
    if counts["known limit"]:
        text += f"; known limits: {counts['known limit']}"
    if counts["SUCCEEDED"]:
        text += (
            f"; SUCCEEDED: {counts['SUCCEEDED']}. Do not run code here that you do not trust, and please report this"
        )
    return f"{text}."


def _isolation(name: str | None) -> Isolation:
    found = {isolation.name: isolation for isolation in isolations()}
    if name is not None and name not in found:
        raise InputError(f"--isolation must be {' or '.join(found)}, got {name}", "Omit it for the best one here")
    isolation = found[name] if name is not None else best()
    if isolation.name not in found:
        raise SandboxError(
            f"there is no sandbox to attack, because {UNSANDBOXED_VARIABLE}=1", "Run apt install bubblewrap"
        )
    return isolation


def _followed(isolation: Isolation) -> Iterator[suite.Result]:
    """Yield the results, and print a line for every category."""
    print(f"Attacking {isolation.name}, which takes about a minute …", file=sys.stderr, flush=True)
    for category, group in groupby(suite.run(isolation), lambda result: result.category):
        results = []
        for result in group:
            results.append(result)
            yield result
        held, seconds = sum(result.held for result in results), sum(result.seconds for result in results)
        print(f"  {category}: {held} of {len(results)} held ({seconds:.0f} s)", file=sys.stderr, flush=True)


def _show(results: Sequence[suite.Result]) -> None:
    """A coloured table on a terminal, otherwise aligned text."""
    from rich.console import Console

    rows = [(result.category, result.name, verdict(result), result.detail or result.description) for result in results]
    console = Console()
    if console.is_terminal:
        console.print(_table(rows))
        return
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    print(*("  ".join([*map(str.ljust, row, widths), row[3]]) for row in rows), "", sep="\n")


def _table(rows: Sequence[tuple[str, ...]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("category", "attack", "", "detail", box=None, pad_edge=True)
    for *cells, word, detail in rows:
        table.add_row(*map(Text, cells), Text(word, style=VERDICTS[word]), Text(detail))
    return table
