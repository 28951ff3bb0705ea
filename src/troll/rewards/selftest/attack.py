"""What an attack is, and the few functions that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent, indent
from typing import Literal

Category = Literal["resources", "theft", "escape", "hack"]

PRELUDE = '''
import ctypes, os, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(15, scene["mark"].encode(), 0, 0, 0)  # a name, by which it is seen from outside
def tried(*ways):
    """What the first way gets that gets anything."""
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
    """Whether a function of the C library, or a system call by its number, does what it is asked."""
    call = libc.syscall if isinstance(name, int) else getattr(libc, name)
    return call(*((name,) if isinstance(name, int) else ()), *arguments) >= 0 and f"{name} was allowed"
def reached(name, *arguments):
    """Whether the kernel looks at what it is asked, though it is nonsense, and does not just forbid it."""
    ctypes.set_errno(0)
    return done(name, *arguments) or ctypes.get_errno() not in (1, 38) and f"{name} was not forbidden"
def number(x86, arm):
    return x86 if os.uname().machine == "x86_64" else arm
'''


@dataclass(frozen=True)
class Attack:
    """A program that tries one thing.

    Attributes:
        name: short and unique.
        category: what it is after.
        says: one sentence, what it tries.
        program: defines ``attack()``, which returns what it got: anything that is true is a success. ``scene`` says
            where things are. Where there are tests, it defines ``f`` instead, and the judge is what is attacked.
        tests: that the program must not pass, and on which there must be a verdict.
        runs: how often it runs, one after the other in the same sandbox; ``scene["turn"]`` counts.
        seconds: on the clock.
        known: names of isolations in which it is known to succeed; "root" where root runs it as root.
    """

    name: str
    category: Category
    says: str
    program: str
    tests: tuple[str, ...] = ()
    runs: int = 1
    seconds: float = 3.0
    known: frozenset[str] = frozenset()


def body(code: str) -> str:
    """A program whose ``attack()`` is this."""
    return PRELUDE + "def attack():\n" + indent(dedent(code).strip("\n"), "    ") + "\n"
