"""The one read of the logits: of every chunk of a row its maximum and what it adds to the sum.

A chunk is 32 logits, a block 16 chunks. Of each the maximum m and Σ e^(z − m) are stored, 10 % of the bytes that were
read; log-sum-exp, entropy, the most probable tokens and the mass of all others follow from those and a few chunks.
Sums are relative to their own maximum, so that none is lost however small it is against the whole. One warp works on
one row, or on a part of it of ``width`` logits: nothing is exchanged between warps.
"""

import triton
import triton.language as tl

from troll.policy.scoring.triton_bits import LOG2E, LOWEST, capped, finished

CHUNK = tl.constexpr(32)
CHUNKS = tl.constexpr(16)  # in a block
BLOCK = tl.constexpr(512)


@triton.jit
def scan(
    x_ptr, counted_ptr, chunk_max_ptr, chunk_sum_ptr, block_max_ptr, block_sum_ptr, block_entropy_ptr,
    stride, V, NC, NB, width, scale, softcap, temperature,
    CAPPED: tl.constexpr, PLAIN: tl.constexpr, RAW: tl.constexpr, MASKED: tl.constexpr, ENTROPY: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Rows [N, V] → [N, NC] and [N, NB], ``BLOCKS`` blocks a step; of blocks also Σ e^(z − m) (z − m) in bits.

    Maxima are stored as they were read (``RAW``) or as logits.
    """
    row = tl.program_id(0).to(tl.int64)
    if MASKED:  # noqa: SIM102, a branch that is not compiled
        if tl.load(counted_ptr + row) == 0:
            return
    bits = LOG2E / temperature  # what a difference of 1 is worth
    if not CAPPED:
        bits = bits * scale
    S: tl.constexpr = BLOCKS * CHUNKS
    lane = tl.arange(0, S)
    offsets = lane[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    end = tl.minimum((tl.program_id(1) + 1) * width, V)
    for start in tl.range(tl.program_id(1) * width, end, S * CHUNK, num_stages=1):
        at = start + offsets
        x = tl.load(x_ptr + row * stride + at, mask=at < V, other=-float("inf"))
        y = capped(x, scale, softcap, CAPPED)
        if CAPPED:
            y = tl.where(at < V, y, -float("inf"))
        top = tl.max(y, axis=1)
        m = tl.where(top > LOWEST, top, 0.0)
        d = (y - m[:, None]) * bits
        if ENTROPY:
            d = tl.maximum(d, -1000.0, propagate_nan=tl.PropagateNan.ALL)  # 0 · −inf is 0 here
        p = tl.exp2(d)
        own = tl.sum(p, axis=1)
        chunk = start // CHUNK + lane
        stored = top if RAW else finished(top, scale, temperature, CAPPED, PLAIN)
        tl.store(chunk_max_ptr + row * NC + chunk, stored, mask=chunk < NC)
        tl.store(chunk_sum_ptr + row * NC + chunk, own, mask=chunk < NC)

        block = start // BLOCK + tl.arange(0, BLOCKS)
        tops = tl.reshape(top, (BLOCKS, CHUNKS))
        highest = tl.max(tops, axis=1)
        below = tl.where(tops > LOWEST, (tops - highest[:, None]) * bits, -1000.0)
        share = tl.exp2(below)
        sums = tl.reshape(own, (BLOCKS, CHUNKS))
        stored = highest if RAW else finished(highest, scale, temperature, CAPPED, PLAIN)
        tl.store(block_max_ptr + row * NB + block, stored, mask=block < NB)
        tl.store(block_sum_ptr + row * NB + block, tl.sum(sums * share, axis=1), mask=block < NB)
        if ENTROPY:
            along = tl.reshape(tl.sum(p * d, axis=1), (BLOCKS, CHUNKS))
            tl.store(
                block_entropy_ptr + row * NB + block, tl.sum((along + sums * below) * share, axis=1), mask=block < NB
            )
