"""Rows of logits → the numbers of a sparse policy, and the gradients of those back to the rows.

For logits z, a support S and L = log Σ e^z:   log p_k = z_k − L for k ∈ S,   log tail = log Σ_{j∉S} e^{z_j} − L,
entropy = L − Σ p z.  With upstream gradients g_k, g_τ, g_H, p = softmax(z), τ the mass of the tail and Γ = Σ g_k + g_τ:

    ∂/∂z_k = g_k − p_k Γ  (k ∈ S),     ∂/∂z_j = p_j (g_τ / τ − Γ)  (j ∉ S),     both − p_j (log p_j + H) g_H

so the way back needs L and the logits that are there already. ``reference`` is the definition, ``tuned`` the same for
CPUs, ``troll.policy.scoring.triton`` the same for GPUs. All compute in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from troll.implementation import Choice, Impl, choose
from troll.policy.scoring import cpu as tuned
from troll.policy.scoring import reference
from troll.policy.scoring.types import LogitTransform, MostProbable, Scores, Upstream, work_dtype

__all__ = [
    "LogitTransform",
    "MostProbable",
    "Scores",
    "Upstream",
    "choose_for",
    "gradient",
    "scale_",
    "score",
    "work_dtype",
]

KERNEL_SUPPORT = 256  # most tokens per position that the kernels keep


def choose_for(impl: Impl, device: torch.device, dtype: torch.dtype, support: int, logit: LogitTransform) -> Choice:
    """What computes for rows of this type, with so many tokens kept."""
    cannot = None
    if work_dtype(dtype) == torch.float64:
        cannot = "logits are fp64"
    elif support > KERNEL_SUPPORT:
        cannot = f"max_support is {support}, above the {KERNEL_SUPPORT} of the kernels"
    elif not logit.scale > 0:
        cannot = f"the logit scale is {logit.scale}"
    return choose(impl, device, cannot)


def _module(choice: Choice) -> Any:
    if choice.impl == "triton":
        from troll.policy.scoring import triton as rows

        return rows
    return tuned if choice.impl == "torch" else reference


def score(
    tile: Tensor,
    logit: LogitTransform,
    sampled: Tensor,
    support: MostProbable | Tensor,
    counted: Tensor | None,
    choice: Choice,
    *,
    entropy: bool = True,
    out: Scores | None = None,
) -> Scores:
    """Score rows [N, V] at their most probable tokens, or at given ids [N, K] (−1: unused, slot 0 the sampled token).

    Rows that are not ``counted`` [N], whose logits define no distribution, or none in which the sampled token can occur
    have no support: ids −1, log-probabilities −inf, a tail of mass 1, entropy 0. A given token that is impossible
    leaves the support. The scores are written to ``out`` where it is given.
    """
    if out is None:
        out = Scores.empty(len(tile), tile.shape[-1], support, tile.dtype, tile.device)
    _module(choice).score(tile, logit, sampled, support, counted, entropy, out)
    return out


def gradient(
    tile: Tensor,
    logit: LogitTransform,
    scores: Scores,
    upstream: Upstream,
    out: Tensor,
    choice: Choice,
    *,
    first: int = 0,
) -> None:
    """Write to ``out``, which may be the tile itself, the gradient of the rows; zero where a row has no support.

    The tile may be a slice of the vocabulary, from token ``first`` on.
    """
    _module(choice).gradient(tile, logit, scores, upstream, out, first)


def scale_(x: Tensor, factor: Tensor, choice: Choice) -> Tensor:
    """x ← factor x, for a factor [] that is 1 as a rule."""
    if choice.impl == "triton":
        from troll.policy.scoring import triton as rows

        rows.scale_(x, factor)
        return x
    return x if bool(factor == 1) else x.mul_(factor)
