"""h Wᵀ + b, tile by tile, and the products that its gradient needs.

A tile is some rows of the logits with their whole vocabulary, in the type of the hidden states (that of autocast where
it is on). Gradients are summed in fp32 (fp64 for fp64): rounding each product to half precision biases training.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_TILE_BYTES = {"cpu": 1 << 26, "other": 1 << 29}
_VOCABULARY_SLICE = 1 << 15  # of a weight of another type, converted at a time
_ROWS = 128  # rows of a tile are a multiple of this on an accelerator


class Products:
    """The products of hidden states [N, H] with a head, in tiles that share one buffer."""

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
        self.rows = _rows(len(hidden), tile_bytes // max(1, len(weight) * dtype.itemsize), device)
        self._buffer = hidden.new_empty(self.rows, len(weight), dtype=self.dtype)

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, len(self.hidden), self.rows):
            yield slice(start, min(start + self.rows, len(self.hidden)))

    def _slices(self) -> Iterator[slice]:
        step = len(self.weight) if self.weight.dtype == self.dtype else _VOCABULARY_SLICE
        for start in range(0, len(self.weight), max(1, step)):
            yield slice(start, min(start + step, len(self.weight)))

    def tile(self, rows: slice) -> Tensor:
        """The tile of these rows, [rows, V]; it lives until the next one is made."""
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


def _rows(total: int, fit: int, device: str) -> int:
    """Rows of a tile, so that tiles fit and are about equally large."""
    fit = max(1, min(total, fit))
    if device == "cpu" or fit < 2 * _ROWS or fit == total:
        return fit
    fit -= fit % _ROWS
    share = -(-total // -(-total // fit))  # of as many tiles as needed
    return min(fit, -(-share // _ROWS) * _ROWS)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, summed in the type of ``total``."""
    if total.device.type == "cuda" and a.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
