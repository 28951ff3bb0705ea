"""Writing run folders: names, atomic creation, ``run.json``, appended lines.

Training, the verl launcher and the commands write a run folder through this module; its checkpoints and its lock are
in ``troll.trl.robust.store``. ``docs/runs.md`` describes the files.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from troll.errors import InputError
from troll.files import sync_file, sync_folder, write_atomic
from troll.lab.runs.comparison import arm_of
from troll.lab.runs.folder import ABOUT, COMPARISON, CONFIG, FORMAT, Line, Run
from troll.trl.robust.store import HOLDER, LOCK, locked

# ---------------------------------------------------------------------- names

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,99}")


def check_run_name(name: str) -> str:
    """Return ``name``; refuse one that leaves the runs directory or that a file system may reject."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise InputError(
            f"the run name {name!r} is not allowed: use letters, digits and . _ + = -, at most 100, beginning with a "
            "letter or digit",
            "Choose a plain name such as 'first-try'; --runs_dir sets the directory of all runs",
        )
    return name


def run_name_of(text: str) -> str:
    """A valid run name made from any text: every other character becomes a dash.

    >>> run_name_of("gym:gcd-troll"), run_name_of("_my task.py")
    ('gym-gcd-troll', 'my-task.py')
    """
    plain = re.sub(r"[^A-Za-z0-9._+=-]+|\.\.+", "-", text).lstrip("._+=-")
    return plain[:80] or "run"


def free_run_name(root: Path, wanted: str) -> str:
    """``wanted``, or the first of ``wanted-2``, ``wanted-3``, … that does not exist in ``root``."""
    name, number = check_run_name(wanted), 1
    while (root / name).exists():
        number += 1
        name = f"{wanted}-{number}"
    return name


# ---------------------------------------------------------------------- a run, a comparison


def create_run(folder: Path, config: Line, settings: Line, **facts: Any) -> None:
    """Create the folder of a run with ``run.json`` and ``config.yaml``, atomically.

    Args:
        folder: must not exist.
        config: the flags that repeat the run.
        settings: every setting as it was resolved.
        facts: further fields of ``run.json``: command, seed, task, model, versions, git, machine.
    """
    about = {
        "format": FORMAT,
        "name": folder.name,
        "status": "running",
        "started": timestamp(),
        "finished": None,
        "seconds": 0.0,
        **facts,
        **_described(settings),
    }
    with new_folder(folder) as staged:
        write_json(staged / ABOUT, about)
        write_yaml(staged / CONFIG, config)


def resume_run(folder: Path, step: int, changes: Sequence[str], config: Line, settings: Line, **facts: Any) -> None:
    """Set the status of a run to running.

    If settings changed, also record ``changes`` with the update they hold from, and the new settings and flags.
    """
    about = {name: value for name, value in Run(folder).about.items() if name != "error"}
    about |= {"status": "running", "finished": None}
    if changes:
        settings = {**settings, "eval_on_start": about["settings"].get("eval_on_start")}
        change = {"step": step, "when": timestamp(), "differences": list(changes)}
        about |= {**facts, **_described(settings), "changes": [*about.get("changes", []), change]}
        write_yaml(folder / CONFIG, config)
    write_json(folder / ABOUT, about)


def update_run(folder: Path, **fields: Any) -> None:
    """Replace fields of ``run.json``."""
    write_json(folder / ABOUT, {**Run(folder).about, **fields})


def timestamp() -> str:
    """The current time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _described(settings: Line) -> Line:
    arm, label = arm_of(settings)
    return {"arm": arm, "arm_label": label, "settings": settings}


def begin_comparison(
    folder: Path, labels: Mapping[str, str], seeds: Sequence[int], task: Line, model: Line, **more: bool | int | str
) -> None:
    """Write ``comparison.json`` without measures: the label of every arm, and the seeds."""
    arms = [{"arm": arm, "label": label, "runs": [f"{arm}-{seed}" for seed in seeds]} for arm, label in labels.items()]
    about = {"format": FORMAT, "name": folder.name, "task": task, "model": model, "seeds": list(seeds), "arms": arms}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / COMPARISON, {**about, **more, "measures": []})


# ---------------------------------------------------------------------- files


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_atomic(path, _encoded(value, indent=1))


def write_yaml(path: Path, value: Mapping[str, Any]) -> None:
    """Write a YAML file atomically, with sorted keys."""
    write_atomic(path, yaml.safe_dump(dict(value), sort_keys=True, allow_unicode=True).encode())


def append_line(path: Path, value: Line) -> None:
    """Append one line of JSON; after a line truncated by a crash, begin a new one."""
    with path.open("ab+") as file:
        if file.tell() and _last_byte(path) != b"\n":
            file.write(b"\n")
        file.write(_encoded(value))


def _encoded(value: Any, indent: int | None = None) -> bytes:
    """JSON in UTF-8; half of a surrogate pair, which UTF-8 cannot encode, is escaped."""
    text = json.dumps(_without_nan(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode(errors="backslashreplace") + b"\n"


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def _without_nan(value: Any) -> Any:
    """JSON has neither NaN nor infinity: both become null."""
    if isinstance(value, dict):
        return {str(k): _without_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# ---------------------------------------------------------------------- folders


@contextmanager
def new_folder(folder: Path, what: str = "the run") -> Iterator[Path]:
    """Yield an empty staging folder; on success rename it to ``folder``, on failure remove it.

    Leftovers of a start that was killed are removed. Of two processes that create the same folder, one is refused.
    """
    staged = folder.with_name(f".{folder.name}.new")
    try:
        staged.mkdir(parents=True, exist_ok=True)
        with locked(staged, what):
            try:
                for path in staged.iterdir():
                    if path.name not in (LOCK, HOLDER):
                        _remove(path)
                yield staged
                (staged / HOLDER).unlink(missing_ok=True)
                sync_tree(staged)
                staged.rename(folder)
                sync_folder(folder.parent)
            except BaseException:
                shutil.rmtree(staged, ignore_errors=True)
                raise
    except OSError as error:
        if folder.exists():
            raise InputError(f"{what} {folder} was created concurrently by another command", "Try again") from None
        raise InputError(f"cannot create {folder} ({error.strerror or error})", "Choose another --runs_dir") from None


def staged_beside(place: Path) -> Path:
    """An empty folder in which to build a new version of ``place``; leftovers of an earlier attempt are removed."""
    staged = place.with_name(f".{place.name}.new")
    if staged.exists():
        shutil.rmtree(staged)
    staged.mkdir()
    return staged


def put_in_place(staged: Path, place: Path) -> None:
    """Rename a complete folder to ``place``, replacing an older version."""
    sync_tree(staged)
    old = place.with_name(f".{place.name}.old")
    if old.exists():
        shutil.rmtree(old)
    if place.exists():
        place.rename(old)
    staged.rename(place)
    sync_folder(place.parent)
    if old.exists():
        shutil.rmtree(old)


def sync_tree(folder: Path) -> None:
    """Return when every file and every name below ``folder`` is on the disk."""
    for path in folder.rglob("*"):
        (sync_folder if path.is_dir() else sync_file)(path)
    sync_folder(folder)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
