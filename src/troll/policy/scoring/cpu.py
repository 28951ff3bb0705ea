"""The same as ``reference``, arranged for CPUs: one exponential per logit, no row is sorted, no buffer is made twice.

A chunk of rows is read once into a buffer that the next chunk uses again. In it the logits become d = z − max z, then
e^d, from which come log Σ e^z, the entropy log Σ e^d − Σ e^d d / Σ e^d and, with the kept tokens set to zero, the tail.
On the way back e^(log p − log τ), the share of a token in the tail, is scaled by one number per row:

    ∂/∂z_j = share_j (g_τ − Γ τ)  (j ∉ S)

and the few kept tokens are written over it. Rows that do not count are not read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from troll.policy.scoring import reference
from troll.policy.scoring.reference import here, hidden, keep_enough, log_tail_of, normalised
from troll.policy.scoring.types import LogitTransform, MostProbable, Scores, Upstream, row_chunks, work_dtype

_BLOCKS = (64, 32)  # logits; amax of shorter ones is not vectorised
_LOWEST = -1e4  # e^ of it is zero in every type, and so is e^ of it times it


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
    for number, empty in zip(scores, (-1, -torch.inf, 0.0, 0.0, 0.0), strict=True):
        number.fill_(empty)
    room = _room(tile, 2)
    for rows, at in _chunks(tile, counted):
        given = support if isinstance(support, MostProbable) else support[rows][at]
        part = _score(tile[rows][at], logit, sampled[rows][at], given, entropy, room)
        for number, found in zip(scores.at(rows), part, strict=True):
            number[at] = found


def gradient(tile: Tensor, logit: LogitTransform, scores: Scores, upstream: Upstream, out: Tensor, first: int) -> None:
    """See ``troll.policy.scoring.gradient``."""
    room = _room(tile, 3)
    for rows, at in _chunks(tile, scores.token_ids[:, 0] >= 0):
        part = Scores(*(x[at] for x in scores.at(rows)))
        arriving = Upstream(*(None if x is None else x[at] for x in upstream.at(rows)))
        into, n = out[rows], len(part.log_tail)
        straight = isinstance(at, slice) and into.dtype == room[0].dtype
        g = _gradient(tile[rows][at], logit, part, arriving, into if straight else room[0][:n], room, first)
        if isinstance(at, Tensor):
            into.zero_()
            into[at] = g.to(into.dtype)
        elif not straight:
            into.copy_(g)


def _chunks(tile: Tensor, wanted: Tensor | None) -> Iterator[tuple[slice, Tensor | slice]]:
    """Chunks of rows, and those of their rows that are wanted."""
    for rows in row_chunks(tile):
        everything = wanted is None or bool(wanted[rows].all())
        yield rows, slice(None) if wanted is None or everything else wanted[rows].nonzero()[:, 0]


def _room(tile: Tensor, buffers: int) -> list[Tensor]:
    """Room for the logits of a chunk, several times. What is never written takes no memory."""
    rows = next(row_chunks(tile), slice(0, 0)).stop
    return [tile.new_empty(rows, tile.shape[-1], dtype=work_dtype(tile.dtype)) for _ in range(buffers)]


def _read(x: Tensor, logit: LogitTransform, out: Tensor, slope: Tensor | None = None) -> Tensor:
    """``logit.read``, in ``out``, or x itself where there is nothing to do; the soft cap's derivative in ``slope``."""
    if x.dtype == out.dtype and logit == LogitTransform():
        return x
    out.copy_(x)
    if logit.scale != 1.0:
        out.mul_(logit.scale)
    if logit.softcap is not None:
        out.div_(logit.softcap).tanh_()
        if slope is not None:
            torch.mul(out, out, out=slope).neg_().add_(1.0)
        out.mul_(logit.softcap)
    return out if logit.temperature == 1.0 else out.div_(logit.temperature)


def _score(
    x: Tensor, logit: LogitTransform, sampled: Tensor, support: MostProbable | Tensor, entropy: bool, room: list[Tensor]
) -> Scores:
    d, e = (buffer[: len(x)] for buffer in room)
    z = _read(x, logit, d)
    if isinstance(support, MostProbable):
        ids = largest(z, min(support.max_support, z.shape[-1]))
        peak = z.gather(-1, ids[:, :1])
    else:
        ids = torch.where(z.gather(-1, support.clamp(min=0)) == -torch.inf, -1, support)
        peak = z.amax(-1, keepdim=True)

    torch.sub(z, peak, out=d)
    e = torch.exp(d.clamp_(min=_LOWEST), out=e) if entropy else d.exp_()
    total = e.sum(-1, keepdim=True)
    log_norm = torch.cat([peak, total.log()], dim=-1)
    information = log_norm[:, 1] - d.mul_(e).sum(-1) / total[:, 0] if entropy else torch.zeros_like(log_norm[:, 1])

    def log_probs_at(token_ids: Tensor) -> Tensor:
        return normalised(logit.read(x.gather(-1, token_ids.clamp(min=0))), log_norm)

    if isinstance(support, MostProbable):
        mass = e.gather(-1, ids)
        beyond = e.scatter_(-1, ids, 0.0).sum(-1) / total[:, 0]
        e.scatter_(-1, ids, mass)
        ids = keep_enough(ids, log_probs_at(ids), beyond, sampled, support.tail_mass)
    defined = log_norm[:, 1].isfinite() & (log_probs_at(sampled[:, None])[:, 0] > -torch.inf)
    ids = torch.where(defined[:, None], ids, -1)
    tail = e.scatter_(-1, hidden(ids), 0.0).sum(-1)
    log_tail = torch.where(defined, (tail / total[:, 0]).log(), 0.0)
    # Terms that have underflowed are missing, of which there are fewer than 2²⁴.
    faint = (defined & (tail < torch.finfo(e.dtype).tiny * 2.0**48)).nonzero()[:, 0]
    if len(faint):
        log_tail[faint] = log_tail_of(normalised(logit.read(x[faint]), log_norm[faint]), ids[faint])
    log_probs = log_probs_at(ids).masked_fill(ids < 0, -torch.inf)
    return Scores(ids, log_probs, log_tail, torch.where(defined, information, 0.0), log_norm)


def largest(z: Tensor, k: int) -> Tensor:
    """Ids of the k largest entries of each row, in descending order, ties by ascending id.

    They lie in the k blocks with the largest maxima, where of equal blocks the first count as larger: each of these
    holds an entry that comes before every entry of the other blocks. What is behind the last whole block is looked at
    in any case.
    """
    V = z.shape[-1]
    for width in _BLOCKS:
        if 6 * k * width <= V:  # otherwise all entries at once are faster
            blocks = z[:, : V - V % width].view(len(z), V // width, width)
            best = _first(blocks.amax(-1), k).sort(dim=-1).values
            within = (best[:, :, None] * width + torch.arange(width, device=z.device)).flatten(1)
            behind = torch.arange(V - V % width, V, device=z.device).expand(len(z), -1)
            ids = torch.cat([within, behind], dim=-1)  # ascending, so that ties among them go the right way
            return ids.gather(-1, _first(z.gather(-1, ids), k))
    return _first(z, k)


def _first(z: Tensor, k: int) -> Tensor:
    """``largest``, from all entries at once."""
    if z.dtype != torch.float32:
        return reference.largest(z, k)
    # One integer key an entry: the value's bits in an order-preserving form above, the complement of the id below.
    bits = (z + 0.0).view(torch.int32)  # + 0.0 turns −0.0 into 0.0
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long().bitwise_left_shift_(32)
    keys |= torch.arange(z.shape[-1] - 1, -1, -1, device=z.device)
    return z.shape[-1] - 1 - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


def _gradient(
    x: Tensor, logit: LogitTransform, scores: Scores, upstream: Upstream, out: Tensor, room: list[Tensor], first: int
) -> Tensor:
    """The gradient of rows that have a support, in ``out``, which may be x."""
    ids, peak, shift = scores.token_ids, scores.log_norm[:, :1], scores.log_norm[:, 1:]
    used, p = ids >= 0, scores.log_probs.exp()
    kept = torch.where(used, 0.0 if upstream.log_probs is None else upstream.log_probs, 0.0)
    total = kept.sum(-1, keepdim=True)
    log_tail, tail = torch.zeros_like(shift), torch.zeros_like(shift)
    if upstream.log_tail is not None:  # none from an empty tail, and log p in the place of log p − log τ
        empty = scores.log_tail == -torch.inf
        log_tail = scores.log_tail.masked_fill(empty, 0.0)[:, None]
        tail = upstream.log_tail.masked_fill(empty, 0.0)[:, None]
        total = total + tail
        shift = shift + log_tail
    factor = logit.scale / logit.temperature
    outside, kept = (tail - total * log_tail.exp()) * factor, (kept - p * total) * factor

    slope = None if logit.softcap is None else room[2][: len(x)]
    z = _read(x, logit, room[0][: len(x)], slope)
    g = torch.sub(z, peak, out=out).sub_(shift)
    if upstream.entropy is None:
        g.exp_().mul_(outside)
    else:  # − p (log p + H) g_H with p = share · τ and log p = g + log τ
        weight, entropy = upstream.entropy[:, None] * factor, scores.entropy[:, None]
        kept = kept - torch.where(used, p * (scores.log_probs + entropy), 0.0) * weight
        weight = weight * log_tail.exp()
        share = torch.exp(g.clamp_(min=_LOWEST), out=room[1][: len(x)])
        g.add_(log_tail + entropy).mul_(-weight).add_(outside).mul_(share)
    at, slots = here(ids, first, x.shape[-1]).nonzero(as_tuple=True)
    g[at, ids[at, slots] - first] = kept[at, slots]
    return g if slope is None else g.mul_(slope)
