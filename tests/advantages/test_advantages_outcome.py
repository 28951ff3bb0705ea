"""One reward per sample: numbers by hand, then properties.

The properties use rewards k/64 with |k| ≤ 640. Their sums and differences are exact in float64, in any order, so most
properties hold bit for bit and are asserted with ``torch.equal``; the few tolerances say where the rounding enters.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troll.advantages import dr_grpo, grpo, reinforce_pp_baseline, rloo

F64 = torch.float64
PROPERTY = settings(deadline=None, derandomize=True)  # the same examples in every run
GROUP_ESTIMATORS = [grpo, dr_grpo, rloo]

# Two groups, of 4 and 3 samples, interleaved: group 7 is (1, 0, 0, 0), group −2 is (10, 30, 20).
REWARDS = torch.tensor([1, 10, 0, 30, 0, 20, 0], dtype=F64)
IDS = torch.tensor([7, -2, 7, -2, 7, -2, 7])


@st.composite
def blocks(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Rewards [N·G] in consecutive blocks of G."""
    G = draw(st.integers(2, 6))
    N = draw(st.integers(1, 4))
    k = draw(st.lists(st.integers(-640, 640), min_size=N * G, max_size=N * G))
    return torch.tensor(k, dtype=F64) / 64, G


def baseline_of_one_token(
    rewards: torch.Tensor, groups: torch.Tensor | None = None, group_size: int | None = None
) -> torch.Tensor:
    """reinforce_pp_baseline for completions of a single token: [B]."""
    return reinforce_pp_baseline(rewards, torch.ones(len(rewards), 1), groups, group_size=group_size)[:, 0]


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_grpo_by_hand():
    # (1, 0, 0, 0): mean 1/4, deviations 3/4, −1/4, …; Σd² = 9/16 + 3/16 = 3/4; variance 3/4 / 3 = 1/4; std 1/2
    # (−2, 0, 0, 0): mean −1/2, deviations −3/2, 1/2, …; Σd² = 9/4 + 3/4 = 3; variance 3/3 = 1; std 1
    rewards = torch.tensor([1, 0, 0, 0, -2, 0, 0, 0], dtype=F64)
    a, b = 0.75, 0.25
    expected = torch.tensor([a, -b, -b, -b, -1.5 / 1.5, 0.5 / 1.5, 0.5 / 1.5, 0.5 / 1.5], dtype=F64)
    assert torch.equal(grpo(rewards, group_size=4, eps=0.5), expected)


def test_grpo_default_eps_is_that_of_trl():
    expected = torch.tensor([0.75, -0.25, -0.25, -0.25], dtype=F64) / (0.5 + 1e-4)
    assert torch.equal(grpo(torch.tensor([1, 0, 0, 0], dtype=F64), group_size=4), expected)


def test_grpo_with_ids_by_hand():
    # group 7: std 1/2 as above. group −2: mean 20, deviations −10, 10, 0; variance 200/2 = 100; std 10.
    s, u = 0.5 + 0.5, 10 + 0.5
    expected = torch.tensor([0.75 / s, -10 / u, -0.25 / s, 10 / u, -0.25 / s, 0.0, -0.25 / s], dtype=F64)
    assert torch.equal(grpo(REWARDS, IDS, eps=0.5), expected)


def test_dr_grpo_by_hand():
    expected = torch.tensor([0.75, -10, -0.25, 10, -0.25, 0, -0.25], dtype=F64)
    assert torch.equal(dr_grpo(REWARDS, IDS), expected)


def test_rloo_by_hand():
    # group 7: 1 − 0 = 1 and 0 − (1 + 0 + 0)/3 = −1/3. group −2: 10 − 25 = −15, 30 − 15 = 15, 20 − 20 = 0.
    third = 1 / 3
    expected = torch.tensor([1, -15, -third, 15, -third, 0, -third], dtype=F64)
    # G/(G−1) = 4/3 is rounded and multiplied: at most 2 ulp, 2⁻⁵² ≈ 2.2e-16 relative each.
    torch.testing.assert_close(rloo(REWARDS, IDS), expected, rtol=4.5e-16, atol=0)


def test_reinforce_pp_baseline_by_hand():
    # deviations 1/2, −1/2 | 2, −2 with 2, 1, 1, 1 counted tokens, one behind a hole: x = (½, ½, −½, 2, −2).
    # μ = 0.5/5 = 0.1; x − μ = (0.4, 0.4, −0.6, 1.9, −2.1); Σ = .16 + .16 + .36 + 3.61 + 4.41 = 8.7; σ² = 8.7/4 = 2.175
    rewards = torch.tensor([1, 0, 4, 0], dtype=F64)
    mask = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 1, 0], [1, 0, 0]])
    expected = torch.tensor([[0.4, 0, 0.4], [-0.6, 0, 0], [0, 1.9, 0], [-2.1, 0, 0]], dtype=F64) / (2.175 + 1e-8) ** 0.5
    # About ten roundings of 1.1e-16 on numbers below 4, divided by 1.47.
    torch.testing.assert_close(reinforce_pp_baseline(rewards, mask, group_size=2), expected, rtol=0, atol=4e-15)
    assert torch.equal(reinforce_pp_baseline(rewards, mask, group_size=2)[mask == 0], torch.zeros(7, dtype=F64))


def test_reinforce_pp_baseline_takes_groups_by_id():
    rewards, ids = torch.tensor([1.0, 4.0, 0.0, 0.0]), torch.tensor([5, 3, 5, 3])
    blocks_first = reinforce_pp_baseline(torch.tensor([1.0, 0.0, 4.0, 0.0]), torch.ones(4, 2), group_size=2)
    # Deviations ±1/2, ±2 and their squares are exact in any order.
    assert torch.equal(reinforce_pp_baseline(rewards, torch.ones(4, 2), ids), blocks_first[[0, 2, 1, 3]])


# --- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [*GROUP_ESTIMATORS, baseline_of_one_token])
@PROPERTY
@given(batch=blocks(), shift=st.integers(-6400, 6400))
def test_a_shift_of_all_rewards_changes_nothing(estimator, batch, shift):
    rewards, G = batch
    assert torch.equal(estimator(rewards + shift / 64, group_size=G), estimator(rewards, group_size=G))


@PROPERTY
@given(batch=blocks(), power=st.integers(-8, 8))
def test_grpo_scales_with_eps_exactly(batch, power):
    # (c·d)/(c·σ + c·eps) = d/(σ + eps); a power of two c scales every intermediate without rounding.
    rewards, G = batch
    c = 2.0**power
    assert torch.equal(grpo(c * rewards, group_size=G, eps=c * 2**-13), grpo(rewards, group_size=G, eps=2**-13))


@PROPERTY
@given(batch=blocks(), scale=st.floats(1, 1000))
def test_grpo_is_scale_invariant_up_to_eps(batch, scale):
    # A = d/(σ + eps) and A' = d/(σ + eps/c), c ≥ 1, differ by at most |A|·eps/σ. Rounding: d carries a few times
    # 20·2⁻⁵² and is divided by σ ≥ 1/64/√6 where it is not 0: below 1e-11.
    rewards, G = batch
    std = rewards.view(-1, G).std(dim=1).repeat_interleave(G)
    before, after = grpo(rewards, group_size=G), grpo(scale * rewards, group_size=G)
    bound = torch.where(std > 0, before.abs() * 1e-4 / std + 1e-11, 0.0)  # equal rewards stay exactly 0
    assert ((after - before).abs() <= bound).all()


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@PROPERTY
@given(batch=blocks(), data=st.data())
def test_shuffled_ids_agree_with_blocks(estimator, batch, data):
    rewards, G = batch
    order = torch.tensor(data.draw(st.permutations(range(len(rewards)))))
    names = torch.tensor(data.draw(st.lists(st.integers(-99, 99), min_size=6, max_size=6, unique=True)))
    ids = names[torch.arange(len(rewards)) // G]
    # Sums of rewards are exact. Only grpo's Σd² depends on the order: ≤ 6 additions, 1.1e-16 each, halved by the root.
    rtol = 1e-15 if estimator is grpo else 0
    expected = estimator(rewards, group_size=G)[order]
    torch.testing.assert_close(estimator(rewards[order], ids[order]), expected, rtol=rtol, atol=0)


@PROPERTY
@given(batch=blocks())
def test_rloo_is_a_multiple_of_dr_grpo_and_leaves_one_out(batch):
    rewards, G = batch
    # One factor, rounded once in either order of the operations: 2 ulp.
    torch.testing.assert_close(
        rloo(rewards, group_size=G), dr_grpo(rewards, group_size=G) * G / (G - 1), rtol=4.5e-16, atol=0
    )
    r = [Fraction(x) for x in rewards.tolist()]
    start = [i - i % G for i in range(len(r))]
    leave_one_out = [float(x - (sum(r[s : s + G]) - x) / (G - 1)) for x, s in zip(r, start, strict=True)]
    # Numbers ≤ 20 are rounded in mean, difference and factor, and the factor is ≤ 2: ≤ 2·4·20·1.1e-16.
    torch.testing.assert_close(
        rloo(rewards, group_size=G), torch.tensor(leave_one_out, dtype=F64), rtol=0, atol=1.8e-14
    )


@PROPERTY
@given(batch=blocks())
def test_deviations_sum_to_zero_in_every_group(batch):
    rewards, G = batch
    # G ≤ 6 deviations ≤ 20 carry one rounding each of the mean and of the difference: 6·2·20·1.1e-16.
    assert dr_grpo(rewards, group_size=G).view(-1, G).sum(dim=1).abs().max() <= 2.7e-14


@pytest.mark.parametrize("estimator", [*GROUP_ESTIMATORS, baseline_of_one_token])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@PROPERTY
@given(reward=st.floats(-1e6, 1e6), G=st.integers(2, 11))
def test_equal_rewards_give_exactly_zero(estimator, dtype, reward, G):
    rewards = torch.full((2 * G,), reward, dtype=dtype)
    assert torch.equal(estimator(rewards, group_size=G), torch.zeros(2 * G, dtype=dtype))


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_an_equal_group_beside_a_mixed_one(estimator):
    # 0.1 + 0.1 + 0.1 is not 3·0.1 in float64: a plain mean leaves 1e-17, which grpo divides by eps.
    advantages = estimator(torch.tensor([0.1, 0.1, 0.1, 0, 0, 1], dtype=F64), group_size=3)
    assert torch.equal(advantages[:3], torch.zeros(3, dtype=F64))
    assert advantages[5] > 0 > advantages[3]


# --- dtypes and constants --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [*GROUP_ESTIMATORS, baseline_of_one_token])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.uint8])
def test_other_dtypes_are_computed_in_float32(estimator, dtype):
    rewards = torch.tensor([1, 2, 4, 9, 3, 3], dtype=dtype)
    result = estimator(rewards, group_size=3)
    assert result.dtype == torch.float32
    assert torch.equal(result, estimator(rewards.float(), group_size=3))


@pytest.mark.parametrize("estimator", [*GROUP_ESTIMATORS, baseline_of_one_token])
def test_bool_rewards_are_zero_and_one(estimator):
    assert torch.equal(
        estimator(torch.tensor([True, False, False]), group_size=3),
        estimator(torch.tensor([1.0, 0.0, 0.0]), group_size=3),
    )


@pytest.mark.parametrize("estimator", [*GROUP_ESTIMATORS, baseline_of_one_token])
def test_float64_is_computed_in_float64(estimator):
    rewards = torch.tensor([1.0, 1.0 + 2**-40], dtype=F64)  # equal in float32
    assert estimator(rewards, group_size=2).dtype == F64
    assert estimator(rewards, group_size=2)[1] > 0


@pytest.mark.parametrize("ids", [torch.int8, torch.int32, torch.int64, torch.uint8])
def test_any_integer_dtype_of_ids(ids):
    groups = torch.tensor([3, 1, 3, 1], dtype=ids)
    assert torch.equal(dr_grpo(torch.tensor([1.0, 8.0, 3.0, 4.0]), groups), torch.tensor([-1.0, 2.0, 1.0, -2.0]))


@pytest.mark.parametrize("estimator", [*GROUP_ESTIMATORS, baseline_of_one_token])
def test_advantages_carry_no_gradient_and_leave_the_rewards_alone(estimator):
    rewards = torch.tensor([1.0, 2.0, 4.0, 0.0], requires_grad=True)
    advantages = estimator(rewards, group_size=2)
    assert not advantages.requires_grad
    advantages += 1
    assert rewards.tolist() == [1, 2, 4, 0]


def test_float64_takes_what_overflows_float32():
    # deviations ±1e30; variance 2e60; ±1e30/√2e60 = ±√½. Five roundings of 1.1e-16.
    result = grpo(torch.tensor([1e30, -1e30], dtype=F64), group_size=2)
    torch.testing.assert_close(result, torch.tensor([0.5**0.5, -(0.5**0.5)], dtype=F64), rtol=6e-16, atol=0)
