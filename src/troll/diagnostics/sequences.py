"""How far apart are two policies over whole completions? Sequence KL from completions that the old one sampled.

With o a completion drawn from π_old, r_t = π̃(o_t)/π_old(o_t), w_t = Π_{s≤t} r_s, and KL_t the KL of the distributions
of token t, given what stands before it, the chain rule gives four sums whose expectations are a KL of completions:

    KL(π_old ‖ π̃)   token KLs    Σ_t KL_t(π_old ‖ π̃)              log-ratio    −Σ_t log r_t
    KL(π̃ ‖ π_old)   token KLs    Σ_t w_{t−1} KL_t(π̃ ‖ π_old)      log-ratio    Σ_t w_t log r_t

The second line needs the weights w, as the completions are not the proposal's; each token has those of the tokens
before it alone, which is enough and varies less than the weight of the whole. Log-ratios depend on the one token that
was sampled and vary more, as a rule. Without w, Σ_t KL_t(π̃ ‖ π_old), the metric ``sequence_kl_before``, is neither.

All of this is for completions drawn apart from the proposal. One that was trained on them made some more probable, and
their ratios are no longer those of a fresh sample.

Where a policy dropped tokens, the token KLs are those of ``align``: with ``tail="bucket"`` at most the true ones. The
log-ratios are those of the full softmax and stay unbiased.

``sampler_mismatch`` compares log-probabilities of the sampled tokens by the engine that sampled them, π_s, and by the
trainer before the first update, π_old. With δ = log π_old − log π_s of a sampled token and w = exp δ its importance
weight, estimates of KL(π_s ‖ π_old) per token are the means (Schulman, "Approximating KL divergence", 2020)

    k1 = −δ          unbiased, may be negative
    k2 = δ² / 2      biased, varies less
    k3 = w − 1 − δ   unbiased and never negative

An effective sample size of (Σw)² / Σw², given as share of the number, is 1 where the engines agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from troll.diagnostics.inputs import as_mask, constant, counted_pair, per_sequence_ids, per_token
from troll.errors import InputError
from troll.inputs import require_floats, require_number, require_tensor
from troll.policy import SparsePolicy, Tail, align, token_kl

__all__ = [
    "Estimate",
    "Mismatch",
    "SequenceKL",
    "SequenceTerms",
    "estimate_mean",
    "estimate_sequence_kl",
    "sampler_mismatch",
    "sequence_terms",
]

_ABOVE_ONE = 1e-3  # rounding of log-probabilities near 0; logits are far above


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
    require_floats("values", values, "[B], one number per sequence", "Pass floating-point numbers, one per sequence")
    if values.dim() != 1 or values.numel() == 0:
        raise InputError(
            f"values must have one number per sequence, shape [B] with B ≥ 1, got {list(values.shape)}",
            "Pass a batch with at least one counted token",
        )
    _check_confidence(confidence)
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


def _check_confidence(confidence: float) -> None:
    require_number("confidence", confidence, "a probability > 0 and < 1", lambda x: 0 < x < 1, "The default is 0.95")


def effective_share(log_weights: Tensor) -> float:
    """Effective sample size of importance weights over their number, (Σw)² / (n Σw²), from log w [n]: 1/n to 1."""
    n = log_weights.numel()
    both = torch.stack([log_weights, 2 * log_weights]).logsumexp(-1)
    return float((2 * both[0] - both[1]).exp()) / n if n else math.nan


@dataclass(frozen=True, eq=False)
class SequenceTerms:
    """The four sums of each sequence, [B], 0 for one without a counted token; constants."""

    old_to_proposal: Tensor
    """[B] Σ_t KL_t(π_old ‖ π̃)."""
    old_to_proposal_by_ratio: Tensor
    """[B] −Σ_t log r_t."""
    proposal_to_old: Tensor
    """[B] Σ_t w_{t−1} KL_t(π̃ ‖ π_old)."""
    proposal_to_old_by_ratio: Tensor
    """[B] Σ_t w_t log r_t."""
    log_weight: Tensor
    """[B] log w of the whole completion."""


@dataclass(frozen=True)
class SequenceKL:
    """KL of completions between two policies, both ways, from token KLs and from log-ratios."""

    old_to_proposal: Estimate
    """KL(π_old ‖ π̃) from token KLs."""
    old_to_proposal_by_ratio: Estimate
    proposal_to_old: Estimate
    """KL(π̃ ‖ π_old) from token KLs and weights."""
    proposal_to_old_by_ratio: Estimate
    effective_share: float
    """(Σw)² / (B Σw²) of the completions' weights: near 1/B, KL(π̃ ‖ π_old) and its interval are not to be trusted."""


def sequence_terms(
    proposal: SparsePolicy, old: SparsePolicy, loss_mask: Tensor, *, tail: Tail | None = None
) -> SequenceTerms:
    """What each completion says about the KL of completions; see above.

    Args:
        proposal, old: the policies, [B, T], of completions that ``old`` sampled.
        loss_mask: [B, T] which tokens the policy chose.
        tail: how dropped probability is treated in the token KLs; None is the one that fits the proposal.
    """
    counted = counted_pair(proposal, old, loss_mask)
    p, q = constant(proposal), constant(old)
    aligned = align(p, q, tail)

    def sums(x: Tensor) -> Tensor:
        return torch.where(counted, x, 0.0).sum(-1)

    log_ratio = torch.where(counted, p.sampled_log_probs - q.sampled_log_probs, 0.0)
    log_weight = log_ratio.cumsum(-1)
    before = (log_weight - log_ratio).exp()
    return SequenceTerms(
        old_to_proposal=sums(token_kl(aligned.old, aligned.proposal)),
        old_to_proposal_by_ratio=-sums(log_ratio),
        proposal_to_old=sums(before * token_kl(aligned.proposal, aligned.old)),
        proposal_to_old_by_ratio=sums(log_weight.exp() * log_ratio),
        log_weight=sums(log_ratio),
    )


def estimate_sequence_kl(
    proposal: SparsePolicy,
    old: SparsePolicy,
    loss_mask: Tensor,
    *,
    groups: Tensor | None = None,
    tail: Tail | None = None,
    confidence: float = 0.95,
) -> SequenceKL:
    """KL of completions between two policies, averaged over the prompts, with confidence intervals.

    Args:
        proposal, old, loss_mask, tail: as for ``sequence_terms``. A sequence without a counted token is left out.
        groups: [B] which prompt each completion answers. Without them every completion counts as independent of the
            others, and where several answer the same prompt, the interval is too short for other prompts.
        confidence: of the intervals.
    """
    terms = sequence_terms(proposal, old, loss_mask, tail=tail)
    used = loss_mask.bool().any(-1)
    if not bool(used.any()):
        raise InputError(
            "loss_mask counts no token",
            "Pass a batch with at least one counted token",
        )
    members = None if groups is None else per_sequence_ids("groups", groups, len(used)).to(used.device)[used]

    def mean(x: Tensor) -> Estimate:
        return estimate_mean(x[used], members, confidence=confidence)

    return SequenceKL(
        old_to_proposal=mean(terms.old_to_proposal),
        old_to_proposal_by_ratio=mean(terms.old_to_proposal_by_ratio),
        proposal_to_old=mean(terms.proposal_to_old),
        proposal_to_old_by_ratio=mean(terms.proposal_to_old_by_ratio),
        effective_share=effective_share(terms.log_weight[used]),
    )


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
