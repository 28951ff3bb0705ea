"""Hidden states → ``SparsePolicy``, one tile of logits at a time: the logits [N, V] never exist.

The forward reads everything off some rows of the logits and drops them. The backward makes the logits again, this time
a slice of the vocabulary for all rows, turns it in place into the gradient, and from that makes the gradient of this
slice of the weight, once and for all, and adds to that of the hidden states. What is read off the logits is computed in
fp32 (fp64 for fp64).
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
from troll.policy.products import Products, add_product, product
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
        for rows in products.rows():
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
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        # A masked row may hold NaN, and 0 · NaN is NaN.
        hidden = hidden.masked_fill(scores.token_ids[:, :1] < 0, 0.0)
        with ctx.head.gather(weight, bias):
            products = Products(hidden, weight, bias, ctx.dtype)
            g_hidden = torch.zeros_like(hidden, dtype=scores.log_tail.dtype) if need_hidden else None
            g_weight = torch.empty_like(weight) if need_weight else None
            g_bias = torch.empty_like(bias) if need_bias else None
            for columns in products.columns():
                g, part = products.slab(columns)
                gradient(g, ctx.logit, scores, arriving, g, ctx.choice, first=columns.start)
                if g_hidden is not None:
                    add_product(g_hidden, g, part)
                if g_weight is not None:
                    product(g.t(), products.hidden.to(ctx.dtype), out=g_weight[columns])
                if g_bias is not None:
                    g_bias[columns] = g.sum(0, dtype=scores.log_tail.dtype)
        g_hidden = None if g_hidden is None else g_hidden.to(hidden.dtype)
        return g_hidden, g_weight, g_bias, None, None, None, None
