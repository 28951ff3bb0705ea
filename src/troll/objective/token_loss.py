"""The loss of a token, the negative of equation (8) before aggregation: the one place where it is composed.

    −w_t r_t A_t + α KL(π̃ ‖ ⌊π⌋)

r_t is the ratio of the sampled token (``ratios``), w_t an importance weight, A_t the advantage, and the last term the
regression. ``troll_loss``, ``fused_troll_loss``, ``unconstrained_loss`` and the loss in verl call ``token_loss``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from troll.errors import require_choice

ImportanceSamplingLevel = Literal["token", "sequence"]
MAX_LOG_RATIO = {"token": 20.0, "sequence": 10.0}  # far outside any trust region; keeps exp and its gradient finite


class TokenLoss(NamedTuple):
    """The loss of every token before aggregation, and the ratio in it."""

    losses: Tensor
    """[B, T]."""
    ratio: Tensor
    """[B, T] as it multiplies the advantage."""


def token_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    counted: Tensor | None = None,
    *,
    regression: Tensor | None = None,
    regression_coef: float = 1.0,
    importance_weights: Tensor | None = None,
    importance_sampling_level: ImportanceSamplingLevel = "token",
) -> TokenLoss:
    """Compose ratio, importance weight, advantage and regression; everything is [B, T], or [N] at the level of tokens.

    Args:
        log_ratio: log π(o)/π_old(o) of the sampled tokens, π the projected policy; differentiable.
        advantages: A, constant.
        counted: which tokens count; None if all do. The ratio of the others is 1.
        regression: KL(π̃ ‖ ⌊π⌋), differentiable; None without a trust region.
        regression_coef: α.
        importance_weights: w, constant. They multiply the ratio term only: the regression is an expectation over the
            whole distribution and needs no correction for the sampler.
        importance_sampling_level: see ``ratios``.
    """
    ratio = ratios(log_ratio, counted, importance_sampling_level)
    weighted = ratio if importance_weights is None else ratio * importance_weights
    if regression is None:
        return TokenLoss(-(weighted * advantages), ratio)
    return TokenLoss(regression_coef * regression - weighted * advantages, ratio)


def ratios(log_ratio: Tensor, counted: Tensor | None = None, level: ImportanceSamplingLevel = "token") -> Tensor:
    """Importance ratios per token, [B, T] → [B, T].

    ``"token"``     r_t = exp(log r_t).
    ``"sequence"``  s = exp(mean_t log r_t), the length-normalised sequence ratio of GSPO, for every token; the gradient
                    of each is that of its own log-ratio scaled by s.
    """
    require_choice("importance_sampling_level", level, get_args(ImportanceSamplingLevel))
    if counted is not None:
        log_ratio = torch.where(counted, log_ratio, 0.0)
    if level == "sequence":
        length = log_ratio.shape[-1] if counted is None else counted.sum(-1, keepdim=True).clamp(min=1)
        value = log_ratio.detach().sum(-1, keepdim=True) / length
        log_ratio = value + (log_ratio - log_ratio.detach())  # + 0, exactly
    return log_ratio.clamp(max=MAX_LOG_RATIO[level]).exp()
