"""Run studies: each run without a result is a ``troll train``; several run at a time.

    python experiments/studies/run.py configs/regions.yaml --jobs 12
    python experiments/studies/run.py configs/*.yaml --set model=FOLDER --minutes 9
    python experiments/studies/run.py configs/regions.yaml --where region=troll,clip rate=1e-5
    python experiments/studies/run.py configs/regions.yaml --list           the runs, and what is done

A run that finished or failed becomes a line in results/STUDY.jsonl and is not run again; an interrupted run is resumed.
Runs share one GPU, so that their times are not comparable.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from results import RESULTS, line_of, read
from study import Case, Study

from troll.lab.cli import main as troll
from troll.lab.runs import append_line
from troll.lab.runs.folder import ABOUT

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""One thread each; CUDA is not initialised before the fork, after which it could not be used."""
_FORKED = multiprocessing.get_context("forkserver")  # slow imports happen once
_FORKED.set_forkserver_preload(["troll.lab.training.run", "troll.lab.cli.train"])
_ONE_AT_A_TIME = threading.Lock()


def _troll_train(flags: list[str], log: Path) -> None:
    """``troll train`` in a separate process, with its output in a file."""
    with log.open("ab") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    sys.argv = ["troll", "train", *flags]
    sys.exit(troll(sys.argv[1:]))


def train(case: Case, runs: Path, results: Path, until: float) -> str:
    """Train one case and append its result; returns its outcome for the log."""
    if time.monotonic() > until:
        return "not started: no time left"
    folder = runs / case.study / case.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    config = folder.with_name(f"{folder.name}.yaml")
    config.write_text(yaml.safe_dump({**case.flags, "runs_dir": str(folder.parent), "run_name": folder.name}))
    flags = ["--resume", str(folder)] if (folder / ABOUT).is_file() else ["--config", str(config)]
    log = folder.with_name(f"{folder.name}.log")
    process = _FORKED.Process(target=_troll_train, args=(flags, log))
    process.start()
    process.join()
    if not (folder / ABOUT).is_file():
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        return f"could not start ({process.exitcode}): {' '.join(last)}"
    line = line_of(case, folder)
    if line["status"] not in ("finished", "failed"):
        return "interrupted"
    with _ONE_AT_A_TIME:
        append_line(results / f"{case.study}.jsonl", line)
    rewards = line["rollouts"].get("reward", [])
    return f"{line['status']}, reward {rewards[-1] if rewards else '–'}, {line['seconds']:.0f} s"


def changed(study: Study, words: list[str]) -> Study:
    """The study with some flags set to another value for all of its runs."""
    given = {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in words)}
    cases = [Case(case.study, case.place, {**case.flags, **given}) for case in study.cases]
    return Study(study.name, study.question, cases)


def at(cases: Sequence[Case], words: list[str]) -> list[Case]:
    """The cases with one of the given labels on each of the given axes; refuses a label that no case has."""
    for axis, _, given in (word.partition("=") for word in words):
        labels = given.split(",")
        there = {case.place.get(axis) for case in cases}
        if unknown := set(labels) - there:
            raise SystemExit(f"--where {axis}={given}: no run has {', '.join(sorted(unknown))} there")
        cases = [case for case in cases if case.place.get(axis) in labels]
    return list(cases)


def main() -> int:
    """Run the studies; 1 if a run could not start or was interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--set", nargs="+", default=[], metavar="FLAG=VALUE", help="for all runs, e.g. model=FOLDER")
    parser.add_argument("--seeds", type=int, nargs="+", help="only runs with these seeds")
    parser.add_argument("--where", nargs="+", default=[], metavar="AXIS=LABEL,…", help="only runs with these labels")
    parser.add_argument("--runs", type=Path, default=Path("runs/studies"), help="folder of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--list", action="store_true", help="list the runs and do nothing")
    options = parser.parse_args()
    os.environ |= _ENVIRONMENT | os.environ
    options.results.mkdir(parents=True, exist_ok=True)
    studies = [changed(Study.read(path), options.set) for path in options.studies]
    done = {(line["study"], line["name"]) for study in studies for line in read(options.results, study.name)}
    cases = at([case for study in studies for case in study.cases], options.where)
    if options.seeds is not None:
        cases = [case for case in cases if case.flags.get("seed", 0) in options.seeds]
    if options.list:
        for case in cases:
            print(f"{case.study}/{case.name}: {'done' if (case.study, case.name) in done else 'to do'}")
        return 0
    until = time.monotonic() + 60 * options.minutes

    def one(case: Case) -> bool:
        outcome = train(case, options.runs, options.results, until)
        print(f"{case.study}/{case.name}: {outcome}", flush=True)
        return outcome.startswith(("finished", "failed"))

    waiting = [case for case in cases if (case.study, case.name) not in done]
    print(f"{len(cases)} runs, {len(waiting)} to do", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        return 0 if all(list(pool.map(one, waiting))) else 1


if __name__ == "__main__":
    sys.exit(main())
