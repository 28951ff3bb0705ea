"""One process at a time writes a run: a lock in its folder, which the kernel takes back however that process ends."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from troll.errors import InputError
from troll.files import write_atomic

LOCK, HOLDER = ".lock", ".lock.json"
WITHOUT = "TROLL_NO_LOCKS"
_PATIENCE = 0.5  # seconds: a listing that asks whether a run is locked holds the lock for less than that


@contextmanager
def locked(folder: str | Path, what: str = "the run") -> Iterator[None]:
    """Hold the lock of a folder that exists. One process may take it twice, as a trainer does inside a command.

    Beside the lock stands who holds it, for the message that others get. Where files cannot be locked, the environment
    variable ``TROLL_NO_LOCKS=1`` does without.
    """
    folder = Path(folder)
    if os.environ.get(WITHOUT):
        yield
        return
    lock = _lock(folder, is_singleton=True)
    first = not lock.is_locked
    try:
        lock.acquire(timeout=_PATIENCE)
    except Timeout:
        raise InputError(
            f"{what} {folder}, which {_who(folder)}",
            "one that nobody writes",
            "waiting for it; or stopping that process",
        ) from None
    except OSError as error:
        if error.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM):
            raise InputError(
                f"{what} {folder}, which cannot be written ({error.strerror})", "a folder that can be", "mending that"
            ) from None
        raise InputError(
            f"{what} {folder}, where no file can be locked ({error.strerror or error})",
            "a folder on a disk where a lock keeps two processes from writing the same run",
            f"another disk; or {WITHOUT}=1, if you see to it that no two processes do",
        ) from None
    try:
        if first:
            _sign(folder)
        yield
    finally:
        if first:
            (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def is_locked(folder: str | Path) -> bool:
    """Whether a process writes the run now; where the lock cannot be tried, whether the one that signed it is alive."""
    folder = Path(folder)
    if not (folder / LOCK).is_file():
        return False
    try:
        with _lock(folder).acquire(timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        return _is_alive(holder(folder))


def holder(folder: Path) -> dict[str, Any]:
    """Process, host and time of whoever locked the folder last, if it did not release it; else nothing."""
    try:
        found = json.loads((folder / HOLDER).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lock(folder: Path, is_singleton: bool = False) -> FileLock:
    """The path is resolved: whichever way a run is named, it has one lock."""
    return FileLock(folder.resolve() / LOCK, is_singleton=is_singleton, thread_local=False, fallback_to_soft=False)


def _sign(folder: Path) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    note = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    write_atomic(folder / HOLDER, json.dumps(note).encode())


def _who(folder: Path) -> str:
    """Between the lock and the signature another one may look."""
    by = holder(folder)
    if not by.keys() >= {"pid", "host", "since"}:
        return "another process is writing"
    return f"process {by['pid']} on {by['host']} has been writing since {by['since']}"


def _is_alive(by: dict[str, Any]) -> bool:
    if by.get("host") != socket.gethostname() or not isinstance(by.get("pid"), int):
        return False
    try:
        os.kill(by["pid"], 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is there, and of another user
        return True
    return True
