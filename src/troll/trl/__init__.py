"""TRL with a trust region: ``GRPOConfig`` → ``TROLLConfig``, ``GRPOTrainer`` → ``TROLLTrainer``, and nothing else.

``trainer`` wraps five methods of TRL's trainer and copies none: scoring a rollout also records the sparse old policy,
scoring an update returns projected log-probabilities (``passes``, through the seam in ``forward``), the loss gets the
regression term, and advantages may come from another estimator (``estimators``). TRL's forward, masks, aggregation,
reference KL and logging are its own. ``robust`` keeps a long run alive: checkpoints, resume, guards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from troll.trl.config import TROLLConfig
    from troll.trl.robust.interrupt import StopOnSignal
    from troll.trl.trainer import TROLLTrainer

__all__ = ["StopOnSignal", "TROLLConfig", "TROLLTrainer"]

_MODULES = {"StopOnSignal": "robust.interrupt", "TROLLConfig": "config", "TROLLTrainer": "trainer"}


def __getattr__(name: str) -> Any:
    """Import TRL when a class is asked for: listing runs and reading checkpoints need none of it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        import trl  # noqa: F401
    except ImportError as error:
        raise ImportError("troll.trl needs TRL: pip install 'troll-rl[trl]'") from error
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
