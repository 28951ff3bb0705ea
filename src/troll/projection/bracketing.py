"""The second solver: n-ary bracketing of the dual variable η, as the authors of TROLL do it. Oracle and comparison.

It shares nothing with the Newton solver but the definition of the KL: the candidate is written as in (2), and η is
found by evaluating a fixed number of candidates a step and keeping the interval that holds the root.

The authors take 8 candidates, at most 20 steps, η in [1e-7, 100] and a tolerance of 1e-5. An η of 100 is too
small for a small ε; here the ends are moved until the root lies between them, and the steps go on to the last digit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from troll.policy import token_kl
from troll.projection.newton import Solution

CANDIDATES = 8
BRACKET = (1e-7, 100.0)
MAX_STEPS = 40
_TOLERANCE = 1e-14  # of log η
_WIDEN = math.log(100.0)


def solve_bracketing(log_old: Tensor, d: Tensor, kl_bound: Tensor) -> Solution:
    """t = 1/(1+η) with KL = ``kl_bound`` [N], for rows [N, K] whose KL at η = 0 exceeds it."""
    log_proposal = log_old + d
    low, high = (torch.full_like(kl_bound, end).log() for end in BRACKET)
    while bool((outside := _kl(log_old, log_proposal, high) > kl_bound).any()):
        low, high = torch.where(outside, high, low), torch.where(outside, high + _WIDEN, high)
    while bool((inside := _kl(log_old, log_proposal, low) <= kl_bound).any()):
        low, high = torch.where(inside, low - _WIDEN, low), torch.where(inside, low, high)
    iterations = torch.zeros_like(kl_bound, dtype=torch.int64)
    for _ in range(MAX_STEPS):
        open_ = high - low > _TOLERANCE * torch.maximum(high.abs(), torch.ones_like(high))
        if not bool(open_.any()):
            break
        iterations += open_
        width = high - low
        # The KL falls with η: count the candidates that are still outside the trust region.
        count = torch.zeros_like(iterations)
        for i in range(1, CANDIDATES + 1):
            count += _kl(log_old, log_proposal, low + i * width / (CANDIDATES + 1)) > kl_bound
        low, high = low + count * width / (CANDIDATES + 1), low + (count + 1) * width / (CANDIDATES + 1)
    return Solution(
        1 / (1 + high.exp()), iterations, high - low <= 1e-12 * torch.maximum(high.abs(), torch.ones_like(high))
    )


def _kl(log_old: Tensor, log_proposal: Tensor, log_eta: Tensor) -> Tensor:
    """KL(π ‖ π_old) for π ∝ exp((η log π_old + log π̃)/(η + 1))."""
    eta = log_eta.exp()[:, None]
    return token_kl(((eta * log_old + log_proposal) / (eta + 1)).log_softmax(-1), log_old)
