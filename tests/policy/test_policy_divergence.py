"""KL, total variation and entropy against a 50-digit reference, closed forms and numbers computed by hand."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import F32, F64, INF, close, normal
from torch import Tensor

from troll.policy import entropy, kl_terms, sequence_kl, token_kl, total_variation

# The hardest place is the closed form d + expm1(−d) just above |d| = 0.03: a result of 4.5e-4 from numbers of 0.03, so
# one ulp of expm1 (3.5e-18 in fp64, 1.9e-9 in fp32) is 8e-15 or 4.1e-6 of it. All terms are ≥ 0, so a sum is no worse
# than its worst term plus its own rounding, at most 64 ulp: 7e-15 or (not reached, as errors average) 4e-6.
BUDGET = {F64: 2e-14, F32: 6e-6}


def exact_kl(log_p: Tensor, log_q: Tensor) -> mpmath.mpf:
    """KL with 50 digits, the stored bits taken as exact: P · Σ p̂ (log p̂ − log q̂) + (P log(P/Q) − P + Q).

    P and Q, the sums of the rows, are 1 up to rounding. The second part, about (P − Q)²/2, is what "KL" leaves open for
    rows that are not quite normalised; it is next to nothing unless KL itself is of the order of eps².
    """
    with mpmath.workdps(50):
        p, q = ([mpmath.exp(mpmath.mpf(x)) for x in row.tolist()] for row in (log_p, log_q))
        P, Q = mpmath.fsum(p), mpmath.fsum(q)
        if any(a > 0 and b == 0 for a, b in zip(p, q, strict=True)):
            return mpmath.inf
        normalised = mpmath.fsum(
            a / P * (mpmath.mpf(x) - mpmath.mpf(y) - mpmath.log(P / Q))
            for a, x, y in zip(p, log_p.tolist(), log_q.tolist(), strict=True)
            if a > 0
        )
        return P * normalised + (P * mpmath.log(P / Q) - P + Q)


def relative_error(log_p: Tensor, log_q: Tensor) -> float:
    truth = exact_kl(log_p, log_q)
    return float(abs(mpmath.mpf(token_kl(log_p, log_q).item()) - truth) / truth)


def naive(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def probs(*p: float, dtype: torch.dtype = F64) -> Tensor:
    return torch.tensor(p, dtype=F64).log().to(dtype)


# ---- values --------------------------------------------------------------------------------------------------------


def test_kl_by_hand_and_its_argument_order() -> None:
    p, q = probs(0.9, 0.1), probs(0.5, 0.5)
    # 0.9 log 1.8 + 0.1 log 0.2 and 0.5 log(5/9) + 0.5 log 5, from a table of logarithms
    assert token_kl(p, q).item() == close(0.3680642071684971, rel=1e-14)
    assert token_kl(q, p).item() == close(0.5108256237659907, rel=1e-14)


def test_kl_terms_by_hand() -> None:
    # p (d + e⁻ᵈ − 1) = p d − p + q: 0.9 log 1.8 − 0.4 and 0.1 log 0.2 + 0.4
    terms = kl_terms(probs(0.9, 0.1), probs(0.5, 0.5))
    assert terms.tolist() == close([0.129007998411907, 0.23905620875659], rel=1e-12)


NOISE = [1e-5, 1e-3, 0.02, 0.03, 0.05, 0.5, 1.0, 5.0, 50.0]


@pytest.mark.parametrize(  # fp32 log-probabilities cannot hold the two smallest
    ("noise", "dtype"), [(x, F64) for x in (1e-9, 1e-7, *NOISE)] + [(x, F32) for x in NOISE]
)
def test_kl_matches_50_digits_from_tiny_to_huge_ratios(noise: float, dtype: torch.dtype) -> None:
    log_q = torch.log_softmax(normal(8, 12, seed=1, scale=3.0, dtype=F64), -1)
    log_p = torch.log_softmax(log_q + normal(8, 12, seed=2, scale=noise, dtype=F64), -1)
    for p, q in zip(log_p.to(dtype), log_q.to(dtype), strict=True):
        assert relative_error(p, q) <= BUDGET[dtype]
        assert relative_error(q, p) <= BUDGET[dtype]


@pytest.mark.parametrize("dtype", [F32, F64])
def test_every_term_is_accurate_over_eight_decades_of_ratios(dtype: torch.dtype) -> None:
    """Also in the middle of the series and right above it, where a single d may round well by luck."""
    d = torch.logspace(-6, 2, 200, dtype=F64)
    d = torch.cat([d, -d, torch.linspace(0.002, 0.04, 100, dtype=F64), -torch.linspace(0.002, 0.04, 100, dtype=F64)])
    log_p, log_q = (-0.75 + d.clamp(max=0)).to(dtype), (-0.75 - d.clamp(min=0)).to(dtype)  # the larger one is −0.75
    terms = kl_terms(log_p, log_q).tolist()
    with mpmath.workdps(50):
        for x, y, term in zip(log_p.tolist(), log_q.tolist(), terms, strict=True):
            p, q, ratio = mpmath.exp(mpmath.mpf(x)), mpmath.exp(mpmath.mpf(y)), mpmath.mpf(x) - mpmath.mpf(y)
            truth = p * ratio - p + q
            assert abs(mpmath.mpf(term) - truth) <= BUDGET[dtype] * truth, (x - y, term)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("d", [0.0299999, 0.0300001, 0.031, 0.1, 0.9999, 1.0001, 1.1, 3.0, 80.0])
@pytest.mark.parametrize("sign", [-1, 1])
def test_kl_is_accurate_on_both_sides_of_every_branch(d: float, sign: int, dtype: torch.dtype) -> None:
    """The term of one token that moved by d, alone, so that no other term hides an error."""
    log_p = probs(0.3, 0.7).to(dtype)
    log_q = torch.stack([log_p[0] - sign * d, torch.tensor(-0.4, dtype=dtype)])
    with mpmath.workdps(50):
        p, q = mpmath.exp(mpmath.mpf(log_p[0].item())), mpmath.exp(mpmath.mpf(log_q[0].item()))
        truth = p * (mpmath.mpf(log_p[0].item()) - mpmath.mpf(log_q[0].item())) - p + q
        error = abs(mpmath.mpf(kl_terms(log_p, log_q)[0].item()) / truth - 1)
    assert error <= BUDGET[dtype]


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.0, -700.0], [-700.0, 0.0]),  # d = ±700: e⁷⁰⁰ · e⁻⁷⁰⁰ must not be formed as ∞ · 0
        ([math.log1p(-1e-300), math.log(1e-300)], [math.log(0.5), math.log(0.5)]),
        ([math.log(0.5), -INF, math.log(0.5)], [math.log(0.25), math.log(0.5), math.log(0.25)]),  # no mass in p
        ([math.log(0.4), -INF, math.log(0.6)], [math.log(0.6), -INF, math.log(0.4)]),  # −inf on both sides
        ([-INF, 0.0, -INF], [math.log(0.1), math.log(0.8), math.log(0.1)]),  # one-hot
        ([math.log(0.5), math.log(0.5), -1e4], [math.log(0.5), -1e4, math.log(0.5)]),  # a gap of 1e4
    ],
)
def test_kl_of_hard_rows_matches_50_digits(p: list[float], q: list[float]) -> None:
    assert relative_error(torch.tensor(p, dtype=F64), torch.tensor(q, dtype=F64)) <= BUDGET[F64]


def test_fp32_kl_of_2e7_is_accurate_and_never_negative_where_the_naive_sum_is() -> None:
    logits = normal(2000, 64, seed=3, scale=2.0) + 20.0  # where the logits of language models lie
    log_q = torch.log_softmax(logits, -1)
    log_p = torch.log_softmax(logits + normal(2000, 64, seed=4, scale=6.3e-4), -1)  # KL ≈ σ²/2 = 2e-7
    kl = token_kl(log_p, log_q)
    assert 1e-7 < kl.mean().item() < 3e-7
    assert kl.min().item() > 0
    negative = naive(log_p, log_q) < 0
    assert negative.float().mean().item() > 0.05  # 11 % where this was written
    for row in negative.nonzero().flatten()[:20].tolist():  # exactly there ours still has five digits
        assert relative_error(log_p[row], log_q[row]) <= BUDGET[F32]


def test_kl_does_not_feel_a_rounding_error_in_the_normalisation() -> None:
    """Both rows are off by 1e-5 in mass, in opposite directions; p·d would be off by 2e-5, ours by its square."""
    log_q = torch.log_softmax(normal(16, seed=5, dtype=F64), -1)
    log_p = torch.log_softmax(log_q + normal(16, seed=6, scale=0.01, dtype=F64), -1)
    truth = float(exact_kl(log_p, log_q))
    assert abs(token_kl(log_p + 1e-5, log_q - 1e-5).item() - truth) < 1e-5 * truth + 4e-10  # P·KL + (P − Q)²/2
    assert abs(naive(log_p + 1e-5, log_q - 1e-5).item() - truth) > 1.9e-5


@pytest.mark.parametrize("dtype", [F32, F64])
def test_equal_rows_have_a_kl_of_exactly_zero(dtype: torch.dtype) -> None:
    log_p = torch.log_softmax(normal(50, 33, seed=7, scale=4.0, dtype=dtype), -1)
    log_p[:, 5] = -INF
    assert token_kl(log_p, log_p.clone()).tolist() == [0.0] * 50


def test_mass_that_q_lacks_costs_infinitely_much() -> None:
    assert token_kl(probs(0.5, 0.5), probs(1.0, 0.0)).item() == INF
    assert token_kl(probs(1.0, 0.0), probs(0.5, 0.5)).item() == close(math.log(2), rel=1e-15)


@pytest.mark.parametrize(("gap", "dtype"), [(-1.0, F32), (-150.0, F32), (-800.0, F64)])
def test_mass_that_q_lacks_is_never_nan_also_below_the_smallest_number(gap: float, dtype: torch.dtype) -> None:
    """e⁻¹⁵⁰ and e⁻⁸⁰⁰ are zero in these types, and 0 · ∞ lurks; backward, a constant ∞ has no gradient."""
    log_p = torch.tensor([math.log(0.5), gap], dtype=dtype, requires_grad=True)
    log_q = torch.tensor([math.log(0.25), -INF], dtype=dtype, requires_grad=True)
    kl = token_kl(log_p, log_q)
    assert kl.item() == INF
    kl.backward()
    assert log_p.grad.tolist() == close([0.5 * math.log(2), 0.0], rel=1e-6)
    assert log_q.grad.tolist() == close([-0.25, 0.0], rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_bad_numbers_never_turn_into_a_kl_of_zero(bad: float) -> None:
    row = probs(0.5, 0.5)
    broken = torch.tensor([bad, math.log(0.5)], dtype=F64)
    assert not token_kl(broken, row).isfinite().item()
    assert not token_kl(row, broken).isfinite().item()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.integers(0, 2**31), st.integers(1, 40), st.sampled_from([0.0, 1e-4, 0.1, 3.0, 30.0]), st.sampled_from([F32, F64])
)
def test_kl_properties(seed: int, K: int, noise: float, dtype: torch.dtype) -> None:
    """KL ≥ 0, Pinsker's inequality, 0 ≤ TV ≤ 1, 0 ≤ H ≤ log K, and the order of the tokens does not matter."""
    log_q = torch.log_softmax(normal(4, K, seed=seed, scale=3.0, dtype=F64), -1)
    log_p = torch.log_softmax(log_q + normal(4, K, seed=seed + 1, scale=noise, dtype=F64), -1).to(dtype)
    log_q = log_q.to(dtype)
    kl, tv, h = token_kl(log_p, log_q), total_variation(log_p, log_q), entropy(log_p)
    # A row that is unnormalised by u changes KL by u²/2 and TV by u: u is below 40 ulp of 1.
    slack = 40 * torch.finfo(dtype).eps
    assert (kl >= 0).all()
    assert (2 * (tv - slack).clamp(min=0) ** 2 <= kl * (1 + slack)).all()
    assert (tv >= 0).all()
    assert (tv <= 1 + slack).all()
    assert (h >= -slack).all()
    assert (h <= math.log(K) + slack * (1 + math.log(K))).all()
    order = torch.randperm(K, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(token_kl(log_p[:, order], log_q[:, order]), kl, rtol=40 * torch.finfo(dtype).eps, atol=0)


def test_leading_dimensions_are_kept_and_rows_do_not_mix() -> None:
    log_p = torch.log_softmax(normal(2, 3, 7, seed=8, dtype=F64), -1)
    log_q = torch.log_softmax(normal(2, 3, 7, seed=9, dtype=F64), -1)
    for f in (token_kl, total_variation, lambda p, _: entropy(p)):
        whole = f(log_p, log_q)
        assert whole.shape == (2, 3)
        rows = [[f(log_p[i, j], log_q[i, j]).item() for j in range(3)] for i in range(2)]
        assert whole.tolist() == rows


# ---- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [1e-9, 1e-3, 0.03, 0.3, 3.0, 40.0])
def test_gradient_is_p_d_and_q_minus_p(noise: float) -> None:
    """∂/∂ log p of Σ p (d + e⁻ᵈ − 1) is p d, ∂/∂ log q is q − p: closed forms, no autograd."""
    log_q = torch.log_softmax(normal(6, 20, seed=10, scale=2.0, dtype=F64), -1)
    log_p = torch.log_softmax(log_q + normal(6, 20, seed=11, scale=noise, dtype=F64), -1)
    log_p, log_q = log_p.requires_grad_(), log_q.requires_grad_()
    token_kl(log_p, log_q).sum().backward()
    p, q = log_p.detach().exp(), log_q.detach().exp()
    d = (log_p - log_q).detach()
    # p d = (p e⁻ᵈ p-derivative) + …: autograd adds p·excess(d) and p (1 − e⁻ᵈ), each ≤ max(p, q)(1 + |d|), so the error
    # is a few eps of that; where d is tiny p (1 − e⁻ᵈ) is differentiated from the series, to a few eps of p d itself.
    scale = torch.maximum(p, q) * (1 + d.abs()) if noise > 0.01 else p * d.abs()
    assert ((log_p.grad - p * d).abs() <= 2e-14 * scale + 1e-300).all()
    scale = torch.maximum(p, q) * (1 + d.abs()) if noise > 0.01 else (q - p).abs() + 1e-16
    assert ((log_q.grad - (q - p)).abs() <= 2e-14 * scale + 1e-16).all()


def test_gradcheck_in_every_branch() -> None:
    log_p = torch.tensor([[-1.2, -0.9, -2.0, -3.0, -1.5, -4.0]], dtype=F64)
    d = torch.tensor([[1e-4, -0.02, 0.4, -0.7, -2.5, 6.0]], dtype=F64)  # series, closed form, vanishing p, large
    log_p, log_q = log_p.requires_grad_(), (log_p.detach() - d).requires_grad_()
    assert torch.autograd.gradcheck(token_kl, (log_p, log_q), eps=1e-6, atol=1e-9, rtol=1e-6)


def test_gradient_with_excluded_tokens_is_finite_and_exact() -> None:
    log_p = torch.tensor([math.log(0.5), -INF, -INF, math.log(0.5)], dtype=F64, requires_grad=True)
    log_q = torch.tensor([math.log(0.25), -INF, math.log(0.5), math.log(0.25)], dtype=F64, requires_grad=True)
    token_kl(log_p, log_q).backward()
    half_log2 = 0.5 * math.log(2)
    assert log_p.grad.tolist() == close([half_log2, 0.0, 0.0, half_log2], rel=1e-14)
    assert log_q.grad.tolist() == close([-0.25, 0.0, 0.5, -0.25], rel=1e-14)


@pytest.mark.parametrize("gap", [80.0, 1e4])
def test_gradient_at_huge_gaps_is_finite(gap: float) -> None:
    log_p = torch.tensor([0.0, -gap], dtype=F32, requires_grad=True)
    log_q = torch.tensor([-gap, 0.0], dtype=F32, requires_grad=True)
    token_kl(log_p, log_q).backward()
    assert log_p.grad[0].item() == close(gap, rel=1e-6)
    assert abs(log_p.grad[1].item()) < 1e-30
    assert log_q.grad.tolist() == close([-1.0, 1.0], rel=1e-6)


# ---- the others ----------------------------------------------------------------------------------------------------


def test_sequence_kl_sums_the_counted_tokens_only() -> None:
    kl = torch.tensor([[0.1, 0.2, 0.4], [0.3, math.nan, INF], [math.nan, math.nan, math.nan]], dtype=F64)
    kl.requires_grad_()
    mask = torch.tensor([[True, False, True], [True, False, False], [False, False, False]])
    total = sequence_kl(kl, mask)
    assert total.tolist() == close([0.5, 0.3, 0.0], rel=1e-15)
    total.sum().backward()
    assert kl.grad.tolist() == [[1.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_sequence_kl_is_the_kl_of_the_sequence_distributions() -> None:
    """Two steps over three tokens: Σ over the nine sequences = expected Σ over time (the chain rule)."""
    first_p, first_q = probs(0.5, 0.3, 0.2), probs(0.2, 0.2, 0.6)
    second_p = torch.log_softmax(normal(3, 3, seed=12, dtype=F64), -1)  # depends on the first token
    second_q = torch.log_softmax(normal(3, 3, seed=13, dtype=F64), -1)
    joint = token_kl((first_p[:, None] + second_p).flatten(), (first_q[:, None] + second_q).flatten())
    steps = torch.stack([token_kl(first_p, first_q).expand(3), token_kl(second_p, second_q)], dim=-1)
    expected = (first_p.exp() * sequence_kl(steps, torch.ones(3, 2, dtype=torch.bool))).sum()
    assert expected.item() == close(joint.item(), rel=1e-14)


def test_total_variation_by_hand() -> None:
    assert total_variation(probs(0.9, 0.1), probs(0.5, 0.5)).item() == close(0.4, rel=1e-15)
    assert total_variation(probs(0.5, 0.5, 0.0), probs(0.0, 0.5, 0.5)).item() == close(0.5, rel=1e-15)
    assert total_variation(probs(1.0, 0.0), probs(0.0, 1.0)).item() == 1.0  # disjoint


def test_entropy_by_hand() -> None:
    assert entropy(probs(0.5, 0.25, 0.25, 0.0)).item() == close(1.5 * math.log(2), rel=1e-15)
    assert entropy(probs(1.0, 0.0)).item() == 0.0
    assert entropy(torch.full((64,), -math.log(64), dtype=F64)).item() == close(math.log(64), rel=1e-14)


def test_entropy_gradient_is_finite_with_excluded_tokens() -> None:
    """∂/∂ log p of −p log p is −p (1 + log p); an excluded token has none."""
    log_p = probs(0.5, 0.25, 0.25, 0.0).requires_grad_()
    entropy(log_p).backward()
    expected = [-0.5 * (1 - math.log(2)), *[-0.25 * (1 - 2 * math.log(2))] * 2, 0.0]
    assert log_p.grad.tolist() == close(expected, rel=1e-14)


def test_sequence_kl_takes_a_mask_of_numbers() -> None:
    kl = torch.tensor([[1.0, 2.0, 4.0]])
    assert sequence_kl(kl, torch.tensor([[1, 0, 1]])).tolist() == [5.0]
