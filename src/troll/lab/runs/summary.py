"""A run in a few numbers and sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from troll.lab.runs.comparison import ROLLOUTS_AVERAGED
from troll.lab.runs.folder import Line, Run
from troll.trl.robust.renamed_settings import bound_kind


@dataclass(frozen=True)
class Summary:
    """Where a run began, where it ended, and what its trust region did; None where it was not measured."""

    reward_first: float | None
    reward_last: float | None
    """Sampled reward: of the first rollout, and the mean of the last three."""
    rollouts: int
    held_out_first: float | None
    held_out_last: float | None
    projected: float | None
    """Share of the tokens that were projected, over the whole run."""
    kl_mean: float | None
    """Mean token KL to the old policy before projection."""
    kl_after_max: float | None
    kl_bound: float | None
    adapts: bool
    """Whether ``kl_bound`` was only where the bound began."""
    seconds: float


def summarise(run: Run) -> Summary:
    """The numbers."""
    about, metrics, evaluations = run.about, run.metrics(), run.evaluations()
    rewards = _column(metrics, "reward")
    held_out = _column(evaluations, "eval_reward")
    after = _column(metrics, "troll/kl_after/max")
    settings = about["settings"]
    bound = math.inf if settings["kl_bound"] is None else settings["kl_bound"]  # JSON has no infinity
    return Summary(
        reward_first=rewards[0] if rewards else None,
        reward_last=_mean(rewards[-ROLLOUTS_AVERAGED:]),
        rollouts=len(rewards),
        held_out_first=held_out[0] if len(held_out) > 1 else None,
        held_out_last=held_out[-1] if held_out else None,
        projected=_mean(_column(metrics, "troll/projected_fraction")),
        kl_mean=_mean(_column(metrics, "troll/kl_before/mean")),
        kl_after_max=max(after) if after else None,
        kl_bound=bound if settings["trust_region"] == "troll" else None,
        adapts=bound_kind(settings) not in ("fixed", "sequence"),
        seconds=about["seconds"],
    )


def sentences(run: Run) -> list[str]:
    """What to say at the end of a run."""
    s = summarise(run)
    said = []
    if s.reward_first is not None:
        last = "the last" if s.rollouts == 1 else f"mean of the last {min(s.rollouts, ROLLOUTS_AVERAGED)}"
        said.append(f"Reward {s.reward_first:.3f} → {s.reward_last:.3f} (first rollout, {last}).")
    if s.held_out_first is not None:
        said.append(f"Held-out reward {s.held_out_first:.3f} → {s.held_out_last:.3f}.")
    if s.projected is not None and s.kl_after_max is not None:
        said.append(
            f"The trust region projected {s.projected:.1%} of the tokens; the largest KL after projection was "
            f"{s.kl_after_max:.4f}, the bound {'adapts, from' if s.adapts else 'is'} {s.kl_bound:g}."
            if s.projected
            else f"No token left the trust region of {s.kl_bound:g}: it changed nothing in this run."
        )
    elif s.kl_mean is not None:
        said.append(f"Mean token KL to the policy that made the rollout: {s.kl_mean:.4f}.")
    return said


def _column(lines: list[Line], name: str) -> list[float]:
    return [line[name] for line in lines if line.get(name) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
