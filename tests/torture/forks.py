"""Children of a process that has imported everything already: a run that is started in milliseconds, to be killed."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Child:
    """A forked process, and the file that its output goes to."""

    pid: int
    output: Path
    code: int | None = None
    """As a shell has it, 0 if all is well; the negative number of the signal that ended it."""

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, after at most so many seconds."""
        until = time.monotonic() + seconds
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                return False
            else:
                time.sleep(0.002)
        return True

    def kill(self) -> None:
        """With SIGKILL, which no process can do anything about."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(60)

    @property
    def said(self) -> str:
        """Everything it wrote to its standard output and error."""
        return self.output.read_text(encoding="utf-8", errors="replace")


def fork(work: Callable[[], int], output: Path, stopped: bool = False) -> Child:
    """A child that does some work, whose result is its exit code; with ``stopped``, not before it gets SIGCONT."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid:
        return Child(pid, output)
    code = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
        if stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def warm(work: Callable[[], int], output: Path) -> None:
    """Import what the work imports, which a child finds out: no child after it has to."""
    names = output.with_suffix(".modules")

    def listed() -> int:
        code = work()
        names.write_text("\n".join(sys.modules))
        return code

    child = fork(listed, output)
    child.wait(600)
    if child.code != 0:
        raise RuntimeError(f"the work that was to be repeated ended with {child.code}:\n{child.said}")
    for name in names.read_text().split("\n"):
        with suppress(ImportError):
            importlib.import_module(name)
