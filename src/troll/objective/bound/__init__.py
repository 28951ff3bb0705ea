"""The bound ε of every token of an update: one number for all, or adapted to what was measured, or to the token.

``Fixed``, ``Schedule``, ``HoldProjected`` and ``HoldNetworkKL`` are one number per rollout; ``EntropyBound`` and
``SequenceBudget`` are one per token. ``RegressionController`` does for α, the weight of the regression, what the
second pair does for ε. ``docs/bounds.md`` says what each is for.
"""

from troll.objective.bound.base import Adaptive, Bound, Fixed, Measured
from troll.objective.bound.controllers import HoldNetworkKL, HoldProjected, RegressionController
from troll.objective.bound.schedule import Curve, Schedule
from troll.objective.bound.tokens import EntropyBound, SequenceBudget

__all__ = [
    "Adaptive",
    "Bound",
    "Curve",
    "EntropyBound",
    "Fixed",
    "HoldNetworkKL",
    "HoldProjected",
    "Measured",
    "RegressionController",
    "Schedule",
    "SequenceBudget",
]
