"""What others do: plain PyTorch, TRL's fused head, Liger's fused linear GRPO loss, and TROLL as its paper describes it.

Imports of other packages happen inside, so that one that is missing costs its own rows only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from measure import AbsentError
from ours import mean
from torch import Tensor

import troll
from troll.policy import align, token_kl

if TYPE_CHECKING:
    from problem import Problem

CLIP = 0.2


# -- clipping


def clip_losses(log_probs: Tensor, problem: Problem) -> Tensor:
    """−min(r A, clip(r) A) per token."""
    ratio, advantages = (log_probs - problem.old.sampled_log_probs).exp(), problem.token_advantages
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def plain_log_probs(logits: Tensor, sampled: Tensor) -> Tensor:
    """Of the sampled tokens, in fp32 (fp64 for fp64)."""
    z = logits if logits.dtype == torch.float64 else logits.float()
    return z.log_softmax(-1).gather(-1, sampled[:, None])[:, 0]


def plain_clip(problem: Problem) -> Tensor:
    """Logits, log-softmax, clip."""
    log_probs = plain_log_probs(problem.hidden @ problem.weight.t(), problem.sampled)
    return mean(clip_losses(log_probs, problem), problem)


def trl_scores(problem: Problem) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the sampled tokens and entropies, by TRL's fused head with TRL's own settings."""
    try:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as CHUNK
    except ImportError as error:
        raise AbsentError(f"TRL's fused head: {error}") from error
    log_probs, entropy, *_ = ChunkedLogProbFunction.apply(
        problem.hidden, problem.weight, None, problem.sampled, 1.0, CHUNK, None, 1.0, ("log_probs", "entropy")
    )
    return log_probs, entropy


def trl_clip(problem: Problem) -> Tensor:
    """TRL's fused head, then the clip."""
    return mean(clip_losses(trl_scores(problem)[0], problem), problem)


def liger_clip(problem: Problem, sequences: int) -> Tensor:
    """Liger's fused linear GRPO loss, so many sequences at a time (its default: 1).

    ``compiled=False`` leaves out torch.compile of the arithmetic on [B, T] numbers after the head, which is none of the
    cost and half a minute of compiling.
    """
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    except ImportError as error:
        raise AbsentError(f"Liger: {error}") from error
    function = LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, chunk_size=sequences, loss_type="bnpo"
    )
    loss, _ = function(
        problem.grid(problem.hidden),
        problem.weight,
        problem.grid(problem.sampled),
        problem.grid(problem.loss_mask).float(),
        problem.advantages,
        old_per_token_logps=problem.grid(problem.old.sampled_log_probs),
    )
    return loss


@torch.no_grad()
def three_products(problem: Problem) -> Tensor:
    """What no loss with gradients can do without: logits, and the gradients of hidden states and weight from them."""
    z = problem.hidden @ problem.weight.t()
    return z @ problem.weight, z.t() @ problem.hidden  # type: ignore[return-value]


# -- selection


@torch.no_grad()
def plain_selection(logits: Tensor, K: int, tail_mass: float) -> tuple[Tensor, Tensor]:
    """Log-softmax, top-K, and the ids up to the mass that is to be kept."""
    values, ids = logits.float().log_softmax(-1).topk(K)
    before = values.exp().cumsum(-1) - values.exp()
    return values, torch.where(before < 1 - tail_mass, ids, -1)


def paper_policy(logits: Tensor, sampled: Tensor, K: int, tail_mass: float) -> troll.SparsePolicy:
    """The full softmax, its K largest probabilities until 1 − δ is reached, and the sampled token, differentiable."""
    log_p = logits.float().log_softmax(-1)
    values, ids = log_p.detach().topk(K)
    before = values.exp().cumsum(-1) - values.exp()
    ids = torch.where((before < 1 - tail_mass) & (ids != sampled[:, None]), ids, -1)
    ids = torch.cat([sampled[:, None], ids], dim=-1)
    log_probs = torch.where(ids >= 0, log_p.gather(-1, ids.clamp(min=0)), -torch.inf)
    tail = (1 - log_probs.detach().exp().sum(-1)).clamp(min=1e-38).log()
    return troll.SparsePolicy.trusted(ids, log_probs, tail, logits.shape[-1], 1.0)


# -- the projection by bracketing


class PaperProjection(torch.autograd.Function):
    """π ∝ exp((η log π_old + log π̃)/(η + 1)), η by n-ary bracketing in fp32: 8 points, ≤ 20 steps, [1e-7, 100], 1e-5.

    Rows that are inside the region are left alone and not solved for. The gradient is the implicit one, equation (7).
    """

    @staticmethod
    def forward(ctx: Any, proposal: Tensor, old: Tensor, kl_bound: float) -> tuple[Tensor, Tensor]:
        """Projected log-probabilities [N, S], and which rows were projected."""
        active = token_kl(proposal, old) > kl_bound
        p, q = proposal[active], old[active]
        low, high = p.new_full((len(p), 1), 1e-7), p.new_full((len(p), 1), 100.0)
        fractions = torch.linspace(0, 1, 10, device=p.device)[1:-1]
        for _ in range(20):
            points = low + (high - low) * fractions  # [n, 8]
            eta = points[..., None]
            mixed = _mix(p[:, None], q[:, None], eta)
            outside = token_kl(mixed, q[:, None].expand_as(mixed)) > kl_bound
            count = outside.sum(-1, keepdim=True)
            width = (high - low) / 9
            low, high = low + count * width, low + (count + 1) * width
            if bool(((high - low) < 1e-5).all()):
                break
        projected = proposal.clone()
        projected[active] = _mix(p, q, high)
        ctx.save_for_backward(projected, proposal, old, active, high)
        ctx.mark_non_differentiable(active)
        return projected, active

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None]:
        """Equation (7), t = 1/(1+η)."""
        projected, proposal, old, active, eta = ctx.saved_tensors
        g, log_p = grad[active], projected[active]
        inside = log_p > -torch.inf
        p, d = log_p.exp(), torch.where(inside, proposal[active] - old[active], 0.0)
        centred = d - (p * d).sum(-1, keepdim=True)
        g = torch.where(inside, g, 0.0)
        along = (g * centred).sum(-1, keepdim=True) / (p * centred.square()).sum(-1, keepdim=True)
        result = grad.clone()
        result[active] = (g - p * g.sum(-1, keepdim=True) - p * centred * along) / (1 + eta)
        return result, None, None


def _mix(p: Tensor, q: Tensor, eta: Tensor) -> Tensor:
    excluded = (p == -torch.inf) | (q == -torch.inf)
    z = (eta * q.masked_fill(excluded, 0.0) + p.masked_fill(excluded, 0.0)) / (eta + 1)
    return z.masked_fill(excluded, -torch.inf).log_softmax(-1)


def paper_troll(problem: Problem) -> Tensor:
    """TROLL in plain PyTorch over logits that exist: selection, joined supports, bracketing, regression."""
    logits = problem.hidden @ problem.weight.t()
    proposal = paper_policy(logits, problem.sampled, problem.size.K, 1e-5)
    p, q = align(proposal, problem.old, "floor")
    projected, active = PaperProjection.apply(p, q, 0.05)
    ratio = (projected[:, 0] - q[:, 0]).exp()
    pull = torch.where(active, token_kl(p, projected.detach()), 0.0)
    return mean(pull - ratio * problem.token_advantages, problem)
