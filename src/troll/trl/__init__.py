"""TRL with a trust region: ``GRPOConfig`` → ``TROLLConfig``, ``GRPOTrainer`` → ``TROLLTrainer``.

``trainer`` wraps five methods of TRL's trainer and copies none; start reading there. ``passes`` is the hook in TRL's
forward and what runs in it, ``trust_region`` has ε and α, ``estimators`` the advantages, ``checks`` the checks at
construction, ``robust`` checkpoints, resume and guards. ``contract`` checks, before anything else is imported, that the
installed TRL has what we build on.
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
    """Import TRL on first use: listing runs and reading checkpoints do not need it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        import trl  # noqa: F401
    except ImportError as error:
        raise ImportError("troll.trl needs TRL. In a clone of troll, run: pip install -e '.[trl]'") from error
    from troll.trl import contract

    contract.check()
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
