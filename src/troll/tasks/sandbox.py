"""Where model-written code runs: bubblewrap, with no network, no files of ours, no privileges, and a deadline.

Inside, a program sees a read-only Python and an empty /tmp. There is no other way to run such code here: without
bubblewrap nothing runs.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from troll.errors import InputError
from troll.tasks.conversation import Conversation, NoReply

_DRIVER = Path(__file__).with_name("sandbox_driver.py")


class SandboxError(InputError):
    """The sandbox itself failed: no verdict on the program that was to run in it."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "a sandbox that starts", "troll doctor, which says what is missing")


def python() -> str:
    """The interpreter for the sandbox: the one that runs this, outside of any virtual environment."""
    found = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    return str(found) if found.exists() else os.path.realpath(sys.executable)


def command(argv: Sequence[str], visible: Mapping[str, Path], env: Mapping[str, str] | None = None) -> list[str]:
    """The command that runs ``argv`` in a sandbox.

    Args:
        argv: the command inside.
        visible: path inside → a file or folder that can be read there, besides the interpreter.
        env: all environment variables inside.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise InputError("model-written code to run, without bubblewrap", "a sandbox for it", "apt install bubblewrap")
    parts = [bwrap, *_system(), "--proc", "/proc", "--dev", "/dev"]
    parts += ["--size", str(16 << 20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    parts += ["--size", str(64 << 20), "--tmpfs", "/tmp"]
    for inside, path in visible.items():
        parts += ["--ro-bind", str(path.resolve()), inside]
    parts += ["--remount-ro", "/", "--chdir", "/tmp", "--unshare-all", "--unshare-user", "--uid", "65534"]
    parts += ["--gid", "65534", "--cap-drop", "ALL", "--disable-userns", "--die-with-parent", "--new-session"]
    parts += ["--clearenv"]
    for name, value in (env or {}).items():
        parts += ["--setenv", name, value]
    return [*parts, "--", *argv]


def _system() -> list[str]:
    """What the interpreter needs of the system."""
    parts = ["--ro-bind", "/usr", "/usr"]
    for name in ("/lib", "/lib64", "/bin"):
        if os.path.islink(name):
            parts += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            parts += ["--ro-bind", name, name]
    if os.path.exists("/etc/ld.so.cache"):
        parts += ["--ro-bind", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    prefix = os.path.realpath(sys.base_prefix)
    return parts if prefix.startswith("/usr/") or prefix == "/usr" else [*parts, "--ro-bind", prefix, prefix]


class Sandbox:
    """A running sandbox with the driver in it, to be used with ``with``. Everything in it dies at the end.

    Args:
        seconds: for all requests together, once it has started.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> Sandbox:
        argv = command([python(), "-I", "-S", "/driver.py"], {"/driver.py": _DRIVER})
        try:
            self._conversation = Conversation(argv, {})
        except NoReply as failure:
            raise SandboxError(f"bubblewrap, which did not start ({failure})") from failure
        self._until = time.monotonic() + self._seconds
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._conversation.end()

    def run(self, source: str) -> bool:
        """Run code; whether it came to its end."""
        return self._ask(run=source) is True

    def evaluate(self, source: str) -> str | None:
        """The value of an expression, as Python writes it; None if there is none."""
        value = self._ask(evaluate=source)
        return value if isinstance(value, str) else None

    def _ask(self, **request: Any) -> Any:
        return self._conversation.ask(self._until - time.monotonic(), **request)


@functools.cache
def sandbox_status() -> tuple[bool, str, str]:
    """Whether model-written code can run here, in which sandbox, and why or why not; a program is run to find out."""
    try:
        with Sandbox(10.0) as sandbox:
            if sandbox.run("value = 6 * 7") and sandbox.evaluate("value") == "42":
                return True, "bubblewrap", "a program ran in it, without network, files and privileges"
            return False, "bubblewrap", "a program ran in it and gave a wrong result"
    except SandboxError as error:
        return False, "bubblewrap", error.given
    except InputError as error:
        return False, "none", f"bubblewrap is not installed: {error.hint}"
    except NoReply as failure:
        return False, "bubblewrap", str(failure)
