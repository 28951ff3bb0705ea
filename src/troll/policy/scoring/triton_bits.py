"""Device functions: how logits are read, and numbers as integers that sort like them."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e37)  # e to anything below is 0 beside e to anything above


@triton.jit
def tanh(y):
    """tanh to a few ulp: a series near 0, where the quotient of exponentials loses digits."""
    s = y * y
    series = y * (1.0 + s * (-0.33333334 + s * (0.13333334 + s * (-0.053968254 + s * 0.021869488))))
    t = tl.exp2(tl.abs(y) * (-2.0 * LOG2E))
    quotient = tl.where(y < 0.0, -1.0, 1.0) * (1.0 - t) / (1.0 + t)
    return tl.where(tl.abs(y) < 0.25, series, quotient)


@triton.jit
def capped(x, scale, softcap, CAPPED: tl.constexpr):
    """x in fp32, through the soft cap if there is one: what maxima and differences are taken of."""
    y = x.to(tl.float32)
    if CAPPED:
        y = tanh(tl.math.div_rn(y * scale, softcap)) * softcap
    return y


@triton.jit
def finished(y, scale, temperature, CAPPED: tl.constexpr, PLAIN: tl.constexpr):
    """``capped`` values → logits, rounded as the reference rounds them. Both are increasing functions."""
    if not PLAIN:
        if not CAPPED:
            y = y * scale
        y = tl.math.div_rn(y, temperature)
    return y


@triton.jit
def logit(x, scale, softcap, temperature, CAPPED: tl.constexpr, PLAIN: tl.constexpr):
    """A logit as the reference reads it."""
    return finished(capped(x, scale, softcap, CAPPED), scale, temperature, CAPPED, PLAIN)


@triton.jit
def ordered(x):
    """fp32 → int32 in the same order; −0.0 and 0.0 are one number."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def kth_largest(keys, low, high, K: tl.constexpr):
    """The largest t in [low, high] that at least K of the keys reach, given that they reach ``low``: by bisection."""
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        reached = tl.sum((keys >= middle).to(tl.int32), axis=0)
        if reached >= K:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def first_at_least(keys, t, K: tl.constexpr):
    """Which K keys to take, those above t and then the first of those at t, and the place of each among them."""
    above = keys > t
    tie = keys == t
    room = K - tl.sum(above.to(tl.int32), axis=0)
    running = tl.cumsum(above.to(tl.int32) * 65536 + tie.to(tl.int32), axis=0)
    ties = running & 65535
    return above | (tie & (ties <= room)), (running >> 16) + tl.minimum(ties, room) - 1
