"""Dropout, which no trust region can be measured with."""

from __future__ import annotations

import torch

from troll.errors import InputError


def check_dropout(model: torch.nn.Module, hint: str) -> None:
    """Refuse a model with dropout: scored twice, it would differ from itself, and the bound would act on noise."""
    for name, module in model.named_modules():
        names = ["p"] if isinstance(module, torch.nn.Dropout) else [key for key in vars(module) if "drop" in key]
        for key in names:
            value = getattr(module, key)
            if isinstance(value, float) and value > 0:
                raise InputError(
                    f"a model with dropout ({name}.{key}={value})",
                    "none: a rollout is scored twice, and KL > 0 before the first update would be noise",
                    hint,
                )
