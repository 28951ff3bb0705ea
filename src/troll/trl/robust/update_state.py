"""The update that is being made, and what has gone wrong with those before."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from troll.objective.bounds import Measured


@dataclass
class GuardState:
    """What has gone wrong in a run so far; saved with its checkpoints."""

    skipped_updates: int = 0
    unscored_rollouts: int = 0
    """Rollouts of which no completion could be scored."""
    halvings: int = 0
    """How often the batch of a forward and backward pass was halved."""
    scoring_halvings: int = 0
    """How often that of the pass that scores a rollout was."""
    updates_since_log: int = 0
    skipped_since_log: int = 0


@dataclass
class Update:
    """The update that is being made."""

    model: Any
    loss_before: Tensor
    """What the trainer had added up before."""
    entropy_before: dict[str, Any]
    current: dict[str, Any] | None = None
    """The batch that forward and backward are made on."""
    done: list[dict[str, Any]] = field(default_factory=list)
    """Those before it."""
    again: bool = False
    """Whether those have to be made once more."""
    loss_before_last: Tensor | None = None
    """Of the parts of the current batch before the last."""
    losses: list[Tensor] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    norms: dict[str, Tensor] = field(default_factory=dict)
    """Of the gradient of each parameter, before it is clipped."""
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    measured: list[Measured] = field(default_factory=list)
    """What the trust region adapts to, of each pass."""
