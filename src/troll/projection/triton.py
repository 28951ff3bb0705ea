"""``troll::project`` and its derivative as one kernel each, a row per program; rows padded [N, K] or jagged.

The definitions are ``project_rows`` and ``project_rows_backward`` in ``troll.projection.ops``. Jagged rows lie one
after another in a vector; row i is ``[offsets[i], offsets[i + 1])``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from troll.implementation import on_device
from troll.projection.triton_solver import _INF, kl_terms, path, point, search, warps


def project(
    proposal: Tensor, old: Tensor, kl_bound: Tensor, log_floor: float, offsets: Tensor | None = None, longest: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Projected, and per row mix, KL before and after, iterations, converged.

    Args:
        proposal, old: [N, K], or the values of jagged rows.
        kl_bound: [N], expanded where it is one number.
        log_floor: the proposal's log-probability of a token that only it excludes.
        offsets, longest: [N + 1] and the length of the longest row, of jagged rows.
    """
    proposal, old = proposal.contiguous(), old.contiguous()
    N, K = _rows(proposal, offsets, longest)
    projected = torch.empty_like(proposal)
    mix, kl_before, kl_after, iterations, converged = (
        torch.empty(N, dtype=dtype, device=proposal.device)
        for dtype in (torch.float64, torch.float64, torch.float64, torch.int64, torch.bool)
    )
    slots = triton.next_power_of_2(K)
    if N > 0:
        with on_device(proposal.device):
            _project[(N,)](
                proposal,
                old,
                offsets,
                kl_bound,
                projected,
                mix,
                kl_before,
                kl_after,
                iterations,
                converged,
                K,
                kl_bound.stride(0),
                LOG_FLOOR=log_floor,
                UNIT=0.5 * torch.finfo(proposal.dtype).eps,
                S=slots,
                num_warps=warps(slots),
            )
    return projected, mix, kl_before, kl_after, iterations, converged


def project_backward(
    grad: Tensor,
    projected: Tensor,
    proposal: Tensor,
    old: Tensor,
    mix: Tensor,
    log_floor: float,
    offsets: Tensor | None = None,
    longest: int = 0,
) -> Tensor:
    """The gradient on the proposal for the gradient on the projected log-probabilities; arguments as above."""
    grad, projected, proposal, old = (x.contiguous() for x in (grad, projected, proposal, old))
    N, K = _rows(proposal, offsets, longest)
    result = torch.empty_like(grad)
    slots = triton.next_power_of_2(K)
    if N > 0:
        with on_device(proposal.device):
            _project_backward[(N,)](
                grad,
                projected,
                proposal,
                old,
                offsets,
                mix.contiguous(),
                result,
                K,
                LOG_FLOOR=log_floor,
                S=slots,
                num_warps=warps(slots),
            )
    return result


def _rows(x: Tensor, offsets: Tensor | None, longest: int) -> tuple[int, int]:
    return (x.shape[0], x.shape[1]) if offsets is None else (offsets.numel() - 1, longest)


@triton.jit
def _extent(offsets, row, K):
    """Where a row begins, and how long it is."""
    if offsets is None:
        start, length = row * K, (row * 0 + K)
    else:
        start = tl.load(offsets + row).to(tl.int64)
        length = tl.load(offsets + row + 1).to(tl.int64) - start
    return start, length


@triton.jit
def _project(
    proposal,
    old,
    offsets,
    kl_bound,
    projected,
    mix,
    kl_before,
    kl_after,
    iterations,
    converged,
    K,
    bound_stride,
    LOG_FLOOR: tl.constexpr,
    UNIT: tl.constexpr,
    S: tl.constexpr,
):
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, S)
    start, length = _extent(offsets, row, K)
    used = slot < length
    given = tl.load(proposal + start + slot, mask=used, other=-_INF)
    before = tl.load(old + start + slot, mask=used, other=-_INF)
    bound = tl.load(kl_bound + row * bound_stride).to(tl.float64)
    p, o = given.to(tl.float64), before.to(tl.float64)
    log_old, q, d = path(p, o, slot, LOG_FLOOR)
    kl, t, steps, found = search(p, o, log_old, q, d, bound, UNIT)
    stored = tl.where(t < 1, before, given)
    after = tl.where(t < 1, 0.0, kl)
    if (t > 0) & (t < 1):
        _p, delta, _centred, _kl, _variance = point(log_old, q, d, t)
        stored = (log_old + delta).to(stored.dtype)
        log_p = stored.to(tl.float64)
        outside = log_old == -_INF
        delta = tl.where(outside, 0.0, log_p - tl.where(outside, 0.0, log_old))
        after = tl.sum(kl_terms(tl.exp(log_p), q, delta), 0)
    tl.store(projected + start + slot, stored, mask=used)
    tl.store(mix + row, t)
    tl.store(kl_before + row, kl)
    tl.store(kl_after + row, after)
    tl.store(iterations + row, steps)
    tl.store(converged + row, found)


@triton.jit
def _project_backward(
    grad, projected, proposal, old, offsets, mix, result, K, LOG_FLOOR: tl.constexpr, S: tl.constexpr
):
    """Equation (7) for a row."""
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, S)
    start, length = _extent(offsets, row, K)
    used = slot < length
    upstream = tl.load(grad + start + slot, mask=used, other=0.0)
    t = tl.load(mix + row)
    along = upstream
    if t < 1:
        p = tl.load(proposal + start + slot, mask=used, other=-_INF).to(tl.float64)
        o = tl.load(old + start + slot, mask=used, other=-_INF).to(tl.float64)
        log_pi = tl.load(projected + start + slot, mask=used, other=-_INF).to(tl.float64)
        _log_old, _q, d = path(p, o, slot, LOG_FLOOR)
        g = tl.where(log_pi > -_INF, upstream.to(tl.float64), 0.0)
        pi = tl.exp(log_pi)
        centred = d - tl.sum(pi * d, 0)
        variance = tl.sum(pi * centred * centred, 0)
        moved = tl.sum(g * centred, 0) / tl.where(variance > 0, variance, _INF)
        vjp = t * (g - pi * (tl.sum(g, 0) + centred * moved))
        along = tl.where((p == -_INF) | (o == -_INF), 0.0, vjp).to(along.dtype)
    tl.store(result + start + slot, along, mask=used)
