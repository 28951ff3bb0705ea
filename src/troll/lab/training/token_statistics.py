"""Statistics over the tokens of an update: histograms of KL and ratio, and the mean KL of groups of tokens.

Histograms are written to ``tokens.jsonl`` once per update. The mean KL by sign of the advantage and by quarter of the
completion is logged in every forward pass; ``troll.diagnostics`` has more detailed statistics.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from troll.objective import TokenStats
from troll.projection.geodesic import solver_dtype

KL_EDGES = [0.0, *np.logspace(-8, 2, 61).tolist()]
LOG_RATIO_EDGES = np.linspace(-3, 3, 61).tolist()
QUANTILES = (0.5, 0.9, 0.99, 1.0)
QUARTERS = 4

HEADER = {"format": 1, "kl_edges": KL_EDGES, "log_ratio_edges": LOG_RATIO_EDGES}


class TokenHistogram:
    """Histograms of the tokens of one update, over its forward passes."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def add(self, stats: TokenStats, counted: Tensor) -> None:
        """Add the tokens of one forward pass."""
        for name in ("kl_before", "kl_after", "ratio"):
            if name in stats:
                self._values.setdefault(name, []).append(stats[name][counted].double().cpu())
        if "solver_steps" in stats:
            active = counted & (stats["projected"] > 0)
            self._values.setdefault("solver_steps", []).append(stats["solver_steps"][active].double().cpu())

    def line(self) -> dict[str, Any] | None:
        """The line of ``tokens.jsonl``, or None if there was no token."""
        values = {name: torch.cat(parts).numpy() for name, parts in self._values.items()}
        if not values or not values["kl_before"].size:
            return None
        kl = values["kl_before"]
        line: dict[str, Any] = {
            "count": int(kl.size),
            "kl": _counts(kl, KL_EDGES),
            "log_ratio": _counts(np.log(np.maximum(values["ratio"], 1e-30)), LOG_RATIO_EDGES),
            "kl_quantiles": np.quantile(kl, QUANTILES, method="lower").tolist(),
        }
        if "kl_after" in values:
            line["kl_after"] = _counts(values["kl_after"], KL_EDGES)
            steps = Counter(values["solver_steps"].astype(int).tolist())
            line["solver_steps"] = {str(number): steps[number] for number in sorted(steps)}
        return line


def _counts(values: np.ndarray[Any, Any], edges: list[float]) -> list[int]:
    """Counts per bin. Values outside are counted in the first and last bin, NaN in the last."""
    inside = np.clip(np.nan_to_num(values, nan=np.inf), edges[0], np.nextafter(edges[-1], edges[0]))
    return [int(n) for n in np.histogram(inside, bins=edges)[0]]


@torch.no_grad()
def kl_by_group(kl: Tensor, counted: Tensor, advantages: Tensor) -> dict[str, float]:
    """Mean of ``kl`` over the counted tokens of each non-empty group, by metric name. Six masked sums, one transfer.

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
