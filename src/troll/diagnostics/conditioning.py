"""How hard is the projection's equation, and how steep its derivative?

For the tokens that are projected: solver steps, t = 1/(1+η), and Var_{π_t}[d], by which the derivative (7) divides. For
all counted tokens: |KL(π̃ ‖ π_old)/ε − 1|, the distance to the kink at KL = ε, where the gradient jumps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from troll.diagnostics.inputs import constant, counted_pair
from troll.inputs import require_number
from troll.policy import LOG_FLOOR, SparsePolicy, Tail, align
from troll.projection import KL_BOUND, check_kl_bound, expand_bound, project_normalised
from troll.projection.geodesic import moments

__all__ = ["Conditioning", "solver_conditioning"]


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
