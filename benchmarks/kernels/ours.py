"""troll's ways, as functions of a problem. What this version of the package does not have is ``AbsentError``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from measure import AbsentError
from torch import Tensor

import troll
from troll.objective import constrain

if TYPE_CHECKING:
    from problem import Problem


def with_impl(function: Callable[..., Any], impl: str) -> dict[str, str]:
    """``impl=`` as keyword where the function takes one; without it, there is the plain implementation only."""
    if "impl" in inspect.signature(function).parameters:
        return {"impl": impl}
    if impl not in ("auto", "reference"):
        raise AbsentError(f"{function.__name__} has no impl={impl!r}")
    return {}


def head(weight: Tensor, impl: str) -> troll.Head:
    """The LM head with this implementation."""
    return troll.Head(weight, **with_impl(troll.Head, impl))


def reference_sparsify(logits: Tensor, sampled: Tensor, K: int, tail_mass: float) -> troll.SparsePolicy:
    """The definition of the selection."""
    return troll.sparsify(logits, sampled, K, tail_mass, **with_impl(troll.sparsify, "reference"))


@torch.no_grad()
def select(problem: Problem, logits: Tensor, impl: str) -> troll.SparsePolicy:
    """Logits → sparse policy."""
    return troll.sparsify(logits, problem.sampled, problem.size.K, **with_impl(troll.sparsify, impl))


@torch.no_grad()
def score(problem: Problem, impl: str) -> tuple[troll.SparsePolicy, Tensor]:
    """Hidden states → sparse policy and entropy."""
    policy, entropy = head(problem.weight, impl).sparsify(problem.hidden, problem.sampled, problem.size.K)
    return policy, entropy


def token_losses(proposal: troll.SparsePolicy, problem: Problem, tail: str, impl: str) -> Tensor:
    """Equation (8) per token, [N], as a loss."""
    step = constrain(proposal, problem.old, 0.05, problem.loss_mask, tail=tail, **with_impl(constrain, impl))
    return step.regression - step.log_ratio.exp() * problem.token_advantages


def mean(values: Tensor, problem: Problem) -> Tensor:
    """Over the counted tokens."""
    return torch.where(problem.loss_mask, values, 0.0).sum() / problem.loss_mask.sum()


def composed(problem: Problem, tail: str, impl: str) -> Tensor:
    """The loss from parts: the head's primitive, whose backward makes the tiles again, then ``constrain``."""
    lm_head = head(problem.weight, impl)
    if tail == "bucket":
        proposal = lm_head.restrict(problem.hidden, problem.old).policy
    else:
        proposal = lm_head.sparsify(problem.hidden, problem.sampled, problem.size.K).policy
    return mean(token_losses(proposal, problem, tail, impl), problem)


def single_pass(problem: Problem, tail: str, impl: str, memory_budget: int | None) -> Tensor:
    """The loss with its gradients made in the forward, by ``troll.fused_troll_loss``."""
    if not hasattr(troll, "fused_troll_loss"):
        raise AbsentError("troll has no fused_troll_loss")
    loss, _ = troll.fused_troll_loss(
        problem.grid(problem.hidden),
        head(problem.weight, impl),
        problem.old_grid,
        problem.advantages,
        problem.grid(problem.loss_mask),
        kl_bound=0.05,
        regression_coef=1.0,
        tail=tail,
        max_support=problem.size.K,
        memory_budget=memory_budget,
        **({"impl": impl} if "impl" in inspect.signature(troll.fused_troll_loss).parameters else {}),
    )
    return loss


def materialised(problem: Problem, logits: Tensor, tail: str) -> Tensor:
    """Losses per token from logits that exist, by the reference: what checks compare with."""
    sampled, K = problem.sampled, problem.size.K
    if tail == "bucket":
        proposal = troll.restrict(logits, problem.old, **with_impl(troll.restrict, "reference"))
    else:
        proposal = reference_sparsify(logits, sampled, K, 1e-5)
    return token_losses(proposal, problem, tail, "reference")


def outside(problem: Problem, logits: Tensor) -> float:
    """Share of the positions whose KL exceeds the bound."""
    proposal = troll.restrict(logits, problem.old, **with_impl(troll.restrict, "reference"))
    step = constrain(proposal, problem.old, 0.05, tail="bucket", **with_impl(constrain, "reference"))
    return step.projection.active.float().mean().item()


@torch.no_grad()
def leaf_policy(problem: Problem, tail: str) -> tuple[troll.SparsePolicy, list[Tensor]]:
    """The proposal of this problem as if it were a leaf: what the head hands to ``constrain``."""
    z = problem.logits()
    if tail == "bucket":
        policy = troll.restrict(z, problem.old, **with_impl(troll.restrict, "reference"))
    else:
        policy = reference_sparsify(z, problem.sampled, problem.size.K, 1e-5)
    leaves = [policy.log_probs.detach().requires_grad_(), policy.log_tail.detach().requires_grad_()]
    return troll.SparsePolicy.trusted(policy.token_ids, *leaves, policy.vocab_size, 1.0), leaves
