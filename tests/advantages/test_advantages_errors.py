"""Every refusal, word by word where the words carry information: what was given, what was expected, what to try."""

from __future__ import annotations

import math

import pytest
import torch

import troll.advantages
from troll.advantages import dr_grpo, gae, grpo, reinforce_pp, reinforce_pp_baseline, rloo, whiten
from troll.errors import InputError

NAN, INF = math.nan, math.inf
ONES = torch.ones(2, 3)
PAIR = torch.tensor([0.0, 1.0])


def baseline(rewards, groups):
    return reinforce_pp_baseline(rewards, groups, torch.ones(4, 2))


def gae_rewards(x, mask):
    return gae(x, torch.zeros(2, 3), mask)


def gae_values(x, mask):
    return gae(torch.zeros(2, 3), x, mask)


GROUP = pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo, baseline])
TOKEN = pytest.mark.parametrize(
    ("estimator", "name"),
    [(gae_rewards, "token_rewards"), (gae_values, "values"), (reinforce_pp, "token_rewards"), (whiten, "values")],
)
OVERFLOW = "numbers whose sums and squares stay below 3.4e+38"


def refuse(given, expected, hint, function, *args, **kwargs):
    """Call, and compare all three parts of the refusal; ``hint`` may be a part of it."""
    with pytest.raises(InputError) as error:
        function(*args, **kwargs)
    assert error.value.problem == f"Got {given}, expected {expected}"
    assert hint in error.value.fix


# --- groups ----------------------------------------------------------------------------------------------------------


@GROUP
@pytest.mark.parametrize(
    ("groups", "given"),
    [
        (1, "group 0 with a single sample, rewards[0] (4 such groups)"),
        (torch.tensor([5, 9, 5, 5]), "group 9 with a single sample, rewards[1] (1 such groups)"),
        (torch.tensor([8, -3, 8, 4]), "group -3 with a single sample, rewards[1] (2 such groups)"),
    ],
)
def test_a_single_sample_has_no_baseline(estimator, groups, given):
    expected = "at least 2 samples in every group: one sample has no baseline"
    refuse(given, expected, "at least 2 samples per prompt, or reinforce_pp", estimator, torch.arange(4.0), groups)


@GROUP
@pytest.mark.parametrize("size", [3, 8, 0, -2])
def test_group_size_must_divide_the_batch(estimator, size):
    given, expected = f"groups={size} with B=4 rewards", "a group size ≥ 2 that divides B"
    refuse(given, expected, "tensor [B] of group ids", estimator, torch.arange(4.0), size)


@GROUP
@pytest.mark.parametrize(
    ("groups", "type_name"), [(True, "bool"), (2.0, "float"), (["a", "a", "b", "b"], "list"), (None, "NoneType")]
)
def test_groups_must_be_an_int_or_a_tensor(estimator, groups, type_name):
    expected = "an int, the group size, or an integer tensor [B] of group ids"
    refuse(f"groups of type {type_name}", expected, "return_inverse", estimator, torch.arange(4.0), groups)


@GROUP
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_group_ids_must_be_integers(estimator, dtype):
    groups = torch.tensor([0, 0, 1, 1]).to(dtype)
    refuse(f"groups of dtype {dtype}", "integer group ids", "groups.long()", estimator, torch.arange(4.0), groups)


@GROUP
@pytest.mark.parametrize("shape", [(3,), (4, 1), ()])
def test_group_ids_must_be_one_per_reward(estimator, shape):
    given = f"groups of shape {shape} with rewards of shape (4,)"
    groups = torch.zeros(shape, dtype=torch.long)
    refuse(given, "one group id per reward, [B]", "consecutive blocks", estimator, torch.arange(4.0), groups)


@GROUP
def test_group_ids_must_be_on_the_device_of_the_rewards(estimator):
    groups = torch.zeros(4, dtype=torch.long, device="meta")
    given, hint = "rewards on cpu with groups on meta", "groups.to(rewards.device)"
    refuse(given, "both on one device", hint, estimator, torch.arange(4.0), groups)


# --- rewards per sample ----------------------------------------------------------------------------------------------


@GROUP
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_rewards_must_be_finite(estimator, bad, dtype):
    rewards = torch.tensor([0, 1, bad, bad], dtype=dtype)
    given, expected = f"rewards[2] = {bad} (2 such entries)", "a finite number wherever it counts"
    refuse(given, expected, "left out with its group", estimator, rewards, 2)


@GROUP
@pytest.mark.parametrize("shape", [(4, 1), (2, 2), ()])
def test_rewards_must_be_one_per_sample(estimator, shape):
    refuse(f"rewards of shape {shape}", "shape [B]", "B samples", estimator, torch.ones(shape), 2)


@GROUP
def test_rewards_must_be_a_real_non_empty_tensor(estimator):
    given = "rewards of type list"
    refuse(given, "a torch tensor [B]", "torch.as_tensor(rewards)", estimator, [0.0, 1.0, 2.0, 3.0], 2)
    refuse("rewards of shape (0,)", "a non-empty [B]", "leave an empty batch out", estimator, torch.ones(0), 2)
    complex_rewards = torch.ones(4, dtype=torch.complex64)
    real = "bool, integer or floating numbers"
    refuse("rewards of dtype torch.complex64", real, "rewards.real", estimator, complex_rewards, 2)


@pytest.mark.parametrize("B", [2, 6])
def test_baseline_needs_a_row_of_the_mask_per_reward(B):
    given = f"loss_mask of shape (4, 2) with rewards of shape ({B},)"
    refuse(given, "one row [T] of loss_mask per reward", "same order", baseline, torch.arange(float(B)), 2)


# --- rewards and values per token ------------------------------------------------------------------------------------


@TOKEN
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_tokens_must_be_finite_where_they_count(estimator, name, bad):
    x = torch.tensor([[0.0, NAN, 1.0], [2.0, 3.0, bad]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    given, expected = f"{name}[1, 2] = {bad} (1 such entries)", "a finite number wherever it counts"
    refuse(given, expected, "look at what produced this entry", estimator, x, mask)


@TOKEN
@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (1, 3), (2, 1)])  # the last two would broadcast
def test_tokens_must_have_the_shape_of_the_mask(estimator, name, shape):
    given = f"{name} of shape {shape} with loss_mask of shape (2, 3)"
    refuse(given, "the same [B, T] for both", "without the prompt", estimator, torch.ones(shape), ONES)


@TOKEN
def test_tokens_must_be_a_real_non_empty_matrix(estimator, name):
    refuse(f"{name} of shape (3,)", "shape [B, T]", "T completion tokens", estimator, torch.ones(3), ONES)
    refuse(f"{name} of shape (2, 3, 1)", "shape [B, T]", "B samples", estimator, torch.ones(2, 3, 1), ONES)
    refuse(f"{name} of shape (0, 3)", "a non-empty [B, T]", "empty batch", estimator, torch.ones(0, 3), ONES)
    refuse(f"{name} of type list", "a torch tensor [B, T]", f"torch.as_tensor({name})", estimator, [[1.0]], ONES)
    real = "bool, integer or floating numbers"
    refuse(f"{name} of dtype torch.complex64", real, f"{name}.real", estimator, ONES.to(torch.complex64), ONES)


@TOKEN
def test_tokens_must_be_on_the_device_of_the_mask(estimator, name):
    given, hint = f"{name} on meta with loss_mask on cpu", f"loss_mask.to({name}.device)"
    refuse(given, "both on one device", hint, estimator, torch.ones(2, 3, device="meta"), ONES)


# --- the mask --------------------------------------------------------------------------------------------------------

MASKED = pytest.mark.parametrize(
    "estimator",
    [
        lambda mask: gae(ONES, ONES, mask),
        lambda mask: reinforce_pp(ONES, mask),
        lambda mask: whiten(ONES, mask),
        lambda mask: reinforce_pp_baseline(PAIR, 2, mask),
    ],
    ids=["gae", "reinforce_pp", "whiten", "reinforce_pp_baseline"],
)


@MASKED
@pytest.mark.parametrize("bad", [2.0, -1.0, 0.5, NAN])
def test_the_mask_is_zero_or_one(estimator, bad):
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, bad, 1.0]])
    refuse(f"loss_mask[1, 1] = {bad}", "only 0 and 1, or bool", "loss_mask != 0", estimator, mask)


@MASKED
def test_the_mask_must_be_a_real_non_empty_matrix(estimator):
    refuse("loss_mask of type list", "a torch tensor [B, T]", "torch.as_tensor(loss_mask)", estimator, [[1, 1, 1]] * 2)
    refuse("loss_mask of shape (3,)", "shape [B, T]", "T completion tokens", estimator, torch.ones(3))
    refuse("loss_mask of shape (2, 0)", "a non-empty [B, T]", "empty batch", estimator, torch.ones(2, 0))
    real = "bool, integer or floating numbers"
    refuse("loss_mask of dtype torch.complex64", real, "loss_mask.real", estimator, ONES.to(torch.complex64))


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize(
    "estimator",
    [
        lambda mask: reinforce_pp(ONES, mask),
        lambda mask: whiten(ONES, mask),
        lambda mask: reinforce_pp_baseline(PAIR, 2, mask),
    ],
    ids=["reinforce_pp", "whiten", "reinforce_pp_baseline"],
)
def test_whitening_needs_two_counted_tokens(estimator, n):
    mask = torch.zeros(2, 3)
    mask[1, :n] = 1
    given, expected = f"loss_mask with {n} counted tokens", "at least 2: one has no variance"
    refuse(given, expected, "a larger batch", estimator, mask)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-0.1, 1.1, NAN, INF, "1", None, torch.tensor(0.5)])
def test_gamma_and_lambda_lie_between_zero_and_one(bad):
    expected = "a number in [0.0, 1.0]"
    refuse(f"gamma={bad!r}", expected, "gamma=1.0, the default", gae, ONES, ONES, ONES, gamma=bad)
    refuse(f"lam={bad!r}", expected, "lam=1.0, the default", gae, ONES, ONES, ONES, lam=bad)
    refuse(f"gamma={bad!r}", expected, "gamma=1.0, the default", reinforce_pp, ONES, ONES, gamma=bad)


@pytest.mark.parametrize("bad", [0, -1e-4, NAN, INF, "1e-4", None])
def test_eps_is_positive(bad):
    expected = "a finite number > 0"
    refuse(f"eps={bad!r}", expected, "eps=0.0001, the default", grpo, PAIR, 2, eps=bad)
    refuse(f"eps={bad!r}", expected, "eps=1e-08, the default", whiten, ONES, ONES, eps=bad)


@pytest.mark.parametrize(
    ("what", "function", "args"),
    [
        # 1e30² overflows; without the check σ = ∞ and every advantage of the group is silently 0
        ("variance", grpo, (torch.tensor([1e30, -1e30]), 2)),
        ("variance", whiten, (torch.tensor([[1e30, -1e30]]), torch.ones(1, 2))),
        ("group mean", dr_grpo, (torch.tensor([3e38, -3e38]), 2)),
        ("group mean", rloo, (torch.tensor([3e38, -3e38]), 2)),
        ("group mean", reinforce_pp_baseline, (torch.tensor([3e38, -3e38]), 2, torch.ones(2, 1))),
        ("discounted sum", reinforce_pp, (torch.tensor([[3e38, 3e38]]), torch.ones(1, 2))),
        ("discounted sum", gae, (torch.tensor([[3e38, 3e38]]), torch.zeros(1, 2), torch.ones(1, 2))),
    ],
)
def test_overflow_is_refused(what, function, args):
    given = f"finite numbers whose {what} overflows torch.float32"
    refuse(given, OVERFLOW, "rescale the rewards, or pass them as float64", function, *args)


def test_public_names():
    assert set(troll.advantages.__all__) == {
        "dr_grpo", "gae", "grpo", "reinforce_pp", "reinforce_pp_baseline", "rloo", "whiten",
    }  # fmt: skip
    assert all(callable(getattr(troll.advantages, name)) for name in troll.advantages.__all__)
