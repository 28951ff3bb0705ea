"""Hidden states → ``SparsePolicy``, one tile of logits at a time: the logits [N, V] never exist.

The forward reads everything off a tile and drops it; the backward makes it again, turns it in place into the gradient
of the logits, and adds the two products that the gradients of hidden states and weight need. What is read off the
logits is computed in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from troll.errors import InputError
from troll.kernels import Choice, Impl
from troll.policy.positions import OnInvalid, Positions, check_support, check_vocabulary
from troll.policy.products import Products
from troll.policy.rows import Logit, MostProbable, Scores, Upstream, choose_for, gradient, score
from troll.policy.sparse import SparsePolicy


class Scored(NamedTuple):
    """What the head says about each position."""

    policy: SparsePolicy
    entropy: Tensor
    """[...] of the whole distribution, differentiable; 0 where the position is masked out."""


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
    """What computes, see ``troll.kernels.choice``."""

    def sparsify(
        self,
        hidden: Tensor,
        sampled: Tensor,
        max_support: int = 64,
        tail_mass: float = 1e-5,
        *,
        temperature: float = 1.0,
        loss_mask: Tensor | None = None,
        on_invalid: OnInvalid = "raise",
    ) -> Scored:
        """``troll.sparsify`` of the logits of ``hidden`` [..., H]; positions that do not count are not computed."""
        check_support(max_support, tail_mass)
        with self.gather(self.weight, self.bias):
            positions = Positions(self.weight.shape[0], sampled, temperature, loss_mask, on_invalid)
            return self._score(hidden, positions, MostProbable(max_support, tail_mass))

    def restrict(
        self,
        hidden: Tensor,
        old: SparsePolicy,
        *,
        loss_mask: Tensor | None = None,
        on_invalid: OnInvalid = "raise",
    ) -> Scored:
        """``troll.restrict`` of the logits of ``hidden`` [..., H] to the support of ``old``."""
        with self.gather(self.weight, self.bias):
            vocab_size = self.weight.shape[0]
            check_vocabulary(vocab_size, old.vocab_size)
            positions = Positions(vocab_size, old.sampled, old.temperature, loss_mask, on_invalid, skip=~old.valid)
            return self._score(hidden, positions, old.token_ids.reshape(-1, old.token_ids.shape[-1]))

    def _score(self, hidden: Tensor, positions: Positions, support: MostProbable | Tensor) -> Scored:
        self._check(hidden, positions.shape)
        flat = hidden.reshape(-1, hidden.shape[-1])
        # Where all positions count, as for a caller that picked them, nothing is copied.
        at = None if bool(positions.counted.all()) else positions.counted.nonzero()[:, 0]
        ids, log_probs, log_tail, entropy = _ScoreRows.apply(  # type: ignore[no-untyped-call]
            flat if at is None else flat[at],
            self.weight,
            self.bias,
            self,
            positions.sampled if at is None else positions.sampled[at],
            self.logit(positions.temperature),
            support if at is None or isinstance(support, MostProbable) else support[at],
        )

        def spread(values: Tensor, fill: float) -> Tensor:
            if at is not None:
                values = values.new_full((len(flat), *values.shape[1:]), fill).index_copy(0, at, values)
            return values.reshape((*positions.shape, *values.shape[1:]))

        bad = spread(ids[:, 0] < 0, False).flatten()
        positions.refuse(bad, lambda row: self._row(flat[row], positions.temperature))
        policy = SparsePolicy.trusted(
            spread(ids, -1),
            spread(log_probs, -torch.inf),
            spread(log_tail, 0.0),
            vocab_size=positions.vocab_size,
            temperature=positions.temperature,
        )
        return Scored(policy, spread(entropy, 0.0))

    def logit(self, temperature: float) -> Logit:
        """How rows of W h + b are read."""
        return Logit(self.scale, self.softcap, temperature)

    def choose(self, products: Products, support: MostProbable | Tensor, logit: Logit) -> Choice:
        """What computes for these products."""
        K = min(support.max_support, len(self.weight)) if isinstance(support, MostProbable) else support.shape[-1]
        return choose_for(self.impl, products.hidden.device, products.dtype, K, logit)

    def _check(self, hidden: Tensor, positions: torch.Size) -> None:
        weight, bias = self.weight, self.bias
        if not hidden.is_floating_point():
            raise InputError(f"hidden of {hidden.dtype}", "a floating type", "the output of the model's last layer")
        if weight.dim() != 2 or hidden.shape != (*positions, weight.shape[1]):
            raise InputError(
                f"hidden {list(hidden.shape)}, positions {list(positions)}, weight {list(weight.shape)}",
                "[..., H], [...] and [V, H]",
                "hidden states that predict the sampled tokens: hidden[:, :-1] and input_ids[:, 1:]",
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise InputError(f"bias {list(bias.shape)} for weight {list(weight.shape)}", "[V]", "bias=None")
        if self.softcap is not None and not self.softcap > 0:
            raise InputError(f"softcap={self.softcap}", "a number > 0, or None", "final_logit_softcapping of the model")

    @torch.no_grad()
    def _row(self, hidden: Tensor, temperature: float) -> Tensor:
        """The scaled logits of one position."""
        products = Products(hidden[None], self.weight, self.bias)
        return self.logit(temperature).read(products.tile(slice(0, 1)))[0]


class _ScoreRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        sampled: Tensor,
        logit: Logit,
        support: MostProbable | Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        products = Products(hidden, weight, bias)
        choice = head.choose(products, support, logit)
        scores = Scores.empty(len(hidden), len(weight), support, products.dtype, hidden.device)
        for rows in products:
            part = support if isinstance(support, MostProbable) else support[rows]
            scores.put(rows, score(products.tile(rows), logit, sampled[rows], part, None, choice))
        ctx.save_for_backward(hidden, weight, bias, *scores)
        ctx.head, ctx.logit, ctx.choice, ctx.dtype = head, logit, choice, products.dtype
        ctx.mark_non_differentiable(scores.token_ids)
        ctx.set_materialize_grads(False)
        return scores.token_ids, scores.log_probs, scores.log_tail, scores.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *saved = ctx.saved_tensors
        scores, arriving = Scores(*saved), Upstream(*upstream)
        with ctx.head.gather(weight, bias):
            products = Products(hidden, weight, bias, ctx.dtype)
            totals = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3], scores.log_tail.dtype)
            for rows in products:
                tile = products.tile(rows)
                gradient(tile, ctx.logit, scores.at(rows), arriving.at(rows), tile, ctx.choice)
                totals.add(products, rows, tile, scores.token_ids[rows, 0] >= 0)
        return (*totals.finished(), None, None, None, None)


class HeadGradients:
    """The gradients of hidden states, weight and bias, as far as they are needed, summed in fp32 (fp64 for fp64)."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...], total: torch.dtype
    ) -> None:
        self.inputs = hidden, weight, bias
        self.hidden, self.weight, self.bias = (
            torch.zeros_like(x, dtype=total) if x is not None and need else None
            for x, need in zip(self.inputs, needed, strict=True)
        )

    def add(self, products: Products, rows: slice, g: Tensor, counted: Tensor) -> None:
        """Add what the gradient g of a tile contributes."""
        h = products.hidden[rows].masked_fill(~counted[:, None], 0.0)  # a masked row may hold NaN, and 0 · NaN is NaN
        products.add_gradients(rows, g, h, self.hidden, self.weight)
        if self.bias is not None:
            self.bias += g.sum(0, dtype=self.bias.dtype)

    def finished(self) -> list[Tensor | None]:
        """The sums, in the types of what they are gradients of."""
        sums = self.hidden, self.weight, self.bias
        return [None if g is None or x is None else g.to(x.dtype) for g, x in zip(sums, self.inputs, strict=True)]
