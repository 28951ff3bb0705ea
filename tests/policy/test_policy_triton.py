"""The row kernels against their definition: the same tokens, bit for bit, and numbers as close to the truth."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rows_cases import (
    BF16,
    CAPPED,
    DEVICE,
    DTYPES,
    F16,
    F32,
    F64,
    INF,
    LOGITS,
    NAN,
    PLAIN,
    REFERENCE,
    SCALED,
    TRITON,
    all_same_bits,
    assert_empty,
    assert_gradient,
    compare,
    exact_gradient,
    exact_logits,
    exactly,
    integers,
    narrowest,
    normal,
    on_device,
    poisoned,
    quiet,
    run,
    same_bits,
    spectrum,
    upstream,
)
from torch import Tensor

import troll
from troll.errors import InputError
from troll.policy.scoring import LogitTransform, MostProbable, Scores, Upstream, gradient, reference
from troll.policy.scoring import triton as launchers
from troll.policy.scoring import triton_bits as numbers

pytestmark = quiet
device = on_device()
HOWS = ["select", "given"]
SUBSETS = list(itertools.product([True, False], repeat=3))


def support_of(how: str, x: Tensor, sampled: Tensor, K: int, tail_mass: float, logit: LogitTransform = PLAIN) -> object:
    """A support to be selected, or the one that other logits would select."""
    if how == "select":
        return MostProbable(K, tail_mass)
    other = (x.float() + normal(*x.shape, seed=99, scale=0.4)).to(x.dtype)
    return run(other, sampled, MostProbable(K, tail_mass), logit, choice=REFERENCE).token_ids


# ---- scores: numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("logit", LOGITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tokens_are_the_same_and_the_numbers_as_close_to_the_truth(
    dtype: torch.dtype, logit: LogitTransform, how: str
) -> None:
    x, sampled = spectrum(4, 1300, dtype, logit)
    found = compare(x, sampled, support_of(how, x, sampled, 13, 1e-4, logit), logit)
    sizes = (found.token_ids >= 0).sum(-1)
    assert sizes.max() == 13
    assert logit.softcap is not None or sizes.min() < 13
    assert found.log_tail.dtype == found.entropy.dtype == found.log_norm.dtype == F32


@pytest.mark.parametrize(
    ("V", "K"),
    [
        *itertools.product([1, 2, 31, 32, 33, 511, 512, 513, 1000], [1, 5, 64]),
        *itertools.product([2, 33, 513], [2, 3]),
    ],
)
def test_sizes_that_divide_nothing(V: int, K: int) -> None:
    x, sampled = spectrum(2, V, [BF16, F32][(V + K) % 2], seed=V + K)
    found = compare(x, sampled, MostProbable(K, 0.0))
    assert found.token_ids.shape == (2, min(K, V))
    if K == 5:
        compare(x, sampled, support_of("given", x, sampled, K, 0.0))


@pytest.mark.parametrize(("V", "K", "dtype"), [(1000, 100, F32), (2000, 256, BF16), (5000, 64, F16), (20_000, 5, BF16)])
def test_larger_sizes(V: int, K: int, dtype: torch.dtype) -> None:
    x, sampled = spectrum(3, V, dtype, seed=V)
    compare(x, sampled, MostProbable(K, 1e-6))
    compare(x, sampled, support_of("given", x, sampled, K, 1e-6))


@pytest.mark.parametrize("tail_mass", [0.0, 1e-9, 1e-5, 0.3])
@pytest.mark.parametrize("logit", [SCALED, CAPPED])
def test_as_many_tokens_as_cover_the_mass(tail_mass: float, logit: LogitTransform) -> None:
    x, sampled = spectrum(4, 700, F32, logit, seed=5)
    x[2:, 100:103] += 12.0
    if tail_mass > 0:  # in fp32 the mass that is left is known to some 1e-7 of all
        sharp = narrowest(exact_logits(x, logit), 40, tail_mass)
        assert sharp > (0 if tail_mass < 1e-8 else 1e-7 if tail_mass < 1e-4 else 1e-6)
    found = compare(x, sampled, MostProbable(40, tail_mass), logit)
    sizes = (found.token_ids >= 0).sum(-1)
    assert sizes.max() == 40 or tail_mass == 0.3
    if tail_mass == 0.3 and logit.softcap is None:
        assert sizes.min() < 5
    if tail_mass == 0.0:
        assert sizes.min() == 40


def test_the_mass_that_is_left_is_compared_in_double_precision() -> None:
    """A tail of 1e-10 more or less than what is left, of itself, where fp32 is off by 6e-8."""
    x, sampled = normal(1, 9, seed=6, scale=2.0), torch.tensor([0])
    x[0, 0] = 9.0
    everything = run(x, sampled, MostProbable(9, 0.0)).log_probs[0].double().exp()
    left = everything.flip(0).cumsum(0).flip(0)
    for count in (1, 4, 8):
        for factor, more in ((1 + 1e-10, 0), (1 - 1e-10, 1)):
            found = run(x, sampled, MostProbable(9, left[count].item() * factor))
            assert (found.token_ids[0] >= 0).sum().item() == count + more


@triton.jit
def _tanh(x_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, numbers.tanh(tl.load(x_ptr + at)))


def test_the_soft_cap_is_exact_to_a_few_last_places() -> None:
    """Relative to tanh itself, also near 0; 1 − t of the quotient has 1.3 bits less than t at the border, ¼."""
    x = torch.cat([torch.linspace(-12, 12, 2001), torch.linspace(-0.3, 0.3, 2000), torch.tensor([0.0, 1e-30, -1e-30])])
    x = torch.cat([x, torch.logspace(-8, 1, 4096 - len(x) - 4), torch.tensor([INF, -INF, 0.25, -0.25])]).to(DEVICE)
    out = torch.empty_like(x)
    _tanh[(1,)](x, out, SIZE=4096)
    truth = x.double().tanh()
    places = torch.where(x.abs() < 0.25, 1.5, 4.0) * 2.0**-24
    assert ((out.double() - truth).abs() <= places * truth.abs()).all()
    assert out[-4:-2].tolist() == [1.0, -1.0]


# ---- scores: which tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [1, 2, 40])
def test_ties_go_to_the_lower_id(values: int, dtype: torch.dtype) -> None:
    """Few values: ties within chunks, between chunks and between blocks, of both zeros too."""
    whole = integers(2, 1400, below=values, seed=values)
    x = torch.where((whole == 0) & (integers(2, 1400, below=2, seed=7) == 0), -0.0, whole / 4)
    x[1] = -x[1]
    sampled = integers(2, below=1400, seed=8)
    for K in (5, 64):
        found = compare(x.to(dtype), sampled, MostProbable(K, 0.0))
        if values == 1:
            for ids, token in zip(found.token_ids.tolist(), sampled.tolist(), strict=True):
                assert ids == [token, *(i for i in range(K) if i != token)][:K]


def test_the_largest_may_all_lie_together_or_all_apart() -> None:
    V, K = 2048 + 40, 5
    together, apart, last, equal = (torch.arange(V, device=DEVICE) / V for _ in range(4))
    together[[64, 65, 70, 95, 96]] = torch.tensor([7.0, 9.0, 9.0, 8.0, 6.0])
    apart[[3, 511, 512, 1600, V - 1]] = torch.tensor([5.0, 6.0, 6.0, 9.0, 9.0])
    last[-3:] = torch.tensor([5.0, 5.0, 5.0])
    equal[::32] = 4.0  # the maximum of every chunk
    x, sampled = torch.stack([together, apart, last, equal]), torch.tensor([65, 3, V - 1, 0])
    found = compare(x, sampled, MostProbable(K, 0.0)).token_ids.tolist()
    assert found == [
        [65, 70, 95, 64, 96],
        [3, 1600, V - 1, 511, 512],
        [V - 1, V - 3, V - 2, V - 4, V - 5],
        [0, 32, 64, 96, 128],
    ]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("tail_mass", [0.0, 0.3])
def test_a_sampled_token_outside_the_most_probable_costs_the_last_its_place(how: str, tail_mass: float) -> None:
    """Not among the K; among the next power of two; among the K and not needed; needed."""
    V, K = 600, 5
    x = normal(4, V, seed=11, scale=0.01)
    x[:, 200:208] = 8.0 - 0.5 * torch.arange(8, device=DEVICE)
    sampled = torch.tensor([400, 205, 203, 201])
    assert narrowest(exact_logits(x, PLAIN), 8, tail_mass) > 1e-3 or tail_mass == 0
    found = compare(x, sampled, support_of(how, x, sampled, K, tail_mass))
    if how == "select":
        most = [200, 201, 202, 203, 204] if tail_mass == 0 else [200, 201, 202]  # 8e³ of 2e⁴, and 600 others
        for ids, token in zip(found.token_ids.tolist(), sampled.tolist(), strict=True):
            expected = [token, *(i for i in most if i != token)][:K]
            assert ids == expected + [-1] * (K - len(expected))


def test_max_support_above_the_vocabulary_keeps_everything() -> None:
    x, sampled = normal(3, 40, seed=12), torch.tensor([0, 20, 39])
    found = compare(x, sampled, MostProbable(100, 0.0))
    assert found.log_tail.tolist() == [-INF] * 3
    assert [sorted(ids) for ids in found.token_ids.tolist()] == [list(range(40))] * 3


def test_a_given_token_that_is_impossible_leaves_the_support() -> None:
    x = normal(3, 700, seed=13)
    support = torch.tensor([[5, 600, 1, -1], [31, -1, 32, 33], [699, 511, 512, 0]])
    x[0, 600], x[1, 33], x[2, 0] = -INF, -INF, -INF
    found = compare(x, support[:, 0], support)
    assert found.token_ids.tolist() == [[5, -1, 1, -1], [31, -1, 32, -1], [699, 511, 512, -1]]


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    st.integers(1, 90),
    st.integers(1, 2),
    st.integers(0, 2**31),
    st.sampled_from([1, 2, 5, 40, 10_000]),
    st.sampled_from([0.0, 0.1, 0.9]),
    st.integers(1, 20),
    st.sampled_from([0.0, 1e-3, 0.05, 0.5]),
    st.sampled_from(DTYPES),
    st.sampled_from([PLAIN, SCALED]),
)
def test_any_small_rows(
    V: int,
    N: int,
    seed: int,
    values: int,
    excluded: float,
    K: int,
    tail_mass: float,
    dtype: torch.dtype,
    logit: LogitTransform,
) -> None:
    whole = integers(N, V, below=2 * values + 1, seed=seed) - values
    x = (whole / max(1.0, values / 8)).to(dtype)
    x[integers(N, V, below=1000, seed=seed + 1) < 1000 * excluded] = -INF
    sampled = integers(N, below=V, seed=seed + 2)
    at = torch.arange(N, device=DEVICE)
    x[at, sampled] = x[at, sampled].clamp(min=-8.0)
    assume(tail_mass == 0 or narrowest(exact_logits(x, logit), K, tail_mass) > 2e-6)
    found = compare(x, sampled, MostProbable(K, tail_mass), logit)
    again = compare(x, sampled, found.token_ids, logit)
    # the tail is summed in another order where the support was selected
    assert all_same_bits((*again[:2], *again[3:]), (*found[:2], *found[3:]))


# ---- scores: excluded tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_excluded_tokens(dtype: torch.dtype, how: str) -> None:
    """Nearly all; all but two; whole chunks and blocks, at the front and at the end; every other chunk."""
    V = 1700
    x = normal(6, V, seed=14, scale=3.0)
    x[0, integers(V, below=100, seed=15) < 95] = -INF
    x[1] = -INF
    x[1, [700, 1300]] = torch.tensor([1.0, -2.0])
    x[2, :1024] = -INF
    x[3, 512:] = -INF
    x[4].view(-1, 2 * 10)[:, :10] = -INF
    x[5, :1664].view(-1, 64)[:, :32] = -INF
    sampled = torch.tensor([1, 1300, 1600, 100, 15, 40])
    x[0, 1] = 0.0
    found = compare(x.to(dtype), sampled, support_of(how, x.to(dtype), sampled, 7, 0.0))
    assert (found.token_ids[1] >= 0).sum() == 2
    assert found.log_tail[1].item() == -INF


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("token", [0, 31, 32, 511, 512, 1000, 1100])
def test_one_possible_token_has_all_the_probability(token: int, dtype: torch.dtype, how: str) -> None:
    x = torch.full((1, 1101), -INF, dtype=dtype)
    x[0, token] = -300.0
    sampled = torch.tensor([token])
    support = MostProbable(5, 1e-5) if how == "select" else torch.tensor([[token, 7, -1]])
    found = compare(x, sampled, support)
    assert found.token_ids[0].tolist() == [token] + [-1] * (found.token_ids.shape[-1] - 1)
    assert (found.log_probs[0, 0].item(), found.log_tail.item(), found.entropy.item()) == (0.0, -INF, 0.0)
    assert found.log_norm.tolist() == [[-300.0, 0.0]]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_lowest_number_of_a_type_excludes_tokens_too(dtype: torch.dtype, how: str) -> None:
    """As masks are made with ``torch.finfo(dtype).min``: such tokens are possible and have no probability."""
    lowest = torch.finfo(dtype).min
    x = normal(4, 1200, seed=16)
    x[0, integers(1200, below=10, seed=17) < 9] = lowest
    x[1] = lowest
    x[1, [40, 41, 900]] = torch.tensor([1.0, 3.0, 2.0])
    x[2, :1024] = lowest
    x[3, 1:] = -INF
    x[3, 5:20] = lowest
    x, sampled = x.to(dtype), torch.tensor([2, 900, 1100, 0])
    x[0, 2] = 1.0
    support = support_of(how, x, sampled, 9, 0.0)
    found, theirs = (run(x, sampled, support, choice=c) for c in (TRITON, REFERENCE))
    assert found.token_ids.tolist() == theirs.token_ids.tolist()
    for a, b in zip(found[1:], theirs[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-7, atol=1e-6)
    excluded = x[1, found.token_ids[1].clamp(min=0)] == lowest
    assert excluded.any() or how == "given"
    assert (found.log_probs[1][excluded & (found.token_ids[1] >= 0)] <= -6e4).all()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("logit", [PLAIN, LogitTransform(temperature=0.25)])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_tail_that_underflows_is_exact(dtype: torch.dtype, logit: LogitTransform, how: str) -> None:
    """Logits spread over thousands: what is left after few tokens is e^−500 or e^−8000, never 0, and not 1 − Σ."""
    V = 1400
    x = torch.full((5, V), -9000.0)
    x[0, [3, 900]] = torch.tensor([0.0, -125.0])
    x[1, 5:9], x[1, 600] = 10.0, -2000.0
    x[2] = -4.0 * torch.arange(V, device=DEVICE)
    x[3, 31], x[3, 1399] = 0.0, -25.0  # 1e-11, and in fp32 nothing beside 1
    x[4, :3], x[4, 3] = 0.0, -60.0  # 9e-27, and below 1e-30 at a quarter of the temperature
    x, sampled = x.to(dtype), torch.tensor([3, 5, 0, 31, 0])
    ids = torch.tensor([[3, 4, 6], [5, 6, 8], [0, 1, 2], [31, 0, 1], [0, 1, 2]])
    found = compare(x, sampled, MostProbable(3, 0.0) if how == "select" else ids, logit)
    assert (found.log_tail > -INF).all()
    if how == "given":
        expected = torch.tensor([-125.0, 0.0, -12.0, -25.0, -60.0]) / logit.temperature
        expected += torch.tensor([0.0, -math.log(4), 0.0, 0.0, -math.log(3)])
        torch.testing.assert_close(found.log_tail, expected, rtol=3e-7, atol=0)


def test_a_tail_below_every_double_is_exact() -> None:
    """Only tokens at −5000, in other blocks and in the chunk of the kept one."""
    x = torch.full((3, 1100), -INF)
    x[:, 7] = 0.0
    x[0, 1000:1003], x[1, 8:11], x[2, 40:43] = -5000.0, -5000.0, -5000.0
    found = compare(x, torch.tensor([7, 7, 7]), torch.tensor([[7, -1]] * 3))
    expected = torch.full((3,), -5000.0 + math.log(3), dtype=F64).to(F32)
    assert torch.equal(found.log_tail, expected)
    assert torch.equal(compare(x, torch.tensor([7, 7, 7]), MostProbable(1, 0.0)).log_tail, expected)


# ---- scores: rows without a distribution ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("logit", [PLAIN, CAPPED])
def test_rows_that_define_no_distribution_have_no_support(
    logit: LogitTransform, dtype: torch.dtype, entropy: bool, how: str
) -> None:
    """NaN at the front, in the middle, at the end, everywhere, in a whole chunk; +inf; only −inf; good ones between."""
    V = 1100
    x = normal(10, V, seed=18)
    for row, at in enumerate(([0], [600], [V - 1], list(range(V)), list(range(64, 96)))):
        x[row, at] = NAN
    x[5, 40], x[6] = INF, -INF
    x[7, [3, 900]] = torch.tensor([NAN, INF])
    sampled = integers(10, below=V, seed=19)
    x[9, sampled[9]] = -INF
    x = x.to(dtype)
    support: MostProbable | Tensor = MostProbable(4, 1e-3)
    if how == "given":
        support = torch.cat([sampled[:, None], torch.tensor([[2, 50, -1]]).expand(10, 3)], dim=1)
    found = compare(x, sampled, support, logit, entropy=entropy)
    broken = [0, 1, 2, 3, 4, 7] if logit.softcap else [0, 1, 2, 3, 4, 5, 6, 7, 9]  # a soft cap makes ±inf a number
    assert (found.token_ids[:, 0] < 0).nonzero()[:, 0].tolist() == broken


@pytest.mark.parametrize("token", [-1, -100, 300, 2**31, 2**32 + 5, -(2**32) + 5])
def test_a_sampled_token_that_is_none_is_refused(token: int) -> None:
    x, sampled = normal(2, 2, 300, seed=21), integers(2, 2, below=300, seed=22)
    sampled[1, 1] = token
    for on_invalid in ("raise", "mask"):
        with pytest.raises(InputError) as caught:
            troll.sparsify(x, sampled, 1, impl="triton", on_invalid=on_invalid)
        assert caught.value.problem == f"sampled must have ids from 0 to 299, got token {token} at position [1, 1]"
    mask = torch.ones(2, 2)
    mask[1, 1] = 0
    found = troll.sparsify(x, sampled, 1, impl="triton", loss_mask=mask)
    assert torch.equal(found.valid, mask > 0)


@pytest.mark.parametrize(
    ("spoil", "given"),
    [
        (NAN, "logit nan of token 44 at position [1, 0] (1 such positions)"),
        (INF, "logit inf of token 44 at position [1, 0] (1 such positions)"),
        (-INF, "token 44 with logit −inf at position [1, 0]"),
    ],
)
def test_logits_that_define_no_distribution_are_refused_by_name(spoil: float, given: str) -> None:
    x, sampled = normal(2, 1, 300, seed=21), integers(2, 1, below=300, seed=22)
    x[1, 0, 44], sampled[1, 0] = spoil, 44
    good = torch.ones(2, 1, dtype=torch.bool)
    good[1, 0] = False
    for score in (
        lambda **o: troll.sparsify(x, sampled, 4, impl="triton", **o),
        lambda **o: troll.restrict(x, troll.sparsify(x.nan_to_num(), sampled, 4), impl="triton", **o),
    ):
        with pytest.raises(InputError) as caught:
            score()
        assert caught.value.problem.endswith(f", got {given}")
        assert torch.equal(score(on_invalid="mask").valid, good)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("entropy", [True, False])
def test_rows_that_do_not_count_are_not_read(how: str, entropy: bool) -> None:
    x, sampled = spectrum(6, 700, F32, seed=23)
    support = support_of(how, x, sampled, 5, 1e-3)
    whole = run(x, sampled, support, entropy=entropy)
    counted = torch.tensor([True, False, True, False, False, True])
    x[[1, 3, 4]] = NAN
    found = run(x, sampled, support, counted=counted, entropy=entropy)
    assert_empty(found, ~counted)
    assert all_same_bits((a[counted] for a in found), (a[counted] for a in whole))
    nothing = run(x, sampled, support, counted=torch.zeros(6, dtype=torch.bool), entropy=entropy)
    assert_empty(nothing, torch.ones(6, dtype=torch.bool))


# ---- scores: memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
def test_rows_may_lie_anywhere(how: str) -> None:
    """Gaps between rows, columns first, a row repeated; sampled tokens, mask and support as views."""
    x, sampled = spectrum(4, 600, BF16, seed=24)
    support = support_of(how, x, sampled, 5, 1e-3)
    counted = torch.tensor([True, True, False, True])
    expected = run(x, sampled, support, counted=counted)
    wide = torch.full((4, 777), NAN, dtype=BF16)
    wide[:, :600] = x
    column = torch.stack([sampled, sampled - sampled], dim=1)[:, 0]
    mask = torch.stack([counted, ~counted], dim=1)[:, 0]
    given = support if how == "select" else torch.cat([support, support], dim=1)[:, : support.shape[1]]
    assert column.stride() == mask.stride() == (2,)
    for rows in (wide[:, :600], x.T.contiguous().T):
        assert not rows.is_contiguous()
        found = run(rows, column, given, counted=mask)
        assert all_same_bits(found[:4], expected[:4])
        assert same_bits(found.log_norm[counted], expected.log_norm[counted])
    one = run(x[:1].expand(3, -1), sampled[:1].expand(3), MostProbable(5, 1e-3))
    first = run(x[:1], sampled[:1], MostProbable(5, 1e-3))
    assert all(all_same_bits([number[i] for number in one], [number[0] for number in first]) for i in range(3))


def test_an_old_policy_gives_its_tokens_as_views() -> None:
    """``restrict`` passes ``old.token_ids`` and its first column."""
    x, sampled = normal(2, 3, 300, seed=25), integers(2, 3, below=300, seed=26)
    old = troll.sparsify(x + normal(2, 3, 300, seed=27, scale=0.2), sampled, 8, 1e-3, impl="reference")
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])[:, :3]
    ours, theirs = (troll.restrict(x, old, loss_mask=mask, impl=impl) for impl in ("triton", "reference"))
    assert torch.equal(ours.token_ids, theirs.token_ids)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=0, atol=2e-6)
    assert torch.equal(ours.valid, mask > 0)


@pytest.mark.parametrize("how", HOWS)
def test_the_scores_are_written_where_they_belong(how: str) -> None:
    """Into the middle of larger tensors, with nothing around them touched."""
    x, sampled = spectrum(3, 600, F32, seed=28)
    support = support_of(how, x, sampled, 5, 1e-3)
    room = Scores.empty(7, 600, support, F32, DEVICE)
    for number in room:
        number.fill_(-77)
    found = run(x, sampled, support, out=room.at(slice(2, 5)))
    assert all_same_bits(found, run(x, sampled, support))
    for number, part in zip(room, found, strict=True):
        assert part.data_ptr() == number[2:].data_ptr()
        assert (number[:2] == -77).all()
        assert (number[5:] == -77).all()


@pytest.mark.parametrize("how", HOWS)
def test_a_row_does_not_depend_on_the_rows_around_it_nor_on_the_entropy(how: str) -> None:
    x, sampled = spectrum(4, 1300, F32, seed=29)
    support = support_of(how, x, sampled, 6, 1e-3)
    whole, without = run(x, sampled, support), run(x, sampled, support, entropy=False)
    assert all_same_bits((*without[:3], without[4]), (*whole[:3], whole[4]))
    assert without.entropy.tolist() == [0.0] * 4
    for i in range(4):
        part = support[i : i + 1] if isinstance(support, Tensor) else support
        one = run(x[i : i + 1], sampled[i : i + 1], part)
        assert all_same_bits([number[0] for number in one], [number[i] for number in whole])


def test_no_rows() -> None:
    x, sampled = torch.empty(0, 40), torch.empty(0, dtype=torch.long)
    found = run(x, sampled, MostProbable(5, 0.0))
    assert [tuple(number.shape) for number in found] == [(0, 5), (0, 5), (0,), (0,), (0, 2)]
    gradient(x, PLAIN, found, Upstream(found.log_probs, None), x, TRITON)
    assert troll.sparsify(torch.empty(2, 0, 40), torch.empty(2, 0, dtype=torch.long), 5, impl="triton").shape == (2, 0)


@pytest.mark.parametrize(("blocks", "warps", "parts"), [(1, 8192, 4), (1, 9, 3), (1, 3, 1), (2, 8192, 2), (4, 8192, 1)])
def test_a_row_may_be_read_in_several_parts(
    blocks: int, warps: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    V = 8192 + 100 if blocks < 4 else 5000
    x, sampled = spectrum(3, V, BF16, seed=30)
    monkeypatch.setattr(launchers, "_WARPS", 8192)
    expected = run(x, sampled, MostProbable(9, 1e-4))
    monkeypatch.setattr(launchers, "SCAN", {"BLOCKS": blocks, "num_warps": 1})
    monkeypatch.setattr(launchers, "_WARPS", warps)
    width = launchers._width(3, V)
    assert (width % (512 * blocks), -(-V // width)) == (0, parts)
    assert all_same_bits(run(x, sampled, MostProbable(9, 1e-4)), expected)
    compare(x, sampled, support_of("given", x, sampled, 9, 1e-4))


@given(st.integers(0, 100_000), st.integers(1, 400_000))
def test_the_parts_of_a_row_cover_it_and_are_not_too_many(N: int, V: int) -> None:
    step = launchers.SCAN["BLOCKS"] * 512
    width = launchers._width(N, V)
    parts = -(-V // width)
    assert width % step == 0
    assert parts == 1 or (parts * N <= launchers._WARPS and width >= 4 * step)


@pytest.mark.parametrize("how", HOWS)
def test_more_rows_than_there_is_scratch_for(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 256 rows at a time: each part is given its own, and what it finds is written behind the others.

    Here the definition works off the parts.
    """
    x, sampled = spectrum(600, 33, BF16, seed=31)
    support = support_of(how, x, sampled, 3, 1e-3)
    counted = integers(600, below=4, seed=32) > 0
    sizes = []

    def part(tile: Tensor, *rest: Any) -> None:
        sizes.append(len(tile))
        reference.score(tile, *rest)

    monkeypatch.setattr(launchers, "_score", part)
    theirs = run(x, sampled, support, counted=counted, choice=REFERENCE)
    for scratch, expected in ((1, [256, 256, 88]), (16 * 300, [300, 300]), (1 << 26, [600])):
        sizes.clear()
        monkeypatch.setattr(launchers, "_SCRATCH_BYTES", scratch)
        assert all_same_bits(run(x, sampled, support, counted=counted), theirs)
        assert sizes == expected


def test_memory_that_was_not_written_is_not_read() -> None:
    x, sampled = spectrum(4, 1300, BF16, seed=33)
    x[2, 7] = NAN
    counted = torch.tensor([True, True, True, False])
    supports = [MostProbable(1, 0.0), MostProbable(5, 1e-3)]
    supports.append(support_of("given", x, sampled, 5, 1e-3))
    for support, (entropy, mask) in itertools.product(supports, ((True, None), (False, counted))):
        clean = run(x, sampled, support, counted=mask, entropy=entropy)
        with poisoned() as made:
            found = run(x, sampled, support, counted=mask, entropy=entropy)
        assert made[0] >= 9
        there = clean.token_ids[:, 0] >= 0
        assert there.tolist() == [True, True, False, mask is None]
        # where a row has no distribution or does not count, what its normaliser is means nothing
        assert all_same_bits(found[:4], clean[:4])
        assert same_bits(found.log_norm[there], clean.log_norm[there])
        arriving, out = upstream(clean), torch.empty_like(x)
        gradient(x, PLAIN, clean, arriving, out, TRITON)
        with poisoned() as made:
            again = torch.empty_like(x)
            gradient(x, PLAIN, found, arriving, again, TRITON)
        assert made[0] >= 3
        assert same_bits(again, out)
        assert not out.isnan().any()


# ---- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "dtype", "logit"),
    [
        *itertools.product([SUBSETS[0]], DTYPES, LOGITS),
        *((parts, dtype, logit) for parts in SUBSETS[1:] for dtype, logit in ((F32, PLAIN), (BF16, CAPPED))),
    ],
)
def test_the_gradient_is_as_close_to_the_truth(
    parts: tuple[bool, bool, bool], dtype: torch.dtype, logit: LogitTransform
) -> None:
    x, sampled = spectrum(4, 700, dtype, logit, seed=40)
    scores = run(x, sampled, MostProbable(9, 1e-4), logit, choice=REFERENCE)
    arriving, out = upstream(scores, parts), torch.empty_like(x)
    gradient(x, logit, scores, arriving, out, TRITON)
    assert_gradient(x, logit, scores, arriving, out)
    assert (out.abs().max().item() > 1e-4) == any(parts)
    if not any(parts):
        assert (out == 0).all()
    inplace = x.clone()
    gradient(inplace, logit, scores, arriving, inplace, TRITON)
    assert same_bits(inplace, out)


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_the_gradient_takes_the_type_of_its_place(out_dtype: torch.dtype) -> None:
    x, sampled = spectrum(4, 700, BF16, seed=41)
    scores = run(x, sampled, MostProbable(9, 1e-4), choice=REFERENCE)
    arriving, out = upstream(scores), torch.empty(4, 700, dtype=out_dtype)
    gradient(x, PLAIN, scores, arriving, out, TRITON)
    assert_gradient(x, PLAIN, scores, arriving, out)


@pytest.mark.parametrize("logit", [PLAIN, CAPPED])
@pytest.mark.parametrize("cuts", [[0, 1, 700], [0, 37, 300, 512, 513, 700], [0, 700]])
def test_slices_of_the_vocabulary_are_slices_of_the_gradient(cuts: list[int], logit: LogitTransform) -> None:
    x, sampled = spectrum(4, 700, F32, logit, seed=42)
    sampled[0], sampled[2] = 0, 699
    scores = run(x, sampled, MostProbable(9, 1e-4), logit, choice=REFERENCE)
    arriving, whole, out = upstream(scores), torch.empty_like(x), torch.full_like(x, NAN)
    gradient(x, logit, scores, arriving, whole, TRITON)
    for first, end in itertools.pairwise(cuts):
        gradient(x[:, first:end], logit, scores, arriving, out[:, first:end], TRITON, first=first)
    assert same_bits(out, whole)


@pytest.mark.parametrize("V", [1, 2, 33, 2048, 2049, 4100])
def test_the_gradient_of_rows_of_any_length(V: int) -> None:
    x, sampled = spectrum(2, V, F32, seed=V)
    scores = run(x, sampled, MostProbable(3, 0.0), choice=REFERENCE)
    arriving, wide = upstream(scores), torch.full((2, V + 3), 5.0)
    gradient(x, PLAIN, scores, arriving, wide[:, :V], TRITON)
    assert (wide[:, V:] == 5.0).all()
    assert_gradient(x, PLAIN, scores, arriving, wide[:, :V])


def tails() -> tuple[Tensor, Tensor]:
    """Given supports, whose tails are: empty for lack of tokens; of excluded ones; e^−200; e^−30; nearly everything."""
    x = torch.full((5, 600), -INF)
    ids = torch.tensor([[3, 4], [5, 70], [8, 9], [10, 599], [1, 2]])
    for row, (a, b) in enumerate(ids.tolist()):
        x[row, [a, b]] = torch.tensor([1.0, 0.5])
    x[2, [20, 580]] = torch.tensor([-200.0, -201.0])
    x[3, [500, 31, 10]] = torch.tensor([-30.0, -31.0, 1.5])
    x[4] = normal(600, seed=43)
    return x, ids


@pytest.mark.parametrize("parts", SUBSETS)
def test_the_gradient_of_tails_from_nothing_to_nearly_everything(parts: tuple[bool, bool, bool]) -> None:
    x, ids = tails()
    scores = run(x, ids[:, 0], ids)
    assert scores.log_tail[:2].tolist() == [-INF, -INF]
    assert -202 < scores.log_tail[2] < -200
    arriving, out = upstream(scores, parts), torch.empty_like(x)
    gradient(x, PLAIN, scores, arriving, out, TRITON)
    assert_gradient(x, PLAIN, scores, arriving, out)
    assert (out[x == -INF] == 0).all()
    if parts[1]:  # ∂ log τ / ∂z_j = p_j / τ − p_j, which is 1 / (1 + e^−1) here, however small τ is
        share = arriving.log_tail[2].item() / (1 + math.exp(-1))
        assert out[2, 20].item() == pytest.approx(share, rel=1e-5)


def test_an_empty_tail_has_no_gradient_whatever_arrives_there() -> None:
    x, sampled = normal(2, 7, seed=44), torch.tensor([1, 2])
    scores = run(x, sampled, MostProbable(7, 0.0))
    assert scores.log_tail.tolist() == [-INF, -INF]
    out = torch.empty_like(x)
    for g in (torch.tensor([3.0, -1e30]), torch.tensor([NAN, INF])):
        gradient(x, PLAIN, scores, Upstream(None, g), out, TRITON)
        assert (out == 0).all()


def test_gradients_at_unused_slots_go_nowhere() -> None:
    x, sampled = spectrum(3, 300, F32, seed=45)
    x[:, 5] += 25.0
    scores = run(x, sampled, MostProbable(9, 1e-3))
    unused = scores.token_ids < 0
    assert unused.any()
    arriving = upstream(scores, (True, True, False))
    expected, out = torch.empty_like(x), torch.empty_like(x)
    gradient(x, PLAIN, scores, arriving, expected, TRITON)
    spoiled = arriving._replace(log_probs=arriving.log_probs.masked_fill(unused, NAN))
    gradient(x, PLAIN, scores, spoiled, out, TRITON)
    assert same_bits(out, expected)


@pytest.mark.parametrize("parts", SUBSETS)
def test_rows_without_a_support_get_zeros_although_they_are_nan(parts: tuple[bool, bool, bool]) -> None:
    x, sampled = spectrum(5, 700, F32, seed=46)
    x[[1, 3]], x[4, 9] = NAN, INF
    scores = run(x, sampled, MostProbable(4, 0.0), counted=torch.tensor([True, False, True, False, True]))
    arriving, out = upstream(scores, parts), torch.full_like(x, NAN)
    gradient(x, PLAIN, scores, arriving, out, TRITON)
    assert (out[[1, 3, 4]] == 0).all()
    good = torch.tensor([0, 2])
    part = Scores(*(number[good] for number in scores))
    assert_gradient(x[good], PLAIN, part, Upstream(*(None if g is None else g[good] for g in arriving)), out[good])


def test_gradients_arrive_in_any_layout() -> None:
    """Expanded by autograd from one number, transposed; and the logits too."""
    x, sampled = spectrum(4, 300, F32, seed=47)
    scores = run(x, sampled, MostProbable(4, 0.0), choice=REFERENCE)
    arriving = Upstream(normal(4, 4, seed=48).T, torch.tensor(0.5).expand(4), normal(4, 2, seed=49)[:, 0])
    out = torch.empty_like(x)
    gradient(x.T.contiguous().T, PLAIN, scores, arriving, out, TRITON)
    assert_gradient(x, PLAIN, scores, arriving, out)
    columns = torch.full((300, 4), NAN).T
    gradient(x, PLAIN, scores, arriving, columns, TRITON)
    assert torch.equal(columns, out)


@pytest.mark.parametrize("how", ["sparsify", "restrict"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_policy_carries_the_gradient(how: str, dtype: torch.dtype) -> None:
    """Through autograd: strided logits, a mask, a temperature; nothing arrives at the tail."""
    base, sampled = normal(2, 4, 310, seed=50, scale=2.0, dtype=dtype), integers(2, 3, below=300, seed=51)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    base[0, 2] = NAN
    old = troll.sparsify(normal(2, 3, 300, seed=52), sampled, 6, 1e-3, temperature=0.8, impl="reference")
    results = []
    for impl in ("triton", "reference"):
        leaf = base.clone().requires_grad_()
        logits = leaf[:, :-1, :300]
        if how == "restrict":
            policy = troll.restrict(logits, old, loss_mask=mask, impl=impl)
        else:
            policy = troll.sparsify(logits, sampled, 6, 1e-3, temperature=0.8, loss_mask=mask, impl=impl)
        kept = policy.log_probs.masked_fill(policy.token_ids < 0, 0.0)
        (kept * normal(*kept.shape, seed=53)).sum().backward()
        results.append((policy, leaf.grad))
    (ours, grad), (theirs, expected) = results
    assert torch.equal(ours.token_ids, theirs.token_ids)
    # some roundings of numbers below 8 each, and bf16 or fp16 once (bf16 is cut off in the interpreter)
    torch.testing.assert_close(grad.float(), expected.float(), rtol=1.01 * torch.finfo(dtype).eps, atol=4e-6)
    assert (grad[0, 2] == 0).all()
    assert (grad[:, 3] == 0).all()
    assert grad.abs().max().item() > 0.5


def test_exact_gradient_is_the_formula() -> None:
    """The yardstick itself, by finite differences of the exact numbers."""
    x = normal(1, 6, seed=54, dtype=F64)
    ids = torch.tensor([[2, 0, -1]])
    arriving = Upstream(normal(1, 3, seed=55), normal(1, seed=56), normal(1, seed=57))
    scores = Scores(ids, *(torch.zeros(1) for _ in range(4)))
    found = exact_gradient(x, CAPPED, scores, arriving)

    def total(row: Tensor) -> float:
        numbers = exactly(row, CAPPED, ids)
        return sum((a * b.double()).sum().item() for a, b in zip(numbers, arriving, strict=True))

    for j in range(6):
        step = torch.zeros_like(x)
        step[0, j] = 1e-6
        assert found[0, j].item() == pytest.approx((total(x + step) - total(x - step)) / 2e-6, abs=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 8192, 8193])
def test_scale_in_place(size: int, dtype: torch.dtype) -> None:
    x = normal(size, seed=60, dtype=dtype)
    before = x.clone()
    launchers.scale_(x, torch.tensor(1.0))
    assert same_bits(x, before)
    launchers.scale_(x, torch.tensor(-2.0))
    assert same_bits(x, before * -2)
    launchers.scale_(x, torch.tensor(0.0))
    assert (x == 0).all()
