"""The kernels of ``troll.project`` against the plain PyTorch that defines them, row for row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch.autograd import gradcheck

from troll.errors import InputError
from troll.policy import token_kl
from troll.projection import Projection, project
from troll.projection.ops import project_rows, project_rows_backward

INF = math.inf
F32, F64 = torch.float32, torch.float64
NUMBERS = ("mix", "eta", "kl_before", "kl_after", "active", "converged", "iterations", "lost_mass")

HARD = [
    # support, log-ratio noise, logit scale, ε: everyday rows and absurd ones, as in the tests of the solvers
    (2, 1.0, 1.0, 0.05),
    (3, 0.5, 2.0, 0.05),
    (5, 20.0, 8.0, 0.05),
    (8, 50.0, 0.5, 0.05),
    (5, 1e4, 8.0, 0.05),
    (5, 1e4, 80.0, 1e-3),
    (6, 1.0, 2.0, 1e-8),
    (6, 1.0, 2.0, 1e-12),
    (6, 5.0, 2.0, 2.0),
    (12, 3.0, 3.0, 0.01),
    (5, 0.35, 1.0, 0.05),
]


def pair(rows: int, support: int, noise: float, scale: float, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    old = scale * torch.randn(rows, support, generator=g, dtype=F64)
    new = old + noise * torch.randn(rows, support, generator=g, dtype=F64)
    return new.log_softmax(-1).to(dtype).log_softmax(-1), old.log_softmax(-1).to(dtype).log_softmax(-1)


def hard(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Three rows of every hard case, and six whose KL has a plateau at ε, where Newton alone takes up to 70 steps;
    padded to one width, with a bound each."""
    cases = [(*pair(3, k, noise, scale, k, dtype), bound) for k, noise, scale, bound in HARD]
    plateaus = [2152, 2360, 9226, 12234, 15428, 17247]
    new, old = pair(20_000, 8, 1e3, 30.0, 0, dtype)
    cases += [(new[plateaus], old[plateaus], 0.5)]
    width = max(p.shape[1] for p, _, _ in cases)
    rows = [[torch.nn.functional.pad(x, (0, width - x.shape[1]), value=-INF) for x in case[:2]] for case in cases]
    bounds = torch.cat([torch.full((len(p),), bound, dtype=F64) for p, _, bound in cases])
    return torch.cat([p for p, _ in rows]), torch.cat([q for _, q in rows]), bounds


def edges(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The table of edges: (proposal, old, ε)."""
    rows = [
        ([0.2, 0.8, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], 0.05),  # excluded on both sides
        ([0.9, 0.02, 0.0, 0.08], [0.5, 0.5, 0.0, 0.0], 0.05),  # by the old policy only
        ([0.1, 0.9, 0.0, 0.0], [0.4, 0.4, 0.2, 0.0], 0.05),  # by the proposal only
        ([0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 0.0, 0.0], 0.05),  # disjoint
        ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], 0.05),  # nothing
        ([1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], 0.05),  # one token
        ([0.0, 1.0, 0.0, 0.0], [0.3, 0.3, 0.2, 0.2], 0.05),  # a collapse
        ([1.0, 0.0, 0.0, 0.0], [0.99, 0.01, 0.0, 0.0], 0.05),  # a collapse inside the region
        ([0.2, 0.5, 0.3, 0.0], [0.0, 1.0, 0.0, 0.0], 0.05),  # the old policy one-hot
        ([0.2, 0.8, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], 0.0),
        ([0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], 0.0),
        ([0.2, 0.8, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], INF),
        ([0.2, 0.8, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], 1e6),
        ([0.2, 0.7, 0.1, 0.0], [0.5, 0.2, 0.3, 0.0], 1e-20),  # no policy in between, in fp32
        ([0.2, 0.7, 0.1, 0.0], [0.5, 0.2, 0.3, 0.0], 1e-30),
        # Around where rounding to fp32 leaves no room any more.
        *(([0.2, 0.7, 0.1, 0.0], [0.5, 0.2, 0.3, 0.0], 2.0**-i) for i in range(44, 52)),
    ]
    proposal, old = (torch.tensor([row[i] for row in rows], dtype=F64).log().to(dtype) for i in (0, 1))
    return proposal, old, torch.tensor([row[2] for row in rows], dtype=F64)


def run(proposal: Tensor, old: Tensor, bound: Any, impl: str, **options: Any) -> tuple[Projection, Tensor]:
    """The projection, and the gradient for an upstream gradient of ordinary numbers."""
    x = proposal.detach().clone().requires_grad_()
    result = project(x, old, bound, impl=impl, max_lost_mass=1.0, **options)  # type: ignore[arg-type]
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=F64).to(x.dtype)
    (grad,) = torch.autograd.grad(result.log_probs, x, upstream)
    return result, grad


def same(kernel: tuple[Projection, Tensor], reference: tuple[Projection, Tensor], bound: Tensor) -> None:
    """The numbers of both, to rounding.

    fp64: sums of up to 200 terms in another order. The KL of a double policy is known to 1e-16 √(2/ε) relative (each
    log-probability is rounded once) and t to about that: 1e-14 (1 + 1/√ε), as for the reference against fifty digits,
    and log π to that times |t d|. fp32: the same before one rounding, so at most one unit in the last place.
    """
    (a, grad_a), (b, grad_b) = kernel, reference
    single = a.log_probs.dtype == F32
    budget = 1e-14 * (1 + torch.where(bound > 0, bound, 1.0).double() ** -0.5) + (2.4e-7 if single else 0.0)
    assert torch.equal(a.active, b.active)
    assert torch.equal(a.converged[bound >= 1e-12], b.converged[bound >= 1e-12])  # below, the KL is its own noise
    for name in ("mix", "eta", "kl_before", "kl_after"):
        x, y = getattr(a, name).double(), getattr(b, name).double()
        # A KL of zero is zero up to what rounding leaves of the norms: 1e-30 in fp64; of stored fp32 numbers, 1e-14.
        assert ((x == y) | ((x - y).abs() <= 4 * budget * y.abs() + (1e-14 if single else 1e-30))).all(), name
    torch.testing.assert_close(a.lost_mass, b.lost_mass, rtol=2e-7 if single else 1e-15, atol=0)
    x, y = a.log_probs.detach().double(), b.log_probs.detach().double()
    # |t d| = |log π̃ − log π| / η; a token that only the proposal excludes has log 1e-12 there.
    gap = torch.where(b.proposal == -INF, -28.0, b.proposal).double() - torch.where(y == -INF, 0.0, y)
    gap = torch.where(y == -INF, 0.0, gap).detach().abs()
    reach = torch.where(b.active, gap.amax(-1) / b.eta.double(), 0.0)
    assert ((x == y) | ((x - y).abs() <= budget[:, None] * (1 + reach[:, None] + y.abs()))).all()
    assert torch.equal(a.proposal, b.proposal)
    # The gradient reads π, whose relative error is that of log π.
    scale = grad_b.abs().amax(-1).clamp(min=1.0)  # the upstream gradient is of size one
    assert ((grad_a - grad_b).abs().amax(-1) <= 10 * budget * (1 + reach) * scale).all()


@pytest.mark.parametrize("dtype", [F64, F32])
def test_hard_rows(dtype: torch.dtype) -> None:
    proposal, old, bound = hard(dtype)
    kernel, reference = run(proposal, old, bound, "triton"), run(proposal, old, bound, "reference")
    same(kernel, reference, bound)
    steps, expected = kernel[0].iterations, reference[0].iterations
    assert torch.equal(steps[expected <= 6], expected[expected <= 6])
    assert (expected > 6).sum() >= 6  # the plateaus are there
    assert (steps <= expected).all()  # halving may hit the root before the bracket is cut
    kl = token_kl(kernel[0].log_probs.detach().double().log_softmax(-1), old.double().log_softmax(-1))
    # Feasible as stored; ε = 1e-12 to what fp64 leaves of the KL, 1e-16.
    assert (kl <= bound * (1 + 1e-9) + 1e-16).all()
    held = (bound >= 1e-3) & kernel[0].active
    assert (kl[held] >= bound[held] * (1 - 1e-4)).all()


@pytest.mark.parametrize("dtype", [F64, F32])
def test_edges(dtype: torch.dtype) -> None:
    proposal, old, bound = edges(dtype)
    kernel, reference = run(proposal, old, bound, "triton"), run(proposal, old, bound, "reference")
    same(kernel, reference, bound)
    result, grad = kernel
    unchanged = result.mix == 1
    assert torch.equal(result.log_probs[unchanged], result.proposal[unchanged])
    anchored = result.mix == 0
    assert anchored.sum() >= 2
    assert torch.equal(result.log_probs[anchored], old[anchored])
    assert (grad[anchored] == 0).all()
    assert (grad[(old == -INF) & result.active[:, None]] == 0).all()
    assert torch.equal(result.kl_before == INF, reference[0].kl_before == INF)


@pytest.mark.parametrize(("rows", "support"), [(1, 1), (3, 2), (1, 3), (2, 65), (3, 200), (1, 256)])
def test_odd_shapes(rows: int, support: int) -> None:
    proposal, old = pair(rows, support, 2.0, 1.0, support, F32)
    bound = torch.full((rows,), 0.05)
    same(run(proposal, old, bound, "triton"), run(proposal, old, 0.05, "reference"), bound)


def test_no_positions_and_no_dimensions() -> None:
    nothing = torch.zeros(0, 4, requires_grad=True)
    result = project(nothing, torch.zeros(0, 4), 0.05, impl="triton")
    assert result.log_probs.shape == (0, 4)
    result.log_probs.sum().backward()
    assert nothing.grad is not None
    proposal, old = pair(6, 5, 2.0, 1.0, 0, F64)
    alone, rows = project(proposal[2], old[2], 0.05, impl="triton"), project(proposal, old, 0.05, impl="triton")
    assert torch.equal(alone.log_probs, rows.log_probs[2])
    shaped = project(proposal.view(2, 3, 5), old.view(2, 3, 5), 0.05, impl="triton")
    for name in NUMBERS:
        assert torch.equal(getattr(shaped, name).flatten(), getattr(rows, name)), name


def test_strided_input_and_gradient() -> None:
    proposal, old = pair(4, 6, 2.0, 1.0, 3, F64)
    wide = [x.repeat_interleave(2, -1) for x in (proposal, old)]
    x = wide[0].requires_grad_()
    result = project(x[:, ::2], wide[1][:, ::2], 0.05, impl="triton")
    straight = proposal.clone().requires_grad_()
    expected = project(straight, old, 0.05, impl="triton")
    assert torch.equal(result.log_probs, expected.log_probs)
    result.log_probs[:, 0].sum().backward()  # an upstream gradient that is zero in most places
    expected.log_probs[:, 0].sum().backward()
    assert torch.equal(x.grad[:, ::2], straight.grad)
    turned = project(proposal.t().contiguous().t(), old, 0.05, impl="triton")
    assert torch.equal(turned.log_probs, expected.log_probs)


def test_gradient_is_that_of_finite_differences() -> None:
    proposal, old = pair(60, 4, 1.0, 1.0, 11, F64)
    kl = token_kl(proposal, old)
    proposal, old = (torch.cat([x[kl > 0.06][:2], x[kl < 0.04][:1]]) for x in (proposal, old))
    assert project(proposal, old, 0.05, impl="triton").active.tolist() == [True, True, False]
    assert gradcheck(lambda x: project(x, old, 0.05, impl="triton").log_probs, proposal.requires_grad_())


def test_gradient_of_an_inactive_token_passes_bit_for_bit() -> None:
    proposal, old = pair(4, 5, 0.05, 1.0, 0, F32)
    x = proposal.requires_grad_()
    upstream = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    (grad,) = torch.autograd.grad(project(x, old, 0.05, impl="triton").log_probs, x, upstream)
    assert torch.equal(grad, upstream)


class Poisoned:
    """torch, with NaN in what ``empty`` returns, and −12345 in whole numbers."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("empty"):
            return getattr(torch, name)

        def make(*args: Any, **options: Any) -> Tensor:
            x = getattr(torch, name)(*args, **options)
            return x.fill_(math.nan if x.is_floating_point() else True if x.dtype == torch.bool else -12345)

        return make


def test_every_output_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    proposal, old, bound = edges(F32)
    clean = run(proposal, old, bound, "triton")
    monkeypatch.setattr("troll.projection.triton.torch", Poisoned())
    result, grad = run(proposal, old, bound, "triton")
    assert torch.equal(grad, clean[1])
    for name in ("log_probs", *NUMBERS):
        assert torch.equal(getattr(result, name), getattr(clean[0], name)), name
    assert not result.log_probs.isnan().any()


def jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def lengths_of(proposal: Tensor, old: Tensor, lengths: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    return tuple([x[i, :n].log_softmax(-1) for i, n in enumerate(lengths)] for x in (proposal, old))  # type: ignore[return-value]


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [F64, F32])
def test_jagged_rows_are_padded_rows(impl: str, dtype: torch.dtype) -> None:
    lengths = [5, 1, 0, 7, 3]
    new, old = lengths_of(*pair(5, 7, 2.0, 1.0, 1, dtype), lengths)
    bound = torch.tensor([0.05, 0.05, 0.05, 0.01, 0.2])
    values = torch.cat(new).requires_grad_()
    offsets = torch.tensor([0, 5, 6, 6, 13, 16])
    proposal, before = (torch.nested.nested_tensor_from_jagged(x, offsets) for x in (values, torch.cat(old)))
    result = project(proposal, before, bound, impl=impl)  # type: ignore[arg-type]
    upstream = torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=F64).to(dtype)
    (grad,) = torch.autograd.grad(result.log_probs.values(), values, upstream)  # type: ignore[attr-defined]
    wide = [torch.stack([torch.nn.functional.pad(r, (0, 7 - len(r)), value=-INF) for r in rows]) for rows in (new, old)]
    padded = wide[0].clone().requires_grad_()
    expected = project(padded, wide[1], bound, impl=impl)  # type: ignore[arg-type]
    used = torch.arange(7) < torch.tensor(lengths)[:, None]
    dense = torch.zeros(5, 7, dtype=dtype).masked_scatter(used, upstream)
    (padded_grad,) = torch.autograd.grad(expected.log_probs, padded, dense)
    tight = {"rtol": 1e-13, "atol": 1e-13} if dtype == F64 else {"rtol": 2e-7, "atol": 1e-7}
    torch.testing.assert_close(result.log_probs.values(), expected.log_probs[used], **tight)  # type: ignore[attr-defined]
    torch.testing.assert_close(grad, padded_grad[used], **tight)
    assert result.active.sum() >= 2
    for name in NUMBERS:
        torch.testing.assert_close(getattr(result, name), getattr(expected, name), **tight)
    assert torch.equal(result.log_probs.offsets(), offsets)  # type: ignore[attr-defined]


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_jagged_rows_lose_mass_as_padded_ones(impl: str) -> None:
    new = [torch.tensor([0.7, 0.22, 0.08]), torch.tensor([0.6, 0.4])]
    old = [torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.5, 0.5])]
    proposal, before = (jagged([x.log() for x in rows]) for rows in (new, old))
    result = project(proposal, before, 0.05, impl=impl)  # type: ignore[arg-type]
    torch.testing.assert_close(result.lost_mass, torch.tensor([0.08, 0.0]))
    assert result.log_probs.values()[2] == -INF  # type: ignore[attr-defined]
    left_out = torch.tensor([0.7 / 0.92, 0.22 / 0.92, 0.0, 0.6, 0.4])
    torch.testing.assert_close(result.proposal.values().exp(), left_out)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"on average 0.04 of its probability.*max_lost_mass=0.01"):
        project(proposal, before, 0.05, max_lost_mass=0.01, impl=impl)  # type: ignore[arg-type]


def test_jagged_forms_that_are_refused() -> None:
    new, old = lengths_of(*pair(2, 4, 1.0, 1.0, 0, F32), [4, 2])
    given = jagged(new)
    with pytest.raises(InputError, match=r"two dense tensors, or two jagged ones .* dense \[2, 4\]"):
        project(given, torch.zeros(2, 4), 0.05)
    with pytest.raises(InputError, match=r"same offsets.*rows of \[4, 2\] and nested .* rows of \[2, 4\]"):
        project(given, jagged(old[::-1]), 0.05)
    with pytest.raises(InputError, match=r"3 dimensions"):
        project(given, jagged([x[:, None] for x in old]), 0.05)
    with pytest.raises(InputError, match=r"shape \[2\], got \[3\]"):
        project(given, jagged(old), torch.ones(3))
    with pytest.raises(InputError, match=r"proposal must be log-probabilities that sum to 1.* at position \[1\]"):
        project(jagged([new[0], new[1] + 1]), jagged(old), 0.05)
    with pytest.raises(InputError, match=r"old must be a constant"):
        project(given, torch.nested.nested_tensor_from_jagged(torch.cat(old).requires_grad_(), given.offsets()), 0.05)  # type: ignore[attr-defined]


def test_jagged_without_rows() -> None:
    offsets = torch.zeros(1, dtype=torch.int64)
    nothing = torch.nested.nested_tensor_from_jagged(torch.zeros(0), offsets)
    for impl in ("reference", "triton"):
        assert project(nothing, nothing, 0.05, impl=impl).mix.shape == (0,)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [F32, F64])
def test_opcheck(dtype: torch.dtype) -> None:
    proposal, old = pair(3, 4, 1.0, 1.0, 0, dtype)
    bound = torch.full((3,), 0.05, dtype=F64)
    torch.library.opcheck(project_rows, (proposal.requires_grad_(), old, bound, "newton", "triton"))
    projected, mix, *_ = project_rows(proposal.detach(), old, bound, "newton", "triton")
    torch.library.opcheck(
        project_rows_backward, (torch.ones_like(projected), projected, proposal.detach(), old, mix, "triton")
    )
    offsets = torch.tensor([0, 4, 8, 12])
    flat = proposal.detach().flatten().requires_grad_(), old.flatten()
    torch.library.opcheck(project_rows, (*flat, bound, "newton", "triton", offsets, 4))


def test_kernels_run_inside_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    import troll.projection.triton as kernels

    calls = []
    for name in ("project", "project_backward"):
        inner = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, f=inner, n=name: (calls.append(n), f(*args))[1])
    proposal, old = pair(4, 5, 1.0, 1.0, 0, F32)

    def loss(x: Tensor) -> Tensor:
        return project(x.log_softmax(-1), old, 0.05, impl="triton").log_probs[:, 0].sum()

    x = proposal.clone().requires_grad_()
    (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
    assert calls == ["project", "project_backward"]
    (eager,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-7)  # log_softmax is decomposed in the one


def test_what_the_kernel_cannot_do() -> None:
    proposal, old = pair(2, 257, 1.0, 1.0, 0, F32)
    with pytest.raises(
        InputError, match=r"impl='triton' is not possible here: a support of 257 tokens is more than the 256"
    ):
        project(proposal, old, 0.05, impl="triton")
    narrow = proposal[:, :5].log_softmax(-1), old[:, :5].log_softmax(-1)
    with pytest.raises(InputError, match=r"impl='triton' is not possible here: solver='bracketing' has no kernel"):
        project(*narrow, 0.05, solver="bracketing", impl="triton")
    with pytest.raises(InputError, match=r"impl must be .* got 'cuda'"):
        project(*narrow, 0.05, impl="cuda")  # type: ignore[arg-type]
    x = narrow[0].requires_grad_()
    project(x, narrow[1], 0.05, solver="bracketing", impl="auto").log_probs.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(("bound", "support", "noise", "seed"), [(1e-6, 5, 50.0, 1), (0.05, 12, 20.0, 0)])
def test_a_solver_that_gives_up_stays_inside_and_says_so(
    monkeypatch: pytest.MonkeyPatch, bound: float, support: int, noise: float, seed: int
) -> None:
    monkeypatch.setattr("troll.projection.triton._MAX_LOOKS", tl.constexpr(2))
    proposal, old = pair(30, support, noise, 8.0, seed, F32)
    result = project(proposal, old, bound, impl="triton")
    gave_up = ~result.converged
    assert gave_up.sum() >= 10
    kl = token_kl(result.log_probs.double().log_softmax(-1), old.double().log_softmax(-1))
    assert (kl <= bound * (1 + 1e-9)).all()
    assert (result.kl_after[gave_up] < bound).all()
    assert (result.iterations[gave_up] == 2).all()


def test_warps_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from troll.projection import triton as solver

    assert [solver.warps(n) for n in (2, 64, 128, 256, 512)] == [1, 1, 1, 2, 4]
    monkeypatch.setattr(solver, "NUM_WARPS", 8)
    assert solver.warps(64) == 8


def test_the_poison_is_poison() -> None:
    poisoned: Any = Poisoned()
    assert poisoned.empty(3).isnan().all()
    assert (poisoned.empty_like(torch.zeros(2, dtype=torch.int64)) == -12345).all()
    assert (poisoned.zeros(2) == 0).all()
