"""The judge: runs a program in the sandbox and decides whether it passes its test cases.

The program never sees expected values. Cases are sent one at a time in random order, the answers come back over a pipe
that belongs to this run, and they are compared here. A wrong program scores 0; a broken sandbox is no verdict.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from troll.rewards.problems import Case, Problem, Statement, Stream
from troll.rewards.sandbox import Ending, Isolation, Sandbox, SandboxError, SandboxRun, inside
from troll.rewards.workers.pool import WorkerFailed
from troll.rewards.workers.process import NoReply, PipeClosed, ReplyInvalid, ReplyLate, ReplyTooLong

Status = Literal["pass", "wrong", "timeout", "crash", "limit", "infra_error"]
SECONDS = 15.0  # wall time for a program and all its cases
CPU_SECONDS = 6  # for each process
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
    """A program and the problem it has to solve."""

    program: str
    problem: Problem
    seconds: float = SECONDS
    all_cases: bool = False


class Failed(Exception):  # noqa: N818, an outcome
    """A case failed with this status."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status: Status = status


class CodeWorker:
    """A worker of the pool: a sandbox and the judge outside of it. One job at a time."""

    def __init__(self, isolation: Isolation | None = None) -> None:
        self._isolation, self._used = isolation, False
        self._sandbox = self._open()

    def do(self, job: Job) -> Verdict:
        """The verdict on a program; WorkerFailed if the sandbox failed."""
        until = time.monotonic() + job.seconds
        cases = list(job.problem.cases)
        random.SystemRandom().shuffle(cases)
        status: Status = "pass"
        passed = 0
        try:
            with contextlib.closing(_Program(self, job, until)) as program:
                for case in cases:
                    try:
                        program.check(case)
                        passed += 1
                    except Failed as failure:
                        status = failure.status if status == "pass" else status
                        program.end()
                        if not job.all_cases or time.monotonic() >= until:
                            break
        except SandboxError as error:
            raise WorkerFailed(error.problem) from error
        return Verdict(status, passed, len(cases))

    def start(self, function: Callable[[int, int], None]) -> SandboxRun:
        """A fresh process for a program."""
        if self._used and not self._sandbox.reusable:
            self._sandbox.end()
            self._sandbox = self._open()
        self._used = True
        return self._sandbox.start(function, {"RLIMIT_CPU": CPU_SECONDS})

    def start_beside(self, function: Callable[[int, int], None]) -> SandboxRun:
        """A second process in the same sandbox, for code of the test."""
        return self._sandbox.start(function, {"RLIMIT_CPU": CPU_SECONDS})

    def end(self) -> None:
        """Close the sandbox."""
        self._sandbox.end()

    def _open(self) -> Sandbox:
        return Sandbox([inside], self._isolation)


class _Program:
    """A program while its cases are checked."""

    def __init__(self, worker: CodeWorker, job: Job, until: float) -> None:
        self.worker, self.job, self.until = worker, job, until
        self._run: SandboxRun | None = None

    def check(self, case: Case) -> None:
        """Return if the program passes this case; Failed if not."""
        if isinstance(case, Stream):
            self._check_stream(case)
            return
        if self._run is None:
            self._load()
        if isinstance(case, Statement):
            self._check_statement(case)
            return
        try:
            right = case.accepts(self._value(evaluate=case.source))
        except RecursionError:
            right = False
        if not right:
            raise Failed("wrong")

    def end(self) -> Ending | None:
        """End the process, if there is one."""
        run, self._run = self._run, None
        return None if run is None else run.end()

    close = end

    def _load(self) -> None:
        self._run = self.worker.start(inside.serve_calls)
        if self.job.problem.setup and "error" in self._ask(run=self.job.problem.setup):
            raise SandboxError(
                f"the setup of a problem does not run in the sandbox: {self.job.problem.setup!r}", "Fix the setup"
            )
        for code in (self.job.program, self.job.problem.prepare):
            if code:
                self._value(run=code)

    def _value(self, **request: Any) -> Any:
        reply = self._ask(**request)
        if "error" in reply:
            raise Failed(_STATUS_OF.get(reply["error"], "crash"))
        return _decoded(reply["value"])

    def _ask(self, **request: Any) -> dict[str, Any]:
        """The reply of the program's process: a dict with a value, or with the name of an exception."""
        assert self._run is not None
        try:
            reply = self._run.lines.ask(self.until - time.monotonic(), request)
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
        match reply:
            case {"error": str(), **rest} | {"value": _, **rest} if not rest:
                return reply  # type: ignore[no-any-return]
        raise Failed("wrong")

    def _check_statement(self, case: Statement) -> None:
        test = self.worker.start_beside(inside.run_test)
        imports = "".join(f"import {name}\n" for name in sorted(case.modules))
        order = {"setup": imports + self.job.problem.setup, "test": case.source, "names": case.names}
        reply: dict[str, Any] = {}
        try:
            outcome = test.lines.ask(_TEST_START_SECONDS, order)
            while "call" in outcome:
                reply = self._ask(**outcome)
                if "value" in reply:
                    _decoded(reply["value"])  # only valid values reach the test
                outcome = test.lines.ask(max(0.0, self.until - time.monotonic()), reply)
        except ReplyLate:
            raise Failed("timeout") from None
        except NoReply as failure:
            if reply:
                raise Failed("limit") from None  # what the program returned was too much for the test
            raise SandboxError(f"the process of a test gave no answer ({failure})") from failure
        finally:
            test.end()
        if outcome.get("error") == "Unsendable":
            raise SandboxError(
                f"a test calls a function with arguments that are not plain values: {case.source[:200]!r}",
                "Change or remove the test",
            )
        if outcome["held"] is not True:
            raised = "error" in outcome and reply.get("error")  # by the program, and the test did not expect it
            raise Failed(_STATUS_OF.get(raised, "crash") if raised else "wrong")

    def _check_stream(self, case: Stream) -> None:
        run = self._run = self.worker.start(inside.run_program)
        program = (self.job.problem.setup + "\n" + self.job.program).encode(errors="replace")
        text = case.given.encode(errors="surrogateescape")
        printed = _exchange(run, len(program).to_bytes(8, "big") + program + text, self.until)
        ending = self.end()
        assert ending is not None
        if ending.code == 3:
            raise Failed("limit")
        if ending.code != 0:
            raise Failed(_status(ending))
        if not case.accepts(printed.decode(errors="surrogateescape")):
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
        return inside.decode(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise Failed("wrong") from None


def _status(ending: Ending) -> Status:
    """The status of a program whose process ended before its answer."""
    if ending.seconds >= CPU_SECONDS - 0.5 and ending.signal == signal.SIGKILL:
        return "timeout"
    return "limit" if ending.signal in (signal.SIGKILL, signal.SIGXFSZ) else "crash"
