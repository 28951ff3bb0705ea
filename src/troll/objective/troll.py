"""The TROLL objective, equation (8), as a loss to be minimised."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from troll.errors import InputError
from troll.objective.aggregation import Aggregation, aggregate
from troll.objective.batch import Batch
from troll.objective.metrics import Metrics, largest, mean, policy_metrics, sequence_mean, spread
from troll.objective.ratio import RatioLevel, ratios
from troll.policy import OnInvalid, SparsePolicy, Tail, align, token_kl
from troll.projection import MAX_LOST_MASS, Projection, Solver, check_kl_bound, check_lost_mass, project


def regression(projection: Projection) -> Tensor:
    """KL(π̃ ‖ ⌊π⌋) per token, [...]: pulls the proposal towards its projection; 0 where the bound is not active."""
    kl = token_kl(projection.proposal, projection.log_probs.detach())
    return torch.where(projection.active, kl, 0.0)


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
    if not (math.isfinite(regression_coef) and regression_coef >= 0):
        raise InputError(f"regression_coef={regression_coef}", "a number ≥ 0", "1, the default")
    batch = Batch.of(proposal, old, advantages, loss_mask, importance_weights, on_invalid)
    aligned = align(proposal, old, tail)
    projection = project(aligned.proposal, aligned.old, kl_bound, solver=solver, max_lost_mass=math.inf)
    if not torch.compiler.is_compiling():
        check_lost_mass(projection.lost_mass[batch.counted], max_lost_mass)

    ratio = ratios(projection.log_probs[..., 0] - aligned.old[..., 0], batch.counted, ratio_level)
    weighted = ratio if batch.weights is None else ratio * batch.weights
    pull = regression(projection)
    loss = aggregate(
        regression_coef * pull - weighted * batch.advantages,
        batch.counted,
        aggregation,
        max_length=max_length,
        total=total,
    )
    return loss, {
        **policy_metrics(proposal, old, batch, ratio, projection),
        **_projection_metrics(projection, pull, batch.counted),
    }


@torch.no_grad()
def _projection_metrics(projection: Projection, pull: Tensor, counted: Tensor) -> Metrics:
    dtype = projection.kl_after.dtype
    active = counted & projection.active
    return {
        "projected_fraction": mean(projection.active.to(dtype), counted),
        **spread("kl_after", projection.kl_after, counted),
        "sequence_kl_after": sequence_mean(projection.kl_after, counted),
        "regression": mean(pull, counted),
        "mix": mean(projection.mix, counted),
        "solver_steps/mean": mean(projection.iterations.to(dtype), active),
        "solver_steps/max": largest(projection.iterations.to(dtype), active),
        "unconverged_tokens": (counted & ~projection.converged).sum(),
    }
