"""Ctrl-C, SIGTERM and a closed terminal: finish the update, save a checkpoint, and exit normally."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
LAUNCHED = "TORCHELASTIC_RUN_ID"
"""Set by torchrun and accelerate, which send SIGTERM after a Ctrl-C that every process has already received."""


class StopOnSignal(TrainerCallback):
    """Stops training after the current update, with a checkpoint. A second signal raises ``KeyboardInterrupt`` at once.

    So does a signal before training begins, when there is nothing to save. An evaluation due after the last update
    still runs: it draws random numbers, and without it the resumed run would differ from an uninterrupted one.
    Earlier checkpoints stay valid in all cases.

    >>> with StopOnSignal() as stop:                                                        # doctest: +SKIP
    ...     trainer.add_callback(stop)
    ...     trainer.train(resume_from_checkpoint=True)
    >>> stop.stopped                                                                        # doctest: +SKIP
    False
    """

    def __init__(self) -> None:
        self.caught = False
        self.stopped = False
        """Whether updates are left to do."""
        self._now = "before"
        self._seen: set[int] = set()
        self._before: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is not threading.main_thread():  # Python handles signals only there
            return self
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        for number in SIGNALS:
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if number == getattr(signal, "SIGHUP", None):
            self._silence_terminal()
        again = self.caught and (number in self._seen or LAUNCHED not in os.environ)
        self._seen.add(number)
        if again or self._now == "before":
            raise KeyboardInterrupt
        if self.caught:
            return
        self.caught = True
        updates = self._now == "training"
        what = "Stopping after this update, with a checkpoint." if updates else "The last update is done."
        os.write(2, f"\n{what} Press Ctrl-C again to stop at once.\n".encode())  # print itself may be interrupted

    def _silence_terminal(self) -> None:
        """Redirect output to /dev/null: printing to a closed terminal would fail."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        for number in self._terminals:
            os.dup2(nothing, number)
        os.close(nothing)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """From now on, a signal saves a checkpoint."""
        self._now = "training" if state.global_step < state.max_steps else "after"

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and stop if this process or another one received a signal."""
        if args.world_size > 1:
            signals = torch.tensor(float(self.caught), device=args.device)
            torch.distributed.all_reduce(signals)
            self.caught = bool(signals > 0)
        if state.global_step >= state.max_steps:
            self._now = "after"  # only evaluating and saving are left
        elif self.caught:
            control.should_save = control.should_training_stop = self.stopped = True
