"""The folder of a run, and of a comparison of runs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troll.errors import InputError
from troll.files import write_atomic

FORMAT = 1
ABOUT, CONFIG, METRICS, TOKENS, SAMPLES = "run.json", "config.yaml", "metrics.jsonl", "tokens.jsonl", "samples.jsonl"
EVALUATION, COMPARISON, WARNINGS = "eval.json", "comparison.json", "warnings.jsonl"

Line = dict[str, Any]


@dataclass(frozen=True)
class TokenHistory:
    """Histograms over the tokens of every update: ``updates[i]["kl"][j]`` tokens are between edges j and j + 1."""

    kl_edges: list[float]
    log_ratio_edges: list[float]
    updates: list[Line]


@dataclass(frozen=True)
class Run:
    """The folder of one training run; everything is read anew on each call, so a run may still be going on."""

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The run in a folder."""
        _about(Path(path), ABOUT, "the folder of a run, with a run.json in it")
        return cls(Path(path))

    @property
    def about(self) -> Line:
        """What was run, with what, on what, and how it ended: ``run.json``."""
        return _about(self.path, ABOUT, "the folder of a run, with a run.json in it")

    def metrics(self) -> list[Line]:
        """What training logged, by step. Of a step that was repeated after a resume, the last."""
        return _by_step(x for x in _lines(self.path / METRICS) if not _is_evaluation(x))

    def evaluations(self) -> list[Line]:
        """What evaluation on the held-out set logged, by step; step 0 is before training."""
        return _by_step(x for x in _lines(self.path / METRICS) if _is_evaluation(x))

    def tokens(self) -> TokenHistory | None:
        """Histograms of token KL and ratio, by update; None if nothing was recorded."""
        first, *updates = list(_lines(self.path / TOKENS)) or [{}]
        if "kl_edges" not in first:
            return None
        updates = _by_step(x for x in updates if "kl_edges" not in x)  # a resumed run may repeat the edges
        return TokenHistory(first["kl_edges"], first["log_ratio_edges"], updates)

    def samples(self) -> list[Line]:
        """Completions with the KL of every token; of a step that was repeated after a resume, the last ones."""
        lines = (line for line in _lines(self.path / SAMPLES) if "step" in line)
        latest = {(line["step"], line.get("place", 0)): line for line in lines}
        return [latest[key] for key in sorted(latest)]

    def warnings(self) -> list[Line]:
        """What was warned of while it ran, each once; if it was said again after a resume, as it was said last."""
        latest = {line["name"]: line for line in _lines(self.path / WARNINGS) if "name" in line and "said" in line}
        return sorted(latest.values(), key=lambda line: line["said"])

    def evaluation(self) -> Line | None:
        """What ``troll eval`` found, if it was asked."""
        path = self.path / EVALUATION
        return _json(path) if path.exists() else None


@dataclass(frozen=True)
class Comparison:
    """The folder of a comparison: one run per arm and seed, and what follows from them."""

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> Comparison:
        """The comparison in a folder."""
        _about(Path(path), COMPARISON, "the folder of a comparison, with a comparison.json in it")
        return cls(Path(path))

    @property
    def about(self) -> Line:
        """Arms, seeds, tables and verdicts: ``comparison.json``."""
        return _about(self.path, COMPARISON, "the folder of a comparison, with a comparison.json in it")

    def runs(self, arm: str) -> list[Run]:
        """The runs of an arm that exist, by seed."""
        (names,) = [x["runs"] for x in self.about["arms"] if x["arm"] == arm]
        return [Run(self.path / name) for name in names if (self.path / name / ABOUT).exists()]


def write_json(path: Path, value: Any) -> None:
    """Write a file whole or not at all, also if the machine loses its power."""
    write_atomic(path, _encoded(value, indent=1))


def append_line(path: Path, value: Line) -> None:
    """Add one line of JSON to a file; after a line that was cut short by a crash, on a line of its own."""
    with path.open("ab+") as file:
        if file.tell() and _last_byte(path) != b"\n":
            file.write(b"\n")
        file.write(_encoded(value))


def _encoded(value: Any, indent: int | None = None) -> bytes:
    """Half of a surrogate pair, which UTF-8 has no bytes for, is escaped as JSON does it."""
    text = json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode(errors="backslashreplace") + b"\n"


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _lines(path: Path) -> Iterator[Line]:
    """The lines of a file that are whole."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                value = json.loads(line)
            except json.JSONDecodeError:  # cut short: the run was stopped while it wrote, or is writing now
                continue
            if isinstance(value, dict):
                yield value


def _is_evaluation(line: Line) -> bool:
    return any(key.startswith("eval_") for key in line)


def _by_step(lines: Iterator[Line]) -> list[Line]:
    latest = {line["step"]: line for line in lines if "step" in line}
    return [latest[step] for step in sorted(latest)]


def _about(path: Path, name: str, expected: str) -> Line:
    if not (path / name).is_file():
        raise InputError(str(path), expected, "a folder that `troll train` or `troll compare` has made, e.g. runs/NAME")
    about = _json(path / name)
    if about.get("format") != FORMAT:
        raise InputError(
            f"{path / name} of format {about.get('format')!r}", f"format {FORMAT}", "the version of troll that wrote it"
        )
    return about


def _json(path: Path) -> Line:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}, which cannot be read ({error})", "a JSON file", "another copy of it") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} with a {type(value).__name__} in it", "a JSON object", "the file as troll wrote it")
    return value
