"""Checkpoints in a folder: staged, synced, checksummed, then renamed; the last complete one is found again.

``checkpoint-12`` exists only when it is complete. Until then it is ``.staging/checkpoint-12``. Its last file is the
manifest, with the size and the checksum of every other file. A crash can leave a staging folder, complete or not, but
never a partial checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

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
