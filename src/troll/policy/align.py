"""Two sparse policies → their log-probabilities over one common support, slot 0 the sampled token.

``floor``   (the authors' way) the supports are joined; a token missing on one side gets log 1e-12 there; both sides are
            renormalised. A side that dropped nothing gives a missing token no probability at all.
``bucket``  the support is the old policy's, and everything else is one more outcome with the mass that was dropped, on
            both sides. The KL of such coarse distributions never exceeds the true one.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from troll.errors import InputError, require_choice
from troll.inputs import require_same_device
from troll.policy.sparse import MadeBy, SparsePolicy, require_policy

Tail = Literal["bucket", "floor"]
TAIL: Tail = "bucket"
"""The default."""
LOG_FLOOR = -27.631021115928547  # log 1e-12


class Aligned(NamedTuple):
    """Log-probabilities over a common support; positions masked out on either side are one-hot on slot 0 on both."""

    proposal: Tensor
    """[..., S], carries gradient."""
    old: Tensor
    """[..., S], constant."""


def align(proposal: SparsePolicy, old: SparsePolicy, tail: Tail | None = None) -> Aligned:
    """Bring ``proposal`` and ``old`` onto one support, with the given treatment of what was dropped.

    ``tail=None`` is the one that fits the proposal, see ``proposal_tail``.
    """
    tail = proposal_tail(proposal, old, tail)
    _check_pair(proposal, old)
    valid = proposal.valid & old.valid
    p, q = _join(proposal, old) if tail == "floor" else _bucket(proposal, old)
    one_hot = torch.full_like(q, -torch.inf)
    one_hot[..., 0] = 0.0
    return Aligned(*(torch.where(valid.unsqueeze(-1), x, one_hot).log_softmax(-1) for x in (p, q)))


_TAIL_OF: dict[MadeBy | None, Tail | None] = {"sparsify": "floor", "restrict": "bucket", None: None}


def proposal_tail(
    proposal: SparsePolicy, old: SparsePolicy, tail: Tail | None, default: Tail = TAIL, origin: str | None = None
) -> Tail:
    """The tail that fits a proposal: ``bucket`` for one made by ``restrict``, ``floor`` for one made by ``sparsify``.

    Where it is not known how the proposal was made: ``tail``, or the ``default``. A ``tail`` that does not fit is
    refused unless both policies share their tokens: ``floor`` ignores the tail of a proposal made by ``restrict``,
    and ``bucket`` cannot compare tokens that only one of the policies kept. ``origin`` is where the tail comes from, if
    the user did not pass it, for the message.
    """
    require_policy("proposal", proposal, "Make it with troll.restrict(logits, old)")
    require_policy("old", old, "Make it with troll.sparsify(old_logits, sampled)")
    if tail is not None:
        require_choice("tail", tail, get_args(Tail), TAIL)
    fits = _TAIL_OF[proposal.made_by]
    if tail is None or fits in (None, tail) or proposal.token_ids is old.token_ids:
        return tail or fits or default
    chosen = f"tail={tail!r}" if origin is None else f"tail={tail!r} ({origin})"
    if tail == "bucket":
        raise InputError(
            f"{chosen} needs a proposal on the tokens of the old policy, got one made by troll.sparsify",
            "Make it with troll.restrict(logits, old), or pass tail='floor', the paper's treatment",
        )
    raise InputError(
        f"{chosen} needs a proposal on its own most probable tokens, got one made by troll.restrict",
        "Make it with troll.sparsify(logits, sampled), or pass tail='bucket', the default",
    )


def _join(proposal: SparsePolicy, old: SparsePolicy) -> tuple[Tensor, Tensor]:
    """Slots of the old policy, then those of the proposal; a token of both keeps the old policy's slot."""
    in_old, _ = _find(proposal.token_ids, old.token_ids)
    in_proposal, where = _find(old.token_ids, proposal.token_ids)
    p_floor, q_floor = (
        torch.full_like(policy.log_tail, LOG_FLOOR).masked_fill(policy.log_tail == -torch.inf, -torch.inf).unsqueeze(-1)
        for policy in (proposal, old)
    )
    p_at_old = torch.where(in_proposal, proposal.log_probs.gather(-1, where), p_floor)
    p_at_old = torch.where(old.token_ids >= 0, p_at_old, -torch.inf)
    extra = (proposal.token_ids >= 0) & ~in_old
    p = torch.cat([p_at_old, torch.where(extra, proposal.log_probs, -torch.inf)], dim=-1)
    q = torch.cat([old.log_probs, torch.where(extra, q_floor, -torch.inf)], dim=-1)
    return p, q


def _find(needles: Tensor, haystack: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each id of ``needles`` [..., M] is in ``haystack`` [..., K] of its position, and in which slot."""
    ordered, order = haystack.sort(-1)
    at = torch.searchsorted(ordered, needles.contiguous()).clamp(max=haystack.shape[-1] - 1)
    return ordered.gather(-1, at) == needles, order.gather(-1, at)


def _bucket(proposal: SparsePolicy, old: SparsePolicy) -> tuple[Tensor, Tensor]:
    """Slots of the old policy, then the bucket."""
    if proposal.token_ids.shape != old.token_ids.shape or _any(
        (proposal.token_ids != old.token_ids) & (proposal.token_ids >= 0)
    ):
        raise InputError(
            "tail='bucket' needs a proposal on the tokens of the old policy, got other tokens",
            "Make the proposal with troll.restrict(logits, old), or pass tail='floor'",
        )
    p = torch.cat([proposal.log_probs, proposal.log_tail.unsqueeze(-1)], dim=-1)
    q = torch.cat([old.log_probs, old.log_tail.unsqueeze(-1)], dim=-1)
    return p, q


def _check_pair(proposal: SparsePolicy, old: SparsePolicy) -> None:
    if old.log_probs.requires_grad or old.log_tail.requires_grad:
        raise InputError(
            "old must be a constant, got a policy that requires gradient",
            "Score it under torch.no_grad(), or pass old.detach()",
        )
    for name, a, b, fix in (
        ("shape", list(proposal.shape), list(old.shape), "Score the same completions with both"),
        ("vocab_size", proposal.vocab_size, old.vocab_size, "Score both with the same model"),
        ("temperature", proposal.temperature, old.temperature, "Use the temperature of the rollout for both"),
        ("dtype", proposal.log_probs.dtype, old.log_probs.dtype, "Use logits of the same precision for both"),
    ):
        if a != b:
            raise InputError(f"proposal and old must have the same {name}, got {a} and {b}", fix)
    require_same_device("proposal", proposal.log_probs, "old", old.log_probs)
    if _any((proposal.sampled != old.sampled) & proposal.valid & old.valid):
        raise InputError(
            "proposal and old must be of the same completions, got different sampled tokens",
            "Check that both were given the same sampled ids, in the same order of sequences",
        )


def _any(bad: Tensor) -> bool:
    return not torch.compiler.is_compiling() and bool(bad.any())
