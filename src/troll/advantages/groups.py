"""Samples of the same prompt form a group, and the group is the baseline: A = r − mean_G r, up to a scale.

A batch of B samples is grouped in one of two ways, and both come out as the same pair (group_of [B], sizes [N]):

- ``groups`` an int G: consecutive blocks of G samples, TRL's layout;
- ``groups`` an integer tensor [B] of group ids: any order, any sizes ≥ 2, verl's ``uid``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from troll.advantages.inputs import require_same_device
from troll.errors import InputError

__all__ = ["Grouping", "group_deviation", "group_samples", "group_sum"]


class Grouping(NamedTuple):
    """Which of N groups each of B samples belongs to."""

    group_of: Tensor  # [B] in 0 … N−1
    sizes: Tensor  # [N], each ≥ 2


def group_samples(groups: int | Tensor, rewards: Tensor) -> Grouping:
    """Return the grouping of ``rewards`` [B] that ``groups`` describes; refuse groups of a single sample."""
    B = rewards.shape[0]
    if isinstance(groups, Tensor):
        _require_ids(groups, rewards)
        ids, group_of, sizes = torch.unique(groups.long(), return_inverse=True, return_counts=True)
    elif isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 1 or B % groups != 0:
            raise InputError(
                f"Got groups={groups} with B={B} rewards, expected a group size ≥ 2 that divides B",
                "Try a tensor [B] of group ids if the groups are of unequal size",
            )
        ids = torch.arange(B // groups, device=rewards.device)
        group_of, sizes = ids.repeat_interleave(groups), torch.full_like(ids, groups)
    else:
        raise InputError(
            f"Got groups of type {type(groups).__name__}"
            ", expected an int, the group size, or an integer tensor [B] of group ids",
            "Try for string ids: torch.as_tensor(numpy.unique(uid, return_inverse=True)[1])",
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


def _require_ids(groups: Tensor, rewards: Tensor) -> None:
    if groups.is_floating_point() or groups.is_complex() or groups.dtype == torch.bool:
        raise InputError(f"Got groups of dtype {groups.dtype}, expected integer group ids", "Try groups.long()")
    if groups.shape != rewards.shape:
        raise InputError(
            f"Got groups of shape {tuple(groups.shape)} with rewards of shape {tuple(rewards.shape)}"
            ", expected one group id per reward, [B]",
            "Try an int if the groups are consecutive blocks of one size",
        )
    require_same_device("rewards", rewards, "groups", groups)


def _require_two_each(ids: Tensor, group_of: Tensor, sizes: Tensor) -> None:
    single = sizes == 1
    if single.any():
        n = int(single.nonzero()[0])
        raise InputError(
            f"Got group {int(ids[n])} with a single sample, rewards[{int((group_of == n).nonzero()[0])}]"
            f" ({int(single.sum())} such groups)"
            ", expected at least 2 samples in every group: one sample has no baseline",
            "Try at least 2 samples per prompt, or reinforce_pp, which needs no groups",
        )
