"""Ctrl-C and SIGTERM: finish the update, save, and say how to go on."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback


class Interrupt(TrainerCallback):
    """Ends training after the update that a signal interrupts, with a checkpoint. A second signal ends it at once.

    An evaluation that is due after that update is still made: it draws random numbers, and without it the resumed run
    would be another one than a run that was never interrupted.
    """

    def __init__(self) -> None:
        self.caught = False
        self.stopped = False
        """Whether updates are left that were not made."""
        self._training = True
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.caught:
            raise KeyboardInterrupt
        self.caught = True
        what = "Stopping after this update, with a checkpoint." if self._training else "The last update is made."
        os.write(2, f"\n{what} Once more to stop at once.\n".encode())  # print may be what was interrupted

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and stop if a signal came, to this process or another one."""
        if args.world_size > 1:
            signals = torch.tensor(float(self.caught), device=args.device)
            torch.distributed.all_reduce(signals)
            self.caught = bool(signals > 0)
        self._training = state.global_step < state.max_steps  # else only evaluating and saving are left
        if self.caught and self._training:
            control.should_save = control.should_training_stop = self.stopped = True
