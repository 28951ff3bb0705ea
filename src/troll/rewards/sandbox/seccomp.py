"""The system calls that model-written code may make: computing, its own files and threads. All others fail.

What is not here: new processes and programs, signals to anyone, sockets, namespaces, mounts, other processes' memory,
changes of owner or mode, and everything that most programs never need (io_uring, bpf, keys, …).
"""

from __future__ import annotations

import errno
import functools
import tempfile

from troll.errors import InputError

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
_THREAD, _NEW_NAMESPACES = 0x00010000, 0x7E020080  # of clone
_ONE_OF = {  # call: which argument, and what it may be
    "fcntl": (1, (0, 1, 2, 3, 4, 1030, 1032)),  # not F_SETOWN and F_SETSIG, which send signals, and no locks
    "ioctl": (1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # not TIOCSTI
    "prctl": (0, (15, 16, 0x53564D41)),  # names of threads and memory
    "prlimit64": (0, (0,)),  # its own
    "sendto": (4, (0,)),  # to the other end, and to no address
    "socketpair": (0, (1,)),  # for asyncio, which talks to itself
}


@functools.cache
def program() -> bytes:
    """The filter, compiled for this machine by libseccomp."""
    try:
        import pyseccomp as seccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise InputError(
            f"a sandbox without libseccomp ({error})",
            "the library and its Python bindings, on Linux",
            'apt install libseccomp2, and pip install "troll-rl[rewards]"',
        ) from error
    allow, rules = seccomp.ALLOW, seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))

    def rule(action: int, call: str, *conditions: object) -> None:
        if seccomp.resolve_syscall(seccomp.system_arch(), call) >= 0:  # not every machine has every one
            rules.add_rule(action, call, *conditions)

    for call in _ALLOWED.split():
        rule(allow, call)
    for call, (argument, values) in _ONE_OF.items():
        for value in values:
            rule(allow, call, seccomp.Arg(argument, seccomp.EQ, value))
    rule(allow, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _THREAD | _NEW_NAMESPACES, _THREAD))
    rule(seccomp.ERRNO(errno.ENOSYS), "clone3")  # its flags cannot be seen; the C library turns to clone
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
