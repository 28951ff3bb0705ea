"""Which tokens are kept: against a slow oracle, by hand, and under everything that must not change the choice."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from policy_cases import F32, F64, INF, close, each_impl, greedy, ids, kept, normal, same_bits, same_policy, ulp
from torch import Tensor

from troll.policy import SparsePolicy, sparsify
from troll.policy.scoring import LogitTransform, types
from troll.policy.scoring.reference import largest, log_norms

_impl = each_impl()

DTYPES = [torch.bfloat16, torch.float16, F32, F64]
P = [0.5, 0.25, 0.125, 0.0625, 0.0625]  # after k tokens 2⁻ᵏ are left


def log(probs: list[float], dtype: torch.dtype = F64) -> Tensor:
    return torch.tensor(probs, dtype=F64).log().to(dtype)


# ---- by hand -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "max_support", "tail_mass", "expected"),
    [
        (0, 5, 0.2, [0, 1, 2]),  # left after 0, 1, 2 tokens: 1, 0.5, 0.25 > 0.2; after three 0.125
        (2, 5, 0.2, [2, 0, 1]),  # the sampled token first, then by falling probability
        (4, 5, 0.2, [4, 0, 1, 2]),  # outside the top: added
        (4, 4, 0.2, [4, 0, 1, 2]),
        (4, 3, 0.2, [4, 0, 1]),  # no place left: the least probable one goes
        (1, 3, 0.2, [1, 0, 2]),
        (4, 1, 0.2, [4]),
        (0, 1, 0.2, [0]),
        (3, 5, 0.6, [3, 0]),  # 0.5 ≤ 0.6 after one
        (3, 5, 0.07, [3, 0, 1, 2]),  # 0.125 > 0.07 after three, then the lower id of the tie, which is the sampled one
        (4, 5, 0.07, [4, 0, 1, 2, 3]),  # … and here the lower id is another one
        (0, 5, 0.0, [0, 1, 2, 3, 4]),
        (3, 4, 0.0, [3, 0, 1, 2]),
        (3, 99, 1e-9, [3, 0, 1, 2, 4]),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_selection_by_hand(
    sampled: int, max_support: int, tail_mass: float, expected: list[int], dtype: torch.dtype
) -> None:
    policy = sparsify(log(P, dtype), torch.tensor(sampled), max_support, tail_mass)
    assert kept(policy) == [expected]
    assert policy.token_ids.shape == (min(max_support, 5),)
    assert policy.token_ids.tolist() == expected + [-1] * (min(max_support, 5) - len(expected))
    # bf16 and fp16 round the logits themselves, by at most 2⁻⁹ and 2⁻¹² of 2.8.
    rounding = {torch.bfloat16: 6e-3, torch.float16: 8e-4, F32: 5e-7, F64: 1e-15}[dtype]
    assert policy.log_probs[: len(expected)].exp().tolist() == close([P[i] for i in expected], rel=2 * rounding)


def test_enough_means_exactly_one_minus_tail_mass() -> None:
    """Two tokens with half of the mass each, exact in fp64: with δ = ½ one of them is enough, with less it is not."""
    logits = torch.zeros(2, dtype=F64)
    assert kept(sparsify(logits, torch.tensor(0), tail_mass=0.5)) == [[0]]
    assert kept(sparsify(logits, torch.tensor(0), tail_mass=math.nextafter(0.5, 0.0))) == [[0, 1]]


def test_zero_tail_mass_keeps_tokens_that_have_underflowed() -> None:
    policy = sparsify(torch.tensor([0.0, -3000.0, -2000.0]), torch.tensor(0), 3, 0.0)  # e⁻²⁰⁰⁰ is 0 in fp64 too
    assert kept(policy) == [[0, 2, 1]]
    assert policy.log_probs.tolist() == [0.0, -2000.0, -3000.0]
    assert policy.log_tail.item() == -INF


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_vocabulary(dtype: torch.dtype) -> None:
    policy = sparsify(torch.tensor([[3.0], [-7.0]], dtype=dtype), torch.tensor([0, 0]))
    assert policy.token_ids.tolist() == [[0], [0]]
    assert policy.log_probs.tolist() == [[0.0], [0.0]]
    assert policy.log_tail.tolist() == [-INF, -INF]
    assert policy.kept_mass.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_excluded_tokens_are_never_kept(dtype: torch.dtype) -> None:
    logits = torch.tensor([-INF, 1.0, -INF, 2.0, 0.0, -INF], dtype=dtype)
    for tail_mass in (0.0, 1e-5):
        policy = sparsify(logits, torch.tensor(4), 6, tail_mass)
        assert policy.token_ids.tolist() == [4, 3, 1, -1, -1, -1]
        assert policy.log_tail.item() == -INF


def test_excluded_tokens_are_not_kept_for_mass_that_rounding_invents() -> None:
    """1 − Σ p is off by 1e-7 in fp32: more than the tail that may be left, but there is nothing to fill it with."""
    logits = normal(300, 12, seed=19, scale=3.0) + 20.0
    logits[:, 1::2] = -INF
    policy = sparsify(logits, torch.zeros(300, dtype=torch.int64), 12, 1e-9)
    assert policy.support_size.max().item() == 6
    assert (policy.token_ids % 2)[policy.token_ids >= 0].max().item() == 0


# ---- ties ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lower_id(dtype: torch.dtype) -> None:
    policy = sparsify(torch.full((3, 40), -1.5, dtype=dtype), torch.tensor([0, 25, 39]), 4, 0.0)
    assert kept(policy) == [[0, 1, 2, 3], [25, 0, 1, 2], [39, 0, 1, 2]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_zero_ties_with_zero(dtype: torch.dtype) -> None:
    logits = torch.tensor([-1.0, -0.0, 0.0, -0.0, 0.0, 1.0], dtype=dtype)
    assert kept(sparsify(logits, torch.tensor(5), 6, 0.0)) == [[5, 1, 2, 3, 4, 0]]
    assert kept(sparsify(logits, torch.tensor(5), 3, 0.0)) == [[5, 1, 2]]


def test_bf16_logits_tie_a_lot_and_are_still_ordered_by_id() -> None:
    logits = (normal(64, 5000, seed=20, scale=4.0) + 20.0).bfloat16()  # spacing ⅛: at most a few hundred values
    sampled = ids(64, below=5000, seed=21)
    policy = sparsify(logits, sampled, 64, 1e-5)
    at_the_edge = 0
    for row, chosen, token in zip(logits.tolist(), kept(policy), sampled.tolist(), strict=True):
        expected, narrowest = greedy(row, token, 64, 1e-5)
        assert narrowest > 1e-5  # never a close call, so that the oracle decides
        assert chosen == expected
        at_the_edge += row.count(row[chosen[-1]]) > sum(row[i] == row[chosen[-1]] for i in chosen)
    assert at_the_edge > 32  # the last value kept is a value not all of whose tokens were kept: ids decided


@pytest.mark.parametrize("dtype", [F32, F64])
def test_largest_is_a_stable_sort(dtype: torch.dtype) -> None:
    z = torch.tensor(
        [
            [0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 3e38, -3e38, -INF, 1.0, -1.0, 1.0],
            [-5.0, -4.0, -3.0, -2.0, -2.0, -3.0, -4.0, -5.0, -INF, -INF, -1e-30, -0.0],
        ],
        dtype=dtype,
    )
    chosen = largest(z, 12)
    for row in range(2):
        order = sorted(range(12), key=lambda i, row=row: (-z[row, i].item(), i))
        assert chosen[row].tolist() == order


# ---- against the oracle --------------------------------------------------------------------------------------------


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[float], int]:
    """One row of logits on a coarse grid, with many ties, excluded tokens and both zeros; and a possible token."""
    grid = st.one_of(st.integers(-24, 24).map(lambda x: x / 4), st.sampled_from([0.0, -0.0, -INF, -30.0, 12.0]))
    row = draw(st.lists(grid, min_size=1, max_size=14).filter(lambda r: max(r) > -INF))
    return row, draw(st.sampled_from([i for i, x in enumerate(row) if x > -INF]))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    rows(),
    st.integers(1, 16),
    st.sampled_from([0.0, 1e-9, 1e-5, 1e-3, 0.05, 0.3, 0.9]),
    st.sampled_from(DTYPES),
    st.sampled_from([1.0, 0.5, 0.7, 2.0, 3.0]),
)
def test_selection_equals_the_oracle(
    row: tuple[list[float], int], max_support: int, tail_mass: float, dtype: torch.dtype, temperature: float
) -> None:
    logits, sampled = torch.tensor(row[0], dtype=dtype), row[1]
    # The oracle sees the logits in work precision, after the division, as exact numbers.
    z = (logits.double() if dtype == F64 else logits.float()) / temperature
    expected, narrowest = greedy(z.tolist(), sampled, max_support, tail_mass)
    # p = exp(z − max z − log Σ) is off by an ulp of log Σ ≤ log 14, and by p |z − max z| eps ≤ eps / e: 4e-7 in fp32.
    assume(narrowest > (1e-14 if dtype == F64 else 1e-6) or tail_mass == 0)
    policy = sparsify(logits, torch.tensor(sampled), max_support, tail_mass, temperature=temperature)
    assert kept(policy) == [expected]
    assert policy.support_size.item() == len(expected) <= max_support
    assert policy.sampled.item() == sampled

    # Minimal: the tokens ahead of the last one that was not sampled, which were all taken, do not cover 1 − δ.
    p = torch.softmax(z.double(), -1)
    others = [i for i in kept(policy)[0] if i != sampled]
    if tail_mass > 0 and others:
        last = others[-1]
        ahead = [i for i in range(len(p)) if (-z[i].item(), i) < (-z[last].item(), last)]
        assert p[ahead].sum().item() < 1 - tail_mass
    # Sufficient: it covers 1 − δ, or it is full, or there is nothing more to keep.
    possible = int((z > -INF).sum())
    assert p[kept(policy)[0]].sum().item() >= 1 - tail_mass - 1e-5 or policy.support_size.item() == min(
        max_support, possible
    )


def test_the_minimum_holds_on_realistic_rows() -> None:
    logits, sampled = normal(40, 2000, seed=22, scale=3.0), ids(40, below=2000, seed=23)
    policy = sparsify(logits, sampled, 1500, 1e-2)
    p = torch.softmax(logits.double(), -1)
    for row, chosen in enumerate(kept(policy)):
        in_order = p[row].sort(descending=True).values.cumsum(-1)
        n = int((in_order < 1 - 1e-2).sum()) + 1  # the fewest tokens that can cover it
        assert 100 < n < 1500
        assert len(chosen) in (n, n + 1)  # + 1 for a sampled token outside
        assert len(chosen) == n + int(p[row, chosen[0]] < p[row, chosen[-1]])


# ---- what must not matter ------------------------------------------------------------------------------------------


def results(logits: Tensor, sampled: Tensor, **options: object) -> tuple[SparsePolicy, Tensor]:
    """The policy and the gradient of a loss that uses all of it."""
    leaf = logits.clone().requires_grad_()
    policy = sparsify(leaf, sampled, **options)  # type: ignore[arg-type]
    weight = torch.cos(torch.arange(policy.token_ids.shape[-1], dtype=policy.log_probs.dtype))
    loss = (policy.log_probs.masked_fill(policy.token_ids < 0, 0.0) * weight).sum() + policy.log_tail.clamp(
        min=-1e3
    ).sum()
    loss.backward()
    return policy.detach(), leaf.grad


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.integers(0, 2**31),
    st.sampled_from([-65536.0, -64.0, 0.5, 4.0, 128.0, 4096.0, 40_000.0]),
    st.sampled_from([F32, F64]),
    st.sampled_from([0.0, 1e-5, 1e-2]),
)
def test_shifted_logits_give_the_same_policy_bit_for_bit(
    seed: int, shift: float, dtype: torch.dtype, tail_mass: float
) -> None:
    z = (normal(3, 30, seed=seed, scale=3.0).mul(64).round() / 64).to(dtype)
    assert torch.equal((z + shift) - shift, z)  # the shift itself is exact
    sampled = ids(3, below=30, seed=seed)
    (plain, plain_grad), (shifted, shifted_grad) = (
        results(x, sampled, max_support=16, tail_mass=tail_mass) for x in (z, z + shift)
    )
    assert same_policy(plain, shifted)
    assert same_bits(plain_grad, shifted_grad)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.sampled_from(DTYPES))
def test_renaming_the_tokens_renames_the_choice(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = (torch.randperm(40, generator=generator).double() / 4 - 5).to(dtype)  # distinct, exact in every type
    sampled = int(torch.randint(40, (), generator=generator))
    name = torch.randperm(40, generator=generator)
    renamed = torch.empty_like(z)
    renamed[name] = z
    a = sparsify(z, torch.tensor(sampled), 12, 1e-2)
    b = sparsify(renamed, name[sampled], 12, 1e-2)
    assert torch.where(a.token_ids >= 0, name[a.token_ids], -1).tolist() == b.token_ids.tolist()
    work = a.log_probs.dtype
    # The sum runs in another order: its logarithm, below 8, moves by an ulp or two.
    torch.testing.assert_close(a.log_probs, b.log_probs, rtol=0, atol=2 * ulp(8, work))
    torch.testing.assert_close(a.log_tail, b.log_tail, rtol=0, atol=4 * ulp(8, work))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [3, 50, 1031])
def test_a_batch_is_its_rows_bit_for_bit(V: int, dtype: torch.dtype) -> None:
    logits, sampled = normal(2, 3, V, seed=26, scale=3.0, dtype=dtype), ids(2, 3, below=V, seed=27)
    whole, whole_grad = results(logits, sampled, max_support=16, tail_mass=1e-2)
    for i in range(2):
        for j in range(3):
            row, grad = results(logits[i, j], sampled[i, j], max_support=16, tail_mass=1e-2)
            assert same_policy(whole[i, j], row)
            assert same_bits(whole_grad[i, j], grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [1, 120, 200])
def test_chunks_do_not_change_a_bit(elements: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, sampled = normal(7, 50, seed=28, scale=3.0, dtype=dtype), ids(7, below=50, seed=29)
    logits[3, ::5] = -INF
    sampled[3] = 1
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 1])
    options = {"max_support": 9, "tail_mass": 1e-2, "temperature": 0.7, "loss_mask": mask}
    whole, whole_grad = results(logits, sampled, **options)
    monkeypatch.setattr(types, "_CHUNK_ELEMENTS", elements)
    sizes = [len(range(7)[rows]) for rows in types.row_chunks(logits)]
    assert sizes == {1: [1] * 7, 120: [2, 2, 2, 1], 200: [4, 3]}[elements]
    chunked, chunked_grad = results(logits, sampled, **options)
    assert same_policy(whole, chunked)
    assert same_bits(whole_grad, chunked_grad)


def test_chunks_are_larger_away_from_the_cpu() -> None:
    """A GPU wants few launches, a CPU temporaries that fit its cache; every row comes once, in order."""
    counts = []
    for device in ("cpu", "meta"):
        logits = torch.empty(40_000, 1000, device=device, dtype=torch.bfloat16)
        slices = list(types.row_chunks(logits))
        assert [row for rows in slices for row in range(40_000)[rows]] == list(range(40_000))
        counts.append(len(slices))
    assert counts[0] > 7 * counts[1] >= 7


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_runs_are_bit_equal(dtype: torch.dtype) -> None:
    logits, sampled = normal(64, 3000, seed=30, scale=3.0, dtype=dtype), ids(64, below=3000, seed=31)
    (a, a_grad), (b, b_grad) = results(logits, sampled), results(logits, sampled)
    assert same_policy(a, b)
    assert same_bits(a_grad, b_grad)


def test_strides_do_not_matter() -> None:
    logits, sampled = normal(4, 6, 30, seed=32, scale=3.0), ids(4, 5, below=30, seed=33)
    shifted = logits[:, :-1]  # what predicts the next token: not contiguous
    transposed = shifted.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    a, b = sparsify(shifted.contiguous(), sampled, 8), sparsify(transposed, sampled, 8)
    assert same_policy(sparsify(shifted, sampled, 8), a)
    assert torch.equal(a.token_ids, b.token_ids)
    torch.testing.assert_close(a.log_probs, b.log_probs, rtol=0, atol=2 * ulp(10, F32))


def test_the_caller_keeps_its_logits() -> None:
    logits = normal(3, 20, seed=34)
    before = logits.clone()
    results(logits, torch.tensor([1, 2, 3]), max_support=4)
    sparsify(logits, torch.tensor([1, 2, 3]), 4)
    assert same_bits(logits, before)


# ---- log-sum-exp ---------------------------------------------------------------------------------------------------


def test_log_norms_by_hand() -> None:
    """The largest scaled logit, and the log-sum-exp relative to it; what is not a distribution has no finite one."""
    logits = torch.tensor([[0.0, 0.0], [1.0, -INF], [4096.0, 4096.0], [INF, 0.0], [math.nan, 0.0], [-INF, -INF]])
    found = log_norms(logits)
    assert found[:3, 0].tolist() == [0.0, 1.0, 4096.0]
    assert found[:3, 1].tolist() == close([math.log(2), 0.0, math.log(2)], rel=1e-7)
    assert not found[3:, 1].isfinite().any()
    peak, rest = log_norms(LogitTransform(temperature=0.5).read(torch.tensor([[0.0, 2.0]], dtype=F64)))[0].tolist()
    assert peak == 4.0
    assert rest == close(math.log1p(math.exp(-4)), rel=0, abs=3e-16)  # the logarithm of a rounded 1.018
