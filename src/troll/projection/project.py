"""``project``: the proposal where it is in the trust region around the old policy, else the closest policy that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from troll.errors import InputError, require_choice
from troll.implementation import Impl
from troll.projection.checks import (
    check_content,
    check_kl_bound,
    check_lost_mass,
    check_max_lost_mass,
    check_shapes,
    check_tensors,
    check_types,
    jagged_rows,
    require_bound_type,
)
from troll.projection.geodesic import solver_dtype
from troll.projection.ops import SOLVERS, pad, project_rows, unpad

Solver = Literal["newton", "bracketing"]
MAX_LOST_MASS = 0.1


@dataclass(frozen=True, eq=False)
class Diagnostics:
    """What a projection did to each token; constants."""

    mix: Tensor
    """[...] t = 1/(1+η): 1 at the proposal, 0 at the old policy."""
    eta: Tensor
    """[...] η, the dual variable of the constraint: 0 where it is not active."""
    kl_before: Tensor
    """[...] KL(π̃ ‖ π_old)."""
    kl_after: Tensor
    """[...] KL(π ‖ π_old) ≤ ε, of the numbers as stored."""
    active: Tensor
    """[...] whether the projection changed the token: KL(π̃ ‖ π_old) > ε."""
    converged: Tensor
    """[...] False where the solver stopped at its step limit; the constraint holds there too."""
    iterations: Tensor
    """[...] solver steps, 0 where not active."""
    lost_mass: Tensor
    """[...] proposal mass on tokens that the old policy excludes (−inf)."""


@dataclass(frozen=True, eq=False)
class Projection(Diagnostics):
    """The projected policy and how it was found. Only ``log_probs`` and ``proposal`` carry gradient."""

    log_probs: Tensor
    """[..., K] log π, the projected policy; the proposal bit for bit where the bound is not active."""
    proposal: Tensor
    """[..., K] log π̃ over the old policy's support: the input, renormalised where it had mass outside."""


def project(
    proposal: Tensor,
    old: Tensor,
    kl_bound: float | Tensor,
    *,
    solver: Solver = "newton",
    max_lost_mass: float = MAX_LOST_MASS,
    impl: Impl = "auto",
) -> Projection:
    """Project token distributions onto the trust region around the old policy, equation (1):

        π = argmin_p KL(p ‖ π̃)   subject to   KL(p ‖ π_old) ≤ ε

    Args:
        proposal: [..., K] log π̃, fp32 or fp64, normalised over the support; differentiable. Or jagged, a nested tensor
            of N rows (``torch.nested``, ``layout=torch.jagged``); the projected policy is jagged likewise.
        old: [..., K] log π_old over the same support; constant. For dense distributions K is the vocabulary.
        kl_bound: ε ≥ 0, one number or one per position [...]. 0 returns the old policy, inf the proposal.
        solver: ``"newton"``, or ``"bracketing"``, the authors' method, slower and independent.
        max_lost_mass: an error is raised if the proposal has, on average, more than this mass on tokens that the old
            policy excludes with −inf. Below it, such tokens are left out and the rest is renormalised.
        impl: what computes, see ``troll.implementation``. The kernel takes at most 256 tokens a position.

    The derivative with respect to ``proposal`` is the closed form (7), exact on both sides of the kink at KL = ε. See
    the README of this folder.
    """
    require_choice("impl", impl, get_args(Impl))
    check_tensors(proposal, old)
    check_max_lost_mass(max_lost_mass)
    if proposal.is_nested or old.is_nested:
        return _project_jagged(proposal, old, kl_bound, solver, max_lost_mass, impl)
    check_shapes(proposal, old)
    check_types(proposal, old)
    outside = check_content(proposal.detach(), old, kl_bound)
    projection = project_normalised(proposal, old, kl_bound, solver, impl, outside)
    if outside and not torch.compiler.is_compiling():
        check_lost_mass(projection.lost_mass, max_lost_mass)
    return projection


def project_normalised(
    proposal: Tensor,
    old: Tensor,
    kl_bound: float | Tensor,
    solver: Solver,
    impl: Impl = "auto",
    outside: bool | None = None,
) -> Projection:
    """``project`` for log-probabilities that are normalised by the way they were made, whatever mass is lost.

    ``outside`` says whether any is, if that is known; then ``kl_bound`` was checked with it.
    """
    require_choice("solver", solver, tuple(SOLVERS))
    if outside is None:
        check_kl_bound(kl_bound)
    bound = expand_bound(kl_bound, proposal.shape[:-1], proposal)
    proposal, lost = _leave_out(proposal, old, outside)
    K = proposal.shape[-1]
    projected, *numbers = project_rows(proposal.reshape(-1, K), old.reshape(-1, K), bound.reshape(-1), solver, impl)
    return _projection(projected.reshape(proposal.shape), proposal, lost, *numbers)


def _project_jagged(
    proposal: Tensor, old: Tensor, kl_bound: float | Tensor, solver: Solver, max_lost_mass: float, impl: Impl
) -> Projection:
    """Rows are padded where they are checked, not where they are projected."""
    require_choice("solver", solver, tuple(SOLVERS))
    values, old_values, offsets = jagged_rows(proposal, old)
    check_types(values, old_values)
    longest = max(1, int(offsets.diff().max())) if offsets.numel() > 1 else 1
    rows = pad(values, offsets, longest), pad(old_values, offsets, longest)
    outside = check_content(rows[0].detach(), rows[1], kl_bound)
    bound = expand_bound(kl_bound, rows[0].shape[:1], values)
    lost = rows[0].new_zeros(len(rows[0]))
    if outside:
        padded, lost = _leave_out(*rows, outside)
        check_lost_mass(lost, max_lost_mass)
        values = unpad(padded, offsets)
    projected, *numbers = project_rows(values, old_values, bound, solver, impl, offsets, longest)
    log_probs, inside = (torch.nested.nested_tensor_from_jagged(x, offsets) for x in (projected, values))
    return _projection(log_probs, inside, lost, *numbers)


def _projection(
    projected: Tensor,
    proposal: Tensor,
    lost: Tensor,
    mix: Tensor,
    kl_before: Tensor,
    kl_after: Tensor,
    iterations: Tensor,
    converged: Tensor,
) -> Projection:
    shape, dtype = lost.shape, lost.dtype
    return Projection(
        log_probs=projected,
        proposal=proposal,
        mix=mix.reshape(shape).to(dtype),
        eta=((1 - mix) / mix).reshape(shape).to(dtype),
        kl_before=kl_before.reshape(shape).to(dtype),
        kl_after=kl_after.reshape(shape).to(dtype),
        active=(mix < 1).reshape(shape),
        converged=converged.reshape(shape),
        iterations=iterations.reshape(shape),
        lost_mass=lost,
    )


def _leave_out(proposal: Tensor, old: Tensor, known: bool | None) -> tuple[Tensor, Tensor]:
    """The proposal without the tokens that the old policy excludes, renormalised in the rows that had any; others bit
    for bit. And the mass of these tokens. Whether there are any may be ``known``."""
    outside = (old == -torch.inf) & (proposal > -torch.inf)
    if not torch.compiler.is_compiling() and not (bool(outside.any()) if known is None else known):
        return proposal, torch.zeros_like(proposal[..., 0]).detach()
    lost = torch.where(outside, proposal.detach(), -torch.inf).exp().sum(-1)
    inside = proposal.masked_fill(outside, -torch.inf)
    any_inside = (inside > -torch.inf).any(-1, keepdim=True)
    shift = torch.where(any_inside, inside, 0.0).logsumexp(-1, keepdim=True)
    return torch.where(outside.any(-1, keepdim=True) & any_inside, inside - shift, inside), lost


def expand_bound(kl_bound: float | Tensor, shape: torch.Size, like: Tensor) -> Tensor:
    """One number or one per position → one per position [...], in the solver's precision, where ``like`` is."""
    dtype = solver_dtype(like)
    if isinstance(kl_bound, Tensor):
        require_bound_type(kl_bound)
        bound = kl_bound.detach().to(like.device, dtype)
    else:
        bound = torch.full((), kl_bound, dtype=dtype, device=like.device)
    if bound.shape not in (torch.Size(), shape):
        raise InputError(
            f"kl_bound must be one number or one per position, shape {list(shape)}, got {list(bound.shape)}",
            "Pass a float, or a tensor with one bound per position",
        )
    return bound.expand(shape)
