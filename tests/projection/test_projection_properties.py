"""What must hold for every input (hypothesis), in fp32 where users are and in fp64."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from projection_cases import exact_kl, pair
from torch import Tensor

from troll.policy import token_kl
from troll.projection import Projection, project

relaxed = settings(derandomize=True, deadline=None, max_examples=60)
bounds = st.sampled_from([1e-8, 1e-5, 1e-3, 0.01, 0.05, 0.25, 2.0])


@st.composite
def pairs(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Rows of logits, shrinkable: small gaps, gaps of 80, ties."""
    support, rows = draw(st.integers(2, 9)), draw(st.integers(1, 4))
    spread = draw(st.sampled_from([0.1, 2.0, 20.0, 80.0]))
    logits = st.lists(
        st.floats(-1, 1, width=32).map(lambda x: x * spread), min_size=rows * support, max_size=rows * support
    )
    first, second = (torch.tensor(draw(logits), dtype=dtype).view(rows, support).log_softmax(-1) for _ in range(2))
    return first, second


@relaxed
@given(pairs(), bounds)
def test_normalised_and_feasible(rows: tuple[Tensor, Tensor], bound: float) -> None:
    """The stored fp32 policy sums to 1 within its rounding (K numbers of relative error 6e-8 |log π|) and never leaves
    the region, except by what fp64 leaves of this test's own KL: 1e-15 absolute."""
    proposal, old = rows
    result = project(proposal, old, bound)
    assert (result.log_probs.double().logsumexp(-1).abs() <= 5e-6).all()
    assert (exact_kl(result.log_probs, old) <= bound * (1 + 1e-9) + 1e-15).all()
    assert result.converged.all()


@relaxed
@given(pairs(), bounds)
def test_identity_bit_for_bit_where_inactive(rows: tuple[Tensor, Tensor], bound: float) -> None:
    proposal, old = rows
    result = project(proposal, old, bound)
    inactive = ~result.active
    assert torch.equal(result.log_probs[inactive], proposal[inactive])
    assert (result.mix[inactive] == 1).all()
    assert (result.eta[inactive] == 0).all()
    assert (result.iterations[inactive] == 0).all()
    assert torch.equal(result.kl_after[inactive], result.kl_before[inactive])
    # Which tokens are active is decided by the true KL; rows within rounding of the bound may go either way.
    kl = exact_kl(proposal, old)
    clear = (kl / bound - 1).abs() > 1e-6
    assert torch.equal(result.active[clear], (kl > bound)[clear])


@relaxed
@given(pairs(), bounds)
def test_idempotent_bit_for_bit(rows: tuple[Tensor, Tensor], bound: float) -> None:
    proposal, old = rows
    once = project(proposal, old, bound).log_probs
    again = project(once, old, bound)
    # What is projected is inside, so the second time nothing is active. fp64 noise in its KL is 1e-15.
    strictly = exact_kl(once, old) <= bound - 1e-15
    assert torch.equal(again.log_probs[strictly], once[strictly])
    assert strictly.all() or bound <= 1e-8


@relaxed
@given(pairs(torch.float64), bounds, st.randoms(use_true_random=False))
def test_permutation_of_the_support(rows: tuple[Tensor, Tensor], bound: float, random: object) -> None:
    """Sums in another order: 1e-13 relative in t, times the largest |d|, 160."""
    proposal, old = rows
    order = list(range(proposal.shape[-1]))
    random.shuffle(order)  # type: ignore[attr-defined]
    straight, shuffled = project(proposal, old, bound), project(proposal[:, order], old[:, order], bound)
    tolerance = 1e-13 * (1 + bound**-0.5)
    torch.testing.assert_close(shuffled.mix, straight.mix, rtol=tolerance, atol=0)
    torch.testing.assert_close(shuffled.log_probs, straight.log_probs[:, order], rtol=tolerance, atol=160 * tolerance)


@relaxed
@given(pairs(torch.float64), bounds, st.floats(-9e-4, 9e-4), st.floats(-9e-4, 9e-4))
def test_shift_of_either_side(rows: tuple[Tensor, Tensor], bound: float, a: float, b: float) -> None:
    """Normalisation errors of the input, up to the limit that is accepted, do not reach the projected policy."""
    proposal, old = rows
    straight, shifted = project(proposal, old, bound), project(proposal + a, old + b, bound)
    tolerance = 1e-13 * (1 + bound**-0.5)
    torch.testing.assert_close(shifted.mix, straight.mix, rtol=tolerance, atol=0)
    active = straight.active
    torch.testing.assert_close(
        shifted.log_probs[active], straight.log_probs[active], rtol=tolerance, atol=160 * tolerance
    )


@relaxed
@given(pairs(torch.float64))
def test_monotone_in_the_bound(rows: tuple[Tensor, Tensor]) -> None:
    proposal, old = rows
    results = [project(proposal, old, bound) for bound in (0.0, 1e-8, 1e-3, 0.05, 0.25, 2.0, float("inf"))]
    for tight, loose in itertools.pairwise(results):
        assert (tight.mix <= loose.mix).all()
        assert (tight.kl_after <= loose.kl_after * (1 + 1e-12)).all()
        assert (tight.eta >= loose.eta).all()


FIELDS = ("log_probs", "mix", "eta", "kl_before", "kl_after", "active", "converged", "iterations")


def same(a: Projection, b: Projection) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in FIELDS)


@relaxed
@given(pairs(), bounds)
def test_batch_is_row_by_row_and_runs_repeat(rows: tuple[Tensor, Tensor], bound: float) -> None:
    proposal, old = rows
    whole = project(proposal, old, bound)
    assert same(whole, project(proposal, old, bound))
    for i in range(len(proposal)):
        part = project(proposal[i], old[i], bound)
        assert all(torch.equal(getattr(whole, name)[i], getattr(part, name)) for name in FIELDS)


def test_large_batches_are_bitwise_the_same_in_chunks_and_in_any_shape() -> None:
    """Rows of a realistic batch, hard and easy ones mixed, in chunks of odd sizes and as [B, T, K]."""
    parts = [pair(500, 64, noise, scale, seed=1, dtype=torch.float32) for noise in (0.1, 5.0) for scale in (2.0, 8.0)]
    proposal, old = (torch.cat(x) for x in zip(*parts, strict=True))
    whole = project(proposal, old, 0.05)
    for name in FIELDS:
        chunks = [getattr(project(p, q, 0.05), name) for p, q in zip(proposal.split(77), old.split(77), strict=True)]
        assert torch.equal(torch.cat(chunks), getattr(whole, name)), name
        shaped = getattr(project(proposal.view(40, 50, 64), old.view(40, 50, 64), 0.05), name)
        assert torch.equal(shaped.flatten(0, 1), getattr(whole, name)), name


def test_a_bound_per_position() -> None:
    proposal, old = pair(7, 5, 2.0, 1.0, seed=0)
    bound = torch.tensor([0.0, 1e-6, 1e-3, 0.05, 0.3, 5.0, torch.inf])
    together = project(proposal, old, bound)
    for i, b in enumerate(bound.tolist()):
        alone = project(proposal[i], old[i], float(torch.tensor(b)))
        assert torch.equal(together.log_probs[i], alone.log_probs)
    assert (token_kl(together.log_probs, old) <= bound.double() * (1 + 1e-12)).all()
