"""What the diagnostics are given, checked once: which tokens count, numbers per token, pairs of policies."""

from __future__ import annotations

import torch
from torch import Tensor

from troll.errors import InputError
from troll.objective.batch import Batch
from troll.policy import SparsePolicy
from troll.projection.geodesic import solver_dtype

__all__ = ["as_mask", "constant", "counted_pair", "per_sequence_ids", "per_token"]


def as_mask(loss_mask: Tensor) -> Tensor:
    """``loss_mask`` [B, T] as bool."""
    if loss_mask.dim() != 2:
        raise InputError(
            f"Got loss_mask {list(loss_mask.shape)}, expected [B, T]: B sequences of T tokens",
            "Pass loss_mask[None] for one sequence",
        )
    return loss_mask.bool()


def per_token(name: str, x: Tensor, counted: Tensor) -> Tensor:
    """[B, T], or [B] for all tokens of a sequence → [B, T] in double precision, detached; 0 where nothing counts.

    What does not count is not read and may be anything; NaN where it counts is refused.
    """
    if x.shape not in (counted.shape, counted.shape[:1]):
        raise InputError(
            f"Got {name} {list(x.shape)} for a loss_mask {list(counted.shape)}"
            ", expected one number per token [B, T], or per sequence [B]",
            "Cut both to the completion tokens, without the prompt",
        )
    wide = x.detach().to(counted.device, solver_dtype(x))
    numbers = torch.where(counted, wide if wide.dim() == 2 else wide[:, None], 0.0)
    if bool(numbers.isnan().any()):
        at = numbers.isnan().nonzero()[0].tolist()
        raise InputError(
            f"Got {name} NaN at position {at}, which loss_mask counts, expected numbers", "Mask that token out"
        )
    return numbers


def per_sequence_ids(name: str, ids: Tensor, sequences: int) -> Tensor:
    """Integer ids [B], one per sequence."""
    if ids.shape != (sequences,) or ids.is_floating_point():
        raise InputError(
            f"Got {name} {list(ids.shape)} of {ids.dtype} for {sequences} sequences"
            f", expected one integer per sequence [{sequences}]",
            "Use torch.arange(B) // G for blocks of G completions of a prompt",
        )
    return ids


def counted_pair(proposal: SparsePolicy, old: SparsePolicy, loss_mask: Tensor) -> Tensor:
    """Which tokens [B, T] count; refuses two policies that are not of the same tokens, as the losses do."""
    nothing = torch.zeros_like(loss_mask, dtype=old.log_probs.dtype)
    return Batch.of(proposal, old, nothing, loss_mask, None, "raise").counted


def constant(policy: SparsePolicy) -> SparsePolicy:
    """The same policy in double precision, without gradient."""
    dtype = solver_dtype(policy.log_probs)
    return SparsePolicy.trusted(
        policy.token_ids,
        policy.log_probs.detach().to(dtype),
        policy.log_tail.detach().to(dtype),
        policy.vocab_size,
        policy.temperature,
        policy.made_by,
    )
