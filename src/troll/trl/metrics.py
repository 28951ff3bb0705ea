"""How the ``troll/`` metrics are logged: reduced over forward passes, and which of them TRL prints.

TRL prints the five to look at first, and counters of problems. Trackers, ``trainer.state.log_history`` and run folders
get all of them; ``docs/metrics.md`` explains each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PrinterCallback, ProgressCallback

from troll.objective.metrics import IMPORTANT, reduction

_REDUCE: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "sum": sum}
_COUNTERS = ("skipped_tokens", "skipped_updates", "unconverged_tokens", "unscored_completions")
"""Printed when they are not 0."""


def reduce_passes(metrics: dict[str, list[float]]) -> None:
    """Reduce the values of several forward passes, in place, where TRL's mean over them would be wrong."""
    for name, values in metrics.items():
        how = reduction(name.removeprefix("troll/")) if name.startswith("troll/") else "mean"
        if how != "mean" and values:
            values[:] = [_REDUCE[how](values)]


def printed(logs: dict[str, Any]) -> dict[str, Any]:
    """The entries of a log line that are printed: all but the ``troll/`` metrics that are details."""
    return {name: value for name, value in logs.items() if _is_printed(name, value)}


def _is_printed(name: str, value: Any) -> bool:
    if not name.removeprefix("eval_").startswith("troll/"):
        return True
    metric = name.removeprefix("eval_").removeprefix("troll/")
    return metric in IMPORTANT or (metric in _COUNTERS and bool(value))


class _Progress(ProgressCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=None if logs is None else printed(logs), **kwargs)


class _Printer(PrinterCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=None if logs is None else printed(logs), **kwargs)


def print_important_metrics(trainer: Any) -> None:
    """Replace the callbacks of transformers that print log lines; a callback of the user's own is left alone."""
    callbacks = trainer.callback_handler.callbacks
    replacements: dict[type, type] = {ProgressCallback: _Progress, PrinterCallback: _Printer}
    callbacks[:] = [replacements[type(x)]() if type(x) in replacements else x for x in callbacks]
