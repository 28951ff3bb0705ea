"""The folder of a run on disk: its checkpoints, and the lock that one process at a time holds.

``checkpoint-12`` exists only when it is complete. Until then it is ``.staging/checkpoint-12``. Its last file is the
manifest, with the size and the checksum of every other file. A crash can leave a staging folder, complete or not, but
never a partial checkpoint. ``checkpoints`` decides what is written. Nothing here needs TRL or torch.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock, Timeout

from troll.errors import InputError
from troll.files import checksum, sync_file, sync_folder, write_atomic

MANIFEST, STAGING, DELETED = "manifest.json", ".staging", ".deleted"
FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)")
_THREADS = 4  # one file is read while another is synced


@dataclass(frozen=True)
class Found:
    """The last complete checkpoint, if any, and why newer ones were rejected."""

    path: Path | None = None
    step: int = 0
    rejected: list[str] = field(default_factory=list)


def checkpoints(folder: Path) -> dict[int, Path]:
    """Step → checkpoint, oldest first, complete or not."""
    return dict(sorted((step, path) for step, path in _named(folder)))


def stage(folder: Path, step: int) -> Path:
    """An empty staging folder for a new checkpoint; leftovers of a crash are removed."""
    staging = folder / STAGING
    if staging.exists():
        shutil.rmtree(staging)
    shutil.rmtree(folder / DELETED, ignore_errors=True)
    path = staging / f"checkpoint-{step}"
    path.mkdir(parents=True)
    return path


class Seals:
    """Syncs and checksums the files of a staged checkpoint in the background while others are written."""

    def __init__(self, staged: Path) -> None:
        self.staged = staged
        self._pool = ThreadPoolExecutor(_THREADS, "seal")
        self._begun: dict[Path, Future[_Seal]] = {}

    def begin(self) -> None:
        """Seal the files written so far."""
        for path in _files(self.staged):
            if path not in self._begun:
                self._begun[path] = self._pool.submit(_seal, path)

    def cancel(self) -> None:
        """Stop; the checkpoint is abandoned."""
        self._pool.shutdown(cancel_futures=True)

    def entries(self) -> dict[str, dict[str, Any]]:
        """Manifest entries of all files; files changed since they were sealed are sealed again."""
        self.begin()
        with self._pool:
            seals = {path: self._begun[path].result() for path in _files(self.staged)}
        again = {path: _seal(path) for path, seal in seals.items() if seal.stamp != _stamp(path)}
        return {str(path.relative_to(self.staged)): seal.entry for path, seal in {**seals, **again}.items()}


def commit(staged: Path, seals: Seals | None = None) -> Path:
    """Turn a staged folder into a checkpoint: sync and checksum its files, write the manifest, rename, verify.

    It replaces a checkpoint of the same step. If anything fails, earlier checkpoints are untouched.
    """
    entries = (seals or Seals(staged)).entries()
    for inner in {path.parent for path in _files(staged)} - {staged}:
        sync_folder(inner)
    manifest = {"format": FORMAT, "step": _step(staged), "files": entries}
    write_atomic(staged / MANIFEST, _encoded({**manifest, "digest": _digest(manifest)}))  # also syncs the folder
    published = _publish(staged)
    wrong = verify(published)
    if wrong is not None:
        raise OSError(f"{published} differs when read back: {wrong}")
    return published


def rotate(folder: Path, newest: Path, keep: int | None, protected: Path | None = None) -> list[Path]:
    """Delete all but ``keep`` checkpoints, oldest first; returns those that could not be deleted.

    Checkpoints of a later step than ``newest`` belong to an abandoned continuation and are deleted first. The folders
    are renamed at once and removed in the background.
    """
    if keep is None or keep <= 0:
        return []
    last = _step(newest)
    order = sorted(checkpoints(folder), key=lambda step: (step <= last, step))
    others = [path for step in order if (path := folder / f"checkpoint-{step}") not in (newest, protected)]
    kept = keep - 1 - (protected not in (None, newest))
    left = [path for path in others[: max(0, len(others) - max(0, kept))] if not _delete(path)]
    threading.Thread(target=shutil.rmtree, args=(folder / DELETED, True), name="delete checkpoints").start()
    return left


def verify(checkpoint: Path) -> str | None:
    """Why a checkpoint is not complete, in a few words; None if it is."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
        given = manifest.pop("digest")
        if manifest["format"] != FORMAT:
            return f"its {MANIFEST} has format {manifest['format']}, this version of troll reads format {FORMAT}"
        if given != _digest(manifest) or manifest["step"] != _step(checkpoint):
            return f"its {MANIFEST} is damaged"
        files = {checkpoint / name: entry for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST} (it is incomplete, or was not written by troll)"
    except OSError as error:
        return f"its {MANIFEST} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"its {MANIFEST} is damaged"
    for path, entry in files.items():  # the cheap check first
        wrong = _wrong_size(path, entry["bytes"])
        if wrong is not None:
            return wrong
    with ThreadPoolExecutor(_THREADS) as pool:
        return next((x for x in pool.map(_wrong_bytes, files, (e["xxh3_128"] for e in files.values())) if x), None)


def last_good(folder: Path) -> Found:
    """The last complete checkpoint, also in the staging folder; changes nothing."""
    rejected: list[str] = []
    candidates = [*_named(folder / STAGING), *_named(folder)]
    for step, path in sorted(
        candidates, key=lambda x: x[0], reverse=True
    ):  # a staged one is newer than a checkpoint of the same step
        wrong = verify(path)
        if wrong is None:
            return Found(path, step, rejected)
        if path.parent == folder:
            rejected.append(f"{path.name} is skipped: {wrong}")
    return Found(None, 0, rejected)


def recover(folder: Path) -> Found:
    """As ``last_good``, and rename a staged one into place. For the process that resumes the run."""
    found = last_good(folder)
    if found.path is not None and found.path.parent.name == STAGING:
        found = Found(_publish(found.path), found.step, found.rejected)
    return found


def size(checkpoint: Path) -> int:
    """Size of a checkpoint in bytes."""
    return sum(x.stat().st_size for x in _files(checkpoint))


def _named(folder: Path) -> Iterator[tuple[int, Path]]:
    if folder.is_dir():
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                yield int(match[1]), path


def _step(checkpoint: Path) -> int:
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not named checkpoint-<step>")
    return int(match[1])


def _publish(staged: Path) -> Path:
    """Rename a complete staged folder into place; an existing checkpoint of that step is replaced."""
    staging, folder = staged.parent, staged.parent.parent
    place = folder / staged.name
    if place.exists():
        place.rename(staging / f"replaced-{staged.name}")
    staged.rename(place)
    sync_folder(folder)
    shutil.rmtree(staging, ignore_errors=True)
    return place


def _delete(checkpoint: Path) -> bool:
    """Rename a checkpoint out of the way, to be removed later."""
    deleted = checkpoint.parent / DELETED
    try:
        deleted.mkdir(exist_ok=True)
        checkpoint.rename(deleted / f"{checkpoint.name}.{uuid.uuid4().hex}")
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class _Seal:
    stamp: tuple[int, int]
    entry: dict[str, Any]


def _seal(path: Path) -> _Seal:
    """Sync a file and return its manifest entry."""
    stamp = _stamp(path)
    sync_file(path)
    return _Seal(stamp, {"bytes": path.stat().st_size, "xxh3_128": checksum(path)})


def _stamp(path: Path) -> tuple[int, int]:
    """Size and time of modification, which change whenever the file does."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _files(folder: Path) -> list[Path]:
    return sorted(x for x in folder.rglob("*") if x.is_file())


def _wrong_size(path: Path, expected: int) -> str | None:
    try:
        actual = path.stat().st_size
    except OSError:
        return f"{path.name} is missing"
    return None if actual == expected else f"{path.name} has {actual} of its {expected} bytes"


def _wrong_bytes(path: Path, expected: str) -> str | None:
    try:
        actual = checksum(path)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if actual == expected else f"{path.name} is damaged: its checksum differs"


def _digest(manifest: dict[str, Any]) -> str:
    return xxhash.xxh3_128(_encoded(manifest)).hexdigest()


def _encoded(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


# ---------------------------------------------------------------------- the lock: one process at a time writes a run

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
