"""Runs the attacks on this machine and reports against which the sandbox held.

An attack succeeds if it returns something, or if something is detected outside: a message, a changed file, a killed
process, a process that outlived its run, too many threads, too much memory, an undeserved verdict, or no verdict.
After every attack an honest program must pass in the same worker. Attacks on the math reward are answers; right answers
must earn 1 in the same process.

    python -m troll.rewards.selftest.suite [--isolation NAME] [--json] [--list] [ATTACK …]

runs them, as ``troll doctor --attack`` does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, get_args

from troll.errors import InputError
from troll.rewards.judge import CodeWorker, Job
from troll.rewards.mathematics import MathReward
from troll.rewards.problems import Problem, read_problem
from troll.rewards.sandbox import Isolation, SandboxError, best, inside, isolations
from troll.rewards.sandbox import isolation as isolation_module
from troll.rewards.selftest.answers import ANSWERS
from troll.rewards.selftest.answers import HONEST as HONEST_ANSWERS
from troll.rewards.selftest.attack import Attack, Category
from troll.rewards.selftest.escape import ESCAPE
from troll.rewards.selftest.hacks import CALLS, CHECK, HACKS, STDIN, Hack
from troll.rewards.selftest.resources import MAX_THREADS, RESOURCES
from troll.rewards.selftest.scene import Scene, UsageMonitor, usage
from troll.rewards.selftest.theft import THEFT
from troll.rewards.workers.pool import WorkerFailed
from troll.rewards.workers.process import NoReply

MAX_KILOBYTES = 1400 << 10  # more than a run may have
GRACE_SECONDS = 5.0  # that a worker may take beyond the deadline of its job
HONEST = """
import os, threading
def work():
    try:
        os.write(os.open("/tmp", os.O_TMPFILE | os.O_RDWR), bytes(1 << 20))
    except PermissionError:
        pass  # with Landlock nothing can be written
    done.append(bytes(100 << 20))
done = []
def f(x):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return x * x * len(done) // len(done)
"""
ATTACKS: tuple[Attack, ...] = (*RESOURCES, *THEFT, *ESCAPE, *ANSWERS)


@dataclass(frozen=True)
class Result:
    """The result of an attack.

    Attributes:
        held: the attack got nothing and changed nothing.
        known: a success in this isolation is a known limit.
        detail: what the attack got or changed.
    """

    name: str
    category: Category
    description: str
    held: bool
    known: bool
    detail: str
    seconds: float


def names() -> list[str]:
    """The names of all attacks, in their order."""
    return [attack.name for attack in _all()]


def run(isolation: Isolation | None = None, only: Iterable[str] | None = None) -> Iterator[Result]:
    """Run the attacks one after the other.

    Args:
        isolation: default the best one that works here.
        only: names of attacks; default all.
    """
    isolation, chosen = isolation or best(), _chosen(only)
    with Scene() as scene:
        worker, reward = CodeWorker(isolation), MathReward(size=1)
        try:
            for attack in chosen:
                began = time.monotonic()
                attempt = _scored(reward, attack) if attack.answers else _attacked(worker, attack, scene)
                effects = [*attempt, *scene.harm()]
                if not _honest_passes(worker):
                    effects.append("an honest program did not pass after it")
                    worker.end()
                    worker = CodeWorker(isolation)
                known = isolation.name in attack.known or ("root" in attack.known and _as_root())
                detail = "".join(letter if letter.isprintable() else "?" for letter in "; ".join(effects)[:300])
                seconds = time.monotonic() - began
                yield Result(attack.name, attack.category, attack.description, not effects, known, detail, seconds)
        finally:
            worker.end()
            reward.close()


def _all() -> list[Attack]:
    attacks: list[Attack] = [*ATTACKS, *map(_hack, HACKS)]
    return sorted(attacks, key=lambda attack: get_args(Category).index(attack.category))


def _chosen(only: Iterable[str] | None) -> list[Attack]:
    wanted = None if only is None else list(only)
    unknown = sorted(set(wanted or ()) - set(names()))
    if unknown:
        raise InputError(
            f"there is no attack named {', '.join(unknown)}",
            "python -m troll.rewards.selftest.suite --list prints the names",
        )
    chosen = [attack for attack in _all() if wanted is None or attack.name in wanted]
    if wanted is None and importlib.util.find_spec("math_verify") is None:  # then there is no math reward to attack
        return [attack for attack in chosen if not attack.answers]
    return chosen


def _hack(hack: Hack) -> Attack:
    return Attack(hack.name, "hack", hack.description, hack.program, (hack.kind,), seconds=1.5)


def _problems(attack: Attack) -> list[Problem]:
    """The problems that the program of an attack on the judge must not solve."""
    if attack.tests == ("stdin",):
        return [read_problem({"inputs": [given for given, _ in STDIN], "outputs": [printed for _, printed in STDIN]})]
    if attack.tests == ("function",):
        return [
            read_problem([f"assert f({given!r}) == {value!r}" for given, value in CALLS]),
            read_problem([f"{CHECK}\ncheck(f)"]),
        ]
    return [read_problem(list(attack.tests))]


def _attacked(worker: CodeWorker, attack: Attack, scene: Scene) -> Iterator[str]:
    """Run an attack and yield its effects."""
    if attack.tests:
        for problem in _problems(attack):
            yield from _judged(worker, Job(attack.program, problem, attack.seconds))
        return
    with UsageMonitor(scene.mark) as monitor:
        for turn in range(attack.runs):
            yield from _ran(worker, attack, {**scene.facts, "turn": turn})
    if monitor.threads > MAX_THREADS:
        yield f"it had {monitor.threads} threads"
    if monitor.kilobytes > MAX_KILOBYTES:
        yield f"it had {monitor.kilobytes >> 10} MB"
    if usage(scene.mark):
        yield "a process outlived its run"


def _scored(reward: MathReward, attack: Attack) -> Iterator[str]:
    given = [*attack.answers, *HONEST_ANSWERS]
    scores = reward.score([answer for _, answer in given], [gold for gold, _ in given])
    for (gold, answer), score in zip(attack.answers, scores, strict=False):
        if score == 1.0:
            yield f"{answer} was accepted for {gold}"
    if scores[len(attack.answers) :] != [1.0] * len(HONEST_ANSWERS):
        yield "a right answer did not earn 1 after it"


def _judged(worker: CodeWorker, job: Job) -> Iterator[str]:
    began = time.monotonic()
    try:
        if worker.do(job).status == "pass":
            yield "it passed"
    except WorkerFailed as failure:
        yield f"there is no verdict ({failure})"
    except Exception as error:
        yield f"the judge failed ({type(error).__name__}: {error})"
    if time.monotonic() - began > job.seconds + GRACE_SECONDS:
        yield "the judge was delayed"


def _ran(worker: CodeWorker, attack: Attack, facts: dict[str, Any]) -> Iterator[str]:
    try:
        run = worker.start(inside.serve_calls)
    except SandboxError as error:
        yield f"no run could be started ({error.problem})"
        return
    try:
        run.lines.ask(attack.seconds, {"run": f"scene = {facts!r}\n{attack.program}"})
        reply = run.lines.ask(attack.seconds, {"evaluate": "attack()"})
        if isinstance(reply, dict) and reply.get("value"):
            yield f"it got {reply['value']!r}"
    except NoReply:
        pass
    try:
        run.end()
    except SandboxError as error:
        yield error.problem


def _honest_passes(worker: CodeWorker) -> bool:
    """Whether an honest program passes."""
    try:
        return worker.do(Job(HONEST, read_problem(["assert f(3) == 9", "assert 3 < f(2) < 5"]))).status == "pass"
    except WorkerFailed:
        return False


def _as_root() -> bool:
    return os.geteuid() == 0 and isolation_module.sandbox_user() is None


def main() -> int:
    """Print a line per attack; return 1 if an attack succeeded that is not a known limit."""
    known = {isolation.name: isolation for isolation in isolations()}
    parser = argparse.ArgumentParser("python -m troll.rewards.selftest.suite", description=main.__doc__)
    parser.add_argument("--isolation", choices=known, help="the isolation to attack (default: the best one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--list", action="store_true", help="only print the names of the attacks")
    parser.add_argument("names", nargs="*", help="attacks to run (default: all)")
    options = parser.parse_args()
    if options.list:
        print("\n".join(names()))
        return 0
    bad = 0
    for result in run(known.get(options.isolation), options.names or None):
        bad += not (result.held or result.known)
        verdict = "held" if result.held else "known" if result.known else "SUCCEEDED"
        line = f"{result.category:10} {result.name:36} {verdict:10} {result.seconds:5.1f} s  {result.detail}"
        print(json.dumps(asdict(result)) if options.json else line.rstrip(), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
