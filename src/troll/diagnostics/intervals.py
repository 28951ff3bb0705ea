"""A mean over sequences, and how far it may be from what it estimates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from troll.diagnostics.inputs import per_sequence_ids
from troll.errors import InputError

__all__ = ["Estimate", "estimate_mean"]


@dataclass(frozen=True)
class Estimate:
    """A mean over sequences with its normal confidence interval."""

    value: float
    standard_error: float
    """NaN with a single sequence, or a single group."""
    low: float
    high: float


def estimate_mean(values: Tensor, groups: Tensor | None = None, *, confidence: float = 0.95) -> Estimate:
    """Mean of independent ``values`` [B], and mean ± z · s, with z the normal quantile and s its standard error:

        s² = M/(M−1) Σ_g ( Σ_{i∈g} (x_i − mean) )² / B²

    over M groups of values that may depend on each other, such as the completions of a prompt; without ``groups`` each
    value is one of its own and s² is the variance over B. For a few dozen values and more: with fewer, or where single
    values dominate, the interval is too short.

    Args:
        values: [B] one number per sequence.
        groups: [B] integer ids: values with the same id are not independent.
        confidence: probability that the interval covers the expectation.
    """
    if values.dim() != 1 or values.numel() == 0:
        raise InputError(
            f"Got values {list(values.shape)}, expected one number per sequence [B], at least one", "Try another batch"
        )
    if not 0 < confidence < 1:
        raise InputError(
            f"Got confidence={confidence}, expected a probability between 0 and 1", "Try 0.95, the default"
        )
    x = values.detach()
    mean = x.mean()
    deviation = x - mean
    if groups is not None:
        ids = per_sequence_ids("groups", groups, len(x)).to(x.device)
        member = torch.unique(ids, return_inverse=True)[1]
        deviation = x.new_zeros(int(member.max()) + 1).index_add(0, member, deviation)
    M = len(deviation)
    error = math.sqrt(M / (M - 1) * float(deviation.square().sum())) / len(x) if M > 1 else math.nan
    half = NormalDist().inv_cdf((1 + confidence) / 2) * error
    return Estimate(float(mean), error, float(mean) - half, float(mean) + half)


def effective_share(log_weights: Tensor) -> float:
    """Effective sample size of importance weights over their number, (Σw)² / (n Σw²), from log w [n]: 1/n to 1."""
    n = log_weights.numel()
    both = torch.stack([log_weights, 2 * log_weights]).logsumexp(-1)
    return float((2 * both[0] - both[1]).exp()) / n if n else math.nan
