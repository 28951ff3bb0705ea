"""What adapts, and to what: a number that changes between rollouts, and the bound of every token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from torch import Tensor

from troll.errors import InputError
from troll.policy import SparsePolicy
from troll.projection import KL_BOUND, check_kl_bound


class Measured(NamedTuple):
    """What was measured over the counted tokens of an update, of all processes."""

    tokens: float
    """How many there were."""
    projected: float
    """Share of them where the network is outside of ε: KL(π̃ ‖ π_old) > ε."""
    network_kl: float
    """Mean of KL(π̃ ‖ π_old)."""

    @classmethod
    def of(cls, parts: list[Measured]) -> Measured:
        """All passes of an update together."""
        tokens = math.fsum(part.tokens for part in parts)
        projected, kl = (
            math.fsum(part.tokens * part[i] for part in parts if part.tokens) / tokens if tokens else 0.0
            for i in (1, 2)
        )
        return cls(tokens, projected, kl)


@dataclass
class Adaptive:
    """A number that may change from one rollout to the next. What is not an argument is its state."""

    now: float = field(init=False)
    """Its value on the rollout that is in use."""

    def begin_rollout(self) -> None:
        """A rollout has been made: adapt to what was observed on the one before."""

    def observe(self, measured: Measured) -> None:
        """An update on the rollout has been made, and this was measured in its forward passes."""

    @property
    def settings(self) -> dict[str, Any]:
        """Its arguments."""
        return {x.name: getattr(self, x.name) for x in fields(self) if x.init}

    def state_dict(self) -> dict[str, float]:
        """All that decides how it goes on, as plain numbers."""
        return {x.name: getattr(self, x.name) for x in fields(self) if not x.init}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from there."""
        if state.keys() != self.state_dict().keys():
            raise InputError(
                f"a state of {sorted(state)} for {type(self).__name__}",
                f"one of {sorted(self.state_dict())}",
                "the state_dict() of a bound of the same kind",
            )
        for name, value in state.items():
            setattr(self, name, value)


@dataclass
class Bound(Adaptive):
    """ε for each token of an update."""

    def token_bounds(
        self, old: SparsePolicy, counted: Tensor, kl: Callable[[], Tensor], mean: Tensor | None = None
    ) -> float | Tensor:
        """One number, or one per token [B, T], constant: ``kl_bound`` for ``troll_loss`` and ``constrain``.

        Args:
            old: the old policy, [B, T].
            counted: [B, T], which tokens count.
            kl: gives KL(π̃ ‖ π_old) per token, [B, T] (``network_kl``); called only where it is needed.
            mean: of ``of_token`` over the counted tokens of the whole rollout, []; where it is not given, and needed,
                the mean over the tokens at hand.
        """
        return self.now

    def of_token(self, old: SparsePolicy) -> Tensor | None:
        """[B, T], a number per token whose mean over the whole rollout the bounds depend on; None if there is none."""
        return None


@dataclass
class Fixed(Bound):
    """ε_t = ``kl_bound``."""

    kl_bound: float = KL_BOUND

    def __post_init__(self) -> None:
        check_kl_bound(self.kl_bound)
        self.now = self.kl_bound


def check_positive(**numbers: float) -> None:
    """Refuse what is not a positive number."""
    for name, value in numbers.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name}={value}", "a number > 0", f"{KL_BOUND}, or another positive number")
