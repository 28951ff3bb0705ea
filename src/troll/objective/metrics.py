"""The metrics of a loss: detached scalars over the counted tokens, with the same names for every loss and trainer.

They are made in two steps, so that a distributed trainer can gather the tokens of all processes in between: numbers per
token (``token_stats``), then means, percentiles and extremes over them (``summarise``). ``REDUCTIONS`` says how the
values of several forward passes, micro-batches or processes become one. ``docs/metrics.md`` explains each metric.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from troll.policy import SparsePolicy, entropy, sequence_kl
from troll.projection import Diagnostics

Metrics = dict[str, Tensor]
"""Scalars by name."""
TokenStats = dict[str, Tensor]
"""Numbers per token, [B, T], by name."""

Reduction = Literal["mean", "max", "min", "sum"]
REDUCTIONS: dict[str, Reduction] = {
    # every loss
    "kl_before/mean": "mean",
    "kl_before/p99": "mean",
    "kl_before/max": "max",
    "sequence_kl_before": "mean",
    "sequence_kl_before/max": "max",
    "ratio/mean": "mean",
    "ratio/p99": "mean",
    "ratio/max": "max",
    "ratio/min": "min",
    "entropy": "mean",
    "kept_mass/proposal": "mean",
    "kept_mass/old": "mean",
    "support_size/proposal": "mean",
    "support_size/old": "mean",
    "lost_mass": "mean",
    "skipped_tokens": "sum",
    # with a trust region
    "projected_fraction": "mean",
    "kl_after/mean": "mean",
    "kl_after/p99": "mean",
    "kl_after/max": "max",
    "sequence_kl_after": "mean",
    "sequence_kl_after/max": "max",
    "regression": "mean",
    "mix": "mean",
    "solver_steps/mean": "mean",
    "solver_steps/max": "max",
    "unconverged_tokens": "sum",
    # with a clip
    "clipped_fraction": "mean",
    "dual_clipped_fraction": "mean",
    # added by trainers
    "kl_bound": "mean",
    "regression_coef": "mean",
    "unscored_completions": "sum",
}
"""How values of several passes or processes become one. A percentile is averaged: it is that of a typical pass."""
IMPORTANT = ("projected_fraction", "kl_before/mean", "kl_before/p99", "ratio/max", "entropy")
"""The five to look at first."""


def reduction(name: str) -> Reduction:
    """How a metric is reduced over passes and processes; one that is not in the table by the end of its name.

    >>> reduction("ratio/min"), reduction("unconverged_tokens"), reduction("mine/max"), reduction("mine")
    ('min', 'sum', 'max', 'mean')
    """
    if name in REDUCTIONS:
        return REDUCTIONS[name]
    last = name.rsplit("/", 1)[-1]
    return "max" if last == "max" else "min" if last == "min" else "mean"


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
