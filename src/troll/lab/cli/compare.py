"""``troll compare``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from troll.errors import InputError
from troll.lab.cli import train
from troll.lab.cli.flags import Flags, anchored
from troll.lab.cli.main import existing_folder
from troll.lab.cli.subprocess_runs import Child, run_children, say
from troll.lab.runs import Comparison, write_json
from troll.lab.runs.comparison import ARMS, arm_of, check_arms, check_seeds, conclude, short_name
from troll.lab.runs.folder import COMPARISON, CONFIG, Line
from troll.lab.runs.formatting import duration
from troll.lab.runs.writer import begin_comparison, new_folder, write_yaml
from troll.trl.robust.store import locked

DESCRIPTION = """\
Train with several trust regions on the same task, seeds and budget, and compare the results.

  troll compare                                       TROLL, PPO's clip and no trust region, three seeds each
  troll compare --arms troll clip clip-higher gspo none --seeds 0 1 2 3 4
  troll compare --task gym:gcd --max_steps 48 --kl_bound 0.02     flags of `troll train` apply to all arms
  troll compare --jobs 2                              two runs at a time
  troll compare --dry_run                             print the runs, settings and time, and stop
  troll compare --resume arithmetic-comparison        resume; finished runs are not repeated

  --arms      troll, clip (PPO, 1 ± 0.2), clip-higher (DAPO, 0.8 to 1.28), gspo (sequence ratio), none
  --seeds     one run of each arm per seed; differences are paired by seed, and one seed gives no interval
  --jobs      concurrent runs; they share the machine, so their times are not compared
  --keep_models true   keep every trained model, for `troll eval`

A comparison is a folder below --runs_dir with one run per arm and seed, comparison.json and report.html. Ctrl-C saves a
checkpoint of every running run. A run that fails does not stop the others.
"""
SET_HERE = {"measure_kl", "save_model", "keep_checkpoints", "write_report"}
"""Flags of ``troll train`` that a comparison sets for every run, besides those of the arms."""
_BY_ARM = {name for arm in ARMS.values() for name in arm}
_HERE = {"arms", "seeds", "jobs", "keep_models", "config", "runs_dir", "run_name", "dry_run", "resume"}


@dataclass
class CompareSettings:
    """The flags of ``troll compare``."""

    arms: list[str] = field(
        default_factory=lambda: ["troll", "clip", "none"],
        metadata={"help": f"The arms; the first is compared with each other one. Choose from {', '.join(ARMS)}."},
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "One run of each arm per seed."})
    jobs: int = field(default=1, metadata={"help": "Number of concurrent runs."})
    keep_models: bool = field(default=False, metadata={"help": "Keep every trained model and its checkpoints."})

    def __post_init__(self) -> None:
        check_arms(self.arms)
        check_seeds(self.seeds)
        if self.jobs < 1:
            raise InputError(f"--jobs must be at least 1, got {self.jobs}", "The default is 1")


def run(argv: Sequence[str]) -> int:
    """Run the unfinished runs, then compare."""
    flags = _flags(argv)
    if flags.wants_help:
        print(flags.help(), end="")
        return 0
    settings, own = flags.run(), flags.own(CompareSettings)
    if settings.resume is not None:
        folder = _resumed(flags, settings)
    else:
        _check(flags, own)
        train.quiet()
        folder = train.new_folder(Path(settings.runs_dir), flags.value("run_name", None), settings.task, "comparison")
        shared = _shared(flags)
        example = _plan(folder, own, shared)
        if settings.dry_run:
            _dry_run(folder, own, example)
            return 0
        labels = {arm: arm_of({**example.args.to_dict(), "epsilon_high": None, **ARMS[arm]})[1] for arm in own.arms}
        task = {"name": example.task.name, "description": example.task.description}
        more = {"name": folder.name, "jobs": own.jobs, "keep_models": own.keep_models}
        with new_folder(folder, "the comparison") as staged:
            begin_comparison(staged, labels, own.seeds, task, {"name": example.model}, **more)
            write_yaml(staged / CONFIG, shared)
    with locked(folder, "the comparison"):
        return _execute(folder, flags.value("jobs", None), Console())


def check(argv: Sequence[str]) -> None:
    """Raise if these flags are invalid."""
    flags = _flags(argv)
    if flags.wants_help:
        return
    own = flags.own(CompareSettings)
    if flags.run().resume is None:
        _check(flags, own)
        for arm in own.arms:
            train.check([*_as_flags(_shared(flags)), *_as_flags(ARMS[arm])])


def _flags(argv: Sequence[str]) -> Flags:
    synonym = ["--resume" + word.removeprefix("--continue") if _is_continue(word) else word for word in argv]
    return Flags(synonym, "troll compare", DESCRIPTION, [CompareSettings], hidden=_BY_ARM | SET_HERE | {"seed"})


def _is_continue(word: str) -> bool:
    return word == "--continue" or word.startswith("--continue=")


def _check(flags: Flags, own: CompareSettings) -> None:
    """Raise for flags that each arm or seed sets."""
    fixes = {
        "seed": f"Use --seeds {flags.value('seed', 0)}",
        "save_model": "Use --keep_models true",
        "keep_checkpoints": "Use --keep_models true",
        "write_report": "Leave it out: there is one report of all runs",
        "measure_kl": "Leave it out: it is measured in every run",
    }
    for name in sorted(flags.given & (_BY_ARM | SET_HERE | {"seed"})):
        fix = fixes.get(name, "Choose --arms, which set it, or use `troll train` for a single run")
        raise InputError(f"--{name} cannot be set for all runs of a comparison", fix)


def _shared(flags: Flags) -> Line:
    """The flags given for all runs, as YAML values."""
    values = {name: flags.value(name, None) for name in sorted(flags.given - _HERE)}
    return anchored(json.loads(json.dumps(values, default=str)))


def _as_flags(values: Line) -> list[str]:
    """Values as flags; the elements of a list follow its flag."""
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            words += [f"--{name}={json.dumps(value) if isinstance(value, bool | dict) else value}"]
    return words


def _plan(folder: Path, own: CompareSettings, shared: Line) -> Any:
    """The plan of the first run. Errors in model, task or settings are raised here, before any run starts."""
    for arm in own.arms[1:]:
        train.check([*_as_flags(shared), *_as_flags(ARMS[arm])])
    arm, seed = own.arms[0], own.seeds[0]
    flags = Flags([*_as_flags(shared), *_as_flags(_flags_of(folder, arm, seed, own.keep_models))])
    return train.plan_of(flags, flags.run(), None, "")


def _dry_run(folder: Path, own: CompareSettings, example: Any) -> None:
    """Print the settings, and the runs and their time as comments: a valid file for --config."""
    from troll.lab.training.estimate import FASTEST, SLOWEST

    apart = _BY_ARM | SET_HERE | {"seed", "runs_dir"}
    shared = {name: value for name, value in example.config.items() if name not in apart}
    names = {"arms": own.arms, "seeds": own.seeds, "jobs": own.jobs, "keep_models": own.keep_models}
    print(yaml.safe_dump(names | shared, sort_keys=False, allow_unicode=True))
    runs = [(arm, seed) for arm in own.arms for seed in own.seeds]
    if "troll" in own.arms:
        print("# Trust region of troll", *(f"#   {x}" for x in train.preset_values(example.args)), "#", sep="\n")
    for arm, seed in runs:
        print(f"# {folder / f'{arm}-{seed}'}: {shlex.join(_as_flags({**ARMS[arm], 'seed': seed}))}")
    one = train.needs(example)
    if one.total is not None:
        low, high = (factor * one.total * len(runs) / own.jobs for factor in (FASTEST, SLOWEST))
        concurrent = f" with {own.jobs} at a time, if they do not slow each other down" if own.jobs > 1 else ""
        print(f"#\n# {len(runs)} runs, between {duration(low)} and {duration(high)} in total{concurrent}.")
    print(f"# Each: see troll train --dry_run; {'it fits' if one.fits else 'IT DOES NOT FIT'} into memory.")


def _resumed(flags: Flags, settings: Any) -> Path:
    more = sorted(flags.given - {"resume", "runs_dir", "jobs"})
    if more:
        names = ", ".join(f"--{name}" for name in more)
        raise InputError(f"--resume cannot be combined with {names}", "A resumed comparison keeps its settings")
    folder = existing_folder(settings.resume, settings.runs_dir, "comparison")
    Comparison.open(folder)
    return folder


def _execute(folder: Path, requested: int | None, console: Console) -> int:
    """Run, compare and print. ``requested`` overrides the number of concurrent runs from the start."""
    about = Comparison.open(folder).about
    jobs = requested or about["jobs"]
    if jobs > about["jobs"]:
        about["jobs"] = jobs
        write_json(folder / COMPARISON, about)
    shared, keep = ["--config", str(folder / CONFIG)], about["keep_models"]
    children = [
        Child(folder / f"{arm['arm']}-{seed}", [*shared, *_as_flags(_flags_of(folder, arm["arm"], seed, keep))])
        for seed in about["seeds"]
        for arm in about["arms"]
    ]
    say(console, f"{about['task']['name']}: {about['task'].get('description', '')}")
    say(console, f"{about['model']['name']} → {folder}: {len(children)} runs")
    command = f"troll compare --resume {shlex.quote(str(folder))}"
    if not run_children(children, jobs, console):
        say(console, f"Interrupted. Resume with: {command}")
        return 130
    result = conclude(folder)
    write_json(folder / COMPARISON, result)
    missing = result["missing"]
    if len(missing) < len(children):
        show(result, console)
        from troll.lab.report import write_report

        say(console, f"Report: {write_report(folder)}")
    if missing:
        say(console, f"Missing: {', '.join(missing)}. Retry with: {command}")
    return 1 if missing else 0


def _flags_of(folder: Path, arm: str, seed: int, keep_models: bool) -> Line:
    """The flags of one run."""
    ours = {"seed": seed, "run_name": f"{arm}-{seed}", "runs_dir": str(folder)}
    kept = {"save_model": keep_models, "keep_checkpoints": keep_models, "write_report": False}
    return {**ARMS[arm], **ours, "measure_kl": True, **kept}


def show(found: Line, console: Console) -> None:
    """Print the table and the differences."""
    labels = {arm["arm"]: arm["label"] for arm in found["arms"]}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("", "arm", "mean", "95 % interval", *(f"seed {seed}" for seed in found["seeds"])):
        table.add_column(header)
    for measure in found["measures"]:
        for i, row in enumerate(measure["table"]):
            low, high = row["low"], row["high"]
            ends = "–" if low is None or high is None else f"{_shown(low)} to {_shown(high)}"
            head = measure["label"] if i == 0 else ""
            table.add_row(head, labels[row["arm"]], _shown(row["mean"]), ends, *map(_shown, row["values"]))
    wide = console if console.is_terminal else Console(width=200, file=console.file)
    wide.print(table, highlight=False)
    for sentence in sentences(found):
        say(console, sentence)


def sentences(found: Line) -> list[str]:
    """The verdicts by pair of arms, and their statistical caveats."""
    labels = {arm["arm"]: arm["label"] for arm in found["arms"]}
    said: dict[str, list[str]] = {}
    for measure in found["measures"]:
        for x in measure["verdicts"]:
            ends = "" if x["low"] is None else f", {_signed(x['low'])} to {_signed(x['high'])}"
            pair = f"{short_name(x['a'])} against {labels[x['b']]}"
            said.setdefault(pair, []).append(f"  {measure['label']}: {x['says']} ({_signed(x['difference'])}{ends})")
    if not said:
        return ["No verdict: no two arms have finished runs with the same seed."]
    seeds, count = len(found["seeds"]), found["comparisons"]
    less = ", without those missing in an arm" if found["missing"] else ""
    return [
        *(line for pair, lines in said.items() for line in (pair, *lines)),
        f"95 % intervals of the difference, paired by seed, {seeds} seed{'s' * (seeds != 1)}{less}; {count} "
        f"comparison{'s' * (count != 1)}, not corrected: about one in twenty between equal arms says better or worse.",
        "Inconclusive means that so few seeds show no difference, not that the arms are equal.",
    ]


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}".replace("-", "−") if abs(value) < 100 else f"{value:.0f}"


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
