"""Every refusal: the problem word by word, and the part of the fix that carries information."""

from __future__ import annotations

import math

import pytest
import torch

import troll.advantages
from troll.advantages import dr_grpo, gae, grpo, reinforce_pp, reinforce_pp_baseline, rloo, whiten
from troll.errors import InputError
from troll.inputs import describe

NAN, INF = math.nan, math.inf
ONES = torch.ones(2, 3)
PAIR = torch.tensor([0.0, 1.0])
ONE_GROUP = torch.tensor([0, 0])


def baseline(rewards, groups=None, **kwargs):
    return reinforce_pp_baseline(rewards, torch.ones(4, 2), groups, **kwargs)


def gae_rewards(x, mask):
    return gae(x, torch.zeros(2, 3), mask)


def gae_values(x, mask):
    return gae(torch.zeros(2, 3), x, mask)


GROUP = pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo, baseline])
TOKEN = pytest.mark.parametrize(
    ("estimator", "name"),
    [(gae_rewards, "token_rewards"), (gae_values, "values"), (reinforce_pp, "token_rewards"), (whiten, "values")],
)


def refuse(problem, fix, function, *args, **kwargs):
    """Call, and compare both sentences of the refusal; ``fix`` may be a part of its sentence."""
    with pytest.raises(InputError) as error:
        function(*args, **kwargs)
    assert error.value.problem == problem
    assert fix in error.value.fix


# --- groups ----------------------------------------------------------------------------------------------------------


@GROUP
@pytest.mark.parametrize(
    ("groups", "group", "sample", "count"),
    [
        ({"group_size": 1}, 0, 0, "4 of 4"),
        ({"groups": torch.tensor([5, 9, 5, 5])}, 9, 1, "1 of 2"),
        ({"groups": torch.tensor([8, -3, 8, 4])}, -3, 1, "2 of 3"),
    ],
)
def test_a_single_sample_has_no_baseline(estimator, groups, group, sample, count):
    problem = (
        f"Group {group} has a single sample, rewards[{sample}], and so no baseline (groups of one sample: {count})"
    )
    refuse(problem, "at least 2 completions per prompt, or use reinforce_pp", estimator, torch.arange(4.0), **groups)


@GROUP
@pytest.mark.parametrize("size", [3, 8, 0, -2, True, 2.0, torch.tensor([0, 0, 1, 1])])
def test_group_size_must_divide_the_batch(estimator, size):
    problem = f"group_size must be an integer ≥ 2 that divides the number of rewards, 4, got {describe(size)}"
    refuse(problem, "pass groups=ids, an integer tensor [B]", estimator, torch.arange(4.0), group_size=size)


@GROUP
@pytest.mark.parametrize("size", [2, 4])
def test_an_int_is_no_tensor_of_group_ids(estimator, size):
    problem = f"groups must be a tensor of group ids, got the int {size}"
    refuse(problem, f"pass group_size={size}", estimator, torch.arange(4.0), size)
    refuse(problem, f"pass group_size={size}", estimator, torch.arange(4.0), groups=size)


@GROUP
def test_groups_are_given_in_exactly_one_way(estimator):
    problem, fix = "Exactly one of groups and group_size is required, got", "Pass group_size=G"
    refuse(f"{problem} neither", fix, estimator, torch.arange(4.0))
    refuse(f"{problem} both", fix, estimator, torch.arange(4.0), torch.tensor([0, 0, 1, 1]), group_size=2)


@GROUP
@pytest.mark.parametrize(("groups", "shown"), [(True, "True"), (2.0, "2.0"), (["a", "a", "b", "b"], "a list")])
def test_groups_must_be_a_tensor(estimator, groups, shown):
    problem = f"groups must be an integer tensor [B] of group ids, got {shown}"
    refuse(problem, "return_inverse", estimator, torch.arange(4.0), groups)


@GROUP
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_group_ids_must_be_integers(estimator, dtype):
    groups = torch.tensor([0, 0, 1, 1]).to(dtype)
    refuse(f"groups must contain integer ids, got {dtype}", "groups.long()", estimator, torch.arange(4.0), groups)


@GROUP
@pytest.mark.parametrize("shape", [(3,), (4, 1), ()])
def test_group_ids_must_be_one_per_reward(estimator, shape):
    problem = f"groups must have one id per reward, got shape {shape} for rewards of shape (4,)"
    groups = torch.zeros(shape, dtype=torch.long)
    refuse(problem, "pass group_size=G", estimator, torch.arange(4.0), groups)


@GROUP
def test_group_ids_must_be_on_the_device_of_the_rewards(estimator):
    groups = torch.zeros(4, dtype=torch.long, device="meta")
    problem = "rewards and groups must be on the same device, got cpu and meta"
    refuse(problem, "groups.to(rewards.device)", estimator, torch.arange(4.0), groups)


# --- rewards per sample ----------------------------------------------------------------------------------------------


@GROUP
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_rewards_must_be_finite(estimator, bad, dtype):
    rewards = torch.tensor([0, 1, bad, bad], dtype=dtype)
    problem = f"rewards must be finite where they count, got rewards[2] = {bad} (entries that are not finite: 2)"
    refuse(problem, "leave out a group", estimator, rewards, group_size=2)


@GROUP
@pytest.mark.parametrize("shape", [(4, 1), (2, 2), ()])
def test_rewards_must_be_one_per_sample(estimator, shape):
    problem = f"rewards must have shape [B], got {shape}"
    refuse(problem, "number of samples", estimator, torch.ones(shape), group_size=2)


@GROUP
def test_rewards_must_be_a_real_non_empty_tensor(estimator):
    problem = "rewards must be a tensor [B], got a list"
    refuse(problem, "torch.as_tensor(rewards)", estimator, [0.0, 1.0, 2.0, 3.0], group_size=2)
    problem = "rewards must not be empty, got shape (0,)"
    refuse(problem, "Leave empty batches out", estimator, torch.ones(0), group_size=2)
    problem = "rewards must have real entries, got complex64"
    refuse(problem, "rewards.real", estimator, torch.ones(4, dtype=torch.complex64), group_size=2)


@pytest.mark.parametrize("B", [2, 6])
def test_baseline_needs_a_row_of_the_mask_per_reward(B):
    problem = f"loss_mask must have one row per reward, got shape (4, 2) for {B} rewards"
    refuse(problem, "same order", baseline, torch.arange(float(B)), group_size=2)


# --- rewards and values per token ------------------------------------------------------------------------------------


@TOKEN
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_tokens_must_be_finite_where_they_count(estimator, name, bad):
    x = torch.tensor([[0.0, NAN, 1.0], [2.0, 3.0, bad]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    problem = f"{name} must be finite where they count, got {name}[1, 2] = {bad} (entries that are not finite: 1)"
    refuse(problem, "Check what produced this entry", estimator, x, mask)


@TOKEN
@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (1, 3), (2, 1)])  # the last two would broadcast
def test_tokens_must_have_the_shape_of_the_mask(estimator, name, shape):
    problem = f"{name} and loss_mask must have the same shape [B, T], got {shape} and (2, 3)"
    refuse(problem, "without the prompt", estimator, torch.ones(shape), ONES)


@TOKEN
def test_tokens_must_be_a_real_non_empty_matrix(estimator, name):
    shape = f"{name} must have shape [B, T], got"
    refuse(f"{shape} (3,)", "number of completion tokens", estimator, torch.ones(3), ONES)
    refuse(f"{shape} (2, 3, 1)", "number of samples", estimator, torch.ones(2, 3, 1), ONES)
    refuse(f"{name} must not be empty, got shape (0, 3)", "empty batches", estimator, torch.ones(0, 3), ONES)
    problem = f"{name} must be a tensor [B, T], got a list"
    refuse(problem, f"torch.as_tensor({name})", estimator, [[1.0]], ONES)
    problem = f"{name} must have real entries, got complex64"
    refuse(problem, f"{name}.real", estimator, ONES.to(torch.complex64), ONES)


@TOKEN
def test_tokens_must_be_on_the_device_of_the_mask(estimator, name):
    problem = f"{name} and loss_mask must be on the same device, got meta and cpu"
    refuse(problem, f"loss_mask.to({name}.device)", estimator, torch.ones(2, 3, device="meta"), ONES)


# --- the mask --------------------------------------------------------------------------------------------------------

MASKED = pytest.mark.parametrize(
    "estimator",
    [
        lambda mask: gae(ONES, ONES, mask),
        lambda mask: reinforce_pp(ONES, mask),
        lambda mask: whiten(ONES, mask),
        lambda mask: reinforce_pp_baseline(PAIR, mask, group_size=2),
    ],
    ids=["gae", "reinforce_pp", "whiten", "reinforce_pp_baseline"],
)


@MASKED
@pytest.mark.parametrize("bad", [2.0, -1.0, 0.5, NAN])
def test_the_mask_is_zero_or_one(estimator, bad):
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, bad, 1.0]])
    problem = f"loss_mask must contain only 0 and 1, got loss_mask[1, 1] = {bad}"
    refuse(problem, "loss_mask != 0", estimator, mask)


@MASKED
def test_the_mask_must_be_a_real_non_empty_matrix(estimator):
    problem = "loss_mask must be a tensor [B, T], got a list"
    refuse(problem, "torch.as_tensor(loss_mask)", estimator, [[1, 1, 1]] * 2)
    problem = "loss_mask must have shape [B, T], got (3,)"
    refuse(problem, "number of completion tokens", estimator, torch.ones(3))
    refuse("loss_mask must not be empty, got shape (2, 0)", "empty batches", estimator, torch.ones(2, 0))
    problem = "loss_mask must have real entries, got complex64"
    refuse(problem, "loss_mask.real", estimator, ONES.to(torch.complex64))


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize(
    "estimator",
    [
        lambda mask: reinforce_pp(ONES, mask),
        lambda mask: whiten(ONES, mask),
        lambda mask: reinforce_pp_baseline(PAIR, mask, group_size=2),
    ],
    ids=["reinforce_pp", "whiten", "reinforce_pp_baseline"],
)
def test_whitening_needs_two_counted_tokens(estimator, n):
    mask = torch.zeros(2, 3)
    mask[1, :n] = 1
    problem = f"whitening needs at least 2 counted tokens, and loss_mask counts {n}"
    refuse(problem, "a larger batch", estimator, mask)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-0.1, 1.1, NAN, INF, "1", None, torch.tensor(0.5)])
def test_gamma_and_lambda_lie_between_zero_and_one(bad):
    gamma, lam = (f"{name} must be a number from 0 to 1, got {describe(bad)}" for name in ("gamma", "lam"))
    refuse(
        gamma, "The default is 1.0" if bad != "1" else "1, without quotation marks", gae, ONES, ONES, ONES, gamma=bad
    )
    refuse(lam, "The default is 1.0" if bad != "1" else "1, without quotation marks", gae, ONES, ONES, ONES, lam=bad)
    refuse(
        gamma, "The default is 1.0" if bad != "1" else "1, without quotation marks", reinforce_pp, ONES, ONES, gamma=bad
    )


@pytest.mark.parametrize("bad", [0, -1e-4, NAN, INF, "1e-4", None])
def test_eps_is_positive(bad):
    problem = f"eps must be a finite number > 0, got {bad!r}"
    fix = "eps=1e-4, without quotation marks" if bad == "1e-4" else "The default is "
    refuse(problem, fix, grpo, PAIR, group_size=2, eps=bad)
    refuse(problem, fix, whiten, ONES, ONES, eps=bad)


@pytest.mark.parametrize(
    ("what", "function", "args"),
    [
        # 1e30² overflows; without the check σ = ∞ and every advantage of the group is silently 0
        ("variance", grpo, (torch.tensor([1e30, -1e30]), ONE_GROUP)),
        ("variance", whiten, (torch.tensor([[1e30, -1e30]]), torch.ones(1, 2))),
        ("group mean", dr_grpo, (torch.tensor([3e38, -3e38]), ONE_GROUP)),
        ("group mean", rloo, (torch.tensor([3e38, -3e38]), ONE_GROUP)),
        ("group mean", reinforce_pp_baseline, (torch.tensor([3e38, -3e38]), torch.ones(2, 1), ONE_GROUP)),
        ("discounted sum", reinforce_pp, (torch.tensor([[3e38, 3e38]]), torch.ones(1, 2))),
        ("discounted sum", gae, (torch.tensor([[3e38, 3e38]]), torch.zeros(1, 2), torch.ones(1, 2))),
    ],
)
def test_overflow_is_refused(what, function, args):
    problem = f"The {what} overflows torch.float32, whose largest number is 3.4e+38"
    refuse(problem, "Rescale the rewards, or pass them as float64", function, *args)


def test_public_names():
    assert set(troll.advantages.__all__) == {
        "dr_grpo", "gae", "grpo", "reinforce_pp", "reinforce_pp_baseline", "rloo", "whiten",
    }  # fmt: skip
    assert all(callable(getattr(troll.advantages, name)) for name in troll.advantages.__all__)
