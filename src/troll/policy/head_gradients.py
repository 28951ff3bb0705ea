"""Gradients of a loss through the language-model head: the logits [N, V] are never all in memory, or only once.

``ScoreRows`` computes the logits twice. The forward reads the scores off some rows of the logits at a time and drops
the logits. The backward computes them again, one slice of the vocabulary for all rows at a time, turns the slice in
place into its gradient, computes the gradient of that slice of the weight, and adds to the gradient of the hidden
states. It needs the least memory and works for any loss.

``SinglePass`` computes the logits once. It requires a loss that is a sum over tokens, each depending only on its row
of logits: the gradient of a row is then known in the forward and overwrites the logits. This takes three matrix
products of the size of the head instead of four. ``plan`` chooses how much memory to spend:

``whole``      all rows at once: one tile holds the logits, then their gradient; the gradient of the weight is one
               product, in the dtype of the weight;
``chunks``     some rows at a time; the gradient of the weight is summed in fp32;
``recompute``  ``ScoreRows``. Always used for fp16, whose gradients need the loss scale, known only in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from troll.implementation import Choice
from troll.inputs import require_count
from troll.policy.matmul import TiledMatmul, add_product, product
from troll.policy.scoring import LogitTransform, MostProbable, Scores, Upstream, gradient, scale_, score, work_dtype

BUDGET = {"cpu": 1 << 29, "other": 1 << 32}
_FEWEST_ROWS = 512  # in a chunk: with fewer, summing the gradient of the weight takes longer than new logits

Gather = Callable[[Tensor, Tensor | None], AbstractContextManager[Any]]

RowLoss = Callable[[Scores, slice], Tensor]
"""The scores of some rows, of which log-probabilities, tail and entropy carry gradient → the sum of their losses."""


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
        logit: LogitTransform,
        support: MostProbable | Tensor,
        choice: Choice,
    ) -> tuple[Tensor, ...]:
        """The scores, some rows at a time."""
        products = TiledMatmul(hidden, weight, bias)
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
            products = TiledMatmul(hidden, weight, bias, ctx.dtype)
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


class Plan(NamedTuple):
    """How a pass uses memory."""

    way: Literal["whole", "chunks", "recompute"]
    tile_bytes: int


def plan(products: TiledMatmul, needs_weight: bool, budget: int | None) -> Plan:
    """The fastest way that stays within ``budget`` bytes: tile, scratch and all gradients, beyond what is there."""
    N, (V, H) = len(products.hidden), products.weight.shape
    if budget is None:
        budget = BUDGET.get(products.hidden.device.type, BUDGET["other"])
    else:
        require_count("memory_budget", budget, "Pass a number of bytes, such as 3 * 2**30, or None for the default")
    if products.dtype == torch.float16:
        return Plan("recompute", 0)
    row = V * products.dtype.itemsize
    row += row // 16  # scratch of the kernels
    g_hidden = N * H * products.hidden.dtype.itemsize
    g_weight = V * H * products.weight.dtype.itemsize if needs_weight else 0
    if N * row + g_hidden + g_weight <= budget:
        return Plan("whole", N * V * products.dtype.itemsize)
    sums = V * H * work_dtype(products.dtype).itemsize if needs_weight else 0
    rows = (budget - sums - g_hidden) // row
    converted = g_weight if products.weight.dtype != work_dtype(products.dtype) else 0
    if rows >= min(N, _FEWEST_ROWS) and sums + converted + g_hidden <= budget:
        return Plan("chunks", rows * V * products.dtype.itemsize)
    return Plan("recompute", 0)


class SinglePass(torch.autograd.Function):
    """Hidden states [N, H] → the loss, and the ids of slot 0, −1 where a row has no distribution."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gather: Any,
        sampled: Tensor,
        logit: LogitTransform,
        support: MostProbable | Tensor,
        choice: Choice,
        loss: RowLoss,
        tile_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        """The loss and its gradients."""
        products = TiledMatmul(hidden, weight, bias, tile_bytes=tile_bytes)
        gradients = _Gradients(products, ctx.needs_input_grad[:3])
        total = torch.zeros((), dtype=work_dtype(products.dtype), device=hidden.device)
        slot_0 = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        for rows in products.rows():
            tile = products.tile(rows)
            part = support if isinstance(support, MostProbable) else support[rows]
            scores = score(tile, logit, sampled[rows], part, None, choice)
            slot_0[rows] = scores.token_ids[:, 0]
            value, upstream = _differentiate(loss, scores, rows)
            total += value
            if any(ctx.needs_input_grad[:3]):
                gradient(tile, logit, scores, upstream, tile, choice)
                gradients.add(rows, tile)
            del tile  # or it outlives its buffer
        ctx.gradients, ctx.choice = gradients.finished(), choice
        ctx.mark_non_differentiable(slot_0)
        return total, slot_0

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """The gradients, times what arrives."""
        if ctx.gradients is None:
            raise RuntimeError(
                "a loss whose gradients are made in the forward can be differentiated once: backward was called twice "
                "on it (retain_graph=True?). Compute the loss again, or use troll_loss on the policies."
            )
        gradients, ctx.gradients = ctx.gradients, None
        return (*(None if x is None else scale_(x, g, ctx.choice) for x in gradients), *[None] * 7)


def _differentiate(loss: RowLoss, scores: Scores, rows: slice) -> tuple[Tensor, Upstream]:
    """The loss of some rows and its gradient at their scores."""
    log_probs, log_tail, entropy = (
        x.detach().requires_grad_() for x in (scores.log_probs, scores.log_tail, scores.entropy)
    )
    with torch.enable_grad():
        value = loss(scores._replace(log_probs=log_probs, log_tail=log_tail, entropy=entropy), rows)
    if not value.requires_grad:  # no token counts
        return value, Upstream(None, None)
    found = torch.autograd.grad(value, (log_probs, log_tail, entropy), allow_unused=True)
    return value.detach(), Upstream(*found)


class _Gradients:
    """The gradients of hidden states, weight and bias, as far as they are needed, while rows come in."""

    def __init__(self, products: TiledMatmul, needed: tuple[bool, ...]) -> None:
        self.products = products
        hidden, weight, bias = products.hidden, products.weight, products.bias
        work = work_dtype(products.dtype)
        once = next(products.rows(), slice(0, 0)) == slice(0, len(hidden))  # one product, rounded once
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.empty_like(weight, dtype=weight.dtype if once else work) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=work) if needed[2] and bias is not None else None

    def add(self, rows: slice, g: Tensor) -> None:
        """Add what the gradient g of some rows contributes."""
        if self.hidden is not None:
            self.products.times_weight(g, out=self.hidden[rows])
        if self.weight is not None:
            hidden = self.products.hidden[rows].to(g.dtype)
            (product if rows.start == 0 else add_product)(g.t(), hidden, self.weight)
        if self.bias is not None:
            self.bias += g.sum(0, dtype=self.bias.dtype)

    def finished(self) -> list[Tensor | None]:
        """The gradients, in the types of what they are gradients of. The tile is no longer needed."""
        products = self.products
        products.forget()
        if self.weight is not None:
            self.weight = self.weight.to(products.weight.dtype)
        if self.bias is not None and products.bias is not None:
            self.bias = self.bias.to(products.bias.dtype)
        return [self.hidden, self.weight, self.bias]
