"""The edges of the number range: tiny and huge bounds, huge gaps, one-hot policies. Finite, and the bound holds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import evaluate, make_case, policies

from troll import clip_loss, project, troll_loss, unconstrained_loss
from troll.policy import align

INF = math.inf
LOSSES = pytest.mark.parametrize("loss_function", [troll_loss, clip_loss, unconstrained_loss])
TAILS = pytest.mark.parametrize("tail", ["floor", "bucket"])
HALF = [torch.float32, torch.float16, torch.bfloat16]


def case_of(old_logits, logits, sampled=0, advantage=1.0, dtype=torch.float32):
    return make_case(B=1, T=1, V=len(logits)).with_(
        logits=torch.tensor([[logits]], dtype=dtype),
        old_logits=torch.tensor([[old_logits]], dtype=dtype),
        sampled=torch.tensor([[sampled]]),
        advantages=torch.tensor([advantage]),
    )


def assert_sound(result, bound=None):
    loss, grad, metrics = result
    assert bool(loss.isfinite())
    assert bool(grad.isfinite().all())
    for name, value in metrics.items():
        assert bool(value.isfinite()), name
    if bound is not None:
        assert metrics["kl_after/max"] <= bound * (1 + 1e-5)
        assert metrics["unconverged_tokens"] == 0


def kl_of_projected(case, bound, tail, K=None):
    """KL(π ‖ π_old) of the stored fp32 numbers, normalised in fp64 and summed by its definition."""
    pair = align(*policies(case, tail=tail, K=K), tail)
    p, q = (x.double().log_softmax(-1) for x in (project(*pair, bound).log_probs, pair.old))
    return torch.where(p > -INF, p.exp() * (p - q), 0.0).sum(-1)[case.mask]


@LOSSES
@TAILS
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("gap", [80.0, 1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("K", [3, 2, 1])
def test_huge_gaps(loss_function, tail, dtype, gap, advantage, K):
    """The old policy is certain of one token and the proposal of another."""
    for sampled in (0, 1, 2):
        case = case_of([0.0, gap, 1.0], [gap, 0.0, 0.5], sampled, advantage, dtype)
        result = evaluate(loss_function, case, tail=tail, K=K)
        assert_sound(result, 0.05 if loss_function is troll_loss else None)
        if loss_function is troll_loss and K == 3:
            assert result[2]["projected_fraction"] == 1
            assert kl_of_projected(case, 0.05, tail) <= 0.05 * (1 + 1e-5)


@LOSSES
@TAILS
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("solver", ["newton", "bracketing"])
def test_the_ends_of_fp16(loss_function, tail, sign, solver):
    ends = [65504.0, -65504.0, 0.0, 6e-8]
    case = case_of([-sign * x for x in ends], [sign * x for x in ends], 2, dtype=torch.float16)
    options = {"solver": solver} if loss_function is troll_loss else {}
    assert_sound(evaluate(loss_function, case, tail=tail, **options), 0.05 if options else None)


@TAILS
@pytest.mark.parametrize("bound", [1e-12, 1e-9, 1e-6, 1e-3])
def test_tiny_bounds(tail, bound):
    case = make_case(dtype=torch.float32)
    result = evaluate(troll_loss, case, tail=tail, kl_bound=bound)
    assert_sound(result, bound)
    assert result[2]["projected_fraction"] == 1
    assert result[2]["kl_after/max"] > 0.5 * bound  # not the old policy either
    # |log r| ≤ √(2 KL / π(a)) to first order, and the sampled tokens here have π(a) > 1e-3.
    assert abs(result[2]["ratio/max"].item() - 1) < 50 * math.sqrt(bound)


@TAILS
def test_a_bound_below_the_resolution_of_fp32_is_the_old_policy(tail):
    case = make_case(dtype=torch.float32)
    loss, grad, metrics = evaluate(troll_loss, case, tail=tail, kl_bound=1e-30)
    zero, zero_grad, _ = evaluate(troll_loss, case, tail=tail, kl_bound=0.0)
    assert metrics["kl_after/max"] <= 1e-30 * (1 + 1e-5)
    assert torch.equal(loss, zero)
    assert torch.equal(grad, zero_grad)


@TAILS
@pytest.mark.parametrize("bound", [1e3, 1e30, INF])
def test_huge_bounds_are_no_bound(tail, bound):
    case = make_case(dtype=torch.float32, distance=5.0)
    result = evaluate(troll_loss, case, tail=tail, kl_bound=bound)
    assert_sound(result, bound)
    expected = evaluate(unconstrained_loss, case, tail=tail)
    assert result[2]["projected_fraction"] == 0
    # The joined support is renormalised once more, in fp32.
    torch.testing.assert_close(result[0], expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result[1], expected[1], rtol=1e-5, atol=1e-6)


@LOSSES
@TAILS
@pytest.mark.parametrize("which", ["old", "proposal", "both"])
def test_one_hot_policies(loss_function, tail, which):
    sure, open_ = [0.0, -INF, -INF], [0.1, 0.0, -0.2]
    old, new = (sure if which in (side, "both") else open_ for side in ("old", "proposal"))
    case = case_of(old, new)
    if loss_function is troll_loss:
        assert_sound(evaluate(loss_function, case, tail=tail, max_lost_mass=1.0), 0.05)
        return
    loss, grad, metrics = evaluate(loss_function, case, tail=tail)
    ratio = torch.tensor(new).softmax(-1)[0] / torch.tensor(old).softmax(-1)[0]
    assert loss.item() == pytest.approx(-min(ratio.item(), 1.2 if loss_function is clip_loss else INF), rel=1e-6)
    assert bool(grad.isfinite().all())
    # As under TROLL, what only the proposal allows is left out of the KL, and reported.
    lost = 1 - torch.tensor(new).softmax(-1)[0].item() if which == "old" else 0.0
    assert metrics["lost_mass"].item() == pytest.approx(lost, rel=1e-6)
    assert all(bool(value.isfinite()) for value in metrics.values())


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-6, 1e-3, 1.0, 30.0, 1e4]),
    distance=st.sampled_from([1e-4, 0.1, 3.0, 80.0, 1e4]),
    bound=st.sampled_from([1e-8, 1e-3, 0.05, 1.0, 20.0]),
    tail=st.sampled_from(["floor", "bucket"]),
    K=st.sampled_from([1, 2, 5, 8]),
    level=st.sampled_from(["token", "sequence"]),
)
def test_finite_and_inside_whatever_comes(seed, scale, distance, bound, tail, K, level):
    g = torch.Generator().manual_seed(seed)
    old_logits = scale * torch.randn(2, 3, 8, generator=g)
    case = make_case(seed=seed, B=2, T=3, V=8, dtype=torch.float32).with_(
        old_logits=old_logits, logits=old_logits + distance * torch.randn(2, 3, 8, generator=g)
    )
    assert_sound(evaluate(troll_loss, case, tail=tail, K=K, kl_bound=bound, importance_sampling_level=level), bound)
    # The sum of p log p/q in fp64 cancels to 1e-16 times its terms, below 1e-5 of every bound here.
    assert bool((kl_of_projected(case, bound, tail, K) <= bound * (1 + 1e-5)).all())
    for other in (clip_loss, unconstrained_loss):
        assert_sound(evaluate(other, case, tail=tail, K=K, importance_sampling_level=level))
