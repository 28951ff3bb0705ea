"""``Head.token_loss``: the loss and the gradients of the composed way, whatever the memory, made in the forward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import F32, F64, INF, ids, normal, refuses, same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from troll import Head, SparsePolicy, sparsify
from troll.deferred import DeferredChecks, run_checks
from troll.policy import Scored, head_gradients
from troll.policy import head as head_module
from troll.policy.head_gradients import BUDGET, Plan, plan
from troll.policy.matmul import TiledMatmul, _slices
from troll.policy.scoring import types

V, H, N, K = 53, 7, 11, 6
BF16, F16 = torch.bfloat16, torch.float16
HOWS = ["sparsify", "restrict"]
WAYS = ["whole", "chunks", "recompute"]
MASK = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 1], dtype=torch.bool)
CLOSE = 1e-12  # as for the tests of ``Head`` in fp64


class Case(NamedTuple):
    """What is scored and how."""

    how: str = "sparsify"
    dtype: torch.dtype = F64
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def tensors(self) -> list[Tensor]:
        """Hidden states from flat to sharp, weight and bias."""
        hidden = normal(N, H, seed=0) * torch.arange(N)[:, None] / 3
        return [hidden.to(self.dtype), normal(V, H, seed=1, dtype=self.dtype), normal(V, seed=2, dtype=self.dtype)]

    def leaves(self, trained: tuple[bool, bool, bool] = (True, True, True)) -> list[Tensor]:
        return [x.clone().requires_grad_(t) for x, t in zip(self.tensors(), trained, strict=True)]

    def head(self, leaves: list[Tensor], **options: Any) -> Head:
        return Head(leaves[1], leaves[2], self.scale, self.softcap, **options)

    def target(self) -> Tensor | SparsePolicy:
        sampled = ids(N, below=V, seed=4)
        if self.how == "sparsify":
            return sampled
        old = normal(N, V, seed=3, scale=2.0, dtype=F64)
        return sparsify(old, sampled, K, 1e-3, temperature=self.temperature)


def clip_and_more(scored: Scored, at: Tensor | slice) -> Tensor:
    """A clipped ratio, an entropy bonus, something of every kept token and of the tail, with factors per position."""
    policy = scored.policy
    old, advantages, factors = (normal(N, seed=40 + i, dtype=F64)[at] for i in range(3))
    ratio = (policy.sampled_log_probs - (policy.sampled_log_probs.detach() + 0.3 * old)).exp()
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kept = policy.log_probs.masked_fill(policy.token_ids < 0, 0.0).square().sum(-1)
    tail = policy.log_tail.masked_fill(policy.log_tail == -INF, 0.0)
    return (-clipped - 0.1 * scored.entropy + factors * (0.01 * kept + 0.1 * tail)).sum().to(policy.log_probs.dtype)


def composed(case: Case, leaves: list[Tensor], loss: Any = clip_and_more, mask: Tensor | None = None) -> Tensor:
    """The same from the scores of all positions, with autograd."""
    head, target = case.head(leaves, impl="reference"), case.target()
    if isinstance(target, SparsePolicy):
        policy, entropy = head.restrict(leaves[0], target, loss_mask=mask)
    else:
        policy, entropy = head.sparsify(leaves[0], target, K, 1e-3, temperature=case.temperature, loss_mask=mask)
    at = torch.arange(N) if mask is None else mask.nonzero()[:, 0]
    return loss(Scored(policy[at], entropy[at]), at)


def single(
    case: Case,
    leaves: list[Tensor],
    loss: Any = clip_and_more,
    mask: Tensor | None = None,
    impl: str = "torch",
    way: str | None = None,
    rows: int = 3,
    gather: Any = None,
    **options: Any,
) -> Tensor:
    """The way under test: as the memory budget has it, or this one, with so many rows in a chunk."""
    head = case.head(leaves, impl=impl, **({} if gather is None else {"gather": gather}))
    with pytest.MonkeyPatch.context() as patch:
        if way is not None:
            patch.setattr(head_module, "plan", lambda products, *_: planned(products, way, rows))
        return head.token_loss(
            leaves[0], case.target(), loss, K, 1e-3, temperature=case.temperature, loss_mask=mask, **options
        )


def planned(products: TiledMatmul, way: str, rows: int) -> Plan:
    rows = {"whole": len(products.hidden), "chunks": rows, "recompute": 0}[way]
    return Plan(way, rows * V * products.dtype.itemsize)  # type: ignore[arg-type]


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [x for x in leaves if x.requires_grad]))


def assert_same(ours: tuple[Tensor, list[Tensor]], theirs: tuple[Tensor, list[Tensor]], atol: float = CLOSE) -> None:
    for a, b in zip([ours[0], *ours[1]], [theirs[0], *theirs[1]], strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.detach(), b.detach(), rtol=atol, atol=atol)


# ---- the same as the composed way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", [{}, {"scale": 0.6, "temperature": 0.8}, {"softcap": 3.0, "temperature": 1.3}])
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_loss_and_gradients(how: str, way: str, form: dict[str, Any], impl: str) -> None:
    case = Case(how, **form)
    leaves = case.leaves()
    ours = single(case, leaves, impl=impl, way=way)
    theirs = composed(case, leaves)
    assert ours.shape == ()
    assert_same((ours, gradients(ours, leaves)), (theirs, gradients(theirs, leaves)))
    assert min(g.abs().max().item() for g in gradients(composed(case, leaves), leaves)) > 0.1


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trained", list(itertools.product([True, False], repeat=3)))
def test_what_is_frozen_gets_no_gradient_and_the_others_theirs(
    trained: tuple[bool, bool, bool], way: str, how: str
) -> None:
    case = Case(how, softcap=4.0)
    leaves = case.leaves(trained)
    loss = single(case, leaves, way=way)
    assert loss.requires_grad == any(trained)
    if any(trained):
        loss.backward()
        expected = iter(gradients(composed(case, case_leaves := case.leaves(trained)), case_leaves))
        for leaf, needed in zip(leaves, trained, strict=True):
            assert (leaf.grad is not None) == needed
            if needed:
                torch.testing.assert_close(leaf.grad, next(expected), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fill", [math.nan, INF])
def test_positions_that_do_not_count_are_not_read_and_leak_nothing(how: str, way: str, fill: float) -> None:
    case = Case(how)
    leaves = case.leaves()
    with torch.no_grad():
        leaves[0][~MASK] = fill
    ours = single(case, leaves, mask=MASK, way=way)
    found = gradients(ours, leaves)
    clean = case.leaves()
    theirs = composed(case, clean, mask=MASK)
    assert_same((ours, found), (theirs, gradients(theirs, clean)))
    assert (found[0][~MASK] == 0).all()


@pytest.mark.parametrize("way", WAYS)
def test_positions_that_the_old_policy_masks_do_not_count(way: str) -> None:
    case = Case("restrict")
    leaves = case.leaves()
    old = sparsify(normal(N, V, seed=3, dtype=F64), ids(N, below=V, seed=4), K, 1e-3, loss_mask=MASK)
    seen: list[Tensor] = []

    def loss(scored: Scored, at: Tensor | slice) -> Tensor:
        seen.append(torch.arange(N)[at])
        return (scored.policy.sampled_log_probs * normal(N, seed=40, dtype=F64)[at]).sum()

    here = torch.arange(N) != 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_module, "plan", lambda products, *_: planned(products, way, 2))
        value = case.head(leaves, impl="torch").token_loss(leaves[0], old, loss, loss_mask=here)
    assert torch.equal(torch.cat(seen), (MASK & here).nonzero()[:, 0])
    policy, _ = case.head(leaves, impl="reference").restrict(leaves[0], old, loss_mask=here)
    expected = (torch.where(policy.valid, policy.sampled_log_probs, 0.0) * normal(N, seed=40, dtype=F64)).sum()
    assert_same((value, gradients(value, leaves)), (expected, gradients(expected, leaves)))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("mask", [None, MASK])
def test_the_loss_is_told_which_positions_it_is_given(how: str, mask: Tensor | None) -> None:
    """In chunks, all of them once, in order: as a slice where all count, as indices otherwise."""
    case = Case(how)
    leaves, seen = case.leaves(), []

    def loss(scored: Scored, at: Tensor | slice) -> Tensor:
        assert isinstance(at, slice) == (mask is None)
        seen.append(torch.arange(N)[at])
        assert scored.policy.shape == scored.entropy.shape == (len(seen[-1]),)
        target = case.target()
        sampled = target.sampled if isinstance(target, SparsePolicy) else target
        assert torch.equal(scored.policy.sampled, sampled[at])
        return scored.entropy.sum()

    counted = N if mask is None else int(mask.sum())
    single(case, leaves, loss, mask, way="chunks")
    assert [len(x) for x in seen] == [3] * (counted // 3) + [counted % 3] * (counted % 3 > 0)
    assert torch.equal(torch.cat(seen), torch.arange(N) if mask is None else mask.nonzero()[:, 0])


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("way", ["whole", "recompute"])
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_no_position_counts(how: str, way: str, impl: str) -> None:
    case = Case(how)
    leaves = case.leaves()
    with torch.no_grad():
        leaves[0].fill_(math.nan)
    loss = single(case, leaves, mask=torch.zeros(N), impl=impl, way=way)
    assert loss.item() == 0.0
    for leaf, g in zip(leaves, gradients(loss, leaves), strict=True):
        assert same_bits(g, torch.zeros_like(leaf))


def test_positions_of_two_dimensions_and_hidden_states_with_gaps() -> None:
    case = Case()
    wide = normal(2, 6, H, seed=50, dtype=F64).requires_grad_()
    weight, sampled, mask = case.tensors()[1].requires_grad_(), ids(2, 5, below=V, seed=51), torch.ones(2, 5)
    mask[0, 3] = 0

    def loss(scored: Scored, at: Tensor | slice) -> Tensor:
        return (scored.policy.sampled_log_probs * normal(10, seed=52, dtype=F64)[at]).sum()

    ours = Head(weight, impl="torch").token_loss(wide[:, :-1], sampled, loss, K, loss_mask=mask)
    policy, _ = Head(weight, impl="reference").sparsify(wide[:, :-1], sampled, K, loss_mask=mask)
    kept = torch.where(mask > 0, policy.sampled_log_probs, 0.0)
    theirs = (kept * normal(10, seed=52, dtype=F64).view(2, 5)).sum()
    found = torch.autograd.grad(ours, (wide, weight))
    assert_same((ours, list(found)), (theirs, list(torch.autograd.grad(theirs, (wide, weight)))))
    assert (found[0][:, -1] == 0).all()


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_needs_only_some_of_the_scores_or_none(way: str) -> None:
    case = Case()
    losses = [
        lambda scored, at: scored.entropy.square().sum(),
        lambda scored, at: scored.policy.log_tail.exp().sum(),
        lambda scored, at: scored.policy.sampled_log_probs.sum(),
        lambda scored, at: torch.tensor(2.5, dtype=F64) * scored.policy.valid.sum(),
    ]
    for loss in losses:
        leaves = case.leaves()
        ours, theirs = single(case, leaves, loss, way=way), composed(case, leaves, loss)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=CLOSE)
        if theirs.requires_grad:
            assert_same((ours, gradients(ours, leaves)), (theirs, gradients(theirs, leaves)))
        elif way != "recompute":
            assert all((g == 0).all() for g in gradients(ours, leaves))
        else:
            assert not ours.requires_grad


# ---- what arrives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_a_factor_reaches_the_gradients_and_one_changes_no_bit(way: str, impl: str) -> None:
    case = Case("restrict")
    leaves = case.leaves()

    def loss() -> Tensor:
        return single(case, leaves, impl=impl, way=way)

    plain = gradients(loss(), leaves)
    assert all(same_bits(a, b) for a, b in zip(gradients(loss() * 1.0, leaves), plain, strict=True))
    for factor in (3.0, -0.25, 0.0):
        for a, b in zip(gradients(loss() * factor, leaves), plain, strict=True):
            torch.testing.assert_close(a, factor * b, rtol=1e-12, atol=1e-13)
    squared = loss()
    for a, b in zip(gradients(squared.square(), leaves), plain, strict=True):
        torch.testing.assert_close(a, 2 * squared.item() * b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_losses_add_up_in_the_leaves(way: str) -> None:
    """As in gradient accumulation, and beside a term that knows nothing of it; nothing given is changed."""
    case = Case()
    leaves = case.leaves()
    for factor in (0.5, 1.0):
        (single(case, leaves, way=way) * factor + leaves[1].sum()).backward()
    expected = gradients(composed(case, other := case.leaves()), other)
    for leaf, g, extra in zip(leaves, expected, (0, 2, 0), strict=True):
        torch.testing.assert_close(leaf.grad, 1.5 * g + extra, rtol=0, atol=CLOSE)
    assert all(same_bits(a.detach(), b) for a, b in zip(leaves, case.tensors(), strict=True))


@pytest.mark.parametrize("way", ["whole", "chunks"])
def test_a_second_backward_is_refused(way: str) -> None:
    case = Case()
    leaves = case.leaves()
    loss = single(case, leaves, way=way)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"can be differentiated once.*Compute the loss again, or use troll_loss"):
        loss.backward()
    (grad,) = torch.autograd.grad(single(case, leaves) * leaves[2].sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


class Work(TorchDispatchMode):
    """Multiplications in matrix products, and the largest tensor of each type that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplications = 0
        self.largest: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "mm" in str(func):
            a, b = args[-2:]
            self.multiplications += a.numel() * b.shape[-1]
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.largest[x.dtype] = max(self.largest.get(x.dtype, 0), x.numel())
        return out


@pytest.mark.parametrize(("way", "products"), [("whole", 3), ("chunks", 3), ("recompute", 4)])
@pytest.mark.parametrize("mask", [None, MASK])
def test_three_products_where_the_composed_way_takes_four(way: str, products: int, mask: Tensor | None) -> None:
    case = Case()
    leaves, counted = case.leaves(), N if mask is None else int(mask.sum())
    with Work() as work:
        single(case, leaves, mask=mask, way=way).backward()
    assert work.multiplications == products * counted * V * H


@pytest.mark.parametrize("way", WAYS)
def test_without_gradients_one_product(way: str) -> None:
    case = Case()
    leaves = case.leaves()
    truth = composed(case, leaves)
    for context, tensors in ((torch.no_grad(), leaves), (nullcontext(), case.tensors())):
        with context, Work() as work:
            loss = single(case, tensors, way=way)
        assert not loss.requires_grad
        assert work.multiplications == N * V * H
        torch.testing.assert_close(loss, truth.detach(), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("trained", list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("way", ["whole", "chunks"])
def test_gradients_that_nobody_needs_cost_nothing(trained: tuple[bool, bool], way: str) -> None:
    case = Case()
    leaves = case.leaves((*trained, True))
    with Work() as work:
        single(case, leaves, way=way).backward()
    assert work.multiplications == (1 + sum(trained)) * N * V * H


@pytest.mark.parametrize(("way", "size"), [("whole", N * V), ("chunks", 2 * V)])
def test_one_tile_for_the_logits_and_their_gradient(way: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in bf16 is larger than the tile, and only a row of it is ever there in fp32 (where sums are on a CPU)."""
    case = Case(dtype=BF16)
    leaves = case.leaves((False, False, True))
    leaves[1] = leaves[1][:, :1].contiguous()  # a weight smaller than the tile
    leaves[0] = leaves[0][:, :1].contiguous()
    monkeypatch.setattr(types, "_CHUNK_ELEMENTS", V)
    with Work() as work:
        loss = single(case, leaves, way=way, rows=2)
    loss.backward()
    assert work.largest[BF16] == size
    assert work.largest[F32] <= max(V, 2 * N * K)


# ---- precision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
def test_bf16_gradients_in_chunks_of_a_row_are_as_good_as_from_one_product(how: str) -> None:
    """Root mean square distances from the exact gradients of the rounded products."""
    case = Case(how, BF16)
    leaves = case.leaves()

    def loss(scored: Scored, at: Tensor | slice) -> Tensor:
        kept = scored.policy.log_probs.masked_fill(scored.policy.token_ids < 0, 0.0)
        return (kept * normal(N, 1, seed=60)[at]).sum() - scored.entropy.sum()

    found = {}
    for way in WAYS:
        found[way] = gradients(single(case, leaves, loss, way=way, rows=1), leaves)
        assert [g.dtype for g in found[way]] == [BF16] * 3
    hidden, weight, _ = (x.double() for x in case.tensors())
    z = (case.tensors()[0] @ case.tensors()[1].T + case.tensors()[2]).double().requires_grad_()
    one = Head(torch.eye(V, dtype=F64), impl="reference")
    target = case.target()
    scored = one.restrict(z, target) if how == "restrict" else one.sparsify(z, target, K, 1e-3)
    kept = scored.policy.log_probs.masked_fill(scored.policy.token_ids < 0, 0.0)
    ((kept * normal(N, 1, seed=60)).sum() - scored.entropy.sum()).backward()
    truth = [z.grad @ weight, z.grad.T @ hidden, z.grad.sum(0)]
    for i, exact in enumerate(truth):
        off = {way: (found[way][i].double() - exact).square().mean().sqrt().item() for way in WAYS}
        assert off["whole"] > 0
        assert off["chunks"] <= 1.1 * off["whole"]
        assert off["whole"] <= 1.1 * off["recompute"]


def test_six_hundred_equal_rows_add_up_in_half_precision() -> None:
    """A sum in bf16 stands still at 256 times the addend; in fp32 it is 600 times one row's, rounded once (2⁻⁸)."""
    hidden, weight, _ = Case(dtype=BF16).tensors()
    grads = []
    for n in (1, 600):
        leaf, bias = weight.clone().requires_grad_(), torch.zeros(V, dtype=BF16, requires_grad=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(head_module, "plan", lambda products, *_: planned(products, "chunks", 1))
            loss = Head(leaf, bias, impl="torch").token_loss(
                hidden[3:4].expand(n, -1),
                torch.tensor([5]).expand(n),
                lambda scored, at: scored.policy.sampled_log_probs.sum(),
                4,
            )
        loss.backward()
        grads.append((leaf.grad, bias.grad))
    for one, many in zip(*grads, strict=True):
        torch.testing.assert_close(many.double(), 600 * one.double(), rtol=1.01 * 2.0**-7, atol=0)
        assert many.abs().max().item() > 10


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("way", WAYS)
def test_autocast_computes_the_products_in_its_type(how: str, way: str) -> None:
    """Numbers as from bf16 tensors; gradients too, but in fp32: they are bf16's before the last rounding."""
    half, full = Case(how, BF16), Case(how, F32)
    expected_leaves = half.leaves()
    leaves = [x.detach().float().requires_grad_() for x in expected_leaves]
    with torch.autocast("cpu", dtype=BF16):
        loss = single(full, leaves, way=way)
    expected = single(half, expected_leaves, way=way)
    assert same_bits(loss.detach(), expected.detach())
    for a, b in zip(gradients(loss, leaves), gradients(expected, expected_leaves), strict=True):
        assert (a.dtype, b.dtype) == (F32, BF16)
        assert same_bits(a.to(BF16), b)


def test_fp16_waits_for_the_scale_that_the_backward_brings() -> None:
    """Gradients of 1e-9 are nothing in fp16, and with a loss scale of 2¹⁶ they are there."""
    case = Case(dtype=F16)
    leaves = case.leaves()

    def loss(scored: Scored, at: Tensor | slice) -> Tensor:
        return 1e-8 * scored.policy.sampled_log_probs.sum()

    value = single(case, leaves, loss)
    found = gradients(value * 2.0**16, leaves)
    exact = gradients(composed(case, leaves, loss) * 2.0**16, leaves)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * torch.finfo(F16).eps, atol=2e-6)
        assert a.abs().max().item() > 1e-4


def test_memory_that_was_not_written_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the gradient of the weight begins, nor that of the hidden states."""

    def spoiled(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            out = make(*args, **options)
            return out.fill_(math.nan) if out.is_floating_point() else out

        return made

    for dtype, way in itertools.product((F64, BF16), WAYS):
        case = Case(dtype=dtype)
        leaves = case.leaves()
        loss = single(case, leaves, way=way)
        clean = [loss.detach(), *gradients(loss, leaves)]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", spoiled(torch.empty))
            patch.setattr(torch, "empty_like", spoiled(torch.empty_like))
            patch.setattr(Tensor, "new_empty", spoiled(Tensor.new_empty))
            loss = single(case, leaves, way=way)
            again = [loss.detach(), *gradients(loss, leaves)]
        assert all(same_bits(a, b) for a, b in zip(again, clean, strict=True))


# ---- the kernels ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors on a CPU: kernels are interpreted where there is no GPU")
@pytest.mark.parametrize(("how", "way"), [("sparsify", "whole"), ("restrict", "chunks"), ("restrict", "recompute")])
def test_the_kernels_give_the_same(how: str, way: str) -> None:
    case = Case(how, F32, softcap=6.0, temperature=0.9)
    leaves = case.leaves()
    ours = single(case, leaves, mask=MASK, impl="triton", way=way)
    theirs = composed(case, leaves, mask=MASK)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)
    found = gradients(ours * 3, leaves)
    for a, b in zip(found, gradients(theirs * 3, leaves), strict=True):
        # sums of at most 53 · 11 products of numbers below 16, each off by some 2⁻²⁴
        torch.testing.assert_close(a, b, rtol=0, atol=3 * 16 * 24 * 2.0**-24)
    again = single(case, leaves, mask=MASK, impl="triton", way=way) * 1.0
    assert all(same_bits(a, 3 * b) or way == "recompute" for a, b in zip(found, gradients(again, leaves), strict=True))


# ---- the plan ------------------------------------------------------------------------------------------------------


def head_of(N: int, V: int, H: int, dtype: torch.dtype, weight: torch.dtype) -> TiledMatmul:
    """Products of this size that take no memory."""
    return TiledMatmul(torch.empty(1, 1, dtype=dtype).expand(N, H), torch.empty(1, 1, dtype=weight).expand(V, H), None)


def needed(products: TiledMatmul, needs_weight: bool, rows: int) -> tuple[int, int]:
    """Bytes for ``whole``; and for ``chunks`` of so many rows, while they come in and when their sum is converted."""
    N, (V, H) = len(products.hidden), products.weight.shape
    size = products.dtype.itemsize
    tile = size * V + size * V // 16
    g_hidden = N * H * products.hidden.dtype.itemsize
    in_its_type = V * H * products.weight.dtype.itemsize * needs_weight
    in_work = V * H * (8 if products.dtype == F64 else 4) * needs_weight
    same = products.weight.dtype == (F64 if products.dtype == F64 else F32)
    converting = in_work + (0 if same else in_its_type)
    return N * tile + g_hidden + in_its_type, g_hidden + max(in_work + rows * tile, converting)


@settings(derandomize=True, max_examples=400)
@given(
    st.integers(1, 40_000),
    st.integers(1, 300_000),
    st.integers(1, 8192),
    st.sampled_from([BF16, F32, F64]),
    st.sampled_from([BF16, F32, F64]),
    st.booleans(),
    st.integers(1, 1 << 36),
)
def test_the_fastest_way_within_the_budget(
    N: int, V: int, H: int, dtype: torch.dtype, weight: torch.dtype, needs_weight: bool, budget: int
) -> None:
    products = head_of(N, V, H, dtype, weight)
    found = plan(products, needs_weight, budget)
    fewest = min(N, 512)
    whole, chunks = needed(products, needs_weight, fewest)
    assert found.way == ("whole" if whole <= budget else "chunks" if chunks <= budget else "recompute")
    if found.way == "recompute":
        assert found.tile_bytes == 0
        return
    rows, rest = divmod(found.tile_bytes, V * dtype.itemsize)
    assert rest == 0
    if found.way == "whole":
        assert rows == N
    else:
        assert rows >= fewest
        assert needed(products, needs_weight, rows)[1] <= budget < needed(products, needs_weight, rows + 1)[1] or (
            needed(products, needs_weight, rows)[1] == needed(products, needs_weight, rows + 1)[1]
        )
    tiles = list(TiledMatmul(products.hidden, products.weight, None, tile_bytes=found.tile_bytes).rows())
    assert tiles[0] == slice(0, min(N, rows))


@pytest.mark.parametrize("needs_weight", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_edges_of_the_budget(needs_weight: bool, dtype: torch.dtype) -> None:
    products = head_of(2000, 5000, 64, dtype, dtype)
    whole, chunks = needed(products, needs_weight, 512)
    assert plan(products, needs_weight, whole) == Plan("whole", 2000 * 5000 * dtype.itemsize)
    assert plan(products, needs_weight, whole - 1).way == "chunks"
    assert plan(products, needs_weight, chunks) == Plan("chunks", 512 * 5000 * dtype.itemsize)
    assert plan(products, needs_weight, chunks - 1) == Plan("recompute", 0)
    assert plan(products, needs_weight, 1) == Plan("recompute", 0)


def test_sums_in_fp32_are_converted_within_the_budget() -> None:
    """20,000 rows, wide hidden states: beside the fp32 sums, their copy in bf16 is larger than a chunk."""
    products = head_of(20_000, 1000, 4096, BF16, BF16)
    sums, g_hidden = 4 * 1000 * 4096, 2 * 20_000 * 4096
    edge = sums + sums // 2 + g_hidden
    assert plan(products, True, edge).way == "chunks"
    assert plan(products, True, edge - 1).way == "recompute"
    assert plan(head_of(20_000, 1000, 4096, BF16, F32), True, edge - 1).way == "chunks"


def test_the_gradient_of_the_weight_counts_where_it_is_needed() -> None:
    products = head_of(64, 5000, 4096, BF16, BF16)
    room = needed(products, False, 64)[0]
    assert plan(products, False, room).way == "whole"
    assert plan(products, True, room).way == "recompute"


def test_fp16_is_computed_again_in_the_backward() -> None:
    assert plan(head_of(4, 50, 8, F16, F16), True, 1 << 40) == Plan("recompute", 0)
    assert plan(head_of(4, 50, 8, F16, F32), True, None) == Plan("recompute", 0)


def test_the_default_budget() -> None:
    assert BUDGET == {"cpu": 1 << 29, "other": 1 << 32}
    fits, not_quite = 480, 520  # of V = 262,144 in fp32: 1 MiB and a sixteenth a row
    for N, way in ((fits, "whole"), (not_quite, "recompute")):
        assert plan(head_of(N, 1 << 18, 8, F32, F32), False, None).way == way


@pytest.mark.parametrize("way", WAYS)
def test_the_budget_decides_how_a_loss_is_computed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks as large as it allows; the number of chunks is how often the loss is called."""
    case = Case()
    leaves, calls = case.leaves(), []
    monkeypatch.setattr(head_gradients, "_FEWEST_ROWS", 2)
    whole, _ = needed(TiledMatmul(*leaves), True, 0)
    room = {"whole": whole, "chunks": needed(TiledMatmul(*leaves), True, 4)[1], "recompute": 1}[way]

    def loss(scored: Scored, at: Tensor | slice) -> Tensor:
        calls.append(len(scored.entropy))
        return clip_and_more(scored, at)

    with Work() as work:
        value = single(case, leaves, loss, memory_budget=room)
        found = gradients(value, leaves)
    assert calls == ([4, 4, 3] if way == "chunks" else [N])
    assert work.multiplications == (4 if way == "recompute" else 3) * N * V * H
    assert_same((value, found), (single(case, leaves), gradients(single(case, leaves), leaves)))


@pytest.mark.parametrize("wrong", [0, -1, -(1 << 30)])
def test_a_budget_of_nothing_is_refused(wrong: int) -> None:
    with refuses(f"memory_budget must be an integer ≥ 1, got {wrong}", "", "None for the default"):
        single(Case(), Case().leaves(), memory_budget=wrong)


# ---- parts of the products -----------------------------------------------------------------------------------------


@given(st.integers(0, 5000), st.integers(-3, 6000), st.sampled_from(["cpu", "cuda"]))
def test_slices_cover_everything_once(total: int, fit: int, device: str) -> None:
    parts = list(_slices(total, fit, device))
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(total))
    sizes = [part.stop - part.start for part in parts]
    assert len(parts) >= 1
    assert max(sizes) <= max(1, fit) or total == 0
    if device == "cuda" and 128 < fit < total:
        assert all(size % 128 == 0 for size in sizes[:-1])
        assert len(parts) == -(-total // (fit - fit % 128))
        assert sizes[0] - 128 < -(-total // len(parts)) <= sizes[0]  # none much smaller than the others but the last


@given(st.integers(0, 60), st.integers(1, 80), st.integers(0, 9000), st.booleans())
def test_rows_and_columns_fit_into_the_tile_and_cover_the_products(N: int, V: int, tile: int, converts: bool) -> None:
    products = TiledMatmul(torch.zeros(N, 2), torch.zeros(V, 2, dtype=BF16 if converts else F32), None, tile_bytes=tile)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("troll.policy.matmul._VOCABULARY_SLICE", 17)
        rows, columns = list(products.rows()), list(products.columns())
    assert [i for part in rows for i in range(N)[part]] == list(range(N))
    assert [i for part in columns for i in range(V)[part]] == list(range(V))
    assert all((part.stop - part.start) * V * 4 <= max(tile, V * 4) for part in rows)
    assert all((part.stop - part.start) * N * 4 <= max(tile, N * 4) for part in columns)
    if converts:
        assert all(part.stop - part.start <= 17 for part in columns)


@pytest.mark.parametrize("weight_dtype", [F32, BF16])
def test_the_parts_put_together_are_the_products(weight_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troll.policy.matmul._VOCABULARY_SLICE", 17)
    hidden, weight, bias = normal(9, 4, seed=70), normal(V, 4, seed=71, dtype=weight_dtype), normal(V, seed=72)
    exact = hidden.double() @ weight.double().T + bias.double()
    products = TiledMatmul(hidden, weight, bias, tile_bytes=4 * (3 * V + 1))
    by_rows = torch.cat([products.tile(part).clone() for part in products.rows()])
    by_columns = torch.cat([products.slab(part)[0].clone() for part in products.columns()], dim=1)
    for part in products.columns():
        assert torch.equal(products.slab(part)[1], weight[part].float())
    torch.testing.assert_close(by_rows.double(), exact, rtol=0, atol=2e-6)
    torch.testing.assert_close(by_columns.double(), exact, rtol=0, atol=2e-6)
    back = torch.empty_like(hidden)
    products.times_weight(by_rows, back)
    torch.testing.assert_close(back.double(), by_rows.double() @ weight.double(), rtol=0, atol=2e-4)


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_counted_nan_is_refused_with_its_position(how: str, way: str, softcap: float | None) -> None:
    case = Case(how, softcap=softcap)
    leaves = case.leaves()
    with torch.no_grad():
        leaves[0][2], leaves[0][[6, 10], 1] = math.nan, math.nan
    mask = torch.arange(N) != 2
    said = "logit nan of token 0 at position [6] (2 such positions)"
    with refuses(said, "must be finite"):
        single(case, leaves, mask=mask, way=way)
    checks: DeferredChecks = []
    single(case, leaves, mask=mask, way=way, deferred=checks)
    assert len(checks) == 1
    with refuses(said, "must be finite"):
        run_checks(checks)


@pytest.mark.parametrize("way", WAYS)
def test_a_sampled_token_that_is_excluded_is_refused(way: str) -> None:
    case = Case()
    leaves = case.leaves()
    token = int(case.target()[6])  # type: ignore[index]
    with torch.no_grad():
        leaves[2][token] = -INF
    with refuses(f"token {token} with logit −inf at position [6]", "can be sampled"):
        single(case, leaves, way=way)


def test_what_cannot_be_is_refused_before_anything_is_computed() -> None:
    case = Case()
    hidden, weight, _ = case.leaves()
    sampled = ids(N, below=V, seed=4)

    def never(scored: Scored, at: Tensor | slice) -> Tensor:
        raise AssertionError

    head = Head(weight, impl="torch")
    with refuses("max_support must be an integer ≥ 1, got 0"):
        head.token_loss(hidden, sampled, never, 0)
    with refuses("tail_mass must be a number ≥ 0 and < 1, got 1.0"):
        head.token_loss(hidden, sampled, never, tail_mass=1.0)
    with refuses("temperature must be a finite number > 0, got 0.0"):
        head.token_loss(hidden, sampled, never, temperature=0.0)
    with refuses("got [11, 6], [11] and", "[V, H]"):
        head.token_loss(hidden[:, :-1], sampled, never)
    with refuses("loss_mask must have the shape of target, [11], got [3]"):
        head.token_loss(hidden, sampled, never, loss_mask=torch.ones(3))
    with refuses(f"token {V} at position [1]", f"ids from 0 to {V - 1}"):
        head.token_loss(hidden, torch.where(torch.arange(N) == 1, V, sampled), never)
    with refuses(f"got {V} and {V + 1} tokens"):
        head.token_loss(hidden, sparsify(torch.zeros(N, V + 1), sampled), never)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", HOWS)
def test_parameters_are_read_inside_gather_only(way: str, how: str) -> None:
    """They hold NaN outside; a single pass needs them once, the other again in the backward."""
    case = Case(how)
    leaves = case.leaves()
    whole, events = [x.detach().clone() for x in leaves[1:]], []

    def fill(values: list[Tensor]) -> None:
        for leaf, value in zip(leaves[1:], values, strict=True):
            leaf.data.copy_(value)

    @contextmanager
    def gather(weight: Tensor, bias: Tensor | None) -> Iterator[None]:
        events.append("in")
        fill(whole)
        try:
            yield
        finally:
            fill([torch.full_like(x, math.nan) for x in whole])

    fill([torch.full_like(x, math.nan) for x in whole])
    loss = single(case, leaves, gather=gather, way=way)
    found = gradients(loss, leaves)
    assert len(events) == (2 if way == "recompute" else 1)
    other = case.leaves()
    theirs = composed(case, other)
    assert_same((loss, found), (theirs, gradients(theirs, other)))
