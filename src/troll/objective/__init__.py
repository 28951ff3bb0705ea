"""Policies and advantages → a loss and its metrics.

``troll_loss`` is the method, ``fused_troll_loss`` the same from hidden states in one pass; ``clip_loss`` and
``unconstrained_loss`` are the baselines. A trainer with its own loss uses the parts: ``constrain`` projects,
``token_loss`` composes the loss of a token, ``aggregate`` reduces it, ``token_stats`` and ``summarise`` make metrics.
Bounds that adapt are in ``bounds`` and ``bound_controllers``, named settings in ``presets``.
"""

from troll.objective.aggregation import Aggregation, aggregate
from troll.objective.baselines import clip_loss, unconstrained_loss
from troll.objective.fused import fused_troll_loss
from troll.objective.metrics import REDUCTIONS, Metrics, Reduction, TokenStats, reduction, summarise, token_stats
from troll.objective.presets import PRESETS, Preset, PresetName, resolve
from troll.objective.token_loss import ImportanceSamplingLevel, TokenLoss, ratios, token_loss
from troll.objective.troll import (
    Constrained,
    check_regression_coef,
    constrain,
    network_kl,
    regression_loss,
    troll_loss,
    trust_region_can_act,
)

__all__ = [
    "PRESETS",
    "REDUCTIONS",
    "Aggregation",
    "Constrained",
    "ImportanceSamplingLevel",
    "Metrics",
    "Preset",
    "PresetName",
    "Reduction",
    "TokenLoss",
    "TokenStats",
    "aggregate",
    "check_regression_coef",
    "clip_loss",
    "constrain",
    "fused_troll_loss",
    "network_kl",
    "ratios",
    "reduction",
    "regression_loss",
    "resolve",
    "summarise",
    "token_loss",
    "token_stats",
    "troll_loss",
    "trust_region_can_act",
    "unconstrained_loss",
]
