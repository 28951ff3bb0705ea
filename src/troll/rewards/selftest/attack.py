"""The definition of an attack, and the helper functions that all attack programs share."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent, indent
from typing import Literal

Category = Literal["resources", "theft", "escape", "hack", "answer"]

PRELUDE = '''
import ctypes, os, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(15, scene["mark"].encode(), 0, 0, 0)  # a process name, to find it from outside
def tried(*ways):
    """The result of the first way that gets anything."""
    for way in ways:
        try:
            got = way()
        except Exception:
            continue
        if got:
            return got
def read(path):
    with open(path, "rb") as file:
        return file.read(4096).decode(errors="replace")
def done(name, *arguments):
    """Whether a function of the C library, or a system call given by its number, succeeds."""
    call = libc.syscall if isinstance(name, int) else getattr(libc, name)
    return call(*((name,) if isinstance(name, int) else ()), *arguments) >= 0 and f"{name} was allowed"
def reached(name, *arguments):
    """Whether the kernel looks at the (invalid) arguments of a call, so that the call is not forbidden."""
    ctypes.set_errno(0)
    return done(name, *arguments) or ctypes.get_errno() not in (1, 38) and f"{name} was not forbidden"
def number(x86, arm):
    return x86 if os.uname().machine == "x86_64" else arm
'''


@dataclass(frozen=True)
class Attack:
    """A program that attempts one attack.

    Attributes:
        name: short and unique.
        category: the target.
        description: one sentence.
        program: defines ``attack()``, which returns what it got; any true value is a success. The dict ``scene`` has
            the paths and addresses of the targets. With ``tests``, it defines ``f`` instead and attacks the judge.
        tests: the program must not pass them, and there must be a verdict.
        answers: right answers and given ones for the math reward, instead of a program; none may earn 1.
        runs: number of runs, one after the other in the same sandbox; ``scene["turn"]`` counts them.
        seconds: wall time.
        known: names of the isolations in which it is known to succeed; "root" if it succeeds as root.
    """

    name: str
    category: Category
    description: str
    program: str
    tests: tuple[str, ...] = ()
    answers: tuple[tuple[str, str], ...] = ()
    runs: int = 1
    seconds: float = 3.0
    known: frozenset[str] = frozenset()


def body(code: str) -> str:
    """A program with this body of ``attack()``."""
    return PRELUDE + "def attack():\n" + indent(dedent(code).strip("\n"), "    ") + "\n"
