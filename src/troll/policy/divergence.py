"""Divergences between token distributions, each defined once.

All take log-probabilities over the same support and reduce the last dimension. The argument order is the order of the
formula: the expectation is taken under the first. ``-inf`` marks a token outside the support.
"""

from __future__ import annotations

import torch
from torch import Tensor

from troll.errors import InputError
from troll.inputs import require_floats, require_same_device

# e⁻ᵈ − 1 + d = d²/2 − d³/6 + …: for |d| < 0.03 eight terms are exact to the last bit of a double (the ninth is below
# 0.03⁸ / 3628800 · 2 ≈ 4e-19 of the sum), and the closed form would lose digits to cancellation.
_SERIES_BELOW = 0.03
_SERIES = (1 / 2, -1 / 6, 1 / 24, -1 / 120, 1 / 720, -1 / 5040, 1 / 40320, -1 / 362880)


def _excess(d: Tensor) -> Tensor:
    """e⁻ᵈ − 1 + d ≥ 0 for d ≥ −1, to full relative precision also where d is tiny."""
    small = d.clamp(-_SERIES_BELOW, _SERIES_BELOW)
    series = torch.full_like(small, _SERIES[-1])
    for coefficient in reversed(_SERIES[:-1]):
        series = series * small + coefficient
    return torch.where(d.abs() < _SERIES_BELOW, small * small * series, d + torch.expm1(-d))


def kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The terms p (d + e⁻ᵈ − 1), d = log p − log q, whose sum over the support is KL(p ‖ q).

    They differ from p d by q − p, which sums to zero, and each is ≥ 0: the sum cannot turn negative by rounding, as
    Σ p d does in fp32 below 1e-6, and it does not feel a rounding error in the normalisation of p or q.
    """
    d = torch.where(log_p == log_q, 0.0, log_p - log_q)  # also where both are -inf
    missing = d == torch.inf  # in q, be p too small a number for exp; set apart, or 0 · inf is NaN, here or backward
    d = d.masked_fill(missing, 0.0)
    # p → 0: p e⁻ᵈ is written q, so that nothing overflows; below d = −100 the term is q to the last bit of a double.
    below = d.clamp(-100.0, -1.0)
    vanishing = log_q.exp() * (1.0 - (1.0 - below) * below.exp())
    terms = torch.where(d < -1.0, vanishing, log_p.exp() * _excess(d.clamp(min=-1.0)))
    return terms.masked_fill(missing, torch.inf)


def _check_pair(log_p: Tensor, log_q: Tensor) -> None:
    for name, x in (("log_p", log_p), ("log_q", log_q)):
        require_floats(name, x, "of log-probabilities [..., K]", "Pass log-probabilities: logits.log_softmax(-1)")
    different = log_p.shape != log_q.shape
    if log_p.dim() == 0 or log_q.dim() == 0 or (different and not _broadcast(log_p.shape, log_q.shape)):
        raise InputError(
            f"log_p and log_q must have the same shape [..., K], got {list(log_p.shape)} and {list(log_q.shape)}",
            "Pass log-probabilities of the same tokens at the same positions",
        )
    require_same_device("log_p", log_p, "log_q", log_q)


def _broadcast(a: torch.Size, b: torch.Size) -> bool:
    return all(m in (n, 1) or n == 1 for m, n in zip(reversed(a), reversed(b), strict=False))


def token_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) = Σ p (log p − log q) per token, [..., K] → [...]; ``inf`` where p has mass that q has not."""
    _check_pair(log_p, log_q)
    return kl_terms(log_p, log_q).sum(-1)


def sequence_kl(kl: Tensor, loss_mask: Tensor) -> Tensor:
    """Σ_t KL_t over the counted tokens of each sequence, [B, T] → [B].

    By the chain rule its expectation over sequences drawn from p is the KL of the two sequence distributions.
    """
    return torch.where(loss_mask.bool(), kl, 0.0).sum(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """TV(p, q) = ½ Σ |p − q| per token, [..., K] → [...]."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def entropy(log_p: Tensor) -> Tensor:
    """H(p) = −Σ p log p per token, [..., K] → [...]."""
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
