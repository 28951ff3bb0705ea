"""One row of the projection inside a kernel: the path, the search for t on it, and the room for rounding.

What a function here computes is defined by its namesake in ``troll.projection`` (``geodesic``, ``newton``, ``ops``).
A row is a vector [S] of slots, S a power of two, in fp64; slots beyond the support are outside the old policy (−inf).

Where ``newton`` cuts a bracket into 32 parts at once, a row here halves it five times, which is the same part, and
counts it as the same one step.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUM_WARPS: int | None = None  # to be set by who measures; None takes one warp for 128 slots

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
