"""``impl="torch"``: the choice of the reference, and numbers no further from the truth, with less work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from policy_cases import F32, F64, INF, close, greedy, ids, normal, same_bits, ulp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from troll.policy.scoring import LogitTransform, MostProbable, Scores, Upstream, reference, types
from troll.policy.scoring import cpu as tuned

BF16, F16 = torch.bfloat16, torch.float16
DTYPES = [BF16, F16, F32, F64]
PLAIN, CAPPED = LogitTransform(), LogitTransform(scale=0.7, softcap=5.0, temperature=1.3)
SUBSETS = [x for x in itertools.product([True, False], repeat=3) if any(x)]


@contextmanager
def sizes(blocks: tuple[int, ...] | None = None, chunk: int | None = None) -> Iterator[None]:
    """Select by blocks of these sizes, work in chunks of this many logits."""
    with pytest.MonkeyPatch.context() as patch:
        if blocks is not None:
            patch.setattr(tuned, "_BLOCKS", blocks)
        if chunk is not None:
            patch.setattr(types, "_CHUNK_ELEMENTS", chunk)
        yield


def score(
    module: Any, x: Tensor, logit: LogitTransform, sampled: Tensor, support: Any, counted: Tensor | None, entropy: bool
) -> Scores:
    """The scores, written over numbers that make no sense."""
    scores = Scores.empty(len(x), x.shape[-1], support, x.dtype, x.device)
    for number in scores:
        number.fill_(math.nan if number.is_floating_point() else -7)
    module.score(x, logit, sampled, support, counted, entropy, scores)
    return scores


def gradient(module: Any, x: Tensor, logit: LogitTransform, scores: Scores, upstream: Upstream, out: Tensor) -> None:
    """The gradient of whole rows."""
    module.gradient(x, logit, scores, upstream, out, 0)


# ---- the choice ----------------------------------------------------------------------------------------------------


@st.composite
def rows(draw: st.DrawFn, largest: int = 700) -> tuple[Tensor, Tensor]:
    """Up to three rows, from all different to nearly all equal, with excluded tokens and both zeros; and their tokens.

    Each has a possible token.
    """
    V, N = draw(st.one_of(st.integers(1, largest), st.integers(1, 40))), draw(st.integers(1, 3))
    seed, values = draw(st.integers(0, 2**31)), draw(st.sampled_from([1, 2, 5, 40, 10_000]))
    excluded = draw(st.sampled_from([0.0, 0.1, 0.9, 0.995]))
    gen = torch.Generator().manual_seed(seed)
    whole = torch.randint(-values, values + 1, (N, V), generator=gen)
    z = whole / max(1.0, values / 8)
    z = torch.where((whole == 0) & (torch.rand(N, V, generator=gen) < 0.5), -0.0, z)
    z[torch.rand(N, V, generator=gen) < excluded] = -INF
    sampled = torch.randint(V, (N,), generator=gen)
    z[torch.arange(N), sampled] = z[torch.arange(N), sampled].clamp(min=-8.0)
    return z, sampled


@settings(derandomize=True, deadline=None, max_examples=300)
@given(rows(), st.integers(1, 300), st.sampled_from([F32, F64]), st.sampled_from([(64, 32), (8, 4), (3,), (1,), ()]))
def test_largest_is_a_stable_sort(
    case: tuple[Tensor, Tensor], k: int, dtype: torch.dtype, blocks: tuple[int, ...]
) -> None:
    z, k = case[0].to(dtype), min(k, case[0].shape[-1])
    with sizes(blocks):
        assert torch.equal(tuned.largest(z, k), reference.largest(z, k))


@pytest.mark.parametrize("V", [256, 257, 319, 320, 4095, 4096, 4097])
@pytest.mark.parametrize("k", [1, 2, 10, 16, 21, 32])
@pytest.mark.parametrize("values", [1, 3, 100, 1 << 20])
def test_blocks_of_the_real_size_find_them_too(V: int, k: int, values: int) -> None:
    z = ids(4, V, below=values, seed=V + k).float() - values // 2
    assert torch.equal(tuned.largest(z, k), reference.largest(z, k))


@pytest.mark.parametrize("width", [32, 64])
def test_equal_blocks_and_what_is_behind_the_last_one(width: int) -> None:
    """The best entries in one block, in equal blocks, and among the last V mod width."""
    V = 26 * width + 5
    one_block = torch.zeros(V)
    one_block[3 * width : 3 * width + 4] = torch.tensor([1.0, 3.0, 3.0, 2.0])
    equal = torch.zeros(V)
    equal[[19 * width, 7 * width + 1, 7 * width + 2, 11 * width - 1]] = 1.0
    behind = torch.arange(V) / V
    behind[[V - 2, V - 1]] = torch.tensor([5.0, 5.0])
    z = torch.stack([one_block, equal, behind])
    with sizes((width,)):
        assert 6 * 4 * width <= V
        found = tuned.largest(z, 4).tolist()
    assert found[0] == [3 * width + 1, 3 * width + 2, 3 * width + 3, 3 * width]
    assert found[1] == [7 * width + 1, 7 * width + 2, 11 * width - 1, 19 * width]
    assert found[2] == [V - 2, V - 1, V - 3, V - 4]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    rows(),
    st.integers(1, 300),
    st.sampled_from([0.0, 0.0, 1e-5, 1e-3, 0.05, 0.5]),
    st.sampled_from(DTYPES),
    st.builds(LogitTransform, st.sampled_from([1.0, 0.7]), st.sampled_from([None, 5.0]), st.sampled_from([1.0, 0.6])),
    st.sampled_from([(64, 32), (4, 2)]),
    st.booleans(),
)
def test_the_choice_and_the_numbers_are_those_of_the_reference(
    case: tuple[Tensor, Tensor],
    max_support: int,
    tail_mass: float,
    dtype: torch.dtype,
    logit: LogitTransform,
    blocks: tuple[int, ...],
    entropy: bool,
) -> None:
    x, sampled = case[0].to(dtype), case[1]
    if tail_mass > 0:  # the mass that is left is off by some 1e-7 of itself in either way
        for z, token in zip(logit.read(x).tolist(), sampled.tolist(), strict=True):
            assume(greedy(z, token, max_support, tail_mass)[1] > (1e-13 if dtype == F64 else 2e-6))
    support = MostProbable(max_support, tail_mass)
    with sizes(blocks):
        ours = score(tuned, x, logit, sampled, support, None, entropy)
    theirs = score(reference, x, logit, sampled, support, None, entropy)
    assert torch.equal(ours.token_ids, theirs.token_ids)
    # |log p| ≤ log 700 + 17 / 0.6 < 64, in three roundings each; a sum of e^d is off by an eps or two.
    budget = 4 * torch.finfo(ours.log_tail.dtype).eps * 32
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=budget)
    again = score(tuned, x, logit, sampled, ours.token_ids, None, entropy)
    assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))  # the peak may be 0.0 here and −0.0 there


# ---- the numbers ---------------------------------------------------------------------------------------------------


def realistic(dtype: torch.dtype, logit: LogitTransform, N: int = 24, V: int = 3001) -> tuple[Tensor, Tensor]:
    """Rows from flat to sharp, far from zero where nothing caps them; one excludes tokens, four have few."""
    x = normal(N, V, seed=70, scale=1.0) * torch.linspace(0.1, 6.0, N)[:, None]
    x[-4:, 5:8] += 30.0
    x[3, ::7] = -INF if logit.softcap is None else -40.0
    x = x + (0.0 if logit.softcap else 100.0)
    sampled = ids(N, below=V, seed=71)
    sampled[3] = 1
    return x.to(dtype), sampled


def exactly(x: Tensor, logit: LogitTransform, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities at the ids (0 where unused), log tail and entropy, in fp64 by plain, differentiable torch."""
    z = x.double() * logit.scale
    if logit.softcap is not None:
        z = torch.tanh(z / logit.softcap) * logit.softcap
    log_p = (z / logit.temperature).log_softmax(-1)
    used = token_ids >= 0
    kept = log_p.gather(-1, token_ids.clamp(min=0)).masked_fill(~used, 0.0)
    outside = torch.ones_like(log_p).scatter(-1, torch.where(used, token_ids, token_ids[:, :1]), 0.0) > 0
    tail = log_p.masked_fill(~outside, -INF).logsumexp(-1)
    return kept, tail, -(log_p.exp() * log_p.masked_fill(log_p == -INF, 0.0)).sum(-1)


def distance(found: Tensor, truth: Tensor) -> tuple[float, float]:
    """Root mean square and largest."""
    off = (found.double() - truth).abs()
    return off.square().mean().sqrt().item(), off.max().item()


@pytest.mark.parametrize("logit", [PLAIN, CAPPED])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("how", ["select", "given"])
def test_numbers_are_no_further_from_the_truth_than_those_of_the_reference(
    dtype: torch.dtype, logit: LogitTransform, how: str
) -> None:
    x, sampled = realistic(dtype, logit)
    support = MostProbable(40, 1e-4)
    theirs = score(reference, x, logit, sampled, support, None, True)
    given = support if how == "select" else theirs.token_ids
    ours = score(tuned, x, logit, sampled, given, None, True)
    assert torch.equal(ours.token_ids, theirs.token_ids)
    truth = exactly(x, logit, theirs.token_ids)
    used = theirs.token_ids >= 0
    assert used[0].all()
    assert logit.softcap is not None or not used[-1].all()
    for a, b, exact in zip(ours[1:4], theirs[1:4], truth, strict=True):
        if a.dim() == 2:
            a, b = (x.masked_fill(~used, 0.0) for x in (a, b))
        (near, ours_at_most), (far, theirs_at_most) = distance(a, exact), distance(b, exact)
        assert far > 0
        assert near <= 1.05 * far
        # three roundings of numbers below 16, or up to 40, where few are kept; the reference averages such numbers
        assert ours_at_most <= 4 * ulp(12, F32)
        assert theirs_at_most <= 8 * ulp(12, F32)


@pytest.mark.parametrize("parts", SUBSETS)
@pytest.mark.parametrize("logit", [PLAIN, CAPPED])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_every_subset_are_no_further_from_the_truth(
    parts: tuple[bool, bool, bool], logit: LogitTransform, dtype: torch.dtype
) -> None:
    x, sampled = realistic(dtype, logit)
    scores = score(tuned, x, logit, sampled, MostProbable(40, 1e-4), None, True)
    N, K = scores.token_ids.shape
    arriving = normal(N, K, seed=72), normal(N, seed=73), normal(N, seed=74)
    work = scores.log_tail.dtype
    upstream = Upstream(*(g.to(work) if part else None for g, part in zip(arriving, parts, strict=True)))
    found = {}
    for module in (tuned, reference):
        found[module] = torch.full_like(x, math.nan)
        gradient(module, x, logit, scores, upstream, found[module])
    leaf = x.double().clone().requires_grad_()
    outputs = exactly(leaf, logit, scores.token_ids)
    total = sum((a * g.double()).sum() for a, g, part in zip(outputs, arriving, parts, strict=True) if part)
    (truth,) = torch.autograd.grad(total, leaf)
    assert truth.abs().max().item() > 1e-3
    if dtype != F64:  # in which the truth is
        near, far = distance(found[tuned], truth)[0], distance(found[reference], truth)[0]
        assert far > 0
        assert near <= 1.05 * far
    # Half precision rounds once, by half an eps, and to its subnormals. Before that g_k is rounded, and p and p / τ are
    # off by 64 eps (of log p down to −64), with factors Σ |g_k| + |g_τ|, |log p + H| |g_H| < 64 |g_H| and |g_τ|.
    kept, tail, entropy = (g.double() * part for g, part in zip(arriving, parts, strict=True))
    used, p = scores.token_ids >= 0, reference.normalised(logit.read(x).double(), scores.log_norm.double()).exp()
    kept, tail = torch.where(used, kept, 0.0).abs(), tail.abs()[:, None]
    size = p * (kept.sum(-1, keepdim=True) + tail + 64 * entropy.abs()[:, None])
    size += p / scores.log_tail.double().exp()[:, None] * tail
    size.scatter_add_(-1, scores.token_ids.clamp(min=0), kept)
    rounding = torch.finfo(dtype).eps / 2 if dtype in (BF16, F16) else 0.0
    subnormal = 6e-8 if dtype == F16 else 0.0
    slack = rounding * truth.abs() + 64 * torch.finfo(work).eps * size + subnormal
    for g in found.values():
        assert ((g.double() - truth).abs() <= slack).all()

    in_place = x.clone()
    gradient(tuned, in_place, logit, scores, upstream, in_place)
    assert same_bits(in_place, found[tuned])


@pytest.mark.parametrize("module", [tuned, reference])
@pytest.mark.parametrize("logit", [PLAIN, CAPPED])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entropy", [True, False])
def test_slices_of_the_vocabulary_have_their_part_of_the_gradient(
    entropy: bool, dtype: torch.dtype, logit: LogitTransform, module: Any
) -> None:
    """In place, as in use; some slices have no kept token of some rows, one row has no support."""
    x, sampled = realistic(dtype, logit)
    counted = torch.arange(24) != 6
    scores = score(tuned, x, logit, sampled, MostProbable(8, 1e-3), counted, True)
    work = scores.log_tail.dtype
    g = normal(24, 8, seed=89), normal(24, seed=90), normal(24, seed=91)
    upstream = Upstream(g[0].to(work), g[1].to(work), g[2].to(work) if entropy else None)
    whole, parts = torch.empty_like(x), x.clone()
    gradient(module, x, logit, scores, upstream, whole)
    for first in range(0, 3001, 700):
        slab = parts[:, first : first + 700].clone()
        module.gradient(slab, logit, scores, upstream, slab, first)
        parts[:, first : first + 700] = slab
    assert torch.equal(parts, whole)
    assert whole[counted].abs().amax(-1).gt(0).all()


def test_no_upstream_at_all_is_a_gradient_of_zero() -> None:
    x, sampled = realistic(F32, PLAIN)
    scores = score(tuned, x, PLAIN, sampled, MostProbable(8, 0.0), None, True)
    out = torch.full_like(x, math.nan)
    gradient(tuned, x, PLAIN, scores, Upstream(None, None), out)
    assert out.abs().max().item() == 0.0


def test_a_gradient_of_another_type_than_the_rows() -> None:
    """bf16 rows with an fp32 gradient: what would have been rounded is not."""
    x, sampled = realistic(BF16, PLAIN)
    scores = score(tuned, x, PLAIN, sampled, MostProbable(8, 0.0), None, True)
    upstream = Upstream(normal(24, 8, seed=75), normal(24, seed=76), normal(24, seed=77))
    wide, narrow = torch.empty(x.shape), torch.empty_like(x)
    gradient(tuned, x, PLAIN, scores, upstream, wide)
    gradient(tuned, x, PLAIN, scores, upstream, narrow)
    assert same_bits(wide.bfloat16(), narrow)
    assert (wide != narrow.float()).any()


# ---- tails that are hardly there -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [40.0, 54.0, 56.0, 80.0, 88.0, 104.0, 700.0, 3000.0])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_tail_that_underflows_has_its_logarithm_and_its_gradient(gap: float, dtype: torch.dtype) -> None:
    """Two equal tokens, and 500 with e^−gap each: log τ = log 500 − gap − log 2, and a share of 1/500 each."""
    x = torch.full((2, 502), -gap, dtype=dtype)
    x[:, 100:102] = 0.0
    x[1, 300:] = -INF  # 300 of them in row 1
    scores = score(tuned, x, PLAIN, torch.tensor([100, 100]), MostProbable(2, 0.0), None, True)
    assert scores.token_ids.tolist() == [[100, 101]] * 2
    eps = torch.finfo(dtype).eps
    others = torch.tensor([500.0, 298.0], dtype=F64)
    truth = (others.log() - gap - torch.log1p(others * math.exp(-gap) / 2) - math.log(2)).tolist()
    assert scores.log_tail.tolist() == close(truth, rel=4 * eps)
    for entropy in (None, torch.tensor([0.5, 0.5], dtype=dtype)):
        g = torch.full_like(x, math.nan)
        kept = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=dtype)
        gradient(tuned, x, PLAIN, scores, Upstream(kept, torch.ones(2, dtype=dtype), entropy), g)
        # Γ = 2 and two tokens with ½ each; a share of 1/n of the tail's gradient, off by the rounding of log τ. What
        # the tail takes from the two, and the entropy's gradient, is of the size of τ.
        taken = 500 * gap * math.exp(-gap)
        assert g[0, [100, 101]].tolist() == close([0.0, -1.0], rel=0, abs=8 * eps + taken)
        for row, n in enumerate(others.tolist()):
            outside = g[row, :100].tolist()
            assert outside == close([1 / n] * 100, rel=8 * eps * gap + taken)
        assert g[1, 300:].abs().max().item() == 0.0


def test_every_token_kept_leaves_no_tail_and_no_gradient_from_it() -> None:
    x = normal(3, 9, seed=78)
    x[1, 4:] = -INF
    scores = score(tuned, x, PLAIN, torch.tensor([0, 1, 2]), MostProbable(9, 0.0), None, True)
    assert scores.log_tail.tolist() == [-INF] * 3
    plain, with_tail = torch.empty_like(x), torch.empty_like(x)
    g = normal(3, 9, seed=79)
    gradient(tuned, x, PLAIN, scores, Upstream(g, None), plain)
    gradient(tuned, x, PLAIN, scores, Upstream(g, torch.full((3,), 7.0)), with_tail)
    assert same_bits(plain, with_tail)
    assert plain.abs().max().item() > 0.1
    assert plain[1, 4:].abs().max().item() == 0.0


# ---- rows that do not count, chunks --------------------------------------------------------------------------------


def same(a: Scores, b: Scores) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("how", ["select", "given"])
@pytest.mark.parametrize("logit", [PLAIN, CAPPED])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 3 * 3001, 1 << 20])
def test_rows_that_do_not_count_are_empty_and_change_nothing(
    how: str, logit: LogitTransform, dtype: torch.dtype, chunk: int
) -> None:
    """Every third row, and a whole chunk of them, holds NaN; the others have the bits that they have alone."""
    x, sampled = realistic(dtype, logit)
    counted = torch.arange(24) % 3 != 1
    counted[9:15] = False
    support = MostProbable(8, 1e-3)
    alone = score(tuned, x[counted], logit, sampled[counted], support, None, True)
    given: Any = support
    if how == "given":
        given = torch.zeros(24, 8, dtype=torch.int64)
        given[counted] = alone.token_ids
    broken = torch.where(counted[:, None], x, math.nan)
    upstream = Upstream(*(normal(24, *s, seed=80, dtype=alone.log_tail.dtype) for s in ((8,), (), ())))
    with sizes(chunk=chunk):
        found = score(tuned, broken, logit, sampled, given, counted, True)
        g = torch.full_like(x, math.nan)
        gradient(tuned, broken, logit, found, upstream, g)
        in_place = broken.clone()
        gradient(tuned, in_place, logit, found, upstream, in_place)
    picked = Scores(*(part[counted] for part in found))
    assert same(picked, alone)
    assert found.token_ids[~counted].eq(-1).all()
    assert found.log_probs[~counted].eq(-INF).all()
    for number in (found.log_tail, found.entropy):
        assert number[~counted].eq(0.0).all()
    expected = torch.empty_like(x[counted])
    gradient(tuned, x[counted], logit, alone, Upstream(*(u[counted] for u in upstream)), expected)
    assert same_bits(g[counted], expected)
    assert same_bits(g[~counted], torch.zeros_like(x[~counted]))
    assert same_bits(in_place, g)


@pytest.mark.parametrize("fill", [math.nan, -math.nan, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_define_no_distribution_are_empty(fill: float, dtype: torch.dtype) -> None:
    x, sampled = realistic(dtype, PLAIN)
    x[2] = fill
    x[5, 1000] = fill if fill != -INF else INF
    x[7, sampled[7]] = -INF
    good = torch.ones(24, dtype=torch.bool)
    good[[2, 5, 7]] = False
    for module in (tuned, reference):
        found = score(module, x, PLAIN, sampled, MostProbable(8, 1e-3), None, True)
        assert (found.token_ids[:, 0] >= 0).tolist() == good.tolist()
        assert found.log_probs[~good].eq(-INF).all()
        assert found.log_tail[~good].eq(0.0).all()
        assert found.entropy[~good].eq(0.0).all()
        g = torch.full_like(x, math.nan)
        ones = torch.ones(24, dtype=found.log_tail.dtype)
        gradient(module, x, PLAIN, found, Upstream(None, ones, ones), g)
        assert same_bits(g[~good], torch.zeros_like(x[~good]))
        assert g[good].isfinite().all()


@pytest.mark.parametrize("N", [0, 1])
def test_no_row_and_one_row(N: int) -> None:
    x, sampled = normal(N, 5, seed=81), torch.zeros(N, dtype=torch.int64)
    for counted in (None, torch.zeros(N, dtype=torch.bool)):
        found = score(tuned, x, PLAIN, sampled, MostProbable(3, 0.0), counted, True)
        g = torch.full_like(x, math.nan)
        gradient(tuned, x, PLAIN, found, Upstream(None, torch.ones(N)), g)
        assert found.token_ids.shape == (N, 3)
        assert found.token_ids[:, 0].tolist() == ([0] if counted is None else [-1]) * N
        assert g.isfinite().all()


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_rows_need_not_lie_side_by_side(dtype: torch.dtype) -> None:
    """Every second row of a buffer, every second column, and a transposed one."""
    x, sampled = realistic(dtype, PLAIN)
    expected = score(tuned, x.contiguous(), PLAIN, sampled, MostProbable(8, 1e-3), None, True)
    for strided in (x.repeat_interleave(2, 0)[::2], x.repeat_interleave(2, 1)[:, ::2], x.T.contiguous().T):
        assert torch.equal(strided, x)
        found = score(tuned, strided, PLAIN, sampled, MostProbable(8, 1e-3), None, True)
        assert torch.equal(found.token_ids, expected.token_ids)
        upstream = Upstream(normal(24, 8, seed=82), None, normal(24, seed=83))
        g, straight = torch.empty_like(strided), torch.empty_like(x)
        gradient(tuned, strided, PLAIN, found, upstream, g)
        gradient(tuned, x, PLAIN, expected, upstream, straight)
        # another order of the sums: an ulp of a logarithm below 16
        torch.testing.assert_close(g, straight, rtol=torch.finfo(dtype).eps, atol=1e-5)


# ---- the work ------------------------------------------------------------------------------------------------------


class Work(TorchDispatchMode):
    """Exponentials, and the memory of what is as large as a chunk."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.chunk, self.exponentials, self.sorted = chunk, 0, 0
        self.places: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        for x in tree_leaves(out) if "empty" not in name else ():  # what is not written takes no memory
            if isinstance(x, Tensor) and x.numel() * x.element_size() >= 4 * self.chunk:
                self.places.add(x.untyped_storage().data_ptr())
        if "exp" in name and "expand" not in name:
            self.exponentials += args[0].numel()
        if "sort" in name or "topk" in name:
            self.sorted += args[0].numel()
        return out


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_one_exponential_a_logit_in_buffers_that_are_used_again(entropy: bool, dtype: torch.dtype) -> None:
    """Ten chunks of two rows. Some exponentials more are made of kept tokens, and no whole row is sorted."""
    N, V, K = 20, 8192, 16
    x, sampled = normal(N, V, seed=84, scale=3.0, dtype=dtype), ids(N, below=V, seed=85)
    with sizes(chunk=2 * V):
        with Work(2 * V) as work:
            scores = score(tuned, x, PLAIN, sampled, MostProbable(K, 1e-5), None, entropy)
        assert N * V <= work.exponentials <= N * (V + 4 * K)
        assert work.sorted < N * V / 3
        assert len(work.places - {x.untyped_storage().data_ptr()}) <= 2
        upstream = Upstream(normal(N, K, seed=86), normal(N, seed=87), normal(N, seed=88) if entropy else None)
        out = torch.empty_like(x)
        with Work(2 * V) as work:
            gradient(tuned, x, PLAIN, scores, upstream, out)
        mine = {y.untyped_storage().data_ptr() for y in (x, out)}
        assert N * V <= work.exponentials <= N * (V + 4 * K)
        assert len(work.places - mine) <= 1 + entropy
        in_place = x.clone()
        with Work(2 * V) as work:
            gradient(tuned, in_place, PLAIN, scores, upstream, in_place)
        assert len(work.places - {in_place.untyped_storage().data_ptr()}) <= 1 + entropy


def test_the_rows_are_only_read() -> None:
    for dtype in DTYPES:
        x, sampled = realistic(dtype, PLAIN)
        before = x.clone()
        scores = score(tuned, x, PLAIN, sampled, MostProbable(8, 1e-3), None, True)
        gradient(tuned, x, PLAIN, scores, Upstream(None, torch.ones(24).to(scores.log_tail.dtype)), torch.empty_like(x))
        assert same_bits(x, before)
