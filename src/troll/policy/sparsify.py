"""Logits → ``SparsePolicy``: on the policy's own most probable tokens, or on another policy's support."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from troll.deferred import DeferredCheck, check_or_defer
from troll.errors import InputError, require_choice
from troll.implementation import Choice, Impl
from troll.inputs import (
    require_count,
    require_floats,
    require_integers,
    require_number,
    require_same_device,
    require_tensor,
)
from troll.policy.scoring import LogitTransform, MostProbable, Scores, Upstream, choose_for, gradient, score
from troll.policy.sparse import MadeBy, SparsePolicy, check_temperature, require_policy

OnInvalid = Literal["raise", "mask"]
MAX_SUPPORT = 64
"""K, the default of ``max_support``: most tokens kept per position."""
TAIL_MASS = 1e-5
"""δ, the default of ``tail_mass``: probability that may be dropped per position."""


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
    require_old(old)
    rows = _Rows(logits, old.sampled, old.temperature, loss_mask, on_invalid, skip=~old.valid, origin="old")
    check_vocabulary(rows.vocab_size, old.vocab_size)
    return rows.policy(old.token_ids.reshape(-1, old.token_ids.shape[-1]), impl)


def check_support(max_support: int, tail_mass: float) -> None:
    """Refuse a support that no policy can have."""
    require_count("max_support", max_support, f"The default is {MAX_SUPPORT}")
    require_number(
        "tail_mass", tail_mass, "a number ≥ 0 and < 1", lambda x: 0 <= x < 1, f"The default is {TAIL_MASS:g}"
    )


def require_old(old: object) -> None:
    """Refuse what is not an old policy."""
    require_policy("old", old, "Make it with troll.sparsify(old_logits, sampled)")


def check_vocabulary(given: int, old: int) -> None:
    """Refuse logits over another vocabulary than the old policy's."""
    if given != old:
        raise InputError(
            f"the logits and the old policy must have the same vocabulary, got {given} and {old} tokens",
            "Score both with the same model, with the same padding of its embedding",
        )


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a & b


class Positions:
    """Positions flattened to rows: which count, and what was sampled there.

    ``origin`` is the argument that the sampled tokens come from, for messages.
    """

    def __init__(
        self,
        vocab_size: int,
        sampled: Tensor,
        temperature: float,
        loss_mask: Tensor | None,
        on_invalid: OnInvalid,
        skip: Tensor | None = None,
        origin: str = "sampled",
    ) -> None:
        require_integers(origin, sampled, "[...]", "Pass the ids of the sampled tokens, as integers")
        if loss_mask is not None:
            require_tensor("loss_mask", loss_mask, "[...], one entry per position")
            if loss_mask.shape != sampled.shape:
                raise InputError(
                    f"loss_mask must have the shape of {origin}, {list(sampled.shape)}, got {list(loss_mask.shape)}",
                    "Pass the mask of the completion tokens, shifted and cut as the sampled tokens are",
                )
            require_same_device(origin, sampled, "loss_mask", loss_mask)
        require_choice("on_invalid", on_invalid, ("raise", "mask"))
        check_temperature(temperature)
        self.shape, self.origin = sampled.shape, origin
        self.vocab_size = vocab_size
        self.counted: Tensor | None = None
        """[N] which rows count; None where all do."""
        self.sampled = sampled.reshape(-1).long()
        counted = _both(None if loss_mask is None else loss_mask.bool(), None if skip is None else ~skip)
        if counted is not None:
            self.counted = counted.reshape(-1)
            # Under the mask any id goes, also a padding id of -100.
            self.sampled = torch.where(self.counted, self.sampled, 0)
        self.temperature = temperature
        self.on_invalid = on_invalid

    def check_ids(self) -> None:
        """Refuse sampled tokens that are not in the vocabulary."""
        bad = (self.sampled < 0) | (self.sampled >= self.vocab_size)
        if not torch.compiler.is_compiling() and bool(bad.any()):
            raise InputError(
                f"sampled must have ids from 0 to {self.vocab_size - 1}, got token {int(self.sampled[bad][0])} at "
                f"position {self._name(bad)}",
                "Use the tokenizer of this model, and exclude padding positions with loss_mask",
            )

    def check(self, slot_0: Tensor, scaled_logits: Callable[[int], Tensor]) -> DeferredCheck:
        """Whether a counted row has no token in slot 0 [N]: its logits define no distribution with the sampled one.

        ``scaled_logits`` gives the logits of one row.
        """
        bad = slot_0 < 0 if self.counted is None else (slot_0 < 0) & self.counted
        any_bad = bad.any() if self.on_invalid == "raise" else bad.new_zeros(())
        return DeferredCheck(any_bad, lambda: self._refuse(bad, scaled_logits))

    def _refuse(self, bad: Tensor, scaled_logits: Callable[[int], Tensor]) -> None:
        self.check_ids()
        row = int(bad.nonzero()[0])
        z = scaled_logits(row)
        culprit = (~(z < torch.inf)).nonzero().flatten().tolist()
        if not culprit and math.isfinite(float(z.max())):
            raise InputError(
                f"sampled must have tokens that can be sampled, got token {int(self.sampled[row])} with logit −inf at "
                f"position {self._name(bad)}",
                "Score without top-k, top-p or min-p truncation, and align the sampled ids with the logits",
            )
        what = f"logit {float(z[culprit[0]])} of token {culprit[0]}" if culprit else "only −inf logits"
        raise InputError(
            f"logits must be finite, or −inf for excluded tokens, got {what} at position {self._name(bad)} "
            f"({int(bad.sum())} such positions)",
            "Lower the learning rate if training diverged, or pass on_invalid='mask' to leave such positions out",
        )

    def _name(self, bad: Tensor) -> list[int]:
        return list(bad.reshape(self.shape).nonzero()[0].tolist())


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
        origin: str = "sampled",
    ) -> None:
        require_floats("logits", logits, "[..., V]", "Pass the logits of the model, such as model(input_ids).logits")
        require_tensor("sampled", sampled, "[...]", "Pass the ids of the sampled tokens")
        if logits.dim() < 1 or logits.shape[-1] < 1 or sampled.shape != logits.shape[:-1]:
            raise InputError(
                f"logits must have shape [..., V] where {origin} has shape [...], got {list(logits.shape)} and "
                f"{list(sampled.shape)}",
                "Pass logits that predict the sampled tokens: logits[:, :-1] and input_ids[:, 1:]",
            )
        require_same_device("logits", logits, origin, sampled)
        super().__init__(logits.shape[-1], sampled, temperature, loss_mask, on_invalid, skip, origin)
        self.logits = logits.reshape(-1, logits.shape[-1]) if sampled.dim() != 1 else logits

    def policy(self, support: MostProbable | Tensor, impl: Impl) -> SparsePolicy:
        """The policy of these logits on that support."""
        logit = LogitTransform(temperature=self.temperature)
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
        logit: LogitTransform,
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
