"""Against a 50-digit reference, the definition of the problem, and between the two solvers."""

from __future__ import annotations

import mpmath as mp
import pytest
import torch
from projection_cases import DIGITS, exact_kl, mp_project, pair

from troll.policy import token_kl
from troll.projection import project
from troll.projection.geodesic import point
from troll.projection.solvers import solve_bracketing, solve_newton

HARD = [
    # support, log-ratio noise, logit scale, ε: from everyday to absurd
    (2, 1.0, 1.0, 0.05),
    (3, 0.5, 2.0, 0.05),
    (5, 5.0, 8.0, 0.05),
    (5, 20.0, 8.0, 0.05),
    (5, 50.0, 8.0, 0.05),
    (8, 50.0, 0.5, 0.05),
    (8, 2.0, 80.0, 0.05),
    (5, 1e4, 8.0, 0.05),
    (5, 1e4, 80.0, 1e-3),
    (6, 1.0, 2.0, 1e-8),
    (6, 1.0, 2.0, 1e-12),
    (6, 5.0, 2.0, 2.0),
    (12, 3.0, 3.0, 0.01),
    (5, 0.35, 1.0, 0.05),  # close to the kink: about half of the rows are active
]
ROWS = 24


@pytest.mark.parametrize(("support", "noise", "scale", "bound"), HARD)
def test_double_precision_agrees_with_fifty_digits(support: int, noise: float, scale: float, bound: float) -> None:
    """336 rows. log π is compared where π > 1e-300; its error is that of t, amplified by |d|.

    The KL of a double policy is known to about 1e-16 √(2/ε) relative (each log-probability is rounded once), so t is
    known to 1e-13 relative for ε ≥ 1e-3 and to 1e-9 for ε = 1e-12: budget 1e-15 (1 + 1/√ε), ten times that.
    """
    proposal, old = pair(ROWS, support, noise, scale, seed=support)
    result = project(proposal, old, bound)
    budget = 1e-14 * (1 + bound**-0.5)
    with mp.workdps(DIGITS):
        for row in range(ROWS):
            log_probs, t = mp_project(proposal[row].tolist(), old[row].tolist(), bound)
            assert bool(result.active[row]) == (t < 1)
            assert abs(mp.mpf(result.mix[row].item()) / t - 1) <= budget
            span = float((proposal - old)[row].abs().max()) * float(t)
            for ours, reference in zip(result.log_probs[row].tolist(), log_probs, strict=True):
                error = abs(mp.mpf(ours) - reference)
                assert error <= budget * (1 + span) + 1e-15 * abs(reference)


def test_the_hard_rows_are_hard() -> None:
    """At least 200 active rows, with t from above one half to below 2e-6."""
    mixes = [project(*pair(ROWS, k, noise, scale, seed=k), bound).mix for k, noise, scale, bound in HARD]
    t = torch.cat(mixes)
    assert (t < 1).sum() >= 200
    assert ((t > 0.5) & (t < 1)).any()
    assert t.min() < 2e-6


@pytest.mark.parametrize(("support", "noise", "scale", "bound"), HARD)
def test_both_solvers_find_the_same_mix(support: int, noise: float, scale: float, bound: float) -> None:
    """To 1e-10. For ε = 1e-12 the log-ratios themselves, 1e-6, are known to 1e-10 only, and t to a few times that."""
    proposal, old = pair(400, support, noise, scale, seed=100 + support)
    d, kl = proposal - old, token_kl(proposal, old)
    active = kl > bound
    rows = old[active], d[active], torch.full_like(kl[active], bound)
    newton, bracketing = solve_newton(*rows), solve_bracketing(*rows)
    assert active.any()
    assert newton.converged.all()
    assert bracketing.converged.all()
    difference = (newton.mix / bracketing.mix - 1).abs().max()
    assert difference <= (1e-10 if bound >= 1e-8 else 1e-9)


@pytest.mark.parametrize(("support", "noise", "scale", "bound"), HARD)
def test_newton_reaches_the_bound(support: int, noise: float, scale: float, bound: float) -> None:
    """1e-9 relative before the final step in ``ops``, which brings it to the rounding of a double."""
    proposal, old = pair(2000, support, noise, scale, seed=200 + support)
    d, kl = proposal - old, token_kl(proposal, old)
    active = kl > bound
    rows = old[active], d[active], torch.full_like(kl[active], bound)
    solution = solve_newton(*rows)
    reached = point(*rows[:2], solution.mix).kl
    assert (reached / bound - 1).abs().max() <= 1e-9
    assert ((solution.mix > 0) & (solution.mix <= 1)).all()
    after = project(proposal, old, bound).kl_after[active]
    assert (after / bound - 1).abs().max() <= 1e-14 * (1 + bound**-0.5)


def test_projection_of_a_two_token_policy_by_hand() -> None:
    """Old (½, ½), proposal (0.99, 0.01). The region's edge is the p with KL((p, 1−p) ‖ (½, ½)) = ε, whatever the
    proposal: for p = 0.6 that is 0.6 log 1.2 + 0.4 log 0.8."""
    bound = 0.6 * torch.tensor(1.2, dtype=torch.float64).log() + 0.4 * torch.tensor(0.8, dtype=torch.float64).log()
    old = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    proposal = torch.tensor([[0.99, 0.01]], dtype=torch.float64).log()
    result = project(proposal, old, bound.item())
    torch.testing.assert_close(
        result.log_probs.exp(), torch.tensor([[0.6, 0.4]], dtype=torch.float64), rtol=1e-13, atol=0
    )
    # t d must be the log-ratio gap of the result: log(0.6/0.4) = t log 99.
    t = torch.tensor(1.5, dtype=torch.float64).log() / torch.tensor(99.0, dtype=torch.float64).log()
    torch.testing.assert_close(result.mix[0], t, rtol=1e-13, atol=0)
    torch.testing.assert_close(result.eta[0], 1 / t - 1, rtol=1e-12, atol=0)
    torch.testing.assert_close(result.kl_after[0], bound, rtol=1e-13, atol=0)
    kl_before = (
        0.99 * torch.tensor(1.98, dtype=torch.float64).log() + 0.01 * torch.tensor(0.02, dtype=torch.float64).log()
    )
    torch.testing.assert_close(result.kl_before[0], kl_before, rtol=1e-13, atol=0)


def test_nothing_feasible_is_closer_to_the_proposal() -> None:
    """Equation (1) itself: 20,000 random feasible policies around each projection have a larger KL(p ‖ π̃)."""
    proposal, old = pair(60, 4, 1.5, 1.0, seed=7)
    keep = token_kl(proposal, old) > 0.05
    proposal, old = proposal[keep][:20], old[keep][:20]
    result = project(proposal, old, 0.05)
    g = torch.Generator().manual_seed(0)
    nudged = result.log_probs[:, None] + torch.randn(20, 20_000, 4, generator=g, dtype=torch.float64) * torch.logspace(
        -4, 0, 20_000, dtype=torch.float64
    ).view(-1, 1)
    p = nudged.log_softmax(-1)
    feasible = token_kl(p, old[:, None]) <= 0.05
    assert feasible.sum(-1).min() > 1000
    distance = token_kl(p, proposal[:, None])
    best = token_kl(result.log_probs, proposal)
    assert torch.where(feasible, distance - best[:, None], torch.inf).min() > -1e-12


def test_the_authors_bracket_is_too_small_for_a_small_bound() -> None:
    """η needed for ε = 1e-6 exceeds the authors' upper end of 100; both solvers here find it."""
    proposal, old = pair(50, 8, 2.0, 1.0, seed=3)
    for solver in ("newton", "bracketing"):
        result = project(proposal, old, 1e-6, solver=solver)
        assert (result.eta > 100).all()
        assert (exact_kl(result.log_probs, old) <= 1e-6 * (1 + 1e-9)).all()


def test_a_bracket_that_starts_above_the_root_is_lowered() -> None:
    """A proposal just outside the region has η below the authors' lower end of 1e-7."""
    proposal, old = pair(50, 8, 0.5, 1.0, seed=4)
    kl = token_kl(proposal, old)
    d = proposal - old
    bound = kl * (1 - 1e-10)
    solution = solve_bracketing(old, d, bound)
    assert (solution.mix > 1 - 1e-8).all()
    assert ((point(old, d, solution.mix).kl / bound - 1).abs() <= 1e-12).all()
