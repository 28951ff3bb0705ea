"""The derivative of the projection in closed form, equations (6) and (7). Nothing here knows how t was found.

For an active token, with π the projected policy, d = log π̃ − log π_old, μ and Var its moments under π, implicit
differentiation of KL(π_t ‖ π_old) = ε gives ∂t/∂d_j = −(t / Var) π_j (d_j − μ), and for an upstream gradient g on log π

    VJP_j = t [ g_j − π_j Σg − π_j (d_j − μ) Σ_i g_i (d_i − μ) / Var ]                                 (7)

At t = 0 the projection is constant. An inactive token is passed through unchanged, and so is its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from troll.projection.geodesic import moments


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
