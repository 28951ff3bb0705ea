"""Hidden states → ``SparsePolicy``, one tile of logits at a time: the logits [N, V] never exist.

A tile is some rows of the logits with their whole vocabulary. The forward reads everything off a tile and drops it; the
backward makes it again, turns it in place into the gradient of the logits, and adds the two products that the gradients
of hidden states and weight need. The products run in the type of the hidden states (that of autocast where it is on)
and are summed in fp32; what is read off the logits is computed in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from troll.errors import InputError
from troll.policy.gather import SupportGradient, at_tokens, entropy_and_log_tail, row_chunks, work_dtype
from troll.policy.positions import OnInvalid, Positions, check_support, check_vocabulary
from troll.policy.select import log_norms, select
from troll.policy.sparse import SparsePolicy

_TILE_ELEMENTS = {"cpu": 1 << 24, "other": 1 << 26}
_VOCABULARY_SLICE = 1 << 15  # of the weight, converted to the type of the product at a time
_CHUNKS_AT_ONCE = 8  # a tile is read in chunks of this many megaelements on an accelerator


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
            return self._score(hidden, positions, _MostProbable(max_support, tail_mass))

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

    def _score(self, hidden: Tensor, positions: Positions, support: _MostProbable | Tensor) -> Scored:
        self._check(hidden, positions.shape)
        flat = hidden.reshape(-1, hidden.shape[-1])
        # Where all positions count, as for a caller that picked them, nothing is copied.
        at = None if bool(positions.counted.all()) else positions.counted.nonzero()[:, 0]
        log_probs, log_tail, entropy, ids, bad = _ScoreRows.apply(  # type: ignore[no-untyped-call]
            flat if at is None else flat[at],
            self.weight,
            self.bias,
            self,
            positions.sampled if at is None else positions.sampled[at],
            positions.temperature,
            support if at is None or isinstance(support, _MostProbable) else support[at],
        )

        def spread(values: Tensor, fill: float) -> Tensor:
            if at is not None:
                values = values.new_full((len(flat), *values.shape[1:]), fill).index_copy(0, at, values)
            return values.reshape((*positions.shape, *values.shape[1:]))

        positions.refuse(spread(bad, False).flatten(), lambda row: self._row(flat[row], positions.temperature))
        policy = SparsePolicy.trusted(
            spread(ids, -1),
            spread(log_probs, -torch.inf),
            spread(log_tail, 0.0),
            vocab_size=positions.vocab_size,
            temperature=positions.temperature,
        )
        return Scored(policy, spread(entropy, 0.0))

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
        products = _Products(hidden[None], self.weight, self.bias)
        return self._logits(products.tile(slice(0, 1)), temperature)[0]

    def _logits(self, product: Tensor, temperature: float) -> Tensor:
        """W h + b → z / temperature, in work precision."""
        z = product.to(work_dtype(product))
        if self.scale != 1.0:
            z = z * self.scale
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        return z if temperature == 1.0 else z / temperature

    def _product_gradient(self, g: Tensor, product: Tensor, temperature: float) -> Tensor:
        """∂/∂(W h + b) from the gradient g of z / temperature."""
        if self.softcap is not None:
            y = product.to(g.dtype) * self.scale
            g = g * (1 - torch.tanh(y / self.softcap).square())
        factor = self.scale / temperature
        return g if factor == 1.0 else g * factor


class _MostProbable(NamedTuple):
    max_support: int
    tail_mass: float


class _Products:
    """h Wᵀ + b and the products of its gradient, tile by tile, in one buffer."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> None:
        device = hidden.device.type
        if dtype is None:
            lowered = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
            dtype = torch.get_autocast_dtype(device) if lowered else hidden.dtype
        self.dtype = dtype
        self.hidden, self.weight, self.bias = hidden, weight, bias
        elements = _TILE_ELEMENTS.get(device, _TILE_ELEMENTS["other"])
        self.rows = max(1, min(len(hidden), elements // max(1, len(weight))))
        self._buffer = hidden.new_empty(self.rows, len(weight), dtype=self.dtype)

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, len(self.hidden), self.rows):
            yield slice(start, min(start + self.rows, len(self.hidden)))

    def _slices(self) -> Iterator[slice]:
        for start in range(0, len(self.weight), _VOCABULARY_SLICE):
            yield slice(start, min(start + _VOCABULARY_SLICE, len(self.weight)))

    def tile(self, rows: slice) -> Tensor:
        """The tile of these rows, [rows, V]."""
        hidden = self.hidden[rows].to(self.dtype)
        tile = self._buffer[: len(hidden)]
        for columns in self._slices():
            torch.mm(hidden, self.weight[columns].to(self.dtype).t(), out=tile[:, columns])
        if self.bias is not None:
            tile += self.bias.to(self.dtype)
        return tile

    def add_gradients(
        self, rows: slice, g: Tensor, hidden: Tensor, g_hidden: Tensor | None, g_weight: Tensor | None
    ) -> None:
        """Add the products of the tile's gradient g with weight and hidden states to their gradients."""
        for columns in self._slices():
            if g_hidden is not None:
                _add_product(g_hidden[rows], g[:, columns], self.weight[columns].to(self.dtype))
            if g_weight is not None:
                _add_product(g_weight[columns], g[:, columns].t(), hidden.to(self.dtype))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, summed in the type of ``total``: rounding each product to half precision biases training."""
    if total.device.type == "cuda" and a.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


class _ScoreRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        sampled: Tensor,
        temperature: float,
        support: _MostProbable | Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        products = _Products(hidden, weight, bias)
        work = work_dtype(products._buffer)
        N, V = len(hidden), len(weight)
        K = min(support.max_support, V) if isinstance(support, _MostProbable) else support.shape[-1]
        ids = torch.empty(N, K, dtype=torch.int64, device=hidden.device)
        log_probs = torch.empty(N, K, dtype=work, device=hidden.device)
        log_tail, entropy = log_probs.new_empty(N), log_probs.new_empty(N)
        bad = torch.empty(N, dtype=torch.bool, device=hidden.device)
        for rows in products:
            tile = products.tile(rows)
            for part in row_chunks(tile, _CHUNKS_AT_ONCE):
                z = head._logits(tile[part], temperature)
                at = slice(rows.start + part.start, rows.start + part.start + len(z))
                log_p = z.log_softmax(-1)
                if isinstance(support, _MostProbable):
                    kept = select(z, sampled[at], log_norms(z, 1.0), *support, temperature=1.0)
                else:  # a kept token that became impossible leaves the support
                    kept = torch.where(z.gather(-1, support[at].clamp(min=0)) == -torch.inf, -1, support[at])
                # NaN where the logits define no distribution, −inf where the sampled token is not in it
                bad[at] = ~log_p.gather(-1, sampled[at, None])[:, 0].isfinite()
                ids[at] = kept = kept.masked_fill(bad[at, None], -1)
                log_probs[at] = at_tokens(log_p, kept)
                information, log_tail[at] = entropy_and_log_tail(log_p, kept)
                entropy[at] = information.masked_fill(bad[at], 0.0)
        ctx.save_for_backward(hidden, weight, bias, ids, log_tail, entropy)
        ctx.head, ctx.temperature, ctx.dtype = head, temperature, products.dtype
        ctx.mark_non_differentiable(ids, bad)
        ctx.set_materialize_grads(False)
        return log_probs, log_tail, entropy, ids, bad

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, g_log_probs: Tensor | None, g_tail: Tensor | None, g_entropy: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, log_tail, entropy = ctx.saved_tensors
        head: Head = ctx.head
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        support = SupportGradient(ids, log_tail, g_log_probs, g_tail)
        counted = support.used[:, :1]
        with head.gather(weight, bias):
            products = _Products(hidden, weight, bias, ctx.dtype)
            total = log_tail.dtype
            g_hidden = torch.zeros_like(hidden, dtype=total) if need_hidden else None
            g_weight = torch.zeros_like(weight, dtype=total) if need_weight else None
            g_bias = torch.zeros_like(bias, dtype=total) if need_bias else None
            for rows in products:
                tile = products.tile(rows)
                for part in row_chunks(tile, _CHUNKS_AT_ONCE):
                    at = slice(rows.start + part.start, min(rows.start + part.stop, rows.stop))
                    log_p = head._logits(tile[part], ctx.temperature).log_softmax(-1)
                    g = support.over(at, log_p)
                    if g_entropy is not None:  # ∂H/∂z_j = −p_j (log p_j + H)
                        term = torch.where(log_p > -torch.inf, log_p + entropy[at, None], 0.0)
                        g -= log_p.exp() * term * g_entropy[at, None]
                    g = head._product_gradient(g, tile[part], ctx.temperature)
                    tile[part] = torch.where(counted[at], g, 0.0)
                h = torch.where(counted[rows], hidden[rows], 0.0)  # a masked row may hold NaN, and 0 · NaN is NaN
                products.add_gradients(rows, tile, h, g_hidden, g_weight)
                if g_bias is not None:
                    g_bias += tile.sum(0, dtype=total)
        grads = [
            None if g is None else g.to(x.dtype) for g, x in ((g_hidden, hidden), (g_weight, weight), (g_bias, bias))
        ]
        return (*grads, None, None, None, None)
