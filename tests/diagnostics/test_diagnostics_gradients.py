"""Gradients on logits: closed forms written out token by token, and autograd through the losses on dense logits."""

from __future__ import annotations

import math

import pytest
import torch
from diagnostics_cases import dense, random_pair
from hypothesis import given, settings
from hypothesis import strategies as st

from troll import InputError, SparsePolicy, clip_loss, sparsify, troll_loss, unconstrained_loss
from troll.diagnostics import compare_gradients, logit_gradient

EPS, CLIP = 0.05, 0.2
CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # double precision; t is found to 1e-12 and enters the closed forms linearly


def spread(gradient, policy):
    """[B, T, K + 1] in the order of the kept tokens → [B, T, V] by token id."""
    V = policy.vocab_size
    ids = policy.token_ids.clamp(min=0)
    return torch.zeros(*policy.shape, V, dtype=torch.float64).scatter_add(-1, ids, gradient[..., :-1])


def mix(p, q, bound):
    """t with KL(π_t ‖ π_old) = ε by bisection on plain floats, and π_t."""

    def at(t):
        tilted = [b * math.exp(t * math.log(a / b)) for a, b in zip(p, q, strict=True)]
        pi = [x / sum(tilted) for x in tilted]
        return pi, sum(x * math.log(x / b) for x, b in zip(pi, q, strict=True))

    if at(1.0)[1] <= bound:
        return 1.0, p
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle)[1] < bound else (low, middle)
    return low, at(low)[0]


def by_hand(p, q, a, A, alpha):
    """u, clip's, TROLL's ratio term's and TROLL's gradient on the logits of one token."""
    V = range(len(p))
    r = p[a] / q[a]
    u = [A * r * ((j == a) - p[j]) for j in V]
    acts = r > 1 + CLIP if A > 0 else r < 1 - CLIP
    clip = [0.0 if acts else x for x in u]
    t, pi = mix(p, q, EPS)
    if t == 1.0:
        return u, clip, u, u
    d = [math.log(p[j] / q[j]) for j in V]
    mu = sum(pi[j] * d[j] for j in V)
    var = sum(pi[j] * (d[j] - mu) ** 2 for j in V)
    s = pi[a] / q[a]
    # (6); its sum over j is 0, so that it is the gradient on logits as well
    ratio = [A * s * t * ((j == a) - pi[j] - pi[j] * (d[j] - mu) * (d[a] - mu) / var) for j in V]
    # ∂/∂z_j Σ p (log p − log π) = p_j (log p_j/π_j − KL)
    kl = sum(p[j] * math.log(p[j] / pi[j]) for j in V)
    return u, clip, ratio, [ratio[j] - alpha * p[j] * (math.log(p[j] / pi[j]) - kl) for j in V]


@pytest.mark.parametrize(("seed", "distance"), [(0, 0.8), (1, 0.3), (2, 2.0)])
def test_the_closed_forms(seed, distance):
    _, proposal, old, advantages, mask = random_pair(seed, B=4, distance=distance)
    alpha = 0.7
    found = compare_gradients(proposal, old, advantages, mask, kl_bound=EPS, regression_coef=alpha)
    p, q, n = dense(proposal), dense(old), int(mask.sum())
    expected = torch.zeros(4, *mask.shape, 6, dtype=torch.float64)
    for i, t in mask.nonzero().tolist():
        a = int(old.sampled[i, t])
        rows = by_hand(p[i, t].tolist(), q[i, t].tolist(), a, float(advantages[i, t]), alpha)
        expected[:, i, t] = torch.tensor(rows, dtype=torch.float64) / n
    u = expected[0]
    torch.testing.assert_close(found.unconstrained, u.norm(dim=-1), **CLOSE)
    for kept, g in zip((found.clip, found.troll_ratio, found.troll), expected[1:], strict=True):
        torch.testing.assert_close(kept.norm, g.norm(dim=-1), **CLOSE)
        torch.testing.assert_close(kept.removed, (u - g).norm(dim=-1), **CLOSE)
        flat = [(x.flatten() @ y.flatten()).item() for x, y in ((g, g), (u, u), (g, u), (u - g, u - g))]
        assert kept.total_norm == pytest.approx(math.sqrt(flat[0] / flat[1]), rel=1e-9)
        assert kept.total_removed == pytest.approx(math.sqrt(flat[3] / flat[1]), rel=1e-9, abs=1e-9)
        assert kept.total_cosine == pytest.approx(flat[2] / math.sqrt(flat[0] * flat[1]), rel=1e-9)
        for i, t in mask.nonzero().tolist():
            size = math.sqrt(float(g[i, t] @ g[i, t]) * float(u[i, t] @ u[i, t]))
            cosine = float(g[i, t] @ u[i, t]) / size if size else 0.0
            assert float(kept.cosine[i, t]) == pytest.approx(cosine, abs=1e-9)
        silent = sum(not g[i, t].any() for i, t in mask.nonzero().tolist())
        assert kept.silent == pytest.approx(silent / n)
    assert distance < 0.5 or (0 < found.clip.silent < 1 and 0 < found.troll_ratio.total_removed < 1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (unconstrained_loss, {"tail": "floor"}),
        (clip_loss, {"clip_high": 0.3, "tail": "floor"}),
        (troll_loss, {"kl_bound": EPS, "regression_coef": 0.5, "tail": "floor"}),
        (
            troll_loss,
            {"kl_bound": EPS, "tail": "floor", "importance_sampling_level": "sequence", "aggregation": "sequence_mean"},
        ),
    ],
)
def test_autograd_through_the_losses_on_dense_logits(loss, options, temperature):
    logits, proposal, old, advantages, mask = random_pair(3, distance=1.0, temperature=temperature)
    value, _ = loss(proposal, old, advantages, mask, **options)
    (expected,) = torch.autograd.grad(-value, logits)
    found = logit_gradient(loss, proposal, old, advantages, mask, **options)
    torch.testing.assert_close(spread(found, proposal), expected, **CLOSE)
    assert expected.abs().max() > 1e-3
    assert not found.requires_grad


@pytest.mark.parametrize("tail", ["floor", "bucket"])
def test_dropped_tokens_have_the_sum_of_their_gradients(tail):
    logits, proposal, old, advantages, mask = random_pair(4, V=8, K=3, tail=tail, distance=1.0)
    options = {"tail": tail, "kl_bound": EPS}
    value, _ = troll_loss(proposal, old, advantages, mask, **options)
    (full,) = torch.autograd.grad(-value, logits)
    found = logit_gradient(troll_loss, proposal, old, advantages, mask, **options)
    for i, t in mask.nonzero().tolist():
        kept = proposal.token_ids[i, t]
        torch.testing.assert_close(found[i, t, :-1], full[i, t, kept], **CLOSE)
        assert float(found[i, t, -1]) == pytest.approx(float(full[i, t].sum() - full[i, t, kept].sum()), abs=1e-11)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([0.1, 0.5, 1.5]))
def test_the_clip_keeps_all_of_a_token_or_nothing(seed, distance):
    _, proposal, old, advantages, mask = random_pair(seed, distance=distance)
    found = compare_gradients(proposal, old, advantages, mask, kl_bound=EPS)
    whole = found.clip.norm > 0
    torch.testing.assert_close(found.clip.norm + found.clip.removed, found.unconstrained, rtol=1e-12, atol=0)
    assert bool(((found.clip.norm == 0) | (found.clip.removed == 0)).all())
    torch.testing.assert_close(found.clip.cosine, whole.double(), rtol=1e-12, atol=1e-12)
    assert found.clip.total_norm**2 + found.clip.total_removed**2 == pytest.approx(1, rel=1e-9)
    assert not bool(found.unconstrained[~mask].any())


@settings(derandomize=True, deadline=None, max_examples=15)
@given(st.integers(0, 10**6))
def test_regions_without_a_bound_keep_everything(seed):
    _, proposal, old, advantages, mask = random_pair(seed)
    found = compare_gradients(proposal, old, advantages, mask, kl_bound=math.inf, clip_low=1.0, clip_high=math.inf)
    for kept in (found.clip, found.troll_ratio, found.troll):
        assert (kept.total_norm, kept.total_cosine) == (pytest.approx(1), pytest.approx(1))
        assert kept.total_removed < 1e-12
        assert kept.silent == 0


def test_two_tokens_learn_through_the_regression_alone():
    """The boundary of the region is a point: the Jacobian of an active token is 0, but for rounding."""
    old_logits, logits = torch.tensor([[[0.0, 0.0]]]).double(), torch.tensor([[[2.0, 0.0]]]).double()
    sampled, mask = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)
    old, proposal = sparsify(old_logits, sampled), sparsify(logits, sampled)
    found = compare_gradients(proposal, old, torch.ones(1, 1), mask, kl_bound=EPS)
    assert float(found.troll_ratio.norm) < 1e-12
    assert float(found.troll.norm) > 0.01
    assert float(found.troll.cosine) == pytest.approx(-1)  # back towards the old policy
    assert (found.clip.silent, found.troll_ratio.silent, found.troll.silent) == (1, 1, 0)


def test_weights_and_aggregation_reach_the_losses():
    _, proposal, old, advantages, mask = random_pair(5)
    once = compare_gradients(proposal, old, advantages, mask, kl_bound=EPS)
    twice = compare_gradients(proposal, old, advantages, mask, kl_bound=EPS, importance_weights=torch.full((3,), 2.0))
    torch.testing.assert_close(twice.clip.norm, 2 * once.clip.norm, **CLOSE)
    by_length = compare_gradients(proposal, old, advantages, mask, kl_bound=EPS, aggregation="constant", max_length=10)
    n = int(mask.sum())
    torch.testing.assert_close(by_length.unconstrained, once.unconstrained * n / (3 * 10), **CLOSE)


def test_nothing_is_left_behind():
    logits, proposal, old, advantages, mask = random_pair(6)
    compare_gradients(proposal, old, advantages, mask, kl_bound=EPS)
    assert logits.grad is None
    assert proposal.log_probs.requires_grad
    leaf = proposal.detach()
    with torch.no_grad():
        compare_gradients(leaf, old, advantages, mask, kl_bound=EPS)
    assert not leaf.log_probs.requires_grad
    assert not leaf.log_tail.requires_grad


def test_single_precision_says_the_same():
    """Ratios of size 10 and less, rounded to fp32, are off by 1e-6 of their size; the solver's t by as much."""
    _, proposal, old, advantages, mask = random_pair(9, distance=0.8)
    narrow = [
        SparsePolicy(
            x.token_ids, x.log_probs.detach().float(), x.log_tail.detach().float(), x.vocab_size, made_by=x.made_by
        )
        for x in (proposal, old)
    ]
    found = compare_gradients(*narrow, advantages.float(), mask, kl_bound=EPS)
    expected = compare_gradients(proposal, old, advantages, mask, kl_bound=EPS)
    for name in ("clip", "troll_ratio", "troll"):
        for field in ("norm", "removed", "cosine"):
            wide, single = getattr(getattr(expected, name), field), getattr(getattr(found, name), field)
            torch.testing.assert_close(single, wide, rtol=1e-4, atol=1e-5)


def test_without_advantages_there_is_no_gradient_to_compare():
    _, proposal, old, advantages, mask = random_pair(7)
    found = compare_gradients(proposal, old, 0 * advantages, mask, kl_bound=EPS)
    assert math.isnan(found.clip.total_norm)
    assert math.isnan(found.clip.silent)
    assert float(found.troll.norm.sum()) > 0  # the regression needs none


def test_what_is_refused():
    _, proposal, old, advantages, mask = random_pair(8)
    with pytest.raises(InputError, match="loss_mask"):
        compare_gradients(proposal, old, advantages, mask[:1])
    with pytest.raises(InputError, match="advantages"):
        compare_gradients(proposal, old, advantages[:1], mask)
    with pytest.raises(InputError, match="kl_bound must be a number ≥ 0, got -1"):
        compare_gradients(proposal, old, advantages, mask, kl_bound=-1.0)
    with pytest.raises(InputError, match="clip_low"):
        compare_gradients(proposal, old, advantages, mask, clip_low=-1.0)
