"""``troll.policy.rows`` on GPUs: ``score`` and ``gradient`` with the signatures and the meaning they have there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from troll.kernels.pick import given, most_probable
from troll.kernels.scan import CHUNK, CHUNKS, scan
from troll.kernels.spread import PER_ROW, place, prepare, spread

if TYPE_CHECKING:
    from troll.policy.rows.types import Logit, MostProbable, Scores, Upstream

SCAN = {"BLOCKS": 8, "num_warps": 4}
PICK = {"num_warps": 4}
SPREAD = {"BLOCK": 2048, "num_warps": 4}
_SCRATCH_BYTES = 1 << 26
_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # bits of fp32 that numbers of the type leave zero


def score(
    tile: Tensor,
    logit: Logit,
    sampled: Tensor,
    support: MostProbable | Tensor,
    counted: Tensor | None,
    entropy: bool,
) -> Scores:
    """See ``troll.policy.rows.score``."""
    from troll.policy.rows.types import Scores

    tile = tile if tile.stride(-1) == 1 else tile.contiguous()
    N, V = tile.shape
    scores = Scores.empty(N, V, support, tile.dtype, tile.device)
    chunks = triton.cdiv(V, CHUNK.value)
    at_once = max(256, _SCRATCH_BYTES // (8 * chunks))
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
    return scores


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
    numbers = _numbers(logit)
    flags: dict[str, Any] = {"CAPPED": logit.softcap is not None, "RAW": raw, "MASKED": counted is not None}
    scan[(N,)](
        tile, mask, chunk_max, chunk_sum, block_max, block_sum, scores.log_norm, scores.entropy,
        tile.stride(0), V, NC, NB, *numbers,
        **flags, ENTROPY=entropy, CHOICE=True, STAGES=1 if entropy else 3, **SCAN,
    )  # fmt: skip
    summary = chunk_max, chunk_sum, block_max, block_sum, scores.log_norm
    found = scores.token_ids, scores.log_probs, scores.log_tail, scores.entropy
    if isinstance(support, Tensor):
        given[(N,)](
            tile, mask, sampled, support.contiguous(), *summary, *found, tile.stride(0), V, NC, NB, *numbers,
            **flags, NBP=NBP, K=K, KP=KP, **PICK,
        )  # fmt: skip
        return
    scratch = tile.new_empty(N, KP, dtype=torch.int64)
    shift = _SHIFT[tile.dtype] if raw else 0
    most_probable[(N,)](
        tile, mask, sampled, *summary, scratch, *found, tile.stride(0), V, NC, NB, *numbers,
        *_in_two(support.tail_mass), **flags, PRUNED=support.tail_mass > 0, SHIFT=shift, NBP=NBP, K=K, KP=KP, **PICK,
    )  # fmt: skip


def gradient(tile: Tensor, logit: Logit, scores: Scores, upstream: Upstream, out: Tensor) -> None:
    """See ``troll.policy.rows.gradient``."""
    (N, V), K = tile.shape, scores.token_ids.shape[-1]
    if N == 0:
        return
    if out.stride(-1) != 1:
        raise ValueError("the gradient is written to rows without gaps")
    tile = tile if tile.stride(-1) == 1 else tile.contiguous()
    KP = triton.next_power_of_2(K)
    numbers, is_capped = _numbers(logit), logit.softcap is not None
    at_support = scores.log_probs.new_empty(N, K)
    per_row = scores.log_probs.new_empty(N, PER_ROW.value)
    g, g_tail, g_entropy = (None if x is None else x.contiguous() for x in upstream)
    ids, log_probs, log_tail, entropy, log_norm = (x.contiguous() for x in scores)
    nothing = log_tail
    prepare[(N,)](
        ids, log_probs, log_tail, entropy, log_norm,
        nothing if g is None else g, nothing if g_tail is None else g_tail, nothing if g_entropy is None else g_entropy,
        at_support, per_row, *numbers,
        CAPPED=is_capped, HAS_G=g is not None, HAS_TAIL=g_tail is not None, HAS_ENTROPY=g_entropy is not None,
        K=K, KP=KP, num_warps=1,
    )  # fmt: skip
    blocks = triton.cdiv(V, SPREAD["BLOCK"])
    spread[(N * blocks,)](
        tile, out, ids, log_tail, entropy, per_row, tile.stride(0), out.stride(0), V, blocks, K, *numbers,
        CAPPED=is_capped, HAS_ENTROPY=g_entropy is not None, **SPREAD,
    )  # fmt: skip
    place[(N,)](ids, at_support, out, out.stride(0), K=K, KP=KP, num_warps=1)


def _numbers(logit: Logit) -> tuple[float, float, float]:
    return logit.scale, logit.softcap or 1.0, logit.temperature


def _in_two(x: float) -> tuple[float, float]:
    """x as the sum of two fp32 numbers: a kernel takes no fp64 argument."""
    high = torch.tensor(x, dtype=torch.float32).item()
    return high, x - high
