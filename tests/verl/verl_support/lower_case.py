"""A reward that a random byte model earns a tenth of at once, and learns to earn within a few updates."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Share of lower-case letters in eight bytes."""
    return sum(c.islower() for c in solution_str) / 8
