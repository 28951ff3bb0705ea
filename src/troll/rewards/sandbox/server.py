"""The server inside the sandbox: it forks a process for every run, so that no run waits for Python to start.

It runs as text in an isolated interpreter and imports nothing of this package. The first message on its socket has
the settings. Every later message is a run, with three file descriptors: to read requests from, to write replies to,
and a control socket. Closing the control socket kills the run; how the run ended is sent over it.

This process and the supervisors are trusted and never read what a run writes. A run is not trusted after ``confine``.
"""

from __future__ import annotations

import base64
import bisect
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import types
from typing import Any, NoReturn

PRELOADED = """array atexit bisect collections copy datetime decimal fractions functools heapq io itertools math
operator random re statistics string threading typing"""  # imported once, because programs import them
NEW_MOUNTS, NEW_IPC, NEW_PIDS = 0x00020000, 0x08000000, 0x20000000
NO_SETUID, NO_DEVICES = 2, 4
READ_FILE, READ_FOLDER = 4, 8  # of Landlock
SET_SECCOMP, SET_NO_NEW_PRIVILEGES, SET_DEATH_SIGNAL, SET_DUMPABLE = 22, 38, 1, 4
libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library; OSError if it fails."""
    result: int = getattr(libc, name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


class Filter(ctypes.Structure):
    """The kernel's sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


class Capabilities(ctypes.Structure):
    """Header or data of capset, version 3."""

    _fields_ = (("words", ctypes.c_uint32 * 6),)


def new_namespaces() -> None:
    """New mounts with an empty /tmp and new shared memory for this process, new process numbers for its children."""
    call("unshare", NEW_MOUNTS | NEW_PIDS | NEW_IPC)
    call("mount", b"tmpfs", b"/tmp", b"tmpfs", NO_SETUID | NO_DEVICES, b"size=64m,nr_inodes=1024,mode=1777")
    os.chdir("/tmp")  # the new one


def can_make_namespaces() -> bool:
    """Whether ``new_namespaces`` works here, tried in a forked process."""
    pid = os.fork()
    if pid == 0:
        try:
            new_namespaces()
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def tasks() -> int:
    """About how many processes and threads this user has: the lowest limit under which a fork succeeds."""
    before, limit = resource.getrlimit(resource.RLIMIT_NPROC), 64
    while limit < 1 << 22 and not can_fork(limit):
        limit *= 2
    count = limit // 2 + 16 * bisect.bisect_left(range(limit // 2, limit, 16), True, key=can_fork)
    resource.setrlimit(resource.RLIMIT_NPROC, before)
    return count


def can_fork(limit: int) -> bool:
    """Whether a fork succeeds under this limit of processes and threads."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        pid = os.fork()
    except OSError:
        return False
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


def confine(limits: dict[str, int], rules: bytes) -> None:
    """Set the limits, drop all capabilities and install the filter of system calls. None of it can be undone."""
    for name, limit in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    header, none = Capabilities(), Capabilities()
    header.words[0] = 0x20080522
    call("capset", ctypes.byref(header), ctypes.byref(none))
    call("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if rules:
        call("prctl", SET_SECCOMP, 2, ctypes.byref(Filter(len(rules) // 8, rules)), 0, 0)


def restrict(listable: list[str], readable: list[str]) -> None:
    """Landlock: from now on, only list and read below these paths."""
    version = call("syscall", 444, None, 0, 1)
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    handled = (ctypes.c_uint64 * 3)(files, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = call("syscall", 444, ctypes.byref(handled), size, 0)
    for path, rights in [*((path, READ_FOLDER) for path in listable), *((path, READ_FILE) for path in readable)]:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, opened))
        call("syscall", 445, rules, 1, ctypes.byref(rule), 0)
        os.close(opened)
    call("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call("syscall", 446, rules, 0)
    os.close(rules)


def load(modules: list[list[str]]) -> None:
    """Create modules from their names and sources, so that runs can import them."""
    for name, source in modules:
        module = types.ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
        exec(compile(source, name, "exec"), module.__dict__)


def supervise(
    order: dict[str, Any], settings: dict[str, Any], requests: int, replies: int, control: socket.socket
) -> None:
    """Start a run, wait for its end or for the control socket to close, and send how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if settings["per_run_namespaces"]:
        new_namespaces()
    pid = os.fork()
    if pid == 0:
        perform(order, settings, requests, replies)
    os.close(requests)
    os.close(replies)
    out_of_time = wait_for(pid, control, order["cpu_seconds"])
    _, status, usage = os.wait4(pid, 0)
    ending = {
        "status": status,
        "seconds": usage.ru_utime + usage.ru_stime,
        "kilobytes": usage.ru_maxrss,
        "out_of_time": out_of_time,
    }
    control.send(json.dumps(ending).encode())


def wait_for(pid: int, control: socket.socket, cpu_seconds: float) -> bool:
    """Wait until a run ends, and kill it if the control socket closes or its processor time is over.

    A number on the control socket gives it that many seconds from now on. Returns whether its time was over.
    """
    process: Any = os.pidfd_open(pid)
    end = cpu_seconds
    while True:
        pause = max(0.02, (end - cpu_time(pid)) / (os.cpu_count() or 1))
        ready = select.select([process, control], [], [], pause)[0]
        if process in ready:
            return False
        if control in ready:
            message = control.recv(1 << 12)
            if not message:
                os.kill(pid, signal.SIGKILL)
                return False
            end = cpu_time(pid) + struct.unpack("d", message[-8:])[0]
        elif cpu_time(pid) >= end:
            os.kill(pid, signal.SIGKILL)
            return True


def cpu_time(pid: int) -> float:
    """Processor time of a process and all its threads, in seconds."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock of that process
    except OSError:
        return 0.0  # it has ended


def perform(order: dict[str, Any], settings: dict[str, Any], requests: int, replies: int) -> NoReturn:
    """The run: confine this process and call the function that was ordered."""
    try:
        call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        nowhere = (
            0 if settings["readable"] else os.open(os.devnull, os.O_RDWR)
        )  # its flags are those of all who share it
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        os.dup2(requests, 3)  # requests ≥ 3 and replies > 3, so neither is overwritten
        os.dup2(replies, 4)
        os.closerange(5, 256)
        confine({**settings["limits"], **order["limits"]}, settings["filter"])
        os.write(4, b"\n")  # the run has started: later failures are its own
        getattr(sys.modules[order["module"]], order["function"])(3, 4)
        os._exit(0)
    finally:
        os._exit(1)


def main() -> None:
    """Serve until the socket is closed."""
    orders = socket.socket(fileno=os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    received = b""
    while not received.endswith(b"\n"):
        received += orders.recv(1 << 16)
    settings = json.loads(received)
    settings["filter"] = base64.b64decode(settings["filter"])
    call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    for name in PRELOADED.split():
        __import__(name)
    load(settings["modules"])
    if settings["readable"]:
        settings["limits"]["RLIMIT_NPROC"] += tasks()  # the limit counts all processes of the user
        restrict(settings["listable"], settings["readable"])
    settings["per_run_namespaces"] = settings["per_run_namespaces"] and can_make_namespaces()
    call("prctl", SET_DUMPABLE, 0, 0, 0, 0)  # no run can inspect this process
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    orders.send(json.dumps({"per_run_namespaces": settings["per_run_namespaces"]}).encode() + b"\n")
    while True:
        message, handles, _, _ = socket.recv_fds(orders, 1 << 16, 3)
        if not message:
            return
        if os.fork() == 0:
            try:
                orders.close()
                requests, replies, control = handles
                supervise(json.loads(message), settings, requests, replies, socket.socket(fileno=control))
            finally:
                os._exit(0)
        for handle in handles:
            os.close(handle)


if __name__ == "__main__":
    main()
