"""``sparsify``: numbers against float64, shapes, temperature, masks, and every input it must refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from policy_cases import F32, F64, INF, close, dense, each_impl, ids, kept, normal, refuses, same_bits, same_policy, ulp

from troll.policy import restrict, sparsify

_impl = each_impl()

DTYPES = [torch.bfloat16, torch.float16, F32, F64]

# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_numbers_are_those_of_the_full_softmax(dtype: torch.dtype, temperature: float) -> None:
    logits, sampled = normal(8, 300, seed=50, scale=4.0, dtype=dtype), ids(8, below=300, seed=51)
    policy = sparsify(logits, sampled, 32, 1e-3, temperature=temperature)
    assert policy.log_probs.dtype == (F64 if dtype == F64 else F32)
    assert policy.vocab_size == 300
    assert policy.temperature == temperature
    log_probs, log_tail = dense(logits, policy.token_ids, temperature)
    used = policy.token_ids >= 0
    # z / T (below 32) is rounded once, log Σ e^z (below 32) once, their difference once: 3 halves of an ulp at 16…32;
    # the sum inside the log-sum-exp of the tail adds a few eps of 1.
    budget = 2 * ulp(31, policy.log_probs.dtype)
    torch.testing.assert_close(policy.log_probs[used].double(), log_probs[used], rtol=0, atol=budget)
    torch.testing.assert_close(policy.log_tail.double(), log_tail, rtol=0, atol=2 * budget)
    assert (policy.log_probs[~used] == -INF).all()
    torch.testing.assert_close(policy.kept_mass.double(), 1 - log_tail.exp(), rtol=0, atol=2 * budget)
    assert torch.equal(policy.sampled, sampled)
    assert torch.equal(policy.sampled_log_probs, policy.log_probs[:, 0])


def test_numbers_against_numpy_with_everything_kept() -> None:
    logits = normal(5, 9, seed=52, scale=2.0, dtype=F64)
    policy = sparsify(logits, torch.zeros(5, dtype=torch.int64), 9, 0.0)
    z = logits.numpy()
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    for row in range(5):
        for token, log_p in zip(policy.token_ids[row].tolist(), policy.log_probs[row].tolist(), strict=True):
            assert log_p == close(np.log(p[row, token]), rel=1e-14, abs=1e-14)
    assert policy.log_tail.tolist() == [-INF] * 5


def test_the_mass_of_a_tail_of_1e9_is_known_to_six_digits() -> None:
    """One token and a thousand of 1e-12: 1 − Σ kept in fp32 has no digit of it."""
    logits = torch.full((1001,), math.log(1e-12))
    logits[7] = 0.0
    policy = sparsify(logits, torch.tensor(7))
    assert kept(policy) == [[7]]
    z = logits.double()
    truth = (z[logits < 0].exp().sum() / z.exp().sum()).item()
    assert truth == close(1e-9, rel=1e-5)
    # log tail ≈ −20.7 is rounded to 1e-6 (half an ulp at 16…32), after a sum of a thousand equal terms
    assert policy.log_tail.double().exp().item() == close(truth, rel=4e-6)
    naive = 1 - policy.log_probs.exp().sum()
    assert abs(naive.item() / truth - 1) > 0.5


def test_the_mass_of_a_random_tail_of_1e9_is_known_too() -> None:
    logits = normal(20, 400, seed=53, scale=1.0)
    logits[:, :3] = torch.tensor([28.0, 27.0, 26.0])
    policy = sparsify(logits, torch.zeros(20, dtype=torch.int64), 3, 0.0)
    p = torch.softmax(logits.double(), -1)
    truth = p[:, 3:].sum(-1)
    assert truth.max().item() < 2e-9
    # z − log Σ e^z near −28: an ulp and a half at 16…32, 1.9e-6 each
    torch.testing.assert_close(policy.log_tail.double().exp(), truth, rtol=5e-6, atol=0)


@pytest.mark.parametrize("gap", [80.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64])
def test_huge_gaps_stay_finite(gap: float, dtype: torch.dtype) -> None:
    leaf = torch.tensor([[gap, 0.0, -gap, 1.0]], dtype=dtype, requires_grad=True)
    policy = sparsify(leaf, torch.tensor([2]))
    assert kept(policy) == [[2, 0]]
    top = leaf[0, 0].item()  # bf16 rounds 1e4
    assert policy.log_probs[0, :2].tolist() == close([-2 * top, 0.0], rel=1e-6, abs=1e-6)
    assert policy.log_tail.item() == close(1 - top + math.log1p(math.exp(-1)), rel=1e-6)
    (policy.log_probs[0, :2].sum() + policy.log_tail.sum()).backward()
    assert leaf.grad.isfinite().all()
    share = 1 / (1 + math.e)  # of token 1 in the tail; Γ = 3, and the top token has p = 1
    assert leaf.grad[0].tolist() == close([1 - 3.0, share, 1.0, 1 - share], rel=1e-2)


def test_fp16_extremes() -> None:
    """Logits at the ends of fp16, and the smallest differences it has there."""
    policy = sparsify(torch.tensor([[65504.0, -65504.0, 65472.0]], dtype=torch.float16), torch.tensor([1]), 3, 0.0)
    assert policy.token_ids.tolist() == [[1, 0, 2]]
    assert policy.log_probs.tolist() == [[-131008.0, 0.0, -32.0]]
    assert policy.log_tail.item() == -INF
    for top in (65504.0, -65504.0):
        equal = sparsify(torch.full((3,), top, dtype=torch.float16), torch.tensor(2), 2)
        assert equal.token_ids.tolist() == [2, 0]
        assert equal.log_probs.tolist() == close([-math.log(3)] * 2, rel=1e-7)
        assert equal.log_tail.item() == close(-math.log(3), rel=2e-7)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_logits_of_40000_and_1e30_are_distributions_too(dtype: torch.dtype) -> None:
    policy = sparsify(torch.tensor([4e4, 4e4 - 1, 4e4 - 2, 0.0], dtype=dtype), torch.tensor(2))
    expected = torch.tensor([-2.0, 0.0, -1.0], dtype=F64).log_softmax(-1)
    # differences of 1 and 2 are exact; then one rounding of a logarithm below 0.5 and one of the result
    torch.testing.assert_close(policy.log_probs[:3].double(), expected, rtol=0, atol=2 * ulp(2, dtype))
    assert policy.log_tail.item() == close(-4e4 - 0.4076, rel=1e-6)
    huge = sparsify(torch.tensor([1e30, 1e30, -1e30], dtype=dtype), torch.tensor(0))
    assert huge.token_ids.tolist() == [0, 1, -1]
    assert huge.log_probs[:2].tolist() == close([-math.log(2)] * 2, rel=1e-7)


# ---- temperature ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_temperature_divides_the_logits(dtype: torch.dtype, temperature: float) -> None:
    logits, sampled = normal(4, 40, seed=54, scale=3.0, dtype=dtype), ids(4, below=40, seed=55)
    hot = logits.clone().requires_grad_()
    divided = (logits.to(F64 if dtype == F64 else F32) / temperature).requires_grad_()
    a = sparsify(hot, sampled, 30, 1e-2, temperature=temperature)
    b = sparsify(divided, sampled, 30, 1e-2)
    assert torch.equal(a.token_ids, b.token_ids)
    assert same_bits(a.log_probs.detach(), b.log_probs.detach())
    assert same_bits(a.log_tail.detach(), b.log_tail.detach())
    plain = sparsify(logits, sampled, 30, 1e-2)
    assert not torch.equal(a.token_ids, plain.token_ids)  # and it matters
    for policy in (a, b):
        (policy.sampled_log_probs.sum() + policy.log_tail.sum()).backward()
    expected = (divided.grad / temperature).to(dtype)
    # the division before or after rounding to half precision: half a unit of it
    torch.testing.assert_close(hot.grad, expected, rtol=torch.finfo(dtype).eps, atol=1e-7 if dtype != F64 else 1e-16)


def test_temperature_by_hand() -> None:
    """Probabilities ⅓, ⅔ at temperature ½ are 1/5, 4/5."""
    policy = sparsify(torch.tensor([1 / 3, 2 / 3], dtype=F64).log(), torch.tensor(0), temperature=0.5)
    assert policy.log_probs.exp().tolist() == close([0.2, 0.8], rel=1e-15)
    assert policy.temperature == 0.5


# ---- shapes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (2, 1, 3)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    n = math.prod(shape)
    logits, sampled = normal(n, 20, seed=56, scale=2.0), ids(n, below=20, seed=57)
    flat = sparsify(logits, sampled, 6, 1e-2)
    shaped = sparsify(logits.reshape(*shape, 20), sampled.reshape(shape), 6, 1e-2)
    assert shaped.shape == shape
    assert shaped.token_ids.shape == (*shape, 6)
    assert torch.equal(shaped.token_ids.reshape(n, 6), flat.token_ids)
    assert same_bits(shaped.log_probs.reshape(n, 6), flat.log_probs)
    assert same_bits(shaped.log_tail.reshape(n), flat.log_tail)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_batches(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    leaf = torch.zeros(*shape, 20, dtype=dtype, requires_grad=True)
    policy = sparsify(leaf, torch.zeros(shape, dtype=torch.int64), 6)
    assert policy.shape == shape
    assert policy.token_ids.shape == (*shape, 6)
    assert policy.log_probs.dtype == policy.log_tail.dtype == (F64 if dtype == F64 else F32)
    (policy.log_probs.sum() + policy.log_tail.sum()).backward()
    assert leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_any_integer_type_names_tokens(dtype: torch.dtype) -> None:
    logits, sampled = normal(3, 9, seed=58), torch.tensor([8, 0, 4])
    assert same_policy(sparsify(logits, sampled.to(dtype)), sparsify(logits, sampled))


def test_defaults_are_64_tokens_and_1e5() -> None:
    logits, sampled = normal(4, 500, seed=59, scale=6.0), torch.zeros(4, dtype=torch.int64)
    assert same_policy(sparsify(logits, sampled), sparsify(logits, sampled, 64, 1e-5, temperature=1.0))
    assert sparsify(logits, sampled).token_ids.shape == (4, 64)
    assert not same_policy(sparsify(logits, sampled), sparsify(logits, sampled, 64, 1e-4))


# ---- masks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, F32])
def test_masked_positions_are_empty_and_the_others_untouched(dtype: torch.dtype) -> None:
    logits, sampled = normal(2, 3, 10, seed=60), ids(2, 3, below=10, seed=61)
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]])
    policy = sparsify(logits, torch.where(mask == 1, sampled, -100), 4, loss_mask=mask.to(dtype))
    assert policy.valid.tolist() == (mask == 1).tolist()
    assert policy.support_size[mask == 0].tolist() == [0, 0, 0]
    assert policy.log_tail[mask == 0].tolist() == [0.0, 0.0, 0.0]
    assert same_policy(policy[mask == 1], sparsify(logits, sampled, 4)[mask == 1])


def test_all_padding_gives_no_gradient() -> None:
    leaf = torch.full((2, 3, 5), math.nan, requires_grad=True)
    policy = sparsify(leaf, torch.full((2, 3), -100), loss_mask=torch.zeros(2, 3))
    assert not policy.valid.any()
    policy.log_tail.sum().backward()
    assert same_bits(leaf.grad, torch.zeros(2, 3, 5))


@pytest.mark.parametrize("broken", [math.nan, INF])
def test_invalid_positions_are_masked_and_counted_if_asked(broken: float) -> None:
    logits = normal(5, 6, seed=62)
    logits[1, 4] = broken
    logits[2] = -INF
    logits[3, 0] = -INF  # the sampled token of row 3
    policy = sparsify(logits, torch.zeros(5, dtype=torch.int64), on_invalid="mask")
    assert policy.valid.tolist() == [True, False, False, False, True]
    good = [0, 4]
    assert same_policy(policy[good], sparsify(logits[good], torch.zeros(2, dtype=torch.int64)))


# ---- refused -------------------------------------------------------------------------------------------------------


def good() -> dict[str, object]:
    return {"logits": normal(2, 3, 7, seed=63), "sampled": ids(2, 3, below=7, seed=64)}


@pytest.mark.parametrize(
    ("change", "given", "expected"),
    [
        ({"max_support": 0}, "max_support must be an integer ≥ 1, got 0", ""),
        ({"max_support": -3}, "max_support must be an integer ≥ 1, got -3", ""),
        ({"tail_mass": -1e-9}, "tail_mass must be a number ≥ 0 and < 1, got -1e-09", ""),
        ({"tail_mass": 1.0}, "tail_mass must be a number ≥ 0 and < 1, got 1.0", ""),
        ({"tail_mass": math.nan}, "tail_mass must be a number ≥ 0 and < 1, got nan", ""),
        ({"temperature": 0.0}, "temperature must be a finite number > 0, got 0.0", "> 0"),
        ({"temperature": -1.0}, "temperature must be a finite number > 0, got -1.0", "> 0"),
        ({"temperature": math.nan}, "temperature must be a finite number > 0, got nan", "> 0"),
        ({"temperature": INF}, "temperature must be a finite number > 0, got inf", "> 0"),
        ({"on_invalid": "skip"}, "got 'skip'", "'raise' or 'mask'"),
        ({"logits": torch.zeros(2, 3, 7, dtype=torch.int64)}, "logits must have a floating-point dtype, got int64", ""),
        ({"logits": torch.zeros(2, 3, 0)}, "got [2, 3, 0]", "[..., V]"),
        ({"logits": torch.zeros(2, 4, 7)}, "got [2, 4, 7] and [2, 3]", "[...]"),
        ({"logits": torch.tensor(1.0), "sampled": torch.tensor(0)}, "got [] and []", "[..., V]"),
        (
            {"sampled": torch.zeros(3, 2, dtype=torch.int64)},
            "sampled has shape [...], got [2, 3, 7] and [3, 2]",
            "[...]",
        ),
        ({"sampled": torch.zeros(2, 3)}, "sampled must have an integer dtype, got float32", ""),
        ({"sampled": torch.zeros(2, 3, dtype=torch.bool)}, "sampled must have an integer dtype, got bool", ""),
        ({"sampled": torch.zeros(2, 3, dtype=torch.complex64)}, "sampled must have real entries, got complex64", ""),
        ({"loss_mask": torch.ones(3)}, "loss_mask must have the shape of sampled, [2, 3], got [3]", ""),
        ({"sampled": torch.tensor([[0, 1, 2], [3, 7, 9]])}, "token 7 at position [1, 1]", "from 0 to 6"),
        ({"sampled": torch.tensor([[0, 1, -100], [3, 4, 5]])}, "token -100 at position [0, 2]", "from 0 to 6"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, object], given: str, expected: str) -> None:
    sparsify(**good())  # type: ignore[arg-type]
    with refuses(given, expected):
        sparsify(**(good() | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("at", "value", "given"),
    [
        ((0, 2, 5), math.nan, "logit nan of token 5 at position [0, 2] (1 such positions)"),
        ((1, 0, 3), INF, "logit inf of token 3 at position [1, 0] (1 such positions)"),
        ((1, 2), -INF, "only −inf logits at position [1, 2] (1 such positions)"),
        ((slice(None), 1, 6), math.nan, "logit nan of token 6 at position [0, 1] (2 such positions)"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_broken_logits_are_refused_by_name(at: tuple[int, ...], value: float, given: str, dtype: torch.dtype) -> None:
    logits = normal(2, 3, 7, seed=65, dtype=dtype)
    logits[at] = value
    with refuses(given, "must be finite", "on_invalid='mask'"):
        sparsify(logits, torch.zeros(2, 3, dtype=torch.int64))


def test_an_impossible_sampled_token_is_refused_by_name() -> None:
    logits = normal(2, 3, 7, seed=66)
    logits[1, 2, 4] = -INF
    sampled = torch.tensor([[4, 4, 4], [0, 1, 4]])
    with refuses("token 4 with logit −inf at position [1, 2]", "can be sampled", "truncation"):
        sparsify(logits, sampled)


def test_a_single_position_is_named_too() -> None:
    with refuses("logit nan of token 1 at position []"):
        sparsify(torch.tensor([0.0, math.nan]), torch.tensor(0))


def test_a_token_excluded_by_the_smallest_number_is_treated_like_minus_inf() -> None:
    """torch.finfo.min is a common way to exclude tokens; divided by a temperature below 1 it is −inf."""
    logits = torch.tensor([[1.0, 2.0, torch.finfo(F32).min], [1.0, 2.0, 3.0]])
    policy = sparsify(logits, torch.tensor([2, 2]), temperature=0.5, on_invalid="mask")
    assert policy.valid.tolist() == [False, True]
    with refuses("token 2 with logit −inf at position [0]", "can be sampled"):
        sparsify(logits, torch.tensor([2, 2]), temperature=0.5)
    old = sparsify(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1]), temperature=0.5)
    assert old.token_ids.tolist() == [[1, 2, 0]]
    assert restrict(logits[:1], old).token_ids.tolist() == [[1, -1, 0]]


def test_a_logit_that_overflows_through_the_temperature_is_named() -> None:
    logits = torch.tensor([[0.0, 3e38, 1.0]])
    with refuses("logit inf of token 1 at position [0]"):
        sparsify(logits, torch.tensor([0]), temperature=0.5)
