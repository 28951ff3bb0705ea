"""Ctrl-C and SIGTERM: finish the update, save, and say how to go on."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

from transformers import TrainerCallback


class Interrupt(TrainerCallback):
    """Ends training after the update that a signal interrupts, with a checkpoint. A second signal ends it at once."""

    def __init__(self) -> None:
        self.caught = False
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
        print(
            "\nStopping after this update, with a checkpoint. Once more to stop at once.", file=sys.stderr, flush=True
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and stop if a signal came."""
        if self.caught:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
