"""The TROLL objective, equation (8), as a loss to be minimised."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from troll.deferred import DeferredCheck, DeferredChecks, check_or_defer, run_checks
from troll.errors import InputError, require_choice
from troll.implementation import Impl, choose
from troll.inputs import describe, require_number
from troll.objective.aggregation import Aggregation, aggregate
from troll.objective.batch import Batch
from troll.objective.metrics import Metrics, summarise, token_stats
from troll.objective.presets import PresetName, resolve
from troll.objective.token_loss import ImportanceSamplingLevel, token_loss
from troll.policy import LOG_FLOOR, OnInvalid, SparsePolicy, Tail, align, proposal_tail, token_kl
from troll.projection import (
    MAX_LOST_MASS,
    Diagnostics,
    Projection,
    Solver,
    check_kl_bound,
    check_lost_mass,
    check_max_lost_mass,
    expand_bound,
    kernel_cannot,
    project_normalised,
)


def regression_loss(projection: Projection) -> Tensor:
    """KL(π̃ ‖ ⌊π⌋) per token, [...]: pulls the proposal towards its projection; 0 where the bound is not active."""
    if not isinstance(projection, Projection):
        raise InputError(
            f"projection must be a Projection, got {describe(projection)}", "Pass what troll.project returned"
        )
    proposal, projected, active = projection.proposal, projection.log_probs.detach(), projection.active
    if torch.compiler.is_compiling():
        return torch.where(active, token_kl(proposal, projected), 0.0)
    at = active.flatten().nonzero()[:, 0]  # few, as a rule
    kl = token_kl(*(x.reshape(-1, x.shape[-1])[at] for x in (proposal, projected)))
    return kl.new_zeros(active.numel()).index_copy(0, at, kl).reshape(active.shape)


def check_regression_coef(regression_coef: float) -> None:
    """Refuse a coefficient that is negative or not a number."""
    require_number(
        "regression_coef", regression_coef, "a number ≥ 0", lambda x: math.isfinite(x) and x >= 0, "The default is 1"
    )


def trust_region_can_act(per_update: int, per_rollout: int) -> bool:
    """Whether any update is made by a policy other than the one that scored its rollout.

    Args:
        per_update, per_rollout: forward passes (or prompts) per update, and per rollout with all passes over it. If an
            update consists of whole rollouts, the policy does not change between scoring and updating.
    """
    return per_update % per_rollout != 0


class Constrained(NamedTuple):
    """A proposal brought into the trust region, as far as the objective (8) needs it; all per token."""

    log_ratio: Tensor
    """[...] log π(o)/π_old(o) of the sampled tokens, π the projected policy; differentiable."""
    regression: Tensor
    """[...] KL(π̃ ‖ ⌊π⌋), differentiable."""
    projection: Diagnostics
    """What the projection did; with the projected policy, a ``Projection``, where no kernel computed."""


def constrain(
    proposal: SparsePolicy,
    old: SparsePolicy,
    kl_bound: float | Tensor,
    counted: Tensor | None = None,
    *,
    tail: Tail | None = None,
    solver: Solver = "newton",
    max_lost_mass: float = MAX_LOST_MASS,
    impl: Impl = "auto",
    deferred: DeferredChecks | None = None,
) -> Constrained:
    """Align two policies over any positions [...] and project the one onto the trust region around the other.

    ``counted`` are the positions over which ``max_lost_mass`` is averaged, all by default. The check of the kernel's
    error flags runs now, or is added to ``deferred`` if that is given. Other arguments as for ``troll_loss``.
    """
    tail = proposal_tail(proposal, old, tail)
    require_choice("solver", solver, get_args(Solver))
    check_max_lost_mass(max_lost_mass)
    support = max(proposal.token_ids.shape[-1], old.token_ids.shape[-1])
    if choose(impl, proposal.log_probs.device, kernel_cannot(support, solver)).impl == "triton":
        step, check = _fused(proposal, old, kl_bound, counted, tail, max_lost_mass)
        check_or_defer(deferred, check)
        return step
    aligned = align(proposal, old, tail)
    projection = project_normalised(aligned.proposal, aligned.old, kl_bound, solver, "reference")
    if not torch.compiler.is_compiling():
        check_lost_mass(_of(projection.lost_mass, counted), max_lost_mass)
    log_ratio = projection.log_probs[..., 0] - aligned.old[..., 0]
    return Constrained(log_ratio, regression_loss(projection), projection)


@torch.no_grad()
def network_kl(proposal: SparsePolicy, old: SparsePolicy, *, tail: Tail | None = None, impl: Impl = "auto") -> Tensor:
    """KL(π̃ ‖ π_old) per token, [...]: how far the network is from the old policy; constant."""
    return constrain(proposal, old, math.inf, tail=tail, max_lost_mass=math.inf, impl=impl).projection.kl_before


def _fused(
    proposal: SparsePolicy,
    old: SparsePolicy,
    kl_bound: float | Tensor,
    counted: Tensor | None,
    tail: Tail,
    max_lost_mass: float,
) -> tuple[Constrained, DeferredCheck]:
    """``constrain`` from one kernel, and the check of its error flags: one transfer from the device.

    If a flag is set, ``align`` and the other checks of the definition find out what is wrong and raise.
    """
    from troll.objective import triton as kernel

    if not _same_form(proposal, old, tail):
        align(proposal, old, tail)
    if not isinstance(kl_bound, Tensor):
        check_kl_bound(kl_bound)
    shape = proposal.shape
    bound = expand_bound(kl_bound, shape, proposal.log_probs)
    result = kernel.constrain(_rows(proposal), _rows(old), bound.reshape(-1), tail == "bucket", LOG_FLOOR)
    projection = Diagnostics(
        **{field.name: getattr(result, field.name).view(shape) for field in dataclasses.fields(Diagnostics)}
    )

    def explain() -> None:
        wrong = int(result.faults)
        if wrong & (kernel.WRONG_SAMPLED | kernel.WRONG_SUPPORT):
            align(proposal, old, tail)
        if wrong & kernel.WRONG_BOUND:
            check_kl_bound(kl_bound)
        if wrong & kernel.LOST_MASS:
            check_lost_mass(_of(projection.lost_mass, counted), max_lost_mass)

    step = Constrained(result.log_ratio.view(shape), result.regression.view(shape), projection)
    return step, DeferredCheck(result.faults[0] != 0, explain)


def _same_form(proposal: SparsePolicy, old: SparsePolicy, tail: Tail) -> bool:
    """Whether ``align`` has nothing to refuse in two policies but, perhaps, their numbers."""
    forms = [
        (
            x.shape,
            x.vocab_size,
            x.temperature,
            x.log_probs.dtype,
            x.log_probs.device,
            tail == "floor" or x.token_ids.shape[-1],
        )
        for x in (proposal, old)
    ]
    constant = not (old.log_probs.requires_grad or old.log_tail.requires_grad)
    return constant and forms[0] == forms[1]


def _rows(policy: SparsePolicy) -> tuple[Tensor, Tensor, Tensor]:
    K = policy.token_ids.shape[-1]
    return policy.token_ids.reshape(-1, K), policy.log_probs.reshape(-1, K), policy.log_tail.reshape(-1)


def _of(lost: Tensor, counted: Tensor | None) -> Tensor:
    return lost if counted is None else lost[counted]


def troll_loss(
    proposal: SparsePolicy,
    old: SparsePolicy,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    preset: PresetName = "default",
    kl_bound: float | Tensor | None = None,
    regression_coef: float | None = None,
    tail: Tail | None = None,
    solver: Solver = "newton",
    max_lost_mass: float = MAX_LOST_MASS,
    importance_sampling_level: ImportanceSamplingLevel = "token",
    aggregation: Aggregation = "token_mean",
    max_length: int | None = None,
    total: float | Tensor | None = None,
    importance_weights: Tensor | None = None,
    on_invalid: OnInvalid = "raise",
    impl: Impl = "auto",
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
        preset: ``"default"`` or ``"paper"``, see ``troll.objective.presets``: what holds for the next three arguments
            where they are None.
        kl_bound: ε, the radius of the trust region per token; one number or one per token [B, T].
        regression_coef: α.
        tail: how dropped probability is treated, see ``troll.policy.align``.
        solver, max_lost_mass: see ``troll.project``.
        importance_sampling_level: ``"token"``, or ``"sequence"`` for the length-normalised ratio of GSPO; the
            projection is per token in both cases.
        aggregation, max_length, total: see ``troll.aggregate``. Ratio and regression are aggregated alike.
        importance_weights: w, [B] or [B, T], constant: corrects for a sampler that differs from ``old``. It multiplies
            the ratio term; the regression is a whole expectation and needs none.
        on_invalid: ``"mask"`` leaves out counted positions where a policy has no distribution, and reports how many.
        impl: what computes, see ``troll.implementation``. The kernel takes policies of at most 256 tokens.

    Returns:
        The loss, and metrics as detached scalars (``docs/metrics.md`` explains each).
    """
    settings = resolve(preset, regression_coef=regression_coef, tail=tail)
    check_regression_coef(settings.regression_coef)
    checks: DeferredChecks = []
    batch = Batch.of(proposal, old, advantages, loss_mask, importance_weights, on_invalid, checks)
    step = constrain(
        proposal,
        old,
        settings.kl_bound if kl_bound is None else kl_bound,
        batch.counted,
        tail=proposal_tail(
            proposal, old, settings.tail, origin=None if tail is not None else f"from preset={preset!r}"
        ),
        solver=solver,
        max_lost_mass=max_lost_mass,
        impl=impl,
        deferred=checks,
    )
    losses, ratio = token_loss(
        step.log_ratio,
        batch.advantages,
        batch.counted,
        regression=step.regression,
        regression_coef=settings.regression_coef,
        importance_weights=batch.weights,
        importance_sampling_level=importance_sampling_level,
    )
    loss = aggregate(losses, batch.counted, aggregation, max_length=max_length, total=total)
    stats = token_stats(proposal, old, ratio, step.projection, step.regression)
    metrics = {**summarise(stats, batch.counted), "skipped_tokens": batch.skipped}
    run_checks(checks)
    return loss, metrics
