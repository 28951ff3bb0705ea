"""A tiny model, a reward it can earn, and the flags of a run that takes seconds."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tiny_models
import torch
from safetensors.torch import load_file

from troll.lab.cli import main
from troll.lab.runs import Run

torch.set_num_threads(1)  # more only wait for each other

MAX_STEPS, UPDATES, ROWS, EVAL_STEPS, HELD_OUT = 8, 4, 8, 4, 8
FLAGS = (
    *("--max_steps", str(MAX_STEPS), "--updates_per_generation", str(UPDATES), "--num_generations", "4"),
    *("--per_device_train_batch_size", str(ROWS), "--gradient_accumulation_steps", "1"),
    *("--eval_size", str(HELD_OUT), "--eval_steps", str(EVAL_STEPS), "--max_completion_length", "4"),
    *("--learning_rate", "1e-2", "--kl_bound", "0.05", "--write_report", "false"),
)
REWARDS = '''\
import os, signal, time
from pathlib import Path

def spread(completions, **columns):
    """Something that an untrained model earns now and then: high characters, and a long text."""
    return [sum(map(ord, text)) / 1000 + len(text) / 10 for text in completions]

def fails(completions, **columns):
    raise RuntimeError("cannot\\n\\x1b[31mjudge\\x1b[0m")

def short(completions, **columns):
    return [1.0]

def text(completions, **columns):
    return ["good"] * len(completions)

def fails_later(completions, **columns):
    """From the FAIL_ATth call on."""
    fails_later.calls += 1
    if 0 < int(os.environ.get("FAIL_AT", 0)) <= fails_later.calls:
        raise RuntimeError("enough")
    return spread(completions)
fails_later.calls = 0

def sometimes(completions, **columns):
    """None for every third completion."""
    return [None if i % 3 == 0 else value for i, value in enumerate(spread(completions))]

def interrupts(completions, **columns):
    """Sends this process a signal when it is called for the SIGNAL_ATth time."""
    interrupts.calls += 1
    here = os.environ.get("RANK", "0") == os.environ.get("SIGNAL_RANK", "0")
    if here and interrupts.calls == int(os.environ.get("SIGNAL_AT", 0)):
        signal.raise_signal(int(os.environ["SIGNAL"]))
    return spread(completions)
interrupts.calls = 0

def waits(completions, **columns):
    """Waits for a file when it is called for the WAIT_ATth time."""
    waits.calls += 1
    while waits.calls == int(os.environ.get("WAIT_AT", 0)) and not Path(os.environ["WAIT_FOR"]).exists():
        time.sleep(0.01)
    return spread(completions)
waits.calls = 0
'''


@functools.cache
def shared() -> Path:
    """A folder with the model and the rewards, made once."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    path = Path(folder.name)
    tiny_models.save("dense", path / "model")
    (path / "rewards.py").write_text(REWARDS)
    return path


def flags(runs: Path, *more: str, reward: str | None = "spread") -> list[str]:
    """The command line of a run in seconds; what comes later goes before."""
    rewards = [] if reward is None else ["--reward", f"{shared() / 'rewards.py'}:{reward}"]
    return ["train", "--model", str(shared() / "model"), "--runs_dir", str(runs), *FLAGS, *rewards, *more]


def train(runs: Path, *more: str, reward: str | None = "spread") -> Run:
    """A run that ends well."""
    before = set(runs.glob("*"))
    assert main(flags(runs, *more, reward=reward)) == 0
    (made,) = set(runs.glob("*")) - before
    return Run.open(made)


def start(argv: list[str], launch: tuple[str, ...] = (), **changes: Any) -> subprocess.Popen[str]:
    """``troll`` in a process of its own, or in several."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **changes.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, *launch, "-m", "troll", *argv],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", **changes,
    )  # fmt: skip


def lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines, every one of which must be whole."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def weights(run: Run) -> dict[str, torch.Tensor]:
    """Of the trained model, or its adapter."""
    (file,) = (run.path / "model").glob("*.safetensors")
    return load_file(file)


def same_weights(a: Run, b: Run) -> bool:
    """Bit for bit."""
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    """What a line of metrics says, without what depends on the clock."""
    clock = ("seconds", "step_time", "tokens_per_second", "eval_runtime", "eval_samples_per_second")
    return {k: v for k, v in line.items() if not k.startswith("time/") and k not in (*clock, "eval_steps_per_second")}
