"""``troll.policy.scoring`` on GPUs: ``score`` and ``gradient`` with the signatures and the meaning they have there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
from torch import Tensor

from troll.implementation import on_device
from troll.policy.scoring.triton_backward import PER_ROW, logits_backward, prepare_backward, scale, write_support
from troll.policy.scoring.triton_forward import BLOCK, CHUNK, CHUNKS, scan, score_support, select_top_k, tail_mass

if TYPE_CHECKING:
    from troll.policy.scoring.types import LogitTransform, MostProbable, Scores, Upstream

SCAN = {"BLOCKS": 4, "num_warps": 1}
SELECT = {"num_warps": 4}
TAIL = {"num_warps": 4}
BACKWARD = {"BLOCK": 2048, "num_warps": 4}
_WARPS = 8192  # that a scan is cut into, for fewer rows than this
_SCRATCH_BYTES = 1 << 26  # or a sixteenth of what is read
_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # bits of fp32 that numbers of the type leave zero


def score(
    tile: Tensor,
    logit: LogitTransform,
    sampled: Tensor,
    support: MostProbable | Tensor,
    counted: Tensor | None,
    entropy: bool,
    scores: Scores,
) -> None:
    """See ``troll.policy.scoring.score``."""
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
        mask = None if counted is None else counted[rows]
        with on_device(tile.device):
            _score(tile[rows], logit, sampled[rows], part, mask, entropy, scores.at(rows))


def _score(
    tile: Tensor,
    logit: LogitTransform,
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
        score_support[(N,)](
            tile, mask, sampled, support.contiguous(), *blocks, along, *scores,
            stride, V, NB, K, *numbers, **flags, **size, **SELECT,
        )  # fmt: skip
    else:
        scratch = tile.new_empty(N, KP, dtype=torch.int64)
        select_top_k[(N,)](
            tile, mask, sampled, *chunks, *blocks, along, scratch, *scores,
            stride, V, NC, NB, K, *numbers, *_in_two(support.tail_mass),
            **flags, **size, PRUNED=support.tail_mass > 0, SHIFT=_SHIFT[tile.dtype] if raw else 0, **SELECT,
        )  # fmt: skip
    tail_mass[(N,)](
        tile, *chunks, *blocks, scores.token_ids, scores.log_norm, scores.log_tail,
        stride, V, NC, NB, K, *numbers, **reading, **size, **TAIL,
    )  # fmt: skip


def gradient(tile: Tensor, logit: LogitTransform, scores: Scores, upstream: Upstream, out: Tensor, first: int) -> None:
    """See ``troll.policy.scoring.gradient``."""
    if len(tile) == 0:
        return
    tile = tile if tile.stride(-1) == 1 else tile.contiguous()
    rows = out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    with on_device(tile.device):
        _gradient(tile, logit, scores, upstream, rows, first)
    if rows is not out:
        out.copy_(rows)


def _gradient(tile: Tensor, logit: LogitTransform, scores: Scores, upstream: Upstream, out: Tensor, first: int) -> None:
    (N, V), K = tile.shape, scores.token_ids.shape[-1]
    KP, numbers, is_capped = triton.next_power_of_2(K), _numbers(logit), logit.softcap is not None
    at_support = scores.log_probs.new_empty(N, K)
    per_row = scores.log_probs.new_empty(N, PER_ROW.value)
    ids, log_probs, log_tail, entropy, log_norm = (x.contiguous() for x in scores)
    arriving = [log_tail if x is None else x.contiguous() for x in upstream]  # any pointer where there is nothing
    has_g, has_tail, has_entropy = (x is not None for x in upstream)
    prepare_backward[(N,)](
        ids, log_probs, log_tail, entropy, log_norm, *arriving, at_support, per_row, K, *numbers,
        CAPPED=is_capped, HAS_G=has_g, HAS_TAIL=has_tail, HAS_ENTROPY=has_entropy, KP=KP, num_warps=1,
    )  # fmt: skip
    blocks = triton.cdiv(V, BACKWARD["BLOCK"])
    logits_backward[(N * blocks,)](
        tile, out, ids, log_tail, entropy, per_row, tile.stride(0), out.stride(0), V, blocks, K, *numbers,
        **_reading(logit), HAS_ENTROPY=has_entropy, **BACKWARD,
    )  # fmt: skip
    write_support[(N,)](ids, at_support, out, out.stride(0), first, V, K, KP=KP, num_warps=1)


def scale_(x: Tensor, factor: Tensor) -> None:
    """x ← factor x for a factor on the device, without a pass over x where it is 1."""
    if x.numel():
        with on_device(x.device):
            scale[(triton.cdiv(x.numel(), 8192),)](x, factor, x.numel(), BLOCK=8192, num_warps=8)


def _width(N: int, V: int) -> int:
    """How much of a row a warp reads, so that there are warps enough and each has enough to do."""
    step: int = SCAN["BLOCKS"] * BLOCK.value
    parts = max(1, min(_WARPS // max(1, N), V // (4 * step)))
    return -(-V // (parts * step)) * step


def _numbers(logit: LogitTransform) -> tuple[float, float, float]:
    return logit.scale, logit.softcap or 1.0, logit.temperature


def _reading(logit: LogitTransform) -> dict[str, Any]:
    """What need not be compiled."""
    return {
        "CAPPED": logit.softcap is not None,
        "PLAIN": logit.scale == logit.temperature == 1 and logit.softcap is None,
    }


def _in_two(x: float) -> tuple[float, float]:
    """x as the sum of two fp32 numbers: a kernel takes no fp64 argument."""
    high = float(np.float32(x))
    return high, x - high
