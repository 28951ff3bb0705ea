"""Hidden states → scores, with the logits made twice: once to read them, once to differentiate.

The forward reads everything off some rows of the logits and drops them. The backward makes the logits again, this time
a slice of the vocabulary for all rows, turns it in place into the gradient, and from that makes the gradient of this
slice of the weight, once and for all, and adds to that of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from troll.implementation import Choice
from troll.policy.matmul import Products, add_product, product
from troll.policy.scoring import Logit, MostProbable, Scores, Upstream, gradient, score

Gather = Callable[[Tensor, Tensor | None], AbstractContextManager[Any]]


class ScoreRows(torch.autograd.Function):
    """Hidden states [N, H] → ``Scores``, of which log-probabilities, tail and entropy carry gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gather: Gather,
        sampled: Tensor,
        logit: Logit,
        support: MostProbable | Tensor,
        choice: Choice,
    ) -> tuple[Tensor, ...]:
        """The scores, some rows at a time."""
        products = Products(hidden, weight, bias)
        scores = Scores.empty(len(hidden), len(weight), support, products.dtype, hidden.device)
        for rows in products.rows():
            part = support if isinstance(support, MostProbable) else support[rows]
            score(products.tile(rows), logit, sampled[rows], part, None, choice, out=scores.at(rows))
        ctx.save_for_backward(hidden, weight, bias, *scores)
        ctx.gather, ctx.logit, ctx.choice, ctx.dtype = gather, logit, choice, products.dtype
        ctx.mark_non_differentiable(scores.token_ids, scores.log_norm)
        ctx.set_materialize_grads(False)
        return tuple(scores)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _: Any, g_log_probs: Tensor | None, g_tail: Tensor | None, g_entropy: Tensor | None, *__: Any
    ) -> tuple[Tensor | None, ...]:
        """The gradients, some columns at a time."""
        hidden, weight, bias, *saved = ctx.saved_tensors
        scores, upstream = Scores(*saved), Upstream(g_log_probs, g_tail, g_entropy)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        hidden = hidden.masked_fill(scores.token_ids[:, :1] < 0, 0.0)  # NaN there, and 0 · NaN is NaN
        work = scores.log_tail.dtype
        with ctx.gather(weight, bias):
            products = Products(hidden, weight, bias, ctx.dtype)
            g_hidden = torch.zeros_like(hidden, dtype=work) if need_hidden else None
            g_weight = torch.empty_like(weight) if need_weight else None
            g_bias = torch.empty_like(bias) if need_bias else None
            for columns in products.columns():
                g, part = products.slab(columns)
                gradient(g, ctx.logit, scores, upstream, g, ctx.choice, first=columns.start)
                if g_hidden is not None:
                    add_product(g, part, g_hidden)
                if g_weight is not None:
                    product(g.t(), products.hidden.to(ctx.dtype), g_weight[columns])
                if g_bias is not None:
                    g_bias[columns] = g.sum(0, dtype=work)
        return None if g_hidden is None else g_hidden.to(hidden.dtype), g_weight, g_bias, *[None] * 5
