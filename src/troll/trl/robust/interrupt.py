"""Ctrl-C, SIGTERM and a terminal that is closed: finish the update, save, and end as if that had been the plan."""

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
"""Set by torchrun and accelerate, which pass on a Ctrl-C that has reached every process already, as a SIGTERM."""


class StopOnSignal(TrainerCallback):
    """Ends training after the update that a signal interrupts, with a checkpoint. A second signal ends it at once.

    A signal that comes before training begins ends it at once as well: there is nothing to save. An evaluation that is
    due after the last update is still made: it draws random numbers, and without it the resumed run would be another
    one than a run that was never interrupted. To end at once raises ``KeyboardInterrupt``, wherever the trainer is; the
    last checkpoint stays as it is.

    >>> with StopOnSignal() as stop:                                                        # doctest: +SKIP
    ...     trainer.add_callback(stop)
    ...     trainer.train(resume_from_checkpoint=True)
    >>> stop.stopped                                                                        # doctest: +SKIP
    False
    """

    def __init__(self) -> None:
        self.caught = False
        self.stopped = False
        """Whether updates are left that were not made."""
        self._now = "before"
        self._seen: set[int] = set()
        self._before: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is not threading.main_thread():  # where Python takes no signals
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
            self._go_on_in_silence()
        again = self.caught and (number in self._seen or LAUNCHED not in os.environ)
        self._seen.add(number)
        if again or self._now == "before":
            raise KeyboardInterrupt
        if self.caught:
            return
        self.caught = True
        updates = self._now == "training"
        what = "Stopping after this update, with a checkpoint." if updates else "The last update is made."
        os.write(2, f"\n{what} Once more to stop at once.\n".encode())  # print may be what was interrupted

    def _go_on_in_silence(self) -> None:
        """A terminal that was closed takes no more words; whoever printed one would fail."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        for number in self._terminals:
            os.dup2(nothing, number)
        os.close(nothing)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """From now on there is something to save."""
        self._now = "training" if state.global_step < state.max_steps else "after"

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and stop if a signal came, to this process or another one."""
        if args.world_size > 1:
            signals = torch.tensor(float(self.caught), device=args.device)
            torch.distributed.all_reduce(signals)
            self.caught = bool(signals > 0)
        if state.global_step >= state.max_steps:
            self._now = "after"  # only evaluating and saving are left
        elif self.caught:
            control.should_save = control.should_training_stop = self.stopped = True
