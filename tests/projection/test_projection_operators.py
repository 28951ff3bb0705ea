"""The operators under ``opcheck``, ``torch.compile``, autocast and a second differentiation."""

from __future__ import annotations

import pytest
import torch
from projection_cases import pair
from torch import Tensor

from troll.projection import project
from troll.projection.ops import project_rows, project_rows_backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", ["newton", "bracketing"])
def test_opcheck(dtype: torch.dtype, solver: str) -> None:
    proposal, old = pair(6, 5, 1.0, 1.0, seed=0, dtype=dtype)
    bound = torch.full((6,), 0.05, dtype=torch.float64)
    torch.library.opcheck(project_rows, (proposal.requires_grad_(), old, bound, solver))
    projected, mix, *_ = project_rows(proposal.detach(), old, bound, solver)
    torch.library.opcheck(
        project_rows_backward, (torch.randn_like(proposal).detach(), projected, proposal.detach(), old, mix)
    )


def loss(logits: Tensor, old: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    result = project(logits.log_softmax(-1), old, bound)
    return (result.log_probs[..., 0] - old[..., 0]).exp().mean(), result.kl_after.max()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_without_a_graph_break(backend: str) -> None:
    proposal, old = (x.view(3, 7, 16) for x in pair(21, 16, 1.0, 1.0, seed=0, dtype=torch.float32))
    eager, compiled = proposal.clone().requires_grad_(), proposal.clone().requires_grad_()
    value, kl = loss(eager, old, 0.05)
    fast_value, fast_kl = torch.compile(loss, fullgraph=True, backend=backend)(compiled, old, 0.05)
    value.backward()
    fast_value.backward()
    assert kl > 0.049
    # The operator is the same; log_softmax and the mean may be fused differently: fp32 rounding of O(1) numbers.
    torch.testing.assert_close(fast_value, value, rtol=1e-6, atol=0)
    torch.testing.assert_close(fast_kl, kl, rtol=1e-6, atol=0)
    torch.testing.assert_close(compiled.grad, eager.grad, rtol=1e-5, atol=1e-8)


def test_autocast_changes_no_bit() -> None:
    proposal, old = pair(50, 16, 1.0, 1.0, seed=0, dtype=torch.float32)
    plain, cast = proposal.clone().requires_grad_(), proposal.clone().requires_grad_()
    loss(plain, old, 0.05)[0].backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, kl = loss(cast, old, 0.05)
        value.backward()
    assert torch.equal(kl, loss(proposal, old, 0.05)[1])
    assert torch.equal(plain.grad, cast.grad)


def test_double_backward_is_refused_with_a_sentence() -> None:
    proposal, old = pair(5, 5, 1.0, 1.0, seed=0)
    proposal.requires_grad_()
    (grad,) = torch.autograd.grad(project(proposal, old, 0.05).log_probs.square().sum(), proposal, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*Differentiate once"):
        grad.sum().backward()


def test_diagnostics_carry_no_gradient() -> None:
    proposal, old = pair(5, 5, 1.0, 1.0, seed=0)
    result = project(proposal.requires_grad_(), old, 0.05)
    assert result.log_probs.requires_grad
    for name in ("mix", "eta", "kl_before", "kl_after", "active", "converged", "iterations", "lost_mass"):
        assert not getattr(result, name).requires_grad, name


def test_works_without_grad_mode_and_with_strided_input() -> None:
    proposal, old = pair(20, 8, 1.0, 1.0, seed=0)
    with torch.no_grad():
        reference = project(proposal, old, 0.05).log_probs
    strided_p, strided_q = (x.repeat_interleave(2, -1)[:, ::2] for x in (proposal, old))
    assert not strided_p.is_contiguous()
    strided_p = strided_p.detach().requires_grad_()
    result = project(strided_p, strided_q, 0.05).log_probs
    assert torch.equal(result, reference)
    result[:, 0].sum().backward()
    contiguous = proposal.clone().requires_grad_()
    project(contiguous, old, 0.05).log_probs[:, 0].sum().backward()
    torch.testing.assert_close(strided_p.grad, contiguous.grad, rtol=1e-12, atol=0)
