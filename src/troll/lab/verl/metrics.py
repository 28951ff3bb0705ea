"""Converts verl's log to ``metrics.jsonl``, with the names of ``docs/metrics.md``.

verl logs once per rollout: the mean over its updates, for ``/max`` and ``/min`` the extreme. ``troll train`` converts
every line as it is written; ``python -m troll.lab.verl.metrics RUN`` converts the log of a run launched by hand.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troll.lab.runs import Run, append_line
from troll.lab.runs.folder import METRICS, Line
from troll.objective import reduction

NAMES = {  # verl's name → name in docs/metrics.md
    "critic/score/mean": "reward",
    "critic/score/std": "reward_std",  # these two by troll.verl.driver
    "critic/score/frac_zero_std": "frac_reward_zero_std",
    "actor/pg_loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "actor/entropy": "entropy",
    "actor/kl_loss": "kl",
    "actor/pg_clipfrac": "clip_ratio/region_mean",
    "response_length/mean": "completions/mean_length",
    "response_length/min": "completions/min_length",
    "response_length/max": "completions/max_length",
    "response_length/clip_ratio": "completions/clipped_ratio",
}
TIMES = {  # verl's timing_s/… → time/…
    "gen": "generate",
    "reward": "reward",
    "old_log_prob": "score",
    "ref": "score",
    "adv": "score",
    "update_actor": "update",
    "save_checkpoint": "save",
    "testing": "evaluate",
}
_TROLL = "actor/troll/"
_HELD_OUT = re.compile(r"val-(?:core|aux)/[^/]+/(reward|rewards/.+)/mean@\d+")


@dataclass
class Translator:
    """Converts lines of verl's log to lines of ``metrics.jsonl``; accumulates tokens and seconds."""

    updates: int
    """Updates per rollout: one step of verl is this many optimizer steps."""
    clips: bool = False
    """Whether verl's clip is used. With the trust region it is not, though verl logs a clip fraction."""
    seconds: float = 0.0
    tokens: float = 0.0

    def lines(self, line: Line) -> Iterator[Line]:
        """One line of verl → a training line, an evaluation line, or both."""
        step, data = line["step"] * self.updates, _numbers(line["data"])
        spent = {name: data[f"timing_s/{name}"] for name in TIMES if f"timing_s/{name}" in data}
        whole = data.get("timing_s/step", 0.0)
        self.seconds += whole + spent.get("testing", 0.0)  # not part of verl's step
        at = {"step": step, "seconds": round(self.seconds, 3)}
        if "actor/pg_loss" in data or "critic/score/mean" in data:
            yield {**at, **self._training(data, spent, whole)}
        held_out = {match[1]: value for name, value in data.items() if (match := _HELD_OUT.fullmatch(name))}
        if held_out:
            yield {**at, **{f"eval_{name}" + "/mean" * ("/" in name): value for name, value in held_out.items()}}

    def _training(self, data: dict[str, float], spent: dict[str, float], whole: float) -> Line:
        found = {ours: data[theirs] for theirs, ours in NAMES.items() if theirs in data}
        if not self.clips:
            found.pop("clip_ratio/region_mean", None)
        for name in (name.removeprefix(_TROLL) for name in data if name.startswith(_TROLL)):
            per_update = reduction(name) == "sum"  # verl averages it over updates, TRL adds it up between two logs
            found[f"troll/{name}"] = data[_TROLL + name] * (self.updates if per_update else 1)
        times: dict[str, float] = {}
        for name, seconds in spent.items():
            part = f"time/{TIMES[name]}"
            times[part] = times.get(part, 0.0) + seconds
        inside = sum(times.values()) - spent.get("testing", 0.0)
        if whole > inside:
            times["time/other"] = whole - inside
        if "perf/total_num_tokens" in data:
            self.tokens += data["perf/total_num_tokens"]
            found["num_tokens"] = self.tokens
            if whole > spent.get("save_checkpoint", 0.0):
                found["tokens_per_second"] = data["perf/total_num_tokens"] / (whole - spent.get("save_checkpoint", 0.0))
        return {**found, **times}


def _numbers(data: dict[str, Any]) -> dict[str, float]:
    """The finite numbers."""
    return {name: value for name, value in data.items() if isinstance(value, (int, float)) and math.isfinite(value)}


def read_new(path: Path, start: int) -> tuple[list[Line], int]:
    """The complete lines of verl's log from a byte offset on, and the offset after them."""
    if not path.exists():
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        new = file.read()
    whole = new[: new.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], start + len(whole)


def translate(lines: Iterable[Line], translator: Translator) -> list[Line]:
    """Convert several lines."""
    return [ours for line in lines for ours in translator.lines(line)]


def convert(folder: Path) -> int:
    """Write ``metrics.jsonl`` of a run from all of verl's logs in it; returns the number of lines."""
    settings = Run.open(folder).about["settings"]
    translator = Translator(settings["updates_per_generation"], settings["trust_region"] == "clip")
    found = [line for path in logs(folder) for line in translate(read_new(path, 0)[0], translator)]
    (folder / METRICS).unlink(missing_ok=True)
    for line in found:
        append_line(folder / METRICS, line)
    return len(found)


def logs(folder: Path) -> list[Path]:
    """verl's logs of a run in order, one per start."""
    return sorted((folder / "verl").glob("metrics-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))


if __name__ == "__main__":
    print(f"{convert(Path(sys.argv[1]))} lines in {Path(sys.argv[1]) / METRICS}")
