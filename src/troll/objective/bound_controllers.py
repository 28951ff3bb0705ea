"""Controllers: a number that is multiplied once per rollout, so that what is measured comes to a target.

    log x ← clamp( log x ± clamp(gain · (log measured − log target), ± log step), log lowest, log highest )

+ where more of x lowers what is measured, − where it raises it. Nothing measured at all, log 0 = −∞, is the longest
step. If the measurement is c · x^∓p, the fixed point is x* = (c / target)^(±1/p), and the distance to it in log x
shrinks by |1 − gain · p| per rollout: with a gain of ½ it comes closer for every p below 4, without overshooting for
p ≤ 2. The first update on a rollout is made by the old policy itself and says nothing: a rollout with no other
leaves x as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from troll.errors import InputError
from troll.inputs import is_number, require_number
from troll.objective.bounds import Adaptive, Bound, Measured, check_positive

_REACH = 10.0  # default limits: the start divided and multiplied by this


@dataclass
class _Controller(Adaptive):
    start: float
    target: float
    gain: float = 0.5
    step: float = 1.5
    """Most that the number is multiplied or divided by in one rollout."""
    lowest: float | None = None
    highest: float | None = None
    """Its limits; a tenth and ten times its start by default."""
    updates: int = field(init=False, default=0)
    """Made on this rollout."""
    tokens: float = field(init=False, default=0.0)
    """That ``measured`` is the mean of; 0 before anything is measured."""
    measured: float = field(init=False, default=0.0)

    _sign: ClassVar[int]

    def __post_init__(self) -> None:
        check_positive(start=self.start, target=self.target, gain=self.gain)
        if not is_number(self.step) or not 1 < self.step < math.inf:
            raise InputError(
                f"step must be a number > 1, the largest factor of one rollout, got {self.step}", "The default is 1.5"
            )
        low, high = self.limits
        if not 0 < low <= self.start <= high < math.inf:
            raise InputError(
                f"lowest and highest must be positive and enclose start={self.start}, got lowest={low}, highest={high}",
                "Leave lowest and highest out to use the defaults",
            )
        self.now = self.start

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest value the number may have."""
        return (
            self.start / _REACH if self.lowest is None else self.lowest,
            self.start * _REACH if self.highest is None else self.highest,
        )

    def observe(self, measured: Measured) -> None:
        """Use the measurement of an update, except of the first: there the network is the old policy."""
        self.updates += 1
        if self.updates > 1 and measured.tokens > 0:
            self._take(measured)

    def begin_rollout(self) -> None:
        """Move by one step, if anything was measured."""
        if self.tokens > 0 and not math.isnan(self.measured):
            distance = math.log(self.measured) - math.log(self.target) if self.measured > 0 else -math.inf
            most = math.log(self.step)
            factor = math.exp(min(max(self._sign * self.gain * distance, -most), most))
            low, high = self.limits
            self.now = min(max(self.now * factor, low), high)
        self.updates, self.tokens, self.measured = 0, 0.0, 0.0

    def _take(self, measured: Measured) -> None:
        raise NotImplementedError


def check_share(name: str, value: float) -> None:
    """Refuse what is not a fraction of the tokens."""
    require_number(
        name, value, "a fraction of the tokens, > 0 and < 1", lambda x: 0 < x < 1, f"{name}=0.03 is three percent"
    )


@dataclass
class ProjectedShareBound(_Controller, Bound):
    """ε such that the share ``target`` of the tokens is projected, over all updates on a rollout but the first.

    More tokens are projected under a lower bound: where too many are, ε is raised.
    """

    _sign: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_share("target", self.target)
        super().__post_init__()

    def _take(self, measured: Measured) -> None:
        tokens = self.tokens + measured.tokens
        self.measured += (measured.projected - self.measured) * measured.tokens / tokens
        self.tokens = tokens


@dataclass
class NetworkKLBound(_Controller, Bound):
    """ε such that the network itself, not its projection, is ``target`` nats per token away from the old policy at the
    last update on a rollout: the mean of KL(π̃ ‖ π_old).

    The network goes farther under a higher bound: where it goes too far, ε is lowered.
    """

    _sign: ClassVar[int] = -1

    def _take(self, measured: Measured) -> None:
        self.tokens, self.measured = measured.tokens, measured.network_kl


@dataclass
class RegressionController(_Controller):
    """α such that at most the share ``target`` of the tokens has the network outside of ε at the last update on a
    rollout: KL(π̃ ‖ π_old) > ε.

    The regression pulls the network back: where too many tokens are outside, α is raised; where fewer are, it is
    lowered again, to its start and no further. A target of 0.01 is a 99th percentile of the network's KL of at most ε.
    """

    _sign: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_share("target", self.target)
        super().__post_init__()

    @property
    def limits(self) -> tuple[float, float]:
        """The limits of α; the lower one is its start by default."""
        return self.start if self.lowest is None else self.lowest, super().limits[1]

    def _take(self, measured: Measured) -> None:
        self.tokens, self.measured = measured.tokens, measured.projected
