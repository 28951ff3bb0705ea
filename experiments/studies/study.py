"""Studies: a question, settings shared by all runs, and axes whose product is the runs.

```yaml
question: Does the bound matter?
shared: {task: tasks/modulo.py, max_steps: 128}          # flags of `troll train`; a path is relative to the study
axes:
  bound: {tight: {kl_bound: 0.01}, loose: {kl_bound: 0.25}}     # a name → the flags it stands for
  seed: [0, 1, 2]                                               # values of the flag that the axis is named after
```
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Flags = dict[str, Any]
PATHS = ("task", "data", "eval_data")
ALWAYS: Flags = {"measure_kl": True, "save_model": False, "keep_checkpoints": False, "write_report": False}


@dataclass(frozen=True)
class Case:
    """One run of a study: its label on each axis, and its flags of ``troll train``."""

    study: str
    place: dict[str, str]
    flags: Flags

    @property
    def name(self) -> str:
        """The name of its folder."""
        return re.sub(r"[^\w.+-]+", "_", "-".join(self.place.values()))


@dataclass(frozen=True)
class Study:
    """A study file, read."""

    name: str
    question: str
    cases: list[Case]

    @classmethod
    def read(cls, path: Path) -> Study:
        """The study in a file, with all its runs in order: the last axis varies fastest, but seeds slowest of all.

        A study that is cut short then has complete seeds.
        """
        text = yaml.safe_load(path.read_text(encoding="utf-8"))
        unknown = set(text) - {"question", "shared", "axes"}
        if unknown:
            raise ValueError(f"{path}: {', '.join(sorted(unknown))}; a study has question, shared and axes")
        axes = {name: dict(_choices(name, given)) for name, given in text["axes"].items()}
        cases = []
        for labels in itertools.product(*axes.values()):
            place = dict(zip(axes, labels, strict=True))
            chosen = [axes[axis][label] for axis, label in place.items()]
            flags = _located({**ALWAYS, **text["shared"], **_merged(chosen, path)}, path.parent)
            cases.append(Case(path.stem, place, flags))
        cases.sort(key=lambda case: case.flags.get("seed", 0))
        names = [case.name for case in cases]
        if len(set(names)) < len(names):
            raise ValueError(f"{path}: two runs of one name, {max(names, key=names.count)}")
        return cls(path.stem, text["question"], cases)


def _choices(axis: str, given: Any) -> Iterator[tuple[str, Flags]]:
    """Label and flags of each place on an axis."""
    if isinstance(given, Mapping):
        yield from ((str(label), dict(flags or {})) for label, flags in given.items())
    else:
        yield from ((f"{value:g}" if isinstance(value, float) else str(value), {axis: value}) for value in given)


def _merged(chosen: list[Flags], path: Path) -> Flags:
    """All of them; a flag that two axes set is a mistake, since only one of them would be varied."""
    merged: Flags = {}
    for flags in chosen:
        twice = merged.keys() & flags.keys()
        if twice:
            raise ValueError(f"{path}: two axes set {', '.join(sorted(twice))}")
        merged |= flags
    return merged


def _located(flags: Flags, folder: Path) -> Flags:
    """Paths that are relative to the study, from anywhere."""
    here = {name: folder / str(flags[name]) for name in PATHS if flags.get(name)}
    return flags | {name: str(path.resolve()) for name, path in here.items() if path.exists()}
