"""Advantages of TRL's rewards by the estimators of ``troll.advantages``, where some samples have no reward."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from troll import advantages

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]


def estimate(estimator: Estimator, rewards: Tensor, group_size: int, loss_mask: Tensor) -> Tensor:
    """Return the advantages of all samples of a rollout, [B] or [B, T].

    Args:
        estimator: any but ``"grpo"``, which TRL computes itself.
        rewards: [B], NaN where no reward function scored the sample: its advantage is 0 and no baseline includes it.
        group_size: number of consecutive samples of one prompt.
        loss_mask: [B, T].
    """
    scored = ~rewards.isnan()
    if estimator == "reinforce_pp":
        usable = scored & loss_mask.any(-1)
        last = loss_mask.shape[1] - 1 - loss_mask.int().flip(1).argmax(-1)  # the last token that counts
        token_rewards = torch.zeros_like(loss_mask, dtype=rewards.dtype)
        token_rewards[usable, last[usable]] = rewards[usable]
        result = torch.zeros_like(token_rewards)
        if int(loss_mask[usable].sum()) > 1:
            result[usable] = advantages.reinforce_pp(token_rewards[usable], loss_mask[usable])
        return result
    group = torch.arange(len(rewards), device=rewards.device) // group_size
    usable = scored & (torch.bincount(group[scored], minlength=len(rewards))[group] > 1)
    if estimator == "reinforce_pp_baseline":
        result = torch.zeros_like(loss_mask, dtype=rewards.dtype)
        if int(loss_mask[usable].sum()) > 1:
            result[usable] = advantages.reinforce_pp_baseline(rewards[usable], loss_mask[usable], group[usable])
        return result
    per_sample = {"dr_grpo": advantages.dr_grpo, "rloo": advantages.rloo}[estimator]
    result = torch.zeros_like(rewards)
    if bool(usable.any()):
        result[usable] = per_sample(rewards[usable], group[usable])
    return result
