"""The same numbers on a GPU. Runs where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import troll

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def logits(rows: int, vocabulary: int, dtype: torch.dtype, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """Peaked logits with ties (bf16), a changed copy, and sampled tokens."""
    g = torch.Generator().manual_seed(0)
    old = 4 * torch.randn(rows, vocabulary, generator=g)
    new = old + noise * torch.randn(rows, vocabulary, generator=g)
    sampled = torch.multinomial(old.softmax(-1), 1, generator=g)[:, 0]
    return old.to(dtype), new.to(dtype), sampled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_selection_is_bit_equal_to_the_cpu(dtype: torch.dtype) -> None:
    old, _, sampled = logits(64, 151_936, dtype, 0.1)
    here, there = troll.sparsify(old, sampled), troll.sparsify(old.cuda(), sampled.cuda()).to("cpu")
    assert torch.equal(here.token_ids, there.token_ids)
    # Σ over 152k tokens in another order: 1e-6 absolute on log-probabilities of size 10.
    torch.testing.assert_close(there.log_probs, here.log_probs, rtol=0, atol=5e-6)
    torch.testing.assert_close(there.log_tail, here.log_tail, rtol=0, atol=5e-6)
    row_by_row = [troll.sparsify(old[i].cuda(), sampled[i].cuda()).token_ids.cpu() for i in range(8)]
    assert torch.equal(torch.stack(row_by_row), here.token_ids[:8])


@pytest.mark.parametrize("tail", ["floor", "bucket"])
@pytest.mark.parametrize("importance_sampling_level", ["token", "sequence"])
def test_loss_and_gradient(tail: str, importance_sampling_level: str) -> None:
    old, new, sampled = (x.view(8, 16, *x.shape[1:]) for x in logits(128, 5000, torch.float32, 1.0))
    advantages, mask = torch.linspace(-1, 1, 8), torch.rand(8, 16, generator=torch.Generator().manual_seed(1)) < 0.8

    def run(device: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        x = new.to(device, copy=True).requires_grad_()
        policy = troll.sparsify(old.to(device), sampled.to(device))
        proposal = troll.restrict(x, policy) if tail == "bucket" else troll.sparsify(x, sampled.to(device))
        loss, metrics = troll.troll_loss(
            *(proposal, policy, advantages.to(device), mask.to(device)),
            kl_bound=0.05,
            tail=tail,
            importance_sampling_level=importance_sampling_level,
        )
        loss.backward()
        return loss.cpu(), x.grad.cpu(), {k: v.cpu() for k, v in metrics.items()}

    (loss, grad, metrics), (gpu_loss, gpu_grad, gpu_metrics) = run("cpu"), run("cuda")
    assert metrics["projected_fraction"] > 0.3
    torch.testing.assert_close(gpu_loss, loss, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(gpu_grad, grad, rtol=1e-4, atol=1e-7)
    assert gpu_metrics["kl_after/max"] <= 0.05 * (1 + 1e-5)
    assert gpu_metrics["projected_fraction"] == metrics["projected_fraction"]


def test_projection_of_many_tokens_holds_the_bound() -> None:
    g = torch.Generator("cuda").manual_seed(0)
    for noise in (0.1, 1.0, 20.0, 50.0):
        old = (8 * torch.randn(100_000, 64, generator=g, device="cuda")).log_softmax(-1)
        proposal = (old + noise * torch.randn(100_000, 64, generator=g, device="cuda")).log_softmax(-1)
        result = troll.project(proposal, old, 0.05)
        kl = troll.token_kl(result.log_probs.double().log_softmax(-1), old.double().log_softmax(-1))
        assert (kl <= 0.05 * (1 + 1e-9)).all()
        assert torch.equal(result.log_probs[~result.active], proposal[~result.active])
        assert result.iterations.max() <= 12
        chunks = [
            troll.project(p, q, 0.05).log_probs for p, q in zip(proposal.split(7001), old.split(7001), strict=True)
        ]
        # Sums of a row do not depend on the rows around it.
        assert torch.equal(torch.cat(chunks), result.log_probs)


def test_opcheck_and_compile() -> None:
    old, new, _ = logits(64, 64, torch.float32, 1.0)
    q, x = old.log_softmax(-1).cuda(), new.cuda().requires_grad_()
    bound = torch.full((64,), 0.05, dtype=torch.float64, device="cuda")
    torch.library.opcheck(
        torch.ops.troll.project.default, (new.log_softmax(-1).cuda().requires_grad_(), q, bound, "newton")
    )

    def loss(z: Tensor) -> Tensor:
        return (troll.project(z.log_softmax(-1), q, 0.05).log_probs[:, 0] - q[:, 0]).exp().mean()

    (eager,) = torch.autograd.grad(loss(x), x)
    (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True)(x), x)
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-7)
