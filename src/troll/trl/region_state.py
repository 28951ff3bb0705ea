"""The trust region of a run as it is now: ε of every token, α, and what they adapt to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor

from troll.objective.bounds import Adaptive, Bound, FixedBound, Measured
from troll.policy import PackedPolicy
from troll.trl.bound_settings import make_bound, make_regression

logger = get_logger(__name__)
_FORMER_KINDS = {  # in checkpoints of earlier versions
    "Schedule": "ScheduledBound",
    "HoldProjected": "ProjectedShareBound",
    "HoldNetworkKL": "NetworkKLBound",
    "SequenceBudget": "SequenceBound",
}


class Region:
    """ε and α of a run. All processes observe the same numbers, so that they have the same region."""

    def __init__(self, args: Any) -> None:
        self._args, self._bound = args, make_bound(args)
        self.regression = make_regression(args)
        adaptive: dict[str, Adaptive | None] = {
            "kl_bound": None if isinstance(self._bound, FixedBound) else self._bound,
            "regression_coef": self.regression,
        }
        self._adaptive = {name: x for name, x in adaptive.items() if x is not None}

    @property
    def bound(self) -> Bound:
        """ε; where it is fixed, that of the arguments as they are now, which a callback may change."""
        return FixedBound(self._args.kl_bound) if isinstance(self._bound, FixedBound) else self._bound

    @property
    def regression_coef(self) -> float:
        """α; where it is fixed, that of the arguments as they are now."""
        value: float = self._args.regression_coef if self.regression is None else self.regression.now
        return value

    @property
    def now(self) -> dict[str, float]:
        """Of what adapts, its value; nothing where all is fixed."""
        return {name: x.now for name, x in self._adaptive.items()}

    def begin_rollout(self) -> None:
        """A rollout has been made."""
        for x in self._adaptive.values():
            x.begin_rollout()

    def observe(self, passes: list[Measured]) -> None:
        """An update has been made, in these passes."""
        for x in self._adaptive.values():
            x.observe(Measured.of(passes))

    def sums(self, policies: list[PackedPolicy], loss_mask: Tensor) -> Tensor | None:
        """[2], the sum over the counted tokens of what the bound needs the mean of, and their number; None if nothing.

        One sequence at a time: a rollout is large.
        """
        total: Tensor | None = None
        for packed, counted in zip(policies, loss_mask, strict=True):
            values = self.bound.of_token(packed.unpack(check=False))
            if values is None:
                return None
            part = torch.stack([torch.where(counted, values, 0.0).sum(), counted.sum().to(values.dtype)])
            total = part if total is None else total + part
        return total

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON takes it."""
        return {
            name: {"kind": type(x).__name__, "settings": x.settings, "state": x.state_dict()}
            for name, x in self._adaptive.items()
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from there; what has other settings now, or was not saved, starts anew."""
        for name, x in self._adaptive.items():
            state = saved.get(name) or {}
            kind = _FORMER_KINDS.get(str(state.get("kind")), state.get("kind"))
            if state.get("settings") == x.settings and kind == type(x).__name__:
                x.load_state_dict(saved[name]["state"])
            else:
                logger.warning(f"{name} adapts from {x.now:g} anew: the checkpoint has no state for its settings.")
