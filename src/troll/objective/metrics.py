"""What a loss reports, as detached scalars; the same names for every loss, over the counted tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from troll.objective.batch import Batch
from troll.policy import SparsePolicy, entropy, sequence_kl
from troll.projection import Projection

Metrics = dict[str, Tensor]


def mean(x: Tensor, counted: Tensor) -> Tensor:
    """Mean over the counted tokens, 0 if there are none."""
    return torch.where(counted, x, 0.0).sum() / counted.sum().clamp(min=1)


def _ordered(x: Tensor, counted: Tensor) -> Tensor:
    """The counted values in ascending order, after one −inf and another for every token that does not count."""
    values = torch.where(counted, x, -torch.inf).flatten()
    return torch.cat([values.new_full((1,), -torch.inf), values]).sort().values


def largest(x: Tensor, counted: Tensor) -> Tensor:
    """Maximum over the counted tokens, 0 if there are none."""
    return torch.where(counted.any(), _ordered(x, counted)[-1], 0.0)


def spread(name: str, x: Tensor, counted: Tensor) -> Metrics:
    """Mean, 99th percentile (the nearest value from below) and maximum over the counted tokens, 0 if there are none."""
    ordered, n = _ordered(x, counted), counted.sum()
    rank = (0.99 * (n - 1)).floor().long()
    p99 = ordered.gather(0, (ordered.numel() - n + rank).clamp(max=ordered.numel() - 1)[None])[0]
    return {
        f"{name}/mean": mean(x, counted),
        f"{name}/p99": torch.where(n > 0, p99, 0.0),
        f"{name}/max": torch.where(n > 0, ordered[-1], 0.0),
    }


def sequence_mean(kl: Tensor, counted: Tensor) -> Tensor:
    """Sequence KL, averaged over the sequences that have a counted token."""
    return sequence_kl(kl, counted).sum() / counted.any(-1).sum().clamp(min=1)


@torch.no_grad()
def policy_metrics(
    proposal: SparsePolicy, old: SparsePolicy, batch: Batch, ratio: Tensor, projection: Projection
) -> Metrics:
    """How far the proposal is from the old policy, and how much of both the supports hold."""
    counted = batch.counted
    kept = torch.cat([proposal.log_probs, proposal.log_tail.unsqueeze(-1)], dim=-1)
    return {
        **spread("kl_before", projection.kl_before, counted),
        "sequence_kl_before": sequence_mean(projection.kl_before, counted),
        **spread("ratio", ratio, counted),
        "ratio/min": -largest(-ratio, counted),
        "entropy": mean(entropy(kept), counted),
        "kept_mass/proposal": mean(proposal.kept_mass, counted),
        "kept_mass/old": mean(old.kept_mass, counted),
        "support_size/proposal": mean(proposal.support_size.to(ratio.dtype), counted),
        "support_size/old": mean(old.support_size.to(ratio.dtype), counted),
        "lost_mass": mean(projection.lost_mass, counted),
        "skipped_tokens": batch.skipped,
    }
