"""Advantages from rewards per token, with or without a critic.

A completion of several turns contains tokens the policy did not write, such as tool outputs; ``loss_mask`` has holes
there. Time is the sequence of *counted* tokens: t+1 below is the next counted token, however many masked ones lie
between. A masked token receives nothing, passes everything on undiscounted, and its reward and value are not read: a
reward for a tool's result belongs on a counted token.

``whiten`` brings all counted entries of a batch to mean 0 and variance 1. Its statistics are taken over the counted
entries alone, gathered in order: padding does not change a bit of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from troll.advantages.inputs import as_mask, as_token_floats, require_between, require_eps, require_finite
from troll.errors import InputError

__all__ = ["gae", "reinforce_pp", "whiten"]


def reinforce_pp(token_rewards: Tensor, loss_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return R_t = r_t + γ·R_{t+1} whitened over all counted tokens of the batch, REINFORCE++ (arXiv 2501.03262).

    The outcome's reward goes on the last counted token; the paper's penalty −β·KL, if wanted, is part of r_t. verl sets
    R to 0 at every masked token, so that a tool call there hides the reward from the turns before it; not so here.

    Args:
        token_rewards: [B, T] rewards, finite where they count.
        loss_mask: [B, T] 1 where a token counts; at least two must.
        gamma: discount γ in [0, 1] from one counted token to the next.

    Returns:
        [B, T] a detached constant in float32 (float64 if ``token_rewards`` is), 0 outside the mask.
    """
    require_between("gamma", gamma, 0.0, 1.0)
    mask = as_mask(loss_mask)
    r = as_token_floats("token_rewards", token_rewards, mask)
    return whiten(require_finite("discounted sum", _discounted_sum(r, mask, gamma)), mask)


def gae(
    token_rewards: Tensor, values: Tensor, loss_mask: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) by generalised advantage estimation (arXiv 1506.02438).

        δ_t = r_t + γ·V_{t+1} − V_t
        A_t = δ_t + γλ·A_{t+1}
        returns_t = A_t + V_t, the critic's target

    After the last counted token V and A are 0: the completion has ended, also when it was cut at a length limit.
    Nothing is whitened: ``whiten(advantages, loss_mask)`` does that, and the returns must stay as they are.

    Args:
        token_rewards: [B, T] rewards, finite where they count.
        values: [B, T] the critic's V, finite where they count.
        loss_mask: [B, T] 1 where a token counts.
        gamma: discount γ in [0, 1] from one counted token to the next.
        lam: λ in [0, 1]; 0 trusts the critic (one-step TD error), 1 the rewards (return-to-go − V).

    Returns:
        Two [B, T] detached constants in float32 (float64 if ``token_rewards`` or ``values`` is), 0 outside the mask.
    """
    require_between("gamma", gamma, 0.0, 1.0)
    require_between("lam", lam, 0.0, 1.0)
    mask = as_mask(loss_mask)
    r = as_token_floats("token_rewards", token_rewards, mask)
    v = as_token_floats("values", values, mask)
    delta = r + gamma * _next_counted(v, mask) - v
    advantages = _discounted_sum(delta, mask, gamma * lam)
    return advantages, require_finite("discounted sum", advantages + v)


def _discounted_sum(x: Tensor, mask: Tensor, decay: float) -> Tensor:
    """Return y_t = x_t + decay·y_{t+1} over the counted tokens, 0 elsewhere, [B, T]."""
    y = torch.zeros_like(x)
    running = x.new_zeros(x.shape[0])  # [B]
    for t in reversed(range(x.shape[1])):
        running = torch.where(mask[:, t], x[:, t] + decay * running, running)
        y[:, t] = running
    return y.masked_fill_(~mask, 0.0)


def _next_counted(v: Tensor, mask: Tensor) -> Tensor:
    """Return V_{t+1}: v at the nearest counted token to the right of t, 0 if there is none, [B, T]."""
    B, T = v.shape
    position = torch.arange(T, device=v.device).expand(B, T).masked_fill(~mask, T)
    nearest = position.flip(1).cummin(1).values.flip(1)  # [B, T] nearest counted position ≥ t, T if none
    end = torch.full((B, 1), T, device=v.device)
    following = torch.cat([nearest[:, 1:], end], dim=1)  # [B, T] nearest counted position > t
    return torch.cat([v, v.new_zeros(B, 1)], dim=1).gather(1, following)


def whiten(values: Tensor, loss_mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Return (x − μ) / √(σ² + eps), with μ and the unbiased σ² over the n counted entries of the batch.

        μ = 1/n Σ x,   σ² = 1/(n−1) Σ (x − μ)²

    Equal entries give exactly 0. In distributed training each process whitens what it is given: gather first for
    statistics of the global batch.

    Args:
        values: [B, T] anything to whiten; what lies under the mask is not read and may be NaN.
        loss_mask: [B, T] 1 where a token counts; at least two must.
        eps: keeps equal entries from a division by 0.

    Returns:
        [B, T] a detached constant in float32 (float64 if ``values`` is), 0 outside the mask.
    """
    require_eps(eps, 1e-8)
    mask = as_mask(loss_mask)
    x = as_token_floats("values", values, mask)
    counted = x[mask]  # [n]
    n = counted.numel()
    if n < 2:
        raise InputError(f"whitening needs at least 2 counted tokens, and loss_mask counts {n}", "Use a larger batch")
    above = counted - counted.min()  # the deviations are the same, and equal entries are exactly 0
    deviation = above - above.sum() / n
    variance = require_finite("variance", deviation.square().sum() / (n - 1))
    return torch.zeros_like(x).masked_scatter_(mask, deviation / (variance + eps).sqrt())
