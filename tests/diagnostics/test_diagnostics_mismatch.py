"""Sampler against trainer, by hand and in expectation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troll import InputError
from troll.diagnostics import sampler_mismatch

LN2, L = math.log(2), math.log(1.5)


def test_by_hand():
    """Weights 1, 4, 1/4 | 3/2 with two tokens masked: of the sequences 1 and 3/2."""
    sampler = torch.tensor([[-1.0, -3.0, -1.0], [-2.0, math.nan, -1.0]], dtype=torch.float64)
    delta = torch.tensor([[0.0, 2 * LN2, -2 * LN2], [L, 0.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    found = sampler_mismatch(sampler, sampler + delta, mask)
    assert found.tokens == 4
    assert found.mean_difference == pytest.approx((4 * LN2 + L) / 4)
    assert found.max_difference == pytest.approx(2 * LN2)
    assert found.k1 == pytest.approx(-L / 4)
    assert found.k2 == pytest.approx((8 * LN2**2 + L**2) / 8)
    assert found.k3 == pytest.approx((0 + 3 - 0.75 + 0.5 - L) / 4)
    assert found.effective_tokens == pytest.approx(6.75**2 / (1 + 16 + 1 / 16 + 2.25) / 4)
    assert found.effective_sequences == pytest.approx(2.5**2 / 3.25 / 2)
    assert found.outside == pytest.approx(2 / 4)


def test_up_to_two_is_inside_and_more_is_outside():
    sampler = torch.full((1, 2), -5.0).double()
    for factor, share in ((1 - 1e-9, 0.0), (1 + 1e-9, 1.0)):
        step = torch.tensor([[LN2, -LN2]], dtype=torch.float64) * factor
        assert sampler_mismatch(sampler, sampler + step, torch.ones(1, 2)).outside == share


def test_k1_and_k3_are_unbiased_for_the_kl_from_sampler_to_trainer():
    """Every token as often as the sampler draws it: probabilities of 1/8, 2/8, 5/8 as 1, 2 and 5 copies."""
    sampler = torch.tensor([1, 2, 5]).double() / 8
    trainer = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    kl = float((sampler * (sampler / trainer).log()).sum())
    drawn = torch.tensor([[0, 1, 1, 2, 2, 2, 2, 2]])
    found = sampler_mismatch(sampler.log()[drawn], trainer.log()[drawn], torch.ones(1, 8))
    assert found.k1 == pytest.approx(kl, rel=1e-12)
    assert found.k3 == pytest.approx(kl, rel=1e-12)
    assert found.k2 != pytest.approx(kl, rel=0.01)


def test_small_differences_keep_their_digits():
    """At δ = 1e-6, k3 = δ²/2 (1 + δ/3 …) = 5e-13, which fp32 would lose: w − 1 − δ of numbers near 1."""
    sampler = torch.full((1, 1), -1.0).double()
    found = sampler_mismatch(sampler, sampler + 1e-6, torch.ones(1, 1))
    assert found.k3 == pytest.approx(5e-13, rel=1e-3)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6), st.sampled_from([0.0, 1e-3, 0.5, 100.0]))
def test_what_always_holds(seed, B, T, distance):
    g = torch.Generator().manual_seed(seed)
    sampler = -100 - 500 * torch.rand(B, T, generator=g, dtype=torch.float64)
    trainer = (sampler + distance * torch.randn(B, T, generator=g, dtype=torch.float64)).clamp(max=0)
    mask = torch.rand(B, T, generator=g) < 0.7
    mask[0, 0] = True
    found = sampler_mismatch(sampler, trainer, mask)
    sequences = int(mask.any(-1).sum())
    assert 1 / found.tokens - 1e-9 <= found.effective_tokens <= 1 + 1e-9
    assert 1 / sequences - 1e-9 <= found.effective_sequences <= 1 + 1e-9
    assert found.k3 >= 0
    assert found.mean_difference <= found.max_difference * (1 + 1e-12)
    assert abs(found.k1) <= found.mean_difference * (1 + 1e-12)
    if distance == 0:
        assert (found.k1, found.k2, found.k3, found.outside, found.max_difference) == (0, 0, 0, 0, 0)
        assert (found.effective_tokens, found.effective_sequences) == (pytest.approx(1), pytest.approx(1))


@pytest.mark.parametrize(
    ("sampler", "trainer", "mask", "said"),
    [
        ((2, 3), (2, 2), (2, 3), r"trainer must have .*shape \[2, 3\] as loss_mask, got \[2, 2\]"),
        ((2,), (2, 3), (2, 3), r"sampler must have .*got \[2\]"),
        ((2, 3), (2, 3), (6,), r"loss_mask must have shape \[B, T\].*got \[6\]"),
    ],
)
def test_shapes_are_refused(sampler, trainer, mask, said):
    with pytest.raises(InputError, match=said):
        sampler_mismatch(-torch.ones(sampler), -torch.ones(trainer), torch.ones(mask))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, "NaN at position"),
        (-math.inf, "sampler must be finite .*got -inf"),
        (3.2, "sampler must be finite .*got 3.2 at position"),
    ],
)
def test_what_is_no_log_probability_is_refused(value, said):
    sampler = -torch.ones(2, 3)
    sampler[1, 2] = value
    with pytest.raises(InputError, match=said):
        sampler_mismatch(sampler, -torch.ones(2, 3), torch.ones(2, 3))
    mask = torch.ones(2, 3)
    mask[1, 2] = 0
    assert sampler_mismatch(sampler, -torch.ones(2, 3), mask).max_difference == 0


def test_an_empty_batch_is_refused():
    with pytest.raises(InputError, match="loss_mask counts no token"):
        sampler_mismatch(-torch.ones(1, 2), -torch.ones(1, 2), torch.zeros(1, 2))
