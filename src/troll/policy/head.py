"""``Head``: hidden states → ``SparsePolicy`` or a loss, without the logits [N, V] in memory.

What is read off the logits is computed in fp32 (fp64 for fp64); ``troll.policy.matmul`` says how they are made,
``troll.policy.head_gradients`` how they are differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from troll.deferred import DeferredCheck, DeferredChecks, check_or_defer
from troll.errors import InputError
from troll.implementation import Impl
from troll.inputs import (
    describe,
    is_number,
    require_floats,
    require_integers,
    require_positive,
    require_same_device,
    require_tensor,
)
from troll.policy.head_gradients import ScoreRows, SinglePass, plan
from troll.policy.matmul import TiledMatmul
from troll.policy.scoring import LogitTransform, MostProbable, Scores, choose_for
from troll.policy.sparse import SparsePolicy
from troll.policy.sparsify import (
    MAX_SUPPORT,
    TAIL_MASS,
    OnInvalid,
    Positions,
    check_support,
    check_vocabulary,
    made_by,
    require_old,
)


class Scored(NamedTuple):
    """What the head says about each position."""

    policy: SparsePolicy
    entropy: Tensor
    """[...] of the whole distribution, differentiable; 0 where the position is masked out."""


TokenLoss = Callable[[Scored, Tensor | slice], Tensor]
"""What is known of n positions, and which they are among all of them, flattened → the sum of their losses."""


def _no_gather(weight: Tensor, bias: Tensor | None) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True, eq=False)
class Head:
    """How a model turns hidden states h into logits:  z = c tanh(s (W h + b) / c), or s (W h + b) without a soft cap.

    >>> head = troll.Head(model.lm_head.weight)                         # doctest: +SKIP
    >>> old, _ = head.sparsify(old_hidden, sampled)                     # once per rollout, no gradient
    >>> proposal, entropy = head.restrict(hidden, old)                  # every update, for tail="bucket"
    """

    weight: Tensor
    """[V, H]."""
    bias: Tensor | None = None
    """[V]."""
    scale: float = 1.0
    softcap: float | None = None
    gather: Callable[[Tensor, Tensor | None], AbstractContextManager[Any]] = _no_gather
    """Entered whenever weight and bias are read, forward and backward: brings sharded parameters together."""
    impl: Impl = "auto"
    """What computes, see ``troll.implementation``."""

    def __post_init__(self) -> None:
        require_tensor("weight", self.weight, "[V, H]", "Pass the parameter of the output layer: model.lm_head.weight")
        if self.bias is not None:
            require_tensor("bias", self.bias, "[V]", "Pass model.lm_head.bias, or leave bias out if the layer has none")
        if not is_number(self.scale):
            raise InputError(f"scale must be a number, got {describe(self.scale)}", "The default is 1.0")
        if self.softcap is not None:
            require_positive("softcap", self.softcap, "Pass final_logit_softcapping of the model's config, or None")
        if not callable(self.gather):
            raise InputError(
                f"gather must be a function of weight and bias, got {describe(self.gather)}",
                "Leave it out if the weight is not sharded",
            )

    def sparsify(
        self,
        hidden: Tensor,
        sampled: Tensor,
        max_support: int = MAX_SUPPORT,
        tail_mass: float = TAIL_MASS,
        *,
        temperature: float = 1.0,
        loss_mask: Tensor | None = None,
        on_invalid: OnInvalid = "raise",
        deferred: DeferredChecks | None = None,
    ) -> Scored:
        """``troll.sparsify`` of the logits of ``hidden`` [..., H]; positions that do not count are not computed.

        Whether all logits define distributions is known when the device is done. If ``deferred`` is given, that check
        is added to it, for ``troll.deferred.run_checks``.
        """
        with self.gather(self.weight, self.bias):
            support = _most_probable(max_support, tail_mass)
            positions = Positions(self.weight.shape[0], sampled, temperature, loss_mask, on_invalid)
            scored, check = self._score(_Rows(self, hidden, positions, support))
        check_or_defer(deferred, check)
        return scored

    def restrict(
        self,
        hidden: Tensor,
        old: SparsePolicy,
        *,
        loss_mask: Tensor | None = None,
        on_invalid: OnInvalid = "raise",
        deferred: DeferredChecks | None = None,
    ) -> Scored:
        """``troll.restrict`` of the logits of ``hidden`` [..., H] to the support of ``old``."""
        with self.gather(self.weight, self.bias):
            scored, check = self._score(_Rows(self, hidden, *self._support_of(old, loss_mask, on_invalid)))
        check_or_defer(deferred, check)
        return scored

    def token_loss(
        self,
        hidden: Tensor,
        target: Tensor | SparsePolicy,
        loss: TokenLoss,
        max_support: int = MAX_SUPPORT,
        tail_mass: float = TAIL_MASS,
        *,
        temperature: float = 1.0,
        loss_mask: Tensor | None = None,
        memory_budget: int | None = None,
        deferred: DeferredChecks | None = None,
    ) -> Tensor:
        """A loss that is a sum over positions, with its gradients made in the forward, one product of the head fewer.

        For losses of a token that depend on the logits of this token alone, and that are differentiated once.

        Args:
            hidden: [..., H].
            target: the sampled tokens [...], and the support is selected as by ``sparsify``; or an old policy [...],
                and it is the support of that, as by ``restrict``.
            loss: called with some positions at a time, with log-probabilities, tail and entropy that carry gradient.
            max_support, tail_mass, temperature: for a support that is selected.
            loss_mask: [...] positions that count.
            memory_budget: bytes that may be allocated, gradients included, 4 GiB by default (½ GiB on a CPU); see
                ``troll.policy.head_gradients`` for what they buy.
            deferred: as for ``sparsify``.
        """
        with self.gather(self.weight, self.bias):
            if not callable(loss):
                raise InputError(f"loss must be a function, got {describe(loss)}", "See TokenLoss for its arguments")
            if isinstance(target, SparsePolicy):
                rows = _Rows(self, hidden, *self._support_of(target, loss_mask, "raise", "target"))
            else:
                expected = "[...] of sampled tokens, or a SparsePolicy"
                require_integers("target", target, expected, "Pass the ids of the sampled tokens, or the old policy")
                support = _most_probable(max_support, tail_mass)
                positions = Positions(self.weight.shape[0], target, temperature, loss_mask, "raise", origin="target")
                rows = _Rows(self, hidden, positions, support)
            value, check = self._single_pass(rows, loss, memory_budget)
        check_or_defer(deferred, check)
        return value

    def _support_of(
        self, old: SparsePolicy, loss_mask: Tensor | None, on_invalid: OnInvalid, origin: str = "old"
    ) -> tuple[Positions, Tensor]:
        require_old(old)
        vocab_size = self.weight.shape[0]
        check_vocabulary(vocab_size, old.vocab_size)
        positions = Positions(vocab_size, old.sampled, old.temperature, loss_mask, on_invalid, ~old.valid, origin)
        return positions, old.token_ids.reshape(-1, old.token_ids.shape[-1])

    def _score(self, rows: _Rows) -> tuple[Scored, DeferredCheck]:
        ids, log_probs, log_tail, entropy, _ = ScoreRows.apply(*rows.inputs)  # type: ignore[no-untyped-call]
        policy = rows.policy(rows.spread(ids, -1), rows.spread(log_probs, -torch.inf), rows.spread(log_tail, 0.0))
        return Scored(policy, rows.spread(entropy, 0.0)), rows.check(ids[:, 0])

    def _single_pass(self, rows: _Rows, loss: TokenLoss, memory_budget: int | None) -> tuple[Tensor, DeferredCheck]:
        def of_rows(scores: Scores, part: slice) -> Tensor:
            return loss(Scored(rows.policy(*scores[:3]), scores.entropy), part if rows.at is None else rows.at[part])

        hidden = rows.inputs[0]
        needs_weight = torch.is_grad_enabled() and self.weight.requires_grad
        how = plan(TiledMatmul(hidden, self.weight, self.bias), needs_weight, memory_budget)
        if how.way == "recompute":
            scores = Scores(*ScoreRows.apply(*rows.inputs))  # type: ignore[no-untyped-call]
            value, sampled = of_rows(scores, slice(0, len(hidden))), scores.token_ids[:, 0]
        else:
            constant = not torch.is_grad_enabled()
            inputs = (x.detach() if constant and isinstance(x, Tensor) else x for x in rows.inputs)
            value, sampled = SinglePass.apply(*inputs, of_rows, how.tile_bytes)  # type: ignore[no-untyped-call]
        return value, rows.check(sampled)

    @torch.no_grad()
    def logits(self, hidden: Tensor, temperature: float = 1.0) -> Tensor:
        """The logits of a few positions [n, H], divided by the temperature: [n, V]."""
        require_floats("hidden", hidden, "[n, H]", "Pass the output of the model's last layer")
        with self.gather(self.weight, self.bias):
            tile = TiledMatmul(hidden, self.weight, self.bias).tile(slice(0, len(hidden)))
        return LogitTransform(self.scale, self.softcap, temperature).read(tile)


def _most_probable(max_support: int, tail_mass: float) -> MostProbable:
    check_support(max_support, tail_mass)
    return MostProbable(max_support, tail_mass)


class _Rows:
    """The positions that count, as rows; where all do, as for a caller that picked them, nothing is copied."""

    def __init__(self, head: Head, hidden: Tensor, positions: Positions, support: MostProbable | Tensor) -> None:
        _check(head, hidden, positions.shape, positions.origin)
        require_same_device("hidden", hidden, positions.origin, positions.sampled)
        self.head, self.positions, self.made_by = head, positions, made_by(support)
        self.flat = hidden.reshape(-1, hidden.shape[-1])
        counted = positions.counted
        self.at = None if counted is None or bool(counted.all()) else counted.nonzero()[:, 0]
        logit = LogitTransform(head.scale, head.softcap, positions.temperature)
        K = min(support.max_support, positions.vocab_size) if isinstance(support, MostProbable) else support.shape[-1]
        products = TiledMatmul(self.flat, head.weight, head.bias)
        choice = choose_for(head.impl, hidden.device, products.dtype, K, logit)
        if choice.impl != "triton" or positions.on_invalid == "mask":  # as in ``sparsify``
            positions.check_ids()
        picked = support if isinstance(support, MostProbable) else self._pick(support)
        self.inputs = (
            self._pick(self.flat),
            head.weight,
            head.bias,
            head.gather,
            self._pick(positions.sampled),
            logit,
            picked,
            choice,
        )

    def _pick(self, values: Tensor) -> Tensor:
        return values if self.at is None else values[self.at]

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """Values of the rows [n, …] → of all positions [..., …]."""
        if self.at is not None:
            values = values.new_full((len(self.flat), *values.shape[1:]), fill).index_copy(0, self.at, values)
        return values.reshape((*self.positions.shape, *values.shape[1:]))

    def policy(self, ids: Tensor, log_probs: Tensor, log_tail: Tensor) -> SparsePolicy:
        """A policy at the temperature of these positions."""
        positions = self.positions
        return SparsePolicy.trusted(ids, log_probs, log_tail, positions.vocab_size, positions.temperature, self.made_by)

    def check(self, sampled: Tensor) -> DeferredCheck:
        """Whether a row has no distribution, which is where its slot 0 is −1."""

        def logits(row: int) -> Tensor:
            return self.head.logits(self.flat[row, None].detach(), self.positions.temperature)[0]

        return self.positions.check(self.spread(sampled, 0).flatten(), logits)


def _check(head: Head, hidden: Tensor, positions: torch.Size, origin: str) -> None:
    weight, bias = head.weight, head.bias
    require_floats("hidden", hidden, "[..., H]", "Pass the output of the model's last layer")
    if weight.dim() != 2 or hidden.shape != (*positions, weight.shape[1]):
        raise InputError(
            f"hidden, {origin} and weight must have the shapes [..., H], [...] and [V, H], got "
            f"{list(hidden.shape)}, {list(positions)} and {list(weight.shape)}",
            "Pass hidden states that predict the sampled tokens: hidden[:, :-1] and input_ids[:, 1:]",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(
            f"bias must have one entry per row of weight, shape {list(weight.shape[:1])}, got {list(bias.shape)}",
            "Pass weight and bias of the same output layer",
        )
    require_same_device("hidden", hidden, "weight", weight)
    if bias is not None:
        require_same_device("hidden", hidden, "bias", bias)
