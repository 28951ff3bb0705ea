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
    _check(rule, max_length)
    if values.shape != loss_mask.shape:
        raise InputError(
            f"Got values {list(values.shape)} and loss_mask {list(loss_mask.shape)}, expected [B, T] for both",
            "Pass values.expand(B, T)",
        )
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
    _check(rule, max_length)
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


def _check(rule: Aggregation, max_length: int | None) -> None:
    require_choice("aggregation", rule, get_args(Aggregation))
    if (rule == "constant") != (max_length is not None):
        raise InputError(
            f"Got aggregation={rule!r} with max_length={max_length}"
            ", expected max_length with 'constant', and only there",
            "Pass the length of the longest completion the run allows as max_length, or aggregation='token_mean'",
        )
    if max_length is not None and max_length < 1:
        raise InputError(
            f"Got max_length={max_length}, expected at least 1 token",
            "Use the length of the longest completion the run allows",
        )
