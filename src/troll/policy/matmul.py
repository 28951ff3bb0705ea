"""h Wᵀ + b, a part at a time, and the products that its gradient needs.

The parts are rows with their whole vocabulary, or columns: a slice of the vocabulary for all rows. They have the type
of the hidden states (that of autocast where it is on) and share one buffer. Gradients are summed in fp32 (fp64 for
fp64): rounding each of several products to half precision biases training.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_TILE_BYTES = {"cpu": 1 << 26, "other": 1 << 29}
_VOCABULARY_SLICE = 1 << 15  # tokens of a weight of another type, converted at a time
_MULTIPLE = 128  # of rows or columns, on an accelerator


class TiledMatmul:
    """The products of hidden states [N, H] with a head."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype | None = None,
        tile_bytes: int | None = None,
    ) -> None:
        device = hidden.device.type
        if dtype is None:
            lowered = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
            dtype = torch.get_autocast_dtype(device) if lowered else hidden.dtype
        self.dtype = dtype
        self.hidden, self.weight, self.bias = hidden, weight, bias
        if tile_bytes is None:
            tile_bytes = _TILE_BYTES.get(device, _TILE_BYTES["other"])
        self._elements = tile_bytes // dtype.itemsize
        self._buffer = hidden.new_empty(0, dtype=dtype)

    @property
    def converts(self) -> bool:
        """Whether the weight has another type than the products."""
        return self.weight.dtype != self.dtype

    def rows(self) -> Iterator[slice]:
        """All rows, so many at a time as fit."""
        return _slices(len(self.hidden), self._elements // max(1, len(self.weight)), self.hidden.device.type)

    def columns(self) -> Iterator[slice]:
        """The whole vocabulary, so many tokens at a time as fit."""
        fit = self._elements // max(1, len(self.hidden))
        if self.hidden.device.type == "cpu" and self.dtype.itemsize < 4:
            fit //= 3  # gradients are multiplied in fp32 there
        fit = min(fit, _VOCABULARY_SLICE) if self.converts else fit
        return _slices(len(self.weight), fit, self.hidden.device.type)

    def tile(self, rows: slice) -> Tensor:
        """[rows, V]; it lives until the next part is made."""
        hidden = self.hidden[rows].to(self.dtype)
        tile = self._room(len(hidden), len(self.weight))
        step = _VOCABULARY_SLICE if self.converts else len(self.weight)
        for start in range(0, len(self.weight), max(1, step)):
            part = slice(start, start + step)
            torch.mm(hidden, self.weight[part].to(self.dtype).t(), out=tile[:, part])
        if self.bias is not None:
            tile += self.bias.to(self.dtype)
        return tile

    def slab(self, columns: slice) -> tuple[Tensor, Tensor]:
        """[N, columns], which lives until the next part is made, and the weight of these columns."""
        weight = self.weight[columns].to(self.dtype)
        slab = self._room(len(self.hidden), len(weight))
        torch.mm(self.hidden.to(self.dtype), weight.t(), out=slab)
        if self.bias is not None:
            slab += self.bias[columns].to(self.dtype)
        return slab, weight

    def times_weight(self, g: Tensor, out: Tensor) -> None:
        """``out = g W`` for g [n, V]."""
        if not self.converts:
            product(g, self.weight, out)
            return
        total = torch.zeros_like(out, dtype=torch.promote_types(g.dtype, torch.float32))
        for start in range(0, len(self.weight), _VOCABULARY_SLICE):
            part = slice(start, start + _VOCABULARY_SLICE)
            add_product(g[:, part], self.weight[part].to(self.dtype), total)
        out.copy_(total)

    def forget(self) -> None:
        """Give the memory of the parts back."""
        self._buffer = self.hidden.new_empty(0, dtype=self.dtype)

    def _room(self, rows: int, columns: int) -> Tensor:
        if self._buffer.numel() < rows * columns:
            self._buffer = self.hidden.new_empty(rows * columns, dtype=self.dtype)
        return self._buffer[: rows * columns].view(rows, columns)


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``out = a @ b``, summed in fp32 and rounded once."""
    work = torch.promote_types(a.dtype, torch.float32)
    if out.dtype == a.dtype and (a.device.type == "cuda" or a.dtype == work):
        torch.mm(a, b, out=out)
    else:
        total = out if out.dtype == work else torch.empty_like(out, dtype=work)
        add_product(a, b, total, so_far=0)
        if total is not out:
            out.copy_(total)


def add_product(a: Tensor, b: Tensor, out: Tensor, so_far: int = 1) -> None:
    """``out += a @ b``, summed in the type of ``out``, whatever was there (``so_far`` 1) or not."""
    if out.device.type == "cuda" and a.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=so_far, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=so_far)


def _slices(total: int, fit: int, device: str) -> Iterator[slice]:
    """Slices of 0 … total of at most ``fit``, about equally large; an empty one of nothing."""
    if total == 0:
        yield slice(0, 0)
    fit = max(1, min(total, fit))
    if device != "cpu" and _MULTIPLE < fit < total:
        fit -= fit % _MULTIPLE
        share = -(-total // -(-total // fit))  # of as many slices as needed
        fit = min(fit, -(-share // _MULTIPLE) * _MULTIPLE)
    for start in range(0, total, fit):
        yield slice(start, min(start + fit, total))
