"""The forward of scoring in Triton: one read of the logits, the support, and the mass of the tail.

1. ``scan`` reads a row once. A chunk is 32 logits, a block 16 chunks. Of each the maximum m and Σ e^(z − m) are stored,
   10 % of the bytes that were read; log-sum-exp, entropy, the most probable tokens and the mass of all others follow
   from those and a few chunks. Sums are relative to their own maximum, so that none is lost however small it is against
   the whole. One warp works on one row, or on ``width`` logits of it: warps exchange nothing.
2. ``select_top_k`` finds the most probable tokens, ``score_support`` the log-probabilities at given ones. Selection is
   exact in three levels: the K largest logits, ties to the lower id, lie inside the K blocks with the largest maxima,
   ties to the lower block; likewise the chunks among those blocks, and the logits among those chunks. A K-th largest is
   found by bisection on integers, so that only the K chosen logits are sorted, by counting.
3. ``tail_mass`` sums the mass outside the support, relative to its own largest logit, from the blocks without a kept
   token, the chunks without one in the other blocks, and the tokens that are not kept in the other chunks. It is never
   1 − Σ kept, which would be rounding for a tail of 1e-6.
"""

import triton
import triton.language as tl

from troll.policy.scoring.triton_bits import (
    LN2,
    LOG2E,
    LOWEST,
    capped,
    finished,
    first_at_least,
    kth_largest,
    logit,
    ordered,
)

CHUNK = tl.constexpr(32)
CHUNKS = tl.constexpr(16)  # in a block
BLOCK = tl.constexpr(512)
TINY = tl.constexpr(1e-30)  # below, a sum of probabilities in fp32 may have lost terms


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


@triton.jit
def stored_logit(stored, scale, temperature, CAPPED: tl.constexpr, PLAIN: tl.constexpr, RAW: tl.constexpr):
    """The logit of a stored maximum, −inf where there is none to speak of."""
    z = stored.to(tl.float32)
    z = tl.where(z > LOWEST, z, -float("inf"))
    if RAW:
        z = finished(z, scale, temperature, CAPPED, PLAIN)
    return z


@triton.jit
def normaliser(z, sums, peak, block_entropy_ptr, x, NB, ENTROPY: tl.constexpr):
    """log Σ e^(z − peak) and the entropy of a row, from the maxima and sums of its blocks."""
    shift = tl.maximum((z - peak) * LOG2E, -1000.0)
    share = tl.exp2(shift)
    total = tl.sum(sums * share, axis=0)
    bits = tl.log2(total)
    entropy = 0.0
    if ENTROPY:
        along = tl.load(block_entropy_ptr + x, mask=x < NB, other=0.0)
        entropy = (bits - tl.sum((along + sums * shift) * share, axis=0) / total) * LN2
    return bits * LN2, entropy


@triton.jit
def is_defined(peak, log_sum, chosen, counted_ptr, row, MASKED: tl.constexpr):
    """Whether the row is counted, and defines a distribution in which the sampled token can occur."""
    defined = (tl.abs(log_sum) < float("inf")) & (tl.abs(peak) < float("inf")) & (chosen > -float("inf"))
    if MASKED:
        defined = defined & (tl.load(counted_ptr + row) != 0)
    return defined


@triton.jit
def select_top_k(
    x_ptr, counted_ptr, sampled_ptr, chunk_max_ptr, chunk_sum_ptr, block_max_ptr, block_sum_ptr, block_entropy_ptr,
    scratch_ptr, id_ptr, log_prob_ptr, log_tail_ptr, entropy_ptr, norm_ptr,
    stride, V, NC, NB, K, scale, softcap, temperature, tail_mass, tail_mass_rest,
    CAPPED: tl.constexpr, PLAIN: tl.constexpr, RAW: tl.constexpr, MASKED: tl.constexpr, ENTROPY: tl.constexpr,
    PRUNED: tl.constexpr, SHIFT: tl.constexpr, NBP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """The most probable tokens until what is left has ``tail_mass``, at most K, and the sampled one in slot 0.

    The log of the mass outside is NaN where it has to be summed again, by ``tail_mass``.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    x = tl.arange(0, NBP)
    sampled = tl.load(sampled_ptr + row)
    x_ptr += row * stride
    chunk_max_ptr += row * NC
    chunk_sum_ptr += row * NC
    scratch_ptr += row * KP
    id_ptr += row * K
    log_prob_ptr += row * K

    # blocks
    top = tl.load(block_max_ptr + row * NB + x, mask=x < NB, other=-float("inf"))
    sums = tl.load(block_sum_ptr + row * NB + x, mask=x < NB, other=0.0)
    z = stored_logit(top, scale, temperature, CAPPED, PLAIN, RAW)
    peak = tl.max(z, axis=0)
    log_sum, entropy = normaliser(z, sums, peak, block_entropy_ptr + row * NB, x, NB, ENTROPY)
    known = (sampled >= 0) & (sampled < V)
    chosen = logit(tl.load(x_ptr + tl.where(known, sampled, 0)), scale, softcap, temperature, CAPPED, PLAIN)
    chosen = tl.where(known, chosen, -float("inf"))
    defined = is_defined(peak, log_sum, chosen, counted_ptr, row, MASKED)
    tl.store(norm_ptr + row * 2, peak)
    tl.store(norm_ptr + row * 2 + 1, log_sum)
    tl.store(entropy_ptr + row, tl.where(defined, entropy, 0.0))
    tl.store(id_ptr + k, tl.full([KP], -1, tl.int64), mask=k < K)
    tl.store(log_prob_ptr + k, tl.full([KP], -float("inf"), tl.float32), mask=k < K)
    if not defined:
        tl.store(log_tail_ptr + row, 0.0)
        return
    lowest: tl.constexpr = -(2**31) >> SHIFT
    key = tl.where(x < NB, ordered(top.to(tl.float32)) >> SHIFT, lowest)
    high = tl.max(key, axis=0)
    t = kth_largest(key, tl.min(key, axis=0), high, KP)
    keep, place = first_at_least(key, t, KP)
    beyond = tl.sum(tl.where(keep, 0.0, sums * tl.exp2((z - peak) * LOG2E)), axis=0)
    tl.store(scratch_ptr + place, x.to(tl.int64), mask=keep)
    tl.debug_barrier()

    # chunks of those blocks
    j = tl.arange(0, KP * CHUNKS)
    chunk = tl.load(scratch_ptr + j // CHUNKS).to(tl.int32) * CHUNKS + j % CHUNKS
    top = tl.load(chunk_max_ptr + chunk, mask=chunk < NC, other=-float("inf"))
    sums = tl.load(chunk_sum_ptr + chunk, mask=chunk < NC, other=0.0)
    key = tl.where(chunk < NC, ordered(top.to(tl.float32)) >> SHIFT, lowest)
    t = kth_largest(key, t, high, KP)
    keep, place = first_at_least(key, t, KP)
    z = stored_logit(top, scale, temperature, CAPPED, PLAIN, RAW)
    beyond += tl.sum(tl.where(keep, 0.0, sums * tl.exp2((z - peak) * LOG2E)), axis=0)
    tl.debug_barrier()
    tl.store(scratch_ptr + place, chunk.to(tl.int64), mask=keep)
    tl.debug_barrier()

    # logits of those chunks
    j = tl.arange(0, KP * CHUNK)
    at = tl.load(scratch_ptr + j // CHUNK).to(tl.int32) * CHUNK + j % CHUNK
    value = tl.load(x_ptr + at, mask=at < V, other=-float("inf"))
    z = tl.where(at < V, logit(value, scale, softcap, temperature, CAPPED, PLAIN), -float("inf"))
    key = tl.where(at < V, ordered(value.to(tl.float32) if RAW else z) >> SHIFT, lowest)
    t = kth_largest(key, t, high, KP)
    keep, place = first_at_least(key, t, KP)
    beyond += tl.sum(tl.where(keep, 0.0, tl.exp2((z - peak) * LOG2E)), axis=0)
    both = (key.to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64)
    tl.debug_barrier()
    tl.store(scratch_ptr + place, both, mask=keep)
    tl.debug_barrier()

    # in falling order
    mine = tl.load(scratch_ptr + k)
    others = tl.load(scratch_ptr + tl.arange(0, KP))
    rank = tl.sum((others[None, :] > mine[:, None]).to(tl.int32), axis=1)
    tl.debug_barrier()
    tl.store(scratch_ptr + rank, 0x7FFFFFFF - (mine & 0x7FFFFFFF))
    tl.debug_barrier()
    ids = tl.load(scratch_ptr + k).to(tl.int32)
    z = logit(tl.load(x_ptr + ids, mask=ids < V, other=0.0), scale, softcap, temperature, CAPPED, PLAIN)
    z = tl.where(ids < V, z, -float("inf"))
    log_p = z - peak - log_sum
    p = tl.exp2(log_p * LOG2E)
    beyond = beyond * tl.exp2(-log_sum * LOG2E) + tl.sum(tl.where(k >= K, p, 0.0), axis=0)

    # enough of them, the sampled one first
    keep = (k < K) & (log_p > -float("inf"))
    if PRUNED:
        exact = tl.where(k < K, tl.exp(log_p.to(tl.float64)), 0.0)
        left = tl.cumsum(exact, axis=0, reverse=True) + beyond.to(tl.float64)
        keep = keep & (left - tail_mass > tail_mass_rest)
    here = ids == sampled
    place = tl.min(tl.where(keep & here, k, K), axis=0)
    slot = tl.where(k == place, 0, tl.where(k < place, k + 1, k))
    keep = keep & (slot < K)
    tl.debug_barrier()
    tl.store(id_ptr, sampled)
    tl.store(log_prob_ptr, chosen - peak - log_sum)
    tl.store(id_ptr + slot, ids.to(tl.int64), mask=keep)
    tl.store(log_prob_ptr + slot, log_p, mask=keep)
    tail = beyond + tl.sum(tl.where((k >= K) | keep | here, 0.0, p), axis=0)
    # A sampled token that is not among the K most probable is in ``beyond``, but it is kept.
    unlisted = tl.sum((here & (k < K)).to(tl.int32), axis=0) == 0
    tl.store(log_tail_ptr + row, tl.where((tail < TINY) | unlisted, float("nan"), tl.log(tail)))


@triton.jit
def score_support(
    x_ptr, counted_ptr, sampled_ptr, support_ptr, block_max_ptr, block_sum_ptr, block_entropy_ptr,
    id_ptr, log_prob_ptr, log_tail_ptr, entropy_ptr, norm_ptr,
    stride, V, NB, K, scale, softcap, temperature,
    CAPPED: tl.constexpr, PLAIN: tl.constexpr, RAW: tl.constexpr, MASKED: tl.constexpr, ENTROPY: tl.constexpr,
    NBP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """The log-probabilities at given tokens [N, K] (−1: unused); one that is impossible leaves the support."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    x = tl.arange(0, NBP)
    x_ptr += row * stride
    top = tl.load(block_max_ptr + row * NB + x, mask=x < NB, other=-float("inf"))
    sums = tl.load(block_sum_ptr + row * NB + x, mask=x < NB, other=0.0)
    z = stored_logit(top, scale, temperature, CAPPED, PLAIN, RAW)
    peak = tl.max(z, axis=0)
    log_sum, entropy = normaliser(z, sums, peak, block_entropy_ptr + row * NB, x, NB, ENTROPY)
    sampled = tl.load(sampled_ptr + row)
    known = (sampled >= 0) & (sampled < V)
    chosen = logit(tl.load(x_ptr + tl.where(known, sampled, 0)), scale, softcap, temperature, CAPPED, PLAIN)
    chosen = tl.where(known, chosen, -float("inf"))
    defined = is_defined(peak, log_sum, chosen, counted_ptr, row, MASKED)
    ids = tl.where(defined, tl.load(support_ptr + row * K + k, mask=k < K, other=-1), -1)
    z = logit(tl.load(x_ptr + ids, mask=ids >= 0, other=0.0), scale, softcap, temperature, CAPPED, PLAIN)
    used = (ids >= 0) & (z > -float("inf"))
    tl.store(norm_ptr + row * 2, peak)
    tl.store(norm_ptr + row * 2 + 1, log_sum)
    tl.store(entropy_ptr + row, tl.where(defined, entropy, 0.0))
    tl.store(id_ptr + row * K + k, tl.where(used, ids, -1), mask=k < K)
    tl.store(log_prob_ptr + row * K + k, tl.where(used, z - peak - log_sum, -float("inf")), mask=k < K)
    tl.store(log_tail_ptr + row, tl.where(defined, float("nan"), 0.0))


@triton.jit
def tail_mass(
    x_ptr, chunk_max_ptr, chunk_sum_ptr, block_max_ptr, block_sum_ptr, id_ptr, norm_ptr, log_tail_ptr,
    stride, V, NC, NB, K, scale, softcap, temperature,
    CAPPED: tl.constexpr, PLAIN: tl.constexpr, RAW: tl.constexpr,
    NBP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """log of the mass outside the ids [N, K] (−1: unused), for the rows in whose place there is NaN."""
    row = tl.program_id(0).to(tl.int64)
    so_far = tl.load(log_tail_ptr + row)
    if so_far == so_far:
        return
    id_ptr += row * K
    k = tl.arange(0, KP)
    ids = tl.load(id_ptr + k, mask=k < K, other=-1).to(tl.int32)
    block, chunk = ids // BLOCK, ids // CHUNK
    # Of each kept token: is it the first of its block, of its chunk; and as bits, which chunks of the block have a kept
    # token, which tokens of the chunk are kept.
    first_of_block, first_of_chunk = (ids >= 0).to(tl.int32), (ids >= 0).to(tl.int32)
    kept_chunks, kept_tokens = tl.zeros([KP], tl.int32), tl.zeros([KP], tl.int32)
    x = tl.arange(0, NBP)
    free_block = (x < NB).to(tl.int32)
    for j in range(K):
        one = tl.load(id_ptr + j).to(tl.int32)
        same_block = (one >= 0) & (block == one // BLOCK)
        same_chunk = (one >= 0) & (chunk == one // CHUNK)
        first_of_block = tl.where(same_block & (j < k), 0, first_of_block)
        first_of_chunk = tl.where(same_chunk & (j < k), 0, first_of_chunk)
        kept_chunks = tl.where(same_block, kept_chunks | (1 << (one // CHUNK) % CHUNKS), kept_chunks)
        kept_tokens = tl.where(same_chunk, kept_tokens | (1 << one % CHUNK), kept_tokens)
        free_block = tl.where((one >= 0) & (x == one // BLOCK), 0, free_block)
    c = tl.arange(0, CHUNKS)
    at_chunk = block[:, None] * CHUNKS + c[None, :]
    free_chunk = (first_of_block[:, None] == 1) & (((kept_chunks[:, None] >> c[None, :]) & 1) == 0) & (at_chunk < NC)
    o = tl.arange(0, CHUNK)
    at = chunk[:, None] * CHUNK + o[None, :]
    free = (first_of_chunk[:, None] == 1) & (((kept_tokens[:, None] >> o[None, :]) & 1) == 0) & (at < V)

    block_max = tl.load(block_max_ptr + row * NB + x, mask=free_block == 1, other=-float("inf"))
    block_sum = tl.load(block_sum_ptr + row * NB + x, mask=free_block == 1, other=0.0)
    chunk_max = tl.load(chunk_max_ptr + row * NC + at_chunk, mask=free_chunk, other=-float("inf"))
    chunk_sum = tl.load(chunk_sum_ptr + row * NC + at_chunk, mask=free_chunk, other=0.0)
    block_max = stored_logit(block_max, scale, temperature, CAPPED, PLAIN, RAW)
    chunk_max = stored_logit(chunk_max, scale, temperature, CAPPED, PLAIN, RAW)
    z = logit(tl.load(x_ptr + row * stride + at, mask=free, other=0.0), scale, softcap, temperature, CAPPED, PLAIN)
    z = tl.where(free, z, -float("inf"))
    top = tl.maximum(tl.max(tl.max(chunk_max, axis=1), axis=0), tl.max(tl.max(z, axis=1), axis=0))
    top = tl.maximum(tl.max(block_max, axis=0), top)
    base = tl.where(top > -float("inf"), top, 0.0)
    mass = tl.sum(block_sum * tl.exp2((block_max - base) * LOG2E), axis=0)
    mass += tl.sum(tl.sum(chunk_sum * tl.exp2((chunk_max - base) * LOG2E), axis=1), axis=0)
    mass += tl.sum(tl.sum(tl.exp2((z - base) * LOG2E), axis=1), axis=0)
    peak, log_sum = tl.load(norm_ptr + row * 2), tl.load(norm_ptr + row * 2 + 1)
    tl.store(log_tail_ptr + row, (base - peak) - log_sum + tl.log(mass))
