"""Result lines of runs that never were, with numbers that can be checked by hand."""

# ruff: noqa: E402, the studies are scripts beside one another
from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

STUDIES = Path(__file__).resolve().parents[2] / "experiments" / "studies"
sys.path.insert(0, str(STUDIES))

import analyse
import figures
import network_runs
import results
import scores
import study
import tables

__all__ = [
    "STUDIES",
    "Line",
    "analyse",
    "cell",
    "figures",
    "flat",
    "line",
    "network",
    "network_runs",
    "results",
    "scores",
    "study",
    "tables",
    "write",
]
Line = dict[str, Any]


def line(rewards: Sequence[float], *, planned: int | None = None, status: str = "finished", **place: Any) -> Line:
    """A run with these rewards, two updates on each rollout; ``planned`` rollouts if it made fewer."""
    labels = {"seed": "0"} | {axis: str(label) for axis, label in place.items()}
    many = len(rewards) if planned is None else planned
    return {
        "study": "made-up",
        "name": "-".join(labels.values()),
        "place": labels,
        "status": status,
        "flags": {"max_steps": 2 * many, "updates_per_generation": 2, "seed": int(labels["seed"])},
        "held_out": [],
        "rollouts": {"step": [1.0 + 2 * i for i in range(len(rewards))], "reward": list(rewards)},
    }


def flat(level: float, rollouts: int = 4, **place: Any) -> Line:
    """A run whose reward is the same from its first rollout to its last, and on held-out problems."""
    return line([level] * rollouts, **place) | {"held_out": [[0, 0.0], [8, level]]}


def cell(levels: Iterable[float], first: int = 0, **place: Any) -> list[Line]:
    """A seed for each of the levels."""
    return [flat(level, seed=first + i, **place) for i, level in enumerate(levels)]


def write(folder: Path, name: str, lines: Iterable[Line]) -> None:
    """As the results of a study of this name."""
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps({**each, "study": name}) + "\n" for each in lines)
    (folder / f"{name}.jsonl").write_text(text)


def network(lines: Iterable[Line], **columns: float) -> list[Line]:
    """The same runs, with what was measured on every rollout; ``a__b`` stands for ``a/b``."""
    found = []
    for each in lines:
        many = len(each["rollouts"]["reward"])
        more = {name.replace("__", "/"): [value] * many for name, value in columns.items()}
        found.append(each | {"rollouts": each["rollouts"] | more})
    return found
