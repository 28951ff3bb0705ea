"""``troll.policy.rows`` on GPUs: ``score`` and ``gradient`` with the signatures and the meaning they have there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from troll.kernels.outside import outside
from troll.kernels.pick import given, most_probable
from troll.kernels.scan import BLOCK, CHUNK, CHUNKS, scan
from troll.kernels.spread import PER_ROW, place, prepare, scale, spread

if TYPE_CHECKING:
    from troll.policy.rows.types import Logit, MostProbable, Scores, Upstream

SCAN = {"BLOCKS": 4, "num_warps": 1}
PICK = {"num_warps": 4}
OUTSIDE = {"num_warps": 4}
SPREAD = {"BLOCK": 2048, "num_warps": 4}
_WARPS = 8192  # that a scan is cut into, for fewer rows than this
_SCRATCH_BYTES = 1 << 26  # or a sixteenth of what is read
_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # bits of fp32 that numbers of the type leave zero


def score(
    tile: Tensor,
    logit: Logit,
    sampled: Tensor,
    support: MostProbable | Tensor,
    counted: Tensor | None,
    entropy: bool,
    scores: Scores,
) -> None:
    """See ``troll.policy.rows.score``."""
    tile = tile if tile.stride(-1) == 1 else tile.contiguous()
    sampled, counted = sampled.contiguous(), None if counted is None else counted.contiguous()
    N, V = tile.shape
    chunks = triton.cdiv(V, CHUNK.value)
    if N == 0:
        return
    room = max(_SCRATCH_BYTES, N * V * tile.element_size() // 16)
    at_once = max(256, room // (8 * chunks))
    for start in range(0, N, at_once):
        rows = slice(start, min(start + at_once, N))
        part = support[rows] if isinstance(support, Tensor) else support
        _score(
            tile[rows],
            logit,
            sampled[rows],
            part,
            None if counted is None else counted[rows],
            entropy,
            scores.at(rows),
        )


def _score(
    tile: Tensor,
    logit: Logit,
    sampled: Tensor,
    support: MostProbable | Tensor,
    counted: Tensor | None,
    entropy: bool,
    scores: Scores,
) -> None:
    N, V = tile.shape
    K = scores.token_ids.shape[-1]
    KP = triton.next_power_of_2(K)
    NC = triton.cdiv(V, CHUNK.value)
    NB = triton.cdiv(NC, CHUNKS.value)
    NBP = max(triton.next_power_of_2(NB), KP)
    raw = tile.dtype != torch.float32 and logit.softcap is None
    stored = tile.dtype if raw else torch.float32
    chunk_max, block_max = tile.new_empty(N, NC, dtype=stored), tile.new_empty(N, NB, dtype=stored)
    chunk_sum, block_sum = tile.new_empty(N, NC, dtype=torch.float32), tile.new_empty(N, NB, dtype=torch.float32)
    mask = sampled if counted is None else counted.view(torch.uint8)
    along = tile.new_empty(N, NB if entropy else 1, dtype=torch.float32)
    stride, numbers, reading = tile.stride(0), _numbers(logit), {**_reading(logit), "RAW": raw}
    flags = {**reading, "MASKED": counted is not None, "ENTROPY": entropy}
    size = {"NBP": NBP, "KP": KP}  # compiled for; a K that changes from batch to batch is not
    chunks, blocks = (chunk_max, chunk_sum), (block_max, block_sum)
    width = _width(N, V)
    scan[(N, triton.cdiv(V, width))](
        tile, mask, *chunks, *blocks, along, stride, V, NC, NB, width, *numbers, **flags, **SCAN
    )
    if isinstance(support, Tensor):
        given[(N,)](
            tile, mask, sampled, support.contiguous(), *blocks, along, *scores,
            stride, V, NB, K, *numbers, **flags, **size, **PICK,
        )  # fmt: skip
    else:
        scratch = tile.new_empty(N, KP, dtype=torch.int64)
        most_probable[(N,)](
            tile, mask, sampled, *chunks, *blocks, along, scratch, *scores,
            stride, V, NC, NB, K, *numbers, *_in_two(support.tail_mass),
            **flags, **size, PRUNED=support.tail_mass > 0, SHIFT=_SHIFT[tile.dtype] if raw else 0, **PICK,
        )  # fmt: skip
    outside[(N,)](
        tile, *chunks, *blocks, scores.token_ids, scores.log_norm, scores.log_tail,
        stride, V, NC, NB, K, *numbers, **reading, **size, **OUTSIDE,
    )  # fmt: skip


def gradient(tile: Tensor, logit: Logit, scores: Scores, upstream: Upstream, out: Tensor, first: int) -> None:
    """See ``troll.policy.rows.gradient``."""
    (N, V), K = tile.shape, scores.token_ids.shape[-1]
    if N == 0:
        return
    if out.stride(-1) != 1:
        raise ValueError("the gradient is written to rows without gaps")
    tile = tile if tile.stride(-1) == 1 else tile.contiguous()
    KP = triton.next_power_of_2(K)
    numbers = _numbers(logit)
    at_support = scores.log_probs.new_empty(N, K)
    per_row = scores.log_probs.new_empty(N, PER_ROW.value)
    g, g_tail, g_entropy = (None if x is None else x.contiguous() for x in upstream)
    ids, log_probs, log_tail, entropy, log_norm = (x.contiguous() for x in scores)
    nothing = log_tail
    prepare[(N,)](
        ids, log_probs, log_tail, entropy, log_norm,
        nothing if g is None else g, nothing if g_tail is None else g_tail, nothing if g_entropy is None else g_entropy,
        at_support, per_row, K, *numbers,
        CAPPED=logit.softcap is not None, HAS_G=g is not None, HAS_TAIL=g_tail is not None,
        HAS_ENTROPY=g_entropy is not None, KP=KP, num_warps=1,
    )  # fmt: skip
    blocks = triton.cdiv(V, SPREAD["BLOCK"])
    spread[(N * blocks,)](
        tile, out, ids, log_tail, entropy, per_row, tile.stride(0), out.stride(0), V, blocks, K, *numbers,
        **_reading(logit), HAS_ENTROPY=g_entropy is not None, **SPREAD,
    )  # fmt: skip
    place[(N,)](ids, at_support, out, out.stride(0), first, V, K, KP=KP, num_warps=1)


def scale_(x: Tensor, factor: Tensor) -> None:
    """x ← factor x for a factor on the device, without a pass over x where it is 1."""
    scale[(triton.cdiv(x.numel(), 8192),)](x, factor, x.numel(), BLOCK=8192, num_warps=8)


def _width(N: int, V: int) -> int:
    """How much of a row a warp reads, so that there are warps enough and each has enough to do."""
    step: int = SCAN["BLOCKS"] * BLOCK.value
    parts = max(1, min(_WARPS // max(1, N), V // (4 * step)))
    return -(-V // (parts * step)) * step


def _numbers(logit: Logit) -> tuple[float, float, float]:
    return logit.scale, logit.softcap or 1.0, logit.temperature


def _reading(logit: Logit) -> dict[str, Any]:
    """What need not be compiled."""
    return {
        "CAPPED": logit.softcap is not None,
        "PLAIN": logit.scale == logit.temperature == 1 and logit.softcap is None,
    }


def _in_two(x: float) -> tuple[float, float]:
    """x as the sum of two fp32 numbers: a kernel takes no fp64 argument."""
    high = torch.tensor(x, dtype=torch.float32).item()
    return high, x - high
