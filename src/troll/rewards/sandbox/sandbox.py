"""A sandbox that is warm: every run in it is a fresh process with pipes of its own."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from troll.errors import InputError
from troll.rewards.sandbox import probe, seccomp
from troll.rewards.sandbox.isolation import DANGER, Isolation, isolations, python, user
from troll.rewards.workers.lines import Lines, NoReply, ready

START = 60.0  # seconds until a sandbox that has not said a word counts as broken
END = 10.0  # seconds for a run that was killed to be gone
_SERVER = Path(__file__).with_name("server.py")
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"}


class SandboxError(InputError):
    """The sandbox itself failed: no verdict on the program that was to run in it."""

    def __init__(self, what: str, hint: str = "troll doctor, which says what is missing") -> None:
        super().__init__(what, "a sandbox that works", hint)


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        code: what it returned; None if a signal ended it.
        signal: which signal; None if none.
        seconds: of processor time.
        kilobytes: of memory, at most.
    """

    code: int | None
    signal: int | None
    seconds: float
    kilobytes: int


class Run:
    """A process in the sandbox, and the pipes to it: ``lines`` for JSON, or the file descriptors for anything else."""

    def __init__(self, replies: int, requests: int, control: socket.socket) -> None:
        self.replies, self.requests, self.control = replies, requests, control
        self.lines = Lines(replies, requests)

    def end(self) -> Ending:
        """Kill it if it still runs; how it ended."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)
        try:
            return self.wait(END)
        finally:
            self.close()

    def wait(self, seconds: float) -> Ending:
        """How it ended; SandboxError if it has not."""
        if not ready(self.control.fileno(), select.POLLIN, seconds):
            raise SandboxError("a run that does not end")
        try:
            said = json.loads(self.control.recv(1 << 12))
        except (ValueError, OSError) as error:
            raise SandboxError("a sandbox that ended before its run") from error
        code = os.waitstatus_to_exitcode(said["status"])
        return Ending(code if code >= 0 else None, -code if code < 0 else None, said["seconds"], said["kilobytes"])

    def close_requests(self) -> None:
        """Say that nothing more will come."""
        if self.requests >= 0:
            os.close(self.requests)
            self.requests = -1

    def close(self) -> None:
        """Let go of the pipes."""
        self.close_requests()
        if self.replies >= 0:
            os.close(self.replies)
            self.replies = -1
        self.control.close()


class Sandbox:
    """A running sandbox. It starts runs one after the other or side by side, and everything in it dies at ``end``.

    Args:
        modules: what runs need and are: modules of the standard library and of each other. They are sent as text.
        isolation: the walls; the best there are if not given.
    """

    def __init__(self, modules: Sequence[ModuleType], isolation: Isolation | None = None) -> None:
        isolation = isolation or best()
        told = {
            "modules": _sources(modules),
            "filter": base64.b64encode(seccomp.program() if isolation.filtered else b"").decode(),
            "limits": dict(isolation.limits),
            "renew": isolation.renews,
            "listable": isolation.listable,
            "readable": isolation.readable,
        }
        command = isolation.command([python(), "-s", "-S", "-P", "-c", _SERVER.read_text()], _ENVIRONMENT)
        mine, theirs = socket.socketpair()
        try:
            self._process = _process(command, theirs)
        except OSError as error:
            mine.close()
            raise SandboxError(f"{isolation.name}, which did not start ({error})") from error
        finally:
            theirs.close()
        self.end = weakref.finalize(self, _end, self._process, mine, os.getpid())
        self.isolation, self._orders = isolation, mine
        lines = Lines(mine.fileno(), mine.fileno())
        try:
            lines.say(START, told)
            self.reusable: bool = lines.hear(START)["renews"]
        except NoReply as failure:
            self._process.kill()
            said = self._process.communicate()[1].decode(errors="replace").strip()
            self.end()
            why = said.splitlines()[-1] if said else failure
            raise SandboxError(f"{isolation.name}, which did not start ({why})") from failure
        mine.setblocking(True)

    def start(self, module: ModuleType, limits: Mapping[str, int] | None = None) -> Run:
        """Run ``main(requests, replies)`` of a module that the sandbox has.

        Args:
            module: one of those, or below them.
            limits: other than the usual ones, by the names of the module resource.
        """
        order = json.dumps({"module": module.__name__, "limits": dict(limits or {})}).encode()
        handles: list[int] = []
        try:
            for _ in range(2):
                handles += os.pipe()
            control, theirs = socket.socketpair()
        except OSError as error:
            for handle in handles:
                os.close(handle)
            raise SandboxError(f"no pipes for a run ({error})", "a higher limit of open files (ulimit -n)") from error
        requests, to_run, from_run, replies = handles
        run = Run(from_run, to_run, control)
        try:
            socket.send_fds(self._orders, [order], [requests, replies, theirs.fileno()])
        except OSError as error:
            run.close()
            raise SandboxError(f"{self.isolation.name}, which ended ({error})") from error
        finally:
            os.close(requests)
            os.close(replies)
            theirs.close()
        if not (ready(from_run, select.POLLIN, START) and os.read(from_run, 1)):
            run.close()
            raise SandboxError(f"{self.isolation.name}, in which a run did not start")
        return run


def best() -> Isolation:
    """The best walls that hold here; SandboxError if there are none."""
    found, why = _tried(os.environ.get(DANGER) == "1")
    if found is None:
        raise SandboxError(
            f"model-written code to run, and no sandbox for it ({why})",
            "apt install bubblewrap (0.8 or newer), on Linux with user namespaces or Landlock; or, if the code may do "
            f"anything to this machine, --allow_unsandboxed_code ({DANGER}=1)",
        )
    return found


def status() -> tuple[bool, str, str]:
    """Whether model-written code can run here, in which sandbox, and why or why not; a program is run to find out."""
    found, why = _tried(os.environ.get(DANGER) == "1")
    return found is not None, found.name if found else "none", why


@functools.cache
def _tried(danger: bool) -> tuple[Isolation | None, str]:
    """The first isolation in which a program runs, and why it is that one."""
    problems: list[str] = []
    for isolation in isolations(danger):
        try:
            sandbox = Sandbox([probe], isolation)
            run = sandbox.start(probe)
            answer = run.lines.ask(START, 6)
            run.end()
            sandbox.end()
            if answer == 42:
                return isolation, "; ".join([f"a program ran in it, {isolation.means}", *problems])
            problems.append(f"{isolation.name}: a program gave a wrong result in it")
        except (InputError, NoReply) as error:
            problems.append(error.given if isinstance(error, InputError) else f"{isolation.name}: {error}")
    return None, "; ".join(problems)


def _process(command: Sequence[str], orders: socket.socket) -> subprocess.Popen[bytes]:
    """A process that nobody but this one talks to; for root, it is not root's."""
    who = user()
    return subprocess.Popen(
        command,
        env=_ENVIRONMENT,
        cwd="/",
        stdin=orders.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        user=who,
        group=who,
        extra_groups=None if who is None else [],
    )


def _sources(modules: Sequence[ModuleType]) -> list[tuple[str, str]]:
    """Names and sources of modules, after empty ones for the packages they are in."""
    found: dict[str, str] = {}
    for module in modules:
        parts = module.__name__.split(".")
        for i in range(1, len(parts)):
            found.setdefault(".".join(parts[:i]), "")
        assert module.__file__ is not None
        found[module.__name__] = Path(module.__file__).read_text()
    return list(found.items())


def _end(process: subprocess.Popen[bytes], orders: socket.socket, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the process that it belongs to
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    orders.close()
    if process.stderr is not None:
        process.stderr.close()
    process.wait()
