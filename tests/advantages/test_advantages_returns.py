"""Rewards per token and whitening: numbers by hand, then properties.

Where a property uses numbers k/64, sums are exact in float64 and the assertion is bit for bit.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troll.advantages import gae, reinforce_pp, reinforce_pp_baseline, whiten

F64 = torch.float64
PROPERTY = settings(deadline=None, derandomize=True)  # the same examples in every run
NAN, INF = math.nan, math.inf


@st.composite
def token_batches(draw: st.DrawFn, dyadic: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards, values and a mask with holes, [B, T] each; at least two tokens count."""
    B, T = draw(st.integers(1, 3)), draw(st.integers(2, 7))
    number = st.integers(-640, 640).map(lambda k: k / 64) if dyadic else st.floats(-10, 10)
    numbers = st.lists(number, min_size=B * T, max_size=B * T)
    mask = draw(st.lists(st.booleans(), min_size=B * T, max_size=B * T).filter(lambda m: sum(m) >= 2))
    rewards, values = (torch.tensor(draw(numbers), dtype=F64).view(B, T) for _ in range(2))
    return rewards, values, torch.tensor(mask).view(B, T)


def counted_sequence(row_mask: torch.Tensor) -> list[int]:
    return row_mask.nonzero()[:, 0].tolist()


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_whiten_by_hand():
    # counted 1, 3, 5: μ = 3, Σd² = 8, σ² = 8/2 = 4; eps = 12 makes the root √16 = 4.
    result = whiten(torch.tensor([[1.0, NAN, 3.0], [5.0, INF, -INF]]), torch.tensor([[1, 0, 1], [1, 0, 0]]), eps=12)
    assert torch.equal(result, torch.tensor([[-0.5, 0, 0], [0.5, 0, 0]]))


def test_whiten_default_eps():
    # 0, 2: μ = 1, σ² = 2. The order of root and quotient differs between machines: one unit in the last place, 2e-16.
    result = whiten(torch.tensor([[0.0, 2.0]], dtype=F64), torch.ones(1, 2))
    expected = 1 / math.sqrt(2 + 1e-8)
    assert result[0].tolist() == pytest.approx([-expected, expected], rel=3e-16, abs=0)


def test_reinforce_pp_by_hand():
    # γ = ½: returns (¼, ½, 1) and (1, ·, 2) with a hole: μ = 4.75/5 = 0.95,
    # d = (−.7, −.45, .05, .05, 1.05), Σd² = .49 + .2025 + .0025 + .0025 + 1.1025 = 1.8, σ² = 1.8/4 = 0.45.
    rewards = torch.tensor([[0, 0, 1], [0, 99, 2]], dtype=F64)
    mask = torch.tensor([[True, True, True], [True, False, True]])
    expected = torch.tensor([[-0.7, -0.45, 0.05], [0.05, 0, 1.05]], dtype=F64) / (0.45 + 1e-8) ** 0.5
    # About ten roundings of 1.1e-16 on numbers below 2, divided by 0.67.
    torch.testing.assert_close(reinforce_pp(rewards, mask, gamma=0.5), expected, rtol=0, atol=3.3e-15)
    assert reinforce_pp(rewards, mask, gamma=0.5)[1, 1] == 0


def test_reinforce_pp_is_undiscounted_by_default():
    # Returns (1, 1) and (3, 3): μ = 2, Σd² = 4, σ² = 4/3.
    result = reinforce_pp(torch.tensor([[0, 1], [0, 3]], dtype=F64), torch.ones(2, 2))
    a = 1 / math.sqrt(4 / 3 + 1e-8)
    assert result.tolist() == [[-a, -a], [a, a]]


# γ = ½, λ = ½, r = (0, 0, 1), V = (½, ¼, ¾):
# δ = (½·¼ − ½, ½·¾ − ¼, 1 − ¾) = (−⅜, ⅛, ¼); A₃ = ¼, A₂ = ⅛ + ¼·¼ = 0.1875, A₁ = −⅜ + ¼·0.1875 = −0.328125
GAE_ADVANTAGES = [-0.328125, 0.1875, 0.25]
GAE_RETURNS = [0.171875, 0.4375, 1.0]


def test_gae_by_hand():
    advantages, returns = gae(
        torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.25, 0.75]]), torch.ones(1, 3), gamma=0.5, lam=0.5
    )
    assert advantages.tolist() == [GAE_ADVANTAGES]
    assert returns.tolist() == [GAE_RETURNS]


@pytest.mark.parametrize("junk", [99.0, NAN, INF])
def test_gae_by_hand_with_holes_and_padding(junk):
    J = junk
    rewards = torch.tensor([[0.0, J, J, 0.0, 1.0, J], [J, 0.0, 0.0, J, 1.0, J]])
    values = torch.tensor([[0.5, J, J, 0.25, 0.75, J], [J, 0.5, 0.25, J, 0.75, J]])
    mask = torch.tensor([[1, 0, 0, 1, 1, 0], [0, 1, 1, 0, 1, 0]])
    (a, b, c), (x, y, z) = GAE_ADVANTAGES, GAE_RETURNS
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[a, 0, 0, b, c, 0], [0, a, b, 0, c, 0]]
    assert returns.tolist() == [[x, 0, 0, y, z, 0], [0, x, y, 0, z, 0]]


def test_gae_of_a_row_without_counted_tokens_is_zero():
    ones = torch.ones(2, 2)
    advantages, returns = gae(ones, 3 * ones, torch.tensor([[0, 0], [0, 1]]))
    assert advantages.tolist() == [[0, 0], [0, -2]]
    assert returns.tolist() == [[0, 0], [0, 1]]


# --- properties ------------------------------------------------------------------------------------------------------


@PROPERTY
@given(batch=token_batches())
def test_whitened_tokens_have_mean_zero_and_variance_one(batch):
    x, _, mask = batch
    whitened = whiten(x, mask, eps=1e-300)[mask]
    n = len(whitened)
    # ≤ 21 numbers ≤ 20 apart: a deviation carries ≤ (21 + 2)·20·1.1e-16 ≈ 5e-14, divided by σ. Below σ ~ 1e-3 (equal or
    # nearly equal numbers) that says nothing; above it the errors of mean and variance stay below n·1e-10 and 2·1e-10.
    if x[mask].std() > 1e-3:
        assert abs(float(whitened.sum())) <= n * 1e-10
        assert abs(float(whitened.square().sum()) / (n - 1) - 1) <= 2e-10


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@PROPERTY
@given(value=st.floats(-1e6, 1e6), n=st.integers(2, 11))
def test_whiten_of_equal_entries_is_exactly_zero(dtype, value, n):
    x = torch.full((2, n), value, dtype=dtype)
    assert torch.equal(whiten(x, torch.ones(2, n)), torch.zeros(2, n, dtype=dtype))


@PROPERTY
@given(batch=token_batches(dyadic=True), gamma=st.sampled_from([0.0, 0.5, 1.0]))
def test_reinforce_pp_is_the_whitened_return_to_go(batch, gamma):
    rewards, _, mask = batch
    returns = torch.full_like(rewards, NAN)
    for b, row in enumerate(mask):
        counted = counted_sequence(row)
        for i, t in enumerate(counted):
            returns[b, t] = sum(gamma**j * float(rewards[b, s]) for j, s in enumerate(counted[i:]))
    # γ = ½ over at most seven tokens: k/64/2⁶, still exact.
    assert torch.equal(reinforce_pp(rewards, mask, gamma), whiten(returns, mask))


@PROPERTY
@given(batch=token_batches(dyadic=True))
def test_gae_lambda_one_gamma_one_is_return_to_go_minus_value(batch):
    rewards, values, mask = batch
    advantages, returns = gae(rewards, values, mask)
    to_go = torch.where(mask, rewards, 0).flip(1).cumsum(1).flip(1)
    zero = torch.zeros((), dtype=F64)
    assert torch.equal(advantages, torch.where(mask, to_go - values, zero))
    assert torch.equal(returns, torch.where(mask, to_go, zero))


@PROPERTY
@given(batch=token_batches(dyadic=True), gamma=st.sampled_from([0.0, 0.25, 1.0]))
def test_gae_lambda_zero_is_the_one_step_td_error(batch, gamma):
    rewards, values, mask = batch
    expected = torch.zeros_like(rewards)
    for b, row in enumerate(mask):
        counted = counted_sequence(row)
        for i, t in enumerate(counted):
            next_value = float(values[b, counted[i + 1]]) if i + 1 < len(counted) else 0.0
            expected[b, t] = float(rewards[b, t]) + gamma * next_value - float(values[b, t])
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=0.0)
    assert torch.equal(advantages, expected)
    assert torch.equal(returns, torch.where(mask, expected + values, 0.0))


@PROPERTY
@given(batch=token_batches(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_on_a_holed_mask_is_gae_on_the_compacted_sequence(batch, gamma, lam):
    rewards, values, mask = batch
    holed = gae(rewards, values, mask, gamma, lam)
    for b, row in enumerate(mask):
        if not row.any():
            continue
        r, v = rewards[b, row][None], values[b, row][None]
        compact = gae(r, v, torch.ones_like(r), gamma, lam)
        # The same operations on the same numbers in the same order.
        assert torch.equal(holed[0][b, row][None], compact[0])
        assert torch.equal(holed[1][b, row][None], compact[1])


TOKEN_ESTIMATORS = {
    "gae": lambda r, v, m: gae(r, v, m, 0.9, 0.8)[0],
    "gae returns": lambda r, v, m: gae(r, v, m, 0.9, 0.8)[1],
    "reinforce_pp": lambda r, v, m: reinforce_pp(r, m, 0.9),
    "whiten": lambda r, v, m: whiten(r, m),
    # two samples per prompt with the same mask; the reward of sample i is i, so that the deviations are ±½
    "reinforce_pp_baseline": lambda r, v, m: reinforce_pp_baseline(
        torch.arange(2 * len(m), dtype=F64), m.repeat_interleave(2, dim=0), group_size=2
    )[::2],
}


@pytest.mark.parametrize("estimator", TOKEN_ESTIMATORS.values(), ids=TOKEN_ESTIMATORS.keys())
@PROPERTY
@given(batch=token_batches(), data=st.data())
def test_masked_columns_of_nan_change_no_bit(estimator, batch, data):
    rewards, values, mask = batch
    T = mask.shape[1]
    width = data.draw(st.integers(T + 1, T + 6))
    kept = sorted(data.draw(st.permutations(range(width)))[:T])  # where the old columns go
    junk = data.draw(st.sampled_from([NAN, INF, -INF]))

    def widen(x: torch.Tensor, fill: float) -> torch.Tensor:
        wide = torch.full((len(x), width), fill, dtype=x.dtype)
        wide[:, kept] = x
        return wide

    before = estimator(rewards, values, mask)
    after = estimator(widen(rewards, junk), widen(values, junk), widen(mask, False))
    assert torch.equal(after, widen(before, 0.0))
    assert torch.equal(before[~mask], torch.zeros_like(before[~mask]))


# --- dtypes, masks and constants -------------------------------------------------------------------------------------

REWARDS = torch.tensor([[0.0, 3.0, 1.0], [2.0, 5.0, 0.0]])
VALUES = torch.tensor([[1.0, 2.0, 0.0], [4.0, 1.0, 3.0]])
MASK = torch.tensor([[True, False, True], [True, True, False]])


@pytest.mark.parametrize("estimator", TOKEN_ESTIMATORS.values(), ids=TOKEN_ESTIMATORS.keys())
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.float16, F64])
def test_a_mask_of_zeros_and_ones_of_any_dtype(estimator, dtype):
    assert torch.equal(estimator(REWARDS, VALUES, MASK.to(dtype)), estimator(REWARDS, VALUES, MASK))


@pytest.mark.parametrize("name", ["gae", "gae returns", "reinforce_pp", "whiten"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32])
def test_other_dtypes_are_computed_in_float32(name, dtype):
    result = TOKEN_ESTIMATORS[name](REWARDS.to(dtype), VALUES.to(dtype), MASK)
    assert result.dtype == torch.float32
    assert torch.equal(result, TOKEN_ESTIMATORS[name](REWARDS, VALUES, MASK))


@pytest.mark.parametrize("name", ["gae", "gae returns", "reinforce_pp", "whiten"])
def test_float64_is_computed_in_float64(name):
    # 2⁻⁴⁰ beside 1 is lost in float32; the first row's result must feel it.
    tiny = REWARDS.to(F64) + torch.tensor([[0, 0, 2**-40], [0, 0, 0]], dtype=F64)
    result = TOKEN_ESTIMATORS[name](tiny, VALUES, MASK)
    assert result.dtype == F64
    assert result[0, 2] != TOKEN_ESTIMATORS[name](REWARDS.to(F64), VALUES, MASK)[0, 2]


def test_gae_with_float64_values_alone_is_float64():
    advantages, returns = gae(REWARDS, VALUES.to(F64) + 2**-40, MASK)
    assert advantages.dtype == returns.dtype == F64
    assert float(advantages[0, 2]) == 1 - 2**-40  # r − V of the last counted token


@pytest.mark.parametrize("name", ["gae", "gae returns", "reinforce_pp", "whiten"])
def test_results_carry_no_gradient_and_leave_the_inputs_alone(name):
    rewards, values = REWARDS.clone().requires_grad_(), VALUES.clone().requires_grad_()
    mask = MASK.float().requires_grad_()
    result = TOKEN_ESTIMATORS[name](rewards, values, mask)
    assert not result.requires_grad
    result += 1
    assert torch.equal(rewards, REWARDS)
    assert torch.equal(values, VALUES)
    assert torch.equal(mask, MASK.float())
