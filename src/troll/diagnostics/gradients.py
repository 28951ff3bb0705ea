"""How much of the gradient does a trust region let through? Clip and TROLL beside no trust region, on the same batch.

Per token, with a the sampled token, A its advantage and r the ratio, the gradient of the objective with respect to the
logits is, up to the weight of the token in the aggregation,

    no trust region   u_j = A r (1{j=a} − π̃_j)
    clip              u where the clip does not act, 0 where it does
    TROLL, ratio      A r ∂ log r / ∂ d_j, equation (6): u where the bound is not active
    TROLL             the same, less the gradient of α KL(π̃ ‖ ⌊π⌋)

and for each g of them: kept ‖g‖, removed ‖u − g‖, cosine of g and u. The gradients are those of the losses themselves.
Over all tokens they are laid side by side: every token has logits of its own. It is not the gradient on the parameters
of the network, where tokens may cancel or add.

Logits are those of the kept tokens, and one more for all others together, whose gradient is the sum of theirs.

``solver_conditioning`` shows how hard the projection's equation is and how steep its derivative. For the tokens that
are projected: solver steps, t = 1/(1+η), and Var_{π_t}[d], by which the derivative (7) divides. For all counted tokens:
|KL(π̃ ‖ π_old)/ε − 1|, the distance to the kink at KL = ε, where the gradient jumps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from troll.diagnostics.inputs import constant, counted_pair
from troll.errors import InputError
from troll.inputs import describe, require_number
from troll.objective import Aggregation, ImportanceSamplingLevel, Metrics, clip_loss, troll_loss, unconstrained_loss
from troll.objective.presets import PresetName, resolve
from troll.policy import LOG_FLOOR, SparsePolicy, Tail, align, proposal_tail
from troll.policy.sparse import require_policy
from troll.projection import KL_BOUND, check_kl_bound, expand_bound, project_normalised
from troll.projection.geodesic import moments

__all__ = [
    "Conditioning",
    "GradientComparison",
    "GradientKept",
    "compare_gradients",
    "logit_gradient",
    "solver_conditioning",
]

Loss = Callable[..., tuple[Tensor, Metrics]]
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class GradientKept:
    """A constrained gradient g beside the unconstrained u, per token [B, T] and in total; constants."""

    norm: Tensor
    """[B, T] ‖g‖."""
    removed: Tensor
    """[B, T] ‖u − g‖."""
    cosine: Tensor
    """[B, T] of g and u; 0 where one of them is 0."""
    total_norm: float
    """‖g‖ / ‖u‖ over all tokens; NaN where u is 0 everywhere."""
    total_removed: float
    """‖u − g‖ / ‖u‖ over all tokens."""
    total_cosine: float
    silent: float
    """Share of the tokens with u ≠ 0 whose g is 0: below 1e-9 ‖u‖, the rounding of (6)."""


@dataclass(frozen=True, eq=False)
class GradientComparison:
    """What clip and TROLL make of the gradient of a batch."""

    unconstrained: Tensor
    """[B, T] ‖u‖."""
    clip: GradientKept
    troll_ratio: GradientKept
    """TROLL's ratio term alone."""
    troll: GradientKept
    """With the regression term, which is a gradient of its own: ``removed`` is then more than what was lost."""


def logit_gradient(
    loss: Loss, proposal: SparsePolicy, old: SparsePolicy, advantages: Tensor, loss_mask: Tensor, **options: Any
) -> Tensor:
    """Gradient of the objective, minus ``loss``, with respect to the logits of every token, [B, T, K + 1].

    The last is that of all tokens outside the support, together. Gradients g on log-probabilities become
    (g_j − π̃_j Σg) / temperature on logits.

    Args:
        loss: ``troll_loss``, ``clip_loss``, ``unconstrained_loss``, or any with their signature.
        proposal, old, advantages, loss_mask, options: what it takes.
    """
    if not callable(loss):
        raise InputError(f"loss must be a loss function, got {describe(loss)}", "Pass troll.troll_loss or another")
    require_policy("proposal", proposal, "Make it with troll.restrict(logits, old)")
    require_policy("old", old, "Make it with troll.sparsify(old_logits, sampled)")
    p, q = constant(proposal), constant(old)
    log_probs, log_tail = p.log_probs.requires_grad_(), p.log_tail.requires_grad_()
    leaf = SparsePolicy.trusted(p.token_ids, log_probs, log_tail, p.vocab_size, p.temperature, p.made_by)
    with torch.enable_grad():
        value, _ = loss(leaf, q, advantages, loss_mask, **options)
        on_kept, on_tail = torch.autograd.grad(-value, (log_probs, log_tail), materialize_grads=True)
    probs = torch.cat([log_probs.detach(), log_tail.detach().unsqueeze(-1)], dim=-1).exp()
    g = torch.where(probs > 0, torch.cat([on_kept, on_tail.unsqueeze(-1)], dim=-1), 0.0)
    return (g - probs * g.sum(-1, keepdim=True)) / p.temperature


def compare_gradients(
    proposal: SparsePolicy,
    old: SparsePolicy,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    preset: PresetName = "default",
    kl_bound: float | Tensor | None = None,
    regression_coef: float | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    tail: Tail | None = None,
    importance_sampling_level: ImportanceSamplingLevel = "token",
    aggregation: Aggregation = "token_mean",
    max_length: int | None = None,
    importance_weights: Tensor | None = None,
) -> GradientComparison:
    """Gradient kept and removed by clip(ε) and by TROLL(``kl_bound``, α) on the same tokens.

    Args:
        proposal, old, advantages, loss_mask: as for ``troll_loss``; nothing is changed, no gradient is left behind.
        preset, kl_bound, regression_coef: of TROLL.
        clip_low, clip_high: of the clip.
        tail, importance_sampling_level, aggregation, max_length, importance_weights: as for ``troll_loss``, in all of
            them; ``tail=None`` is the one that fits the proposal.
    """
    of = partial(
        logit_gradient,
        proposal=proposal,
        old=old,
        advantages=advantages,
        loss_mask=loss_mask,
        tail=proposal_tail(proposal, old, tail, resolve(preset).tail),
        importance_sampling_level=importance_sampling_level,
        aggregation=aggregation,
        max_length=max_length,
        importance_weights=importance_weights,
        impl="reference",
    )
    u = of(unconstrained_loss)
    return GradientComparison(
        unconstrained=u.norm(dim=-1),
        clip=_kept(of(clip_loss, clip_low=clip_low, clip_high=clip_high), u),
        troll_ratio=_kept(of(troll_loss, preset=preset, kl_bound=kl_bound, regression_coef=0.0), u),
        troll=_kept(of(troll_loss, preset=preset, kl_bound=kl_bound, regression_coef=regression_coef), u),
    )


def _kept(g: Tensor, u: Tensor) -> GradientKept:
    before, after, removed = u.norm(dim=-1), g.norm(dim=-1), (u - g).norm(dim=-1)
    total = u.norm()
    return GradientKept(
        norm=after,
        removed=removed,
        cosine=_cosine((g * u).sum(-1), after, before),
        total_norm=float(g.norm() / total),
        total_removed=float((u - g).norm() / total),
        total_cosine=float(_cosine((g * u).sum(), g.norm(), total)),
        silent=float(((before > 0) & (after <= _ROUNDING * before)).sum() / (before > 0).sum()),
    )


def _cosine(product: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a > 0) & (b > 0), product / (a * b), 0.0)


@dataclass(frozen=True, eq=False)
class Conditioning:
    """What the solver and the derivative had to do with the N counted tokens, M of which were projected; constants."""

    active: Tensor
    """[N] bool, projected: KL > ε."""
    kink_distance: Tensor
    """[N] |KL/ε − 1|; inf for ε = 0."""
    iterations: Tensor
    """[M] solver steps."""
    mix: Tensor
    """[M] t."""
    variance: Tensor
    """[M] Var_{π_t}[d], d = log π̃ − log π_old."""
    unconverged: int
    """Tokens where the solver stopped at its step limit."""

    @property
    def projected_fraction(self) -> float:
        """M / N, 0 without a token."""
        return float(self.active.sum()) / max(1, len(self.active))

    def near_kink(self, within: float = 0.1) -> float:
        """Share of the counted tokens with |KL/ε − 1| < ``within``, 0 without a token."""
        require_number("within", within, "a number > 0", lambda x: x > 0, "The default is 0.1")
        return float((self.kink_distance < within).sum()) / max(1, len(self.kink_distance))


@torch.no_grad()
def solver_conditioning(
    proposal: SparsePolicy,
    old: SparsePolicy,
    loss_mask: Tensor,
    *,
    kl_bound: float | Tensor = KL_BOUND,
    tail: Tail | None = None,
) -> Conditioning:
    """Project in double precision; return the solver steps and the terms of the derivative.

    Args:
        proposal, old, loss_mask, kl_bound, tail: as for ``troll_loss``.
    """
    check_kl_bound(kl_bound)
    counted = counted_pair(proposal, old, loss_mask)
    p, q = (x[counted] for x in align(constant(proposal), constant(old), tail))  # [N, S]
    bound = expand_bound(kl_bound, counted.shape, p)[counted]
    projection = project_normalised(p, q, bound, "newton", "reference")
    active = projection.active
    inside, log_old = projection.proposal[active], q[active]
    d = inside.masked_fill(inside == -torch.inf, LOG_FLOOR) - log_old
    return Conditioning(
        active=active,
        kink_distance=torch.where(bound > 0, projection.kl_before / bound - 1, torch.inf).abs(),
        iterations=projection.iterations[active],
        mix=projection.mix[active],
        variance=moments(projection.log_probs[active], d.masked_fill(log_old == -torch.inf, 0.0))[1],
        unconverged=int((~projection.converged).sum()),
    )
