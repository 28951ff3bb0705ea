"""A folder that is there whole or not at all: made beside its place, synced, and renamed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from troll.errors import InputError
from troll.files import sync_file, sync_folder
from troll.trl.robust.lock import HOLDER, LOCK, locked


@contextmanager
def new_folder(folder: Path, what: str = "the run") -> Iterator[Path]:
    """An empty folder to put the first files of a run into; at the end it takes the name that was asked for.

    What a start that was killed has left is removed. Two that begin the same run at once do not mix: one of them is
    refused.
    """
    staged = folder.with_name(f".{folder.name}.new")
    try:
        staged.mkdir(parents=True, exist_ok=True)
        with locked(staged, what):
            try:
                for path in staged.iterdir():
                    if path.name not in (LOCK, HOLDER):
                        _remove(path)
                yield staged
                (staged / HOLDER).unlink(missing_ok=True)
                sync_tree(staged)
                staged.rename(folder)
                sync_folder(folder.parent)
            except BaseException:
                shutil.rmtree(staged, ignore_errors=True)
                raise
    except OSError as error:
        if folder.exists():
            given = f"{what} {folder}, which another command has just begun"
            raise InputError(given, "a new name", "again") from None
        given = f"{folder}, which cannot be made ({error.strerror or error})"
        raise InputError(given, "a folder", "--runs_dir") from None


def staged_beside(place: Path) -> Path:
    """An empty folder in which to make a new version of ``place``; what is left of an earlier try is removed."""
    staged = place.with_name(f".{place.name}.new")
    if staged.exists():
        shutil.rmtree(staged)
    staged.mkdir()
    return staged


def put_in_place(staged: Path, place: Path) -> None:
    """Give a folder that is made the name it is for; an older one of that name makes room."""
    sync_tree(staged)
    old = place.with_name(f".{place.name}.old")
    if old.exists():
        shutil.rmtree(old)
    if place.exists():
        place.rename(old)
    staged.rename(place)
    sync_folder(place.parent)
    if old.exists():
        shutil.rmtree(old)


def sync_tree(folder: Path) -> None:
    """Return when every file below the folder, and every name, is on the disk."""
    for path in folder.rglob("*"):
        (sync_folder if path.is_dir() else sync_file)(path)
    sync_folder(folder)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
