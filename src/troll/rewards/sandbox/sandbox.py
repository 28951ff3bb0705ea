"""The sandbox: a warm server process that forks a fresh, confined process with new pipes for every run."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from troll.errors import InputError
from troll.rewards.sandbox import examiner, inside, values
from troll.rewards.sandbox.isolation import (
    UNSANDBOXED_VARIABLE,
    Isolation,
    isolations,
    sandbox_python,
    sandbox_user,
    syscall_filter,
)
from troll.rewards.workers.process import JsonLines, NoReply, ready

START_SECONDS = 60.0  # a sandbox that has not replied by then counts as broken
CPU_SECONDS = 6.0  # of a run
END_SECONDS = 10.0  # for a killed run to be gone
_SERVER = Path(__file__).with_name("server.py")
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"}


class SandboxError(InputError):
    """The sandbox failed: nothing is known about the program that was to run in it."""

    def __init__(self, problem: str, fix: str = "Run troll doctor, which checks the sandbox") -> None:
        super().__init__(problem, fix)


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        code: the exit code; None if a signal ended it.
        signal: the signal that ended it, if any.
        seconds: CPU time.
        kilobytes: peak memory.
        out_of_time: it was killed because its processor time was over.
    """

    code: int | None
    signal: int | None
    seconds: float
    kilobytes: int
    out_of_time: bool = False


class SandboxRun:
    """A process in the sandbox and the pipes to it: ``lines`` for JSON, the file descriptors for anything else."""

    def __init__(self, replies: int, requests: int, control: socket.socket) -> None:
        self.replies, self.requests, self.control = replies, requests, control
        self.lines = JsonLines(replies, requests)
        self._ending: Ending | None = None

    def end(self) -> Ending:
        """Kill the process if it still runs, and return how it ended."""
        if self._ending is None:
            with contextlib.suppress(OSError):
                self.control.shutdown(socket.SHUT_WR)
            try:
                self._ending = self.wait(END_SECONDS)
            finally:
                self.close()
        return self._ending

    def allow(self, cpu_seconds: float) -> None:
        """Give the process this much processor time from now on."""
        with contextlib.suppress(OSError):  # it has ended
            self.control.send(struct.pack("d", cpu_seconds))

    def has_ended(self, seconds: float) -> bool:
        """Whether the process ends by itself within that time."""
        return ready(self.control.fileno(), select.POLLIN, seconds)

    def wait(self, seconds: float) -> Ending:
        """How the process ended; SandboxError if it has not ended within that time."""
        if not ready(self.control.fileno(), select.POLLIN, seconds):
            raise SandboxError("a run in the sandbox does not end")
        try:
            ending = json.loads(self.control.recv(1 << 12))
        except (ValueError, OSError) as error:
            raise SandboxError("the sandbox ended before its run") from error
        code = os.waitstatus_to_exitcode(ending["status"])
        return Ending(
            code if code >= 0 else None,
            -code if code < 0 else None,
            ending["seconds"],
            ending["kilobytes"],
            ending["out_of_time"],
        )

    def close_requests(self) -> None:
        """Close the pipe of requests: the input ends."""
        if self.requests >= 0:
            os.close(self.requests)
            self.requests = -1

    def close(self) -> None:
        """Close the pipes."""
        self.close_requests()
        if self.replies >= 0:
            os.close(self.replies)
            self.replies = -1
        self.control.close()


class Sandbox:
    """A running sandbox. Its runs are sequential or concurrent, and ``end`` kills all of them.

    Args:
        modules: the modules with the functions to run, sent as text. They import only the standard library and each
            other.
        isolation: default ``best()``.
    """

    def __init__(self, modules: Sequence[ModuleType], isolation: Isolation | None = None) -> None:
        isolation = isolation or best()
        settings = {
            "modules": _sources([values, *modules]),
            "filter": base64.b64encode(syscall_filter() if isolation.filtered else b"").decode(),
            "limits": dict(isolation.limits),
            "per_run_namespaces": isolation.per_run_namespaces,
            "listable": isolation.listable,
            "readable": isolation.readable,
        }
        command = isolation.command([sandbox_python(), "-s", "-S", "-P", "-c", _SERVER.read_text()], _ENVIRONMENT)
        mine, theirs = socket.socketpair()
        try:
            self._process = _process(command, theirs)
        except OSError as error:
            mine.close()
            raise SandboxError(f"{isolation.name} did not start ({error})") from error
        finally:
            theirs.close()
        self.end = weakref.finalize(self, _end, self._process, mine, os.getpid())
        self.isolation, self._orders = isolation, mine
        lines = JsonLines(mine.fileno(), mine.fileno())
        try:
            lines.send(START_SECONDS, settings)
            self.reusable: bool = lines.receive(START_SECONDS)["per_run_namespaces"]
        except NoReply as failure:
            self._process.kill()
            errors = self._process.communicate()[1].decode(errors="replace").strip()
            self.end()
            reason = errors.splitlines()[-1] if errors else failure
            raise SandboxError(f"{isolation.name} did not start ({reason})") from failure
        mine.setblocking(True)

    def start(
        self,
        function: Callable[[int, int], None],
        limits: Mapping[str, int] | None = None,
        cpu_seconds: float = CPU_SECONDS,
    ) -> SandboxRun:
        """Start a run: ``function(requests, replies)`` in a fresh process.

        Args:
            function: defined in one of the modules of this sandbox.
            limits: in place of the default ones, by their names in the module ``resource``.
            cpu_seconds: processor time until ``SandboxRun.allow`` gives more.
        """
        entry = {"module": function.__module__, "function": function.__name__}
        order = json.dumps({**entry, "limits": dict(limits or {}), "cpu_seconds": cpu_seconds}).encode()
        handles: list[int] = []
        try:
            for _ in range(2):
                handles += os.pipe()
            control, theirs = socket.socketpair()
        except OSError as error:
            for handle in handles:
                os.close(handle)
            raise SandboxError(
                f"the pipes of a run cannot be opened ({error})", "Raise the limit of open files (ulimit -n)"
            ) from error
        requests, to_run, from_run, replies = handles
        run = SandboxRun(from_run, to_run, control)
        try:
            socket.send_fds(self._orders, [order], [requests, replies, theirs.fileno()])
        except OSError as error:
            run.close()
            raise SandboxError(f"{self.isolation.name} has ended ({error})") from error
        finally:
            os.close(requests)
            os.close(replies)
            theirs.close()
        if not (ready(from_run, select.POLLIN, START_SECONDS) and os.read(from_run, 1)):
            run.close()
            raise SandboxError(f"a run did not start in {self.isolation.name}")
        return run


def best() -> Isolation:
    """The best isolation that works on this machine; SandboxError if there is none."""
    isolation, reason = _tried(os.environ.get(UNSANDBOXED_VARIABLE) == "1")
    if isolation is None:
        raise SandboxError(
            f"there is no working sandbox for model-written code ({reason})",
            "On Linux with user namespaces or Landlock, run apt install bubblewrap (0.8 or newer). If the code may do "
            f"anything to this machine, use --allow_unsandboxed_code ({UNSANDBOXED_VARIABLE}=1)",
        )
    return isolation


def status() -> tuple[bool, str, str]:
    """Whether model-written code can run here, the name of the isolation, and the reason. A program is run to check."""
    isolation, reason = _tried(os.environ.get(UNSANDBOXED_VARIABLE) == "1")
    return isolation is not None, isolation.name if isolation else "none", reason


@functools.cache
def _tried(unsandboxed: bool) -> tuple[Isolation | None, str]:
    """The first isolation in which a program runs, and the reason for that choice."""
    problems: list[str] = []
    for isolation in isolations(unsandboxed):
        try:
            sandbox = Sandbox([values, inside, examiner], isolation)
            run = sandbox.start(inside.probe)
            answer = run.lines.ask(START_SECONDS, 6)
            run.end()
            sandbox.end()
            if answer == 42:
                return isolation, "; ".join([f"a test program ran, {isolation.description}", *problems])
            problems.append(f"{isolation.name}: the test program gave a wrong result")
        except (InputError, NoReply) as error:
            problems.append(error.problem if isinstance(error, InputError) else f"{isolation.name}: {error}")
    return None, "; ".join(problems)


def _process(command: Sequence[str], orders: socket.socket) -> subprocess.Popen[bytes]:
    """The server process; it does not run as root if that can be avoided."""
    user = sandbox_user()
    return subprocess.Popen(
        command,
        env=_ENVIRONMENT,
        cwd="/",
        stdin=orders.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )


def _sources(modules: Sequence[ModuleType]) -> list[tuple[str, str]]:
    """Names and sources of modules, preceded by empty ones for their packages."""
    sources: dict[str, str] = {}
    for module in modules:
        parts = module.__name__.split(".")
        for i in range(1, len(parts)):
            sources.setdefault(".".join(parts[:i]), "")
        assert module.__file__ is not None
        sources[module.__name__] = Path(module.__file__).read_text()
    return list(sources.items())


def _end(process: subprocess.Popen[bytes], orders: socket.socket, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the owner
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    orders.close()
    if process.stderr is not None:
        process.stderr.close()
    process.wait()
