"""``torch.compile`` in one graph gives the numbers and gradients of eager mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from policy_cases import F32, F64, ids, normal
from torch import Tensor

from troll.policy import SparsePolicy, Tail, align, restrict, sparsify, token_kl

# torch 2.13 instantiates autograd functions while it traces them, and warns about itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

MASK = torch.tensor([1, 1, 0, 1, 1, 1])


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def kl(logits: Tensor, sampled: Tensor, old: SparsePolicy, tail: Tail) -> Tensor:
    if tail == "floor":
        proposal = sparsify(logits, sampled, 8, 1e-3, temperature=0.7, loss_mask=MASK)
    else:
        proposal = restrict(logits, old, loss_mask=MASK)
    return token_kl(*align(proposal, old, tail))


@pytest.mark.parametrize("tail", ["floor", "bucket"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, F32, F64])
def test_one_graph_gives_the_eager_numbers(tail: Tail, dtype: torch.dtype) -> None:
    old_logits, sampled = normal(6, 40, seed=130, scale=2.0, dtype=dtype), ids(6, below=40, seed=131)
    logits = old_logits + normal(6, 40, seed=132, scale=0.3, dtype=dtype)
    old = sparsify(old_logits, sampled, 8, 1e-3, temperature=0.7)
    eager, compiled = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = kl(eager, sampled, old, tail)
    found = torch.compile(kl, fullgraph=True, backend="aot_eager")(compiled, sampled, old, tail)
    expected.sum().backward()
    found.sum().backward()
    # The same operators in the same order; only decompositions may differ, by a few eps of the terms.
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, rtol=16 * eps, atol=eps)
    torch.testing.assert_close(compiled.grad, eager.grad, rtol=4 * torch.finfo(dtype).eps, atol=16 * eps)
    assert expected.tolist()[2] == 0.0
    assert expected.max().item() > 1e-3
    assert eager.grad.abs().max().item() > 1e-3


def test_a_wrong_selection_would_show_in_the_graph_too() -> None:
    """Ties, excluded tokens and a shape that changes between calls, all in one compiled function."""

    def chosen(logits: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        policy = sparsify(logits, sampled, 4, 1e-2, temperature=0.5)
        return policy.token_ids, policy.log_probs, policy.log_tail

    compiled = torch.compile(chosen, fullgraph=True, backend="aot_eager")
    for rows in (3, 5):
        logits = (normal(rows, 12, seed=rows, scale=4.0).round() / 2).index_fill(-1, torch.tensor([7]), -torch.inf)
        sampled = torch.arange(rows)
        expected, found = chosen(logits, sampled), compiled(logits, sampled)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1:], expected[1:], rtol=1e-6, atol=1e-6)


def test_invalid_positions_are_masked_in_the_graph() -> None:
    """Nothing can be raised there; NaN must not leak instead, and the row is no longer ``valid``."""

    def tails(logits: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        policy = sparsify(logits, sampled, 3)
        return policy.valid, policy.sampled_log_probs, policy.log_tail

    logits = normal(4, 9, seed=133)
    logits[1, 2], logits[2, 3] = torch.nan, -torch.inf
    leaf = logits.requires_grad_()
    valid, log_probs, log_tail = torch.compile(tails, fullgraph=True, backend="aot_eager")(leaf, torch.arange(4) + 1)
    assert valid.tolist() == [True, False, False, True]  # the sampled token of row 2 is the excluded one
    assert log_tail.tolist()[1:3] == [0.0, 0.0]
    (log_probs[[0, 3]].sum() + log_tail.sum()).backward()
    assert leaf.grad[1:3].abs().max().item() == 0.0
    assert leaf.grad[[0, 3]].abs().amax(-1).min().item() > 0.1
