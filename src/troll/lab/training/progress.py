"""Progress of a run (a bar on a terminal, plain lines elsewhere), and the stopwatch for its phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from troll.lab.report.rules import RuleMonitor
from troll.lab.runs.formatting import clock, one_line

FIELDS = {  # metric → format
    "reward": "reward {:.3f}",
    "troll/kl_before/mean": "KL {:.4f}",
    "troll/projected_fraction": "projected {:.1%}",
    "clip_ratio/region_mean": "clipped {:.1%}",
    "tokens_per_second": "{:.0f} tokens/s",
}


def say(console: Console, text: str) -> None:
    """Print a line verbatim: no markup, colours or line breaks."""
    console.print(one_line(text), markup=False, emoji=False, highlight=False, soft_wrap=True)


def summary(metrics: dict[str, Any]) -> str:
    """Reward, KL, projected fraction and speed in one line. Missing metrics are left out.

    >>> summary({"reward": 0.5, "troll/kl_before/mean": 0.0123, "loss": 3.0})
    'reward 0.500  KL 0.0123'
    """
    return "  ".join(form.format(metrics[name]) for name, form in FIELDS.items() if metrics.get(name) is not None)


class ShowProgress(TrainerCallback):
    """Shows step, reward, KL, projected fraction, tokens per second and the time left, and every warning once."""

    def __init__(self, console: Console, monitor: RuleMonitor | None = None) -> None:
        self.console, self.monitor = console, monitor
        self.latest: dict[str, Any] = {}
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.began = self.first = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the bar on a terminal."""
        self.began, self.first = time.monotonic(), state.global_step
        if not state.is_world_process_zero:
            return
        if self.monitor is not None:
            self.monitor.begin(state.global_step)
        if not self.console.is_terminal:
            return
        columns = (
            BarColumn(24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
        )
        self.bar = Progress(*columns, console=self.console, transient=False)
        self.task = self.bar.add_task(
            "generating the first rollout", total=state.max_steps, completed=state.global_step
        )
        self.bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move the bar."""
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Show the latest metrics; without a terminal, one line per rollout."""
        if not state.is_world_process_zero:
            return
        ends = state.global_step % (args.updates_per_generation or 1) == 0 or state.global_step == state.max_steps
        if logs.get("eval_reward") is not None:
            say(self.console, f"step {state.global_step}: held-out reward {logs['eval_reward']:.3f}")
            self._warn(state.global_step, logs, ends)
        if "loss" not in logs:
            return
        self.latest |= {name: value for name, value in logs.items() if value is not None}
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, description=summary(self.latest))
        elif ends:
            done, seconds = state.global_step - self.first, time.monotonic() - self.began
            left = clock(seconds / max(1, done) * (state.max_steps - state.global_step))
            say(self.console, f"step {state.global_step}/{state.max_steps}  {summary(self.latest)}  {left} left")

        self._warn(state.global_step, logs, ends)

    def _warn(self, step: int, logs: dict[str, Any], ends: bool) -> None:
        """Print new warnings at the end of a rollout."""
        if self.monitor is None:
            return
        self.monitor.add({**logs, "step": step})
        for finding in self.monitor.new() if ends else ():
            say(self.console, finding.line())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the bar."""
        self.close()

    def close(self) -> None:
        """Stop the bar if it is shown."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class Stopwatch:
    """Seconds by activity. A nested activity pauses the outer one, unless the outer one is ``exclusive``."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._exclusive = False
        self._since = self._lap = now()

    @contextmanager
    def __call__(self, activity: str, *, exclusive: bool = False) -> Iterator[None]:
        """Count the time of this block for ``activity``."""
        if self._exclusive:
            yield
            return
        self._settle()
        self._running.append(activity)
        self._exclusive = exclusive
        try:
            yield
        finally:
            self._settle()
            self._running.pop()
            self._exclusive = False

    def lap(self) -> dict[str, float]:
        """Seconds by activity since the last lap; ``other`` is the rest."""
        self._settle()
        seconds, self._seconds = self._seconds, {}
        total, self._lap = self._since - self._lap, self._since
        return {**seconds, "other": seconds.get("other", 0.0) + max(0.0, total - sum(seconds.values()))}

    def _settle(self) -> None:
        now = self._now()
        if self._running:
            activity = self._running[-1]
            self._seconds[activity] = self._seconds.get(activity, 0.0) + now - self._since
        self._since = now
