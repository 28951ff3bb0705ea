"""verl in one environment with TRL: verl patches a class that TRL has dropped, and cannot build any model then.

verl 0.9 asks whether TRL is installed and imports ``AutoModelForCausalLMWithValueHead`` from it. Here it asks whether
TRL has that class.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from verl.models.transformers import monkey_patch


@cache
def has_value_head() -> bool:
    """Whether TRL has the class that verl looks for, where verl looks for it."""
    for name in ("trl.experimental.ppo", "trl"):
        try:
            import_module(name).AutoModelForCausalLMWithValueHead  # noqa: B018
        except (ImportError, AttributeError):
            continue
        return True
    return False


monkey_patch.is_trl_available = has_value_head
