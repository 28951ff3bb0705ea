"""The closed-form derivative against everything it must equal."""

from __future__ import annotations

import pytest
import torch
from projection_cases import pair
from torch import Tensor
from torch.autograd import gradcheck

from troll.policy import token_kl
from troll.projection import project


def differentiated_iterations(proposal: Tensor, old: Tensor, bound: float, steps: int = 12) -> Tensor:
    """log π by plain Newton on √KL from √(ε / KL(1)), every step left to autograd."""
    d = proposal - old

    def at(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_p = (old + t[:, None] * d).log_softmax(-1)
        p = log_p.exp()
        variance = (p * (d - (p * d).sum(-1, keepdim=True)).square()).sum(-1)
        return log_p, (p * (log_p - old)).sum(-1), variance

    t = torch.ones(len(d), dtype=d.dtype)
    t = (bound / at(t)[1]).sqrt()
    for _ in range(steps):
        _, kl, variance = at(t)
        t = t - 2 * (kl - (kl * bound).sqrt()) / (t * variance)
    return at(t)[0]


def cases(active: bool, rows: int = 6, support: int = 5) -> tuple[Tensor, Tensor]:
    proposal, old = pair(40 * rows, support, 1.0 if active else 0.2, 1.0, seed=11)
    keep = (token_kl(proposal, old) > 0.06) if active else (token_kl(proposal, old) < 0.04)
    return proposal[keep][:rows], old[keep][:rows]


@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("solver", ["newton", "bracketing"])
def test_gradcheck_on_both_sides_of_the_kink(active: bool, solver: str) -> None:
    proposal, old = cases(active)
    assert bool(project(proposal, old, 0.05).active.all()) == active
    assert gradcheck(lambda x: project(x, old, 0.05, solver=solver).log_probs, proposal.requires_grad_())


@pytest.mark.parametrize("factor", [1 + 1e-4, 1 - 1e-4])
def test_gradcheck_next_to_the_kink(factor: float) -> None:
    """Bounds a ten-thousandth away from the proposal's own KL: one-sided derivatives, active and not."""
    proposal, old = cases(True)
    bound = token_kl(proposal, old) * factor
    assert (project(proposal, old, bound).active == (factor < 1)).all()
    # The step of the central difference, 1e-7, must not cross the kink: the KL moves by 1e-7, its distance is 1e-5.
    assert gradcheck(lambda x: project(x, old, bound).log_probs, proposal.requires_grad_(), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize(("support", "noise", "scale", "bound"), [(3, 1, 1, 0.05), (8, 1, 1, 0.02), (64, 1, 2, 0.01)])
def test_closed_form_is_the_derivative_of_the_iterations(
    support: int, noise: float, scale: float, bound: float
) -> None:
    proposal, old = pair(50, support, noise, scale, seed=5)
    keep = token_kl(proposal, old) > bound
    proposal, old = proposal[keep].requires_grad_(), old[keep]
    upstream = torch.randn(proposal.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (ours,) = torch.autograd.grad(project(proposal, old, bound).log_probs, proposal, upstream)
    value = differentiated_iterations(proposal, old, bound)
    torch.testing.assert_close(value, project(proposal, old, bound).log_probs, rtol=1e-10, atol=1e-12)
    (theirs,) = torch.autograd.grad(value, proposal, upstream)
    # Iterating to 1e-12 and then differentiating leaves about 1e-11 of the gradient's size.
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_closed_form_is_the_central_difference() -> None:
    """Equation (6) for the sampled token, entry by entry, in double: steps of 1e-5 leave about 1e-9."""
    proposal, old = cases(True, rows=10, support=6)
    proposal.requires_grad_()
    log_ratio = project(proposal, old, 0.05).log_probs[:, 0] - old[:, 0]
    (ours,) = torch.autograd.grad(log_ratio.sum(), proposal)
    h = 1e-5
    for j in range(proposal.shape[-1]):
        step = torch.zeros_like(proposal)
        step[:, j] = h
        up = project((proposal + step).detach(), old, 0.05).log_probs[:, 0]
        down = project((proposal - step).detach(), old, 0.05).log_probs[:, 0]
        torch.testing.assert_close(ours[:, j], (up - down) / (2 * h), rtol=1e-7, atol=5e-9)


def test_equation_6_written_out() -> None:
    proposal, old = cases(True, rows=4, support=5)
    proposal.requires_grad_()
    result = project(proposal, old, 0.05)
    (ours,) = torch.autograd.grad(result.log_probs[:, 2].sum(), proposal)
    for row in range(4):
        t, pi, d = result.mix[row].item(), result.log_probs[row].exp().tolist(), (proposal - old)[row].tolist()
        mean = sum(p * x for p, x in zip(pi, d, strict=True))
        variance = sum(p * (x - mean) ** 2 for p, x in zip(pi, d, strict=True))
        expected = [t * ((j == 2) - pi[j] - pi[j] * (d[j] - mean) * (d[2] - mean) / variance) for j in range(len(pi))]
        torch.testing.assert_close(ours[row], torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def test_two_tokens_at_the_bound_have_no_gradient() -> None:
    """The boundary of the region is a single point: what is left of (7) is its rounding error."""
    proposal, old = pair(200, 2, 2.0, 1.0, seed=2)
    keep = token_kl(proposal, old) > 0.05
    proposal, old = proposal[keep].requires_grad_(), old[keep]
    assert len(proposal) > 50
    (grad,) = torch.autograd.grad(project(proposal, old, 0.05).log_probs[:, 0].sum(), proposal)
    assert grad.abs().max() <= 1e-13
    # Three tokens have an edge to move along.
    proposal, old = cases(True, rows=6, support=3)
    (grad,) = torch.autograd.grad(project(proposal.requires_grad_(), old, 0.05).log_probs[:, 0].sum(), proposal)
    assert (grad.abs().amax(-1) > 1e-3).all()


def test_gradient_of_an_inactive_token_passes_through_bit_for_bit() -> None:
    proposal, old = cases(False)
    upstream = torch.randn(proposal.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (grad,) = torch.autograd.grad(project(proposal.requires_grad_(), old, 0.05).log_probs, proposal, upstream)
    assert torch.equal(grad, upstream)


def test_fp32_gradient_is_the_fp64_one_rounded() -> None:
    """Work is done in fp64: fp32 differs by the rounding of the stored policy and of the result, 1e-6 of its size."""
    proposal, old = pair(500, 64, 1.0, 2.0, seed=8, dtype=torch.float32)
    upstream = torch.randn(proposal.shape, generator=torch.Generator().manual_seed(3))
    (single,) = torch.autograd.grad(project(proposal.requires_grad_(), old, 0.05).log_probs, proposal, upstream)
    wide = proposal.detach().double().requires_grad_()
    (double,) = torch.autograd.grad(project(wide, old.double(), 0.05).log_probs, wide, upstream.double())
    scale = double.abs().amax(-1, keepdim=True)
    assert ((single.double() - double).abs() / scale).max() <= 2e-6


def test_excluded_tokens_get_no_gradient_and_no_nan() -> None:
    old = torch.tensor([[0.5, 0.3, 0.2, 0.0, 0.0]], dtype=torch.float64).log()
    proposal = torch.tensor([[0.1, 0.85, 0.0, 0.05, 0.0]], dtype=torch.float64).log().requires_grad_()
    result = project(proposal, old, 0.05)
    assert result.active.item()
    (grad,) = torch.autograd.grad(result.log_probs[0, :3].sum(), proposal)
    assert grad.isfinite().all()
    assert (grad[0, 2:] == 0).all()  # excluded by the proposal, by the old policy, by both
    assert grad[0, 0] != 0


def test_gradient_with_excluded_tokens_is_the_central_difference() -> None:
    old = torch.tensor([[0.5, 0.3, 0.1, 0.1, 0.0]], dtype=torch.float64).log()
    proposal = torch.tensor([[0.05, 0.8, 0.1, 0.0, 0.05]], dtype=torch.float64).log().requires_grad_()
    (ours,) = torch.autograd.grad(project(proposal, old, 0.05).log_probs[0, 0], proposal)
    h = 1e-6
    for j in (0, 1, 2):
        step = torch.zeros_like(proposal)
        step[0, j] = h
        up, down = (project((proposal + s * step).detach(), old, 0.05).log_probs[0, 0] for s in (1, -1))
        assert abs(ours[0, j].item() - (up - down).item() / (2 * h)) < 1e-8
