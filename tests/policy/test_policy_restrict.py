"""``restrict``: new logits on an old support."""

from __future__ import annotations

import math

import pytest
import torch
from policy_cases import F32, F64, INF, close, dense, each_impl, ids, normal, refuses, same_bits, same_policy, ulp

from troll.errors import InputError
from troll.policy import SparsePolicy, restrict, sparsify

_impl = each_impl()

DTYPES = [torch.bfloat16, torch.float16, F32, F64]


def pair(dtype: torch.dtype = F64, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, SparsePolicy]:
    """Logits, old logits and the old policy of six positions over 15 tokens, about half of the support used."""
    old_logits = normal(2, 3, 15, seed=90, scale=3.0, dtype=dtype)
    logits = (old_logits.double() + normal(2, 3, 15, seed=91, dtype=F64)).to(dtype)
    return logits, old_logits, sparsify(old_logits, ids(2, 3, below=15, seed=92), 6, 0.05, temperature=temperature)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_on_its_own_support_it_is_sparsify_bit_for_bit(dtype: torch.dtype, temperature: float) -> None:
    _, old_logits, old = pair(dtype, temperature)
    assert old.support_size.float().mean().item() < 6
    leaf, again = old_logits.clone().requires_grad_(), old_logits.clone().requires_grad_()
    restricted = restrict(leaf, old)
    assert same_policy(restricted, old)
    selected = sparsify(again, old.sampled, 6, 0.05, temperature=temperature)
    for policy in (restricted, selected):
        (policy.sampled_log_probs.sum() + policy.log_tail.sum()).backward()
    assert same_bits(leaf.grad, again.grad)
    assert leaf.grad.abs().max().item() > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_numbers_and_gradients_are_those_of_the_full_softmax(dtype: torch.dtype, temperature: float) -> None:
    logits, _, old = pair(dtype, temperature)
    leaf, truth = logits.clone().requires_grad_(), logits.double().requires_grad_()
    policy = restrict(leaf, old)
    assert torch.equal(policy.token_ids, old.token_ids)
    assert (policy.vocab_size, policy.temperature) == (15, temperature)
    log_probs, log_tail = dense(truth.reshape(6, 15), old.token_ids.reshape(6, -1), temperature)
    used = old.token_ids >= 0
    # as for sparsify: three roundings of numbers below 32
    budget = 2 * ulp(31, policy.log_probs.dtype)
    torch.testing.assert_close(policy.log_probs[used].double(), log_probs.reshape(2, 3, -1)[used], rtol=0, atol=budget)
    torch.testing.assert_close(policy.log_tail.double(), log_tail.reshape(2, 3), rtol=0, atol=2 * budget)
    (policy.log_probs[used].sum() - 2 * policy.log_tail.sum()).backward()
    (log_probs[used.reshape(6, -1)].sum() - 2 * log_tail.sum()).backward()
    # sums of at most 8 products, through numbers below 32
    work = policy.log_probs.dtype
    atol = 256 * torch.finfo(work).eps
    torch.testing.assert_close(leaf.grad.double(), truth.grad, rtol=torch.finfo(dtype).eps, atol=atol)


def test_the_tail_by_hand() -> None:
    old = sparsify(torch.tensor([0.5, 0.3, 0.1, 0.1], dtype=F64).log(), torch.tensor(1), 2, 0.0)
    assert old.token_ids.tolist() == [1, 0]
    policy = restrict(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=F64).log(), old)
    assert policy.log_probs.exp().tolist() == close([0.2, 0.1], rel=1e-15)
    assert policy.log_tail.exp().item() == close(0.7, rel=1e-15)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (2, 1, 2)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    n = math.prod(shape)
    logits, sampled = normal(n, 9, seed=93), ids(n, below=9, seed=94)
    flat = sparsify(logits, sampled, 3)
    old = sparsify(logits.reshape(*shape, 9), sampled.reshape(shape), 3)
    policy = restrict(logits.reshape(*shape, 9) * 2, old)
    assert policy.shape == shape
    expected = restrict(logits * 2, flat)
    assert torch.equal(policy.token_ids.reshape(n, 3), expected.token_ids)
    assert same_bits(policy.log_probs.reshape(n, 3), expected.log_probs)
    assert same_bits(policy.log_tail.reshape(n), expected.log_tail)


def test_masked_positions_of_the_old_policy_stay_masked() -> None:
    logits, old_logits, dense_old = pair()
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    old = sparsify(old_logits, dense_old.sampled, 6, 0.05, loss_mask=mask)
    leaf = logits.clone()
    leaf[0, 1] = math.nan  # masked by the old policy
    leaf[1, 0, 3] = INF  # masked here
    leaf.requires_grad_()
    policy = restrict(leaf, old, loss_mask=torch.tensor([[1, 1, 1], [0, 1, 1]]))
    expected = torch.tensor([[True, False, True], [False, True, False]])
    assert torch.equal(policy.valid, expected)
    (policy.log_tail.sum() + policy.log_probs[policy.token_ids >= 0].sum()).backward()
    assert same_bits(leaf.grad[~expected], torch.zeros(3, 15, dtype=F64))
    assert same_policy(policy[expected], restrict(logits, dense_old)[expected])
    assert leaf.grad[expected].abs().amax(-1).min().item() > 0.01


def test_tokens_that_became_impossible_leave_the_support() -> None:
    old = sparsify(torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]], dtype=F64), torch.tensor([2]), 4, 0.0)
    assert old.token_ids.tolist() == [[2, 0, 1, 3]]
    leaf = torch.tensor([[-INF, 0.0, 0.0, -INF, 0.0]], dtype=F64, requires_grad=True)
    policy = restrict(leaf, old)
    assert policy.token_ids.tolist() == [[2, -1, 1, -1]]
    third = math.log(1 / 3)
    assert policy.log_probs.tolist()[0] == close([third, -INF, third, -INF], rel=1e-15)
    assert policy.log_tail.item() == close(third, rel=1e-15)
    (policy.sampled_log_probs.sum() + policy.log_tail.sum()).backward()
    assert leaf.grad[0].tolist() == close([0.0, -2 / 3, 1 / 3, 0.0, 1 / 3], rel=1e-14)


@pytest.mark.parametrize("broken", [math.nan, INF, -INF])
def test_broken_logits_are_refused_or_masked(broken: float) -> None:
    logits, _, old = pair()
    logits[1, 1] = broken
    with refuses("position [1, 1] (1 such positions)", "must be finite", "on_invalid='mask'"):
        restrict(logits, old)
    policy = restrict(logits, old, on_invalid="mask")
    assert policy.valid.tolist() == [[True, True, True], [True, False, True]]


def test_a_sampled_token_that_became_impossible_is_refused_or_masked() -> None:
    logits, _, old = pair()
    token = int(old.sampled[0, 2])
    logits[0, 2, token] = -INF
    with refuses(f"token {token} with logit −inf at position [0, 2]", "can be sampled"):
        restrict(logits, old)
    assert restrict(logits, old, on_invalid="mask").valid.tolist() == [[True, True, False], [True, True, True]]


def test_mismatches_are_refused() -> None:
    logits, _, old = pair()
    with refuses("got 16 and 15 tokens", "the same vocabulary", "same model"):
        restrict(torch.cat([logits, logits[..., :1]], -1), old)
    with refuses("where old has shape [...], got [2, 4, 15] and [2, 3]"):
        restrict(torch.zeros(2, 4, 15), old)
    with refuses("got 'drop'"):
        restrict(logits, old, on_invalid="drop")  # type: ignore[arg-type]


def test_a_smaller_vocabulary_is_refused_also_where_it_lacks_the_sampled_token() -> None:
    logits = normal(1, 8, seed=95)
    for token in (0, 7):
        with pytest.raises(
            InputError, match=r"the same vocabulary, got 7 and 8 tokens\. Score both with the same model, .*\."
        ):
            restrict(logits[:, :7], sparsify(logits, torch.tensor([token]), 4))


@pytest.mark.parametrize("shape", [(3,), (2, 1), (2, 4)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    logits, _, old = pair()
    with refuses("loss_mask"):
        restrict(logits, old, loss_mask=torch.ones(shape))
