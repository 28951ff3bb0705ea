"""A lock in the folder of a run: one process at a time writes it. The kernel frees it when that process ends."""

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
_PATIENCE = 0.5  # seconds; ``is_locked`` in another process holds the lock for less


@contextmanager
def locked(folder: str | Path, what: str = "the run") -> Iterator[None]:
    """Hold the lock of an existing folder. A process may take it twice, as the trainer does inside a command.

    A file beside the lock names the holder for error messages. On file systems without locks, set the environment
    variable ``TROLL_NO_LOCKS=1``.
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
            f"{what} {folder} is in use: {_holder_sentence(folder)}", "Wait for it to finish, or stop that process"
        ) from None
    except OSError as error:
        if error.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM):
            raise InputError(
                f"{what} {folder} cannot be written ({error.strerror})", "Fix the error, or use another folder"
            ) from None
        raise InputError(
            f"{what} {folder} is on a file system without file locks ({error.strerror or error})",
            f"Use another disk, or set {WITHOUT}=1 and make sure that only one process writes the run",
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
    """Whether a process writes the run now; where the lock cannot be tried, whether its recorded holder is alive."""
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
    """Process, host and start time of the lock's holder; empty if it was released."""
    try:
        found = json.loads((folder / HOLDER).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lock(folder: Path, is_singleton: bool = False) -> FileLock:
    """The lock of a folder, the same for all spellings of its path."""
    return FileLock(folder.resolve() / LOCK, is_singleton=is_singleton, thread_local=False, fallback_to_soft=False)


def _sign(folder: Path) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    note = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    write_atomic(folder / HOLDER, json.dumps(note).encode())


def _holder_sentence(folder: Path) -> str:
    by = holder(folder)
    if not by.keys() >= {"pid", "host", "since"}:  # locked, but the holder has not written its name yet
        return "another process is writing"
    return f"process {by['pid']} on {by['host']} has been writing since {by['since']}"


def _is_alive(by: dict[str, Any]) -> bool:
    if by.get("host") != socket.gethostname() or not isinstance(by.get("pid"), int):
        return False
    try:
        os.kill(by["pid"], 0)
    except ProcessLookupError:
        return False
    except OSError:  # it exists and belongs to another user
        return True
    return True
