"""The path from the old policy to the proposal: an exponential family in one scalar, equations (3) to (5):

    π_t ∝ π_old exp(t d),   d = log π̃ − log π_old,   A(t) = log Σ π_old exp(t d)                       (3)
    KL(π_t ‖ π_old) = t μ_t − A(t),   μ_t = E_{π_t}[d]                                                  (4)
    d/dt KL(π_t ‖ π_old) = t Var_{π_t}[d] ≥ 0                                                           (5)

π_0 is the old policy and π_1 the proposal.

``vjp`` is the derivative of the projection in closed form, (6) and (7). It does not depend on how t was found. For an
active token, with π the projected policy, d = log π̃ − log π_old, μ and Var its moments under π, implicit
differentiation of KL(π_t ‖ π_old) = ε gives ∂t/∂d_j = −(t / Var) π_j (d_j − μ), and for an upstream gradient g on log π

    VJP_j = t [ g_j − π_j Σg − π_j (d_j − μ) Σ_i g_i (d_i − μ) / Var ]                                 (7)

At t = 0 the projection is constant. An inactive token is passed through unchanged, and so is its gradient.
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


def vjp(grad: Tensor, log_probs: Tensor, d: Tensor, mix: Tensor) -> Tensor:
    """Gradient on the proposal [N, K] for the gradient ``grad`` [N, K] on the projected log-probabilities.

    ``d`` is finite also outside the support, where ``log_probs`` is −inf and ``grad`` is not read.
    """
    probs = log_probs.exp()
    g = torch.where(log_probs > -torch.inf, grad, 0.0)
    centred, variance = moments(log_probs, d)
    along = (g * centred).sum(-1) / torch.where(variance > 0, variance, torch.inf)
    active = g - probs * (g.sum(-1, keepdim=True) + centred * along[:, None])
    return torch.where((mix < 1)[:, None], mix[:, None] * active, grad)
