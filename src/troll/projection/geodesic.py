"""The path from the old policy to the proposal: an exponential family in one scalar, equations (3) to (5):

    π_t ∝ π_old exp(t d),   d = log π̃ − log π_old,   A(t) = log Σ π_old exp(t d)                       (3)
    KL(π_t ‖ π_old) = t μ_t − A(t),   μ_t = E_{π_t}[d]                                                  (4)
    d/dt KL(π_t ‖ π_old) = t Var_{π_t}[d] ≥ 0                                                           (5)

π_0 is the old policy and π_1 the proposal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from troll.policy import token_kl


class Point(NamedTuple):
    """One point of the path, for every row."""

    log_probs: Tensor
    """[N, K] log π_t."""
    kl: Tensor
    """[N] KL(π_t ‖ π_old), in the stable form of (4)."""
    variance: Tensor
    """[N] Var_{π_t}[d]."""


def point(log_old: Tensor, d: Tensor, mix: Tensor) -> Point:
    """π_t at t = ``mix`` [N], for normalised ``log_old`` [N, K] and ``d`` [N, K] (finite also outside the support)."""
    tilted = log_old + mix[:, None] * d
    log_probs = tilted - tilted.logsumexp(-1, keepdim=True)
    return Point(log_probs, token_kl(log_probs, log_old), moments(log_probs, d)[1])


def moments(log_probs: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """d − μ [N, K] and Var[d] [N] under π."""
    probs = log_probs.exp()
    centred = d - (probs * d).sum(-1, keepdim=True)
    return centred, (probs * centred.square()).sum(-1)


def solver_dtype(x: Tensor) -> torch.dtype:
    """fp64, so that a projected fp32 policy is rounded once, when it is stored; fp32 where there is no fp64."""
    return x.dtype if x.device.type == "mps" else torch.float64
