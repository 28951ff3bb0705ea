"""Log-ratios of the sampled tokens → the ratios that multiply the advantages."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from troll.errors import require_choice

RatioLevel = Literal["token", "sequence"]
MAX_LOG_RATIO = {"token": 20.0, "sequence": 10.0}  # far outside any trust region; keeps exp and its gradient finite


def ratios(log_ratio: Tensor, counted: Tensor, level: RatioLevel = "token") -> Tensor:
    """Importance ratios per token, [B, T] → [B, T].

    ``"token"``     r_t = exp(log r_t).
    ``"sequence"``  s = exp(mean_t log r_t), the length-normalised sequence ratio of GSPO, for every token; the gradient
                    of each is that of its own log-ratio scaled by s.
    """
    require_choice("ratio_level", level, get_args(RatioLevel))
    log_ratio = torch.where(counted, log_ratio, 0.0)
    if level == "sequence":
        value = log_ratio.detach().sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = value + (log_ratio - log_ratio.detach())  # + 0, exactly
    return log_ratio.clamp(max=MAX_LOG_RATIO[level]).exp()
