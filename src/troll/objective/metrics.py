"""What a loss reports, as detached scalars; the same names for every loss, over the counted tokens.

In two steps, so that a distributed trainer can bring the tokens of all processes together in between: numbers per token
(``token_stats``), then means, percentiles and extremes over them (``summarise``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from troll.policy import SparsePolicy, entropy, sequence_kl
from troll.projection import Projection

Metrics = dict[str, Tensor]
TokenStats = dict[str, Tensor]


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
def token_stats(
    proposal: SparsePolicy,
    old: SparsePolicy,
    ratio: Tensor,
    projection: Projection,
    pull: Tensor | None = None,
    exact_entropy: Tensor | None = None,
) -> TokenStats:
    """How far the proposal is from the old policy, how much of both the supports hold, and what the projection did.

    Args:
        proposal, old: the policies.
        ratio: as it multiplies the advantage.
        projection: of the one onto the region around the other.
        pull: the regression; None where nothing was constrained, and nothing is said about the projection.
        exact_entropy: of the proposal; without it, a lower bound over the kept tokens and one outcome for the rest.
    """
    dtype = ratio.dtype
    kept = torch.cat([proposal.log_probs, proposal.log_tail.unsqueeze(-1)], dim=-1)
    stats = {
        "kl_before": projection.kl_before,
        "ratio": ratio,
        "entropy": entropy(kept) if exact_entropy is None else exact_entropy,
        "kept_mass/proposal": proposal.kept_mass,
        "kept_mass/old": old.kept_mass,
        "support_size/proposal": proposal.support_size.to(dtype),
        "support_size/old": old.support_size.to(dtype),
        "lost_mass": projection.lost_mass,
    }
    if pull is not None:
        stats |= {
            "kl_after": projection.kl_after,
            "regression": pull,
            "mix": projection.mix,
            "projected": projection.active.to(dtype),
            "solver_steps": projection.iterations.to(dtype),
            "unconverged": (~projection.converged).to(dtype),
        }
    return {name: x.detach() for name, x in stats.items()}


_MEANS = ("entropy", "kept_mass/proposal", "kept_mass/old", "support_size/proposal", "support_size/old", "lost_mass")


@torch.no_grad()
def summarise(stats: TokenStats, counted: Tensor) -> Metrics:
    """Numbers per token [B, T] → the metrics, over the counted tokens."""
    metrics = {
        **spread("kl_before", stats["kl_before"], counted),
        "sequence_kl_before": sequence_mean(stats["kl_before"], counted),
        **spread("ratio", stats["ratio"], counted),
        "ratio/min": -largest(-stats["ratio"], counted),
        **{name: mean(stats[name], counted) for name in _MEANS},
    }
    if "projected" in stats:
        active = counted & (stats["projected"] > 0)
        metrics |= {
            "projected_fraction": mean(stats["projected"], counted),
            **spread("kl_after", stats["kl_after"], counted),
            "sequence_kl_after": sequence_mean(stats["kl_after"], counted),
            "regression": mean(stats["regression"], counted),
            "mix": mean(stats["mix"], counted),
            "solver_steps/mean": mean(stats["solver_steps"], active),
            "solver_steps/max": largest(stats["solver_steps"], active),
            "unconverged_tokens": (counted & (stats["unconverged"] > 0)).sum(),
        }
    return metrics
