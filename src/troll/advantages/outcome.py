"""Advantages from one reward per sample and several samples per prompt.

All four estimators start from the deviation dᵢ = rᵢ − mean_G r and differ in its scale. The groups are given as exactly
one of ``groups``, an integer tensor [B] of ids, and ``group_size``, for consecutive blocks of equal size. Every group
needs at least two samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from troll.advantages.groups import group_deviation, group_samples, group_sum
from troll.advantages.inputs import as_mask, as_rewards, require_eps, require_finite
from troll.advantages.returns import whiten
from troll.errors import InputError
from troll.inputs import require_same_device

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["dr_grpo", "grpo", "reinforce_pp_baseline", "rloo"]


def grpo(rewards: Tensor, groups: Tensor | None = None, *, group_size: int | None = None, eps: float = 1e-4) -> Tensor:
    """Return Aᵢ = (rᵢ − mean_G r) / (std_G r + eps), GRPO (arXiv 2402.03300).

    The standard deviation is the unbiased one, 1/(G−1), as in TRL and verl. A group of equal rewards gives exactly 0.
    Dividing by it weighs prompts that are nearly always or nearly never solved more; :func:`dr_grpo` does not.

    Args:
        rewards: [B] finite rewards.
        groups: [B] integer group ids.
        group_size: G, for consecutive blocks of G samples.
        eps: added to the standard deviation; 1e-4 in TRL, 1e-6 in verl.

    Returns:
        [B] a detached constant in float32 (float64 if ``rewards`` is).
    """
    require_eps(eps, 1e-4)
    r = as_rewards(rewards)
    grouping = group_samples(groups, group_size, r)
    deviation = group_deviation(r, grouping)  # [B]
    variance = group_sum(deviation.square(), grouping) / (grouping.sizes - 1)  # [N]
    # An overflow would be silent: σ = ∞ makes every advantage of the group 0.
    std = require_finite("variance", variance).sqrt()
    return deviation / (std[grouping.group_of] + eps)


def dr_grpo(rewards: Tensor, groups: Tensor | None = None, *, group_size: int | None = None) -> Tensor:
    """Return Aᵢ = rᵢ − mean_G r, Dr. GRPO (arXiv 2503.20783): GRPO without the division by the standard deviation.

    Args:
        rewards: [B] finite rewards.
        groups: [B] integer group ids.
        group_size: G, for consecutive blocks of G samples.

    Returns:
        [B] a detached constant in float32 (float64 if ``rewards`` is).
    """
    r = as_rewards(rewards)
    return require_finite("group mean", group_deviation(r, group_samples(groups, group_size, r)))


def rloo(rewards: Tensor, groups: Tensor | None = None, *, group_size: int | None = None) -> Tensor:
    """Return Aᵢ = rᵢ − mean_{j∈G, j≠i} rⱼ, REINFORCE leave-one-out (arXiv 2402.14740).

    Since Σ_{j≠i} rⱼ = G·mean_G r − rᵢ, this is G/(G−1) · (rᵢ − mean_G r), which is how it is computed. The baseline
    does not depend on the sample it is subtracted from: the policy gradient is unbiased.

    Args:
        rewards: [B] finite rewards.
        groups: [B] integer group ids.
        group_size: G, for consecutive blocks of G samples.

    Returns:
        [B] a detached constant in float32 (float64 if ``rewards`` is).
    """
    r = as_rewards(rewards)
    grouping = group_samples(groups, group_size, r)
    factor = (grouping.sizes / (grouping.sizes - 1).to(r.dtype))[grouping.group_of]  # [B]
    return require_finite("group mean", factor * group_deviation(r, grouping))


def reinforce_pp_baseline(
    rewards: Tensor, loss_mask: Tensor, groups: Tensor | None = None, *, group_size: int | None = None
) -> Tensor:
    """Return rᵢ − mean_G r on every counted token of sample i, whitened over the batch (arXiv 2501.03262).

    Whitening is :func:`troll.advantages.whiten` over tokens: a long completion enters μ and σ once per token.

    Args:
        rewards: [B] finite rewards.
        loss_mask: [B, T] 1 where a token counts.
        groups: [B] integer group ids.
        group_size: G, for consecutive blocks of G samples.

    Returns:
        [B, T] a detached constant in float32 (float64 if ``rewards`` is), 0 outside the mask.
    """
    r = as_rewards(rewards)
    mask = as_mask(loss_mask)
    if mask.shape[0] != r.shape[0]:
        raise InputError(
            f"loss_mask must have one row per reward, got shape {tuple(mask.shape)} for {len(r)} rewards",
            "Pass the rewards and the completions in the same order, one reward per completion",
        )
    require_same_device("rewards", r, "loss_mask", mask)
    deviation = require_finite("group mean", group_deviation(r, group_samples(groups, group_size, r)))
    return whiten(deviation[:, None].expand(mask.shape), mask)
