"""Files that are there whole or not at all, also after the machine lost its power."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import xxhash

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # file systems that have nothing to sync in a folder


_ELSEWHERE = ("(os error ", "I/O error", "inline_container", "iostream error")  # as Rust and C++ say it


def is_file_error(error: Exception) -> bool:
    """Whether an error says that a file could not be written or read; safetensors, tokenizers, torch have their own."""
    return isinstance(error, OSError) or any(words in str(error) for words in _ELSEWHERE)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file beside its place, sync it, and move it there: whoever reads it finds the old one or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Return when the file's bytes are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Return when the names in a folder are on the disk."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def checksum(path: Path) -> str:
    """XXH3 of a file, 128 bits: it finds what disks and copies do to a file, at the speed of memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, cast("Callable[[], hashlib._Hash]", xxhash.xxh3_128)).hexdigest()
