"""What must not matter: padding and what lies under it, how a batch is cut or ordered, and running it twice."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import Case, bounded, evaluate, make_case

from troll import clip_loss, restrict, sparsify, troll_loss, unconstrained_loss

NAN, INF = math.nan, math.inf
LOSSES = pytest.mark.parametrize("loss_function", [troll_loss, clip_loss, unconstrained_loss])
TAILS = pytest.mark.parametrize("tail", ["floor", "bucket"])
LEVELS = pytest.mark.parametrize("level", ["token", "sequence"])
RULES = ["token_mean", "sequence_mean", "sequence_sum", "constant"]
# fp64 sums of a dozen terms of size one in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def assert_same(ours, theirs):
    """Loss, gradient and metrics."""
    torch.testing.assert_close(ours[0], theirs[0], **EXACT)
    torch.testing.assert_close(ours[1], theirs[1], **EXACT)
    assert ours[2].keys() == theirs[2].keys()
    for name, value in ours[2].items():
        assert bool(value.isfinite()), name
        torch.testing.assert_close(value, theirs[2][name], **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def poisoned(case, value):
    """The same counted tokens; everything else is ``value`` and a padding id."""
    dead = ~case.mask
    return Case(
        case.logits.masked_fill(dead[..., None], value),
        case.old_logits.masked_fill(dead[..., None], value),
        case.sampled.masked_fill(dead, -100),
        case.advantages.masked_fill(dead, value),
        case.mask,
    )


@LOSSES
@TAILS
@LEVELS
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nothing_leaks_from_under_the_mask(loss_function, tail, level, value):
    case = make_case()
    weights = torch.rand(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    clean = evaluate(loss_function, case, tail=tail, K=4, importance_sampling_level=level, importance_weights=weights)
    dirty_weights = weights.masked_fill(~case.mask, value)
    dirty = poisoned(case, value)
    result = evaluate(
        loss_function, dirty, tail=tail, K=4, importance_sampling_level=level, importance_weights=dirty_weights
    )
    for ours, theirs in zip(result[:2], clean[:2], strict=True):
        assert torch.equal(ours, theirs)
    for name, metric in result[2].items():
        assert torch.equal(metric, clean[2][name]), name
    assert torch.equal(result[1][~case.mask], torch.zeros_like(result[1][~case.mask]))
    assert clean[1].abs().max() > 0.01


@LOSSES
@TAILS
def test_the_mask_of_the_loss_alone_is_enough(loss_function, tail):
    """Policies that know no mask: the loss leaves the tokens out all the same."""
    case = make_case()
    everything = case.with_(mask=torch.ones_like(case.mask))
    logits = case.leaf()
    old = sparsify(everything.old_logits, case.sampled, 4)
    proposal = restrict(logits, old) if tail == "bucket" else sparsify(logits, case.sampled, 4)
    advantages = case.advantages.masked_fill(~case.mask, NAN)
    loss, metrics = loss_function(proposal, old, advantages, case.mask, tail=tail, **bounded(loss_function))
    assert_same(
        (loss.detach(), torch.autograd.grad(loss, logits)[0], metrics),
        evaluate(loss_function, case, tail=tail, K=4, delta=1e-5),
    )


@LOSSES
@TAILS
@LEVELS
@pytest.mark.parametrize("rule", RULES)
def test_padding_adds_nothing(loss_function, tail, level, rule):
    """Tokens with gaps between them and an empty sequence, against the batch without either."""
    case = make_case(B=3, T=4, seed=5)
    gaps = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 0, 1, 1]], dtype=torch.bool)
    case = case.with_(mask=gaps)
    rows, columns = torch.tensor([0, 2]), torch.tensor([0, 2, 3])
    compact = case.rows(rows).rows((slice(None), columns))
    options = {"tail": tail, "K": 4, "importance_sampling_level": level, "aggregation": rule}
    options["max_length"] = 9 if rule == "constant" else None
    loss, grad, metrics = evaluate(loss_function, poisoned(case, NAN), **options)
    assert_same((loss, grad[rows][:, columns], metrics), evaluate(loss_function, compact, **options))


@LOSSES
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_of_numbers_is_a_mask(loss_function, dtype):
    case = make_case()
    expected = evaluate(loss_function, case)
    assert torch.equal(evaluate(loss_function, case.with_(mask=case.mask.to(dtype)))[0], expected[0])


@settings(derandomize=True, deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 10**6), tail=st.sampled_from(["floor", "bucket"]), level=st.sampled_from(["token", "sequence"])
)
@pytest.mark.parametrize("rule", RULES)
@LOSSES
def test_sequence_by_sequence_with_the_total_of_the_batch(loss_function, rule, seed, tail, level):
    case = make_case(seed=seed)
    case = case.with_(mask=case.mask & (torch.arange(3) != seed % 4)[:, None])  # often with an empty sequence
    total = case.mask.sum() if rule == "token_mean" else case.mask.any(-1).sum()
    options = {"tail": tail, "K": 4, "importance_sampling_level": level, "aggregation": rule}
    options["max_length"] = 9 if rule == "constant" else None
    whole, whole_grad, _ = evaluate(loss_function, case, **options)
    parts = [evaluate(loss_function, case.rows(slice(i, i + 1)), total=total, **options) for i in range(3)]
    torch.testing.assert_close(sum(loss for loss, _, _ in parts), whole, **EXACT)
    torch.testing.assert_close(torch.cat([grad for _, grad, _ in parts]), whole_grad, **EXACT)


@settings(derandomize=True, deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 10**6), tail=st.sampled_from(["floor", "bucket"]), level=st.sampled_from(["token", "sequence"])
)
@LOSSES
def test_the_order_of_sequences_does_not_matter(loss_function, seed, tail, level):
    case = make_case(seed=seed, B=5)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    options = {"tail": tail, "K": 4, "importance_sampling_level": level, "aggregation": "sequence_mean"}
    loss, grad, metrics = evaluate(loss_function, case, **options)
    assert_same(evaluate(loss_function, case.rows(order), **options), (loss, grad[order], metrics))


@LOSSES
@TAILS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_are_equal_bit_for_bit(loss_function, tail, dtype):
    case = make_case(B=4, T=7, V=40, dtype=dtype)
    first, second = (evaluate(loss_function, case, tail=tail, K=8, delta=1e-3) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    for name, value in first[2].items():
        assert torch.equal(value, second[2][name]), name


@LOSSES
@TAILS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_those_numbers_in_fp32(loss_function, tail, dtype):
    case = make_case(dtype=dtype).with_(advantages=make_case(dtype=torch.float32).advantages)
    wide = case.with_(logits=case.logits.float(), old_logits=case.old_logits.float())
    loss, grad, metrics = evaluate(loss_function, case, tail=tail, K=4)
    expected, expected_grad, expected_metrics = evaluate(loss_function, wide, tail=tail, K=4)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)
    assert grad.dtype == dtype
    assert torch.equal(grad, expected_grad.to(dtype))  # rounded once, at the end
    for name, value in metrics.items():
        assert torch.equal(value, expected_metrics[name]), name


@LOSSES
@TAILS
def test_fp32_is_near_fp64(loss_function, tail):
    case = make_case()
    single = Case(case.logits.float(), case.old_logits.float(), case.sampled, case.advantages.float(), case.mask)
    double = single.with_(
        logits=single.logits.double(), old_logits=single.old_logits.double(), advantages=single.advantages.double()
    )
    loss, grad, _ = evaluate(loss_function, single, tail=tail, K=4)
    expected, expected_grad, _ = evaluate(loss_function, double, tail=tail, K=4)
    # Log-probabilities of up to 10 carry 5e-7 each in fp32; a ratio of size one and the regression take that over.
    torch.testing.assert_close(loss.double(), expected, rtol=5e-6, atol=5e-6)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=2e-5, atol=2e-6)


@LOSSES
@TAILS
@LEVELS
@pytest.mark.parametrize("rule", RULES)
def test_all_padding_is_zero_with_zero_gradient(loss_function, tail, level, rule):
    case = make_case()
    case = poisoned(case.with_(mask=torch.zeros_like(case.mask)), NAN)
    loss, grad, metrics = evaluate(
        loss_function,
        case,
        tail=tail,
        importance_sampling_level=level,
        aggregation=rule,
        max_length=9 if rule == "constant" else None,
        importance_weights=torch.full((3,), NAN, dtype=torch.float64),
    )
    assert loss.item() == 0.0
    assert torch.equal(grad, torch.zeros_like(grad))
    assert {name: value.item() for name, value in metrics.items()} == dict.fromkeys(metrics, 0)
