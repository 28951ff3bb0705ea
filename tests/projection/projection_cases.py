"""Shared inputs and independent references for the tests of the projection."""

from __future__ import annotations

import mpmath as mp
import torch
from torch import Tensor

DIGITS = 50


def pair(
    rows: int, support: int, noise: float, scale: float, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Random (proposal, old): old logits of spread ``scale``, log-ratios of spread ``noise``."""
    g = torch.Generator().manual_seed(seed)
    old = torch.log_softmax(scale * torch.randn(rows, support, generator=g, dtype=torch.float64), -1)
    proposal = torch.log_softmax(old + noise * torch.randn(rows, support, generator=g, dtype=torch.float64), -1)
    return proposal.to(dtype).log_softmax(-1), old.to(dtype).log_softmax(-1)


def mp_kl(log_p: list[mp.mpf], log_q: list[mp.mpf]) -> mp.mpf:
    """KL(p ‖ q) by definition."""
    return mp.fsum(mp.e**a * (a - b) for a, b in zip(log_p, log_q, strict=True))


def mp_normalised(x: list[float | mp.mpf]) -> list[mp.mpf]:
    """log-softmax."""
    x = [mp.mpf(v) for v in x]
    shift = mp.log(mp.fsum(mp.e**v for v in x))
    return [v - shift for v in x]


def mp_project(proposal: list[float], old: list[float], kl_bound: float) -> tuple[list[mp.mpf], mp.mpf]:
    """log π and t by bisection of equation (2) in t = 1/(1+η), with 50 digits and nothing in common with the code."""
    with mp.workdps(DIGITS):
        p, q, bound = mp_normalised(proposal), mp_normalised(old), mp.mpf(kl_bound)

        def at(t: mp.mpf) -> list[mp.mpf]:
            return mp_normalised([(1 - t) * b + t * a for a, b in zip(p, q, strict=True)])

        if mp_kl(p, q) <= bound:
            return p, mp.mpf(1)
        low, high = mp.mpf(0), mp.mpf(1)
        for _ in range(150):  # 2⁻¹⁵⁰ ≈ 1e-45
            mid = (low + high) / 2
            low, high = (mid, high) if mp_kl(at(mid), q) <= bound else (low, mid)
        return at(low), low


def exact_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) in fp64 of the numbers as stored, both renormalised, by definition with a compensated sum.

    Σ p d with d = log p − log q taken after renormalisation; the terms q − p are added so that what rounding leaves of
    the normalisation cancels.
    """
    p, q = log_p.double().log_softmax(-1), log_q.double().log_softmax(-1)
    d = torch.where(p == q, 0.0, p - q)
    return torch.where(p.exp() > 0, p.exp() * d, 0.0).sum(-1) + (q.exp() - p.exp()).sum(-1)
