"""The judge of a program: whether it passes its cases, in a sandbox, where it cannot learn what they expect.

Cases go in one at a time, in an order that nobody knows, and the answers come back on a pipe that only this run has.
They are compared here. A program that is wrong earns 0; a sandbox that is broken is no verdict on any program.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import time
from dataclasses import dataclass
from typing import Any, Literal

from troll.rewards.inside import calls, examiner, stream, values
from troll.rewards.problems import Case, Problem, Statement, Stream
from troll.rewards.sandbox import Ending, Isolation, Run, Sandbox, SandboxError
from troll.rewards.workers.lines import Ended, Garbled, Late, Long, NoReply
from troll.rewards.workers.pool import WorkerFailed

Status = Literal["pass", "wrong", "timeout", "crash", "limit", "infra_error"]
SECONDS = 15.0  # on the clock, for a program and all its cases
CPU_SECONDS = 6  # of each process
_PRINTED = 4 << 20  # bytes that a program may print
_KINDS: dict[str, Status] = {values.LIMIT: "limit", "Unsendable": "wrong"}  # by what was raised
_START = 30.0  # seconds for a process of ours, which has nothing hostile in it, to say something


@dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        status: ``pass``, or of the first case that failed: ``wrong`` (another answer), ``timeout``, ``crash`` (an
            exception, or the process ended), ``limit`` (memory, disk, length of the answer), or ``infra_error``: the
            sandbox failed, and nothing is known of the program.
        passed, cases: how many passed, of how many; without partial credit the first failure is the last case.
    """

    status: Status
    passed: int = 0
    cases: int = 0


@dataclass(frozen=True)
class Job:
    """A program and what it must do."""

    program: str
    problem: Problem
    seconds: float = SECONDS
    all_cases: bool = False


class Failed(Exception):  # noqa: N818, an outcome
    """A case failed, in this way."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status: Status = status


class CodeWorker:
    """A sandbox, and the judge outside of it. One job at a time."""

    def __init__(self, isolation: Isolation | None = None) -> None:
        self._isolation, self._used = isolation, False
        self._sandbox = self._open()

    def do(self, job: Job) -> Verdict:
        """The verdict on a program; WorkerFailed where the sandbox is to blame that there is none."""
        until = time.monotonic() + job.seconds
        cases = list(job.problem.cases)
        random.SystemRandom().shuffle(cases)
        status: Status = "pass"
        passed = 0
        try:
            with contextlib.closing(_Program(self, job, until)) as program:
                for case in cases:
                    try:
                        program.hold(case)
                        passed += 1
                    except Failed as failure:
                        status = failure.status if status == "pass" else status
                        program.end()
                        if not job.all_cases or time.monotonic() >= until:
                            break
        except SandboxError as error:
            raise WorkerFailed(error.given) from error
        return Verdict(status, passed, len(cases))

    def start(self, module: Any) -> Run:
        """A fresh process for a program."""
        if self._used and not self._sandbox.reusable:
            self._sandbox.end()
            self._sandbox = self._open()
        self._used = True
        return self._sandbox.start(module, {"RLIMIT_CPU": CPU_SECONDS})

    def start_beside(self, module: Any) -> Run:
        """A process beside the program's, for code that is not the program's."""
        return self._sandbox.start(module, {"RLIMIT_CPU": CPU_SECONDS})

    def end(self) -> None:
        """Close the sandbox."""
        self._sandbox.end()

    def _open(self) -> Sandbox:
        return Sandbox([values, calls, stream, examiner], self._isolation)


class _Program:
    """A program while its cases are held."""

    def __init__(self, worker: CodeWorker, job: Job, until: float) -> None:
        self.worker, self.job, self.until = worker, job, until
        self._run: Run | None = None

    def hold(self, case: Case) -> None:
        """Return if it passes this case; Failed if not."""
        if isinstance(case, Stream):
            self._hold_stream(case)
            return
        if self._run is None:
            self._load()
        if isinstance(case, Statement):
            self._hold_statement(case)
            return
        try:
            right = case.holds(self._value(evaluate=case.source))
        except RecursionError:
            right = False
        if not right:
            raise Failed("wrong")

    def end(self) -> Ending | None:
        """End its process, if there is one."""
        run, self._run = self._run, None
        return None if run is None else run.end()

    close = end

    def _load(self) -> None:
        self._run = self.worker.start(calls)
        if self.job.problem.setup and "error" in self._ask(run=self.job.problem.setup):
            raise SandboxError(f"the setup of a problem, which does not run in the sandbox: {self.job.problem.setup!r}")
        for code in (self.job.program, self.job.problem.prepare):
            if code:
                self._value(run=code)

    def _value(self, **request: Any) -> Any:
        reply = self._ask(**request)
        if "error" in reply:
            raise Failed(_KINDS.get(reply["error"], "crash"))
        return _decoded(reply["value"])

    def _ask(self, **request: Any) -> dict[str, Any]:
        """What the program's process replies: a dict with a value, or with the name of an error."""
        assert self._run is not None
        try:
            reply = self._run.lines.ask(self.until - time.monotonic(), request)
        except Late:
            raise Failed("timeout") from None
        except Long:
            raise Failed("limit") from None
        except Garbled:
            raise Failed("wrong") from None
        except Ended:
            ending = self.end()
            assert ending is not None
            raise Failed(_status(ending)) from None
        match reply:
            case {"error": str(), **rest} | {"value": _, **rest} if not rest:
                return reply  # type: ignore[no-any-return]
        raise Failed("wrong")

    def _hold_statement(self, case: Statement) -> None:
        test = self.worker.start_beside(examiner)
        imports = "".join(f"import {name}\n" for name in sorted(case.modules))
        order = {"setup": imports + self.job.problem.setup, "test": case.source, "names": case.names}
        reply: dict[str, Any] = {}
        try:
            said = test.lines.ask(_START, order)
            while "call" in said:
                reply = self._ask(**said)
                if "value" in reply:
                    _decoded(reply["value"])  # nothing else goes in there
                said = test.lines.ask(max(0.0, self.until - time.monotonic()), reply)
        except Late:
            raise Failed("timeout") from None
        except NoReply as failure:
            if reply:
                raise Failed("limit") from None  # what the program returned was too much for the test
            raise SandboxError(f"the process that tests, which gave no answer ({failure})") from failure
        finally:
            test.end()
        if said.get("error") == "Unsendable":
            raise SandboxError(f"a test that calls a function with more than plain values: {case.source[:200]!r}")
        if said["held"] is not True:
            raised = "error" in said and reply.get("error")  # by the program, and the test did not expect it
            raise Failed(_KINDS.get(raised, "crash") if raised else "wrong")

    def _hold_stream(self, case: Stream) -> None:
        run = self._run = self.worker.start(stream)
        program = (self.job.problem.setup + "\n" + self.job.program).encode(errors="replace")
        text = case.given.encode(errors="surrogateescape")
        printed = _exchange(run, len(program).to_bytes(8, "big") + program + text, self.until)
        ending = self.end()
        assert ending is not None
        if ending.code == 3:
            raise Failed("limit")
        if ending.code != 0:
            raise Failed(_status(ending))
        if not case.holds(printed.decode(errors="surrogateescape")):
            raise Failed("wrong")


def _exchange(run: Run, data: bytes, until: float) -> bytes:
    """Write all of ``data`` and read all there is to read, at the same time."""
    rest, found, poll = memoryview(data), bytearray(), select.poll()
    poll.register(run.replies, select.POLLIN)
    poll.register(run.requests, select.POLLOUT)
    while True:
        happened = dict(poll.poll(1000 * max(0.0, until - time.monotonic())))
        if not happened:
            raise Failed("timeout")
        if run.requests in happened:
            try:
                rest = rest[os.write(run.requests, rest[: 1 << 16]) :]
            except BlockingIOError:
                pass
            except OSError:
                rest = rest[len(rest) :]  # it reads no more
            if not rest:
                poll.unregister(run.requests)
                run.close_requests()
        if run.replies in happened:
            part = os.read(run.replies, 1 << 16)
            if not part:
                return bytes(found)
            found += part
            if len(found) > _PRINTED:
                raise Failed("limit")


def _decoded(value: Any) -> Any:
    try:
        return values.decode(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise Failed("wrong") from None


def _status(ending: Ending) -> Status:
    """Of a program whose process ended before its answer."""
    if ending.seconds >= CPU_SECONDS - 0.5 and ending.signal == signal.SIGKILL:
        return "timeout"
    return "limit" if ending.signal in (signal.SIGKILL, signal.SIGXFSZ) else "crash"
