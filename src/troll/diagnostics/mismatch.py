"""Do sampler and trainer agree? Log-probabilities of the sampled tokens by the engine that sampled them, π_s, and by
the trainer before the first update, π_old.

With δ = log π_old − log π_s of a sampled token and w = exp δ its importance weight, estimates of KL(π_s ‖ π_old) per
token are the means (Schulman, "Approximating KL divergence", 2020)

    k1 = −δ          unbiased, may be negative
    k2 = δ² / 2      biased, varies less
    k3 = w − 1 − δ   unbiased and never negative

An effective sample size of (Σw)² / Σw², given as share of the number, is 1 where the engines agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from troll.diagnostics.inputs import as_mask, per_token
from troll.diagnostics.sequences import effective_share
from troll.errors import InputError
from troll.inputs import require_tensor

__all__ = ["Mismatch", "sampler_mismatch"]

_ABOVE_ONE = 1e-3  # rounding of log-probabilities near 0; logits are far above


@dataclass(frozen=True)
class Mismatch:
    """What the counted tokens say about the distance from sampler to trainer."""

    tokens: int
    mean_difference: float
    """Mean of |δ|."""
    max_difference: float
    """Largest |δ|."""
    k1: float
    k2: float
    k3: float
    effective_tokens: float
    """Effective sample size of the tokens' weights, share of the tokens."""
    effective_sequences: float
    """Of the sequences' weights Π_t w, share of the sequences that have a counted token."""
    outside: float
    """Share of tokens whose weight is below 1/2 or above 2."""


def sampler_mismatch(sampler: Tensor, trainer: Tensor, loss_mask: Tensor) -> Mismatch:
    """Compare what the engine that sampled a rollout and the trainer say about its tokens.

    Args:
        sampler: [B, T] log-probabilities of the sampled tokens as the engine reported them (vLLM's ``logprobs``).
        trainer: [B, T] the same by the trainer's network before the first update: ``old.sampled_log_probs``.
        loss_mask: [B, T] which tokens count.
    """
    counted = as_mask(loss_mask)
    log_probs = [_log_probs(name, x, counted) for name, x in (("sampler", sampler), ("trainer", trainer))]
    by_token = log_probs[1] - log_probs[0]
    delta = by_token[counted]
    if not delta.numel():
        raise InputError("loss_mask counts no token", "Pass a batch with at least one counted token")
    by_sequence = by_token.sum(-1)[counted.any(-1)]
    weight = delta.exp()
    return Mismatch(
        tokens=delta.numel(),
        mean_difference=float(delta.abs().mean()),
        max_difference=float(delta.abs().max()),
        k1=float(-delta.mean()),
        k2=float(delta.square().mean() / 2),
        k3=float((torch.expm1(delta) - delta).mean()),
        effective_tokens=effective_share(delta),
        effective_sequences=effective_share(by_sequence),
        outside=float(((weight < 0.5) | (weight > 2)).double().mean()),
    )


def _log_probs(name: str, x: Tensor, counted: Tensor) -> Tensor:
    require_tensor(name, x, "[B, T]")
    if x.shape != counted.shape:
        raise InputError(
            f"{name} must have the log-probability of each sampled token, shape {list(counted.shape)} as loss_mask, "
            f"got {list(x.shape)}",
            "Use log_probs.gather(-1, sampled[..., None])[..., 0]",
        )
    numbers = per_token(name, x, counted)
    wrong = ~(numbers.isfinite() & (numbers <= _ABOVE_ONE))
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        raise InputError(
            f"{name} must be finite log-probabilities ≤ 0, got {float(numbers[tuple(at)]):.4g} at position {at}",
            "Use logits.log_softmax(-1), at the temperature of the rollout and without top-k or top-p truncation",
        )
    return numbers
