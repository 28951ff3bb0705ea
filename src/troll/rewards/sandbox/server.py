"""The program inside the sandbox: starts every run in a process of its own, made from one that is warm already.

It is run as text in an isolated interpreter and imports nothing of this package. Over a socket it is told once what
the runs need; then every message is a run, with three file descriptors: to read requests from, to write replies to,
and a socket that is closed to end the run, and on which the end of the run is said.

This process and the supervisors are trusted, and see nothing that a run writes. A run is not, from ``confine`` on.
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
import types
from typing import Any, NoReturn

USUAL = """array atexit bisect collections copy datetime decimal fractions functools heapq io itertools math operator
random re statistics string threading typing"""  # what programs import, imported once
NEW_MOUNTS, NEW_IPC, NEW_PIDS = 0x00020000, 0x08000000, 0x20000000
NO_SETUID, NO_DEVICES = 2, 4
READ_FILE, READ_FOLDER = 4, 8  # of Landlock
SET_SECCOMP, SET_NO_NEW_PRIVILEGES, SET_DEATH_SIGNAL, SET_DUMPABLE = 22, 38, 1, 4
libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """A function of the C library; OSError if it fails."""
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


def renew() -> None:
    """New mounts, with an empty /tmp, and shared memory for this process; new process numbers for those it starts."""
    call("unshare", NEW_MOUNTS | NEW_PIDS | NEW_IPC)
    call("mount", b"tmpfs", b"/tmp", b"tmpfs", NO_SETUID | NO_DEVICES, b"size=64m,nr_inodes=1024,mode=1777")
    os.chdir("/tmp")  # the new one


def can_renew() -> bool:
    """Whether that works here; tried in a process that ends."""
    pid = os.fork()
    if pid == 0:
        try:
            renew()
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def tasks() -> int:
    """How many processes and threads this user has, more or less: the least limit under which there can be one more."""
    before, most = resource.getrlimit(resource.RLIMIT_NPROC), 64
    while most < 1 << 22 and not can_fork(most):
        most *= 2
    found = most // 2 + 16 * bisect.bisect_left(range(most // 2, most, 16), True, key=can_fork)
    resource.setrlimit(resource.RLIMIT_NPROC, before)
    return found


def can_fork(most: int) -> bool:
    """Whether this user, with so many processes and threads at most, can have one more."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        pid = os.fork()
    except OSError:
        return False
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


def confine(limits: dict[str, int], rules: bytes) -> None:
    """Give up everything that a run does not need, for good."""
    for name, most in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    header, none = Capabilities(), Capabilities()
    header.words[0] = 0x20080522
    call("capset", ctypes.byref(header), ctypes.byref(none))
    call("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if rules:
        call("prctl", SET_SECCOMP, 2, ctypes.byref(Filter(len(rules) // 8, rules)), 0, 0)


def restrict(listable: list[str], readable: list[str]) -> None:
    """Landlock: from now on, listing and reading below these paths, and nothing else in the file system."""
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
    """Make modules from their names and sources, so that runs can import them."""
    for name, source in modules:
        module = types.ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
        exec(compile(source, name, "exec"), module.__dict__)


def supervise(order: dict[str, Any], told: dict[str, Any], requests: int, replies: int, control: socket.socket) -> None:
    """One run, from its start to its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if told["renew"]:
        renew()
    pid = os.fork()
    if pid == 0:
        perform(order, told, requests, replies)
    os.close(requests)
    os.close(replies)
    watched: list[Any] = [os.pidfd_open(pid), control]
    if watched[0] not in select.select(watched, [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    said = {"status": status, "seconds": usage.ru_utime + usage.ru_stime, "kilobytes": usage.ru_maxrss}
    control.send(json.dumps(said).encode())


def perform(order: dict[str, Any], told: dict[str, Any], requests: int, replies: int) -> NoReturn:
    """The run itself: the ``main`` of its module, in a confined process."""
    try:
        call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        for stream in (1, 2):
            os.dup2(0, stream)  # nowhere
        os.dup2(requests, 3)  # which is no larger than either of them, so nothing is lost
        os.dup2(replies, 4)
        os.closerange(5, 256)
        confine({**told["limits"], **order["limits"]}, told["filter"])
        os.write(4, b"\n")  # from here on, what goes wrong is the run's doing
        sys.modules[order["module"]].main(3, 4)
        os._exit(0)
    finally:
        os._exit(1)


def main() -> None:
    """Serve until there are no more messages."""
    orders = socket.socket(fileno=os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    heard = b""
    while not heard.endswith(b"\n"):
        heard += orders.recv(1 << 16)
    told = json.loads(heard)
    told["filter"] = base64.b64decode(told["filter"])
    call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    for name in USUAL.split():
        __import__(name)
    load(told["modules"])
    if told["readable"]:
        told["limits"]["RLIMIT_NPROC"] += tasks()  # the user has others
        restrict(told["listable"], told["readable"])
    told["renew"] = told["renew"] and can_renew()
    call("prctl", SET_DUMPABLE, 0, 0, 0, 0)  # no run can look into this process
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    orders.send(json.dumps({"renews": told["renew"]}).encode() + b"\n")
    while True:
        message, handles, _, _ = socket.recv_fds(orders, 1 << 16, 3)
        if not message:
            return
        if os.fork() == 0:
            try:
                orders.close()
                requests, replies, control = handles
                supervise(json.loads(message), told, requests, replies, socket.socket(fileno=control))
            finally:
                os._exit(0)
        for handle in handles:
            os.close(handle)


if __name__ == "__main__":
    main()
