"""The judge: runs a program in the sandbox and decides whether it passes its test cases.

The program never sees expected values. Cases are sent one at a time in random order, the answers come back over a pipe
that belongs to this run, and they are compared here, or in the process of the test. Every case has its own limits of
time. A wrong program scores 0; a broken sandbox is no verdict.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from troll.rewards.problems import TOLERANCE, Case, Problem, Statement, Stream
from troll.rewards.sandbox import Ending, Isolation, Sandbox, SandboxError, SandboxRun, examiner, inside, values
from troll.rewards.workers.pool import WorkerFailed
from troll.rewards.workers.process import NoReply, PipeClosed, ReplyInvalid, ReplyLate, ReplyTooLong

Status = Literal["pass", "wrong", "timeout", "crash", "limit", "infra_error"]
SECONDS = 15.0  # wall time for each case
CPU_SECONDS = 6.0  # for each case
MEMORY = 1024  # megabytes
CPU_TOTAL = 100  # times the processor time of a case that a process may use in all
_MAX_PRINTED = 4 << 20  # bytes that a program may print
_STATUS_OF: dict[str, Status] = {inside.LIMIT: "limit", "Unsendable": "wrong"}  # other exceptions: crash
_TEST_START_SECONDS = 30.0  # for the first reply of a test's process, before it has anything from the program


@dataclass(frozen=True)
class Verdict:
    """The result of judging a program.

    Attributes:
        status: ``pass``, or how the first failed case failed: ``wrong`` (another answer), ``timeout``, ``crash`` (an
            exception, or the process ended) or ``limit`` (memory, disk, length of the answer). ``infra_error`` means
            that the sandbox failed, so that nothing is known about the program.
        passed, cases: number of cases passed, and of all cases. Without partial credit judging ends at the first
            failure.
    """

    status: Status
    passed: int = 0
    cases: int = 0


@dataclass(frozen=True)
class Job:
    """A program and the problem it has to solve.

    Attributes:
        seconds, cpu_seconds: wall time and processor time for each case, and for starting the program.
        all_cases: go on after a failure. Every case then has a process of its own, so that none depends on another.
        tolerance: relative, for numbers that are not whole.
    """

    program: str
    problem: Problem
    seconds: float = SECONDS
    all_cases: bool = False
    cpu_seconds: float = CPU_SECONDS
    tolerance: float = TOLERANCE


class Failed(Exception):  # noqa: N818, an outcome
    """A case failed with this status."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status: Status = status


class CodeWorker:
    """A worker of the pool: a sandbox and the judge outside of it. One job at a time."""

    def __init__(self, isolation: Isolation | None = None, memory: int = MEMORY) -> None:
        self._isolation, self._memory, self._used = isolation, memory, False
        self._sandbox = self._open()

    def do(self, job: Job) -> Verdict:
        """The verdict on a program; WorkerFailed if the sandbox failed."""
        cases = list(job.problem.cases)
        random.SystemRandom().shuffle(cases)
        statuses: list[Status] = []
        try:
            with contextlib.closing(_Program(self, job)) as program:
                for case in cases:
                    try:
                        program.check(case)
                        statuses.append("pass")
                    except Failed as failure:
                        statuses.append(failure.status)
                        if not job.all_cases:
                            break
                    if job.all_cases:
                        program.end()
        except SandboxError as error:
            raise WorkerFailed(error.problem) from error
        failed = sorted(status for status in statuses if status != "pass")
        return Verdict(failed[0] if failed else "pass", len(statuses) - len(failed), len(cases))

    def start(self, function: Callable[[int, int], None], cpu_seconds: float = CPU_SECONDS) -> SandboxRun:
        """A fresh process for a program."""
        if self._used and not self._sandbox.reusable:
            self._sandbox.end()
            self._sandbox = self._open()
        self._used = True
        return self._start(function, cpu_seconds)

    def start_beside(self, function: Callable[[int, int], None], cpu_seconds: float = CPU_SECONDS) -> SandboxRun:
        """A second process in the same sandbox, for code of the test."""
        return self._start(function, cpu_seconds)

    def _start(self, function: Callable[[int, int], None], cpu_seconds: float) -> SandboxRun:
        limits = {"RLIMIT_CPU": math.ceil(CPU_TOTAL * cpu_seconds)}
        if self._memory != MEMORY:  # which is that of the isolation
            limits["RLIMIT_AS"] = self._memory << 20
        return self._sandbox.start(function, limits, cpu_seconds)

    def end(self) -> None:
        """Close the sandbox."""
        self._sandbox.end()

    def _open(self) -> Sandbox:
        return Sandbox([values, inside, examiner], self._isolation)


class _Program:
    """A program while its cases are checked."""

    def __init__(self, worker: CodeWorker, job: Job) -> None:
        self.worker, self.job, self._until = worker, job, 0.0
        self._run: SandboxRun | None = None

    def check(self, case: Case) -> None:
        """Return if the program passes this case; Failed if not."""
        if isinstance(case, Stream):
            self._begin()
            self._check_stream(case)
            return
        if self._run is None:
            self._load()
        self._begin()
        if isinstance(case, Statement):
            self._check_statement(case)
            return
        try:
            value = self._value(evaluate=case.source, function=case.function)
            right = case.accepts(value, self.job.tolerance)
        except RecursionError:
            right = False
        if not right:
            raise Failed("wrong")

    def end(self) -> Ending | None:
        """End the process, if there is one."""
        run, self._run = self._run, None
        return None if run is None else run.end()

    close = end

    def _begin(self) -> None:
        """Give the program its time anew."""
        self._until = time.monotonic() + self.job.seconds
        if self._run is not None:
            self._run.allow(self.job.cpu_seconds)

    def _load(self) -> None:
        self._run = self.worker.start(inside.serve_calls, self.job.cpu_seconds)
        self._begin()
        before = self.job.problem.before_program
        if before and "error" in self._ask(run=before, shared=True):
            raise SandboxError(f"the setup of a problem does not run in the sandbox: {before!r}", "Fix the setup")
        self._value(run=self.job.program)

    def _value(self, **request: Any) -> Any:
        reply = self._ask(**request)
        if "error" in reply:
            raise Failed(_STATUS_OF.get(reply["error"], "crash"))
        return _decoded(reply.get("value"))

    def _ask(self, **request: Any) -> dict[str, Any]:
        """The reply of the program's process: a dict with a value, or with the name of an exception."""
        assert self._run is not None
        try:
            reply = self._run.lines.ask(self._until - time.monotonic(), request)
        except ReplyLate:
            raise Failed("timeout") from None
        except ReplyTooLong:
            raise Failed("limit") from None
        except ReplyInvalid:
            raise Failed("wrong") from None
        except PipeClosed:
            ending = self.end()
            assert ending is not None
            raise Failed(_status(ending)) from None
        if isinstance(reply, dict) and reply.keys() & {"value", "error"} and isinstance(reply.get("error", ""), str):
            return reply
        raise Failed("wrong")

    def _check_statement(self, case: Statement) -> None:
        problem = self.job.problem
        test = self.worker.start_beside(examiner.run_test, self.job.cpu_seconds)
        order = {
            "setup": "\n".join([case.imports, problem.given, problem.setup]),
            "prepare": problem.prepare,
            "test": case.source,
            "classes": problem.classes,
        }
        reply: dict[str, Any] = {}
        try:
            outcome = test.lines.ask(_TEST_START_SECONDS, order)
            while "ask" in outcome:
                reply = self._ask(**outcome["ask"])
                outcome = test.lines.ask(max(0.0, self._until - time.monotonic()), reply)
        except ReplyLate:
            raise Failed("timeout") from None
        except NoReply as failure:
            ending = test.end()
            if reply:  # what the program returned was too much for the test
                raise Failed("timeout" if ending.out_of_time else "limit") from None
            raise SandboxError(f"the process of a test gave no answer ({failure})") from failure
        finally:
            test.end()
        error = outcome.get("error")
        if error == "Unsendable":
            raise SandboxError(
                f"a test calls a function with arguments that are not plain values: {case.source[:200]!r}",
                "Change or remove the test",
            )
        if error is not None and outcome["part"] == "setup" and not reply:
            raise SandboxError(
                f"the setup of a problem does not run ({error}): {problem.setup[:200]!r}", "Fix the setup"
            )
        if outcome["held"] is not True:
            raised = error is not None and reply.get("error")  # by the program, and the test did not expect it
            raise Failed(_STATUS_OF.get(raised, "crash") if raised else "wrong")

    def _check_stream(self, case: Stream) -> None:
        run = self._run = self.worker.start(inside.run_program, self.job.cpu_seconds)
        program = (self.job.problem.before_program + "\n" + self.job.program).encode(errors="replace")
        text = case.given.encode(errors="surrogateescape")
        printed = _exchange(run, len(program).to_bytes(8, "big") + program + text, self._until)
        if not run.has_ended(self._until - time.monotonic()):  # it may close its output before its end
            raise Failed("timeout")
        ending = self.end()
        assert ending is not None
        if ending.code == 3:
            raise Failed("limit")
        if ending.code != 0:
            raise Failed(_status(ending))
        if not case.accepts(printed.decode(errors="surrogateescape"), self.job.tolerance):
            raise Failed("wrong")


def _exchange(run: SandboxRun, data: bytes, until: float) -> bytes:
    """Write all of ``data`` and read everything that is printed, at the same time."""
    rest, printed, poll = memoryview(data), bytearray(), select.poll()
    poll.register(run.replies, select.POLLIN)
    poll.register(run.requests, select.POLLOUT)
    while True:
        events = dict(poll.poll(1000 * max(0.0, until - time.monotonic())))
        if not events:
            raise Failed("timeout")
        if run.requests in events:
            try:
                rest = rest[os.write(run.requests, rest[: 1 << 16]) :]
            except BlockingIOError:
                pass
            except OSError:
                rest = rest[len(rest) :]  # the program has closed its input
            if not rest:
                poll.unregister(run.requests)
                run.close_requests()
        if run.replies in events:
            part = os.read(run.replies, 1 << 16)
            if not part:
                return bytes(printed)
            printed += part
            if len(printed) > _MAX_PRINTED:
                raise Failed("limit")


def _decoded(value: Any) -> Any:
    try:
        return values.decode(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise Failed("wrong") from None


def _status(ending: Ending) -> Status:
    """The status of a program whose process ended before its answer."""
    if ending.out_of_time or (ending.seconds >= CPU_SECONDS - 0.5 and ending.signal == signal.SIGKILL):
        return "timeout"
    return "limit" if ending.signal in (signal.SIGKILL, signal.SIGXFSZ) else "crash"
