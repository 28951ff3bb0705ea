"""Logits → ``SparsePolicy``: on the policy's own most probable tokens, or on another policy's support."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from troll.deferred import check_or_defer
from troll.errors import InputError
from troll.implementation import Choice, Impl
from troll.policy.positions import MAX_SUPPORT, TAIL_MASS, OnInvalid, Positions, check_support, check_vocabulary
from troll.policy.scoring import Logit, MostProbable, Scores, Upstream, choose_for, gradient, score
from troll.policy.sparse import MadeBy, SparsePolicy


def sparsify(
    logits: Tensor,
    sampled: Tensor,
    max_support: int = MAX_SUPPORT,
    tail_mass: float = TAIL_MASS,
    *,
    temperature: float = 1.0,
    loss_mask: Tensor | None = None,
    on_invalid: OnInvalid = "raise",
    impl: Impl = "auto",
) -> SparsePolicy:
    """Keep the most probable tokens of each position until 1 − ``tail_mass`` of the probability is covered.

    The choice is exact and greedy, at most ``max_support`` tokens, and always has the sampled token, in slot 0. The
    log-probabilities are those of the full softmax and carry gradient to the logits; the choice itself is constant.

    Args:
        logits: [..., V], any float type; computed in fp32 (fp64 for fp64).
        sampled: [...] ids of the tokens that were sampled at these positions.
        max_support: most tokens kept per position (K); V for dense distributions.
        tail_mass: probability that may be dropped (δ); 0 keeps ``max_support`` tokens whatever their mass.
        temperature: the sampling temperature; the policy is softmax(logits / temperature).
        loss_mask: [...] positions that count. The others get an empty support: their logits are not read (they may
            be NaN) and receive zero gradient.
        on_invalid: what to do where counted logits are NaN or +inf or give the sampled token no probability:
            ``"raise"``, or ``"mask"`` those positions (``valid`` is False there; the losses count them). Inside
            ``torch.compile``, where nothing can be raised, they are masked.
        impl: what computes, see ``troll.implementation``.
    """
    check_support(max_support, tail_mass)
    rows = _Rows(logits, sampled, temperature, loss_mask, on_invalid)
    return rows.policy(MostProbable(max_support, tail_mass), impl)


def restrict(
    logits: Tensor,
    old: SparsePolicy,
    *,
    loss_mask: Tensor | None = None,
    on_invalid: OnInvalid = "raise",
    impl: Impl = "auto",
) -> SparsePolicy:
    """The policy of these logits on the support and at the temperature of ``old``: the proposal for ``tail="bucket"``.

    Nothing is selected; what lies outside the support of ``old`` is the tail, with its exact mass and gradient. A kept
    token that became impossible leaves the support; its mass, zero, joins the tail. Arguments as for ``sparsify``;
    positions that ``old`` masks out stay masked out.
    """
    rows = _Rows(logits, old.sampled, old.temperature, loss_mask, on_invalid, skip=~old.valid)
    check_vocabulary(rows.vocab_size, old.vocab_size)
    return rows.policy(old.token_ids.reshape(-1, old.token_ids.shape[-1]), impl)


class _Rows(Positions):
    """Checked inputs, flattened to rows."""

    def __init__(
        self,
        logits: Tensor,
        sampled: Tensor,
        temperature: float,
        loss_mask: Tensor | None,
        on_invalid: OnInvalid,
        skip: Tensor | None = None,
    ) -> None:
        if not logits.is_floating_point():
            raise InputError(f"Got logits of {logits.dtype}, expected a floating type", "Try the model's output logits")
        if logits.dim() < 1 or logits.shape[-1] < 1 or sampled.shape != logits.shape[:-1]:
            raise InputError(
                f"Got logits {list(logits.shape)} and sampled {list(sampled.shape)}, expected [..., V] and [...]",
                "Try logits that predict the sampled tokens: logits[:, :-1] and input_ids[:, 1:]",
            )
        super().__init__(logits.shape[-1], sampled, temperature, loss_mask, on_invalid, skip)
        self.logits = logits.reshape(-1, logits.shape[-1]) if sampled.dim() != 1 else logits

    def policy(self, support: MostProbable | Tensor, impl: Impl) -> SparsePolicy:
        """The policy of these logits on that support."""
        logit = Logit(temperature=self.temperature)
        K = min(support.max_support, self.vocab_size) if isinstance(support, MostProbable) else support.shape[-1]
        choice = choose_for(impl, self.logits.device, self.logits.dtype, K, logit)
        if choice.impl != "triton" or self.on_invalid == "mask":  # the kernel looks itself; what it masks is not named
            self.check_ids()
        ids, log_probs, log_tail = _ScoreLogits.apply(  # type: ignore[no-untyped-call]
            self.logits, logit, self.sampled, support, self.counted, choice
        )
        if not torch.compiler.is_compiling():
            check_or_defer(None, self.check(ids[:, 0], lambda row: logit.read(self.logits[row].detach())))
        return SparsePolicy.trusted(
            ids.reshape(*self.shape, ids.shape[-1]),
            log_probs.reshape(*self.shape, ids.shape[-1]),
            log_tail.reshape(self.shape),
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            made_by=made_by(support),
        )


def made_by(support: MostProbable | Tensor) -> MadeBy:
    """Which function makes a policy on this support."""
    return "sparsify" if isinstance(support, MostProbable) else "restrict"


class _ScoreLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        logit: Logit,
        sampled: Tensor,
        support: MostProbable | Tensor,
        counted: Tensor | None,
        choice: Choice,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = score(logits, logit, sampled, support, counted, choice, entropy=False)
        ctx.save_for_backward(logits, *scores)
        ctx.logit, ctx.choice = logit, choice
        ctx.mark_non_differentiable(scores.token_ids)
        ctx.set_materialize_grads(False)
        return scores.token_ids, scores.log_probs, scores.log_tail

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _: Any, g_log_probs: Tensor | None, g_tail: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None, None]:
        logits, *scores = ctx.saved_tensors
        grad = torch.empty_like(logits)
        gradient(logits, ctx.logit, Scores(*scores), Upstream(g_log_probs, g_tail), grad, ctx.choice)
        return grad, None, None, None, None, None
