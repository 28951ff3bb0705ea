"""The way back: gradients at the support of a row → the gradient of the whole row, in place if wanted.

With base = log tail (0 for an empty tail) and e_j = exp(log p_j − base), everything outside the support is

    g_j = e_j [ g_τ − Γ exp(base) − g_H exp(base) (log p_j + H) ]

one exponential an element, and none that overflows for a tail of 1e-40. ``prepare_backward`` computes the numbers per
row and the gradient at the support; ``logits_backward`` reads and writes the row; ``write_support`` writes the support.
"""

import triton
import triton.language as tl

from troll.policy.scoring.triton_bits import LOG2E, capped, finished

PER_ROW = tl.constexpr(4)  # numbers that ``logits_backward`` needs of a row


@triton.jit
def prepare_backward(
    id_ptr, log_prob_ptr, log_tail_ptr, entropy_ptr, norm_ptr, g_ptr, g_tail_ptr, g_entropy_ptr,
    at_support_ptr, row_ptr, K, scale, softcap, temperature,
    CAPPED: tl.constexpr, HAS_G: tl.constexpr, HAS_TAIL: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    KP: tl.constexpr,
):  # fmt: skip
    """Numbers per row, [N, 4], and the gradient at the support, [N, K]."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    used = tl.load(id_ptr + row * K + k, mask=k < K, other=-1) >= 0
    log_p = tl.load(log_prob_ptr + row * K + k, mask=used, other=-float("inf"))
    log_tail = tl.load(log_tail_ptr + row)
    peak, log_sum = tl.load(norm_ptr + row * 2), tl.load(norm_ptr + row * 2 + 1)
    g = tl.zeros([KP], tl.float32)
    if HAS_G:
        g = tl.load(g_ptr + row * K + k, mask=used, other=0.0).to(tl.float32)
    total = tl.sum(g, axis=0)
    base = tl.where(log_tail > -float("inf"), log_tail, 0.0)
    coefficient = 0.0
    if HAS_TAIL:
        coefficient = tl.where(log_tail > -float("inf"), tl.load(g_tail_ptr + row).to(tl.float32), 0.0)
        total += coefficient
    coefficient -= total * tl.exp2(base * LOG2E)
    p = tl.exp2(log_p * LOG2E)
    g -= p * total
    along = 0.0
    if HAS_ENTROPY:
        g_entropy = tl.load(g_entropy_ptr + row).to(tl.float32)
        entropy = tl.load(entropy_ptr + row)
        along = g_entropy * tl.exp2(base * LOG2E)
        g -= tl.where(used, p * (log_p + entropy) * g_entropy, 0.0)
    factor = scale / temperature
    if CAPPED:
        ratio = tl.where(used, (log_p + log_sum + peak) * temperature / softcap, 0.0)
        g *= 1.0 - ratio * ratio
    tl.store(at_support_ptr + row * K + k, g * factor, mask=k < K)
    tl.store(row_ptr + row * PER_ROW, peak)
    tl.store(row_ptr + row * PER_ROW + 1, log_sum + base)
    tl.store(row_ptr + row * PER_ROW + 2, coefficient * factor)
    tl.store(row_ptr + row * PER_ROW + 3, along * factor)


@triton.jit
def logits_backward(
    x_ptr, out_ptr, id_ptr, log_tail_ptr, entropy_ptr, row_ptr, stride, out_stride, V, blocks, K,
    scale, softcap, temperature,
    CAPPED: tl.constexpr, PLAIN: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a row a program: the gradient outside the support, and something at it."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    at = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    used = tl.load(id_ptr + row * K) >= 0
    peak, shift = tl.load(row_ptr + row * PER_ROW), tl.load(row_ptr + row * PER_ROW + 1)
    coefficient = tl.load(row_ptr + row * PER_ROW + 2)
    x = tl.load(x_ptr + row * stride + at, mask=at < V, other=0.0)
    y = capped(x, scale, softcap, CAPPED)
    z = finished(y, scale, temperature, CAPPED, PLAIN)
    d = (z - peak) - shift
    e = tl.exp2(d * LOG2E)
    g = e * coefficient
    if HAS_ENTROPY:
        along = tl.load(row_ptr + row * PER_ROW + 3)
        log_tail = tl.load(log_tail_ptr + row)
        base = tl.where(log_tail > -float("inf"), log_tail, 0.0)
        g -= tl.where(z > -float("inf"), e * along * (d + base + tl.load(entropy_ptr + row)), 0.0)
    if CAPPED:
        ratio = y / softcap
        g *= 1.0 - ratio * ratio
    tl.store(out_ptr + row * out_stride + at, tl.where(used, g, 0.0), mask=at < V)


@triton.jit
def write_support(id_ptr, at_support_ptr, out_ptr, out_stride, first, V, K, KP: tl.constexpr):
    """The gradient at the support, over what ``logits_backward`` wrote there."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    ids = tl.load(id_ptr + row * K + k, mask=k < K, other=-1)
    g = tl.load(at_support_ptr + row * K + k, mask=k < K, other=0.0)
    tl.store(out_ptr + row * out_stride + ids - first, g, mask=(ids >= first) & (ids < first + V))


@triton.jit
def scale(x_ptr, factor_ptr, size, BLOCK: tl.constexpr):
    """x ← factor x. Where the factor, which only the device knows, is 1, nothing is read."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < size, other=0.0)
        tl.store(x_ptr + at, x.to(tl.float32) * factor, mask=at < size)
