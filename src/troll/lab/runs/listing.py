"""List the runs and comparisons in a folder with their states. Only files are read; unreadable runs are listed too."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from troll.errors import InputError
from troll.lab.runs.folder import ABOUT, COMPARISON, METRICS, Comparison, Line, Run
from troll.trl.robust.store import MANIFEST, checkpoints, is_locked, verify

STATES = ("running", "finished", "interrupted", "failed", "killed", "broken")
"""``killed``: the status is running, but no process holds the lock. ``broken``: the files cannot be read."""
_VERL = Path("checkpoints") / "latest_checkpointed_iteration.txt"
_TAIL = 1 << 18  # bytes read from the end of the metrics; enough for the last rollouts


@dataclass(frozen=True)
class Entry:
    """One row of the list: a run or a comparison."""

    name: str
    path: str
    kind: str
    """``run`` or ``comparison``."""
    state: str
    """One of ``STATES``."""
    step: int | None = None
    max_steps: int | None = None
    """Updates done and updates planned; for a comparison, runs instead of updates."""
    reward: float | None = None
    """Mean reward of the last rollout."""
    started: str | None = None
    size: int = 0
    """Bytes on disk."""
    resumable_from: int | None = None
    """The update that ``--resume`` starts from, 0 without a checkpoint; None if the run cannot be resumed."""
    why: str | None = None
    """The error, if there was one."""

    @property
    def age(self) -> float | None:
        """Seconds since the start; None if the start is unknown."""
        try:
            return (datetime.now(UTC) - datetime.fromisoformat(str(self.started))).total_seconds()
        except (ValueError, TypeError):
            return None

    def as_json(self) -> Line:
        """All fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Kept:
    """A checkpoint of a run."""

    name: str
    step: int
    size: int
    wrong: str | None
    """Why the run cannot be resumed from it; None if it is intact."""


@dataclass(frozen=True)
class Details:
    """One run with its checkpoints, or one comparison with its runs."""

    entry: Entry
    about: Line = field(default_factory=dict)
    checkpoints: list[Kept] = field(default_factory=list)
    runs: list[Entry] = field(default_factory=list)

    def as_json(self) -> Line:
        """All fields, for JSON."""
        kept, runs = [asdict(x) for x in self.checkpoints], [x.as_json() for x in self.runs]
        return {**self.entry.as_json(), "about": self.about, "checkpoints": kept, "runs": runs}


def entries(root: Path) -> list[Entry]:
    """The runs and comparisons directly below a folder, newest first."""
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]
    by_name = sorted((x for x in map(entry_of, folders) if x is not None), key=lambda x: x.name)
    return sorted(by_name, key=lambda x: x.started or "", reverse=True)


def entry_of(folder: Path) -> Entry | None:
    """The entry of a folder; None if it is neither run nor comparison. State ``broken`` if it cannot be read."""
    kind = "comparison" if (folder / COMPARISON).exists() else "run"
    if kind == "run" and not (folder / ABOUT).exists():
        return None
    fields: Line = {"name": folder.name, "path": str(folder), "kind": kind}
    try:
        return (_comparison if kind == "comparison" else _run)(folder, fields)
    except (InputError, OSError) as error:
        why = error.problem if isinstance(error, InputError) else str(error)
    except Exception as error:  # a file that troll did not write can contain anything
        why = f"{type(error).__name__}: {error}"
    return Entry(**fields, state="broken", size=_size(folder), why=why)


def details(folder: Path) -> Details:
    """The entry of a folder with its checkpoints or runs. Reads and verifies every checkpoint, so it can be slow."""
    entry = entry_of(folder)
    if entry is None:
        raise InputError(f"{folder} is not the folder of a run or a comparison", "`troll runs` lists both")
    if entry.state == "broken":
        return Details(entry)
    if entry.kind == "comparison":
        about = Comparison(folder).about
        names = [name for arm in about["arms"] for name in arm["runs"]]
        runs = [x for x in (entry_of(folder / name) for name in names) if x is not None]
        return Details(entry, about, runs=runs)
    kept = [Kept(path.name, step, _size(path), verify(path)) for step, path in checkpoints(folder).items()]
    return Details(entry, Run(folder).about, kept)


def resumable_from(folder: Path) -> int:
    """The update of the newest completely written checkpoint, not verified; 0 without one."""
    return max((step for step, path in checkpoints(folder).items() if (path / MANIFEST).is_file()), default=0)


def _run(folder: Path, fields: Line) -> Entry:
    about = Run(folder).about
    state = _state(str(about["status"]), folder)
    early = state not in ("finished", "running")
    lines = list(_tail(folder / METRICS))
    rewards = [line["reward"] for line in lines if isinstance(line.get("reward"), int | float)]
    steps = [line["step"] for line in lines if isinstance(line.get("step"), int)]
    most = about.get("max_steps") or about["settings"].get("max_steps") or 0
    return Entry(
        **fields,
        state=state,
        step=steps[-1] if steps else 0,
        max_steps=most if most > 0 else None,
        reward=rewards[-1] if rewards else None,
        started=about.get("started"),
        size=_size(folder),
        resumable_from=_verl_step(folder, about) or resumable_from(folder) if early else None,
        why=str(about["error"]) if about.get("error") else None,
    )


def _comparison(folder: Path, fields: Line) -> Entry:
    """A comparison is finished if all its runs are; otherwise it has the worst of their states."""
    about = Comparison(folder).about
    names = [name for arm in about["arms"] for name in arm["runs"]]
    runs = [entry_of(folder / name) for name in names]
    states = ["waiting" if run is None else run.state for run in runs]
    starts = [run.started for run in runs if run is not None and run.started]
    if is_locked(folder):
        state = "running"
    elif set(states) <= {"finished"}:
        state = "finished"
    else:
        state = next((x for x in ("broken", "failed", "killed") if x in states), "interrupted")
    errors = [f"{name}: {run.state}" for name, run in zip(names, runs, strict=True) if run and run.why]
    return Entry(
        **fields,
        state=state,
        step=states.count("finished"),
        max_steps=len(names),
        started=min(starts, default=None),
        size=_size(folder),
        resumable_from=None if state in ("finished", "running") else 0,
        why=", ".join(errors) or None,
    )


def _state(status: str, folder: Path) -> str:
    if is_locked(folder):
        return "running"
    return "killed" if status == "running" else status if status in STATES else "broken"


def _verl_step(folder: Path, about: Line) -> int:
    """The update of verl's last checkpoint; verl counts rollouts."""
    try:
        rollouts = int((folder / _VERL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    return rollouts * int(about["settings"].get("updates_per_generation") or 1)


def _tail(path: Path) -> Iterator[Line]:
    """The last complete lines of a file, without reading all of it."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL))
        lines = file.read().splitlines()
    for line in lines:
        try:
            value: Any = json.loads(line)
        except ValueError:  # the first and the last line may be cut
            continue
        if isinstance(value, dict):
            yield value


def _size(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:  # deleted in the meantime
                continue
    return total
