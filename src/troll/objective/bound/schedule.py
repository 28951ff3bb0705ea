"""A bound that is decided beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from troll.errors import InputError, require_choice
from troll.objective.bound.base import Bound, check_positive
from troll.projection import check_kl_bound

Curve = Literal["geometric", "linear"]


@dataclass
class Schedule(Bound):
    """From ``start`` on the first rollout to ``end`` after ``over`` rollouts, then constant. With x = min(n / over, 1)
    on the n-th rollout, from 0:

    ``geometric``  ε = start · (end / start)^x
    ``linear``     ε = start + (end − start) · x
    """

    start: float
    end: float
    over: int
    curve: Curve = "geometric"
    rollouts: int = field(init=False, default=0)
    """Begun so far."""

    def __post_init__(self) -> None:
        require_choice("curve", self.curve, get_args(Curve))
        if self.over < 1:
            raise InputError(
                f"a schedule over {self.over} rollouts", "at least 1", "a third of the rollouts of the run"
            )
        check_kl_bound(self.start)
        check_kl_bound(self.end)
        if self.curve == "geometric":
            check_positive(start=self.start, end=self.end)
        if not max(self.start, self.end) < float("inf"):
            raise InputError(
                f"a schedule from {self.start} to {self.end}", "finite bounds", "1, which is hardly a bound"
            )
        self.now = self.start

    def begin_rollout(self) -> None:
        """Go one step on."""
        x = min(self.rollouts / self.over, 1.0)
        self.rollouts += 1
        if self.curve == "geometric":
            self.now = self.start ** (1 - x) * self.end**x
        else:
            self.now = (1 - x) * self.start + x * self.end
