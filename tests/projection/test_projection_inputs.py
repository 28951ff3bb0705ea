"""The bad-input table: what is refused, with a sentence that helps, and what is survived."""

from __future__ import annotations

import math

import pytest
import torch
from projection_cases import exact_kl, pair

from troll.errors import InputError
from troll.policy import LOG_FLOOR, token_kl
from troll.projection import project

INF = math.inf


def log(*rows: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype).log()


def test_proposal_equal_to_old_is_the_identity() -> None:
    _, old = pair(1000, 64, 1.0, 8.0, seed=0, dtype=torch.float32)
    for bound in (0.0, 1e-12, 0.05):
        result = project(old.clone(), old, bound)
        assert torch.equal(result.log_probs, old)
        assert (result.kl_after <= 1e-12).all()


def test_tokens_excluded_on_both_sides_change_nothing() -> None:
    proposal, old = pair(50, 5, 2.0, 1.0, seed=1)
    nowhere = torch.full((50, 3), -INF, dtype=torch.float64)
    with_gaps = project(torch.cat([nowhere, proposal], -1), torch.cat([nowhere, old], -1), 0.05)
    without = project(proposal, old, 0.05)
    assert (with_gaps.log_probs[:, :3] == -INF).all()
    torch.testing.assert_close(with_gaps.log_probs[:, 3:], without.log_probs, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(with_gaps.mix, without.mix, rtol=1e-12, atol=0)


def test_a_row_that_excludes_everything_stays_empty() -> None:
    nothing = torch.full((2, 4), -INF)
    result = project(nothing, nothing, 0.05)
    assert (result.log_probs == -INF).all()
    assert not result.active.any()
    assert (result.kl_before == 0).all()
    assert (result.kl_after == 0).all()


def test_mass_on_tokens_the_old_policy_excludes_is_left_out_and_reported() -> None:
    old, proposal = log([0.5, 0.5, 0.0]), log([0.70, 0.22, 0.08])
    result = project(proposal, old, INF)
    torch.testing.assert_close(result.lost_mass, torch.tensor([0.08]))
    expected = torch.tensor([[0.70 / 0.92, 0.22 / 0.92, 0.0]])
    torch.testing.assert_close(result.proposal.exp(), expected)
    torch.testing.assert_close(result.log_probs.exp(), expected)
    bounded = project(proposal, old, 0.05)
    assert bounded.active.item()
    assert exact_kl(bounded.log_probs[:, :2], old[:, :2]).item() <= 0.05
    assert bounded.log_probs[0, 2] == -INF


def test_rows_without_lost_mass_are_untouched_by_rows_with_it() -> None:
    old, proposal = log([0.5, 0.5, 0.0], [0.3, 0.3, 0.4]), log([0.5, 0.45, 0.05], [0.29, 0.31, 0.4])
    result = project(proposal, old, 0.05)
    assert torch.equal(result.proposal[1], proposal[1])
    assert torch.equal(result.log_probs[1], proposal[1])
    assert result.lost_mass[1] == 0


def test_too_much_lost_mass_is_refused() -> None:
    old, proposal = log([0.5, 0.5, 0.0]), log([0.4, 0.4, 0.2])
    with pytest.raises(
        InputError, match=r"proposal has on average 0.2 of its probability.*max_lost_mass=0.1.*Score .*truncation"
    ):
        project(proposal, old, 0.05)
    assert project(proposal, old, 0.05, max_lost_mass=0.3).lost_mass.item() == pytest.approx(0.2)


def test_disjoint_supports_return_the_old_policy() -> None:
    old, proposal = log([0.5, 0.5, 0.0, 0.0]), log([0.0, 0.0, 0.5, 0.5]).requires_grad_()
    result = project(proposal, old, 0.05, max_lost_mass=1.0)
    assert torch.equal(result.log_probs, old)
    assert result.active.item()
    assert result.mix.item() == 0
    assert result.eta.item() == INF
    assert result.kl_before.item() == INF
    assert result.kl_after.item() == 0
    assert result.lost_mass.item() == pytest.approx(1.0)
    (grad,) = torch.autograd.grad(result.log_probs[0, :2].sum(), proposal)
    assert (grad == 0).all()


@pytest.mark.parametrize("bound", [1e-6, 0.05, 0.5])
def test_one_hot_on_either_side(bound: float) -> None:
    one_hot, spread = log([1.0, 0.0, 0.0]), log([0.2, 0.5, 0.3])
    towards = project(one_hot, spread, bound)  # the proposal has collapsed
    assert towards.log_probs.isfinite().all()
    assert towards.active.item()
    assert exact_kl(towards.log_probs, spread).item() <= bound * (1 + 1e-9)
    assert towards.log_probs[0, 0] > spread[0, 0]
    away = project(spread, one_hot, bound, max_lost_mass=1.0)  # the old policy was one-hot
    assert torch.equal(away.log_probs, one_hot)
    assert away.lost_mass.item() == pytest.approx(0.8)


def test_a_token_only_the_proposal_excludes_counts_as_one_it_dropped() -> None:
    """−inf and log 1e-12 give the same projection, up to 1e-12."""
    old = log([0.4, 0.4, 0.2], dtype=torch.float64)
    excluded = log([0.1, 0.9, 0.0], dtype=torch.float64)
    floored = torch.where(excluded == -INF, LOG_FLOOR, excluded)
    torch.testing.assert_close(
        project(excluded, old, 0.05).log_probs, project(floored, old, 0.05).log_probs, rtol=1e-10, atol=1e-11
    )


def test_a_collapse_inside_the_region_stays_exact() -> None:
    old, one_hot = log([0.99, 0.01]), log([1.0, 0.0])
    result = project(one_hot, old, 0.05)
    assert torch.equal(result.log_probs, one_hot)
    assert result.kl_before.item() == pytest.approx(-math.log(0.99), rel=1e-5)


def test_a_bound_of_zero_returns_the_old_policy_without_gradient() -> None:
    proposal, old = pair(100, 8, 1.0, 1.0, seed=3, dtype=torch.float32)
    result = project(proposal.requires_grad_(), old, 0.0)
    assert torch.equal(result.log_probs, old)
    assert (result.mix == 0).all()
    (grad,) = torch.autograd.grad(result.log_probs.square().sum(), proposal)
    assert (grad == 0).all()


@pytest.mark.parametrize("bound", [1e-30, 1e-16, 1e-12, 1e-9])
def test_tiny_bounds_hold(bound: float) -> None:
    """Where fp32 has no policy between the old one and the boundary, the old one is returned."""
    proposal, old = pair(300, 16, 3.0, 2.0, seed=4, dtype=torch.float32)
    result = project(proposal, old, bound)
    assert result.log_probs.isfinite().all()
    stayed = (result.log_probs == old).all(-1)
    assert (stayed | (exact_kl(result.log_probs, old) <= bound * (1 + 1e-6) + 2e-16)).all()
    assert stayed.all() == (bound <= 1e-16)


def test_huge_bounds_are_the_identity() -> None:
    proposal, old = pair(300, 16, 50.0, 8.0, seed=4, dtype=torch.float32)
    for bound in (1e6, INF):
        assert torch.equal(project(proposal, old, bound).log_probs, proposal)


@pytest.mark.parametrize("gap", [80.0, 1e4, 131008.0])  # the last one: the extremes of fp16
@pytest.mark.parametrize("bound", [1e-6, 0.05, 1.0])
def test_logit_gaps(gap: float, bound: float) -> None:
    logits = torch.tensor([[gap, 0.0, 1.0, -1.0], [0.0, gap, 1.0, -1.0], [0.0, 0.5, 1.0, -1.0], [0.0, 0.0, gap, gap]])
    rows = [(i, j) for i in range(4) for j in range(4)]
    proposal, old = (logits[[pick[k] for pick in rows]].log_softmax(-1) for k in (0, 1))
    result = project(proposal.requires_grad_(), old, bound)
    assert result.log_probs.isfinite().all()
    assert (exact_kl(result.log_probs, old) <= bound * (1 + 1e-9)).all()
    assert result.converged.all()
    (grad,) = torch.autograd.grad(result.log_probs[:, 0].sum(), proposal)
    assert grad.isfinite().all()


def test_numbers_of_a_position_without_room() -> None:
    result = project(log([0.9, 0.1]), log([0.5, 0.5]), 1e-20)
    assert result.active.item()
    assert result.mix.item() == 0
    assert result.kl_after.item() == 0
    assert result.kl_before.item() == pytest.approx(token_kl(log([0.9, 0.1]), log([0.5, 0.5])).item())


@pytest.mark.parametrize("bound", [-1e-9, -1.0, math.nan, -INF])
def test_bad_bounds(bound: float) -> None:
    proposal, old = pair(3, 4, 1.0, 1.0, seed=0)
    with pytest.raises(InputError, match=r"kl_bound must be a number ≥ 0, got .*The default is 0.2"):
        project(proposal, old, bound)
    with pytest.raises(InputError, match=r"kl_bound must be a number ≥ 0, got .*The default is 0.2"):
        project(proposal, old, torch.tensor([0.1, bound, 0.1]))


def test_bound_of_the_wrong_shape() -> None:
    proposal, old = pair(3, 4, 1.0, 1.0, seed=0)
    with pytest.raises(InputError, match=r"kl_bound must be one number or one per position, shape \[3\], got \[2\]"):
        project(proposal, old, torch.ones(2))
    square = [x.expand(4, 3, 4) for x in (proposal, old)]
    for shape in ([3], [4, 1], [1]):  # what would broadcast could be meant for either dimension
        with pytest.raises(InputError, match=r"one number or one per position"):
            project(*square, torch.ones(shape))


@pytest.mark.parametrize("value", [math.nan, INF])
@pytest.mark.parametrize("side", ["proposal", "old"])
def test_nan_and_inf_name_the_token(value: float, side: str) -> None:
    proposal, old = (x.view(2, 3, 4).clone() for x in pair(6, 4, 1.0, 1.0, seed=0))
    {"proposal": proposal, "old": old}[side][1, 2, 3] = value
    with pytest.raises(InputError, match=rf"{side} must be finite, .*got {value} at position \[1, 2\], token 3\."):
        project(proposal, old, 0.05)


def test_logits_in_place_of_log_probabilities() -> None:
    proposal, old = pair(3, 4, 1.0, 1.0, seed=0)
    with pytest.raises(
        InputError,
        match=r"proposal must be log-probabilities that sum to 1, got a sum of 7.389.*position \[0\].*log_softmax",
    ):
        project(proposal + 2.0, old, 0.05)
    with pytest.raises(InputError, match=r"old must be log-probabilities that sum to 1"):
        project(proposal, old - 0.5, 0.05)


def test_forms_that_are_refused() -> None:
    proposal, old = pair(3, 4, 1.0, 1.0, seed=0)
    with pytest.raises(InputError, match=r"the same shape .* got \[3, 4\] and \[3, 3\]"):
        project(proposal, old[:, :3], 0.05)
    with pytest.raises(InputError, match=r"K ≥ 1"):
        project(proposal[:, :0], old[:, :0], 0.05)
    with pytest.raises(InputError, match=r"cannot resolve a KL below 2e-5.*torch.bfloat16.*Use logits.float"):
        project(proposal.bfloat16(), old.bfloat16(), 0.05)
    with pytest.raises(InputError, match=r"torch.float32 and torch.float64"):
        project(proposal.float(), old, 0.05)
    with pytest.raises(
        InputError, match=r"old must be a constant, got log-probabilities that require gradient.*under torch.no_grad"
    ):
        project(proposal, old.clone().requires_grad_(), 0.05)
    with pytest.raises(InputError, match=r"solver must be 'newton' or 'bracketing', got 'bisection'"):
        project(proposal, old, 0.05, solver="bisection")  # type: ignore[arg-type]


def test_no_positions_at_all() -> None:
    nothing = torch.zeros(0, 4, requires_grad=True)
    result = project(nothing, torch.zeros(0, 4), 0.05)
    assert result.log_probs.numel() == 0
    result.log_probs.sum().backward()
    assert nothing.grad is not None


@pytest.mark.parametrize("bound", [1e-6, 0.05])
def test_a_solver_that_gives_up_stays_inside_and_says_so(monkeypatch: pytest.MonkeyPatch, bound: float) -> None:
    monkeypatch.setattr("troll.projection.solvers._NEWTON_STEPS", 1)
    monkeypatch.setattr("troll.projection.solvers._CUTS", 0)
    monkeypatch.setattr("troll.projection.solvers._MAX_STEPS", 1)
    proposal, old = pair(500, 16, 5.0, 4.0, seed=6, dtype=torch.float32)
    result = project(proposal, old, bound)
    gave_up = ~result.converged
    assert gave_up.sum() > 50
    assert (exact_kl(result.log_probs, old) <= bound * (1 + 1e-9)).all()
    assert (result.kl_after[gave_up] < bound).all()
    assert (result.iterations[gave_up] == 2).all()
