"""Reading the folder of a run and of a comparison. ``docs/runs.md`` describes the format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troll.errors import InputError
from troll.trl.robust.fingerprint import translate_settings

FORMAT = 1
ABOUT, CONFIG, METRICS, TOKENS, SAMPLES = "run.json", "config.yaml", "metrics.jsonl", "tokens.jsonl", "samples.jsonl"
EVALUATION, COMPARISON, WARNINGS, MODEL = "eval.json", "comparison.json", "warnings.jsonl", "model"

Line = dict[str, Any]

_RENAMED_VERDICTS = {"no difference": "inconclusive"}  # as earlier versions wrote them


@dataclass(frozen=True)
class TokenHistory:
    """Histograms over the tokens of every update: ``updates[i]["kl"][j]`` tokens are between edges j and j + 1."""

    kl_edges: list[float]
    log_ratio_edges: list[float]
    updates: list[Line]


@dataclass(frozen=True)
class Run:
    """The folder of one training run. Every call reads the files again, so the run may still be in progress."""

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The run in a folder; refuse a folder without a readable ``run.json``."""
        run = cls(Path(path))
        _ = run.about
        return run

    @property
    def about(self) -> Line:
        """``run.json``: command, settings, versions, machine and status; settings of 0.1.0 by their present names."""
        about = _about(self.path, ABOUT, "run")
        if isinstance(about.get("settings"), dict):
            about["settings"] = translate_settings(about["settings"])
        return about

    def metrics(self) -> list[Line]:
        """Logged training steps, by step; of a step repeated after a resume, the last."""
        return _by_step(x for x in _lines(self.path / METRICS) if not is_evaluation(x))

    def evaluations(self) -> list[Line]:
        """Logged evaluations on the held-out set, by step; step 0 is before training."""
        return _by_step(x for x in _lines(self.path / METRICS) if is_evaluation(x))

    def tokens(self) -> TokenHistory | None:
        """Histograms of token KL and ratio, by update; None if nothing was recorded."""
        first, *updates = list(_lines(self.path / TOKENS)) or [{}]
        if "kl_edges" not in first:
            return None
        updates = _by_step(x for x in updates if "kl_edges" not in x)  # a resumed run may repeat the edges
        return TokenHistory(first["kl_edges"], first["log_ratio_edges"], updates)

    def samples(self) -> list[Line]:
        """Completions with the KL of every token; of a step repeated after a resume, the last ones."""
        lines = (line for line in _lines(self.path / SAMPLES) if "step" in line)
        latest = {(line["step"], line.get("place", 0)): line for line in lines}
        return [latest[key] for key in sorted(latest)]

    def warnings(self) -> list[Line]:
        """Warnings printed during training, one per rule; after a resume, the last of each rule."""
        latest = {line["name"]: line for line in _lines(self.path / WARNINGS) if "name" in line and "said" in line}
        return sorted(latest.values(), key=lambda line: line["said"])

    def evaluation(self) -> Line | None:
        """The result of ``troll eval``, if there is one."""
        path = self.path / EVALUATION
        return _json(path) if path.exists() else None


@dataclass(frozen=True)
class Comparison:
    """The folder of a comparison: one run per arm and seed, tables and verdicts."""

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> Comparison:
        """The comparison in a folder; refuse a folder without a readable ``comparison.json``."""
        comparison = cls(Path(path))
        _ = comparison.about
        return comparison

    @property
    def about(self) -> Line:
        """``comparison.json``: arms, seeds, tables and verdicts."""
        about = _about(self.path, COMPARISON, "comparison")
        for verdict in (x for measure in about.get("measures") or [] for x in measure.get("verdicts") or []):
            verdict["says"] = _RENAMED_VERDICTS.get(verdict.get("says"), verdict.get("says"))
        return about

    def runs(self, arm: str) -> list[Run]:
        """The existing runs of an arm, by seed."""
        (names,) = [x["runs"] for x in self.about["arms"] if x["arm"] == arm]
        return [Run(self.path / name) for name in names if (self.path / name / ABOUT).exists()]


def is_evaluation(line: Line) -> bool:
    """Whether a line of ``metrics.jsonl`` comes from an evaluation."""
    return any(key.startswith("eval_") for key in line)


def _lines(path: Path) -> Iterator[Line]:
    """The complete lines of a file."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                value = json.loads(line)
            except json.JSONDecodeError:  # truncated: the run was stopped while it wrote, or is writing now
                continue
            if isinstance(value, dict):
                yield value


def _by_step(lines: Iterator[Line]) -> list[Line]:
    latest = {line["step"]: line for line in lines if "step" in line}
    return [latest[step] for step in sorted(latest)]


def _about(path: Path, name: str, kind: str) -> Line:
    if not (path / name).is_file():
        raise InputError(
            f"{path} is not the folder of a {kind}: it has no {name}",
            "Give a folder that `troll train` or `troll compare` created, e.g. runs/NAME",
        )
    about = _json(path / name)
    if about.get("format") != FORMAT:
        raise InputError(
            f"{path / name} has format {about.get('format')!r}, this version of troll reads format {FORMAT}",
            "Read it with the version of troll that wrote it",
        )
    return about


def _json(path: Path) -> Line:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error})", "Restore the file from a copy") from None
    if not isinstance(value, dict):
        raise InputError(
            f"{path} contains a {type(value).__name__}, not a JSON object", "Restore the file as troll wrote it"
        )
    return value
