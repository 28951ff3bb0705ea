"""``troll::project`` and its derivative as one kernel each, a row per program; rows padded [N, K] or jagged.

The definitions are ``project_rows`` and ``project_rows_backward`` in ``troll.projection.ops``. Jagged rows lie one
after another in a vector; row i is ``[offsets[i], offsets[i + 1])``.

The functions of one row, used by ``troll.objective.triton`` too, come first: the path, the search for t on it, and the
room for rounding. What such a function computes is defined by its namesake in ``geodesic``, ``solvers`` or ``ops``. A
row is a vector [S] of slots, S a power of two, in fp64; slots beyond the support are outside the old policy (−inf).
Where ``solve_newton`` cuts a bracket into 32 parts at once, a row here halves it five times, which is the same part and
counts as the same one step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from troll.implementation import on_device

NUM_WARPS: int | None = None  # set by benchmarks; None is one warp for 128 slots

_NEWTON_LOOKS = tl.constexpr(6)
_HALVINGS = tl.constexpr(15)  # three cuts into 2⁵ parts
_MAX_LOOKS = tl.constexpr(6 + 15 + 64)
_LAST_STEP_BELOW = tl.constexpr(1e-7)
_EXPONENTIAL_ABOVE = tl.constexpr(2.5)
_INF = tl.constexpr(float("inf"))


def warps(slots: int) -> int:
    """How many warps work on a row."""
    return NUM_WARPS or max(1, slots // 128)


@triton.jit
def normalised(x):
    """Log-softmax; a row of −inf stays one."""
    top = tl.max(x, 0)
    top = tl.where(top == -_INF, 0.0, top)
    mass = tl.sum(tl.exp(x - top), 0)
    return x - (top + tl.log(tl.where(mass > 0, mass, 1.0)))


@triton.jit
def kl_terms(p, q, delta):
    """p (δ + e⁻ᵟ − 1), δ = log p − log q, whose sum is KL(p ‖ q).

    For |δ| < ½ fourteen terms of its series are exact to the last bit of a double (the next is below 2 · ½¹⁴ / 16! ≈
    6e-18 of the sum). Beyond, p δ − p + q loses at most a digit to cancellation.
    """
    near = tl.abs(delta) < 0.5
    x = tl.where(near, delta, 0.0)
    series = 1.0 / 87178291200.0 - x * (1.0 / 1307674368000.0)
    series = 1.0 / 6227020800.0 - x * series
    series = 1.0 / 479001600.0 - x * series
    series = 1.0 / 39916800.0 - x * series
    series = 1.0 / 3628800.0 - x * series
    series = 1.0 / 362880.0 - x * series
    series = 1.0 / 40320.0 - x * series
    series = 1.0 / 5040.0 - x * series
    series = 1.0 / 720.0 - x * series
    series = 1.0 / 120.0 - x * series
    series = 1.0 / 24.0 - x * series
    series = 1.0 / 6.0 - x * series
    series = 1.0 / 2.0 - x * series
    return tl.where(near, p * (x * x * series), p * (delta - 1.0) + q)


@triton.jit
def path(proposal, old, slot, LOG_FLOOR: tl.constexpr):
    """Normalised log π_old, π_old and d = log π̃ − log π_old, finite everywhere. An empty row becomes one-hot."""
    top = tl.max(old, 0)
    log_old = normalised(tl.where(slot == 0, tl.where(top == -_INF, 0.0, old), old))
    floored = tl.where(proposal == -_INF, LOG_FLOOR, proposal)
    d = tl.where(log_old == -_INF, 0.0, floored - tl.where(log_old == -_INF, 0.0, log_old))
    return log_old, tl.exp(log_old), d


@triton.jit
def point(log_old, q, d, t):
    """π_t [S], log π_t − log π_old [S], d − μ_t [S], KL(π_t ‖ π_old) and Var_{π_t}[d]: equations (3) to (5)."""
    tilted = log_old + t * d
    top = tl.max(tilted, 0)
    weight = tl.exp(tilted - top)
    mass = tl.sum(weight, 0)
    p = weight * (1.0 / mass)
    delta = t * d - (top + tl.log(mass))
    centred = d - tl.sum(p * d, 0)
    return p, delta, centred, tl.sum(kl_terms(p, q, delta), 0), tl.sum(p * centred * centred, 0)


@triton.jit
def relative_step(ratio, s):
    """Newton's Δt / t on √KL or on log KL, for ``ratio`` = ε / KL and s = d log KL / d log t."""
    return tl.where(s > _EXPONENTIAL_ABOVE, tl.log(ratio), 2.0 * (tl.sqrt(ratio) - 1.0)) / s


@triton.jit
def solve(log_old, q, d, bound, end_kl, end_variance):
    """t with KL(π_t ‖ π_old) = ε > 0, for a row whose KL at t = 1 exceeds it; the steps taken; whether it was found."""
    inside = log_old > -_INF
    spread = tl.max(tl.where(inside, d, -_INF), 0) - tl.min(tl.where(inside, d, _INF), 0)
    low, high = tl.sqrt(8.0 * bound) / spread, tl.full((), 1.0, tl.float64)
    centred = d - tl.sum(q * d, 0)
    start_variance = tl.maximum(tl.sum(q * centred * centred, 0), 1e-300)
    t = tl.minimum(tl.sqrt(bound / end_kl), tl.sqrt(2.0 * bound / start_variance))
    slope = end_variance / end_kl
    late = 1.0 + relative_step(bound / end_kl, tl.maximum(slope, 1e-300))
    t = tl.where((slope > _EXPONENTIAL_ABOVE) & (late > t), late, t)
    t = tl.minimum(tl.maximum(t, low), high)
    looks, steps = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    found = bound < 0
    searching = bound > 0
    while searching:
        _p, _delta, _centred, kl, variance = point(log_old, q, d, t)
        kl, below = tl.maximum(kl, 1e-300), kl < bound
        low, high = tl.where(below, t, low), tl.where(below, high, t)
        step = t * (1.0 + relative_step(bound / kl, tl.maximum(t * t * variance / kl, 1e-300)))
        found = tl.abs(kl - bound) <= _LAST_STEP_BELOW * bound
        halves = (looks >= _NEWTON_LOOKS - 1) & (looks < _NEWTON_LOOKS - 1 + _HALVINGS)
        t = tl.where(found | ((step > low) & (step < high) & (halves == 0)), step, tl.sqrt(low * high))
        counts = (looks < _NEWTON_LOOKS) | (looks >= _NEWTON_LOOKS + _HALVINGS) | ((looks - _NEWTON_LOOKS) % 5 == 0)
        steps += counts.to(tl.int32)
        looks += 1
        searching = (found == 0) & (looks < _MAX_LOOKS)
    return tl.where(found, t, low), steps, found


@triton.jit
def inside_after_rounding(log_old, q, d, t, found, bound, UNIT: tl.constexpr):
    """t so much smaller that the bound holds also after log π is rounded, by ``UNIT`` relative; 0 where none is."""
    p, delta, _centred, kl, variance = point(log_old, q, d, t)
    log_p = tl.where(log_old == -_INF, 0.0, log_old + delta)
    slack = UNIT * tl.sum(tl.abs(p * log_p * delta), 0)
    step = (kl - bound + slack) / tl.maximum(t * variance, 1e-300)
    t = tl.minimum(t - tl.where(found, step, tl.maximum(step, 0.0)), 1.0 - 2.220446049250313e-16)
    return tl.where(slack < bound, tl.maximum(t, 0.0), 0.0)


@triton.jit
def search(proposal, old, log_old, q, d, bound, UNIT: tl.constexpr):
    """KL(π̃ ‖ π_old), and t: 1 where that is within the bound, 0 for the old policy; steps taken, and if t was found."""
    _p, _delta, _centred, kl, variance = point(log_old, q, d, 1.0)
    shared = tl.max(tl.minimum(proposal, old), 0) > -_INF
    empty = tl.max(old, 0) == -_INF
    kl = tl.where(shared | empty, kl, _INF)
    t = tl.where(kl > bound, 0.0, tl.full((), 1.0, tl.float64))
    steps, found = tl.full((), 0, tl.int32), bound >= 0
    if (kl > bound) & (kl < _INF) & (bound > 0):
        t, steps, found = solve(log_old, q, d, bound, kl, variance)
        t = inside_after_rounding(log_old, q, d, t, found, bound, UNIT)
    return kl, t, steps, found


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
