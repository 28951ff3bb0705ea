"""The scores of rows and their gradient as the formulas have them: the definition of what ``score`` computes.

Ties go to the lower token id, so that the choice depends on the row alone and not on the device, the batch around it or
the run. bf16 logits tie often: their spacing is 1/8 at a logit of 20.
"""

from __future__ import annotations

import torch
from torch import Tensor

from troll.policy.scoring.types import LogitTransform, MostProbable, Scores, Upstream, row_chunks


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
    for rows in row_chunks(tile):
        z = logit.read(tile[rows])
        log_norm = log_norms(z)
        log_p = normalised(z, log_norm)
        defined = log_norm[:, 1].isfinite() & (log_p.gather(-1, sampled[rows, None])[:, 0] > -torch.inf)
        if counted is not None:
            defined &= counted[rows]
        if isinstance(support, MostProbable):
            ids = select(z, log_p, sampled[rows], support)
        else:
            ids = torch.where(z.gather(-1, support[rows].clamp(min=0)) == -torch.inf, -1, support[rows])
        ids = torch.where(defined[:, None], ids, -1)
        information = torch.zeros_like(log_norm[:, 0])
        if entropy:
            information = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)  # 0 · −inf is 0 here
            information = torch.where(defined, information, 0.0)
        scores.put(rows, Scores(ids, at_tokens(log_p, ids), log_tail_of(log_p, ids), information, log_norm))


def log_norms(z: Tensor) -> Tensor:
    """log Σ e^z of every row as two numbers, [N, V] → [N, 2]: see ``Scores.log_norm``."""
    peak = z.amax(-1, keepdim=True)
    return torch.cat([peak, (z - peak).exp().sum(-1, keepdim=True).log()], dim=-1)


def normalised(z: Tensor, log_norm: Tensor) -> Tensor:
    """log softmax of logits [N, K], from the two parts of their log-sum-exp [N, 2]."""
    return z - log_norm[:, :1] - log_norm[:, 1:]


def largest(z: Tensor, k: int) -> Tensor:
    """Ids of the k largest entries of each row, in descending order, ties by ascending id."""
    return z.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def select(z: Tensor, log_p: Tensor, sampled: Tensor, support: MostProbable) -> Tensor:
    """Ids of the kept tokens, [N, V] → [N, K]: the sampled token first, the others by falling probability, then −1.

    The most probable tokens are taken until what is left has at most ``tail_mass``, and never more than
    ``max_support``; a sampled token that is not among them takes one of those places.
    """
    ids = largest(z, min(support.max_support, z.shape[-1]))
    beyond = log_p.exp().scatter(-1, ids, 0.0).sum(-1)
    return keep_enough(ids, log_p.gather(-1, ids), beyond, sampled, support.tail_mass)


def keep_enough(ids: Tensor, log_probs: Tensor, beyond: Tensor, sampled: Tensor, tail_mass: float) -> Tensor:
    """Of the most probable tokens, in falling order, with ``beyond`` the mass of all others: see ``select``."""
    keep = log_probs > -torch.inf
    if tail_mass > 0:
        p = log_probs.double().exp()
        left = p.flip(-1).cumsum(-1).flip(-1) + beyond[:, None]  # mass not yet taken when this token's turn comes
        keep &= left > tail_mass
    return _sampled_first(torch.where(keep, ids, -1), sampled)


def _sampled_first(kept: Tensor, sampled: Tensor) -> Tensor:
    """Move the sampled token to slot 0; if it was not kept it pushes the others back, the last one out when full."""
    K = kept.shape[-1]
    here = kept == sampled[:, None]
    place = torch.where(here.any(-1), here.to(torch.int8).argmax(-1), K)[:, None]
    behind = torch.cat([sampled[:, None], kept[:, :-1]], dim=-1)
    return torch.where(torch.arange(K, device=kept.device) <= place, behind, kept)


def at_tokens(log_p: Tensor, token_ids: Tensor) -> Tensor:
    """Of log-probabilities [N, V], those at ``token_ids`` [N, K]; −inf for −1."""
    return log_p.gather(-1, token_ids.clamp(min=0)).masked_fill(token_ids < 0, -torch.inf)


def hidden(token_ids: Tensor) -> Tensor:
    """The ids as indices; unused slots repeat the first one, so that they hide nothing else."""
    return torch.where(token_ids >= 0, token_ids, token_ids[:, :1]).clamp(min=0)


def log_tail_of(log_p: Tensor, token_ids: Tensor) -> Tensor:
    """Of log-probabilities [N, V], the log of the mass outside ``token_ids`` [N, K], [N]; 0 where slot 0 is unused."""
    log_tail = log_p.scatter(-1, hidden(token_ids), -torch.inf).logsumexp(-1)
    return torch.where(token_ids[:, 0] >= 0, log_tail, 0.0)


def here(token_ids: Tensor, first: int, width: int) -> Tensor:
    """Which ids are among ``width`` tokens from ``first`` on."""
    return (token_ids >= first) & (token_ids < first + width)


def gradient(tile: Tensor, logit: LogitTransform, scores: Scores, upstream: Upstream, out: Tensor, first: int) -> None:
    """See ``troll.policy.scoring.gradient``."""
    for rows in row_chunks(tile):
        x, part = tile[rows], scores.at(rows)
        log_p = normalised(logit.read(x), part.log_norm)
        g = logit.backward(over(log_p, part, upstream.at(rows), first), x)
        out[rows] = torch.where(part.token_ids[:, :1] >= 0, g, 0.0).to(out.dtype)


def over(log_p: Tensor, scores: Scores, upstream: Upstream, first: int) -> Tensor:
    """∂/∂z, [N, V], from the log-probabilities; anything goes where a row has no support."""
    ids, log_tail = scores.token_ids, scores.log_tail
    kept = torch.zeros_like(scores.log_probs) if upstream.log_probs is None else upstream.log_probs
    kept = torch.where(ids >= 0, kept, 0.0)
    total, p = kept.sum(-1, keepdim=True), log_p.exp()
    inside = here(ids, first, log_p.shape[-1])
    at = torch.where(inside, ids - first, 0)
    tail = None
    if upstream.log_tail is not None:
        empty = log_tail == -torch.inf  # no gradient from an empty tail, and no −inf − −inf at excluded tokens
        tail, log_tail = upstream.log_tail.masked_fill(empty, 0.0)[:, None], log_tail.masked_fill(empty, 0.0)
        total = total + tail
    g = (-p * total).scatter_add(-1, at, torch.where(inside, kept, 0.0))
    if tail is not None:
        outside = torch.zeros_like(p).scatter_add(-1, at, inside.to(p.dtype)) == 0
        share = (log_p - log_tail[:, None]).clamp(max=0.0).exp()  # p_j / τ ≤ 1 outside S
        g = g + torch.where(outside, share * tail, 0.0)
    if upstream.entropy is not None:
        term = torch.where(log_p > -torch.inf, log_p + scores.entropy[:, None], 0.0)
        g = g - p * term * upstream.entropy[:, None]
    return g
