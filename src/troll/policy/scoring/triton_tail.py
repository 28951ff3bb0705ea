"""The mass outside a support: never 1 − Σ kept, which would be rounding for a tail of 1e-6.

It is summed, relative to its own largest logit, from the blocks without a kept token, the chunks without one in the
other blocks, and the tokens that are not kept in the other chunks.
"""

import triton
import triton.language as tl

from troll.policy.scoring.triton_bits import LOG2E, logit
from troll.policy.scoring.triton_scan import BLOCK, CHUNK, CHUNKS
from troll.policy.scoring.triton_select import stored_logit


@triton.jit
def outside(
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
