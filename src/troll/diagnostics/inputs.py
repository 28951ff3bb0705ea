"""The checked inputs of the diagnostics: which tokens count, numbers per token, pairs of policies."""

from __future__ import annotations

import torch
from torch import Tensor

from troll.errors import InputError
from troll.inputs import require_integers, require_tensor
from troll.objective.batch import Batch
from troll.policy import SparsePolicy
from troll.policy.sparse import require_policy
from troll.projection.geodesic import solver_dtype

__all__ = ["as_mask", "constant", "counted_pair", "per_sequence_ids", "per_token"]


def as_mask(loss_mask: Tensor) -> Tensor:
    """``loss_mask`` [B, T] as bool."""
    require_tensor("loss_mask", loss_mask, "[B, T]")
    if loss_mask.dim() != 2:
        raise InputError(
            f"loss_mask must have shape [B, T], B sequences of T tokens, got {list(loss_mask.shape)}",
            "Pass one row per sequence; for a single one, loss_mask[None]",
        )
    return loss_mask.bool()


def per_token(name: str, x: Tensor, counted: Tensor) -> Tensor:
    """[B, T], or [B] for all tokens of a sequence → [B, T] in double precision, detached; 0 where nothing counts.

    What does not count is not read and may be anything; NaN where it counts is refused.
    """
    require_tensor(name, x, "[B, T] or [B]")
    if x.shape not in (counted.shape, counted.shape[:1]):
        raise InputError(
            f"{name} must be one number per token or sequence of loss_mask {list(counted.shape)}, got {list(x.shape)}",
            "Cut both to the completion tokens, without the prompt",
        )
    wide = x.detach().to(counted.device, solver_dtype(x))
    numbers = torch.where(counted, wide if wide.dim() == 2 else wide[:, None], 0.0)
    if bool(numbers.isnan().any()):
        at = numbers.isnan().nonzero()[0].tolist()
        raise InputError(
            f"{name} is NaN at position {at}, which loss_mask counts", "Find out why, or mask that token out"
        )
    return numbers


def per_sequence_ids(name: str, ids: Tensor, sequences: int) -> Tensor:
    """Integer ids [B], one per sequence."""
    fix = "Use torch.arange(B) // G for blocks of G completions of a prompt"
    require_integers(name, ids, "[B], one integer per sequence", fix)
    if ids.shape != (sequences,):
        raise InputError(f"{name} must be one integer per sequence, shape [{sequences}], got {list(ids.shape)}", fix)
    return ids


def counted_pair(proposal: SparsePolicy, old: SparsePolicy, loss_mask: Tensor) -> Tensor:
    """Which tokens [B, T] count; refuses two policies that are not of the same tokens, as the losses do."""
    require_tensor("loss_mask", loss_mask, "[B, T]")
    require_policy("old", old, "Make it with troll.sparsify(old_logits, sampled)")
    nothing = old.log_tail.new_zeros(old.shape)
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
