"""The projection kernels on a GPU, compiled and at size, against plain PyTorch there. Runs where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import troll
from troll.objective import Constrained, constrain
from troll.policy import SparsePolicy
from troll.projection import Projection, project

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROWS, K, V = 20_000, 64, 512
NOISE = [0.1, 1.0, 20.0, 50.0]


def pair(noise: float) -> tuple[Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(0)
    old = (8 * torch.randn(ROWS, K, generator=g, device="cuda")).log_softmax(-1)
    return (old + noise * torch.randn(ROWS, K, generator=g, device="cuda")).log_softmax(-1), old


def timed(name: str, call: object) -> None:
    """Say how long a call takes on the device, the best of a few; nothing depends on it."""
    best = float("inf")
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()  # type: ignore[operator]
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end))
    print(f"{name}: {best:.3f} ms")


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_project(noise: float, dtype: torch.dtype) -> None:
    proposal, old = (x.to(dtype).log_softmax(-1) for x in pair(noise))
    upstream = torch.randn_like(old)

    def run(impl: str) -> tuple[Projection, Tensor]:
        x = proposal.clone().requires_grad_()
        result = project(x, old, 0.05, impl=impl)  # type: ignore[arg-type]
        return result, torch.autograd.grad(result.log_probs, x, upstream)[0]

    (a, grad), (b, expected) = run("triton"), run("reference")
    # One rounding to fp32 each; in fp64 t is known to 1e-13 and log π to that times |t d|, at most a few hundred.
    tight = {"rtol": 2.4e-7, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-11}
    torch.testing.assert_close(a.log_probs, b.log_probs, **tight)
    assert torch.equal(a.active, b.active)
    assert a.converged.all()
    assert a.iterations.max() <= 12
    torch.testing.assert_close(a.mix, b.mix, rtol=tight["rtol"], atol=0)
    assert torch.equal(a.log_probs[~a.active], proposal[~a.active])
    kl = troll.token_kl(a.log_probs.detach().double().log_softmax(-1), old.double().log_softmax(-1))
    assert (kl <= 0.05 * (1 + 1e-9)).all()
    scale = expected.abs().amax(-1, keepdim=True).clamp(min=1)
    assert ((grad - expected).abs() / scale).max() <= (1e-6 if dtype == torch.float32 else 1e-10)
    timed(f"project, noise {noise}, {dtype}, forward and backward, triton", lambda: run("triton"))
    timed(f"project, noise {noise}, {dtype}, forward and backward, reference", lambda: run("reference"))


def test_jagged_is_padded() -> None:
    proposal, old = pair(1.0)
    lengths = torch.randint(1, K + 1, (ROWS,), generator=torch.Generator().manual_seed(0)).cuda()
    used = torch.arange(K, device="cuda") < lengths[:, None]
    padded = [x.masked_fill(~used, -torch.inf).log_softmax(-1) for x in (proposal, old)]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    jagged = [torch.nested.nested_tensor_from_jagged(x[used], offsets) for x in padded]
    a, b = (project(*rows, 0.05, impl="triton") for rows in (jagged, padded))
    torch.testing.assert_close(a.log_probs.values(), b.log_probs[used], rtol=2.4e-7, atol=1e-7)  # type: ignore[attr-defined]
    assert torch.equal(a.active, b.active)


def policies(noise: float, tail: str) -> tuple[SparsePolicy, SparsePolicy]:
    g = torch.Generator("cuda").manual_seed(0)
    before = 4 * torch.randn(ROWS, V, generator=g, device="cuda")
    after = before + noise * torch.randn(ROWS, V, generator=g, device="cuda")
    sampled = torch.randint(V, (ROWS,), generator=g, device="cuda")
    old = troll.sparsify(before, sampled, K, 1e-5)
    return troll.restrict(after, old) if tail == "bucket" else troll.sparsify(after, sampled, K, 1e-5), old


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("tail", ["floor", "bucket"])
def test_constrain(noise: float, tail: str) -> None:
    """fp32 policies, against the reference on them in fp64, to one rounding; where both sides of the bound agree."""
    new, old = policies(noise, tail)
    upstream = [torch.randn(ROWS, device="cuda", generator=torch.Generator("cuda").manual_seed(i)) for i in (1, 2)]

    def run(impl: str, dtype: torch.dtype) -> tuple[Constrained, Tensor]:
        x = new.log_probs.detach().to(dtype, copy=True).requires_grad_()
        proposal = SparsePolicy.trusted(new.token_ids, x, new.log_tail.detach().to(dtype), V, 1.0)
        before = SparsePolicy.trusted(old.token_ids, old.log_probs.to(dtype), old.log_tail.to(dtype), V, 1.0)
        step = constrain(proposal, before, 0.05, tail=tail, impl=impl, max_lost_mass=1.0)  # type: ignore[arg-type]
        outputs = [step.log_ratio, step.regression]
        return step, torch.autograd.grad(outputs, x, [g.to(dtype) for g in upstream])[0]

    (a, grad), (b, expected) = run("triton", torch.float32), run("reference", torch.float64)
    assert torch.equal(a.projection.active, b.projection.active)
    for x, y in (
        (a.log_ratio, b.log_ratio),
        (a.regression, b.regression),
        (a.projection.kl_before, b.projection.kl_before),
        (a.projection.kl_after, b.projection.kl_after),
        (a.projection.mix, b.projection.mix),
    ):
        assert ((x - y).abs() <= 1.2e-7 * y.abs() + 1e-11).all()
    scale = expected.abs().amax(-1, keepdim=True).clamp(min=1)
    assert ((grad - expected).abs() / scale).max() <= 2e-7
    assert (grad[new.token_ids < 0] == 0).all()
    timed(f"constrain {tail}, noise {noise}, forward and backward, triton", lambda: run("triton", torch.float32))
    timed(f"constrain {tail}, noise {noise}, forward and backward, reference", lambda: run("reference", torch.float32))
