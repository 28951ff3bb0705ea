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
from troll.lab.cli.arguments import existing_folder
from troll.lab.cli.flags import Flags, anchored
from troll.lab.cli.subprocess_runs import Child, run_children, say
from troll.lab.runs import Comparison, write_json
from troll.lab.runs.arms import ARMS, arm_of
from troll.lab.runs.comparison import begin, check_arms, check_seeds, conclude, short_name
from troll.lab.runs.folder import COMPARISON, CONFIG, Line
from troll.lab.runs.formatting import duration
from troll.lab.runs.writer import new_folder, write_yaml
from troll.lab.training.settings import DEFAULT_MODEL, defaults
from troll.trl.robust.lock import locked

DESCRIPTION = """\
Train under several trust regions with the same task, seeds and budget, and say what differs.

  troll compare                                       TROLL, PPO's clip and no trust region, three seeds each
  troll compare --arms troll clip clip-higher gspo none --seeds 0 1 2 3 4
  troll compare --task gym:gcd --max_steps 48 --kl_bound 0.02     any flag of `troll train` holds for all arms
  troll compare --jobs 2                              two runs at a time
  troll compare --dry_run                             the runs, the settings and the time, and nothing else
  troll compare --resume arithmetic-comparison        go on; what is finished is not run again

  --arms      troll, clip (PPO, 1 ± 0.2), clip-higher (DAPO, 0.8 to 1.28), gspo (sequence ratio), none
  --seeds     of every arm; arms are compared seed by seed, and with one seed nothing can be said
  --jobs      runs at a time; more than one share the machine, and their time is not judged
  --keep_models true   keep every trained model, for `troll eval`

A comparison is a folder below --runs_dir with one run per arm and seed in it, comparison.json and report.html. Ctrl-C
ends it with a checkpoint of every run. A run that fails does not stop the others.
"""
OURS = {"measure_kl", "save_model", "keep_checkpoints", "write_report"}
"""Flags of ``troll train`` that a comparison sets itself, beside those that tell the arms apart."""
_BY_ARM = {name for arm in ARMS.values() for name in arm}
_HERE = {"arms", "seeds", "jobs", "keep_models", "config", "runs_dir", "run_name", "dry_run", "resume"}


@dataclass
class CompareSettings:
    """What is compared."""

    arms: list[str] = field(
        default_factory=lambda: ["troll", "clip", "none"],
        metadata={"help": f"The arms, the first against each other one: some of {', '.join(ARMS)}."},
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "One run of each arm per seed."})
    jobs: int = field(default=1, metadata={"help": "Runs at a time."})
    keep_models: bool = field(default=False, metadata={"help": "Keep every trained model and its checkpoints."})

    def __post_init__(self) -> None:
        check_arms(self.arms)
        check_seeds(self.seeds)
        if self.jobs < 1:
            raise InputError(f"--jobs {self.jobs}", "at least 1", "--jobs 1, the default")


def run(argv: Sequence[str]) -> int:
    """Run what is not finished yet, then conclude."""
    flags = _flags(argv)
    if flags.wants_help:
        print(flags.help(defaults(DEFAULT_MODEL, {}, train.has_gpu())), end="")
        return 0
    settings, own = flags.run(), flags.own(CompareSettings)
    if settings.resume is not None:
        folder = _resumed(flags, settings)
    else:
        _check(flags, own)
        train.quiet()
        folder = train.new_folder(Path(settings.runs_dir), flags.value("run_name", None), settings.task, "comparison")
        told = _told(flags)
        example = _plan(folder, own, told)
        if settings.dry_run:
            _dry_run(folder, own, example)
            return 0
        labels = {arm: arm_of({**example.args.to_dict(), "epsilon_high": None, **ARMS[arm]})[1] for arm in own.arms}
        task = {"name": example.task.name, "description": example.task.description}
        more = {"name": folder.name, "jobs": own.jobs, "keep_models": own.keep_models}
        with new_folder(folder, "the comparison") as staged:
            begin(staged, labels, own.seeds, task, {"name": example.model}, **more)
            write_yaml(staged / CONFIG, told)
    with locked(folder, "the comparison"):
        return _execute(folder, flags.value("jobs", None), Console())


def check(argv: Sequence[str]) -> None:
    """Raise if these flags cannot be."""
    flags = _flags(argv)
    if flags.wants_help:
        return
    own = flags.own(CompareSettings)
    if flags.run().resume is None:
        _check(flags, own)
        for arm in own.arms:
            train.check([*_as_flags(_told(flags)), *_as_flags(ARMS[arm])])


def _flags(argv: Sequence[str]) -> Flags:
    synonym = ["--resume" + word.removeprefix("--continue") if _is_continue(word) else word for word in argv]
    return Flags(synonym, prog="troll compare", description=DESCRIPTION, extra=[CompareSettings])


def _is_continue(word: str) -> bool:
    return word == "--continue" or word.startswith("--continue=")


def _check(flags: Flags, own: CompareSettings) -> None:
    """Refuse flags that would make the arms alike, or the runs one."""
    hints = {
        "seed": f"--seeds {flags.value('seed', 0)}",
        "save_model": "--keep_models true",
        "keep_checkpoints": "--keep_models true",
        "write_report": "leaving it out: there is one report, of all runs",
        "measure_kl": "leaving it out: it is measured in every run",
    }
    for name in sorted(flags.said & (_BY_ARM | OURS | {"seed"})):
        hint = hints.get(name, "--arms, which has it in its settings; or `troll train` for a run with your own")
        raise InputError(f"--{name} for all runs of a comparison", "what is set for each run by itself", hint)


def _told(flags: Flags) -> Line:
    """What was said for all runs, as YAML takes it."""
    told = {name: flags.value(name, None) for name in sorted(flags.said - _HERE)}
    return anchored(json.loads(json.dumps(told, default=str)))


def _as_flags(values: Line) -> list[str]:
    """Flags of values; a list is several words after its flag."""
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            words += [f"--{name}={json.dumps(value) if isinstance(value, bool | dict) else value}"]
    return words


def _plan(folder: Path, own: CompareSettings, told: Line) -> Any:
    """The first run as it will be. What is wrong with model, task or settings is raised here, not in every run."""
    for arm in own.arms[1:]:
        train.check([*_as_flags(told), *_as_flags(ARMS[arm])])
    arm, seed = own.arms[0], own.seeds[0]
    flags = Flags([*_as_flags(told), *_as_flags(_flags_of(folder, arm, seed, own.keep_models))])
    return train.plan_of(flags, flags.run(), None, "")


def _dry_run(folder: Path, own: CompareSettings, example: Any) -> None:
    """Print the settings of all runs, and as comments each run and what they need: together a file for --config."""
    from troll.lab.training.estimate import FASTEST, SLOWEST

    apart = _BY_ARM | OURS | {"seed", "runs_dir"}
    shared = {name: value for name, value in example.config.items() if name not in apart}
    names = {"arms": own.arms, "seeds": own.seeds, "jobs": own.jobs, "keep_models": own.keep_models}
    print(yaml.safe_dump(names | shared, sort_keys=False, allow_unicode=True))
    runs = [(arm, seed) for arm in own.arms for seed in own.seeds]
    for arm, seed in runs:
        print(f"# {folder / f'{arm}-{seed}'}: {shlex.join(_as_flags({**ARMS[arm], 'seed': seed}))}")
    one = train.needs(example)
    if one.total is not None:
        low, high = (factor * one.total * len(runs) / own.jobs for factor in (FASTEST, SLOWEST))
        at_once = f" with {own.jobs} at a time, if they do not slow each other down" if own.jobs > 1 else ""
        print(f"#\n# {len(runs)} runs, between {duration(low)} and {duration(high)} in all{at_once}.")
    print(f"# Each: see troll train --dry_run; {'it fits' if one.fits else 'IT DOES NOT FIT'} into memory.")


def _resumed(flags: Flags, settings: Any) -> Path:
    more = sorted(flags.said - {"resume", "runs_dir", "jobs"})
    if more:
        given = ", ".join(f"--{name}" for name in more)
        raise InputError(f"--resume with {given}", "the settings the comparison was started with", "--resume alone")
    folder = existing_folder(settings.resume, settings.runs_dir, "a comparison")
    Comparison.open(folder)
    return folder


def _execute(folder: Path, asked: int | None, console: Console) -> int:
    """Run, conclude, print; as many at a time as is asked now, or was at the start."""
    about = Comparison.open(folder).about
    jobs = asked or about["jobs"]
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
    go_on = f"troll compare --resume {shlex.quote(str(folder))}"
    if not run_children(children, jobs, console):
        say(console, f"Interrupted. Go on with: {go_on}")
        return 130
    found = conclude(folder)
    write_json(folder / COMPARISON, found)
    missing = found["missing"]
    if len(missing) < len(children):
        show(found, console)
        from troll.lab.report import write_report

        say(console, f"Report: {write_report(folder)}")
    if missing:
        say(console, f"Missing: {', '.join(missing)}. Try again with: {go_on}")
    return 1 if missing else 0


def _flags_of(folder: Path, arm: str, seed: int, keep_models: bool) -> Line:
    """What is set for one run by itself."""
    ours = {"seed": seed, "run_name": f"{arm}-{seed}", "runs_dir": str(folder)}
    kept = {"save_model": keep_models, "keep_checkpoints": keep_models, "write_report": False}
    return {**ARMS[arm], **ours, "measure_kl": True, **kept}


def show(found: Line, console: Console) -> None:
    """Print the table and the verdicts."""
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
    """The verdicts in words, by pair of arms, and how far they can be trusted."""
    labels = {arm["arm"]: arm["label"] for arm in found["arms"]}
    said: dict[str, list[str]] = {}
    for measure in found["measures"]:
        for x in measure["verdicts"]:
            ends = "" if x["low"] is None else f", {_signed(x['low'])} to {_signed(x['high'])}"
            pair = f"{short_name(x['a'])} against {labels[x['b']]}"
            said.setdefault(pair, []).append(f"  {measure['label']}: {x['says']} ({_signed(x['difference'])}{ends})")
    if not said:
        return ["No verdict: no two arms have a finished run with the same seed."]
    seeds, count = len(found["seeds"]), found["comparisons"]
    less = ", less those that an arm is missing" if found["missing"] else ""
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
