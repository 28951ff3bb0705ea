"""The one read of the logits: log-sum-exp and entropy of a row, and what the choice of its best tokens needs.

A row is cut into chunks of 32 logits, and 16 chunks make a block. Of each the maximum m and Σ e^(z − m) are stored:
6 % of the bytes that were read. Sums are relative to their own maximum, so that none is lost however small it is
against the whole.
"""

import triton
import triton.language as tl

from troll.kernels.numbers import LN2, LOG2E, LOWEST, capped, finished

CHUNK = tl.constexpr(32)
CHUNKS = tl.constexpr(16)  # in a block


@triton.jit
def scan(
    x_ptr,  # [N, V] rows with stride
    counted_ptr,  # [N] uint8
    chunk_max_ptr,  # [N, NC]
    chunk_sum_ptr,  # [N, NC]
    block_max_ptr,  # [N, NB]
    block_sum_ptr,  # [N, NB]
    norm_ptr,  # [N, 2]
    entropy_ptr,  # [N]
    stride,
    V,
    NC,
    NB,
    scale,
    softcap,
    temperature,
    CAPPED: tl.constexpr,
    RAW: tl.constexpr,  # store maxima as they were read, not as logits
    MASKED: tl.constexpr,
    ENTROPY: tl.constexpr,
    CHOICE: tl.constexpr,  # whether maxima and sums are stored at all
    BLOCKS: tl.constexpr,  # in a step
    STAGES: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    if MASKED:  # noqa: SIM102, a branch that is not compiled
        if tl.load(counted_ptr + row) == 0:
            tl.store(norm_ptr + row * 2, 0.0)
            tl.store(norm_ptr + row * 2 + 1, 0.0)
            tl.store(entropy_ptr + row, 0.0)
            return
    per_log2 = LOG2E / temperature
    if not CAPPED:
        per_log2 = per_log2 * scale
    S: tl.constexpr = BLOCKS * CHUNKS
    lane = tl.arange(0, S)
    offsets = lane[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    m = tl.full([S], LOWEST, tl.float32)  # per lane: maximum, Σ e^(y − m), and Σ e^(y − m) (y − m) in bits
    s = tl.zeros([S], tl.float32)
    e = tl.zeros([S], tl.float32)
    for start in tl.range(0, V, S * CHUNK, num_stages=STAGES):
        at = start + offsets
        x = tl.load(x_ptr + row * stride + at, mask=at < V, other=-float("inf"))
        y = capped(x, scale, softcap, CAPPED)
        if CAPPED:
            y = tl.where(at < V, y, -float("inf"))
        top = tl.max(y, axis=1)
        low = tl.maximum(top, LOWEST)
        d = (y - low[:, None]) * per_log2
        if ENTROPY:
            d = tl.maximum(d, -1000.0)  # 0 · −inf is 0 here
        p = tl.exp2(d)
        own = tl.sum(p, axis=1)
        if CHOICE:
            chunk = start // CHUNK + lane
            block = start // (CHUNK * CHUNKS) + tl.arange(0, BLOCKS)
            highest = tl.max(tl.reshape(low, (BLOCKS, CHUNKS)), axis=1)
            relative = tl.exp2((tl.reshape(low, (BLOCKS, CHUNKS)) - highest[:, None]) * per_log2)
            sums = tl.sum(tl.reshape(own, (BLOCKS, CHUNKS)) * relative, axis=1)
            peaks = tl.max(tl.reshape(top, (BLOCKS, CHUNKS)), axis=1)
            stored = top if RAW else finished(top, scale, temperature, CAPPED)
            peaks = peaks if RAW else finished(peaks, scale, temperature, CAPPED)
            tl.store(chunk_max_ptr + row * NC + chunk, stored, mask=chunk < NC)
            tl.store(chunk_sum_ptr + row * NC + chunk, own, mask=chunk < NC)
            tl.store(block_max_ptr + row * NB + block, peaks, mask=block < NB)
            tl.store(block_sum_ptr + row * NB + block, sums, mask=block < NB)
        new = tl.maximum(m, low)
        old_shift = tl.maximum((m - new) * per_log2, -1000.0)
        own_shift = tl.maximum((low - new) * per_log2, -1000.0)
        if ENTROPY:
            e = (e + s * old_shift) * tl.exp2(old_shift)
            e += (tl.sum(p * d, axis=1) + own * own_shift) * tl.exp2(own_shift)
        s = s * tl.exp2(old_shift) + own * tl.exp2(own_shift)
        m = new
    peak = tl.max(m, axis=0)
    shift = tl.maximum((m - peak) * per_log2, -1000.0)
    total = tl.sum(s * tl.exp2(shift), axis=0)
    bits = tl.log2(total)
    tl.store(norm_ptr + row * 2, finished(peak, scale, temperature, CAPPED))
    tl.store(norm_ptr + row * 2 + 1, bits * LN2)
    if ENTROPY:
        along = tl.sum((e + s * shift) * tl.exp2(shift), axis=0)
        tl.store(entropy_ptr + row, (bits - along / total) * LN2)
    else:
        tl.store(entropy_ptr + row, 0.0)
