"""What a loss reports, as detached scalars; the same names for every loss, over the counted tokens.

In two steps, so that a distributed trainer can bring the tokens of all processes together in between: numbers per token
(``token_stats``), then means, percentiles and extremes over them (``summarise``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from troll.policy import SparsePolicy, entropy, sequence_kl
from troll.projection import Diagnostics

Metrics = dict[str, Tensor]
TokenStats = dict[str, Tensor]


def mean(x: Tensor, counted: Tensor) -> Tensor:
    """Mean over the counted tokens, 0 if there are none; of each of several quantities [Q, ...] at once."""
    return _counted(x, counted, 0.0).sum(-1) / counted.sum().clamp(min=1)


def _counted(x: Tensor, counted: Tensor, fill: float) -> Tensor:
    """The tokens in one dimension, with ``fill`` for those that do not count."""
    return torch.where(counted, x, fill).flatten(x.dim() - counted.dim())


def largest(x: Tensor, counted: Tensor) -> Tensor:
    """Maximum over the counted tokens, 0 if there are none."""
    values = _counted(x, counted, -torch.inf)
    top = values.amax(-1) if values.shape[-1] else values.new_zeros(values.shape[:-1])
    return torch.where(counted.any(), top, 0.0)


def high(x: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """99th percentile (the nearest value from below) and maximum over the counted tokens, 0 if there are none."""
    values = _counted(x, counted, -torch.inf)
    ordered = torch.cat([values.new_full((*values.shape[:-1], 1), -torch.inf), values], dim=-1).sort(-1).values
    n, size = counted.sum(), ordered.shape[-1]
    rank = (0.99 * (n - 1)).floor().long()
    p99 = ordered.index_select(-1, (size - n + rank).clamp(max=size - 1)[None])[..., 0]
    return torch.where(n > 0, p99, 0.0), torch.where(n > 0, ordered[..., -1], 0.0)


def of_sequences(name: str, kl: Tensor, counted: Tensor) -> Metrics:
    """Mean and maximum of the sequence KL over the sequences that have a counted token, 0 if there are none."""
    total, some = sequence_kl(kl, counted), counted.any(-1)
    return {name: mean(total, some), f"{name}/max": largest(total, some)}


@torch.no_grad()
def token_stats(
    proposal: SparsePolicy,
    old: SparsePolicy,
    ratio: Tensor,
    projection: Diagnostics,
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


_SPREAD = ("kl_before", "ratio", "kl_after")


@torch.no_grad()
def summarise(stats: TokenStats, counted: Tensor) -> Metrics:
    """Numbers per token [B, T] → the metrics, over the counted tokens."""
    names = [name for name in _SPREAD if name in stats]
    percentiles, maxima = high(torch.stack([stats[name] for name in names]), counted)
    means = dict(zip(stats, mean(torch.stack(list(stats.values())), counted).unbind(), strict=True))
    metrics = {f"{name}/p99": x for name, x in zip(names, percentiles.unbind(), strict=True)}
    metrics |= {f"{name}/max": x for name, x in zip(names, maxima.unbind(), strict=True)}
    metrics |= {f"{name}/mean" if name in names else name: x for name, x in means.items()}
    metrics["ratio/min"] = -largest(-stats["ratio"], counted)
    metrics |= of_sequences("sequence_kl_before", stats["kl_before"], counted)
    if "projected" in stats:
        active = counted & (stats["projected"] > 0)
        metrics["projected_fraction"] = metrics.pop("projected")
        metrics |= of_sequences("sequence_kl_after", stats["kl_after"], counted)
        metrics["solver_steps/mean"] = mean(stats["solver_steps"], active)
        metrics["solver_steps/max"] = largest(stats["solver_steps"], active)
        metrics["unconverged_tokens"] = (counted & (stats["unconverged"] > 0)).sum()
        del metrics["solver_steps"], metrics["unconverged"]  # their means over all tokens say nothing
    return metrics
