"""System calls of a run that fail, or are its last, by the hand of ``strace``: at every place where a disk can fail."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import forks

CALLS = (
    *("openat", "creat", "mkdir", "mkdirat", "write", "pwrite64", "writev", "pwritev", "ftruncate", "truncate"),
    *("fallocate", "sendfile", "copy_file_range", "fsync", "fdatasync", "msync", "rename", "renameat", "renameat2"),
    *("link", "linkat", "symlink", "symlinkat", "unlink", "unlinkat", "rmdir", "fchmod", "chmod", "fchmodat"),
)
ERRORS = {"write": "ENOSPC", "pwrite64": "ENOSPC", "openat": "ENOSPC", "mkdir": "ENOSPC", "ftruncate": "ENOSPC"}
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_LINE = re.compile(r"(?P<pid>\d+) +(?P<call>\w+)\((?P<arguments>.*)")
_RESUMED = re.compile(r"(?P<pid>\d+) +<\.\.\. (?P<call>\w+) resumed>")


def missing() -> str | None:
    """Why it cannot be done here; None if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    done = subprocess.run(
        ["strace", "-o", os.devnull, "-e", "inject=fsync:error=EIO:when=1", "true"], capture_output=True
    )
    return None if done.returncode == 0 else f"strace cannot trace here: {done.stderr.decode().strip()}"


@dataclass(frozen=True)
class Call:
    """A system call of a run below its folder."""

    name: str
    path: str
    """Relative to the folder; where something is renamed to, the new name."""
    main: bool
    """Whether the first thread made it."""
    number: int
    """Which of the calls of this name it is, from 1: of the first thread, or of those to this path."""

    def failing(self, folder: Path, error: str | None) -> list[str]:
        """Flags that make it fail with an error; with None, that make it the last one of the process."""
        how = "signal=KILL" if error is None else f"error={error}"
        where = [] if self.main else ["-f", "-P", str(folder / self.path)]
        return [*where, "-e", f"trace={self.name}", "-e", f"inject={self.name}:{how}:when={self.number}"]


def traced(work: Callable[[], int], output: Path, flags: list[str], log: Path, patience: float) -> forks.Child:
    """A child that does some work, watched by strace from its first call on; it has ended when this returns."""
    child = forks.fork(work, output, stopped=True)
    _until(lambda: _is_stopped(child.pid), patience)
    log.unlink(missing_ok=True)
    watcher = subprocess.Popen(
        ["strace", "-q", "-y", "-o", str(log), *flags, "-p", str(child.pid)], stderr=subprocess.PIPE
    )
    _until(lambda: watcher.poll() is not None or _is_traced(child.pid), patience)
    until = time.monotonic() + patience
    while not child.wait(0.2) and time.monotonic() < until:
        if _is_stopped(child.pid):  # at first, and if it stopped only after it was told to go on
            os.kill(child.pid, signal.SIGCONT)
    child.kill()
    watcher.wait(patience)
    return child


def _is_traced(pid: int) -> bool:
    return not re.search(r"TracerPid:\t0\n", Path(f"/proc/{pid}/status").read_text())


def _is_stopped(pid: int) -> bool:
    return re.search(r"State:\t[Tt]", Path(f"/proc/{pid}/status").read_text()) is not None


def _until(condition: Callable[[], bool], patience: float) -> None:
    end = time.monotonic() + patience
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)


def calls(log: Path, folder: Path, pid: int) -> list[Call]:
    """What a run did that changes its folder, from the log of a trace with ``-f`` and all calls."""
    found, of_thread, of_path = [], Counter[str](), Counter[tuple[str, str]]()
    for thread, name, arguments in begun(log):
        if thread == pid:
            of_thread[name] += 1
        path = path_of(name, arguments, folder)
        if path is None:
            continue
        of_path[name, path] += 1
        main = thread == pid
        found.append(Call(name, path, main, of_thread[name] if main else of_path[name, path]))
    return found


def begun(log: Path) -> Iterator[tuple[int, str, str]]:
    """Thread, call, arguments."""
    for line in log.read_text(errors="replace").splitlines():
        match = _LINE.match(line)
        if match:
            yield int(match["pid"]), match["call"], match["arguments"]


def unsynced(log: Path, folder: Path) -> list[str]:
    """What a loss of power could have taken: files and names that were not on the disk when a checkpoint's name was.

    Follows a trace: what is written is in memory until it is synced, and so is the name of what is made or renamed
    until its folder is. Before ``checkpoint-N`` gets its name, all of it must be on the disk; before an old one loses
    its name, that of the new one must be.
    """
    found: list[str] = []
    files, names = set[str](), set[str]()
    for _, name, arguments in begun(log):
        path = path_of(name, arguments, folder)
        if path is None:
            continue
        if name.startswith("rename"):
            old = _inside(arguments, folder)[0]
            if _CHECKPOINT.fullmatch(path):
                found += sorted(f"the bytes of {x}" for x in files if x.startswith(f"{old}/"))
                found += sorted(f"the name of {x}" for x in names if x.startswith(f"{old}/"))
            if _CHECKPOINT.fullmatch(old):
                found += sorted(
                    f"the name of {x}, which is to replace {old}" for x in names if _CHECKPOINT.fullmatch(x)
                )
            files = {path + x.removeprefix(old) if x == old or x.startswith(f"{old}/") else x for x in files}
            names = {x for x in names if x != old and not x.startswith(f"{old}/")} | {path}
        elif name in ("fsync", "fdatasync"):
            files.discard(path)
            names = {x for x in names if os.path.dirname(x) != path}
        elif name in ("openat", "creat", "mkdir", "mkdirat"):
            names.add(path)
            files |= {path} if name in ("openat", "creat") else set()
        elif not name.startswith(("unlink", "rmdir", "chmod", "fchmod")):
            files.add(path)
    return found


def _inside(arguments: str, folder: Path) -> list[str]:
    """All paths below a folder, relative to it."""
    return re.findall(rf'[<"]{re.escape(str(folder))}/?([^">]*)[">]', arguments)


def path_of(name: str, arguments: str, folder: Path) -> str | None:
    """What a call changes below a folder; None if it changes nothing there."""
    if name == "openat" and "O_CREAT" not in arguments and "O_TRUNC" not in arguments:
        return None
    inside = re.escape(str(folder))
    if name.startswith(("rename", "link", "symlink")):
        paths = _inside(arguments, folder)
    elif name in ("unlinkat", "mkdirat", "openat", "fchmodat"):
        at = re.match(r'(?:AT_FDCWD|\d+)(?:<([^>]*)>)?, "([^"]*)"', arguments)
        whole = os.path.join(at[1] or "", at[2]) if at else ""
        paths = re.findall(rf"^{inside}/?(.*)$", whole)
    else:
        paths = re.findall(rf'^(?:\d+<|"){inside}/?([^">]*)[">]', arguments)
    return paths[-1] if paths else None
