"""Mix and variance against roots found with 40 digits; distances to the kink from the definition of the KL."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from diagnostics_cases import dense, random_pair

from troll import InputError, sparsify, troll_loss
from troll.diagnostics import solver_conditioning

mpmath.mp.dps = 40


def exact(p, q, bound):
    """KL(π̃ ‖ π_old), t and Var_{π_t}[d] by bisection, with 40 digits."""
    p, q = ([mpmath.mpf(float(x)) for x in row] for row in (p, q))
    p, q = ([x / sum(row) for x in row] for row in (p, q))
    d = [mpmath.log(a / b) for a, b in zip(p, q, strict=True)]

    def at(t):
        tilted = [b * mpmath.exp(t * x) for b, x in zip(q, d, strict=True)]
        pi = [x / sum(tilted) for x in tilted]
        return pi, sum(x * mpmath.log(x / b) for x, b in zip(pi, q, strict=True))

    kl = at(mpmath.mpf(1))[1]
    if kl <= bound:
        return kl, None, None
    low, high = mpmath.mpf(0), mpmath.mpf(1)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle)[1] < bound else (low, middle)
    pi = at(low)[0]
    mu = sum(x * y for x, y in zip(pi, d, strict=True))
    return kl, low, sum(x * (y - mu) ** 2 for x, y in zip(pi, d, strict=True))


@pytest.mark.parametrize(("seed", "distance"), [(0, 0.4), (1, 1.0), (2, 3.0)])
def test_against_forty_digits(seed, distance):
    """The solver promises 1e-12 of the KL, and the inputs are rounded to doubles: 1e-10 leaves room for both."""
    _, proposal, old, _, mask = random_pair(seed, distance=distance)
    bound = 0.05
    found = solver_conditioning(proposal, old, mask, kl_bound=bound)
    p, q = dense(proposal)[mask], dense(old)[mask]
    rows = [exact(a, b, bound) for a, b in zip(p, q, strict=True)]
    projected = [row for row in rows if row[1] is not None]
    assert len(projected) > 0
    assert found.active.tolist() == [row[1] is not None for row in rows]
    assert found.kink_distance.tolist() == pytest.approx([float(abs(kl / bound - 1)) for kl, _, _ in rows], rel=1e-9)
    assert found.mix.tolist() == pytest.approx([float(t) for _, t, _ in projected], rel=1e-10)
    assert found.variance.tolist() == pytest.approx([float(v) for _, _, v in projected], rel=1e-10)
    assert found.projected_fraction == pytest.approx(len(projected) / len(rows))
    near = sum(abs(kl / bound - 1) < 0.5 for kl, _, _ in rows) / len(rows)
    assert found.near_kink(0.5) == pytest.approx(near)
    assert found.unconverged == 0
    assert len(found.iterations) == len(projected)


@pytest.mark.parametrize("tail", ["floor", "bucket"])
def test_it_is_what_the_loss_does(tail):
    _, proposal, old, advantages, mask = random_pair(3, B=6, T=8, V=30, K=5, tail=tail, distance=1.0)
    bound = torch.full(mask.shape, 0.02).double()
    bound[:, ::2] = 0.2
    found = solver_conditioning(proposal, old, mask, kl_bound=bound, tail=tail)
    _, metrics = troll_loss(proposal, old, advantages, mask, kl_bound=bound, tail=tail)
    assert found.projected_fraction == pytest.approx(metrics["projected_fraction"].item())
    assert found.iterations.double().mean().item() == pytest.approx(metrics["solver_steps/mean"].item())
    assert found.iterations.max().item() == metrics["solver_steps/max"].item()
    everything = torch.ones_like(found.kink_distance).masked_scatter(found.active, found.mix)
    assert everything.mean().item() == pytest.approx(metrics["mix"].item(), rel=1e-12)
    kl = torch.where(found.active, 1 + found.kink_distance, math.nan) * bound[mask]
    assert kl[found.active].max().item() == pytest.approx(metrics["kl_before/max"].item(), rel=1e-9)
    assert bool(found.variance.isfinite().all())


def test_two_tokens_in_closed_form():
    """Old (½, ½), proposal (σ(4), σ(−4)): the values of d lie 4 apart, π_t = σ(4t), Var = 16 π(1 − π)."""
    old_logits, logits = torch.tensor([[[0.0, 0.0]]]).double(), torch.tensor([[[2.0, -2.0]]]).double()
    sampled, mask = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)
    found = solver_conditioning(sparsify(logits, sampled), sparsify(old_logits, sampled), mask, kl_bound=0.05)
    t = float(found.mix)
    pi = 1 / (1 + math.exp(-4 * t))
    assert pi * math.log(2 * pi) + (1 - pi) * math.log(2 * (1 - pi)) == pytest.approx(0.05, rel=1e-11)
    assert float(found.variance) == pytest.approx(16 * pi * (1 - pi), rel=1e-11)


def test_tokens_that_one_policy_excludes():
    """What the old policy excludes is outside the family, what only the proposal excludes has log 1e-12."""
    old_logits = torch.tensor([[[0.0, 1.0, -math.inf, 0.5]]]).double()
    logits = torch.tensor([[[2.0, -math.inf, -3.0, 0.0]]]).double()
    sampled, mask = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)
    old, proposal = sparsify(old_logits, sampled), sparsify(logits, sampled)
    found = solver_conditioning(proposal, old, mask, kl_bound=0.05)
    q = old_logits.softmax(-1)[0, 0][[0, 1, 3]].tolist()
    p = logits[0, 0][[0, 3]].softmax(-1).tolist()
    d = [math.log(p[0] / q[0]), math.log(1e-12 / q[1]), math.log(p[1] / q[2])]
    tilted = [b * math.exp(float(found.mix) * x) for b, x in zip(q, d, strict=True)]
    pi = [x / sum(tilted) for x in tilted]
    mu = sum(x * y for x, y in zip(pi, d, strict=True))
    variance = sum(x * (y - mu) ** 2 for x, y in zip(pi, d, strict=True))
    assert float(found.variance) == pytest.approx(variance, rel=1e-9)


def test_a_bound_of_zero_is_all_kink_and_no_batch_is_nothing():
    _, proposal, old, _, mask = random_pair(4)
    found = solver_conditioning(proposal, old, mask, kl_bound=0.0)
    assert found.projected_fraction == 1
    assert found.mix.tolist() == [0.0] * int(mask.sum())
    assert found.near_kink() == 0
    empty = solver_conditioning(proposal, old, torch.zeros_like(mask))
    assert (empty.projected_fraction, empty.near_kink(), len(empty.mix)) == (0, 0, 0)


def test_what_is_refused():
    _, proposal, old, _, mask = random_pair(5)
    with pytest.raises(InputError, match="loss_mask"):
        solver_conditioning(proposal, old, mask[:1])
    for bound in (-1.0, torch.full(mask.shape, -1.0)):
        with pytest.raises(InputError, match="kl_bound must be a number ≥ 0, got -1"):
            solver_conditioning(proposal, old, mask, kl_bound=bound)
    with pytest.raises(InputError, match="kl_bound"):
        solver_conditioning(proposal, old, mask, kl_bound=torch.ones(7))
    with pytest.raises(InputError, match="within must be a number > 0, got 0"):
        solver_conditioning(proposal, old, mask).near_kink(0)
