"""The gradient of the kept log-probabilities and the tail, against plain autograd in float64 and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import F32, F64, INF, at_ids, close, dense, each_impl, ids, normal, same_bits
from torch import Tensor

from troll.policy import SparsePolicy, sparsify

_impl = each_impl()

HALVES = [torch.bfloat16, torch.float16]


def loss(log_probs: Tensor, log_tail: Tensor, token_ids: Tensor, part: str) -> Tensor:
    """A loss with a different weight in every slot and row; unused slots do not count."""
    K, N = token_ids.shape[-1], token_ids.shape[0]
    weight = torch.cos(torch.arange(N * K, dtype=log_probs.dtype).reshape(N, K))
    kept = (log_probs.masked_fill(token_ids < 0, 0.0) * weight).sum()
    tail = (log_tail * torch.sin(torch.arange(1.0, N + 1, dtype=log_tail.dtype))).sum()
    return {"kept": kept, "tail": tail, "both": kept + tail}[part]


def gradients(logits: Tensor, sampled: Tensor, part: str, temperature: float) -> tuple[Tensor, Tensor, SparsePolicy]:
    """Ours, and plain autograd's in float64 on the same support."""
    leaf, truth = logits.clone().requires_grad_(), logits.double().requires_grad_()
    policy = sparsify(leaf, sampled, 5, 1e-3, temperature=temperature)
    loss(policy.log_probs, policy.log_tail, policy.token_ids, part).backward()
    loss(*dense(truth, policy.token_ids, temperature), policy.token_ids, part).backward()
    return leaf.grad, truth.grad, policy


@pytest.mark.parametrize("part", ["kept", "tail", "both"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("dtype", [F64, F32, *HALVES])
def test_gradient_equals_plain_autograd(part: str, temperature: float, dtype: torch.dtype) -> None:
    logits = normal(6, 12, seed=40, scale=2.0, dtype=dtype)
    logits[4, 2] = 28.0  # one token has nearly everything: unused slots
    logits[2, [3, 8]] = -INF
    ours, truth, policy = gradients(logits, torch.tensor([3, 0, 11, 5, 2, 7]), part, temperature)
    sizes = policy.support_size.tolist()
    assert min(sizes) < 5
    assert max(sizes) == 5
    assert ours.dtype == dtype
    assert truth.abs().max().item() > 0.1
    # A weight of at most 1 per slot: sums of at most 5 + 1 products, each off by a few eps; p_j / τ ≤ 1 carries the
    # rounding of log p_j − log τ, numbers below 32, so at most 32 eps. Half precision rounds the result once.
    work = F64 if dtype == F64 else F32
    atol = 64 * torch.finfo(work).eps / min(temperature, 1.0)
    rtol = torch.finfo(dtype).eps if dtype in HALVES else 0.0
    tiny = 6e-8 if dtype == torch.float16 else 0.0  # fp16 flushes to its subnormals
    torch.testing.assert_close(ours.double(), truth, rtol=rtol, atol=atol + tiny)


@pytest.mark.parametrize("part", ["kept", "tail", "both"])
def test_gradient_by_hand(part: str) -> None:
    """p = ½, ¼, ⅛, ⅛; support {1, 0}; d log p₁, d log τ with τ = ¼ written out from e^z / Σ."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=F64).log().requires_grad_()
    token_ids = torch.tensor([[1, 0]])
    log_probs, log_tail = at_ids(logits, token_ids)
    assert log_probs[0].exp().tolist() == close([0.25, 0.5], rel=1e-15)
    assert log_tail.exp().tolist() == close([0.25], rel=1e-15)
    out = {"kept": log_probs[0, 0], "tail": log_tail[0], "both": log_probs[0, 0] + log_tail[0]}[part]
    out.backward()
    kept, tail = [-0.5, 0.75, -0.125, -0.125], [-0.5, -0.25, 0.375, 0.375]
    expected = {"kept": kept, "tail": tail, "both": [a + b for a, b in zip(kept, tail, strict=True)]}[part]
    assert logits.grad[0].tolist() == close(expected, rel=1e-14)


@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("excluded", [False, True])
@pytest.mark.parametrize("unused", [False, True])
def test_gradcheck(temperature: float, excluded: bool, unused: bool) -> None:
    logits = normal(3, 7, seed=41, dtype=F64)
    if excluded:
        logits[:, 5] = -INF
    token_ids = torch.tensor([[2, 0, 4], [6, 1, 3], [0, 3, 2]])
    if unused:
        token_ids[1, 2] = -1
        token_ids[2, 1:] = -1
    used = token_ids >= 0

    def kept_and_tail(z: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, log_tail = at_ids(z, token_ids, temperature)
        return log_probs[used], log_tail

    assert torch.autograd.gradcheck(kept_and_tail, (logits.requires_grad_(),), eps=1e-6, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("excluded", [False, True])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_an_empty_tail_gives_no_gradient_and_no_nan(excluded: bool, dtype: torch.dtype) -> None:
    """Everything kept that can be kept: the tail is −inf, also where excluded tokens lie outside the support."""
    logits = normal(2, 6, seed=42, dtype=dtype)
    if excluded:
        logits[:, [1, 4]] = -INF
    leaf = logits.clone().requires_grad_()
    policy = sparsify(leaf, torch.tensor([0, 3]), 6, 0.0)
    assert policy.log_tail.tolist() == [-INF, -INF]
    used = policy.token_ids >= 0
    weight = torch.cos(torch.arange(12, dtype=dtype).reshape(2, 6))
    ((policy.log_probs.masked_fill(~used, 0.0) * weight).sum() + policy.log_tail.exp().sum()).backward()
    truth = logits.double().requires_grad_()
    at = truth.log_softmax(-1).gather(-1, policy.token_ids.clamp(min=0)).masked_fill(~used, 0.0)
    (at * weight.double()).sum().backward()
    assert not leaf.grad.isnan().any()
    # six products below 1, as above
    torch.testing.assert_close(leaf.grad.double(), truth.grad, rtol=0, atol=16 * torch.finfo(dtype).eps)
    if excluded:
        assert leaf.grad[:, [1, 4]].abs().max().item() == 0.0


def test_the_log_of_an_empty_tail_has_no_gradient() -> None:
    """Row 0 keeps everything: its log tail is −inf, a constant. Row 1 has one token in the tail, gradient 1 − p₂."""
    leaf = torch.tensor([[0.0, 1.0, -INF], [0.0, 1.0, 2.0]], dtype=F64, requires_grad=True)
    token_ids = torch.tensor([[0, 1], [0, 1]])
    _, log_tail = at_ids(leaf, token_ids)
    log_tail.sum().backward()
    assert leaf.grad[0].tolist() == [0.0, 0.0, 0.0]
    p = torch.softmax(leaf.detach()[1], -1).tolist()
    assert leaf.grad[1].tolist() == close([-p[0], -p[1], 1 - p[2]], rel=1e-14)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.integers(2, 30), st.integers(1, 30), st.sampled_from([1.0, 0.5, 3.0]))
def test_gradients_sum_to_zero_in_every_row(seed: int, V: int, K: int, temperature: float) -> None:
    """Shifting all logits changes nothing, so the derivative along (1, …, 1) is zero: 30 terms below 30, to 30² eps."""
    leaf = normal(4, V, seed=seed, scale=3.0, dtype=F64).requires_grad_()
    policy = sparsify(leaf, ids(4, below=V, seed=seed), K, 1e-2, temperature=temperature)
    some = policy.log_probs.masked_fill(policy.token_ids < 0, 0.0).sum() + 2 * policy.log_tail.exp().sum()
    (grad,) = torch.autograd.grad(some, leaf)
    assert grad.sum(-1).abs().max().item() <= 900 * torch.finfo(F64).eps
    assert K == 1 or V == 2 or grad.abs().max().item() > 0


def test_gradients_are_only_asked_for_where_they_are_needed() -> None:
    """Without an upstream gradient on one output, the other's is the same as with zeros there."""
    logits, sampled = normal(3, 9, seed=43, dtype=F64), torch.tensor([1, 2, 3])
    for pick in (0, 1):
        grads = []
        for explicit in (False, True):
            leaf = logits.clone().requires_grad_()
            policy = sparsify(leaf, sampled, 4, 0.0)
            outputs = [policy.log_probs.sum(), policy.log_tail.sum()]
            total = outputs[pick] + 0.0 * outputs[1 - pick] if explicit else outputs[pick]
            total.backward()
            grads.append(leaf.grad)
        assert grads[0].abs().max().item() > 0.1
        torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-15)


def test_constant_logits_make_a_constant_policy() -> None:
    policy = sparsify(normal(2, 5, seed=44), torch.tensor([0, 1]), 3)
    assert not policy.log_probs.requires_grad
    assert not policy.log_tail.requires_grad


@pytest.mark.parametrize("fill", [math.nan, INF, -INF])
@pytest.mark.parametrize("dtype", [F64, F32, *HALVES])
@pytest.mark.parametrize("how", ["loss_mask", "on_invalid"])
def test_broken_rows_leak_nothing(how: str, dtype: torch.dtype, fill: float) -> None:
    """Rows 1 and 3 are broken; the rest has exactly the numbers and gradients it has alone."""
    good, sampled = normal(5, 8, seed=45, scale=2.0, dtype=dtype), torch.tensor([2, 3, 4, 5, 6])
    mask = torch.tensor([True, False, True, False, True])
    leaf = good.clone()
    leaf[1] = fill
    leaf[3, 2] = fill if fill != -INF else INF
    leaf.requires_grad_()
    if how == "loss_mask":
        policy = sparsify(leaf, torch.where(mask, sampled, -100), 3, loss_mask=mask)
    else:
        policy = sparsify(leaf, sampled, 3, on_invalid="mask")
    assert policy.valid.tolist() == mask.tolist()
    assert policy.token_ids[~mask].tolist() == [[-1] * 3] * 2
    assert policy.log_probs[~mask].tolist() == [[-INF] * 3] * 2
    assert policy.log_tail[~mask].tolist() == [0.0, 0.0]
    assert policy.kept_mass[~mask].tolist() == [0.0, 0.0]
    # Everything goes into the loss, the tails of broken rows too.
    (policy.log_probs.masked_fill(policy.token_ids < 0, 0.0).sum() + 3 * policy.log_tail.sum()).backward()
    assert same_bits(leaf.grad[~mask], torch.zeros(2, 8, dtype=dtype))

    alone = good[mask].requires_grad_()
    reference = sparsify(alone, sampled[mask], 3)
    (reference.log_probs.masked_fill(reference.token_ids < 0, 0.0).sum() + 3 * reference.log_tail.sum()).backward()
    assert same_bits(policy.log_probs[mask].detach(), reference.log_probs.detach())
    assert same_bits(policy.log_tail[mask].detach(), reference.log_tail.detach())
    assert same_bits(leaf.grad[mask], alone.grad)
    assert alone.grad.abs().max().item() > 0.1


def test_a_nan_gradient_on_an_unused_slot_is_not_read() -> None:
    leaf = torch.tensor([[9.0, 0.0, -9.0]], dtype=F64, requires_grad=True)
    policy = sparsify(leaf, torch.tensor([0]), 3, 1e-2)
    assert policy.token_ids.tolist() == [[0, -1, -1]]
    policy.log_probs.backward(torch.tensor([[1.0, math.nan, INF]], dtype=F64))
    p = torch.softmax(leaf.detach()[0], -1)
    assert leaf.grad[0].tolist() == close([1 - p[0].item(), -p[1].item(), -p[2].item()], rel=1e-10)


def test_double_backward_is_refused() -> None:
    leaf = normal(2, 6, seed=46, dtype=F64).requires_grad_()
    policy = sparsify(leaf, torch.tensor([0, 1]), 3)
    (grad,) = torch.autograd.grad(policy.log_probs.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_double_backward_of_a_linear_loss_is_refused_too() -> None:
    """Its upstream gradient is constant, and then so is the result (torch's rule for once_differentiable)."""
    leaf = normal(2, 6, seed=46, dtype=F64).requires_grad_()
    policy = sparsify(leaf, torch.tensor([0, 1]), 3)
    (grad,) = torch.autograd.grad(policy.log_probs.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.square().sum().backward()


def test_the_backward_keeps_no_copy_of_the_logits() -> None:
    """What is saved for it is the logits themselves and tensors of the size of the support."""
    leaf, saved = normal(4, 500, seed=47).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        sparsify(leaf, torch.tensor([0, 1, 2, 3]), 8, temperature=0.5)
    large = [x for x in saved if x.numel() >= leaf.numel()]
    assert len(saved) >= 2
    assert [x.data_ptr() for x in large] == [leaf.data_ptr()]
