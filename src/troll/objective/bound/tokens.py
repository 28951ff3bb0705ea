"""Bounds that differ from token to token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from troll.errors import InputError
from troll.objective.bound.base import Bound, check_positive
from troll.objective.metrics import mean as mean_over
from troll.policy import SparsePolicy, entropy
from troll.projection import check_kl_bound
from troll.projection.geodesic import solver_dtype

_ROUNDING = 1 + 2.0**-23  # a KL that is reported in fp32 may have been rounded down by half of this


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
        if not 0 <= self.share <= 1:
            raise InputError(f"share={self.share}", "a number from 0 to 1", "share=0.25, the default")
        if self.highest is not None and not self.highest >= self.kl_bound:
            raise InputError(
                f"highest={self.highest} with kl_bound={self.kl_bound}",
                "a cap that is not below the mean",
                f"highest={10 * self.kl_bound:g}, or leaving it out",
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
class SequenceBudget(Bound):
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
        if self.max_length is not None and self.max_length < 1:
            raise InputError(f"max_length={self.max_length}", "at least 1 token", "the longest completion of the run")
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
