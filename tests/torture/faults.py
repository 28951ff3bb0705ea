"""Failures of a disk, made in this process: the n-th call that changes anything on it fails, or is the last of a life.

Every call by which Python, torch and safetensors create, write, sync, rename and delete files below a folder counts. Of
one that writes, half of the bytes arrive. A process that is dead changes nothing any more: all calls after fail too,
with an exception that no ``except Exception`` sees.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import safetensors.torch
import torch

_KINDS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


class Died(BaseException):
    """What a process does not notice of its end."""


class Disk:
    """Counts calls, from 1. Number ``at`` fails: with an ``OSError`` of that number, or with death if it is None."""

    def __init__(self, folder: Path, at: int = 0, number: int | None = errno.EIO) -> None:
        self.folder, self.at, self.number = folder, at, number
        self.calls: list[str] = []
        self._lock, self._dead = threading.Lock(), False

    def meets(self, what: str) -> None:
        """Count a call, and fail if its time has come."""
        with self._lock:
            if self._dead:
                raise Died
            self.calls.append(what)
            if len(self.calls) != self.at:
                return
            if self.number is None:
                self._dead = True
                raise Died
        raise OSError(self.number, os.strerror(self.number), what)

    def has(self, path: Any) -> bool:
        """Whether this disk is where a path leads to."""
        try:
            return Path(os.path.abspath(os.fspath(path))).is_relative_to(self.folder)
        except TypeError:
            return False


class _Torn:
    """A file that is open for writing; when its time has come, half of what it is given arrives."""

    def __init__(self, file: Any, disk: Disk, what: str) -> None:
        self._file, self._disk, self._what = file, disk, what

    def write(self, data: Any) -> Any:
        try:
            self._disk.meets(f"write {self._what}")
        except BaseException:
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            raise
        return self._file.write(data)

    def __enter__(self) -> _Torn:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Any:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def failing(disk: Disk) -> Iterator[None]:
    """Within it, the disk fails when it should."""
    with ExitStack() as stack:
        for name in _KINDS:
            stack.enter_context(patch.object(os, name, _counted(disk, name, getattr(os, name))))
        plain = builtins.open
        for module in (builtins, io):
            stack.enter_context(patch.object(module, "open", _opened(disk, plain)))
        serialize, save = safetensors.torch.serialize_file, torch.save
        stack.enter_context(patch.object(safetensors.torch, "serialize_file", _tensors(disk, serialize)))
        stack.enter_context(patch.object(torch, "save", _pickled(disk, save)))
        stack.enter_context(patch.object(threading, "excepthook", lambda args: None))  # a thread dies with its process
        try:
            yield
        finally:
            for thread in threading.enumerate():
                if thread.name == "delete checkpoints":
                    thread.join()


def _counted(disk: Disk, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(first: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(first, int) or named.get("dir_fd") is not None or disk.has(first):
            disk.meets(f"{name} {first if isinstance(first, int) else Path(first).name}")
        return real(first, *rest, **named)

    return call


def _opened(disk: Disk, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if not set(mode) & set("wax+") or not disk.has(file):
            return real(file, mode, *rest, **named)
        disk.meets(f"open {Path(file).name}")
        return _Torn(real(file, mode, *rest, **named), disk, Path(file).name)

    return call


def _tensors(disk: Disk, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensors: Any, filename: Any, *rest: Any, **named: Any) -> Any:
        try:
            disk.meets(f"write {Path(filename).name}")
        except BaseException as error:
            real(tensors, filename, *rest, **named)
            os.truncate(filename, os.path.getsize(filename) // 2)
            if isinstance(error, OSError):
                raise safetensors.SafetensorError(f"Error while serializing: I/O error: {error.strerror}") from None
            raise
        return real(tensors, filename, *rest, **named)

    return call


def _pickled(disk: Disk, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(value: Any, f: Any, *rest: Any, **named: Any) -> Any:
        try:
            disk.meets(f"write {Path(f).name}")
        except OSError:
            raise RuntimeError(f"[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0 in {f}") from None
        return real(value, f, *rest, **named)

    return call
