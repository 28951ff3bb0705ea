"""Several ``troll train`` in separate processes, so that a failed run does not affect the others."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from troll.lab.runs import Run
from troll.lab.runs.folder import ABOUT
from troll.lab.runs.formatting import duration, one_line
from troll.lab.runs.statistics import column

_LAST_LINES = 12  # of the output of a failed run
_STOPPED = 130  # exit code
_PAUSE = 0.2  # seconds between polls


@dataclass
class Child:
    """One run: its folder, its flags, and its process while it runs."""

    folder: Path
    flags: list[str]
    process: subprocess.Popen[bytes] | None = None
    state: str = "waiting"
    result: str = ""

    def __post_init__(self) -> None:
        if self.status == "finished":
            self._finish()

    @property
    def log(self) -> Path:
        """The file with the output of the process."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def status(self) -> str | None:
        """The status in the run folder, or None if there is none."""
        return str(Run(self.folder).about["status"]) if (self.folder / ABOUT).is_file() else None

    def start(self, threads: int) -> None:
        """Start the run, or resume it from its last checkpoint."""
        flags = self.flags if self.status is None else ["--resume", str(self.folder)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "troll", "train", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only this process, which forwards it once
                env={"OMP_NUM_THREADS": str(threads), **os.environ},
            )
        self.state = "running"

    def stop(self) -> None:
        """Ask the run to save a checkpoint and end; a second call ends it immediately."""
        if self.process is not None:
            self.process.terminate()

    def ended(self) -> bool:
        """Whether the process has just ended; ``state`` is then updated."""
        if self.process is None or self.process.poll() is None:
            return False
        code, status = self.process.returncode, self.status
        self.process = None
        if code == 0 and status == "finished":
            self._finish()
        else:
            stopped = (code == 0 and status == "interrupted") or code in (_STOPPED, -signal.SIGTERM)
            self.state = "interrupted" if stopped else "failed"
        return True

    def progress(self) -> str:
        """Step and reward while the run is running, then the result."""
        if self.state != "running":
            return self.result
        if self.status is None:
            return "loading"
        run = Run(self.folder)
        lines, most = run.metrics(), run.about["settings"].get("max_steps") or -1
        rewards = [line["reward"] for line in lines if line.get("reward") is not None]
        step = f"step {lines[-1]['step'] if lines else 0}" + (f"/{most}" if most > 0 else "")
        return f"{step}  reward {rewards[-1]:.3f}" if rewards else step

    def last_lines(self) -> list[str]:
        """The last lines of the output."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [one_line(line) for line in lines[-_LAST_LINES:]]

    def _finish(self) -> None:
        self.state = "finished"
        run = Run(self.folder)
        held_out, sampled = column(run.evaluations(), "eval_reward"), column(run.metrics(), "reward")
        rewards = {"held-out reward": held_out, "reward": sampled}
        shown = [f"{name} {values[-1]:.3f}" for name, values in rewards.items() if values]
        self.result = ", ".join([*shown[:1], duration(run.about["seconds"])])


def run_children(children: Sequence[Child], jobs: int, console: Console) -> bool:
    """Run the unfinished children, ``jobs`` at a time. Returns False after a signal."""
    waiting = []
    for child in children:
        if child.state == "finished":
            say(console, f"{child.folder.name}: already finished, {child.result}")
        else:
            waiting.append(child)
    running: list[Child] = []
    threads = max(1, _cores() // jobs)
    with _Signals(running) as signals, _live(children, console) as refresh:
        while running or (waiting and not signals.received):
            while waiting and len(running) < jobs and not signals.received:
                child = waiting.pop(0)
                child.start(threads)
                running.append(child)
                if not console.is_terminal:
                    say(console, f"{child.folder.name}: started")
            time.sleep(_PAUSE)
            for child in [child for child in running if child.ended()]:
                running.remove(child)
                _report(child, console)
            refresh()
    return not signals.received


def say(console: Console, text: str, **style: str) -> None:
    """Print a line verbatim."""
    console.print(text, highlight=False, markup=False, soft_wrap=True, **style)  # type: ignore[arg-type]


class _Signals:
    """Forwards Ctrl-C, SIGTERM and SIGHUP to the runs: the first saves checkpoints, the second stops immediately."""

    def __init__(self, running: list[Child]) -> None:
        self.running = running
        self.received = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                number = getattr(signal, name)
                self._before[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for child in self.running:  # only if this process failed
            child.stop()

    def _forward(self, *_: object) -> None:
        if not self.received:
            print("\nSaving checkpoints and stopping. Press Ctrl-C again to stop immediately.", file=sys.stderr)
        self.received = True
        for child in self.running:
            child.stop()


@contextmanager
def _live(children: Sequence[Child], console: Console) -> Iterator[Callable[[], None]]:
    """On a terminal, a table of all runs that is updated about once a second."""
    if not console.is_terminal:
        yield lambda: None
        return
    ticks = itertools.count()
    with Live(_table(children), console=console, auto_refresh=False) as live:
        yield lambda: None if next(ticks) % round(1 / _PAUSE) else live.update(_table(children), refresh=True)
        live.update(_table(children), refresh=True)


def _table(children: Sequence[Child]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    colours = {"finished": "green", "failed": "red", "running": "bold", "waiting": "dim"}
    for child in children:
        table.add_row(child.folder.name, child.state, child.progress(), style=colours.get(child.state, "yellow"))
    return table


def _report(child: Child, console: Console) -> None:
    """Print how a run ended; on a terminal the table shows it."""
    name = child.folder.name
    if child.state == "failed":
        say(console, f"{name}: failed; the other runs continue. Last lines of {child.log}:", style="red")
        for line in child.last_lines():
            say(console, f"  {line}")
    elif not console.is_terminal:
        say(console, ": ".join([name, ", ".join(filter(None, [child.state, child.result]))]))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
