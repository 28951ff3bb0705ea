"""The projection and its derivative as PyTorch operators, ``troll::project`` and ``troll::project_backward``.

As operators they are opaque to ``torch.compile`` (no graph break, whatever the solver does inside; kernels run there
too), run in their own precision under autocast, and refuse double backward with a sentence instead of a wrong number.

Rows are padded, [N, K], or jagged: the values of all rows one after another, ``offsets`` [N + 1] where each begins, and
the length of the ``longest``. The definition is here; ``troll.projection.triton`` computes the same numbers.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from troll.implementation import Impl, choose
from troll.policy import LOG_FLOOR, token_kl
from troll.policy.scoring import KERNEL_SUPPORT
from troll.projection.geodesic import point, solver_dtype, vjp
from troll.projection.solvers import Solution, solve_bracketing, solve_newton

SOLVERS = {"newton": solve_newton, "bracketing": solve_bracketing}


def kernel_cannot(support: int, solver: str) -> str | None:
    """What about a projection the kernels cannot do, if anything."""
    if solver != "newton":
        return f"solver={solver!r} has no kernel"
    if support > KERNEL_SUPPORT:
        return f"a support of {support} tokens is more than the {KERNEL_SUPPORT} a kernel holds"
    return None


def pad(values: Tensor, offsets: Tensor, longest: int, fill: float = -torch.inf) -> Tensor:
    """Jagged rows → [N, longest]."""
    at = offsets[:-1, None] + torch.arange(longest, device=values.device)
    used = at < offsets[1:, None]
    if values.numel() == 0:
        return values.new_full(at.shape, fill)
    return torch.where(used, values[torch.where(used, at, 0)], fill)


def unpad(rows: Tensor, offsets: Tensor) -> Tensor:
    """[N, longest] → the values of jagged rows."""
    return rows[torch.arange(rows.shape[1], device=rows.device) < offsets.diff()[:, None]]


def _path(proposal: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised log π_old and d = log π̃ − log π_old in the solver's precision, d finite everywhere.

    A token that only the proposal excludes has log 1e-12 there, as a token that it dropped; one outside the old policy
    is outside the family and has d = 0. A row without any token is replaced by a one-hot one.
    """
    log_old = old.to(solver_dtype(old))
    empty = log_old.amax(-1) == -torch.inf
    log_old = torch.cat([torch.where(empty, 0.0, log_old[:, 0])[:, None], log_old[:, 1:]], dim=-1).log_softmax(-1)
    floored = torch.where(proposal == -torch.inf, LOG_FLOOR, proposal.to(log_old.dtype))
    return log_old, torch.where(log_old == -torch.inf, 0.0, floored - log_old)


@torch.library.custom_op("troll::project", mutates_args=())
def project_rows(
    proposal: Tensor,
    old: Tensor,
    kl_bound: Tensor,
    solver: str,
    impl: str = "auto",
    offsets: Tensor | None = None,
    longest: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows and bounds [N] → projected rows and, [N] each, mix, KL before and after, iterations, converged."""
    support = proposal.shape[-1] if offsets is None else longest
    if choose(cast(Impl, impl), proposal.device, kernel_cannot(support, solver)).impl == "triton":
        from troll.projection.triton import project

        return project(proposal, old, kl_bound, LOG_FLOOR, offsets, longest)
    if offsets is None:
        return _project_padded(proposal, old, kl_bound, solver)
    rows = pad(proposal, offsets, longest), pad(old, offsets, longest)
    projected, mix, kl_before, kl_after, iterations, converged = _project_padded(*rows, kl_bound, solver)
    return unpad(projected, offsets), mix, kl_before, kl_after, iterations, converged


def _project_padded(
    proposal: Tensor, old: Tensor, kl_bound: Tensor, solver: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    log_old, d = _path(proposal, old)
    bound = kl_bound.to(log_old.dtype)
    kl_full = token_kl((log_old + d).log_softmax(-1), log_old)
    shared = torch.minimum(old, proposal).amax(-1) > -torch.inf
    disjoint = ~shared & (old.amax(-1) > -torch.inf)
    kl_before = torch.where(disjoint, torch.inf, kl_full)
    active = kl_before > bound
    anchored = active & (disjoint | (bound == 0))  # no way to go, or nowhere to go: the old policy itself

    mix = torch.where(active, 0.0, torch.ones_like(bound))
    kl_after = torch.where(active, 0.0, kl_before)
    projected = torch.where(active[:, None], old, proposal)
    iterations = torch.zeros_like(bound, dtype=torch.int64)
    converged = torch.ones_like(active)

    rows = (active & ~anchored).nonzero()[:, 0]
    if rows.numel() > 0:
        log_old, d, bound = log_old[rows], d[rows], bound[rows]
        solution = SOLVERS[solver](log_old, d, bound)
        t, fits = _inside_after_rounding(log_old, d, solution, bound, projected.dtype)
        stored = point(log_old, d, t).log_probs.to(projected.dtype)
        stored = torch.where(fits[:, None], stored, old[rows])
        projected[rows] = stored
        mix[rows] = torch.where(fits, t, 0.0)
        kl_after[rows] = torch.where(fits, token_kl(stored.to(log_old.dtype), log_old), 0.0)
        iterations[rows], converged[rows] = solution.iterations, solution.converged
    return projected, mix, kl_before, kl_after, iterations, converged


def _inside_after_rounding(
    log_old: Tensor, d: Tensor, solution: Solution, bound: Tensor, storage: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A mix so much smaller that the KL is within the bound also after log π is rounded to its storage type.

    Rounding moves log π_i by at most u |log π_i|, u half the spacing of the type at 1, and the KL by at most
    u Σ π |log π| |log π − log π_old|. The second result is False where that leaves no room (ε near the square of u).
    """
    mix = solution.mix
    here = point(log_old, d, mix)
    log_ratio = torch.where(log_old == -torch.inf, 0.0, here.log_probs - log_old)
    weight = torch.where(log_old == -torch.inf, 0.0, here.log_probs.exp() * here.log_probs)
    slack = 0.5 * torch.finfo(storage).eps * (weight * log_ratio).abs().sum(-1)
    step = (here.kl - bound + slack) / (mix * here.variance)
    shrunk = mix - torch.where(solution.converged, step, step.clamp(min=0.0))
    return shrunk.clamp(max=1 - torch.finfo(mix.dtype).eps), (shrunk > 0) & (slack < bound)


@project_rows.register_fake
def _(
    proposal: Tensor,
    old: Tensor,
    kl_bound: Tensor,
    solver: str,
    impl: str = "auto",
    offsets: Tensor | None = None,
    longest: int = 0,
) -> tuple[Tensor, ...]:
    row = proposal.new_empty(kl_bound.shape, dtype=solver_dtype(proposal))
    return (
        torch.empty_like(proposal, memory_format=torch.contiguous_format),
        row,
        torch.empty_like(row),
        torch.empty_like(row),
        torch.empty_like(row, dtype=torch.int64),
        torch.empty_like(row, dtype=torch.bool),
    )


@torch.library.custom_op("troll::project_backward", mutates_args=())
def project_rows_backward(
    grad: Tensor,
    projected: Tensor,
    proposal: Tensor,
    old: Tensor,
    mix: Tensor,
    impl: str = "auto",
    offsets: Tensor | None = None,
    longest: int = 0,
) -> Tensor:
    """Equation (7) for rows: the gradient on ``proposal``. Rows that were not projected pass theirs on."""
    support = proposal.shape[-1] if offsets is None else longest
    if choose(cast(Impl, impl), proposal.device, kernel_cannot(support, "newton")).impl == "triton":
        from troll.projection.triton import project_backward

        return project_backward(grad, projected, proposal, old, mix, LOG_FLOOR, offsets, longest)
    if offsets is None:
        return _padded_backward(grad, projected, proposal, old, mix)
    projected, proposal, old = (pad(x, offsets, longest) for x in (projected, proposal, old))
    return unpad(_padded_backward(pad(grad, offsets, longest, 0.0), projected, proposal, old, mix), offsets)


def _padded_backward(grad: Tensor, projected: Tensor, proposal: Tensor, old: Tensor, mix: Tensor) -> Tensor:
    result = grad.clone(memory_format=torch.contiguous_format)
    rows = (mix < 1).nonzero()[:, 0]
    if rows.numel() > 0:
        proposal, old = proposal[rows], old[rows]
        _, d = _path(proposal, old)
        along = vjp(grad[rows].to(d.dtype), projected[rows].to(d.dtype), d, mix[rows])
        along.masked_fill_((old == -torch.inf) | (proposal == -torch.inf), 0.0)
        result[rows] = along.to(grad.dtype)
    return result


@project_rows_backward.register_fake
def _(
    grad: Tensor,
    projected: Tensor,
    proposal: Tensor,
    old: Tensor,
    mix: Tensor,
    impl: str = "auto",
    offsets: Tensor | None = None,
    longest: int = 0,
) -> Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    proposal, old, _, solver, impl, offsets, ctx.longest = inputs
    projected, mix, *diagnostics = output
    ctx.save_for_backward(projected, proposal, old, mix, offsets)
    ctx.impl = impl if solver == "newton" else "reference"
    ctx.mark_non_differentiable(mix, *diagnostics)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    *rows, offsets = ctx.saved_tensors
    along = None if grad is None else project_rows_backward(grad, *rows, ctx.impl, offsets, ctx.longest)
    return along, *(None,) * 6


def _refuse(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError(
        "troll::project has no second derivative: it was differentiated twice (create_graph=True, a Hessian, a "
        "gradient penalty). Differentiate once, or detach the projected log-probabilities where the second one begins."
    )


project_rows.register_autograd(_backward, setup_context=_setup_context)
project_rows_backward.register_autograd(_refuse)
