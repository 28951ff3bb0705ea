"""``project``: the proposal where it is in the trust region around the old policy, else the closest policy that is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from troll.errors import InputError, require_choice
from troll.kernels import Impl
from troll.projection.geodesic import solver_dtype
from troll.projection.ops import SOLVERS, pad, project_rows, unpad

Solver = Literal["newton", "bracketing"]
_NORM_TOLERANCE = 1e-3
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
        impl: what computes, see ``troll.kernels.choice``. The kernel takes at most 256 tokens a position.

    The derivative with respect to ``proposal`` is the closed form (7), exact on both sides of the kink at KL = ε. See
    the README of this folder.
    """
    require_choice("impl", impl, get_args(Impl))
    if proposal.is_nested or old.is_nested:
        return _project_jagged(proposal, old, kl_bound, solver, max_lost_mass, impl)
    _check_form(proposal, old)
    outside = _check_content(proposal.detach(), old, kl_bound)
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
    projected, *numbers = project_rows(
        proposal.reshape(-1, K), old.reshape(-1, K), bound.reshape(-1), solver, impl
    )
    return _projection(projected.reshape(proposal.shape), proposal, lost, *numbers)


def _project_jagged(
    proposal: Tensor, old: Tensor, kl_bound: float | Tensor, solver: Solver, max_lost_mass: float, impl: Impl
) -> Projection:
    """Rows are padded where they are checked, not where they are projected."""
    require_choice("solver", solver, tuple(SOLVERS))
    values, old_values, offsets = _jagged_rows(proposal, old)
    _check_form(values, old_values)
    longest = max(1, int(offsets.diff().max())) if offsets.numel() > 1 else 1
    rows = pad(values, offsets, longest), pad(old_values, offsets, longest)
    outside = _check_content(rows[0].detach(), rows[1], kl_bound)
    bound = expand_bound(kl_bound, rows[0].shape[:1], values)
    lost = rows[0].new_zeros(len(rows[0]))
    if outside:
        inside, lost = _leave_out(*rows, outside)
        check_lost_mass(lost, max_lost_mass)
        values = unpad(inside, offsets)
    projected, *numbers = project_rows(values, old_values, bound, solver, impl, offsets, longest)
    return _projection(*(torch.nested.nested_tensor_from_jagged(x, offsets) for x in (projected, values)), lost, *numbers)


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


def check_kl_bound(kl_bound: float | Tensor) -> None:
    """Refuse a bound that is negative or NaN."""
    if isinstance(kl_bound, Tensor):
        if torch.compiler.is_compiling() or not bool((~(kl_bound >= 0)).any()):
            return
        kl_bound = float(kl_bound[~(kl_bound >= 0)].flatten()[0])
    if math.isnan(kl_bound) or kl_bound < 0:
        raise InputError(
            f"kl_bound={kl_bound}", "a number ≥ 0", "0.05, the default (the authors found 0.01 slower and 0.25 worse)"
        )


def expand_bound(kl_bound: float | Tensor, shape: torch.Size, like: Tensor) -> Tensor:
    """One number or one per position → one per position [...], in the solver's precision, where ``like`` is."""
    bound = torch.as_tensor(kl_bound, dtype=solver_dtype(like))
    if bound.shape not in (torch.Size(), shape):
        raise InputError(
            f"kl_bound {list(bound.shape)} for positions {list(shape)}", "one number, or one per position", "a float"
        )
    return bound.detach().to(like.device).expand(shape)


def _check_form(proposal: Tensor, old: Tensor) -> None:
    if proposal.shape != old.shape or proposal.dim() == 0 or proposal.shape[-1] == 0:
        raise InputError(
            f"proposal {list(proposal.shape)} and old {list(old.shape)}",
            "the same shape [..., K] with K ≥ 1",
            "troll.policy.align, which brings two sparse policies onto one support",
        )
    if proposal.dtype not in (torch.float32, torch.float64) or proposal.dtype != old.dtype:
        raise InputError(
            f"proposal of {proposal.dtype}, old of {old.dtype}",
            "float32 or float64, both the same (half precision cannot resolve a KL below 2e-5)",
            "logits.float().log_softmax(-1)",
        )
    if old.requires_grad:
        raise InputError(
            "an old policy that requires gradient", "a constant", "torch.no_grad() when scoring it, or old.detach()"
        )


def _log_norm(x: Tensor) -> Tensor:
    """log Σ e^x, 0 for a row that excludes everything."""
    empty = (x == -torch.inf).all(-1)
    return torch.where(empty.unsqueeze(-1), x.new_tensor(x.shape[-1]).log().neg(), x).logsumexp(-1)


def check_lost_mass(lost: Tensor, max_lost_mass: float) -> None:
    """Refuse a proposal that has, on average over these positions, too much mass where the old policy has none."""
    if bool(lost.sum() > max_lost_mass * max(1, lost.numel())):
        raise InputError(
            f"a proposal with {float(lost.mean()):.3g} of its mass, on average, on tokens the old one excludes (−inf)",
            f"at most max_lost_mass={max_lost_mass}",
            "scoring both policies without top-k, top-p or min-p truncation, or truncating both to the same tokens",
        )


def _jagged_rows(proposal: Tensor, old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values of both, and their common offsets."""
    jagged = all(x.is_nested and x.layout == torch.jagged and x.dim() == 2 for x in (proposal, old))
    if jagged:
        proposal, old = (x if x.lengths() is None else x.contiguous() for x in (proposal, old))
        offsets, other = proposal.offsets(), old.offsets()
        if offsets is other or torch.equal(offsets, other):
            return proposal.values(), old.values(), offsets
    raise InputError(
        f"proposal {_form(proposal)} and old {_form(old)}",
        "two dense tensors, or two jagged ones [N, *] with the same offsets",
        "torch.nested.nested_tensor_from_jagged(values, offsets) for both",
    )


def _form(x: Tensor) -> str:
    if not x.is_nested:
        return f"dense {list(x.shape)}"
    lengths = x.offsets().diff().tolist() if x.layout == torch.jagged else [len(row) for row in x.unbind()]
    return f"nested ({x.layout}, {x.dim()} dimensions) with rows of {lengths[:4]}{'…' if len(lengths) > 4 else ''}"


def _check_content(proposal: Tensor, old: Tensor, kl_bound: float | Tensor) -> bool:
    """Refuse what is no distribution, and a bad bound; whether the proposal has mass where the old policy has none.

    One transfer from the device. Nothing is looked at inside ``torch.compile``.
    """
    if torch.compiler.is_compiling():
        return True
    norms = [_log_norm(x) for x in (proposal, old)]
    seen = [(~(norm.abs() <= _NORM_TOLERANCE)).any() for norm in norms]  # also where a NaN or +inf is
    seen += [((old == -torch.inf) & (proposal > -torch.inf)).any()]
    if isinstance(kl_bound, Tensor):
        seen += [(~(kl_bound >= 0)).any().to(old.device)]
    else:
        check_kl_bound(kl_bound)
    first, second, outside, *bound = torch.stack(seen).tolist()
    if any(bound):
        check_kl_bound(kl_bound)
    if first or second:
        _refuse_content(proposal, old, norms)
    return bool(outside)


def _refuse_content(proposal: Tensor, old: Tensor, norms: list[Tensor]) -> None:
    for name, x, norm in (("proposal", proposal, norms[0]), ("old", old, norms[1])):
        wrong, unnormalised = ~(x < torch.inf), ~(norm.abs() <= _NORM_TOLERANCE)
        if bool(wrong.any()):
            at = wrong.nonzero()[0].tolist()
            raise InputError(
                f"{name} with log-probability {float(x[tuple(at)])} at position {at[:-1]}, token {at[-1]}",
                "log-probabilities: finite, or −inf for excluded tokens",
                "masking that position out before the projection, and looking for what made its logits NaN or inf",
            )
        if bool(unnormalised.any()):
            at = unnormalised.nonzero()[0].tolist()
            raise InputError(
                f"{name} whose probabilities sum to {float(norm[tuple(at)].exp()):.6g} at position {at}",
                "log-probabilities that are normalised over the support",
                "torch.log_softmax(logits, dim=-1)",
            )
