"""fp32 on a million random tokens across the scales of the method's notes."""

from __future__ import annotations

import itertools

import pytest
import torch
from projection_cases import exact_kl, pair

from troll.projection import project

SCALES = list(itertools.product((0.1, 0.5, 1.0, 5.0, 20.0, 50.0), (0.5, 2.0, 8.0)))  # log-ratio noise, logit scale
TOKENS = {5: 30_000, 64: 26_000, 1000: 300}  # support: tokens for each of the 18 scales


def test_there_are_a_million() -> None:
    assert len(SCALES) * sum(TOKENS.values()) >= 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("support", TOKENS)
def test_bound_identity_and_steps(support: int) -> None:
    projected = 0
    for seed, (noise, scale) in enumerate(SCALES):
        proposal, old = pair(TOKENS[support], support, noise, scale, seed, dtype=torch.float32)
        bound = torch.tensor([0.05, 0.05, 0.01, 0.25, 1e-3], dtype=torch.float64).repeat(len(old) // 5 + 1)[: len(old)]
        result = project(proposal, old, bound)
        kl = exact_kl(result.log_probs, old)
        assert (kl <= bound * (1 + 1e-5)).all()
        assert (kl <= bound * (1 + 1e-9)).all()  # what the rounding of the stored policy was allowed for
        assert result.log_probs.isfinite().all()
        assert torch.equal(result.log_probs[~result.active], proposal[~result.active])
        assert (kl[result.active] >= bound[result.active] * (1 - 1e-4)).all()  # and nothing is given away
        assert result.converged.all()
        assert result.iterations.max() <= 12
        projected += int(result.active.sum())
    assert projected > 0.6 * len(SCALES) * TOKENS[support]
