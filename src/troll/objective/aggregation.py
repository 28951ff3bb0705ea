"""Values per token → one number, by the estimator's own rule. Sums run over the counted tokens of ``loss_mask``.

rule                       formula                                        also known as
``token_mean``             Σ_i Σ_t x / Σ_i |o_i|                          DAPO, BNPO; verl ``token-mean``
``sequence_mean``          mean_i ( Σ_t x / |o_i| )                       GRPO; verl ``seq-mean-token-mean``
``sequence_sum``           mean_i ( Σ_t x )                               verl ``seq-mean-token-sum``
``constant``               Σ_i Σ_t x / (B L), L = ``max_length``          Dr.GRPO; verl ``seq-mean-token-sum-norm``

Sequences without a counted token are padding: they add nothing and do not count in a mean over sequences.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from troll.errors import InputError, require_choice
from troll.inputs import describe, is_number, require_count, require_floats, require_same_device, require_tensor

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


def aggregate(
    values: Tensor,
    loss_mask: Tensor,
    rule: Aggregation = "token_mean",
    *,
    max_length: int | None = None,
    total: float | Tensor | None = None,
) -> Tensor:
    """Aggregate ``values`` [B, T] over the counted tokens of the boolean ``loss_mask`` [B, T].

    Args:
        values: one number per token; what lies outside the mask is not read and gets no gradient.
        loss_mask: which tokens count.
        rule: see above.
        max_length: the constant L of ``"constant"``, the longest completion the run allows.
        total: what the sum is divided by in place of this batch's own count: tokens for ``"token_mean"``, sequences
            for the others. With the count of the whole batch, the losses of its micro-batches add up to its loss.
    """
    _check(rule, max_length, total)
    require_floats("values", values, "[B, T]", "Pass one number per token")
    require_tensor("loss_mask", loss_mask, "[B, T]")
    if values.shape != loss_mask.shape or values.dim() < 1:
        raise InputError(
            f"values and loss_mask must have the same shape [B, T], got {list(values.shape)} and "
            f"{list(loss_mask.shape)}",
            "Pass one number and one entry of the mask per token",
        )
    require_same_device("values", values, "loss_mask", loss_mask)
    counted = loss_mask.bool()
    lengths = counted.sum(-1)
    sums = torch.where(counted, values, 0.0).sum(-1) / _divisor(lengths, rule, max_length)
    return sums.sum() / _total(lengths, rule, total)


def token_weights(
    loss_mask: Tensor,
    rule: Aggregation = "token_mean",
    *,
    max_length: int | None = None,
    total: float | Tensor | None = None,
) -> Tensor:
    """What each token counts for, [B, T]: ``aggregate`` of any values is Σ weight · value."""
    _check(rule, max_length, total)
    counted = loss_mask.bool()
    lengths = counted.sum(-1, keepdim=True)
    weight = 1.0 / (_divisor(lengths, rule, max_length) * _total(lengths, rule, total))
    return torch.where(counted, weight, 0.0)


def _divisor(lengths: Tensor, rule: Aggregation, max_length: int | None) -> Tensor | int:
    """What the sum over a sequence is divided by."""
    return lengths.clamp(min=1) if rule == "sequence_mean" else max_length or 1


def _total(lengths: Tensor, rule: Aggregation, total: float | Tensor | None) -> Tensor:
    """What the sum over sequences is divided by; 1 where there is nothing to divide."""
    if total is None:
        total = lengths.sum() if rule == "token_mean" else (lengths > 0).sum()
    total = torch.as_tensor(total, device=lengths.device)
    return torch.where(total > 0, total, 1)


def _check(rule: Aggregation, max_length: int | None, total: float | Tensor | None) -> None:
    require_choice("aggregation", rule, get_args(Aggregation))
    if rule == "constant" and max_length is None:
        raise InputError(
            "aggregation='constant' needs max_length, the length of the longest completion the run allows",
            "Pass max_length, or use aggregation='token_mean'",
        )
    if max_length is not None:
        require_count("max_length", max_length, "Pass the length of the longest completion the run allows")
        if rule != "constant":
            raise InputError(
                f"max_length={max_length} has no effect with aggregation={rule!r}",
                "Leave max_length out, or use aggregation='constant'",
            )
    if total is not None and not (total.numel() == 1 if isinstance(total, Tensor) else is_number(total)):
        raise InputError(
            f"total must be one number, got {describe(total)}",
            "Pass the number of tokens (or sequences) of the whole batch, or leave it out",
        )
