"""Several ``troll train`` in processes of their own: memory is clean, and one that fails takes no other with it."""

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
from troll.lab.runs.summary import summarise

_LAST_LINES = 12  # of what a failed run said
_STOPPED = 130  # exit code
_PAUSE = 0.2  # seconds between looks at the runs


@dataclass
class Child:
    """One run: its folder, the flags that start it, and the process while there is one."""

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
        """What it prints."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def status(self) -> str | None:
        """As the folder has it."""
        return str(Run(self.folder).about["status"]) if (self.folder / ABOUT).is_file() else None

    def start(self, threads: int) -> None:
        """Begin, or go on from the last checkpoint; a run that has none begins again."""
        flags = self.flags if self.status is None else ["--resume", str(self.folder)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "troll", "train", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes to this process alone, which passes it on once
                env={"OMP_NUM_THREADS": str(threads), **os.environ},
            )
        self.state = "running"

    def stop(self) -> None:
        """Ask it to end with a checkpoint; asked again, it ends at once."""
        if self.process is not None:
            self.process.terminate()

    def ended(self) -> bool:
        """Whether it has just ended; then its state says how."""
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
        """Step and reward while it runs, the result after."""
        if self.state != "running":
            return self.result
        if self.status is None:
            return "loading"
        run = Run(self.folder)
        lines, most = run.metrics(), run.about["settings"].get("max_steps") or -1
        rewards = [line["reward"] for line in lines if line.get("reward") is not None]
        step = f"step {lines[-1]['step'] if lines else 0}" + (f"/{most}" if most > 0 else "")
        return f"{step}  reward {rewards[-1]:.3f}" if rewards else step

    def last_words(self) -> list[str]:
        """The end of what it printed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [one_line(line) for line in lines[-_LAST_LINES:]]

    def _finish(self) -> None:
        self.state = "finished"
        summary = summarise(Run(self.folder))
        rewards = {"held-out reward": summary.held_out_last, "reward": summary.reward_last}
        found = [f"{name} {value:.3f}" for name, value in rewards.items() if value is not None]
        self.result = ", ".join([*found[:1], duration(summary.seconds)])


def run_children(children: Sequence[Child], jobs: int, console: Console) -> bool:
    """Run those that are not finished, some at a time; False if a signal came before the end."""
    waiting = []
    for child in children:
        if child.state == "finished":
            say(console, f"{child.folder.name}: finished before, {child.result}")
        else:
            waiting.append(child)
    running: list[Child] = []
    threads = max(1, _cores() // jobs)
    with _Signals(running) as signals, _live(children, console) as refresh:
        while running or (waiting and not signals.came):
            while waiting and len(running) < jobs and not signals.came:
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
    return not signals.came


def say(console: Console, text: str, **style: str) -> None:
    """Print a line as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True, **style)  # type: ignore[arg-type]


class _Signals:
    """Ctrl-C and its like are passed on to the runs, which save a checkpoint; again, and they stop at once."""

    def __init__(self, running: list[Child]) -> None:
        self.running = running
        self.came = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                number = getattr(signal, name)
                self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for child in self.running:  # there are some only if this process fails
            child.stop()

    def _pass_on(self, *_: object) -> None:
        if not self.came:
            print("\nStopping after the updates at hand, with checkpoints. Once more to stop at once.", file=sys.stderr)
        self.came = True
        for child in self.running:
            child.stop()


@contextmanager
def _live(children: Sequence[Child], console: Console) -> Iterator[Callable[[], None]]:
    """A table of all runs on a terminal, drawn anew about once a second."""
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
    """What became of a run; on a terminal the table has it."""
    name = child.folder.name
    if child.state == "failed":
        say(console, f"{name}: failed; the others go on. It said, in {child.log}:", style="red")
        for line in child.last_words():
            say(console, f"  {line}")
    elif not console.is_terminal:
        say(console, ": ".join([name, ", ".join(filter(None, [child.state, child.result]))]))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
