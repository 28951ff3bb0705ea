"""A run that goes on with another learning rate: a checkpoint brings back the one it was made with."""

from __future__ import annotations

from typing import Any


def renew(trainer: Any) -> None:
    """Give the optimizer and the schedule that a checkpoint has brought the settings of now.

    Their state stays: moments, and how far the schedule has come. For an optimizer that the trainer made itself.
    """
    args, groups, schedule = trainer.args, trainer.optimizer.param_groups, trainer.lr_scheduler
    _, named = trainer.get_optimizer_cls_and_kwargs(args, trainer.model)
    factors = [factor(schedule.last_epoch) for factor in getattr(schedule, "lr_lambdas", [])] or [1.0] * len(groups)
    for group, factor in zip(groups, factors, strict=True):
        group.update({name: value for name, value in named.items() if name in group})
        group["initial_lr"] = args.learning_rate
        group["lr"] = args.learning_rate * factor
    if len(groups) == 2:  # weights, and those that do not decay, as transformers has it
        groups[0]["weight_decay"] = args.weight_decay
    if hasattr(schedule, "base_lrs"):
        schedule.base_lrs = [args.learning_rate] * len(groups)
        schedule._last_lr = [group["lr"] for group in groups]
