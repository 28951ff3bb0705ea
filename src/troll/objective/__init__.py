"""Policies and advantages → a loss and its metrics.

``troll_loss`` is the method; ``clip_loss`` and ``unconstrained_loss`` are what it is compared with.
"""

from troll.objective.aggregation import Aggregation, aggregate
from troll.objective.baselines import clip_loss, unconstrained_loss
from troll.objective.metrics import Metrics
from troll.objective.ratio import RatioLevel
from troll.objective.troll import regression, troll_loss

__all__ = [
    "Aggregation",
    "Metrics",
    "RatioLevel",
    "aggregate",
    "clip_loss",
    "regression",
    "troll_loss",
    "unconstrained_loss",
]
