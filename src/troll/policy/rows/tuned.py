"""The same as ``reference``, arranged for CPUs."""

from __future__ import annotations

from troll.policy.rows.reference import gradient, score

__all__ = ["gradient", "score"]
