"""What TROLL is compared with: PPO's clipping and no trust region, with the signature and metrics of ``troll_loss``.

The ratio is that of the full softmax, as PPO defines it; everything around it is shared, so that a comparison differs
in the trust region alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from troll.implementation import Impl
from troll.inputs import require_number
from troll.objective.aggregation import Aggregation, aggregate
from troll.objective.batch import Batch
from troll.objective.metrics import Metrics, mean, summarise, token_stats
from troll.objective.token_loss import ImportanceSamplingLevel, ratios, token_loss
from troll.objective.troll import constrain
from troll.policy import TAIL, OnInvalid, SparsePolicy, Tail, proposal_tail


def clip_loss(
    proposal: SparsePolicy,
    old: SparsePolicy,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    tail: Tail | None = None,
    importance_sampling_level: ImportanceSamplingLevel = "token",
    aggregation: Aggregation = "token_mean",
    max_length: int | None = None,
    total: float | Tensor | None = None,
    importance_weights: Tensor | None = None,
    on_invalid: OnInvalid = "raise",
    impl: Impl = "auto",
) -> tuple[Tensor, Metrics]:
    """PPO's clipped objective, as a loss: aggregate_t ( −w_t min(r_t A_t, clip(r_t, 1 − low, 1 + high) A_t) ).

    Args:
        proposal, old, advantages, loss_mask: as for ``troll_loss``.
        clip_low, clip_high: different values are the asymmetric clip (DAPO's clip-higher: 0.2 and 0.28). With
            ``importance_sampling_level="sequence"`` this is GSPO, whose recipe is 3e-4 and 4e-4.
        dual_clip: c > 1: where A < 0, the objective is at least c A, however large the ratio.
        tail: as for ``troll_loss``, "bucket" by default; used for the KL that is reported, not for the loss.
        importance_sampling_level, aggregation, max_length, total, importance_weights, on_invalid, impl: as for
            ``troll_loss``.
    """
    require_number("clip_low", clip_low, "a number from 0 to 1", lambda x: 0 <= x <= 1, "The default is 0.2")
    require_number("clip_high", clip_high, "a number ≥ 0", lambda x: x >= 0, "The default is 0.2")
    if dual_clip is not None:
        require_number("dual_clip", dual_clip, "a number > 1, or None", lambda x: x > 1, "A usual value is 3")
    batch = Batch.of(proposal, old, advantages, loss_mask, importance_weights, on_invalid)
    ratio = ratios(proposal.sampled_log_probs - old.sampled_log_probs, batch.counted, importance_sampling_level)
    metrics = _metrics(proposal, old, batch, ratio, tail, impl)
    plain = ratio * batch.advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * batch.advantages
    objective = torch.minimum(plain, clipped)
    metrics["clipped_fraction"] = mean((clipped < plain).to(ratio.dtype), batch.counted)
    if dual_clip is not None:
        floor = dual_clip * batch.advantages
        dual = (batch.advantages < 0) & (objective < floor)
        objective = torch.where(dual, floor, objective)
        metrics["dual_clipped_fraction"] = mean(dual.to(ratio.dtype), batch.counted)
    weighted = objective if batch.weights is None else objective * batch.weights
    return aggregate(-weighted, batch.counted, aggregation, max_length=max_length, total=total), metrics


def unconstrained_loss(
    proposal: SparsePolicy,
    old: SparsePolicy,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    tail: Tail | None = None,
    importance_sampling_level: ImportanceSamplingLevel = "token",
    aggregation: Aggregation = "token_mean",
    max_length: int | None = None,
    total: float | Tensor | None = None,
    importance_weights: Tensor | None = None,
    on_invalid: OnInvalid = "raise",
    impl: Impl = "auto",
) -> tuple[Tensor, Metrics]:
    """The importance-weighted policy gradient without a trust region, as a loss: aggregate_t ( −w_t r_t A_t ).

    Arguments as for ``clip_loss``.
    """
    batch = Batch.of(proposal, old, advantages, loss_mask, importance_weights, on_invalid)
    log_ratio = proposal.sampled_log_probs - old.sampled_log_probs
    losses, ratio = token_loss(
        log_ratio,
        batch.advantages,
        batch.counted,
        importance_weights=batch.weights,
        importance_sampling_level=importance_sampling_level,
    )
    metrics = _metrics(proposal, old, batch, ratio, tail, impl)
    return aggregate(losses, batch.counted, aggregation, max_length=max_length, total=total), metrics


def _metrics(
    proposal: SparsePolicy, old: SparsePolicy, batch: Batch, ratio: Tensor, tail: Tail | None, impl: Impl
) -> Metrics:
    origin = "the default" if tail is None else None
    tail = proposal_tail(proposal, old, TAIL if tail is None else tail, origin=origin)
    with torch.no_grad():
        projection = constrain(proposal, old, math.inf, tail=tail, max_lost_mass=math.inf, impl=impl).projection
    metrics = summarise(token_stats(proposal, old, ratio, projection), batch.counted)
    return {**metrics, "skipped_tokens": batch.skipped}
