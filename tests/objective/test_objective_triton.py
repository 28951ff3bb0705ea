"""The fused ``constrain`` against its definition: ``align``, ``project``, log-ratio and regression in plain PyTorch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import troll
from troll.errors import InputError
from troll.objective import Constrained, clip_loss, constrain, network_kl, troll_loss
from troll.objective.bounds import SequenceBound
from troll.policy import SparsePolicy, align
from troll.projection import Diagnostics, Projection

INF = math.inf
F32, F64 = torch.float32, torch.float64
TAILS = ["floor", "bucket"]
NUMBERS = [field.name for field in dataclasses.fields(Diagnostics)]
Pair = tuple[SparsePolicy, SparsePolicy]


def policies(
    tail: str,
    rows: int = 12,
    *,
    noise: float = 1.0,
    K: int = 4,
    old_K: int = 6,
    V: int = 12,
    delta: float = 1e-3,
    seed: int = 3,
    dtype: torch.dtype = F64,
) -> Pair:
    """Proposal and old policy of random logits ``noise`` apart; positions 0 and 1 masked out on one side each."""
    g = torch.Generator().manual_seed(seed)
    before = 3 * torch.randn(rows, V, generator=g, dtype=F64)
    after = before + noise * torch.randn(rows, V, generator=g, dtype=F64)
    sampled = torch.randint(V, (rows,), generator=g)
    at = torch.arange(rows)
    masks = {"loss_mask": at != 0}, {"loss_mask": at != 1}
    old = troll.sparsify(before.to(dtype), sampled, old_K, delta, **masks[1])
    if tail == "bucket":
        return troll.restrict(after.to(dtype), old, loss_mask=(at > 1)), old
    return troll.sparsify(after.to(dtype), sampled, K, delta, **masks[0]), old


def by_hand(rows: list[tuple[list[int], list[float]]], dtype: torch.dtype = F64) -> SparsePolicy:
    """A policy over eight tokens from ids and probabilities; what is missing to 1 is the tail."""
    probs = torch.tensor([p for _, p in rows], dtype=F64)
    left = 1 - probs.sum(-1)
    tail = torch.where(left < 1e-12, 0.0, left).log()
    return SparsePolicy(torch.tensor([i for i, _ in rows]), probs.log().to(dtype), tail.to(dtype), 8)


def odd_pair(dtype: torch.dtype = F64) -> Pair:
    """Supports that differ, in other orders and with holes; either side, both or neither without a tail."""
    new = [
        ([3, 1, -1, 5, 2], [0.5, 0.2, 0.0, 0.1, 0.1]),  # both have a tail; 5 is new; a hole
        ([3, 1, 2, 4, -1], [0.7, 0.1, 0.1, 0.1, 0.0]),  # the proposal has none: 0 has no probability in it
        ([3, 1, 2, 6, -1], [0.05, 0.75, 0.1, 0.05, 0.0]),  # the old one has none: 6 is lost
        ([3, 6, -1, -1, -1], [0.3, 0.7, 0.0, 0.0, 0.0]),  # neither: little in common
        ([3, -1, -1, -1, -1], [1.0, 0.0, 0.0, 0.0, 0.0]),
        ([3, 7, -1, 1, 0], [0.2, 0.2, 0.0, 0.2, 0.2]),
    ]
    old = [
        ([3, 2, 1, 0], [0.2, 0.3, 0.1, 0.3]),
        ([3, -1, 0, 1], [0.3, 0.0, 0.3, 0.2]),
        ([3, 1, -1, 2], [0.4, 0.2, 0.0, 0.4]),
        ([3, -1, -1, 0], [0.5, 0.0, 0.0, 0.5]),
        ([3, 2, -1, -1], [0.6, 0.4, 0.0, 0.0]),
        ([3, -1, -1, -1], [0.9, 0.0, 0.0, 0.0]),
    ]
    return by_hand(new, dtype), by_hand(old, dtype)


def leaf(policy: SparsePolicy, dtype: torch.dtype | None = None, gradient: bool = True) -> SparsePolicy:
    """A copy in another precision whose numbers ask for their gradient."""
    log_probs, log_tail = (
        x.detach().to(dtype or x.dtype, copy=True).requires_grad_(gradient) for x in (policy.log_probs, policy.log_tail)
    )
    return SparsePolicy.trusted(policy.token_ids, log_probs, log_tail, policy.vocab_size, policy.temperature)


def upstream(rows: int, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(7)
    return [torch.randn(rows, generator=g).to(dtype) for _ in range(2)]


def run(
    pair: Pair, bound: Any, tail: str, impl: str, dtype: torch.dtype | None = None, **options: Any
) -> tuple[Constrained, Tensor, Tensor]:
    """The step, and the gradients on the proposal's log-probabilities and tail."""
    proposal, old = leaf(pair[0], dtype), leaf(pair[1], dtype, gradient=False)
    options = {"max_lost_mass": 1.0, **options}
    step = constrain(proposal, old, bound, tail=tail, impl=impl, **options)  # type: ignore[arg-type]
    inputs = proposal.log_probs, proposal.log_tail
    grads = torch.autograd.grad(
        [step.log_ratio, step.regression],
        inputs,
        upstream(len(step.log_ratio), step.log_ratio.dtype),
        allow_unused=True,
    )
    return step, *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True))


def same(kernel: tuple[Constrained, Tensor, Tensor], reference: tuple[Constrained, Tensor, Tensor]) -> None:
    """In fp64 the kernel and the reference do the same sums in another order: 1e-12, of numbers up to 50."""
    (a, *grads), (b, *expected) = kernel, reference
    torch.testing.assert_close(a.log_ratio, b.log_ratio, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a.regression, b.regression, rtol=1e-12, atol=1e-14)
    assert torch.equal(a.regression == 0, b.regression == 0)
    for name in NUMBERS:
        if name != "iterations":
            torch.testing.assert_close(
                getattr(a.projection, name), getattr(b.projection, name), rtol=1e-12, atol=1e-15, msg=name
            )
    steps, reference_steps = a.projection.iterations, b.projection.iterations
    assert torch.equal(steps[reference_steps <= 6], reference_steps[reference_steps <= 6])
    for x, y in zip(grads, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("noise", [0.2, 1.0, 8.0])
@pytest.mark.parametrize("tail", TAILS)
def test_is_the_reference(tail: str, noise: float) -> None:
    pair = policies(tail, noise=noise)
    bound = 0.1 * torch.linspace(0.0, 1.0, 12) ** 3
    kernel, reference = run(pair, bound, tail, "triton"), run(pair, bound, tail, "reference")
    same(kernel, reference)
    step, grad, tail_grad = kernel
    assert step.projection.active.sum() >= 3
    # Positions that are masked out on either side, and unused slots.
    for x in (step.log_ratio, step.regression, step.projection.kl_before, step.projection.lost_mass, tail_grad):
        assert (x[:2] == 0).all()
    assert (step.projection.mix[:2] == 1).all()
    assert (grad[:2] == 0).all()
    assert (grad[pair[0].token_ids < 0] == 0).all()
    assert (tail_grad != 0).any() == (tail == "bucket")


@pytest.mark.parametrize("bound", [0.0, 0.02, INF])
def test_odd_supports(bound: float) -> None:
    pair = odd_pair()
    kernel = run(pair, bound, "floor", "triton")
    same(kernel, run(pair, bound, "floor", "reference"))
    lost = kernel[0].projection.lost_mass
    torch.testing.assert_close(lost, torch.tensor([0, 0, 1 / 19, 0.7, 0, 0], dtype=F64), rtol=1e-9, atol=0)


def test_a_bucket_that_only_one_side_has() -> None:
    ids = [[3, 1], [3, 1], [3, 1]]
    new = by_hand(list(zip(ids, [[0.5, 0.2], [0.7, 0.3], [0.1, 0.9]], strict=True)))
    old = by_hand(list(zip(ids, [[0.6, 0.4], [0.5, 0.3], [0.5, 0.5]], strict=True)))
    kernel = run((new, old), 0.05, "bucket", "triton")
    same(kernel, run((new, old), 0.05, "bucket", "reference"))
    torch.testing.assert_close(kernel[0].projection.lost_mass, torch.tensor([0.3, 0.0, 0.0], dtype=F64))
    assert kernel[2][2] == 0  # no bucket, no gradient on it


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("rows", "K", "old_K", "V"), [(2, 1, 1, 3), (3, 3, 2, 5), (1, 65, 64, 80), (2, 5, 200, 230)])
def test_odd_shapes(tail: str, rows: int, K: int, old_K: int, V: int) -> None:
    pair = policies(tail, rows + 2, K=K, old_K=old_K, V=V, delta=0.0, noise=2.0)
    pair = pair[0][2:], pair[1][2:]
    same(run(pair, 0.05, tail, "triton"), run(pair, 0.05, tail, "reference"))


@pytest.mark.parametrize("tail", TAILS)
def test_the_budget_of_a_sequence_through_the_kernel(tail: str) -> None:
    """Bounds from the kernel's KL are those from the reference's, and what it projects keeps the budget."""
    pair = policies(tail, noise=1.0)
    grid = tuple(
        SparsePolicy.trusted(p.token_ids.view(2, 6, -1), p.log_probs.view(2, 6, -1), p.log_tail.view(2, 6), 12, 1.0)
        for p in pair
    )
    counted = grid[0].valid & grid[1].valid
    bounds = {
        impl: SequenceBound(0.1).token_bounds(
            grid[1],
            counted,
            partial(network_kl, *grid, tail=tail, impl=impl),  # type: ignore[arg-type]
        )
        for impl in ("triton", "reference")
    }
    torch.testing.assert_close(bounds["triton"], bounds["reference"], rtol=1e-12, atol=0)
    step = constrain(*grid, bounds["triton"], tail=tail, impl="triton", max_lost_mass=1.0)  # type: ignore[arg-type]
    spent = torch.where(counted, step.projection.kl_after, 0.0).sum(-1)
    assert bool((spent <= 0.1 * (1 + 1e-9)).all())
    assert bool((spent > 0.09).all())


@pytest.mark.parametrize("tail", TAILS)
def test_positions_of_any_shape_and_none(tail: str) -> None:
    pair = policies(tail)
    flat = constrain(*pair, 0.05, tail=tail, impl="triton", max_lost_mass=1.0)  # type: ignore[arg-type]
    grid = tuple(
        SparsePolicy.trusted(p.token_ids.view(3, 4, -1), p.log_probs.view(3, 4, -1), p.log_tail.view(3, 4), 12, 1.0)
        for p in pair
    )
    bound = torch.full((3, 4), 0.05, dtype=F64)
    shaped = constrain(*grid, bound, tail=tail, impl="triton", max_lost_mass=1.0)  # type: ignore[arg-type]
    assert torch.equal(shaped.log_ratio.flatten(), flat.log_ratio)
    for name in NUMBERS:
        assert getattr(shaped.projection, name).shape == (3, 4)
        assert torch.equal(getattr(shaped.projection, name).flatten(), getattr(flat.projection, name)), name
    empty = leaf(pair[0][:0])
    nothing = constrain(empty, pair[1][:0], 0.05, tail=tail, impl="triton")  # type: ignore[arg-type]
    (nothing.log_ratio.sum() + nothing.regression.sum()).backward()
    assert empty.log_probs.grad is not None
    assert nothing.projection.mix.shape == (0,)


def test_strided_policies() -> None:
    pair = policies("floor")
    wide = [
        SparsePolicy.trusted(
            p.token_ids.repeat_interleave(2, 0)[::2],
            p.log_probs.t().contiguous().t(),
            p.log_tail.repeat_interleave(2)[::2],
            12,
            1.0,
        )
        for p in pair
    ]
    assert not wide[0].log_probs.is_contiguous()
    result = constrain(*wide, 0.05, tail="floor", impl="triton", max_lost_mass=1.0)
    assert torch.equal(result.log_ratio, constrain(*pair, 0.05, impl="triton", max_lost_mass=1.0).log_ratio)


@pytest.mark.parametrize("noise", [0.5, 3.0])
@pytest.mark.parametrize("tail", TAILS)
def test_fp32_is_the_truth_rounded_once(tail: str, noise: float) -> None:
    """The truth is the reference in fp64 on the same fp32 policies. The kernel works in fp64 and rounds what it
    returns: half a unit in the last place, 6e-8 relative, of every number on its own; 1e-12 of size one is the order
    of the sums. Plain torch in fp32, which rounds the aligned and the projected policy too, is not as close."""
    pair = policies(tail, 24, noise=noise, K=8, old_K=8, V=24, dtype=F32)
    kernel, plain = run(pair, 0.05, tail, "triton"), run(pair, 0.05, tail, "reference")
    truth = run(pair, 0.05, tail, "reference", F64)
    assert torch.equal(kernel[0].projection.active, truth[0].projection.active)
    assert truth[0].projection.active.sum() >= 4

    def numbers(step: tuple[Constrained, Tensor, Tensor]) -> dict[str, Tensor]:
        names = ("mix", "eta", "kl_before", "kl_after", "lost_mass")
        diagnostics = {name: getattr(step[0].projection, name) for name in names}
        outputs = {"log_ratio": step[0].log_ratio.detach(), "regression": step[0].regression.detach()}
        return {**outputs, **diagnostics, "grad": step[1], "tail": step[2]}

    exact, ours, theirs = numbers(truth), numbers(kernel), numbers(plain)
    for name, x in ours.items():
        assert x.dtype == F32, name
        assert ((x - exact[name]).abs() <= 6e-8 * exact[name].abs() + 1e-12).all(), name
    assert (ours["log_ratio"] - exact["log_ratio"]).abs().max() < (theirs["log_ratio"] - exact["log_ratio"]).abs().max()


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("inputs", [(0,), (1,), (0, 1)])
def test_every_subset_of_gradients(tail: str, outputs: tuple[int, ...], inputs: tuple[int, ...]) -> None:
    pair = policies(tail, 5)
    results = []
    for impl in ("triton", "reference"):
        proposal = leaf(pair[0])
        numbers = [proposal.log_probs, proposal.log_tail]
        for i in {0, 1} - set(inputs):
            numbers[i].requires_grad_(False)
        step = constrain(proposal, pair[1], 0.05, tail=tail, impl=impl, max_lost_mass=1.0)  # type: ignore[arg-type]
        wanted = [step[i] for i in outputs if step[i].requires_grad]
        if not wanted:  # the floor knows nothing of the tail
            assert (tail, inputs) == ("floor", (1,))
            results.append([None, None])
            continue
        sum(x.sum() for x in wanted).backward()  # type: ignore[union-attr]
        results.append([x.grad for x in numbers])
    for i in inputs:
        kernel, reference = (torch.zeros(1, dtype=F64) if r[i] is None else r[i] for r in results)
        torch.testing.assert_close(kernel, reference, rtol=1e-12, atol=1e-13)


def test_one_gradient_after_the_other_is_the_gradient_of_both() -> None:
    pair = policies("bucket", 5)
    together = run(pair, 0.05, "bucket", "triton")
    proposal = leaf(pair[0])
    step = constrain(proposal, pair[1], 0.05, tail="bucket", impl="triton", max_lost_mass=1.0)
    for output, g in zip(step[:2], upstream(5, F64), strict=True):
        torch.autograd.backward(output, g, retain_graph=True)
    torch.testing.assert_close(proposal.log_probs.grad, together[1], rtol=1e-13, atol=1e-14)
    (grad,) = torch.autograd.grad(step.log_ratio.sum(), proposal.log_probs, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*Differentiate once"):
        grad.sum().backward()


@pytest.mark.parametrize("tail", TAILS)
def test_gradient_of_the_ratio_is_the_central_difference(tail: str) -> None:
    """Steps of 1e-6 leave 1e-12 of curvature and 1e-16 / 1e-6 of rounding."""
    pair = policies(tail, 5, noise=1.0)
    pair = pair[0][2:], pair[1][2:]
    step = 1e-6
    proposal = leaf(pair[0])
    result = constrain(proposal, pair[1], 0.05, tail=tail, impl="triton", max_lost_mass=1.0)  # type: ignore[arg-type]
    assert result.projection.active.any()
    result.log_ratio.sum().backward()

    def moved(slot: int | None, by: float) -> Tensor:
        other = leaf(pair[0], gradient=False)
        if slot is None:
            other.log_tail.add_(by)
        else:
            other.log_probs[:, slot] += by
        return constrain(other, pair[1], 0.05, tail=tail, impl="triton", max_lost_mass=1.0).log_ratio  # type: ignore[arg-type]

    for slot in range(pair[0].token_ids.shape[-1]):
        difference = (moved(slot, step) - moved(slot, -step)) / (2 * step)
        torch.testing.assert_close(proposal.log_probs.grad[:, slot], difference, rtol=1e-6, atol=2e-9)
    if tail == "bucket":
        difference = (moved(None, step) - moved(None, -step)) / (2 * step)
        torch.testing.assert_close(proposal.log_tail.grad, difference, rtol=1e-6, atol=2e-9)
        assert (difference.abs() > 1e-4).any()


class Poisoned:
    """torch, with NaN in what ``empty`` returns, and −12345 in whole numbers."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("empty"):
            return getattr(torch, name)

        def make(*args: Any, **options: Any) -> Tensor:
            x = getattr(torch, name)(*args, **options)
            return x.fill_(math.nan if x.is_floating_point() else True if x.dtype == torch.bool else -12345)

        return make


@pytest.mark.parametrize("make", [odd_pair, lambda: policies("floor", 4), lambda: policies("bucket", 4)])
def test_every_output_is_written(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Pair]) -> None:
    pair = make()
    tail = "bucket" if pair[0].token_ids.shape == pair[1].token_ids.shape else "floor"
    clean = run(pair, 0.05, tail, "triton")
    monkeypatch.setattr("troll.objective.triton.torch", Poisoned())
    step, grad, tail_grad = run(pair, 0.05, tail, "triton")
    assert torch.equal(step.log_ratio, clean[0].log_ratio)
    assert torch.equal(step.regression, clean[0].regression)
    for name in NUMBERS:
        assert torch.equal(getattr(step.projection, name), getattr(clean[0].projection, name)), name
    assert torch.equal(grad, clean[1])
    assert torch.equal(tail_grad, clean[2])


def bad_inputs() -> dict[str, tuple[Pair, dict[str, Any]]]:
    new, old = policies("floor", 4)
    restricted = policies("bucket", 4)
    other = SparsePolicy.trusted(old.token_ids.roll(1, -1), old.log_probs, old.log_tail, 12, 1.0)
    swapped = restricted[0].token_ids.clone()
    swapped[3, 1] = 11 if swapped[3, 1] != 11 else 10
    loses = by_hand([([3, 1], [0.5, 0.5])]), by_hand([([3, 2], [0.5, 0.5])])
    return {
        "tail": ((new, old), {"tail": "none"}),
        "gradient": ((new, leaf(old)), {}),
        "shape": ((new, old[:3]), {}),
        "vocabulary": ((new, SparsePolicy.trusted(old.token_ids, old.log_probs, old.log_tail, 13, 1.0)), {}),
        "temperature": ((new, SparsePolicy.trusted(old.token_ids, old.log_probs, old.log_tail, 12, 0.7)), {}),
        "dtype": ((new, leaf(old, F32, gradient=False)), {}),
        "sampled": ((new, other), {}),
        "support": ((new, old), {"tail": "bucket"}),
        "one id": (
            (SparsePolicy.trusted(swapped, *(restricted[0].log_probs, restricted[0].log_tail), 12, 1.0), restricted[1]),
            {"tail": "bucket"},
        ),
        "bound": ((new, old), {"kl_bound": -1.0}),
        "bounds": ((new, old), {"kl_bound": torch.tensor([0.1, 0.1, math.nan, 0.1])}),
        "bounds of another shape": ((new, old), {"kl_bound": torch.ones(3)}),
        "lost mass": (loses, {"max_lost_mass": 0.1}),
        "lost mass of counted positions": (loses, {"max_lost_mass": 0.4, "counted": torch.tensor([True])}),
    }


@pytest.mark.parametrize("name", list(bad_inputs()))
def test_what_is_refused_is_refused_in_the_same_words(name: str) -> None:
    pair, options = bad_inputs()[name]
    options = {"kl_bound": 0.05, "max_lost_mass": 1.0, **options}
    said = []
    for impl in ("reference", "triton"):
        with pytest.raises(InputError) as error:
            constrain(*pair, **options, impl=impl)  # type: ignore[arg-type]
        said.append(str(error.value))
    assert said[0] == said[1]


def test_lost_mass_that_is_not_counted_is_no_reason() -> None:
    new, old = by_hand([([3, 1], [0.5, 0.5])] * 2), by_hand([([3, 2], [0.5, 0.5]), ([3, 1], [0.5, 0.5])])
    step = constrain(new, old, 0.05, torch.tensor([False, True]), tail="floor", max_lost_mass=0.0, impl="triton")
    assert step.projection.lost_mass.tolist() == pytest.approx([0.5, 0.0])


class Transfers(TorchDispatchMode):
    """Counts how often a number is brought from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tail", TAILS)
def test_the_device_is_asked_once(tail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be wrong is one check; nothing else is brought from the device."""
    pair, asked = policies(tail, 3), []
    monkeypatch.setattr("troll.deferred.run_checks", lambda checks: asked.append(len(checks)))
    with Transfers() as transfers:
        constrain(*pair, torch.full((3,), 0.05), tail=tail, impl="triton", max_lost_mass=1.0)  # type: ignore[arg-type]
    assert (asked, transfers.count) == ([1], 0)


def test_the_kernel_is_used_and_only_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    import troll.objective.triton as kernels

    pair = policies("floor", 3)
    assert not isinstance(constrain(*pair, 0.05, impl="triton").projection, Projection)
    monkeypatch.setattr(kernels, "constrain", lambda *_: pytest.fail("a kernel was used"))
    assert isinstance(constrain(*pair, 0.05).projection, Projection)  # on a CPU
    assert isinstance(constrain(*pair, 0.05, impl="reference").projection, Projection)
    monkeypatch.setenv("TROLL_IMPL", "reference")
    assert isinstance(constrain(*pair, 0.05).projection, Projection)
    with pytest.raises(InputError, match=r"impl='triton' is not possible here: solver='bracketing' has no kernel"):
        constrain(*pair, 0.05, solver="bracketing", impl="triton")
    wide = policies("floor", 3, K=257, old_K=4, V=300, delta=0.0)
    with pytest.raises(InputError, match=r"a support of 257 tokens"):
        constrain(*wide, 0.05, impl="triton")


@pytest.mark.parametrize("tail", TAILS)
def test_the_loss_and_its_metrics(tail: str) -> None:
    new, old = policies(tail, 8, noise=1.5)
    grid = [(p.token_ids.view(2, 4, -1), p.log_probs.view(2, 4, -1), p.log_tail.view(2, 4)) for p in (new, old)]
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 1]])
    advantages = torch.tensor([1.0, -2.0], dtype=F64)
    results = []
    for impl in ("triton", "reference"):
        proposal = leaf(SparsePolicy.trusted(*grid[0], 12, 1.0))
        options: dict[str, Any] = {"tail": tail, "impl": impl}
        before = SparsePolicy.trusted(*grid[1], 12, 1.0)
        loss, metrics = troll_loss(proposal, before, advantages, mask, kl_bound=0.05, max_lost_mass=1.0, **options)
        loss.backward()
        results.append((loss.detach(), proposal.log_probs.grad, metrics))
        _, clipped = clip_loss(proposal, before, advantages, mask, **options)
        results[-1][2]["clip/kl"] = clipped["kl_before/mean"]
    (loss, grad, metrics), (expected, expected_grad, expected_metrics) = results
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-14)
    assert metrics.keys() == expected_metrics.keys()
    assert metrics["projected_fraction"] > 0.3
    for name, x in metrics.items():
        torch.testing.assert_close(x, expected_metrics[name], rtol=1e-12, atol=1e-15, msg=name)


def test_a_compiled_loss_is_the_loss() -> None:
    new, old = policies("floor", 8)
    logits = new.log_probs.view(2, 4, -1)

    def loss(x: Tensor) -> Tensor:
        proposal = SparsePolicy.trusted(new.token_ids.view(2, 4, -1), x, new.log_tail.view(2, 4), 12, 1.0)
        before = SparsePolicy.trusted(
            old.token_ids.view(2, 4, -1), old.log_probs.view(2, 4, -1), old.log_tail.view(2, 4), 12, 1.0
        )
        options: dict[str, Any] = {"kl_bound": 0.05, "tail": "floor", "on_invalid": "mask", "max_lost_mass": 1.0}
        return troll_loss(proposal, before, torch.ones(2, dtype=F64), torch.ones(2, 4), **options)[0]

    x = logits.clone().requires_grad_()
    (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
    (eager,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-12)


def test_the_reference_is_the_composition() -> None:
    """What ``impl="reference"`` computes is ``align`` and ``project``, here by their public names."""
    pair = policies("floor", 6)
    step = constrain(*pair, 0.05, impl="reference", max_lost_mass=1.0)
    aligned = align(*pair)
    projection = troll.project(*aligned, 0.05, max_lost_mass=1.0, impl="reference")
    assert torch.equal(step.log_ratio, projection.log_probs[..., 0] - aligned.old[..., 0])
    assert torch.equal(step.regression, troll.regression_loss(projection))
