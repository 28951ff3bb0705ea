"""The bound ε of every token of an update: one number for all of them, or one per token.

``FixedBound`` and ``ScheduledBound`` are one number per rollout, and so are the controllers of ``bound_controllers``,
``ProjectedShareBound`` and ``NetworkKLBound``. ``EntropyBound`` and ``SequenceBound`` are one number per token.
``docs/bounds.md`` explains when to use which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from troll.errors import InputError, require_choice
from troll.inputs import require_count, require_number, require_positive
from troll.objective.metrics import mean as mean_over
from troll.policy import SparsePolicy, entropy
from troll.projection import KL_BOUND, check_kl_bound
from troll.projection.geodesic import solver_dtype

Curve = Literal["geometric", "linear"]
_EXAMPLES = {"target": 0.1, "gain": 0.5, "limit": 2.0}
_ROUNDING = 1 + 2.0**-23  # a KL that is reported in fp32 may have been rounded down by half of this


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
        """The state, as plain numbers."""
        return {x.name: getattr(self, x.name) for x in fields(self) if not x.init}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state that ``state_dict`` returned."""
        if state.keys() != self.state_dict().keys():
            raise InputError(
                f"the state of a {type(self).__name__} has the entries {', '.join(sorted(self.state_dict()))}, got "
                f"{', '.join(sorted(state)) or 'none'}",
                "Pass the state_dict() of a bound of the same class",
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
class FixedBound(Bound):
    """ε_t = ``kl_bound``."""

    kl_bound: float = KL_BOUND

    def __post_init__(self) -> None:
        check_kl_bound(self.kl_bound)
        self.now = self.kl_bound


@dataclass
class ScheduledBound(Bound):
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
        require_count("over", self.over, "Pass the number of rollouts the schedule takes, such as a third of the run")
        for name, value in (("start", self.start), ("end", self.end)):
            if self.curve == "geometric":
                require_positive(name, value, "A geometric schedule needs bounds > 0; curve='linear' may go to 0")
            else:
                fix = "Use 1 for a bound that hardly acts"
                require_number(name, value, "a finite number ≥ 0", lambda x: 0 <= x < math.inf, fix)
        self.now = self.start

    def begin_rollout(self) -> None:
        """Take one step of the schedule."""
        x = min(self.rollouts / self.over, 1.0)
        self.rollouts += 1
        if self.curve == "geometric":
            self.now = self.start ** (1 - x) * self.end**x
        else:
            self.now = (1 - x) * self.start + x * self.end


@dataclass
class EntropyBound(Bound):
    """Room where the old policy is undecided, little where it is sure:

        ε_t = ε · (σ + (1 − σ) H_t / H̄),   H̄ the mean of H_t over the counted tokens, σ = ``share``

    with H_t the entropy of the old policy over its kept tokens and one outcome for the rest, a lower bound. The mean of
    ε_t over the counted tokens is ε = ``kl_bound``, and no ε_t is below σ ε. σ = 1 is a fixed bound. With ``highest``
    no ε_t is above it, and where it acts the mean is below ε.
    """

    kl_bound: float
    share: float = 0.25
    highest: float | None = None

    def __post_init__(self) -> None:
        check_positive(kl_bound=self.kl_bound)
        require_number("share", self.share, "a number from 0 to 1", lambda x: 0 <= x <= 1, "The default is 0.25")
        if self.highest is not None:
            require_number(
                "highest",
                self.highest,
                f"at least kl_bound={self.kl_bound}, the mean of the bounds",
                lambda x: x >= self.kl_bound,
                f"Use highest={10 * self.kl_bound:g}, or leave it out",
            )
        self.now = self.kl_bound

    def of_token(self, old: SparsePolicy) -> Tensor:
        """[B, T] H_t; 0 where there is no distribution."""
        every = torch.cat([old.log_probs, old.log_tail.unsqueeze(-1)], dim=-1).detach()
        return torch.where(old.valid, entropy(every), 0.0)

    def token_bounds(
        self, old: SparsePolicy, counted: Tensor, kl: Callable[[], Tensor], mean: Tensor | None = None
    ) -> Tensor:
        """[B, T] ε_t; ε where a token does not count, and everywhere if the old policy is sure of all tokens."""
        H = self.of_token(old)
        mean = mean_over(H, counted) if mean is None else mean.to(H)
        relative = torch.where(counted & (mean > 0), H / mean.clamp(min=torch.finfo(H.dtype).tiny), 1.0)
        bounds = self.kl_bound * (self.share + (1 - self.share) * relative)
        return bounds if self.highest is None else bounds.clamp(max=self.highest)


@dataclass
class SequenceBound(Bound):
    """Token bounds under which Σ_t KL(π_t ‖ π_old,t) ≤ ``limit`` on every sequence: each token may take an even share
    of what those before it have left,

        ε_t = min( R_t / n_t, ε ),   R_1 = limit,   R_{t+1} = R_t − min(KL(π̃_t ‖ π_old,t), ε_t)

    with n_t the counted tokens from t to the end of the sequence. With ``max_length``, the longest completion the run
    allows, n_t counts those up to that length instead, at least 1: ε_t then depends on the tokens before t alone, and
    the KL of the two distributions of whole sequences is at most ``limit`` too (the proof is in docs/bounds.md).
    ε = ``kl_bound`` is a bound of each token besides.
    """

    limit: float
    kl_bound: float = math.inf
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_positive(limit=self.limit)
        check_kl_bound(self.kl_bound)
        if self.max_length is not None:
            require_count("max_length", self.max_length, "Pass the length of the longest completion of the run")
        self.now = self.kl_bound

    def token_bounds(
        self, old: SparsePolicy, counted: Tensor, kl: Callable[[], Tensor], mean: Tensor | None = None
    ) -> Tensor:
        """[B, T] ε_t, on the device of the KL, from one transfer to the host and one back."""
        counts = counted.cpu().numpy().T  # [T, B]: one time after another
        given = kl().detach()
        distance = given.cpu().double().numpy().T
        taken = np.where(counts & ~(distance <= 0), distance * _ROUNDING, 0.0)  # NaN: all that a token may
        before = np.cumsum(counts, 0) - counts
        length = counts.sum(0) if self.max_length is None else self.max_length
        ahead = np.maximum(length - before, 1).astype(np.float64)
        bounds, left = np.empty_like(taken), np.full(taken.shape[1], float(self.limit))
        for t in range(len(taken)):
            share = np.minimum(left / ahead[t], self.kl_bound, out=bounds[t])
            left -= np.fmin(taken[t], share)
        return torch.from_numpy(bounds.T).to(given.device, solver_dtype(given)).contiguous()


def check_positive(**numbers: float) -> None:
    """Refuse what is not a positive number."""
    for name, value in numbers.items():
        require_positive(name, value, f"Pass a positive number, such as {name}={_EXAMPLES.get(name, KL_BOUND)}")
