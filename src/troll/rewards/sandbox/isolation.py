"""How model-written code is isolated: bubblewrap, else Landlock, or nothing if the user allows that.

In bubblewrap there is a read-only Python, an empty /tmp, no network, no /proc and no privileges. With Landlock the
file system is the host's, but only Python can be read. The filter of system calls and the limits are the same in both.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from troll.errors import InputError

UNSANDBOXED_VARIABLE = "TROLL_ALLOW_UNSANDBOXED_CODE"
INSTALL_SECCOMP = 'apt install libseccomp2 && pip install "troll-rl[rewards]"'
NOBODY = 65534
_LIMITS = {
    "RLIMIT_AS": 1 << 30,
    "RLIMIT_CPU": 6,  # seconds
    "RLIMIT_FSIZE": 16 << 20,
    "RLIMIT_NOFILE": 64,
    "RLIMIT_CORE": 0,
    "RLIMIT_MEMLOCK": 0,
    "RLIMIT_MSGQUEUE": 0,
}

# The system calls that a run may make: computing, its own files and threads. All others fail. Not here: new processes
# and programs, signals, sockets, namespaces, mounts, the memory of other processes, changes of owner or mode, and
# calls that few programs need (io_uring, bpf, keys, …).
_ALLOWED = """
brk mmap munmap mremap mprotect madvise msync membarrier
read pread64 readv preadv write pwrite64 writev pwritev lseek close close_range dup dup2 dup3
open openat access faccessat faccessat2 stat lstat fstat newfstatat statx statfs fstatfs readlink readlinkat
getdents getdents64 getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2
ftruncate fallocate fsync fdatasync umask copy_file_range sendfile
pipe pipe2 poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
eventfd2 timerfd_create timerfd_settime timerfd_gettime recvfrom shutdown
futex futex_waitv set_robust_list get_robust_list set_tid_address rseq sched_yield sched_getaffinity
sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min arch_prctl
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack
pause alarm getitimer setitimer restart_syscall exit exit_group wait4 waitid
clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times
uname sysinfo getrusage getrlimit setrlimit getrandom getcpu gettid getpid getppid getpgid getpgrp getsid
getuid geteuid getgid getegid getresuid getresgid getgroups
"""
_THREAD, _NEW_NAMESPACES = 0x00010000, 0x7E020080  # flags of clone
_ONE_OF = {  # call: the argument that is checked, and its allowed values
    "fcntl": (1, (0, 1, 2, 3, 4, 1030, 1032)),  # not F_SETOWN and F_SETSIG, which send signals, and no locks
    "ioctl": (1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # not TIOCSTI
    "prctl": (0, (15, 16, 0x53564D41)),  # names of threads and memory
    "prlimit64": (0, (0,)),  # its own
    "sendto": (4, (0,)),  # to the other end, and to no address
    "socketpair": (0, (1,)),  # for asyncio, which talks to itself
}


@dataclass(frozen=True)
class Isolation:
    """One way to isolate a process.

    Attributes:
        name: bubblewrap, landlock or none.
        description: what a program can and cannot do.
        limits: of a run, by their names in the module ``resource``.
        filtered: whether system calls are filtered.
        per_run_namespaces: whether every run can have new mounts and process numbers.
        listable, readable: folders that Landlock lets a run list, and paths it lets it read; empty without Landlock.
    """

    name: str
    description: str
    limits: Mapping[str, int] = field(default_factory=lambda: dict(_LIMITS))
    filtered: bool = True
    per_run_namespaces: bool = False
    listable: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()

    def command(self, argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """The command that runs ``argv`` in this isolation."""
        return bubblewrap(argv, env=env, per_run_namespaces=True) if self.name == "bubblewrap" else list(argv)


def allow_unsandboxed(allow: bool) -> None:
    """If ``allow``, run code without a sandbox where there is none, in this process and those it starts."""
    if allow:
        os.environ[UNSANDBOXED_VARIABLE] = "1"


def isolations(unsandboxed: bool = False) -> list[Isolation]:
    """All ways to isolate a process, the best first; with ``unsandboxed``, no isolation is the last."""
    return [
        Isolation(
            "bubblewrap",
            "without network, files, privileges and most system calls",
            {**_LIMITS, "RLIMIT_NPROC": 64},
            per_run_namespaces=True,
        ),
        Isolation(
            "landlock",
            "without network, files, privileges and most system calls; it can test whether a file exists",
            {**_LIMITS, "RLIMIT_NPROC": 256},  # on top of what the user has
            listable=tuple({os.path.realpath(path) for path in _system() if os.path.isdir(path)}),
            readable=tuple(_without({os.path.realpath(path) for path in _system()}, packages())),
        ),
        *(
            [Isolation("none", f"with all your permissions, because {UNSANDBOXED_VARIABLE} is set", filtered=False)]
            * unsandboxed
        ),
    ]


def sandbox_python() -> str:
    """The interpreter for the sandbox: the running one, outside of any virtual environment.

    For root it is one that every user may run, if there is one of the same version, so that the sandbox need not
    run as root.
    """
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = Path(sys.base_prefix, "bin", name)
    candidates = [own if own.exists() else Path(os.path.realpath(sys.executable)), Path("/usr/bin", name)]
    for path in candidates if os.geteuid() == 0 else []:
        if executable_by_all(path):
            return str(path)
    return str(next((path for path in candidates if os.access(path, os.X_OK)), candidates[0]))


def executable_by_all(path: Path) -> bool:
    """Whether every user can reach and run this file."""
    real = path.resolve()
    return real.exists() and all(part.stat().st_mode & 0o001 for part in [real, *real.parents])


def sandbox_user() -> int | None:
    """The user of the sandbox if it is not the current one: root becomes nobody if nobody can run the interpreter."""
    return NOBODY if os.geteuid() == 0 and executable_by_all(Path(sandbox_python())) else None


def bubblewrap(
    argv: Sequence[str],
    visible: Mapping[str, Path] | None = None,
    env: Mapping[str, str] | None = None,
    per_run_namespaces: bool = False,
) -> list[str]:
    """The command that runs ``argv`` in bubblewrap.

    Args:
        argv: the command inside.
        visible: path inside → a file or folder that can be read there, in addition to the interpreter.
        env: all environment variables inside.
        per_run_namespaces: keep the one privilege, over its own namespaces, that makes new ones for every run.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise InputError(
            "bubblewrap, the sandbox for model-written code, is not installed", "Run apt install bubblewrap"
        )
    parts = [bwrap]
    for path in _system():
        if os.path.islink(path):
            parts += ["--symlink", os.readlink(path), path]
        else:
            parts += ["--ro-bind", path, path]
    for path in packages():
        parts += ["--tmpfs", path, "--remount-ro", path]
    parts += ["--dev", "/dev", "--remount-ro", "/dev"]
    parts += ["--size", str(64 << 20), "--tmpfs", "/tmp"]
    for inside, source in (visible or {}).items():
        parts += ["--ro-bind", str(source.resolve()), inside]
    parts += ["--remount-ro", "/", "--chdir", "/tmp", "--unshare-all", "--unshare-user", "--uid", str(NOBODY)]
    parts += [
        "--gid",
        str(NOBODY),
        "--cap-drop",
        "ALL",
        *(["--cap-add", "CAP_SYS_ADMIN"] if per_run_namespaces else []),
    ]
    parts += ["--disable-userns", "--die-with-parent", "--new-session", "--clearenv"]
    for name, value in (env or {}).items():
        parts += ["--setenv", name, value]
    return [*parts, "--", *argv]


@functools.cache
def syscall_filter() -> bytes:
    """The filter of system calls, compiled for this machine by libseccomp."""
    try:
        import pyseccomp as seccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise InputError(
            f"libseccomp or its Python bindings, which the sandbox needs, cannot be loaded ({error})",
            f"On Linux, run {INSTALL_SECCOMP}",
        ) from error
    allow, rules = seccomp.ALLOW, seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))

    def rule(action: int, call: str, *conditions: object) -> None:
        if seccomp.resolve_syscall(seccomp.system_arch(), call) >= 0:  # not every architecture has every call
            rules.add_rule(action, call, *conditions)

    for call in _ALLOWED.split():
        rule(allow, call)
    for call, (argument, values) in _ONE_OF.items():
        for value in values:
            rule(allow, call, seccomp.Arg(argument, seccomp.EQ, value))
    rule(allow, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _THREAD | _NEW_NAMESPACES, _THREAD))
    rule(seccomp.ERRNO(errno.ENOSYS), "clone3")  # a filter cannot see its flags; the C library falls back to clone
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def _system() -> list[str]:
    """The paths of the system that the interpreter needs."""
    roots = dict.fromkeys(["/usr", _prefix()])
    below = [f"{root}/{name}" for root in roots for name in ("bin", "lib", "lib32", "lib64")]
    paths = [*below, "/usr/share/zoneinfo", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"]
    return [path for path in paths if os.path.exists(path)]


def packages() -> list[str]:
    """Folders of installed packages, which may contain tests and answers. Nothing in the sandbox needs them."""
    kinds = [f"lib*/python*/{name}" for name in ("site-packages", "dist-packages")]
    found = {path.resolve() for root in ("/usr", _prefix()) for kind in kinds for path in Path(root).glob(kind)}
    return sorted(map(str, found))


def _prefix() -> str:
    return os.path.realpath(Path(sandbox_python()).resolve().parent.parent)


def _without(paths: Iterable[str], hidden: Sequence[str]) -> Iterator[str]:
    """Paths that together cover ``paths`` except the ``hidden`` ones below them."""
    for path in paths:
        if any(other.startswith(f"{path}/") for other in hidden):
            yield from _without((entry.path for entry in os.scandir(path) if not entry.is_symlink()), hidden)
        elif path not in hidden:
            yield path
