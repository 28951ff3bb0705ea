"""The TROLL objective, equation (8), as a loss to be minimised."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from troll.errors import InputError
from troll.objective.aggregation import Aggregation, aggregate
from troll.objective.batch import Batch
from troll.objective.metrics import Metrics, summarise, token_stats
from troll.objective.ratio import RatioLevel, ratios
from troll.policy import OnInvalid, SparsePolicy, Tail, align, token_kl
from troll.projection import MAX_LOST_MASS, Projection, Solver, check_kl_bound, check_lost_mass, project_normalised


def regression(projection: Projection) -> Tensor:
    """KL(π̃ ‖ ⌊π⌋) per token, [...]: pulls the proposal towards its projection; 0 where the bound is not active."""
    proposal, projected, active = projection.proposal, projection.log_probs.detach(), projection.active
    if torch.compiler.is_compiling():
        return torch.where(active, token_kl(proposal, projected), 0.0)
    at = active.flatten().nonzero()[:, 0]  # few, as a rule
    kl = token_kl(*(x.reshape(-1, x.shape[-1])[at] for x in (proposal, projected)))
    return kl.new_zeros(active.numel()).index_copy(0, at, kl).reshape(active.shape)


def check_regression_coef(regression_coef: float) -> None:
    """Refuse a coefficient that is negative or not a number."""
    if not (math.isfinite(regression_coef) and regression_coef >= 0):
        raise InputError(f"regression_coef={regression_coef}", "a number ≥ 0", "1, the default")


class Constrained(NamedTuple):
    """A proposal brought into the trust region, as far as the objective (8) needs it; all per token."""

    log_ratio: Tensor
    """[...] log π(o)/π_old(o) of the sampled tokens, π the projected policy; differentiable."""
    regression: Tensor
    """[...] KL(π̃ ‖ ⌊π⌋), differentiable."""
    projection: Projection


def constrain(
    proposal: SparsePolicy,
    old: SparsePolicy,
    kl_bound: float | Tensor,
    counted: Tensor | None = None,
    *,
    tail: Tail = "floor",
    solver: Solver = "newton",
    max_lost_mass: float = MAX_LOST_MASS,
) -> Constrained:
    """Align two policies over any positions [...] and project the one onto the trust region around the other.

    ``counted`` are the positions over which ``max_lost_mass`` is averaged, all by default. Other arguments as for
    ``troll_loss``.
    """
    aligned = align(proposal, old, tail)
    projection = project_normalised(aligned.proposal, aligned.old, kl_bound, solver)
    if not torch.compiler.is_compiling():
        lost = projection.lost_mass if counted is None else projection.lost_mass[counted]
        check_lost_mass(lost, max_lost_mass)
    log_ratio = projection.log_probs[..., 0] - aligned.old[..., 0]
    return Constrained(log_ratio, regression(projection), projection)


def troll_loss(
    proposal: SparsePolicy,
    old: SparsePolicy,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    kl_bound: float | Tensor = 0.05,
    regression_coef: float = 1.0,
    tail: Tail = "floor",
    solver: Solver = "newton",
    max_lost_mass: float = MAX_LOST_MASS,
    ratio_level: RatioLevel = "token",
    aggregation: Aggregation = "token_mean",
    max_length: int | None = None,
    total: float | Tensor | None = None,
    importance_weights: Tensor | None = None,
    on_invalid: OnInvalid = "raise",
) -> tuple[Tensor, Metrics]:
    """The negative of equation (8):

        aggregate_t ( −w_t π(o_t)/π_old(o_t) A_t + α KL(π̃ ‖ ⌊π⌋) )

    with π the projection of the proposal π̃ onto KL(π ‖ π_old) ≤ ε, token by token. There is no clipping of the ratio.

    Args:
        proposal: the policy as it is now, [B, T]: ``sparsify(logits, sampled)``, or ``restrict(logits, old)`` for
            ``tail="bucket"``. Carries the gradient.
        old: the policy that scored the rollout before the first update on it, [B, T]; constant.
        advantages: [B] or [B, T], constant.
        loss_mask: [B, T], which completion tokens count.
        kl_bound: ε, the radius of the trust region per token; one number or one per token [B, T].
        regression_coef: α.
        tail: how dropped probability is treated, see ``troll.policy.align``.
        solver, max_lost_mass: see ``troll.project``.
        ratio_level: ``"token"``, or ``"sequence"`` for the length-normalised ratio of GSPO (tokens are projected all
            the same).
        aggregation, max_length, total: see ``troll.aggregate``. Ratio and regression are aggregated alike.
        importance_weights: w, [B] or [B, T], constant: corrects for a sampler that differs from ``old``. It multiplies
            the ratio term; the regression is a whole expectation and needs none.
        on_invalid: ``"mask"`` leaves out counted positions where a policy has no distribution, and reports how many.

    Returns:
        The loss, and metrics as detached scalars (``docs/metrics.md`` explains each).
    """
    check_kl_bound(kl_bound)
    check_regression_coef(regression_coef)
    batch = Batch.of(proposal, old, advantages, loss_mask, importance_weights, on_invalid)
    step = constrain(proposal, old, kl_bound, batch.counted, tail=tail, solver=solver, max_lost_mass=max_lost_mass)
    ratio = ratios(step.log_ratio, batch.counted, ratio_level)
    weighted = ratio if batch.weights is None else ratio * batch.weights
    loss = aggregate(
        regression_coef * step.regression - weighted * batch.advantages,
        batch.counted,
        aggregation,
        max_length=max_length,
        total=total,
    )
    stats = token_stats(proposal, old, ratio, step.projection, step.regression)
    return loss, {**summarise(stats, batch.counted), "skipped_tokens": batch.skipped}
