"""Which tokens to keep: the most probable ones, greedily, and always the sampled one.

Ties go to the lower token id, so that the choice depends on the row alone and not on the device, the batch around it or
the run. bf16 logits tie often: their spacing is 1/8 at a logit of 20.
"""

from __future__ import annotations

import torch
from torch import Tensor

from troll.policy.gather import normalised, row_chunks, scaled, work_dtype


def log_norms(logits: Tensor, temperature: float) -> Tensor:
    """log Σ e^z of every row as two numbers, max z and log Σ e^(z − max z), [N, V] → [N, 2].

    Their sum would be rounded at the size of the logits, 2e-4 at 4096. The second is not finite exactly where the row
    has a NaN, a +inf or only −inf.
    """
    norms = torch.empty(len(logits), 2, dtype=work_dtype(logits), device=logits.device)
    for rows in row_chunks(logits):
        z = scaled(logits[rows], temperature)
        peak = z.amax(-1, keepdim=True)
        norms[rows] = torch.cat([peak, (z - peak).exp_().sum(-1, keepdim=True).log_()], dim=-1)
    return norms


def undefined(log_norm: Tensor, sampled_logit: Tensor) -> Tensor:
    """Rows whose logits define no distribution, or none in which the sampled token can occur, [N, 2], [N] → [N]."""
    return ~(log_norm[:, 1].isfinite() & (sampled_logit > -torch.inf))


def largest(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and ids of the k largest entries of each row, in descending order, ties by ascending id."""
    if z.dtype != torch.float32:
        values, ids = z.sort(dim=-1, descending=True, stable=True)
        return values[:, :k], ids[:, :k]
    # One integer key a token: the value's bits in an order-preserving form above, the complement of the id below.
    bits = (z + 0.0).view(torch.int32)  # + 0.0 turns −0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = ordered.long().bitwise_left_shift_(32)
    keys |= torch.arange(z.shape[-1] - 1, -1, -1, device=z.device)
    ids = z.shape[-1] - 1 - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
    return z.gather(-1, ids), ids


def select(
    logits: Tensor, sampled: Tensor, log_norm: Tensor, max_support: int, tail_mass: float, temperature: float
) -> Tensor:
    """Ids of the kept tokens, [N, V] → [N, K]: the sampled token first, the others by falling probability, then −1.

    The most probable tokens are taken until what is left has at most ``tail_mass``, and never more than
    ``max_support``; a sampled token that is not among them takes one of those places.
    """
    K = min(max_support, logits.shape[-1])
    chosen = []
    for rows in row_chunks(logits):
        z, ids = largest(scaled(logits[rows], temperature), K)
        p = normalised(z, log_norm[rows]).double().exp()
        beyond = (1.0 - p.sum(-1, keepdim=True)).clamp(min=0.0)
        left = p.flip(-1).cumsum(-1).flip(-1) + beyond  # mass not yet taken when this token's turn comes
        keep = z > -torch.inf if tail_mass == 0 else (left > tail_mass) & (z > -torch.inf)
        chosen.append(_sampled_first(ids, keep, sampled[rows]))
    return torch.cat(chosen) if chosen else sampled.new_zeros(0, K)


def _sampled_first(ids: Tensor, keep: Tensor, sampled: Tensor) -> Tensor:
    """Move the sampled token to slot 0; if it was not kept it pushes the others back, the last one out when full."""
    kept = torch.where(keep, ids, -1)  # a prefix of the ids
    K = ids.shape[-1]
    here = kept == sampled[:, None]
    place = torch.where(here.any(-1), here.to(torch.int8).argmax(-1), K)[:, None]
    behind = torch.cat([sampled[:, None], kept[:, :-1]], dim=-1)
    return torch.where(torch.arange(K, device=ids.device) <= place, behind, kept)
