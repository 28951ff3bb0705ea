"""Write every table and figure of the studies from ``results/STUDY.jsonl``.

    python experiments/studies/analyse.py
    python experiments/studies/analyse.py --check       write nothing; exit with 1 if a file would change

Figures go to ``figures/STUDY-NAME.svg``. A table goes between ``<!-- table: STUDY-NAME -->`` and ``<!-- end of table
-->`` in README.md, docs/does-it-help.md or docs/study-data.md; a table without such a place goes to ``tables.md``.
Studies without results are skipped. The same version of matplotlib draws the same bytes.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import figures
import network_runs
import tables
from matplotlib.figure import Figure
from results import RESULTS, read
from scores import Finalist, Measure, at, axis_of, end, eval_reward, finalists, labels, mean, strata

from troll.lab.report.run_data import Missing
from troll.lab.report.style import save, style
from troll.lab.runs.folder import Line

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "does-it-help.md", ROOT / "docs" / "study-data.md")
FRESH = {"regions": "final", "stories": "stories-final", "code": "code-final", "gsm8k": "gsm8k-final"}
"""Study → the study with fresh seeds that evaluates it."""
TASKS = {"regions": "sorting", "stories": "stories", "code": "functions", "gsm8k": "GSM8K, 1.5B"}
"""Study → its task."""
ACROSS = ("overview", "differences", "readme")
"""Tables over all tasks."""
HIGH_RATE = "1e-4"
"""The learning rate at which the README compares the methods again."""
CHOSEN_BY = {"stories": mean}
"""Study → the measure that chooses the learning rates, where it is not `end`: in stories every arm ends near 1."""
ALSO = {"bounds": ("changes", {"bound 1": "fixed at 1"})}
"""Study → another study, and which of its changes are added under another name: all other settings are equal."""
_BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.S)


@dataclass(frozen=True)
class Stored:
    """The results of a study, and those with fresh seeds."""

    lines: list[Line]
    fresh: list[Line]
    fresh_study: str
    chosen_by: Measure

    @classmethod
    def read(cls, results: Path, study: str) -> Stored:
        """Read from the files of a folder."""
        lines = read(results, study)
        if lines and study in ALSO:
            other, names = ALSO[study]
            lines += [named(line, names[x]) for line in read(results, other) if (x := line["place"]["change"]) in names]
        fresh = FRESH.get(study, "")
        return cls(lines, read(results, fresh) if fresh else [], fresh, CHOSEN_BY.get(study, end))

    @property
    def arms(self) -> str:
        """The axis of the compared arms."""
        return axis_of(self.lines, "region", "change", "estimator") or "region"

    @property
    def sweep(self) -> str | None:
        """The axis on which each arm has its best value, if the study has one."""
        return axis_of(self.lines, "rate", "learning_rate")

    @property
    def base(self) -> str:
        """The label that the others are compared with."""
        found = labels(self.lines, self.arms)
        return next((name for name in ("fixed at 1", "base", "clip") if name in found), found[0])

    def tasks(self, *used: str | None) -> dict[str, list[Line]]:
        """The lines by the remaining axes, most often the task."""
        return strata(self.lines, self.arms, *used)

    def finalists(self) -> dict[str, dict[str, Finalist]]:
        """Task → arm → its best."""
        fresh = strata(self.fresh, self.arms, self.sweep)
        return {
            task: finalists(lines, self.arms, self.sweep, fresh.get(task, []), self.chosen_by)
            for task, lines in self.tasks(self.sweep).items()
        }

    def at_best(self) -> dict[str, dict[str, list[Line]]]:
        """Task → arm → the runs that evaluate it."""
        return {task: {arm: x.lines for arm, x in found.items()} for task, found in self.finalists().items()}

    def cells(self, *axes: str) -> dict[str, dict[str, list[Line]]]:
        """Task → joined labels on these axes → runs."""
        return {task: strata_by(lines, *axes) for task, lines in strata(self.lines, *axes).items()}


def named(line: Line, change: str) -> Line:
    """A result with another label on the axis `change`."""
    return {**line, "place": {**line["place"], "change": change}}


def strata_by(lines: Sequence[Line], *axes: str) -> dict[str, list[Line]]:
    """Labels on these axes, joined → lines."""
    found: dict[str, list[Line]] = {"": list(lines)}
    for axis in axes:
        found = {
            f"{name}, {label}".removeprefix(", "): cell
            for name, group in found.items()
            for label in labels(group, axis)
            if (cell := at(group, **{axis: label}))
        }
    return found


def sweep_tables(stored: Stored) -> str | None:
    """Every arm over the learning rates."""
    return _sweep_by(stored, stored.chosen_by)


def eval_tables(stored: Stored) -> str | None:
    """Every arm over the learning rates by the reward on held-out problems, if every run has one."""
    return _sweep_by(stored, eval_reward) if all(eval_reward(line) is not None for line in stored.lines) else None


def _sweep_by(stored: Stored, measure: Measure) -> str | None:
    sweep = stored.sweep
    if sweep is None:
        return None
    tasks = stored.tasks(sweep).items()
    return tables.joined({task: tables.sweep_table(x, stored.arms, sweep, measure) for task, x in tasks})


def best_tables(stored: Stored) -> str:
    """Arms at their best learning rate; with several tasks, over all of them too."""
    found = stored.finalists()
    selection = stored.base, stored.sweep, stored.fresh_study, stored.chosen_by
    each = {task: tables.best_table(x, *selection) for task, x in found.items()}
    return tables.joined(each) + _overall(list(stored.at_best().values()), stored.base)


def pairs_tables(stored: Stored) -> str | None:
    """Arms with the projection against all others, each at its best learning rate."""
    found = {task: tables.pairs_table(x) for task, x in stored.finalists().items()}
    there = {task: x for task, x in found.items() if x is not None}
    return tables.joined(there) if there else None


def updates_tables(stored: Stored) -> str:
    """Arms over the updates per rollout."""
    tasks = stored.tasks("updates").items()
    return tables.joined({task: tables.axis_table(x, "updates", stored.arms, stored.base) for task, x in tasks})


def changes_tables(stored: Stored) -> str:
    """One change at a time."""
    tasks = stored.tasks()
    each = {task: tables.changes_table(lines, stored.arms, stored.base) for task, lines in tasks.items()}
    return tables.joined(each) + _overall([strata_by(x, stored.arms) for x in tasks.values()], stored.base)


def network_tables(stored: Stored) -> str:
    """KL of the network, every arm at its best learning rate."""
    groups = {
        task: {", ".join(filter(None, (arm, x.value))): x.lines for arm, x in found.items()}
        for task, found in stored.finalists().items()
    }
    return tables.joined({task: tables.network_table(x) for task, x in groups.items()})


def network_rates_tables(stored: Stored) -> str | None:
    """KL of the network at every learning rate."""
    return _network_by(stored, stored.sweep)


def network_updates_tables(stored: Stored) -> str | None:
    """KL of the network at every number of updates."""
    return _network_by(stored, "updates")


def _network_by(stored: Stored, axis: str | None) -> str | None:
    if axis is None:
        return None
    groups = stored.cells(stored.arms, axis)
    return tables.joined({task: tables.network_table(x) for task, x in groups.items()})


def _overall(tasks: Sequence[Mapping[str, Sequence[Line]]], base: str) -> str:
    if len(tasks) < 2:
        return ""
    return "\n\n" + tables.joined({"all together": tables.overall_table(tasks, base)})


def rates_figure(stored: Stored) -> Figure | None:
    """Every arm over the learning rates."""
    sweep = stored.sweep
    if sweep is None:
        return None
    return figures.score_over_rates(stored.tasks(sweep), sweep, stored.arms, stored.chosen_by)


def updates_figure(stored: Stored) -> Figure:
    """Arms over the updates per rollout."""
    return figures.over_updates(stored.tasks("updates"), "updates", stored.arms)


def changes_figure(stored: Stored) -> Figure:
    """Differences to the base."""
    return figures.changes(stored.tasks(), stored.arms, stored.base)


def curves_figure(stored: Stored) -> Figure:
    """Arms at their best, over the rollouts."""
    return figures.curves(stored.at_best())


def network_figure(stored: Stored) -> Figure:
    """KL of the network over the rollouts, arms at their best."""
    return figures.network(stored.at_best())


def solver_figure(stored: Stored) -> Figure:
    """Solver steps and kept mass over the rollouts, arms at their best."""
    return figures.solver(stored.at_best())


@dataclass(frozen=True)
class Entry:
    """The tables and figures of a study, by name."""

    tables: dict[str, Callable[[Stored], str | None]] = field(default_factory=dict)
    figures: dict[str, Callable[[Stored], Figure | None]] = field(default_factory=dict)


_REGIONS = Entry(
    {
        "sweep": sweep_tables,
        "held-out": eval_tables,
        "best": best_tables,
        "pairs": pairs_tables,
        "network": network_tables,
        "network-rates": network_rates_tables,
    },
    {"rates": rates_figure, "curves": curves_figure, "network": network_figure, "solver": solver_figure},
)
REGISTRY = {
    "regions": _REGIONS,
    "updates": Entry({"updates": updates_tables, "network": network_updates_tables}, {"updates": updates_figure}),
    "changes": Entry({"changes": changes_tables, "network": network_tables}, {"changes": changes_figure}),
    "bounds": Entry({"changes": changes_tables, "network": network_tables}, {"changes": changes_figure}),
    "gsm8k": _REGIONS,
    "code": _REGIONS,
    "stories": _REGIONS,
    "estimators": Entry({"best": best_tables, "network": network_tables}, {"curves": curves_figure}),
}


def across_tasks(results: Path) -> dict[str, str]:
    """The tables over all tasks with fresh seeds, by name; empty with fewer than two such tasks."""
    stored = {task: Stored.read(results, study) for study, task in TASKS.items()}
    found = {
        ", ".join(filter(None, (task, name))): arms
        for task, x in stored.items()
        if x.fresh
        for name, arms in x.finalists().items()
    }
    if len(found) < 2:
        return {}
    high = {
        task: {arm: at(x.lines, **{x.arms: arm, x.sweep: HIGH_RATE}) for arm in labels(x.lines, x.arms)}
        for task, x in stored.items()
        if x.fresh and x.sweep and HIGH_RATE in labels(x.lines, x.sweep)
    }
    made = {"overview": tables.overview_table(found)}
    if high:
        made["readme"] = tables.readme_table(found, high, HIGH_RATE)
    if all({"troll-0.2", "clip"} <= {arm for arm, x in arms.items() if x.lines} for arms in found.values()):
        made["differences"] = tables.differences_table(found, ("troll-0.2", "troll-1"), ("clip", "none"))
    return {name: tables.joined({"": each}) for name, each in made.items()}


def made(results: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """All tables and all figures, by name."""
    texts, images = network_runs.written(results) | across_tasks(results), {}
    for study, entry in REGISTRY.items():
        stored = Stored.read(results, study)
        if not stored.lines:
            continue
        for name, write in entry.tables.items():
            if (text := write(stored)) is not None:
                texts[f"{study}-{name}"] = text
        for name, draw in entry.figures.items():
            try:
                with style():
                    figure = draw(stored)
            except Missing:
                continue
            if figure is not None:
                images[f"{study}-{name}"] = save(figure, "svg", f"{study}-{name}")
    return texts, images


def filled(page: str, texts: Mapping[str, str]) -> str:
    """The page with each table in its place; the place of a study without results stays unchanged."""
    known = {f"{study}-{name}" for study, entry in REGISTRY.items() for name in entry.tables}
    known |= {*ACROSS, *network_runs.TABLES}
    unknown = {name for _, name, _ in _BLOCK.findall(page)} - known
    if unknown:
        raise ValueError(f"no table is called {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    return _BLOCK.sub(lambda m: f"{m[1]}\n{texts[m[2]]}\n\n{m[3]}" if m[2] in texts else m[0], page)


def files(results: Path, pages: Sequence[Path], out: Path) -> dict[Path, bytes | None]:
    """Path → its content; None for a file that should not exist."""
    texts, images = made(results)
    wanted: dict[Path, bytes | None] = dict.fromkeys((out / "figures").glob("*.svg"))
    wanted |= {out / "figures" / f"{name}.svg": image for name, image in images.items()}
    left = dict(texts)
    for page in filter(Path.exists, pages):
        before = page.read_text(encoding="utf-8")
        wanted[page] = filled(before, texts).encode()
        left = {name: text for name, text in left.items() if f"<!-- table: {name} -->" not in before}
    blocks = [f"<!-- table: {name} -->\n\n{text}\n\n<!-- end of table -->" for name, text in left.items()]
    head = "# More tables\n\nWritten by `python experiments/studies/analyse.py` from the stored results of the studies."
    wanted[out / "tables.md"] = ("\n\n".join([head, *blocks]) + "\n").encode() if blocks else None
    return wanted


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files that differ, or list them with ``--check``; 1 if a file differs or the results are not usable."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES, help="pages with places for tables")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder of tables.md and figures/")
    options = parser.parse_args(arguments)
    try:
        wanted = files(options.results, options.pages, options.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    differ = [path for path, text in wanted.items() if (path.read_bytes() if path.exists() else None) != text]
    for path in differ:
        text = wanted[path]
        print(f"{path}: {'differs from the results' if options.check else 'removed' if text is None else 'written'}")
        if options.check:
            continue
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
    print(f"{len(wanted) - len(differ)} files are up to date")
    return 1 if options.check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
