"""Lets verl build models in an environment that also has a recent TRL.

verl 0.9 patches TRL's ``AutoModelForCausalLMWithValueHead`` whenever TRL is installed. Recent versions of TRL no longer
have that class, so that verl fails with an ``ImportError`` for every model. ``troll train --engine verl`` needs both
packages in one environment: it takes its flags from TRL's configuration. Importing this module replaces verl's question
"is TRL installed?" by "does TRL have that class?".
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from verl.models.transformers import monkey_patch


@cache
def has_value_head() -> bool:
    """Whether the installed TRL has the class that verl patches, in one of the two modules verl imports it from."""
    for name in ("trl.experimental.ppo", "trl"):
        try:
            import_module(name).AutoModelForCausalLMWithValueHead  # noqa: B018
        except (ImportError, AttributeError):
            continue
        return True
    return False


monkey_patch.is_trl_available = has_value_head
