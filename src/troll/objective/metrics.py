"""What a loss reports, as detached scalars; the same names for every loss, over the counted tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from troll.objective.batch import Batch
from troll.policy import SparsePolicy, entropy, sequence_kl

Metrics = dict[str, Tensor]


def mean(x: Tensor, counted: Tensor) -> Tensor:
    """Mean over the counted tokens, 0 if there are none."""
    return torch.where(counted, x, 0.0).sum() / counted.sum().clamp(min=1)


def spread(name: str, x: Tensor, counted: Tensor) -> Metrics:
    """Mean, 99th percentile (the nearest value from below) and maximum over the counted tokens, 0 if there are none."""
    ordered = torch.where(counted, x, -torch.inf).flatten().sort().values
    n = counted.sum()
    rank = (0.99 * (n - 1)).floor().long().clamp(min=0)
    # The uncounted ones, −inf, come first.
    at = (counted.numel() - n + rank).clamp(max=max(0, ordered.numel() - 1))
    p99, largest = (ordered.gather(0, at[None])[0], ordered[-1]) if ordered.numel() else (x.sum(), x.sum())
    return {
        f"{name}/mean": mean(x, counted),
        f"{name}/p99": torch.where(n > 0, p99, 0.0),
        f"{name}/max": torch.where(n > 0, largest, 0.0),
    }


@torch.no_grad()
def policy_metrics(
    proposal: SparsePolicy, old: SparsePolicy, batch: Batch, ratio: Tensor, kl_before: Tensor
) -> Metrics:
    """How far the proposal is from the old policy, and how much of both the supports hold."""
    counted = batch.counted
    lengths = (counted.sum(-1) > 0).sum().clamp(min=1)
    kept = torch.cat([proposal.log_probs, proposal.log_tail.unsqueeze(-1)], dim=-1)
    return {
        **spread("kl_before", kl_before, counted),
        "sequence_kl_before": sequence_kl(kl_before, counted).sum() / lengths,
        **spread("ratio", ratio, counted),
        "ratio/min": torch.where(counted.any(), torch.where(counted, ratio, torch.inf).amin(), 0.0)
        if counted.numel()
        else ratio.sum(),
        "entropy": mean(entropy(kept), counted),
        "kept_mass/proposal": mean(proposal.kept_mass, counted),
        "kept_mass/old": mean(old.kept_mass, counted),
        "support_size/proposal": mean(proposal.support_size.to(ratio.dtype), counted),
        "support_size/old": mean(old.support_size.to(ratio.dtype), counted),
        "skipped_tokens": batch.skipped,
    }
