"""A disk of a few megabytes that is really full: a tmpfs in a mount namespace of a forked child, gone when it ends."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NEW_USERS, _NEW_MOUNTS = 0x10000000, 0x00020000
_RECURSIVE_PRIVATE, _REMOUNT, _READ_ONLY = 0x4000 | 0x40000, 0x20, 0x1


def missing() -> str | None:
    """Why a process may not have a disk of its own here; None if it may."""
    pid = os.fork()
    if not pid:
        try:
            mount(Path("/tmp"), 1 << 20)
        except OSError:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return None if status == 0 else "a process may not mount anything here, not even in a namespace of its own"


def mount(folder: Path, size: int) -> None:
    """From now on, what is written below the folder is in memory, and at most so many bytes; for this process alone."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", (_NEW_MOUNTS if user == 0 else _NEW_USERS | _NEW_MOUNTS,))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", (b"none", b"/", None, _RECURSIVE_PRIVATE, None))
    _call("mount", (b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()))


def change(folder: Path, size: int, read_only: bool = False) -> None:
    """Make the disk larger or smaller, or let nobody write it."""
    flags = _REMOUNT | (_READ_ONLY if read_only else 0)
    _call("mount", (b"tmpfs", os.fsencode(folder), b"tmpfs", flags, f"size={size}".encode()))


def used(folder: Path) -> int:
    """Bytes that are taken."""
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _call(name: str, arguments: tuple[object, ...]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    wide = tuple(ctypes.c_ulong(x) if isinstance(x, int) else x for x in arguments)
    if getattr(libc, name)(*wide) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
