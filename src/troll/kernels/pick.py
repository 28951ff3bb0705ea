"""From the maxima and sums of ``scan`` to the support of a row: its most probable tokens, or given ones.

Exact in three levels: among the maxima of the blocks the K largest are K logits at least as large as the K-th of those
maxima, so the K largest logits, ties to the lower id, lie inside the K blocks with the largest maxima, ties to the
lower block; likewise the chunks among those blocks, and the logits among those chunks. A K-th largest is found by
bisection on integers, so that nothing is sorted but the K that were chosen, by counting.

The mass outside a support is never 1 − Σ kept, which would be rounding for a tail of 1e-6: it is summed from the blocks
that were not chosen, the chunks that were not, and the logits of chosen chunks that were not.
"""

import triton
import triton.language as tl

from troll.kernels.numbers import LOG2E, LOWEST, capped, finished, first_at_least, kth_largest, ordered
from troll.kernels.scan import CHUNK, CHUNKS

TINY = tl.constexpr(1e-30)  # below, a sum of probabilities in fp32 may have lost terms


@triton.jit
def logit(x, scale, softcap, temperature, CAPPED: tl.constexpr):
    """A logit as the reference reads it."""
    return finished(capped(x, scale, softcap, CAPPED), scale, temperature, CAPPED)


@triton.jit
def stored_logit(stored, scale, temperature, CAPPED: tl.constexpr, RAW: tl.constexpr):
    """The logit of a stored maximum."""
    z = stored.to(tl.float32)
    if RAW:
        z = finished(z, scale, temperature, CAPPED)
    return z


@triton.jit
def log_outside(
    x_ptr, chunk_max_ptr, chunk_sum_ptr, block_max_ptr, block_sum_ptr, id_ptr, V, NC, NB, peak, log_sum,
    scale, softcap, temperature,
    CAPPED: tl.constexpr, RAW: tl.constexpr, NBP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """log of the mass outside the ids [K] (−1: unused) of one row; pointers are those of the row."""
    k = tl.arange(0, KP)
    ids = tl.load(id_ptr + k, mask=k < K, other=-1).to(tl.int32)
    used = ids >= 0
    block, chunk = ids // (CHUNK * CHUNKS), ids // CHUNK
    # Of each kept token: is it the first of its block, of its chunk; which chunks of the block, which tokens of the
    # chunk are kept, as bits.
    first_of_block, first_of_chunk = used.to(tl.int32), used.to(tl.int32)
    kept_chunks, kept_tokens = tl.zeros([KP], tl.int32), tl.zeros([KP], tl.int32)
    x = tl.arange(0, NBP)
    other_block = (x < NB).to(tl.int32)
    for j in range(K):
        one = tl.load(id_ptr + j).to(tl.int32)
        is_used = one >= 0
        same_block = is_used & (block == one // (CHUNK * CHUNKS))
        same_chunk = is_used & (chunk == one // CHUNK)
        first_of_block = tl.where(same_block & (j < k), 0, first_of_block)
        first_of_chunk = tl.where(same_chunk & (j < k), 0, first_of_chunk)
        kept_chunks = tl.where(same_block, kept_chunks | (1 << (one // CHUNK) % CHUNKS), kept_chunks)
        kept_tokens = tl.where(same_chunk, kept_tokens | (1 << one % CHUNK), kept_tokens)
        other_block = tl.where(is_used & (x == one // (CHUNK * CHUNKS)), 0, other_block)
    c = tl.arange(0, CHUNKS)
    at_chunk = block[:, None] * CHUNKS + c[None, :]
    other_chunk = (first_of_block[:, None] == 1) & (((kept_chunks[:, None] >> c[None, :]) & 1) == 0) & (at_chunk < NC)
    o = tl.arange(0, CHUNK)
    at = chunk[:, None] * CHUNK + o[None, :]
    other = (first_of_chunk[:, None] == 1) & (((kept_tokens[:, None] >> o[None, :]) & 1) == 0) & (at < V)

    zb = tl.load(block_max_ptr + x, mask=other_block == 1, other=-float("inf"))
    zb = tl.maximum(stored_logit(zb, scale, temperature, CAPPED, RAW), LOWEST)
    zc = tl.load(chunk_max_ptr + at_chunk, mask=other_chunk, other=-float("inf"))
    zc = tl.maximum(stored_logit(zc, scale, temperature, CAPPED, RAW), LOWEST)
    z = tl.load(x_ptr + at, mask=other, other=-float("inf"))
    z = tl.where(other, tl.maximum(logit(z, scale, softcap, temperature, CAPPED), LOWEST), LOWEST)
    top = tl.maximum(tl.max(tl.max(zc, axis=1), axis=0), tl.max(tl.max(z, axis=1), axis=0))
    top = tl.maximum(tl.max(zb, axis=0), top)
    blocks = tl.load(block_sum_ptr + x, mask=other_block == 1, other=0.0) * tl.exp2((zb - top) * LOG2E)
    chunks = tl.load(chunk_sum_ptr + at_chunk, mask=other_chunk, other=0.0) * tl.exp2((zc - top) * LOG2E)
    tokens = tl.where(z > LOWEST, tl.exp2((z - top) * LOG2E), 0.0)
    mass = tl.sum(blocks, axis=0) + tl.sum(tl.sum(chunks, axis=1), axis=0) + tl.sum(tl.sum(tokens, axis=1), axis=0)
    return tl.where(mass > 0.0, (top - peak) - log_sum + tl.log(mass), -float("inf"))


@triton.jit
def most_probable(
    x_ptr, counted_ptr, sampled_ptr, chunk_max_ptr, chunk_sum_ptr, block_max_ptr, block_sum_ptr, norm_ptr,
    scratch_ptr, id_ptr, log_prob_ptr, log_tail_ptr, entropy_ptr,
    stride, V, NC, NB, scale, softcap, temperature, tail_mass, tail_mass_rest,
    CAPPED: tl.constexpr, RAW: tl.constexpr, MASKED: tl.constexpr, PRUNED: tl.constexpr, SHIFT: tl.constexpr,
    NBP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """The most probable tokens until what is left has ``tail_mass``, at most K, and the sampled one in slot 0."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    sampled = tl.load(sampled_ptr + row).to(tl.int32)
    peak, log_sum = tl.load(norm_ptr + row * 2), tl.load(norm_ptr + row * 2 + 1)
    x_ptr += row * stride
    chosen = logit(tl.load(x_ptr + sampled), scale, softcap, temperature, CAPPED)
    defined = (tl.abs(log_sum) < float("inf")) & (peak < float("inf")) & (chosen > -float("inf"))
    if MASKED:
        defined = defined & (tl.load(counted_ptr + row) != 0)
    tl.store(id_ptr + row * K + k, tl.full([KP], -1, tl.int64), mask=k < K)
    tl.store(log_prob_ptr + row * K + k, tl.full([KP], -float("inf"), tl.float32), mask=k < K)
    if not defined:
        tl.store(log_tail_ptr + row, 0.0)
        tl.store(entropy_ptr + row, 0.0)
        return
    chunk_max_ptr += row * NC
    chunk_sum_ptr += row * NC
    block_max_ptr += row * NB
    block_sum_ptr += row * NB
    scratch_ptr += row * KP
    id_ptr += row * K
    log_prob_ptr += row * K
    lowest: tl.constexpr = -(2**31) >> SHIFT

    # blocks
    x = tl.arange(0, NBP)
    top = tl.load(block_max_ptr + x, mask=x < NB, other=-float("inf"))
    key = tl.where(x < NB, ordered(top.to(tl.float32)) >> SHIFT, lowest)
    high = tl.max(key, axis=0)
    t = kth_largest(key, tl.min(key, axis=0), high, KP)
    keep, place = first_at_least(key, t, KP)
    z = tl.maximum(stored_logit(top, scale, temperature, CAPPED, RAW), LOWEST)
    sums = tl.load(block_sum_ptr + x, mask=x < NB, other=0.0)
    beyond = tl.sum(tl.where(keep, 0.0, sums * tl.exp2((z - peak) * LOG2E)), axis=0)
    tl.store(scratch_ptr + place, x.to(tl.int64), mask=keep)
    tl.debug_barrier()

    # chunks of those blocks
    j = tl.arange(0, KP * CHUNKS)
    chunk = tl.load(scratch_ptr + j // CHUNKS).to(tl.int32) * CHUNKS + j % CHUNKS
    top = tl.load(chunk_max_ptr + chunk, mask=chunk < NC, other=-float("inf"))
    key = tl.where(chunk < NC, ordered(top.to(tl.float32)) >> SHIFT, lowest)
    t = kth_largest(key, t, high, KP)
    keep, place = first_at_least(key, t, KP)
    z = tl.maximum(stored_logit(top, scale, temperature, CAPPED, RAW), LOWEST)
    sums = tl.load(chunk_sum_ptr + chunk, mask=chunk < NC, other=0.0)
    beyond += tl.sum(tl.where(keep, 0.0, sums * tl.exp2((z - peak) * LOG2E)), axis=0)
    tl.debug_barrier()
    tl.store(scratch_ptr + place, chunk.to(tl.int64), mask=keep)
    tl.debug_barrier()

    # logits of those chunks
    j = tl.arange(0, KP * CHUNK)
    at = tl.load(scratch_ptr + j // CHUNK).to(tl.int32) * CHUNK + j % CHUNK
    value = tl.load(x_ptr + at, mask=at < V, other=-float("inf"))
    z = tl.where(at < V, logit(value, scale, softcap, temperature, CAPPED), -float("inf"))
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
    z = logit(tl.load(x_ptr + ids, mask=ids < V, other=0.0), scale, softcap, temperature, CAPPED)
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
    unlisted = tl.sum((here & (k < K)).to(tl.int32), axis=0) == 0
    place = tl.min(tl.where(keep & here, k, K), axis=0)
    slot = tl.where(k == place, 0, tl.where(k < place, k + 1, k))
    keep = keep & (slot < K)
    tl.store(id_ptr, sampled.to(tl.int64))
    tl.store(log_prob_ptr, chosen - peak - log_sum)
    tl.store(id_ptr + slot, ids.to(tl.int64), mask=keep)
    tl.store(log_prob_ptr + slot, log_p, mask=keep)
    dropped = tl.sum(tl.where((k >= K) | keep | here, 0.0, p), axis=0)
    tail = beyond + dropped
    log_tail = tl.log(tail)
    if (tail < TINY) | unlisted:  # a sampled token that is not among the K most probable is in ``beyond``, but kept
        tl.debug_barrier()
        log_tail = log_outside(
            x_ptr, chunk_max_ptr, chunk_sum_ptr, block_max_ptr, block_sum_ptr, id_ptr, V, NC, NB, peak, log_sum,
            scale, softcap, temperature, CAPPED, RAW, NBP, K, KP,
        )  # fmt: skip
    tl.store(log_tail_ptr + row, log_tail)


@triton.jit
def given(
    x_ptr, counted_ptr, sampled_ptr, support_ptr, chunk_max_ptr, chunk_sum_ptr, block_max_ptr, block_sum_ptr, norm_ptr,
    id_ptr, log_prob_ptr, log_tail_ptr, entropy_ptr,
    stride, V, NC, NB, scale, softcap, temperature,
    CAPPED: tl.constexpr, RAW: tl.constexpr, MASKED: tl.constexpr,
    NBP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """The log-probabilities at given tokens [N, K] (−1: unused); one that is impossible leaves the support."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    sampled = tl.load(sampled_ptr + row).to(tl.int32)
    peak, log_sum = tl.load(norm_ptr + row * 2), tl.load(norm_ptr + row * 2 + 1)
    x_ptr += row * stride
    id_ptr += row * K
    chosen = logit(tl.load(x_ptr + sampled), scale, softcap, temperature, CAPPED)
    defined = (tl.abs(log_sum) < float("inf")) & (peak < float("inf")) & (chosen > -float("inf"))
    if MASKED:
        defined = defined & (tl.load(counted_ptr + row) != 0)
    ids = tl.where(defined, tl.load(support_ptr + row * K + k, mask=k < K, other=-1), -1)
    z = logit(tl.load(x_ptr + ids, mask=ids >= 0, other=0.0), scale, softcap, temperature, CAPPED)
    used = (ids >= 0) & (z > -float("inf"))
    tl.store(id_ptr + k, tl.where(used, ids, -1), mask=k < K)
    tl.store(log_prob_ptr + row * K + k, tl.where(used, z - peak - log_sum, -float("inf")), mask=k < K)
    if not defined:
        tl.store(log_tail_ptr + row, 0.0)
        tl.store(entropy_ptr + row, 0.0)
        return
    tl.debug_barrier()
    log_tail = log_outside(
        x_ptr, chunk_max_ptr + row * NC, chunk_sum_ptr + row * NC, block_max_ptr + row * NB, block_sum_ptr + row * NB,
        id_ptr, V, NC, NB, peak, log_sum, scale, softcap, temperature, CAPPED, RAW, NBP, K, KP,
    )  # fmt: skip
    tl.store(log_tail_ptr + row, log_tail)
