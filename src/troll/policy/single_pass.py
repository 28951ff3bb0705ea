"""Hidden states → a loss and its gradients in one pass, where the loss of a token depends on its own row of logits.

The gradient of such a row is known as soon as the row is: it is made in place, in the forward, and the logits are not
made a second time. Three products of the size of the head instead of four. What that takes in memory is a choice:

``whole``      all rows at once: one tile for the logits and their gradient, and the gradient of the weight from one
               product, in the weight's own type;
``chunks``     some rows at a time, with the gradient of the weight summed in fp32;
``recompute``  not a single pass: the logits are made again in the backward, as ``troll.policy.recompute`` does it, in
               the least memory. Always so for fp16, whose gradients need the scale that only the backward brings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from troll.errors import InputError
from troll.implementation import Choice
from troll.policy.matmul import Products, add_product, product
from troll.policy.scoring import Logit, MostProbable, Scores, Upstream, gradient, scale_, score, work_dtype

BUDGET = {"cpu": 1 << 29, "other": 1 << 32}
_FEWEST_ROWS = 512  # in a chunk: with fewer, summing the gradient of the weight takes longer than new logits

RowLoss = Callable[[Scores, slice], Tensor]
"""The scores of some rows, of which log-probabilities, tail and entropy carry gradient → the sum of their losses."""


class Plan(NamedTuple):
    """How a pass uses memory."""

    way: Literal["whole", "chunks", "recompute"]
    tile_bytes: int


def plan(products: Products, needs_weight: bool, budget: int | None) -> Plan:
    """The fastest way that stays within ``budget`` bytes: tile, scratch and all gradients, beyond what is there."""
    N, (V, H) = len(products.hidden), products.weight.shape
    if budget is None:
        budget = BUDGET.get(products.hidden.device.type, BUDGET["other"])
    elif budget <= 0:
        raise InputError(
            f"Got memory_budget={budget}, expected bytes, at least 1", "Try memory_budget=None, or 3 * 2**30"
        )
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
        logit: Logit,
        support: MostProbable | Tensor,
        choice: Choice,
        loss: RowLoss,
        tile_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        """The loss and its gradients."""
        products = Products(hidden, weight, bias, tile_bytes=tile_bytes)
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

    def __init__(self, products: Products, needed: tuple[bool, ...]) -> None:
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
