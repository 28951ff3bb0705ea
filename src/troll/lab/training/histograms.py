"""The tokens of an update as histograms: enough to draw how KL and ratio are distributed, small enough to keep."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from troll.objective import TokenStats

KL_EDGES = [0.0, *np.logspace(-8, 2, 61).tolist()]
LOG_RATIO_EDGES = np.linspace(-3, 3, 61).tolist()
QUANTILES = (0.5, 0.9, 0.99, 1.0)

HEADER = {"format": 1, "kl_edges": KL_EDGES, "log_ratio_edges": LOG_RATIO_EDGES}


class TokenHistogram:
    """What happened to the tokens of one update, over its forward passes."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def add(self, stats: TokenStats, counted: Tensor) -> None:
        """The tokens of one forward pass."""
        for name in ("kl_before", "kl_after", "ratio"):
            if name in stats:
                self._values.setdefault(name, []).append(stats[name][counted].double().cpu())
        if "solver_steps" in stats:
            active = counted & (stats["projected"] > 0)
            self._values.setdefault("solver_steps", []).append(stats["solver_steps"][active].double().cpu())

    def line(self) -> dict[str, Any] | None:
        """As it stands in ``tokens.jsonl``; None without a token."""
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
    """How many are between one edge and the next; those outside count for the first and the last, as does NaN."""
    inside = np.clip(np.nan_to_num(values, nan=np.inf), edges[0], np.nextafter(edges[-1], edges[0]))
    return [int(n) for n in np.histogram(inside, bins=edges)[0]]
