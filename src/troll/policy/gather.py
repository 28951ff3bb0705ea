"""Log-probabilities of a softmax at chosen tokens, without a second tensor of the size of the logits.

For logits z, a support S and L = log Σ e^z:   log p_k = z_k − L for k ∈ S,   log tail = log Σ_{j∉S} e^{z_j} − L.

With upstream gradients g_k and g_τ, p = softmax(z), τ the mass of the tail, and Γ = Σ g_k + g_τ:

    ∂/∂z_k = g_k − p_k Γ  (k ∈ S),     ∂/∂z_j = p_j (g_τ / τ − Γ)  (j ∉ S)

so the backward needs L and the logits that are there already. Rows are worked off in chunks, in fp32 (fp64 for fp64).
The functions for one chunk, and ``SupportGradient`` for the way back, serve ``troll.policy.head`` too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_ELEMENTS = 1 << 20  # on a CPU: a few megabytes, so that temporaries stay in the cache
_CHUNKS_AT_ONCE = 64  # elsewhere: few launches
_TINY = 1e-30  # below, a sum of probabilities in fp32 may have lost terms


def row_chunks(logits: Tensor, at_once: int = _CHUNKS_AT_ONCE) -> Iterator[slice]:
    """Slices of rows, to be worked off one after another: nothing of the size of the logits is made twice."""
    elements = _CHUNK_ELEMENTS * (1 if logits.device.type == "cpu" else at_once)
    rows = max(1, elements // max(1, logits.shape[-1]))
    for start in range(0, logits.shape[0], rows):
        yield slice(start, start + rows)


def work_dtype(logits: Tensor) -> torch.dtype:
    """fp64 stays fp64; everything else is computed in fp32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """The logits in work precision, divided by the temperature."""
    z = logits.to(work_dtype(logits))
    return z if temperature == 1.0 else z / temperature


def normalised(z: Tensor, log_norm: Tensor) -> Tensor:
    """log softmax of scaled logits [N, K], from the two parts of their log-sum-exp [N, 2]."""
    return z - log_norm[:, :1] - log_norm[:, 1:]


def _hidden(token_ids: Tensor) -> Tensor:
    """The ids as indices; unused slots repeat the first one, so that they hide nothing else."""
    return torch.where(token_ids >= 0, token_ids, token_ids[:, :1]).clamp(min=0)


def at_tokens(log_p: Tensor, token_ids: Tensor) -> Tensor:
    """Of log-probabilities [N, V], those at ``token_ids`` [N, K]; −inf for −1."""
    return log_p.gather(-1, token_ids.clamp(min=0)).masked_fill(token_ids < 0, -torch.inf)


def log_tail_of(log_p: Tensor, token_ids: Tensor) -> Tensor:
    """Of log-probabilities [N, V], the log of the mass outside ``token_ids`` [N, K], [N]; 0 where slot 0 is unused."""
    log_tail = log_p.scatter(-1, _hidden(token_ids), -torch.inf).logsumexp(-1)
    return torch.where(token_ids[:, 0] >= 0, log_tail, 0.0)


def entropy_and_log_tail(log_p: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """H = −Σ p log p and ``log_tail_of`` of the same rows, from one exponential."""
    p = log_p.exp()
    entropy = -(p * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)  # 0 · −inf is 0 here
    tail = p.scatter_(-1, _hidden(token_ids), 0.0).sum(-1)
    log_tail = torch.where(token_ids[:, 0] >= 0, tail.log(), 0.0)
    tiny = (tail < _TINY) & (token_ids[:, 0] >= 0)
    if bool(tiny.any()):  # p may have underflowed
        log_tail[tiny] = log_tail_of(log_p[tiny], token_ids[tiny])
    return entropy, log_tail


class SupportGradient:
    """The gradients that arrive at a support, made ready to be spread over the rows of the logits."""

    def __init__(self, token_ids: Tensor, log_tail: Tensor, g_log_probs: Tensor | None, g_tail: Tensor | None) -> None:
        self.token_ids = token_ids
        self.used = token_ids >= 0
        kept = log_tail.new_zeros(token_ids.shape) if g_log_probs is None else g_log_probs
        self.kept = torch.where(self.used, kept, 0.0)
        self.total = self.kept.sum(-1, keepdim=True)
        self.tail: Tensor | None = None
        if g_tail is not None:
            empty = log_tail == -torch.inf  # no gradient from an empty tail, and no −inf − −inf at excluded tokens
            self.tail, self.log_tail = g_tail.masked_fill(empty, 0.0)[:, None], log_tail.masked_fill(empty, 0.0)
            self.total = self.total + self.tail

    def over(self, rows: slice, log_p: Tensor) -> Tensor:
        """∂/∂z for these rows, [rows, V], from their log-probabilities; anything goes where a row has no support."""
        ids = self.token_ids[rows]
        g = (-log_p.exp() * self.total[rows]).scatter_add_(-1, ids.clamp(min=0), self.kept[rows])
        if self.tail is not None:
            share = (log_p - self.log_tail[rows, None]).clamp(max=0.0).exp()  # p_j / τ ≤ 1 outside S
            g += share.scatter_(-1, _hidden(ids), 0.0) * self.tail[rows]
        return g


class _LogProbsAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token_ids: Tensor, log_norm: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        log_probs = torch.empty(token_ids.shape, dtype=work_dtype(logits), device=logits.device)
        log_tail = torch.empty(token_ids.shape[:1], dtype=work_dtype(logits), device=logits.device)
        for rows in row_chunks(logits):
            log_p = normalised(scaled(logits[rows], temperature), log_norm[rows])
            log_probs[rows], log_tail[rows] = at_tokens(log_p, token_ids[rows]), log_tail_of(log_p, token_ids[rows])
        ctx.save_for_backward(logits, token_ids, log_norm, log_tail)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_probs, log_tail

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_log_probs: Tensor | None, g_tail: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        logits, token_ids, log_norm, log_tail = ctx.saved_tensors
        gradient = SupportGradient(token_ids, log_tail, g_log_probs, g_tail)
        grad = torch.empty_like(logits)
        for rows in row_chunks(logits):
            log_p = normalised(scaled(logits[rows], ctx.temperature), log_norm[rows])
            g = gradient.over(rows, log_p) / ctx.temperature
            grad[rows] = torch.where(gradient.used[rows, :1], g, 0.0).to(grad.dtype)
        return grad, None, None, None


def log_probs_at(logits: Tensor, token_ids: Tensor, log_norm: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities at ``token_ids`` [N, K] (−1: unused) and log of the mass outside them, differentiable.

    ``log_norm`` [N, 2] is what ``log_norms`` makes of the logits [N, V]. Rows whose slot 0 is unused read nothing,
    return −inf and a tail of mass 1, and get no gradient, whatever their logits hold.
    """
    log_probs, log_tail = _LogProbsAt.apply(logits, token_ids, log_norm, temperature)  # type: ignore[no-untyped-call]
    return log_probs, log_tail
