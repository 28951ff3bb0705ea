"""Whitening: bring all counted entries of a batch to mean 0 and variance 1, once, over the whole batch.

The statistics are taken over the counted entries alone, gathered in order: columns of padding, whatever they contain,
change no bit of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from troll.advantages.inputs import as_mask, as_token_floats, require_eps, require_finite
from troll.errors import InputError

__all__ = ["whiten"]


def whiten(values: Tensor, loss_mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Return (x − μ) / √(σ² + eps), with μ and the unbiased σ² over the n counted entries of the batch.

        μ = 1/n Σ x,   σ² = 1/(n−1) Σ (x − μ)²

    Equal entries give exactly 0. In distributed training each process whitens what it is given: gather first for
    statistics of the global batch.

    Args:
        values: [B, T] anything to whiten; what lies under the mask is not read and may be NaN.
        loss_mask: [B, T] 1 where a token counts; at least two must.
        eps: keeps equal entries from a division by 0.

    Returns:
        [B, T] a detached constant in float32 (float64 if ``values`` is), 0 outside the mask.
    """
    require_eps(eps, 1e-8)
    mask = as_mask(loss_mask)
    x = as_token_floats("values", values, mask)
    counted = x[mask]  # [n]
    n = counted.numel()
    if n < 2:
        raise InputError(
            f"Got loss_mask with {n} counted tokens, expected at least 2: one has no variance", "Try a larger batch"
        )
    above = counted - counted.min()  # the deviations are the same, and equal entries are exactly 0
    deviation = above - above.sum() / n
    variance = require_finite("variance", deviation.square().sum() / (n - 1))
    return torch.zeros_like(x).masked_scatter_(mask, deviation / (variance + eps).sqrt())
