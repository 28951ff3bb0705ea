"""Names of runs: a folder directly below the folder of all runs, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from troll.errors import InputError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,99}")


def check_run_name(name: str) -> str:
    """Refuse a name that could lead out of the folder of runs, or that a file system may not take."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise InputError(
            f"the run name {name!r}",
            "letters, digits and . _ + = -, at most 100, beginning with a letter or digit",
            "a plain name such as 'first-try'; --runs_dir says in which folder runs are kept",
        )
    return name


def run_name_of(text: str) -> str:
    """The text as the name of a run may be: whatever else is in it becomes a dash.

    >>> run_name_of("gym:gcd-troll"), run_name_of("_my task.py")
    ('gym-gcd-troll', 'my-task.py')
    """
    plain = re.sub(r"[^A-Za-z0-9._+=-]+|\.\.+", "-", text).lstrip("._+=-")
    return plain[:80] or "run"


def free_run_name(root: Path, wanted: str) -> str:
    """``wanted``, or the first of ``wanted-2``, ``wanted-3``, … that does not exist yet."""
    name, number = check_run_name(wanted), 1
    while (root / name).exists():
        number += 1
        name = f"{wanted}-{number}"
    return name
