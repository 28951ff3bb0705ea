"""The run that is tortured, and what must be the same of it as of the run that nothing happened to."""

# ruff: noqa: E402, what is imported stands beside other tests
from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

for folder in ("tests/lab/cli", "examples/trl"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / folder))

import cli_cases
import tqdm

from troll.lab.cli import main
from troll.lab.runs import Run
from troll.lab.training.recorder import RecordedTrainer
from troll.trl.robust.state import load_state

tqdm.tqdm.monitor_interval = 0  # no thread of its own: it would not be there after a fork

UPDATES, ROLLOUT, SAVE = 24, 8, 3
NAME = "run"
FLAGS = (
    *("--max_steps", str(UPDATES), "--updates_per_generation", str(ROLLOUT), "--save_steps", str(SAVE)),
    *("--eval_steps", "7", "--run_name", NAME),
)
_NOT_COMPARED = ("manifest.json", "training_args.bin", "README.md")  # verified elsewhere; the folder's name; prose


def begin(root: Path, *more: str) -> int:
    """The command that begins it in a folder."""
    return int(main(cli_cases.flags(root, *FLAGS, *more)))


def resume(root: Path) -> int:
    """The command that goes on with it."""
    return int(main(["train", "--resume", NAME, "--runs_dir", str(root)]))


def break_off(root: Path) -> int:
    """The same command, and the process ends where it is about to save for the last time."""
    real = RecordedTrainer._save_checkpoint

    def save(self: Any, *args: Any, **named: Any) -> None:
        if self.state.global_step == UPDATES:
            os._exit(0)
        real(self, *args, **named)

    RecordedTrainer._save_checkpoint = save  # type: ignore[method-assign]
    return begin(root)


def is_finished(root: Path) -> bool:
    """Whether the run says so itself."""
    return is_begun(root) and Run.open(root / NAME).about["status"] == "finished"


def is_begun(root: Path) -> bool:
    """Whether there is a run to go on with."""
    return (root / NAME / "run.json").exists()


@dataclass(frozen=True)
class Seen:
    """What the record of a run says it has done."""

    lines: int
    last: int

    @classmethod
    def of(cls, root: Path) -> Seen:
        """The number of lines of metrics, and the last update in any of the records."""
        steps = _steps(root / NAME / "metrics.jsonl")
        return cls(len(steps), max([*steps, *_steps(root / NAME / "tokens.jsonl")], default=0))


def went_on_from(root: Path, before: Seen) -> int | None:
    """The update after which a resumed run went on; None if it did not come so far as to log one."""
    new = _steps(root / NAME / "metrics.jsonl")[before.lines :]
    return new[0] - 1 if new else None


def _steps(path: Path) -> list[int]:
    """Of all lines that log an update and are whole."""
    steps = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "step" in value and not any(key.startswith("eval_") for key in value):
            steps.append(value["step"])
    return steps


def fingerprint(folder: Path) -> dict[str, str]:
    """A hash of everything that a finished run leaves and that does not depend on the clock.

    Weights, every file of its last checkpoint (optimiser, random numbers, scheduler, rollout), metrics, evaluations,
    histograms over tokens, completions.
    """
    run = Run.open(folder)
    found = {"status": run.about["status"]}
    for path in sorted([*(folder / "model").iterdir(), *(folder / f"checkpoint-{UPDATES}").iterdir()]):
        if path.name not in _NOT_COMPARED:
            found[f"{path.parent.name}/{path.name}"] = hash_of(path)
    tokens = run.tokens()
    for name, value in {
        "metrics": [_timeless(line) for line in run.metrics()],
        "evaluations": [_timeless(line) for line in run.evaluations()],
        "tokens": None if tokens is None else [tokens.kl_edges, tokens.log_ratio_edges, tokens.updates],
        "samples": run.samples(),
    }.items():
        found[name] = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    return found


def differences(folder: Path, whole: dict[str, str]) -> list[str]:
    """What of a finished run is not as in the run that nothing happened to; nothing, if all is well."""
    mine = fingerprint(folder)
    return sorted(name for name in mine.keys() | whole.keys() if mine.get(name) != whole.get(name))


def hash_of(path: Path) -> str:
    """Of a file's bytes; of a log, in JSON or in what a process knows, without the times in it."""
    if path.suffix == ".json":
        content = json.dumps(_timeless(json.loads(path.read_bytes())), sort_keys=True).encode()
    elif path.name.startswith("troll_process"):
        content = repr(_timeless(load_state(path))).encode()
    else:
        content = path.read_bytes()
    return hashlib.sha256(content).hexdigest()


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in cli_cases.timeless(value).items()}
    if isinstance(value, list | tuple):
        return [_timeless(v) for v in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)  # 1 from a flag is 1.0 from a file
    return value.tolist() if hasattr(value, "tolist") else value


def complaint(said: str) -> str | None:
    """The one sentence of a command that refuses: ``troll: …``; None if there is none, or a stack trace beside it."""
    found = re.findall(r"^troll: (.*)$", said, flags=re.MULTILINE)
    return found[0] if len(found) == 1 and "Traceback" not in said else None
