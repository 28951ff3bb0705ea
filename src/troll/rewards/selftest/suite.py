"""Runs the attacks on this machine and says which held: none, if the sandbox is as it should be.

Success is what an attack brings back, or what is seen outside: a message, a changed file, a process that was killed or
that outlived its run, too many threads, too much memory, a verdict that was not earned, or no verdict. And after every
attack an honest program has to pass in the same worker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from troll.errors import InputError
from troll.rewards.inside import calls
from troll.rewards.judge import CodeWorker, Job
from troll.rewards.problems import Problem, read_problem
from troll.rewards.sandbox import Isolation, SandboxError, best
from troll.rewards.sandbox import isolation as walls
from troll.rewards.selftest.attack import Attack, Category
from troll.rewards.selftest.escape import ESCAPE
from troll.rewards.selftest.hacks import CALLS, CHECK, HACKS, STDIN, Hack
from troll.rewards.selftest.replies import REPLIES
from troll.rewards.selftest.resources import MANY, RESOURCES
from troll.rewards.selftest.scene import Scene
from troll.rewards.selftest.theft import THEFT
from troll.rewards.selftest.usage import Watch, marked
from troll.rewards.workers.lines import NoReply
from troll.rewards.workers.pool import WorkerFailed

MEMORY = 1400 << 10  # kilobytes, which is more than a run may have
GRACE = 5.0  # seconds that a worker may take beyond those of its job
HONEST = """
import os, threading
def work():
    try:
        os.write(os.open("/tmp", os.O_TMPFILE | os.O_RDWR), bytes(1 << 20))
    except PermissionError:
        pass  # with Landlock there is no place to write to
    done.append(bytes(100 << 20))
done = []
def f(x):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return x * x * len(done) // len(done)
"""
ATTACKS: tuple[Attack, ...] = (*RESOURCES, *REPLIES, *THEFT, *ESCAPE)


@dataclass(frozen=True)
class Result:
    """What became of an attack.

    Attributes:
        held: it got nothing, and did nothing.
        known: it is known that it does not hold here.
        detail: what it got or did.
    """

    name: str
    category: Category
    says: str
    held: bool
    known: bool
    detail: str
    seconds: float


def names() -> list[str]:
    """Of all attacks, in their order."""
    return [attack.name for attack in _all()]


def run(isolation: Isolation | None = None, only: Iterable[str] | None = None) -> Iterator[Result]:
    """Make the attacks, one after the other.

    Args:
        isolation: the walls to try; the best there are if not given.
        only: names of attacks; all if not given.
    """
    isolation, chosen = isolation or best(), _chosen(only)
    with Scene() as scene:
        worker = CodeWorker(isolation)
        try:
            for attack in chosen:
                began = time.monotonic()
                found = [*_made(worker, attack, scene), *scene.harm()]
                if not _good(worker):
                    found.append("an honest program did not pass after it")
                    worker.end()
                    worker = CodeWorker(isolation)
                known = isolation.name in attack.known or ("root" in attack.known and _root())
                detail = "".join(letter if letter.isprintable() else "?" for letter in "; ".join(found)[:300])
                seconds = time.monotonic() - began
                yield Result(attack.name, attack.category, attack.says, not found, known, detail, seconds)
        finally:
            worker.end()


def _all() -> list[Attack]:
    found: list[Attack] = [*ATTACKS, *map(_hack, HACKS)]
    return sorted(found, key=lambda attack: get_args(Category).index(attack.category))


def _chosen(only: Iterable[str] | None) -> list[Attack]:
    wanted = None if only is None else list(only)
    unknown = sorted(set(wanted or ()) - set(names()))
    if unknown:
        raise InputError(
            f"the attacks {', '.join(unknown)}", "names of attacks", "python -m troll.rewards.selftest --list"
        )
    return [attack for attack in _all() if wanted is None or attack.name in wanted]


def _hack(hack: Hack) -> Attack:
    return Attack(hack.name, "hack", hack.trick, hack.program, (hack.kind,), seconds=1.5)


def _problems(attack: Attack) -> list[Problem]:
    """What the program of an attack on the judge must not solve."""
    if attack.tests == ("stdin",):
        return [read_problem({"inputs": [given for given, _ in STDIN], "outputs": [printed for _, printed in STDIN]})]
    if attack.tests == ("function",):
        return [
            read_problem([f"assert f({given!r}) == {value!r}" for given, value in CALLS]),
            read_problem([f"{CHECK}\ncheck(f)"]),
        ]
    return [read_problem(list(attack.tests))]


def _made(worker: CodeWorker, attack: Attack, scene: Scene) -> Iterator[str]:
    """Make an attack; what came of it."""
    if attack.tests:
        for problem in _problems(attack):
            yield from _judged(worker, Job(attack.program, problem, attack.seconds))
        return
    with Watch(scene.mark) as watch:
        for turn in range(attack.runs):
            yield from _ran(worker, attack, {**scene.facts, "turn": turn})
    if watch.tasks > MANY:
        yield f"it had {watch.tasks} threads"
    if watch.kilobytes > MEMORY:
        yield f"it had {watch.kilobytes >> 10} MB"
    if marked(scene.mark):
        yield "a process outlived its run"


def _judged(worker: CodeWorker, job: Job) -> Iterator[str]:
    began = time.monotonic()
    try:
        if worker.do(job).status == "pass":
            yield "it passed"
    except WorkerFailed as failure:
        yield f"there is no verdict ({failure})"
    except Exception as error:
        yield f"the judge failed ({type(error).__name__}: {error})"
    if time.monotonic() - began > job.seconds + GRACE:
        yield "the judge was held up"


def _ran(worker: CodeWorker, attack: Attack, facts: dict[str, Any]) -> Iterator[str]:
    try:
        run = worker.start(calls)
    except SandboxError as error:
        yield f"no run could be started ({error.given})"
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
        yield error.given


def _good(worker: CodeWorker) -> bool:
    """Whether an honest program passes."""
    try:
        return worker.do(Job(HONEST, read_problem(["assert f(3) == 9", "assert 3 < f(2) < 5"]))).status == "pass"
    except WorkerFailed:
        return False


def _root() -> bool:
    return os.geteuid() == 0 and walls.user() is None
