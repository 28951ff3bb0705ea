"""Advantages from one reward per sample and several samples per prompt.

All four estimators start from the deviation dᵢ = rᵢ − mean_G r and differ in its scale: the mean reward of the samples
of a prompt is the baseline. A batch of B samples is grouped in exactly one of two ways:

- ``group_size`` G: consecutive blocks of G samples, TRL's layout;
- ``groups``, an integer tensor [B] of group ids: any order, any sizes ≥ 2, verl's ``uid``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from troll.advantages.inputs import as_mask, as_rewards, require_eps, require_finite
from troll.advantages.returns import whiten
from troll.errors import InputError
from troll.inputs import describe, is_integer, require_same_device

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


class Grouping(NamedTuple):
    """Which of N groups each of B samples belongs to."""

    group_of: Tensor  # [B] in 0 … N−1
    sizes: Tensor  # [N], each ≥ 2


def group_samples(groups: Tensor | None, group_size: int | None, rewards: Tensor) -> Grouping:
    """Return the grouping of ``rewards`` [B] by ids or by size; refuse groups of a single sample."""
    if (groups is None) == (group_size is None):
        raise InputError(
            f"Exactly one of groups and group_size is required, got {'neither' if groups is None else 'both'}",
            "Pass group_size=G for consecutive blocks of G samples, or groups=ids, an integer tensor [B]",
        )
    if group_size is not None:
        _require_size(group_size, rewards)
        ids = torch.arange(len(rewards) // group_size, device=rewards.device)
        group_of, sizes = ids.repeat_interleave(group_size), torch.full_like(ids, group_size)
    else:
        ids, group_of, sizes = torch.unique(
            _require_ids(groups, rewards).long(), return_inverse=True, return_counts=True
        )
    _require_two_each(ids, group_of, sizes)
    return Grouping(group_of, sizes)


def group_sum(x: Tensor, grouping: Grouping) -> Tensor:
    """Return Σ_{i∈G} xᵢ for each group, [N].

    On CUDA the order of the additions varies from run to run, unless ``torch.use_deterministic_algorithms`` is on.
    """
    return x.new_zeros(grouping.sizes.shape).index_add_(0, grouping.group_of, x)


def group_deviation(rewards: Tensor, grouping: Grouping) -> Tensor:
    """Return r − mean_G r, [B].

    Computed on r − min_G r, which has the same deviations. In a group of equal rewards this is exactly 0 and stays so;
    the rounded mean of three times 0.1 is not 0.1.
    """
    group_of, sizes = grouping
    lowest = rewards.new_zeros(sizes.shape).scatter_reduce_(0, group_of, rewards, "amin", include_self=False)  # [N]
    above = rewards - lowest[group_of]  # [B], ≥ 0
    return above - (group_sum(above, grouping) / sizes)[group_of]


def _require_size(group_size: object, rewards: Tensor) -> None:
    B = len(rewards)
    if not is_integer(group_size) or group_size < 1 or B % group_size != 0:  # type: ignore[operator]
        raise InputError(
            f"group_size must be an integer ≥ 2 that divides the number of rewards, {B}, got {describe(group_size)}",
            "If the groups have different sizes, pass groups=ids, an integer tensor [B]",
        )


def _require_ids(groups: object, rewards: Tensor) -> Tensor:
    if isinstance(groups, int) and not isinstance(groups, bool):
        raise InputError(
            f"groups must be a tensor of group ids, got the int {groups}",
            f"If every group has {groups} consecutive samples, pass group_size={groups}",
        )
    if not isinstance(groups, Tensor):
        raise InputError(
            f"groups must be an integer tensor [B] of group ids, got {describe(groups)}",
            "Convert other ids with torch.as_tensor(numpy.unique(ids, return_inverse=True)[1])",
        )
    if groups.is_floating_point() or groups.is_complex() or groups.dtype == torch.bool:
        raise InputError(f"groups must contain integer ids, got {groups.dtype}", "Convert them with groups.long()")
    if groups.shape != rewards.shape:
        raise InputError(
            f"groups must have one id per reward, got shape {tuple(groups.shape)} for rewards of shape "
            f"{tuple(rewards.shape)}",
            "If the groups are consecutive blocks of G samples, pass group_size=G",
        )
    require_same_device("rewards", rewards, "groups", groups)
    return groups


def _require_two_each(ids: Tensor, group_of: Tensor, sizes: Tensor) -> None:
    single = sizes == 1
    if single.any():
        n = int(single.nonzero()[0])
        raise InputError(
            f"Group {int(ids[n])} has a single sample, rewards[{int((group_of == n).nonzero()[0])}], and so no baseline"
            f" (groups of one sample: {int(single.sum())} of {len(sizes)})",
            "Sample at least 2 completions per prompt, or use reinforce_pp, which needs no groups",
        )
