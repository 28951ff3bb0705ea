"""Logits whose vocabulary is divided among processes → one ``SparsePolicy``, the same on all of them.

Tensor parallelism leaves process r of a group with the columns [first, first + width) of the logits [N, V]. It scores
them as if they were the whole vocabulary (``troll.policy.scoring``), and sends the result. With L_r = log Σ e^z over
its columns, and everything else relative to that, the whole is

    L = log Σ_r e^(L_r),   log w_r = L_r − L,   tail = Σ_r w_r tail_r + what was sent and is not kept,
    entropy = Σ_r w_r (entropy_r − log w_r)

The K most probable tokens of the whole are among the K most probable ones of the processes. They are chosen from those
by the rule of ``rows.reference``, by every process from the same numbers. Nothing is the difference of 1 and a sum.

Communication: one collective a call, none on the way back. Each process sends, per position, 4 numbers and its
min(K, width) candidates, ids and logits (``sparsify_parallel``), or K logits (``restrict_parallel``): 8 K + 16 or
4 K + 16 bytes, twice that for fp64; and 4 bytes once.

Gradient: every process computes the same loss from the same policy and calls backward on it. What arrives at the
policy is then the same everywhere and is not summed over processes: the gradient of a shard is that of ONE copy of the
loss. (The gradient of the hidden states, a sum over columns, is for the layer before to sum, as Megatron's does.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from troll.deferred import DeferredCheck, run_checks
from troll.errors import InputError
from troll.implementation import Choice, Impl
from troll.policy.head import Scored
from troll.policy.scoring import LogitTransform, MostProbable, Scores, Upstream, choose_for, gradient, score
from troll.policy.scoring.reference import at_tokens, here, keep_enough, largest, log_tail_of, normalised
from troll.policy.sparse import SparsePolicy
from troll.policy.sparsify import (
    MAX_SUPPORT,
    TAIL_MASS,
    OnInvalid,
    _Rows,
    check_support,
    check_vocabulary,
    made_by,
    require_old,
)


def sparsify_parallel(
    logits: Tensor,
    sampled: Tensor,
    max_support: int = MAX_SUPPORT,
    tail_mass: float = TAIL_MASS,
    *,
    group: dist.ProcessGroup | None,
    widths: Sequence[int] | None = None,
    temperature: float = 1.0,
    loss_mask: Tensor | None = None,
    on_invalid: OnInvalid = "raise",
    impl: Impl = "auto",
) -> Scored:
    """``troll.sparsify`` of logits of which every process of ``group`` has some columns, and the exact entropy.

    To be called by all of them, with the same arguments but for the logits. The tokens are those ``sparsify`` selects
    from all columns together, also where logits are equal.

    Args:
        logits: [..., width], the columns of this process, in the order of the ranks.
        sampled: [...] ids in the whole vocabulary.
        max_support, tail_mass, temperature, loss_mask, on_invalid, impl: as for ``sparsify``.
        group: the processes that share the vocabulary; None for all there are.
        widths: how many columns each of them has; the same number by default.
    """
    check_support(max_support, tail_mass)
    rows = _ShardRows(logits, group, widths, sampled, temperature, loss_mask, on_invalid)
    return rows.scored(MostProbable(max_support, tail_mass), impl)


def restrict_parallel(
    logits: Tensor,
    old: SparsePolicy,
    *,
    group: dist.ProcessGroup | None,
    widths: Sequence[int] | None = None,
    loss_mask: Tensor | None = None,
    on_invalid: OnInvalid = "raise",
    impl: Impl = "auto",
) -> Scored:
    """``troll.restrict`` of logits of which every process of ``group`` has some columns; see ``sparsify_parallel``."""
    require_old(old)
    rows = _ShardRows(
        logits, group, widths, old.sampled, old.temperature, loss_mask, on_invalid, skip=~old.valid, origin="old"
    )
    check_vocabulary(rows.vocab_size, old.vocab_size)
    return rows.scored(old.token_ids.reshape(-1, old.token_ids.shape[-1]), impl)


class _Shard(NamedTuple):
    """Which columns are here, and who has the others."""

    group: dist.ProcessGroup | None
    widths: tuple[int, ...]
    first: int
    width: int

    @classmethod
    def of(cls, width: int, group: dist.ProcessGroup | None, widths: Sequence[int] | None) -> _Shard:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        shares = (width,) * size if widths is None else tuple(widths)
        if len(shares) != size or shares[rank] != width:
            raise InputError(
                f"widths must be the number of columns of each of the {size} processes, in the order of the ranks, got "
                f"{list(shares)} where process {rank} has {width} columns",
                "Leave widths out if all processes have the same number of columns",
            )
        return cls(group, shares, sum(shares[:rank]), width)

    def exchange(self, *parts: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Numbers [N, n] of this process → of all of them, [N, processes, n]; and whether they agree about V, []."""
        whole_number = torch.int64 if parts[-1].dtype == torch.float64 else torch.int32
        rows = torch.cat([x.view(whole_number) if x.is_floating_point() else x.to(whole_number) for x in parts], dim=-1)
        V = torch.full((1,), sum(self.widths), dtype=whole_number, device=rows.device)
        sent = torch.cat([V, rows.flatten()])
        received = sent.new_empty(len(self.widths), len(sent))
        dist.all_gather(list(received.unbind()), sent, group=self.group)
        table = received[:, 1:].view(len(received), *rows.shape).transpose(0, 1)
        found = [
            got.view(x.dtype) if x.is_floating_point() else got.to(x.dtype)
            for x, got in zip(parts, torch.split(table, [x.shape[-1] for x in parts], dim=-1), strict=True)
        ]
        return (received[:, 0] == V).all(), found

    def whole(self, row: Tensor) -> Tensor:
        """One row of the columns here, [width] → of all, [V]. Another collective: to say what is wrong."""
        all_columns = row.new_zeros(sum(self.widths))
        all_columns[self.first : self.first + self.width] = row
        dist.all_reduce(all_columns, group=self.group)
        return all_columns


class _ShardRows(_Rows):
    """Checked inputs, flattened to rows of some columns."""

    def __init__(
        self, logits: Tensor, group: dist.ProcessGroup | None, widths: Sequence[int] | None, *rest: Any, **named: Any
    ) -> None:
        super().__init__(logits, *rest, **named)
        self.shard = _Shard.of(self.vocab_size, group, widths)
        self.vocab_size = sum(self.shard.widths)

    def scored(self, support: MostProbable | Tensor, impl: Impl) -> Scored:
        """What all columns together come to on that support."""
        shard, logit = self.shard, LogitTransform(temperature=self.temperature)
        K = min(support.max_support, max(shard.widths)) if isinstance(support, MostProbable) else support.shape[-1]
        choice = choose_for(impl, self.logits.device, self.logits.dtype, K, logit)
        if self.on_invalid == "mask":
            self.check_ids()
        ids, log_probs, log_tail, entropy, agree = _ScoreShard.apply(  # type: ignore[no-untyped-call]
            self.logits, shard, logit, self.sampled, support, self.counted, choice
        )
        impossible = self.check(ids[:, 0], lambda row: shard.whole(logit.read(self.logits[row].detach())))
        run_checks([DeferredCheck(~agree, self._refuse_widths), impossible])
        policy = SparsePolicy.trusted(
            ids.reshape(*self.shape, ids.shape[-1]),
            log_probs.reshape(*self.shape, ids.shape[-1]),
            log_tail.reshape(self.shape),
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            made_by=made_by(support),
        )
        return Scored(policy, entropy.reshape(self.shape))

    def _refuse_widths(self) -> None:
        raise InputError(
            f"process {dist.get_rank(self.shard.group)} has {self.shard.width} columns of the logits and another "
            "process a different number",
            f"Pass widths, a list of {len(self.shard.widths)} numbers that is the same in every process",
        )


class _ScoreShard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        shard: _Shard,
        logit: LogitTransform,
        sampled: Tensor,
        support: MostProbable | Tensor,
        counted: Tensor | None,
        choice: Choice,
    ) -> tuple[Tensor, ...]:
        columns = _Columns(logits, shard, logit, counted, choice)
        if isinstance(support, MostProbable):
            scores, agree = columns.most_probable(sampled, support)
        else:
            scores, agree = columns.given(support)
        ctx.save_for_backward(logits, *scores)
        ctx.first, ctx.logit, ctx.choice = shard.first, logit, choice
        ctx.mark_non_differentiable(scores.token_ids, agree)
        ctx.set_materialize_grads(False)
        return *scores[:4], agree

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _: Any, g_log_probs: Tensor | None, g_tail: Tensor | None, g_entropy: Tensor | None, __: Any
    ) -> tuple[Tensor | None, ...]:
        logits, *scores = ctx.saved_tensors
        grad, upstream = torch.empty_like(logits), Upstream(g_log_probs, g_tail, g_entropy)
        gradient(logits, ctx.logit, Scores(*scores), upstream, grad, ctx.choice, first=ctx.first)
        return grad, *[None] * 6


class _Columns:
    """Rows of the columns of one process, and what all processes know of them together."""

    def __init__(
        self, tile: Tensor, shard: _Shard, logit: LogitTransform, counted: Tensor | None, choice: Choice
    ) -> None:
        self.tile, self.shard, self.logit, self.counted, self.choice = tile, shard, logit, counted, choice
        top, self.best = tile.max(-1)
        self.peak = logit.read(top)  # NaN where there is one
        """[N] the largest logit here; ``best`` is its column, a token that is possible if any is."""

    def most_probable(self, sampled: Tensor, support: MostProbable) -> tuple[Scores, Tensor]:
        """The scores at the most probable tokens of all columns."""
        first, width = self.shard.first, self.shard.width
        # In the place of a sampled token that is elsewhere, one that changes nothing. One that is here is a candidate,
        # and costs the last of K its place: which the choice would have done as well.
        token = torch.where(here(sampled, first, width), sampled - first, self.best)
        part = self._score(token, MostProbable(support.max_support, 0.0))
        used = part.token_ids >= 0
        z = self._logits(part.token_ids).masked_fill(~used, -torch.inf)
        ids = torch.where(used, part.token_ids + first, -1)
        missing = min(support.max_support, max(self.shard.widths)) - ids.shape[-1]
        if missing:
            ids, z = (torch.nn.functional.pad(x, (0, missing), value=v) for x, v in ((ids, -1), (z, -torch.inf)))

        agree, (ids, z, numbers) = self.shard.exchange(ids, z, self._numbers(part, part.log_tail))
        whole = _Whole(numbers)
        ids, order = ids.flatten(1).sort(-1)  # so that ties go to the lower id
        z = z.flatten(1).gather(-1, order)
        log_p = torch.cat([normalised(z, whole.log_norm), whole.log_tails], dim=-1)  # of all there is
        slots = largest(z, min(support.max_support, sum(self.shard.widths)))
        beyond = log_p.exp().scatter(-1, slots, 0.0).sum(-1)
        found = ids == sampled[:, None]
        slots = keep_enough(slots, log_p.gather(-1, slots), beyond, found.to(torch.int8).argmax(-1), support.tail_mass)
        defined = self._counts(whole.is_distribution & found.any(-1))
        slots = torch.where(defined[:, None], slots, -1)
        token_ids = torch.where(slots >= 0, ids.gather(-1, slots.clamp(min=0)), -1)
        entropy = torch.where(defined, whole.entropy, 0.0)
        return Scores(token_ids, at_tokens(log_p, slots), log_tail_of(log_p, slots), entropy, whole.log_norm), agree

    def given(self, support: Tensor) -> tuple[Scores, Tensor]:
        """The scores at given tokens [N, K] (−1: unused, slot 0 the sampled token)."""
        inside = here(support, self.shard.first, self.shard.width)
        at = torch.where(inside, support - self.shard.first, -1)
        z = self._logits(at).masked_fill(~inside, -torch.inf)
        used = z > -torch.inf
        # Slot 0 must hold a possible token: the first that is here and possible, or any, and then all here is tail.
        some, slot = used.any(-1), used.to(torch.int8).argmax(-1, keepdim=True)
        token = torch.where(some, at.gather(-1, slot)[:, 0], self.best)
        others = torch.where(used, at, -1).scatter(-1, slot, -1)
        part = self._score(token, torch.cat([token[:, None], others[:, 1:]], dim=-1))
        log_tail = torch.where(some, part.log_tail, 0.0)

        agree, (z, numbers) = self.shard.exchange(z, self._numbers(part, log_tail))
        whole, z = _Whole(numbers), z.amax(1)
        defined = self._counts(whole.is_distribution & (z[:, 0] > -torch.inf))
        ids = torch.where(defined[:, None] & (z > -torch.inf), support, -1)
        log_probs = normalised(z, whole.log_norm).masked_fill(ids < 0, -torch.inf)
        log_tail = torch.where(defined, whole.log_tails.logsumexp(-1), 0.0)
        entropy = torch.where(defined, whole.entropy, 0.0)
        return Scores(ids, log_probs, log_tail, entropy, whole.log_norm), agree

    def _score(self, token: Tensor, support: MostProbable | Tensor) -> Scores:
        return score(self.tile, self.logit, token, support, self.counted, self.choice)

    def _logits(self, columns: Tensor) -> Tensor:
        return self.logit.read(self.tile.gather(-1, columns.clamp(min=0)))

    def _numbers(self, part: Scores, log_tail: Tensor) -> Tensor:
        """[N, 4] what ``_Whole`` needs of a process. Without a possible token it has no share, whatever its sum."""
        log_sum = torch.where(self.peak == -torch.inf, 0.0, part.log_norm[:, 1])
        return torch.stack([self.peak, log_sum, log_tail, part.entropy], dim=-1)

    def _counts(self, rows: Tensor) -> Tensor:
        return rows if self.counted is None else rows & self.counted


class _Whole:
    """What all columns come to, from the ``numbers`` [N, processes, 4] of each part."""

    def __init__(self, numbers: Tensor) -> None:
        peak, log_sum, log_tail, entropy = numbers.unbind(-1)
        top = peak.amax(-1, keepdim=True)
        share = peak - top + log_sum
        rest = share.logsumexp(-1, keepdim=True)
        share = share - rest
        self.log_norm = torch.cat([top, rest], dim=-1)
        """[N, 2], see ``Scores.log_norm``."""
        self.is_distribution = rest[:, 0].isfinite()
        """[N] whether there is no NaN, no +inf and a logit above −inf."""
        self.log_tails = share + log_tail
        """[N, processes] log of the mass of the tokens that were not sent."""
        self.entropy = torch.where(share > -torch.inf, share.exp() * (entropy - share), 0.0).sum(-1)
        """[N]."""
