"""Which tokens move, in two numbers and four: the mean KL by sign of the advantage, and by quarter of the completion.

Cheap enough for every forward pass: six masked sums, one transfer. ``troll.diagnostics`` say more about a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from troll.projection.geodesic import solver_dtype

QUARTERS = 4


@torch.no_grad()
def kl_by_group(kl: Tensor, counted: Tensor, advantages: Tensor) -> dict[str, float]:
    """Mean of ``kl`` [B, T] over the counted tokens of each group that has any, by the name of its metric.

    Args:
        kl: [B, T] KL per token.
        counted: [B, T] bool.
        advantages: [B, T].
    """
    length = counted.sum(-1, keepdim=True).clamp(min=1)
    quarter = (counted.cumsum(-1) - 1) * QUARTERS // length  # token i of n: ⌊4 i / n⌋
    groups = {"kl_by_sign/positive": advantages > 0, "kl_by_sign/negative": advantages < 0}
    groups |= {f"kl_by_quarter/{i + 1}": quarter == i for i in range(QUARTERS)}
    inside = torch.stack(list(groups.values())) & counted  # [6, B, T]
    sums = torch.where(inside, kl.to(solver_dtype(kl)), 0.0).sum((1, 2))
    totals, counts = torch.stack([sums, inside.sum((1, 2)).to(sums.dtype)]).tolist()
    return {name: total / n for name, total, n in zip(groups, totals, counts, strict=True) if n}
