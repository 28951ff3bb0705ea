"""``Head``: the numbers and gradients of the dense logits, without the dense logits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import F32, F64, INF, close, ids, normal, refuses, same_bits, same_policy, ulp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from troll import Head, SparsePolicy, restrict, sparsify
from troll.policy import Scored
from troll.policy import matmul as products_module
from troll.policy.scoring import types

V, H, N, K = 53, 7, 11, 6
BF16, F16 = torch.bfloat16, torch.float16
HOWS = ["sparsify", "restrict"]

# Logits in a tile, tokens in a slice of the weight, logits in a chunk, so that nothing divides anything: three rows a
# tile, read two at a time, and one row a tile, fewer logits than a row has.
THREE_ROWS, ONE_ROW, ONE_TILE = (3 * V + 5, 17, 2 * V + 1), (V - 1, 5, V), (1 << 24, 1 << 15, 1 << 20)

# fp64: log-probabilities below 64 from sums of 7 products, off by some ulp(63) = 7e-15 each; gradients are sums of at
# most 11 · 53 products below 16 of such numbers, off by 11 · 53 · 16 eps = 2e-12 if all were rounded the same way.
CLOSE = 1e-12


@contextmanager
def tiles(tile: int, columns: int, chunk: int, dtype: torch.dtype = F64) -> Iterator[None]:
    """Work in tiles of this many logits of this type, slices of this many tokens and chunks of this many logits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products_module, "_TILE_BYTES", dict.fromkeys(("cpu", "other"), tile * dtype.itemsize))
        patch.setattr(products_module, "_VOCABULARY_SLICE", columns)
        patch.setattr(types, "_CHUNK_ELEMENTS", chunk)
        yield


@dataclass(frozen=True)
class Case:
    """What is scored and how."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    sampled: Tensor
    how: str = "sparsify"
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    max_support: int = K

    @property
    def old(self) -> SparsePolicy:
        """The policy of other hidden states, so that its support is not the one these would select."""
        other = self.hidden.double() + normal(*self.hidden.shape, seed=3, scale=0.3, dtype=F64)
        z = capped(products(other, self.weight.double(), None if self.bias is None else self.bias.double()), self)
        return sparsify(z, self.sampled, self.max_support, 1e-3, temperature=self.temperature)


class Outcome(NamedTuple):
    """The numbers, and the gradients of ``functional`` for hidden states, weight and bias."""

    policy: SparsePolicy
    entropy: Tensor
    gradients: list[Tensor | None]


def case(how: str = "sparsify", dtype: torch.dtype = F64, bias: bool = True, **rest: Any) -> Case:
    """Eleven positions from flat to sharp: the first has hidden state 0, some of the last do not need six tokens."""
    hidden = normal(N, H, seed=0) * torch.arange(N)[:, None] / 3
    b = normal(V, seed=2, scale=0.5, dtype=dtype) if bias else None
    return Case(hidden.to(dtype), normal(V, H, seed=1, dtype=dtype), b, ids(N, below=V, seed=4), how, **rest)


def products(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """h Wᵀ + b, each operation rounded to the type of the product."""
    product = hidden @ weight.T
    return product if bias is None else product + bias.to(product.dtype)


def capped(product: Tensor, case: Case) -> Tensor:
    """The logits of h Wᵀ + b."""
    y = case.scale * product
    return y if case.softcap is None else case.softcap * torch.tanh(y / case.softcap)


def entropy_of(z: Tensor) -> Tensor:
    """log Σ e^z − Σ p z; differentiable also where some z are −inf."""
    return z.logsumexp(-1) - (z.softmax(-1) * z.masked_fill(z == -INF, 0.0)).sum(-1)


def from_logits(case: Case, z: Tensor, old: SparsePolicy | None = None, **options: Any) -> Scored:
    """The dense way, by the definition."""
    if case.how == "restrict":
        policy = restrict(z, case.old if old is None else old, impl="reference", **options)
    else:
        policy = sparsify(
            z, case.sampled, case.max_support, 1e-3, temperature=case.temperature, impl="reference", **options
        )
    return Scored(policy, torch.where(policy.valid, entropy_of(z / case.temperature), 0.0))


def from_hidden(
    case: Case,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    old: SparsePolicy | None = None,
    gather: Any = None,
    **options: Any,
) -> Scored:
    """The way under test."""
    head = Head(weight, bias, case.scale, case.softcap, **({} if gather is None else {"gather": gather}))
    if case.how == "restrict":
        return head.restrict(hidden, case.old if old is None else old, **options)
    return head.sparsify(hidden, case.sampled, case.max_support, 1e-3, temperature=case.temperature, **options)


def functional(scored: Scored, parts: tuple[bool, bool, bool] = (True, True, True)) -> Tensor:
    """A sum with random factors, normal, of the kept log-probabilities, the tails and the entropies (finite ones)."""
    kept = scored.policy.log_probs.masked_fill(scored.policy.token_ids < 0, 0.0)
    tail = scored.policy.log_tail.masked_fill(scored.policy.log_tail == -INF, 0.0)
    total = scored.entropy.new_zeros(())
    for seed, x in itertools.compress(enumerate((kept, tail, scored.entropy)), parts):
        total = total + (x * normal(*x.shape, seed=10 + seed, dtype=x.dtype)).sum()
    return total


def leaves(case: Case) -> list[Any]:
    return [None if x is None else x.clone().requires_grad_() for x in (case.hidden, case.weight, case.bias)]


def outcome(scored: Scored, parameters: list[Any]) -> Outcome:
    functional(scored).backward()
    return Outcome(scored.policy.detach(), scored.entropy.detach(), [None if x is None else x.grad for x in parameters])


def by_head(case: Case, **options: Any) -> Outcome:
    parameters = leaves(case)
    return outcome(from_hidden(case, *parameters, **options), parameters)


def by_logits(case: Case, **options: Any) -> Outcome:
    """The dense way; products are rounded as the type of the case rounds them, and read in fp32 (fp64)."""
    parameters = leaves(case)
    product = products(*parameters)
    z = capped(product.to(F64 if product.dtype == F64 else F32), case)
    return outcome(from_logits(case, z, **options), parameters)


def assert_alike(ours: Outcome, truth: Outcome, atol: float = CLOSE) -> None:
    """The same ids in the same slots, the same numbers and gradients."""
    assert torch.equal(ours.policy.token_ids, truth.policy.token_ids)
    assert (ours.policy.vocab_size, ours.policy.temperature) == (truth.policy.vocab_size, truth.policy.temperature)
    for a, b in (
        (ours.policy.log_probs, truth.policy.log_probs),
        (ours.policy.log_tail, truth.policy.log_tail),
        (ours.entropy, truth.entropy),
        *zip(ours.gradients, truth.gradients, strict=True),
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


# ---- the same as the dense way -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_numbers_and_gradients_are_those_of_the_dense_logits(
    how: str, bias: bool, temperature: float, scale: float, softcap: float | None
) -> None:
    one = case(how, bias=bias, temperature=temperature, scale=scale, softcap=softcap)
    truth = by_logits(one)
    assert min(x.abs().max().item() for x in truth.gradients if x is not None) > 0.5
    assert truth.entropy.max().item() > 3 > truth.entropy.min().item() > 0
    for tiling in (THREE_ROWS, ONE_ROW, ONE_TILE):
        with tiles(*tiling):
            assert_alike(by_head(one), truth)


def test_the_case_has_unused_slots_and_other_supports_than_the_old_policy() -> None:
    """What the tests above rely on."""
    selected, restricted = by_head(case()).policy, by_head(case("restrict")).policy
    assert selected.support_size.min().item() < K == selected.support_size.max().item()
    assert restricted.support_size.min().item() < K
    differing = (selected.token_ids.sort(-1).values != restricted.token_ids.sort(-1).values).any(-1)
    assert differing.sum().item() >= 3


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.integers(0, 2**31),
    st.tuples(st.integers(1, 9), st.integers(2, 40), st.integers(1, 6)),
    st.tuples(st.integers(1, 200), st.integers(1, 50), st.integers(1, 100)),
    st.integers(1, 45),
    st.sampled_from(HOWS),
    st.sampled_from([None, 2.0]),
)
def test_tiles_of_any_size_change_nothing(
    seed: int,
    shape: tuple[int, int, int],
    tiling: tuple[int, int, int],
    max_support: int,
    how: str,
    softcap: float | None,
) -> None:
    """Also a support of the whole vocabulary, which leaves no tail."""
    n, v, h = shape
    hidden, weight = normal(n, h, seed=seed, scale=2.0, dtype=F64), normal(v, h, seed=seed + 1, dtype=F64)
    bias, sampled = normal(v, seed=seed + 2, dtype=F64), ids(n, below=v, seed=seed)
    one = Case(hidden, weight, bias, sampled, how, 0.8, softcap, 1.3, max_support)
    with tiles(*tiling):
        assert_alike(by_head(one), by_logits(one))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradcheck(how: str, softcap: float | None) -> None:
    one = Case(
        normal(3, 2, seed=20, dtype=F64),
        normal(7, 2, seed=21, dtype=F64),
        normal(7, seed=22, dtype=F64),
        torch.tensor([6, 0, 3]),
        how,
        scale=1.7,
        softcap=softcap,
        temperature=0.6,
        max_support=3,
    )
    old = one.old

    def numbers(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        policy, entropy = from_hidden(one, hidden, weight, bias, old)
        assert bool((policy.token_ids >= 0).all())
        return policy.log_probs, policy.log_tail, entropy

    with tiles(2 * 7, 4, 7):
        assert torch.autograd.gradcheck(numbers, tuple(leaves(one)), eps=1e-6, atol=1e-8, rtol=1e-6)


def test_numbers_and_gradients_by_hand() -> None:
    """The unit matrix makes the hidden state the logits: p = ½, ¼, ⅛, ⅛, entropy ¾ ln 2 + ½ ln 4 = 1.75 ln 2."""
    p, ln2 = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=F64), math.log(2)
    policy, entropy = Head(torch.eye(4, dtype=F64)).sparsify(p.log(), torch.tensor(1), 2, 0.0)
    assert policy.token_ids.tolist() == [1, 0]
    assert policy.log_probs.tolist() == close([-2 * ln2, -ln2], rel=1e-15)
    assert policy.log_tail.item() == close(-2 * ln2, rel=1e-15)
    assert entropy.item() == close(1.75 * ln2, rel=1e-15)
    # ∂H/∂z = −p (log p + H); ∂log p₁/∂z and ∂log τ/∂z as in the tests of the gradient of the support
    for output, gradient in (
        (2, [-0.375 * ln2, 0.0625 * ln2, 0.15625 * ln2, 0.15625 * ln2]),
        (0, [-0.5, 0.75, -0.125, -0.125]),
        (1, [-0.5, -0.25, 0.375, 0.375]),
    ):
        hidden = p.log().requires_grad_()
        policy, entropy = Head(torch.eye(4, dtype=F64)).sparsify(hidden, torch.tensor(1), 2, 0.0)
        (policy.log_probs[0], policy.log_tail, entropy)[output].backward()
        assert hidden.grad.tolist() == close(gradient, rel=1e-14)


def test_scale_soft_cap_and_temperature_by_hand() -> None:
    """W h = ±½, scaled to ±1, capped at 1: z = ±tanh 1; p₀ = σ(2 tanh 1 / T), ∂log p₀/∂h = (1 − p₀) · 2 sech² 1 / T."""
    hidden, weight = torch.ones(1, 1, dtype=F64, requires_grad=True), torch.tensor([[0.5], [-0.5]], dtype=F64)
    head = Head(weight, scale=2.0, softcap=1.0)
    policy, _ = head.sparsify(hidden, torch.tensor([0]), 1, 0.0, temperature=0.5)
    p = 1 / (1 + math.exp(-4 * math.tanh(1)))
    assert policy.log_probs.item() == close(math.log(p), rel=1e-14)
    policy.log_probs.sum().backward()
    assert hidden.grad.item() == close((1 - p) * 4 / math.cosh(1) ** 2, rel=1e-13)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("part", [0, 1, 2])
def test_each_number_has_its_own_gradient(part: int, how: str) -> None:
    """The two outputs that the loss does not use send no gradient at all."""
    one, parts = case(how), tuple(i == part for i in range(3))
    ours, truth = leaves(one), leaves(one)
    with tiles(*THREE_ROWS):
        functional(from_hidden(one, *ours), parts).backward()
    functional(from_logits(one, capped(products(*truth), one)), parts).backward()
    for a, b in zip(ours, truth, strict=True):
        assert b.grad.abs().max().item() > 0.1
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=CLOSE)


def test_a_second_backward_says_the_same_and_nothing_given_is_changed() -> None:
    one = case(dtype=F32)
    parameters = leaves(one)
    with tiles(*THREE_ROWS, dtype=F32):
        total = functional(from_hidden(one, *parameters))
        once = torch.autograd.grad(total, parameters, retain_graph=True)
        twice = torch.autograd.grad(total, parameters)
    assert all(same_bits(a, b) for a, b in zip(once, twice, strict=True))
    for leaf, before in zip(parameters, (one.hidden, one.weight, one.bias), strict=True):
        assert same_bits(leaf.detach(), before)


def test_double_backward_is_refused() -> None:
    parameters = leaves(case())
    scored = from_hidden(case(), *parameters)
    (grad,) = torch.autograd.grad(scored.entropy.square().sum(), parameters[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


# ---- other precisions ----------------------------------------------------------------------------------------------


def coarse(dtype: torch.dtype, how: str, n: int = N, **rest: Any) -> Case:
    """Hidden states and weight of 7 significant bits, multiples of 2⁻⁸ up to 1 and of 2⁻⁴ up to 4, H = 16.

    Every type has them exactly, and fp32 their products: multiples of 2⁻¹² up to 64, whatever the order of the sum. So
    a product has one value, and also when it is rounded to bf16, which takes away up to 11 of its 19 bits.
    """
    gen = torch.Generator().manual_seed(30)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-64, 65, shape, generator=gen)

    hidden = whole(n, 16) / 64 / 2.0 ** (torch.arange(n) % 3)[:, None]
    tensors = [x.to(dtype) for x in (hidden, whole(V, 16) / 16, whole(V) / 64)]
    return Case(*tensors, ids(n, below=V, seed=31), how, **rest)


def precisely(case: Case, product: Tensor, policy: SparsePolicy) -> tuple[Outcome, list[Tensor]]:
    """From given products: numbers on the support of ``policy`` and gradients in fp64, and Σ |g| |factor| of each sum.

    g [N, V] is the gradient of the products; those of hidden states, weight and bias are g W, gᵀ h and gᵀ 1.
    """
    z = product.double().requires_grad_()
    scored = from_logits(replace(case, how="restrict"), capped(z, case), policy)
    functional(scored).backward()
    factors = case.hidden.double(), case.weight.double(), torch.ones(len(z), 1, dtype=F64)

    def sums(g: Tensor, h: Tensor, w: Tensor, one: Tensor) -> list[Tensor]:
        return [g @ w, g.T @ h, (g.T @ one)[:, 0]]

    exact = Outcome(scored.policy.detach(), scored.entropy.detach(), sums(z.grad, *factors))
    return exact, sums(z.grad.abs(), *(x.abs() for x in factors))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("softcap", [None, 6.0])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("tiling", [THREE_ROWS, ONE_ROW, ONE_TILE])
def test_other_precisions_round_the_products_and_their_gradient_and_sum_in_fp32(
    dtype: torch.dtype, how: str, softcap: float | None, tiling: tuple[int, int, int]
) -> None:
    one = coarse(dtype, how, softcap=softcap, temperature=0.9)
    product = products(one.hidden, one.weight, one.bias)
    if dtype == BF16:
        exactly = products(one.hidden.double(), one.weight.double(), one.bias.double())
        assert (exactly - product.double()).abs().max().item() > 0.01
    with tiles(*tiling, dtype=dtype):
        ours = by_head(one)
    same = by_logits(one)
    assert torch.equal(ours.policy.token_ids, same.policy.token_ids)
    assert [x.dtype for x in (ours.policy.log_probs, ours.policy.log_tail, ours.entropy)] == [F32] * 3
    truth, magnitudes = precisely(one, product, ours.policy)
    # Three roundings of numbers below 32 (as for restrict), one more of the tanh; the entropy averages such numbers.
    budget = 4 * ulp(31, F32)
    assert truth.policy.log_probs[ours.policy.token_ids >= 0].min().item() > -32
    for a, b in (
        (ours.policy.log_probs, truth.policy.log_probs),
        (ours.policy.log_tail, truth.policy.log_tail),
        (ours.entropy, truth.entropy),
    ):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=budget)
    # The gradient of a product is made of at most 8 numbers below 4 · 32 with some roundings each, 2⁻²⁴ of their size:
    # 8 · 128 · 2⁻²⁴. Half precision rounds it once, by half an eps of its size; then the sum is rounded once.
    made, rounded = 8 * 128 * 2.0**-24, 0.0 if dtype == F32 else torch.finfo(dtype).eps / 2
    ones = torch.ones(len(product), V, dtype=F64)
    wide = [ones @ one.weight.double().abs(), ones.T @ one.hidden.double().abs(), ones.sum(0)]
    for a, b, magnitude, factors in zip(ours.gradients, truth.gradients, magnitudes, wide, strict=True):
        assert a.dtype == dtype
        slack = (rounded + 2.0**-20) * magnitude + made * factors + torch.finfo(dtype).eps / 2 * b.abs()
        assert ((a.double() - b).abs() <= slack).all()
        assert b.abs().max().item() > 0.3


@pytest.mark.parametrize("how", HOWS)
def test_large_logits_lose_nothing(how: str) -> None:
    """2048 more for every token: the 24 bits of fp32 still hold all logits, so only their differences may count.

    Rounded at the size of such logits, a log-probability would be off by 2⁻¹⁴.
    """
    one = coarse(F32, how)
    old, far = one.old, replace(one, bias=one.bias + 2048)
    with tiles(*THREE_ROWS, dtype=F32):
        assert all(same_bits(*x) for x in zip(named(by_head(far, old=old)), named(by_head(one, old=old)), strict=True))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("softcap", [None, 6.0])
def test_fp32_is_the_dense_way_up_to_rounding(how: str, softcap: float | None) -> None:
    """The order of a sum of 7 products and a bias decides over 8 roundings, each 2⁻²⁴ of Σ |h w| + |b|, in each way."""
    one = case(how, F32, softcap=softcap)
    old, size = one.old, (one.hidden.abs() @ one.weight.abs().T + one.bias.abs()).max().item()
    with tiles(*THREE_ROWS, dtype=F32):
        ours = by_head(one, old=old)
    theirs = by_logits(one, old=old)
    assert same_bits(ours.policy.token_ids, theirs.policy.token_ids)
    logit = 2 * 8 * 2.0**-24 * size
    for a, b in (
        (ours.policy.log_probs, theirs.policy.log_probs),
        (ours.policy.log_tail, theirs.policy.log_tail),
        (ours.entropy, theirs.entropy),
    ):
        # a log-probability changes by at most twice what the logits do, and is rounded like a number below 64; an
        # entropy averages log-probabilities, with weights that change too: |Δ(p log p)| ≤ p |Δ log p| (1 + |log p|)
        torch.testing.assert_close(a, b, rtol=0, atol=4 * ulp(63, F32) + 2 * logit * (5 if a is ours.entropy else 1))
    for a, b in zip(ours.gradients, theirs.gradients, strict=True):
        # p and p / τ change by 2 · logit of themselves and enter sums with factors of which few reach 4
        torch.testing.assert_close(a, b, rtol=0, atol=4 * 2 * logit)


def rounding_away(case: Case) -> Case:
    """The same in bf16, but in fp32 off by up to a quarter of a last place of bf16."""
    off = 1 + 2.0**-10
    return replace(case, hidden=case.hidden.float() * off, weight=case.weight.float() * off, bias=case.bias.float())


def bf16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=BF16)


def named(x: Outcome) -> list[Tensor]:
    return [x.policy.token_ids, x.policy.log_probs, x.policy.log_tail, x.entropy, *x.gradients]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_computes_the_products_in_its_type(how: str, backward_inside: bool) -> None:
    """Numbers as from bf16 tensors; gradients too, but in fp32: they are bf16's before the last rounding."""
    half = coarse(BF16, how)
    single, old = rounding_away(half), half.old
    parameters = leaves(single)
    with tiles(*THREE_ROWS, dtype=BF16):
        with bf16():
            scored = from_hidden(single, *parameters, old)
        with bf16() if backward_inside else nullcontext():
            ours = outcome(scored, parameters)
        expected = by_head(half, old=old)
    assert same_policy(ours.policy, expected.policy)
    assert same_bits(ours.entropy, expected.entropy)
    for a, b in zip(ours.gradients, expected.gradients, strict=True):
        assert a.dtype == F32
        assert same_bits(a.to(BF16), b)
        assert (a.to(BF16) != a).any()


@pytest.mark.parametrize("how", HOWS)
def test_autocast_that_begins_after_the_forward_changes_nothing(how: str) -> None:
    one = case(how, F32)
    parameters, old = leaves(one), one.old
    scored = from_hidden(one, *parameters, old)
    with bf16():
        inside = outcome(scored, parameters)
    assert all(same_bits(a, b) for a, b in zip(named(inside), named(by_head(one, old=old)), strict=True))


@pytest.mark.parametrize("how", HOWS)
def test_an_fp32_weight_is_read_in_the_type_of_the_hidden_states(how: str) -> None:
    half = coarse(BF16, how)
    old, single = half.old, rounding_away(half)
    mixed = by_head(replace(half, weight=single.weight, bias=single.bias), old=old)
    expected = by_head(half, old=old)
    assert same_policy(mixed.policy, expected.policy)
    assert [x.dtype for x in mixed.gradients] == [BF16, F32, F32]
    assert all(same_bits(a.to(BF16), b) for a, b in zip(mixed.gradients, expected.gradients, strict=True))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_gradients_are_as_good_as_the_dense_way_in_whatever_tiles(how: str, autocast: bool) -> None:
    """Root mean square distances from the exact gradients of the rounded products, a hundred tiles of one row."""
    one = coarse(BF16, how, n=100)
    old, product = one.old, products(one.hidden, one.weight, one.bias)
    if autocast:
        one = replace(one, hidden=one.hidden.float(), weight=one.weight.float(), bias=one.bias.float())
    parameters = leaves(one)
    with bf16() if autocast else nullcontext():
        z = products(*parameters).float()
        with tiles(*ONE_ROW, dtype=BF16):
            ours = by_head(one, old=old)
    theirs = outcome(from_logits(one, z, old), parameters)
    assert torch.equal(ours.policy.token_ids, theirs.policy.token_ids)
    truth, _ = precisely(one, product, ours.policy)
    for a, b, exact in zip(ours.gradients, theirs.gradients, truth.gradients, strict=True):
        near, far = ((x.double() - exact).square().mean().sqrt().item() for x in (a, b))
        # The dense way rounds the same two times, gradient and result; a sum in bf16 would add a rounding a tile.
        assert near <= 1.1 * far
        assert far > 0


def test_six_hundred_equal_rows_add_up_in_half_precision() -> None:
    """A sum in bf16 stands still at 256 times the addend; in fp32 it is 600 times one row's, rounded once (2⁻⁸)."""
    hidden, weight, sampled = coarse(BF16, "sparsify").hidden[:1], coarse(BF16, "sparsify").weight, torch.tensor([5])
    grads = []
    for n in (1, 600):
        leaf, bias = weight.clone().requires_grad_(), torch.zeros(V, dtype=BF16, requires_grad=True)
        with tiles(*ONE_ROW, dtype=BF16):
            policy, _ = Head(leaf, bias).sparsify(hidden.expand(n, -1), sampled.expand(n), 4)
            policy.sampled_log_probs.sum().backward()
        grads.append((leaf.grad, bias.grad))
    for one, many in zip(*grads, strict=True):
        # the gradient of the single row was rounded to bf16 too
        torch.testing.assert_close(many.double(), 600 * one.double(), rtol=1.01 * 2.0**-7, atol=0)
        assert many.abs().max().item() > 10


# ---- positions that do not count -----------------------------------------------------------------------------------

MASK = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 1], dtype=torch.bool)


def assert_empty(found: Outcome, where: Tensor) -> None:
    """No support, all mass in the tail, no entropy, no gradient for the hidden states."""
    count = int(where.sum())
    assert found.policy.token_ids[where].tolist() == [[-1] * K] * count
    assert found.policy.log_probs[where].tolist() == [[-INF] * K] * count
    assert found.policy.log_tail[where].tolist() == [0.0] * count
    assert found.entropy[where].tolist() == [0.0] * count
    assert found.gradients[0][where].abs().tolist() == [[0.0] * H] * count


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("fill", [math.nan, INF, -INF])
def test_masked_hidden_states_are_not_read_and_leak_nothing(how: str, fill: float) -> None:
    one = case(how)
    old, truth = one.old, by_logits(one, loss_mask=MASK)
    broken = torch.where(MASK[:, None], one.hidden, fill)
    with tiles(*THREE_ROWS):
        same = by_head(one, loss_mask=MASK)
        assert_alike(same, truth)
        sampled = torch.where(MASK, one.sampled, -100)
        found = by_head(replace(one, hidden=broken, sampled=sampled), old=old, loss_mask=MASK.long())
    assert_empty(found, ~MASK)
    assert found.policy.valid.tolist() == MASK.tolist()
    assert all(same_bits(a, b) for a, b in zip(named(found), named(same), strict=True))


def test_positions_that_the_old_policy_masks_stay_masked() -> None:
    one = case("restrict")
    z = products(one.hidden, one.weight, one.bias)
    old = sparsify(z, one.sampled, K, 1e-3, loss_mask=MASK)
    broken = replace(one, hidden=torch.where(MASK[:, None], one.hidden, math.nan))
    here = torch.arange(N) != 5
    with tiles(*THREE_ROWS):
        found = by_head(broken, old=old, loss_mask=here)
        assert_alike(found, by_logits(one, old=old, loss_mask=MASK & here))
    assert_empty(found, ~(MASK & here))
    assert found.policy.valid.tolist() == (MASK & here).tolist()


@pytest.mark.parametrize("how", HOWS)
def test_with_everything_masked_the_gradients_are_there_and_zero(how: str) -> None:
    one = case(how)
    parameters = leaves(replace(one, hidden=torch.full_like(one.hidden, math.nan)))
    scored = from_hidden(one, *parameters, one.old, loss_mask=torch.zeros(N))
    assert scored.policy.log_probs.requires_grad
    assert scored.policy.log_tail.requires_grad
    assert scored.entropy.requires_grad
    found = outcome(scored, parameters)
    assert_empty(found, torch.ones(N, dtype=torch.bool))
    for leaf, shape in zip(parameters, ((N, H), (V, H), (V,)), strict=True):
        assert same_bits(leaf.grad, torch.zeros(shape, dtype=F64))


class Work(TorchDispatchMode):
    """Type and number of elements of every tensor that an operation returns; multiplications in matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.dtype, int]] = []
        self.multiplications = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made += [(x.dtype, x.numel()) for x in tree_leaves(out) if isinstance(x, Tensor)]
        if "mm" in str(func):
            a, b = args[-2:]
            self.multiplications += a.numel() * b.shape[-1]
        return out

    def largest(self, *dtypes: torch.dtype) -> int:
        return max(size for dtype, size in self.made if not dtypes or dtype in dtypes)


WIDE_V, FEW_H, MANY = 257, 2, 64


def large(how: str, dtype: torch.dtype = F32) -> Case:
    """Many positions and tokens, few features: what is as large as the logits stands out."""
    hidden, weight = normal(MANY, FEW_H, seed=50, dtype=dtype), normal(WIDE_V, FEW_H, seed=51, dtype=dtype)
    return Case(hidden, weight, normal(WIDE_V, seed=53, dtype=dtype), ids(MANY, below=WIDE_V, seed=52), how)


@pytest.mark.parametrize("how", HOWS)
def test_masked_positions_cost_nothing(how: str) -> None:
    one, multiplications = large(how), []
    old = one.old
    for mask in (torch.ones(MANY), torch.arange(MANY) % 16 == 3):
        with Work() as work:
            by_head(one, old=old, loss_mask=mask)
        multiplications.append(work.multiplications)
    # the products of the tile, forward and again backward, and two for the gradients
    assert multiplications == [4 * MANY * WIDE_V * FEW_H, 4 * 4 * WIDE_V * FEW_H]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("trained", list(itertools.product([True, False], repeat=3)))
def test_gradients_that_nobody_needs_cost_nothing(trained: tuple[bool, bool, bool], how: str) -> None:
    one = large(how)
    old = one.old
    parameters = [x.requires_grad_(needed) for x, needed in zip(leaves(one), trained, strict=True)]
    with Work() as work:
        scored = from_hidden(one, *parameters, old)
        if any(trained):
            functional(scored).backward()
    products = 1 + any(trained) + trained[0] + trained[1]
    assert work.multiplications == products * MANY * WIDE_V * FEW_H


# ---- no logits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
def test_nothing_as_large_as_the_logits_is_made(how: str) -> None:
    """Nothing is larger than a tile, of four rows, and only a chunk of it, of two, is ever there in fp32."""
    one = large(how, BF16)
    old = one.old
    with tiles(4 * WIDE_V + 3, 100, 2 * WIDE_V + 1, dtype=BF16):
        with Work() as ours:
            by_head(one, old=old)
        with Work() as theirs:
            by_logits(one, old=old)
    assert theirs.largest(BF16) == theirs.largest(F32) == MANY * WIDE_V
    assert ours.largest() == ours.largest(BF16) == 4 * WIDE_V
    assert ours.largest(F32) == 2 * WIDE_V


@pytest.mark.parametrize("how", HOWS)
def test_the_weight_is_converted_slice_by_slice(how: str) -> None:
    """A frozen fp32 weight under bf16 hidden states: no second one is made, neither forward nor backward."""
    one = coarse(BF16, how, n=1)
    hidden, weight, old = one.hidden.clone().requires_grad_(), one.weight.float(), one.old
    with tiles(3 * V, 17, 2 * V, dtype=BF16), Work() as work:
        functional(from_hidden(one, hidden, weight, None, old)).backward()
    assert work.largest(BF16) == work.largest(F32) == 17 * 16 < V * 16
    assert hidden.grad.abs().max().item() > 0.1


@pytest.mark.parametrize("how", HOWS)
def test_nothing_as_large_as_a_tile_is_kept_for_the_backward(how: str) -> None:
    one, saved = large(how), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        scored = from_hidden(one, *leaves(one))
    assert scored.entropy.requires_grad
    assert max(saved) == WIDE_V * FEW_H


@pytest.mark.parametrize("how", HOWS)
def test_a_mask_of_ones_is_no_mask_and_the_hidden_states_are_kept_without_a_copy(how: str) -> None:
    one, saved = case(how), []
    everything = by_head(one)
    assert all(same_bits(*x) for x in zip(named(by_head(one, loss_mask=torch.ones(N))), named(everything), strict=True))
    parameters = leaves(one)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        from_hidden(one, *parameters)
    assert {x.data_ptr() for x in parameters} <= set(saved)


# ---- logits that define no distribution ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_nan_hidden_state_is_refused_with_its_position(how: str, softcap: float | None) -> None:
    one = case(how, softcap=softcap)
    old, hidden = one.old, one.hidden.clone()
    hidden[[4, 9], 2] = math.nan
    with (
        tiles(*THREE_ROWS),
        refuses("logit nan of token 0 at position [4] (2 such positions)", "must be finite", "on_invalid='mask'"),
    ):
        from_hidden(one, hidden, one.weight, one.bias, old)


def test_the_position_is_that_among_all_positions() -> None:
    """Rows in front of it are masked out, and the positions have two dimensions."""
    one = case()
    hidden, mask = one.hidden[:10].reshape(2, 5, H).clone(), torch.ones(2, 5)
    hidden[0, 1] = math.nan
    mask[0, :3] = 0
    hidden[1, 3, 0] = INF
    token = int((one.weight[:, 0] > 0).nonzero()[0])
    assert token > 0  # +inf for this token, −inf for those before it
    with refuses(f"logit inf of token {token} at position [1, 3] (1 such positions)"):
        Head(one.weight, one.bias).sparsify(hidden, one.sampled[:10].reshape(2, 5), loss_mask=mask)


def test_only_excluded_tokens_are_refused() -> None:
    one = case()
    with refuses("only −inf logits at position [0] (11 such positions)"):
        Head(one.weight, torch.full_like(one.bias, -INF)).sparsify(one.hidden, one.sampled)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("broken", [math.nan, INF])
@pytest.mark.parametrize("tiling", [THREE_ROWS, ONE_TILE])
def test_broken_hidden_states_are_masked_and_leak_nothing(
    how: str, broken: float, tiling: tuple[int, int, int]
) -> None:
    """Numbers and gradients of all others are those under a loss mask, also of weight and bias: 0 · NaN is NaN."""
    one, good = case(how), torch.ones(N, dtype=torch.bool)
    old, hidden = one.old, one.hidden.clone()
    hidden[4, 2], hidden[9] = broken, broken
    good[[4, 9]] = False
    with tiles(*tiling):
        found = by_head(replace(one, hidden=hidden), old=old, on_invalid="mask")
    assert_empty(found, ~good)
    assert found.policy.valid.tolist() == good.tolist()
    assert_alike(found, by_logits(one, loss_mask=good))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_bias_of_minus_infinity_excludes_tokens(how: str, softcap: float | None) -> None:
    """Kept tokens that became impossible leave the support. A soft cap makes −inf a logit like any other."""
    before = case(how, softcap=softcap)
    old, bias = before.old, before.bias.clone()
    excluded = sorted(set(old.token_ids[:, 1:4].flatten().tolist()) - set(before.sampled.tolist()) - {-1})[::2]
    bias[excluded] = -INF
    one = replace(before, bias=bias)
    with tiles(*THREE_ROWS):
        found = by_head(one, old=old)
    assert_alike(found, by_logits(one, old=old))
    left = torch.isin(old.token_ids, torch.tensor(excluded))
    assert left.any(-1).sum().item() >= 5
    if softcap is None:
        assert not torch.isin(found.policy.token_ids, torch.tensor(excluded)).any()
        assert found.gradients[1][excluded].abs().max().item() == 0.0
        assert found.gradients[2][excluded].abs().max().item() == 0.0
        if how == "restrict":
            assert torch.equal(found.policy.token_ids, torch.where(left, -1, old.token_ids))
    elif how == "restrict":
        assert torch.equal(found.policy.token_ids, old.token_ids)


def test_a_kept_token_that_became_impossible_by_hand() -> None:
    old = sparsify(torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]], dtype=F64), torch.tensor([2]), 4, 0.0)
    assert old.token_ids.tolist() == [[2, 0, 1, 3]]
    bias = torch.tensor([-INF, 0.0, 0.0, -INF, 0.0], dtype=F64, requires_grad=True)
    policy, entropy = Head(torch.zeros(5, 1, dtype=F64), bias).restrict(torch.ones(1, 1, dtype=F64), old)
    assert policy.token_ids.tolist() == [[2, -1, 1, -1]]
    third = math.log(1 / 3)
    assert policy.log_probs.tolist()[0] == close([third, -INF, third, -INF], rel=1e-15)
    assert policy.log_tail.item() == close(third, rel=1e-15)
    assert entropy.item() == close(-third, rel=1e-15)
    (policy.sampled_log_probs.sum() + policy.log_tail.sum()).backward()
    assert bias.grad.tolist() == close([0.0, -2 / 3, 1 / 3, 0.0, 1 / 3], rel=1e-14)


@pytest.mark.parametrize("how", HOWS)
def test_a_sampled_token_that_is_excluded_is_refused_or_masked(how: str) -> None:
    before = case(how)
    token, old = int(before.sampled[6]), before.old
    bias, good = before.bias.clone(), before.sampled != token
    bias[token] = -INF
    one = replace(before, bias=bias)
    assert good.sum().item() == N - 1
    with tiles(*THREE_ROWS):
        with refuses(f"token {token} with logit −inf at position [6]", "can be sampled"):
            by_head(one, old=old)
        found = by_head(one, old=old, on_invalid="mask")
    assert_empty(found, ~good)
    assert_alike(found, by_logits(one, old=old, loss_mask=good))


# ---- shapes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (6,), (2, 3), (3, 1, 2)])
def test_leading_dimensions(shape: tuple[int, ...], how: str) -> None:
    n = math.prod(shape)
    flat = Case(
        normal(n, H, seed=60, dtype=F64), case().weight, None, ids(n, below=V, seed=61), how, max_support=4, scale=0.5
    )
    shaped = replace(flat, hidden=flat.hidden.reshape(*shape, H), sampled=flat.sampled.reshape(shape))
    leaf, weight = shaped.hidden.clone().requires_grad_(), shaped.weight.clone().requires_grad_()
    with tiles(*THREE_ROWS):
        expected = by_head(flat)
        policy, entropy = from_hidden(shaped, leaf, weight)
    assert policy.shape == entropy.shape == shape
    kept = SparsePolicy(policy.token_ids.reshape(n, 4), policy.log_probs.reshape(n, 4), policy.log_tail.reshape(n), V)
    functional(Scored(kept, entropy.reshape(n))).backward()
    assert_alike(
        Outcome(kept.detach(), entropy.detach().reshape(n), [leaf.grad.reshape(n, H), weight.grad, None]), expected
    )


def test_hidden_states_need_not_lie_in_one_piece() -> None:
    """As in use: the last position predicts nothing."""
    one = case()
    hidden = one.hidden[:10].reshape(2, 5, H).clone().requires_grad_()
    sampled = one.sampled[:8].reshape(2, 4)
    weight = one.weight.T.contiguous().T
    policy, entropy = Head(weight).sparsify(hidden[:, :-1], sampled, K)
    (policy.log_tail.sum() + 2 * entropy.sum()).backward()
    straight = hidden.detach()[:, :-1].clone().requires_grad_()
    expected, expected_entropy = Head(one.weight).sparsify(straight, sampled, K)
    (expected.log_tail.sum() + 2 * expected_entropy.sum()).backward()
    assert torch.equal(policy.token_ids, expected.token_ids)
    torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=CLOSE)
    torch.testing.assert_close(hidden.grad[:, :-1], straight.grad, rtol=0, atol=CLOSE)
    assert hidden.grad[:, -1].abs().max().item() == 0.0
    assert straight.grad.abs().max().item() > 0.1


# ---- what is needed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("trained", list(itertools.product([True, False], repeat=3))[1:-1])
def test_frozen_tensors_get_no_gradient_and_the_others_theirs(trained: tuple[bool, bool, bool], how: str) -> None:
    one = case(how, softcap=4.0)
    parameters = [x.requires_grad_(needed) for x, needed in zip(leaves(one), trained, strict=True)]
    with tiles(*THREE_ROWS):
        functional(from_hidden(one, *parameters)).backward()
    for leaf, needed, expected in zip(parameters, trained, by_logits(one).gradients, strict=True):
        if needed:
            torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=CLOSE)
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("how", HOWS)
def test_constants_make_constants(how: str) -> None:
    one = case(how)
    scored = from_hidden(one, one.hidden, one.weight, one.bias)
    assert not scored.policy.log_probs.requires_grad
    assert not scored.policy.log_tail.requires_grad
    assert not scored.entropy.requires_grad
    with torch.no_grad():
        again = from_hidden(one, *leaves(one))
    assert same_policy(again.policy, scored.policy)
    assert same_bits(again.entropy, scored.entropy)


# ---- parameters in pieces ------------------------------------------------------------------------------------------


class Gathered:
    """Parameters that hold NaN except inside this context, and what happened to it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.parameters, self.events = (weight, bias), []
        self.whole = [None if x is None else x.detach().clone() for x in self.parameters]
        self._fill([None if x is None else torch.full_like(x, math.nan) for x in self.whole])

    def _fill(self, values: list[Tensor | None]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            if parameter is not None:
                parameter.data.copy_(value)

    @contextmanager
    def __call__(self, weight: Tensor, bias: Tensor | None) -> Iterator[None]:
        self.events.append("in")
        assert weight.data_ptr() == self.parameters[0].data_ptr()
        assert (bias is None) == (self.parameters[1] is None)
        assert bias is None or bias.data_ptr() == self.parameters[1].data_ptr()
        self._fill(self.whole)
        try:
            yield
        finally:
            self._fill([None if x is None else torch.full_like(x, math.nan) for x in self.whole])
            self.events.append("out")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_read_inside_gather_only_forward_and_backward(how: str, bias: bool) -> None:
    one = case(how, bias=bias)
    parameters = leaves(one)
    gather = Gathered(*parameters[1:])
    with tiles(*THREE_ROWS):
        scored = from_hidden(one, *parameters, gather=gather)
        assert gather.events == ["in", "out"]
        found = outcome(scored, parameters)
    assert gather.events == ["in", "out", "in", "out"]
    assert_alike(found, by_logits(one))


def test_the_refused_row_is_read_inside_gather_too() -> None:
    """The logit that is named is that of the whole weight, and not the NaN that stands there otherwise."""
    one = case()
    hidden, (_, weight, bias) = one.hidden.clone(), leaves(one)
    hidden[3, 0] = INF
    token = int((one.weight[:, 0] > 0).nonzero()[0])
    gather = Gathered(weight, bias)
    with refuses(f"logit inf of token {token} at position [3]"):
        from_hidden(one, hidden, weight, bias, gather=gather)
    assert gather.events == ["in", "out", "in", "out"]  # once to score, once more to name the logit


@pytest.mark.parametrize("how", HOWS)
def test_a_sharded_weight_has_its_shape_inside_gather_only(how: str) -> None:
    """As under DeepSpeed's ZeRO-3, where a parameter is empty until it is gathered."""
    one = case(how)
    _, weight, _ = parameters = leaves(one)
    whole = weight.detach().clone()

    @contextmanager
    def gather(*_: Tensor | None) -> Iterator[None]:
        weight.data = whole
        try:
            yield
        finally:
            weight.data = whole.new_empty(0)

    weight.data = whole.new_empty(0)
    scored = from_hidden(one, *parameters, gather=gather)
    truth = by_logits(one)
    assert_alike(Outcome(scored.policy, scored.entropy, []), truth._replace(gradients=[]))


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 4, H), (2, H), (6, H), (2, 3, 1, H), (H,), (2, 3, H + 1), (2, 3)])
@pytest.mark.parametrize("how", HOWS)
def test_hidden_states_of_another_shape_are_refused(how: str, shape: tuple[int, ...]) -> None:
    one = replace(case(how, dtype=F32), sampled=case().sampled[:6].reshape(2, 3))
    old = sparsify(torch.zeros(2, 3, V), one.sampled, K)
    with refuses(f"got {list(shape)}, [2, 3] and [53, 7]", "[..., H], [...] and [V, H]", "hidden[:, :-1]"):
        from_hidden(one, torch.zeros(shape), one.weight, None, old)


def test_an_old_policy_over_another_vocabulary_is_refused() -> None:
    one = case()
    for v in (V - 1, V + 1):
        old = sparsify(torch.zeros(N, v), torch.arange(N), K)
        with refuses(f"got {V} and {v} tokens", "the same vocabulary", "same model"):
            Head(one.weight).restrict(one.hidden, old)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"max_support": 0}, "max_support must be an integer ≥ 1, got 0"),
        ({"tail_mass": 1.0}, "tail_mass must be a number ≥ 0 and < 1, got 1.0"),
        ({"tail_mass": -1e-9}, "tail_mass must be a number ≥ 0 and < 1, got -1e-09"),
        ({"temperature": 0.0}, "temperature must be a finite number > 0, got 0.0"),
        ({"temperature": -1.0}, "temperature must be a finite number > 0, got -1.0"),
        ({"temperature": math.nan}, "temperature must be a finite number > 0, got nan"),
        ({"temperature": INF}, "temperature must be a finite number > 0, got inf"),
        ({"on_invalid": "drop"}, "on_invalid must be 'raise' or 'mask', got 'drop'"),
        ({"loss_mask": torch.ones(N - 1)}, f"[{N}], got [{N - 1}]"),
        ({"loss_mask": torch.ones(N, 1)}, f"[{N}], got [{N}, 1]"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], given: str) -> None:
    one = case()
    with refuses(given):
        Head(one.weight).sparsify(one.hidden, one.sampled, **options)
    if "on_invalid" in options or "loss_mask" in options:
        with refuses(given):
            Head(one.weight).restrict(one.hidden, one.old, **options)


@pytest.mark.parametrize("token", [-1, -100, V])
def test_sampled_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    one = case()
    sampled = one.sampled.clone()
    sampled[3] = token
    with refuses(f"token {token} at position [3]", f"have ids from 0 to {V - 1}", "loss_mask"):
        Head(one.weight).sparsify(one.hidden, sampled)


def test_sampled_ids_are_integers() -> None:
    one = case()
    with refuses("sampled must have an integer dtype, got float32"):
        Head(one.weight).sparsify(one.hidden, one.sampled.float())
    narrow = Head(one.weight).sparsify(one.hidden, one.sampled.int())
    assert same_policy(narrow.policy, Head(one.weight).sparsify(one.hidden, one.sampled).policy)


def test_what_cannot_be_a_head_is_refused() -> None:
    hidden, weight, sampled = torch.ones(2, H), torch.randn(V, H), torch.tensor([3, 4])
    with refuses("hidden must have a floating-point dtype, got int64"):
        Head(weight).sparsify(hidden.long(), sampled)
    with refuses("got [], [] and [53, 7]", "[V, H]"):
        Head(weight).sparsify(torch.tensor(1.0), torch.tensor(3))
    with refuses("got [2, 7], [2] and [53]", "[V, H]"):
        Head(weight[:, 0]).sparsify(hidden, sampled)
    for bias in (torch.zeros(1), torch.zeros(V + 1)):
        with refuses(f"bias must have one entry per row of weight, shape [53], got [{len(bias)}]"):
            Head(weight, bias).sparsify(hidden, sampled)
    with refuses("softcap must be a finite number > 0, got 0.0"):
        Head(weight, softcap=0.0).sparsify(hidden, sampled)


@pytest.mark.parametrize("how", HOWS)
def test_autocast_leaves_fp64_alone(how: str) -> None:
    one = case(how)
    with bf16():
        inside = by_head(one)
    assert_alike(inside, by_head(one), atol=0.0)
