"""What goes into the scoring of rows and what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 20  # on a CPU: a few megabytes, so that temporaries stay in the cache
_CHUNKS_AT_ONCE = 8  # elsewhere: few launches


class LogitTransform(NamedTuple):
    """How a row x is read: z = c tanh(s x / c) / T, or s x / T without a soft cap."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def read(self, x: Tensor) -> Tensor:
        """The logits z, in work precision; x itself where there is nothing to do."""
        z = x.to(work_dtype(x.dtype))
        if self.scale != 1.0:
            z = z * self.scale
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        return z if self.temperature == 1.0 else z / self.temperature

    def backward(self, g: Tensor, x: Tensor) -> Tensor:
        """∂/∂x from the gradient g of z."""
        if self.softcap is not None:
            g = g * (1 - torch.tanh(x.to(g.dtype) * self.scale / self.softcap).square())
        factor = self.scale / self.temperature
        return g if factor == 1.0 else g * factor


class MostProbable(NamedTuple):
    """A support that is to be selected."""

    max_support: int
    tail_mass: float


class Scores(NamedTuple):
    """What is known of each row."""

    token_ids: Tensor
    """[N, K] int64, slot 0 the sampled token, −1 in unused slots."""
    log_probs: Tensor
    """[N, K]."""
    log_tail: Tensor
    """[N]."""
    entropy: Tensor
    """[N]; 0 where it was not asked for."""
    log_norm: Tensor
    """[N, 2] log Σ e^z as two numbers, max z and log Σ e^(z − max z).

    Their sum would be rounded at the size of the logits, 2e-4 at 4096. The second is not finite exactly where the row
    has a NaN, a +inf or only −inf.
    """

    @classmethod
    def empty(cls, N: int, V: int, support: MostProbable | Tensor, dtype: torch.dtype, device: torch.device) -> Scores:
        """Room for the scores of N rows of V logits of this type."""
        K = min(support.max_support, V) if isinstance(support, MostProbable) else support.shape[-1]
        log_tail = torch.empty(N, dtype=work_dtype(dtype), device=device)
        return cls(
            torch.empty(N, K, dtype=torch.int64, device=device),
            log_tail.new_empty(N, K),
            log_tail,
            torch.zeros_like(log_tail),
            log_tail.new_empty(N, 2),
        )

    def put(self, rows: slice, part: Scores) -> None:
        """Write the scores of some rows."""
        for mine, theirs in zip(self, part, strict=True):
            mine[rows] = theirs

    def at(self, rows: slice) -> Scores:
        """The scores of some rows."""
        return Scores(*(x[rows] for x in self))


class Upstream(NamedTuple):
    """Gradients that arrive at the scores; None where nothing does."""

    log_probs: Tensor | None
    log_tail: Tensor | None
    entropy: Tensor | None = None

    def at(self, rows: slice) -> Upstream:
        """Those of some rows."""
        return Upstream(*(None if x is None else x[rows] for x in self))


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64; everything else is computed in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_chunks(tile: Tensor) -> Iterator[slice]:
    """Slices of rows, to be worked off one after another: nothing of the size of the logits is made twice."""
    elements = _CHUNK_ELEMENTS * (1 if tile.device.type == "cpu" else _CHUNKS_AT_ONCE)
    rows = max(1, elements // max(1, tile.shape[-1]))
    for start in range(0, tile.shape[0], rows):
        yield slice(start, min(start + rows, tile.shape[0]))
