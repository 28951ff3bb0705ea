"""The four rules by hand, against TRL's formulas, and what must not change them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troll import InputError, aggregate

NAN, INF = math.nan, math.inf
RULES = ["token_mean", "sequence_mean", "sequence_sum", "constant"]

# Lengths 3, 1, 0 and 2 (the last with a gap); sums 6, 4, – and 6.
VALUES = [[1.0, 2, 3, 70], [4, 70, 70, 70], [70, 70, 70, 70], [-2, 70, 8, 70]]
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0]], dtype=torch.bool)
BY_HAND = {
    # rule: (result, weight of a token in sequences 0, 1 and 3)
    "token_mean": (16 / 6, (1 / 6, 1 / 6, 1 / 6)),
    "sequence_mean": ((2 + 4 + 3) / 3, (1 / 9, 1 / 3, 1 / 6)),
    "sequence_sum": ((6 + 4 + 6) / 3, (1 / 3, 1 / 3, 1 / 3)),
    "constant": ((6 + 4 + 6) / 8 / 3, (1 / 24, 1 / 24, 1 / 24)),
}


def length_of(rule):
    return 8 if rule == "constant" else None


def run(values, mask, rule, total=None):
    """The aggregate and its gradient."""
    leaf = values.detach().clone().requires_grad_()
    result = aggregate(leaf, mask, rule, max_length=length_of(rule), total=total)
    return result.detach(), torch.autograd.grad(result, leaf)[0]


def random_batch(seed, B, T, empty=True):
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(B, T, generator=g, dtype=torch.float64)
    mask = torch.rand(B, T, generator=g) < 0.6
    if not empty:
        mask[torch.arange(B), torch.randint(T, (B,), generator=g)] = True
    return values, mask


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("padding", [70.0, NAN, INF, -INF])
def test_by_hand_whatever_lies_under_the_mask(rule, padding):
    values = torch.tensor(VALUES, dtype=torch.float64).masked_fill(~MASK, padding)
    result, grad = run(values, MASK, rule)
    expected, (first, second, fourth) = BY_HAND[rule]
    weights = torch.tensor([first, second, 0.0, fourth], dtype=torch.float64)[:, None] * MASK
    # A handful of additions and divisions in fp64: a few units in the last place.
    assert result.item() == pytest.approx(expected, rel=1e-15)
    torch.testing.assert_close(grad, weights, rtol=1e-15, atol=0)
    assert torch.equal(grad[~MASK], torch.zeros(10, dtype=torch.float64))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_all_padding_is_exactly_zero(rule, shape):
    result, grad = run(torch.full(shape, NAN), torch.zeros(shape, dtype=torch.bool), rule)
    assert result.item() == 0.0
    assert torch.equal(grad, torch.zeros(shape))


def test_the_default_rule_is_the_token_mean():
    assert aggregate(torch.tensor(VALUES), MASK).item() == pytest.approx(16 / 6, rel=1e-6)  # fp32


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_sequence_changes_nothing(rule):
    values = torch.tensor(VALUES, dtype=torch.float64)
    rest = [0, 1, 3]
    assert run(values[rest], MASK[rest], rule)[0] == run(values, MASK, rule)[0]


@settings(derandomize=True, deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), B=st.integers(1, 6), T=st.integers(1, 5), cut=st.integers(1, 6))
@pytest.mark.parametrize("rule", RULES)
def test_micro_batches_add_up_to_the_batch(rule, seed, B, T, cut):
    values, mask = random_batch(seed, B, T)
    total = mask.sum() if rule == "token_mean" else mask.any(-1).sum()
    if total == 0:
        return
    whole, whole_grad = run(values, mask, rule)
    parts = [
        run(values[i : i + cut], mask[i : i + cut], rule, total=total if i else float(total))  # tensor or number
        for i in range(0, B, cut)
    ]
    # At most thirty fp64 terms of size one, added in another order.
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), rel=1e-13, abs=1e-13)
    torch.testing.assert_close(torch.cat([grad for _, grad in parts]), whole_grad, rtol=1e-14, atol=0)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), B=st.integers(1, 6), T=st.integers(1, 5))
def test_the_formulas_of_trl_when_no_sequence_is_empty(seed, B, T):
    x, mask = random_batch(seed, B, T, empty=False)
    m, L = mask.to(x.dtype), length_of("constant")
    theirs = {
        "sequence_mean": ((x * m).sum(-1) / m.sum(-1).clamp(min=1.0)).mean(),  # GRPO
        "token_mean": (x * m).sum() / m.sum().clamp(min=1.0),  # BNPO, DAPO
        "constant": (x * m).sum() / (x.size(0) * L),  # Dr.GRPO
        "sequence_sum": (x * m).sum(-1).mean(),
    }
    for rule, expected in theirs.items():
        # The same sums, divided in another order: a few units in the last place of terms of size one.
        torch.testing.assert_close(run(x, mask, rule)[0], expected, rtol=1e-13, atol=1e-15)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), B=st.integers(1, 6), T=st.integers(1, 5))
@pytest.mark.parametrize("rule", RULES)
def test_linear_and_blind_to_the_order_of_sequences(rule, seed, B, T):
    x, mask = random_batch(seed, B, T)
    y, _ = random_batch(seed + 1, B, T)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(seed))
    both = run(2 * x - 3 * y, mask, rule)[0]
    # Thirty fp64 terms of size one.
    torch.testing.assert_close(both, 2 * run(x, mask, rule)[0] - 3 * run(y, mask, rule)[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(run(x[order], mask[order], rule)[0], run(x, mask, rule)[0], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    ("rule", "max_length", "given"),
    [
        ("constant", None, "aggregation='constant' needs max_length"),
        ("token_mean", 8, "max_length=8 has no effect with aggregation='token_mean'"),
        ("sequence_mean", 8, "max_length=8 has no effect with aggregation='sequence_mean'"),
        ("sequence_sum", 8, "max_length=8 has no effect with aggregation='sequence_sum'"),
    ],
)
def test_max_length_belongs_to_the_constant_rule_alone(rule, max_length, given):
    with pytest.raises(InputError) as error:
        aggregate(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), rule, max_length=max_length)
    assert error.value.problem.startswith(given)
    assert "max_length" in error.value.fix


def test_an_unknown_rule():
    with pytest.raises(InputError) as error:
        aggregate(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), "seq-mean")
    choices = "'token_mean' or 'sequence_mean' or 'sequence_sum' or 'constant'"
    assert error.value.problem == f"aggregation must be {choices}, got 'seq-mean'"
    assert error.value.fix == "The default is 'token_mean'"


@pytest.mark.parametrize("length", [0, -3])
def test_a_length_that_is_none(length):
    with pytest.raises(InputError, match=rf"max_length must be an integer ≥ 1, got {length}. Pass "):
        aggregate(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), "constant", max_length=length)


def test_values_and_mask_of_different_shapes():
    with pytest.raises(InputError, match=r"values and loss_mask must have the same shape .*got \[3\] and \[2, 3\]"):
        aggregate(torch.ones(3), torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize("total", [0, 0.0, torch.tensor(0)])
@pytest.mark.parametrize("rule", ["token_mean", "sequence_mean"])
def test_nothing_divided_by_nothing_is_nothing(rule, total):
    """A micro-batch of padding in a batch that is padding altogether."""
    leaf = torch.full((2, 3), float("nan"), requires_grad=True)
    result = aggregate(leaf, torch.zeros(2, 3, dtype=torch.bool), rule, total=total)
    result.backward()
    assert result.item() == 0
    assert leaf.grad.tolist() == [[0.0] * 3] * 2


def test_a_mask_of_numbers_is_a_mask():
    values, mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[1, 0, 1]])
    assert aggregate(values, mask).item() == aggregate(values, mask.float()).item() == 2.5
