"""What a run shows while it goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from troll.lab.report.rules import Watch
from troll.lab.runs.formatting import one_line

FIELDS = {  # metric → how it is shown
    "reward": "reward {:.3f}",
    "troll/kl_before/mean": "KL {:.4f}",
    "troll/projected_fraction": "projected {:.1%}",
    "clip_ratio/region_mean": "clipped {:.1%}",
    "tokens_per_second": "{:.0f} tokens/s",
}


def say(console: Console, text: str) -> None:
    """Print a line as it is: no markup, no colours, no line breaks of the console's own."""
    console.print(one_line(text), markup=False, emoji=False, highlight=False, soft_wrap=True)


def summary(metrics: dict[str, Any]) -> str:
    """Reward, KL, projected fraction and speed, as far as they are known.

    >>> summary({"reward": 0.5, "troll/kl_before/mean": 0.0123, "loss": 3.0})
    'reward 0.500  KL 0.0123'
    """
    return "  ".join(form.format(metrics[name]) for name, form in FIELDS.items() if metrics.get(name) is not None)


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any.

    >>> duration(75), duration(3 * 3600 + 62)
    ('1:15', '3:01:02')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class ShowProgress(TrainerCallback):
    """Step, reward, KL, projected fraction, tokens per second and the time left; and warnings, each once."""

    def __init__(self, console: Console, watch: Watch | None = None) -> None:
        self.console, self.watch = console, watch
        self.known: dict[str, Any] = {}
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.began = self.first = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Draw the bar, on a terminal."""
        self.began, self.first = time.monotonic(), state.global_step
        if not state.is_world_process_zero:
            return
        if self.watch is not None:
            self.watch.begin(state.global_step)
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
        """Show what is known now; on plain lines, once per rollout."""
        if not state.is_world_process_zero:
            return
        ends = state.global_step % (args.updates_per_generation or 1) == 0 or state.global_step == state.max_steps
        if logs.get("eval_reward") is not None:
            say(self.console, f"step {state.global_step}: held-out reward {logs['eval_reward']:.3f}")
            self._warn(state.global_step, logs, ends)
        if "loss" not in logs:
            return
        self.known |= {name: value for name, value in logs.items() if value is not None}
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, description=summary(self.known))
        elif ends:
            done, seconds = state.global_step - self.first, time.monotonic() - self.began
            left = duration(seconds / max(1, done) * (state.max_steps - state.global_step))
            say(self.console, f"step {state.global_step}/{state.max_steps}  {summary(self.known)}  {left} left")

        self._warn(state.global_step, logs, ends)

    def _warn(self, step: int, logs: dict[str, Any], ends: bool) -> None:
        """Say what is to be warned of; rules look at whole rollouts."""
        if self.watch is None:
            return
        self.watch.add({**logs, "step": step})
        for finding in self.watch.new() if ends else ():
            say(self.console, finding.line())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the last state of the bar."""
        self.close()

    def close(self) -> None:
        """Give the terminal back."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
