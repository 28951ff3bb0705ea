"""Rules about the health of a run: skipped updates, missing rewards, truncated completions, sampler, gradients."""

from __future__ import annotations

import math

import numpy as np

from troll.lab.report.rules.history import (
    NOTE,
    Change,
    Finding,
    History,
    before,
    found,
    rule,
    scaled,
    slower,
    throughout,
    trailing,
)
from troll.lab.runs.formatting import number, percent, plural

ROLLOUTS = 3
"""In a row, before a share is spoken of."""
CUT = 0.3
"""Of the completions, without an end. A good run of the embedded model begins with 0.14 and is at 0 soon."""
SPIKE, SPIKES, SPIKE_ROLLOUTS = 10.0, 2, 5
"""Times the median of earlier rollouts, on so many of the last ones: a single spike is common in good runs."""
TYPICAL_ROLLOUTS, FEWEST = 20, 5
"""How many earlier rollouts that median is of, and at least."""
MISMATCH = 0.1
"""Mean |log π_sampler − log π_trainer| per token: ratios are off by a tenth before the first update, half of what a
clip of ±0.2 allows. Rounding to bf16 gives about 0.01."""


def projects(history: History) -> bool:
    """Whether the run projects onto a KL trust region."""
    return history.region == "troll"


def has_sampler(history: History) -> bool:
    """Whether another engine than the trainer samples."""
    return history.engine == "verl" or bool(history.settings.get("use_vllm"))


@rule("skipped_updates", "skipped updates")
def skipped(history: History) -> Finding | None:
    """skipped_updates > 0, or tokens without a distribution: numbers that are not finite."""
    updates, tokens = history.most("troll/skipped_updates"), history.most("troll/skipped_tokens")

    def seen(i: int) -> str:
        if updates[i] > 0:
            return f"{plural(int(updates[i]), 'update')} skipped so far, because loss or gradient was not finite"
        return f"{plural(round(tokens[i]), 'token')} excluded, because the network returned NaN or infinity"

    means = "NaN and infinity come from overflow: large updates, or fp16"
    changes = [slower(history, "smaller steps"), Change("--bf16 true", "in place of fp16, if that is in use")]
    return found(history, (updates > 0) | (tokens > 0), seen, means, changes)


@rule("unscored", "completions without a reward")
def unscored(history: History) -> Finding | None:
    """unscored_completions > 0: without a reward they teach nothing."""
    count = history.most("troll/unscored_completions")
    return found(
        history,
        count > 0,
        lambda i: f"{plural(int(count[i]), 'completion')} of a rollout had no reward",
        "A reward function raised an error or gave no number; these completions are excluded",
        [Change("", "look at what the reward functions return; `troll doctor` checks the sandbox")],
    )


@rule("infra_error", "sandbox errors")
def infra(history: History) -> Finding | None:
    """code/infra_error > 0: programs that the sandbox could not judge."""
    share = history.most("code/infra_error")
    return found(
        history,
        share > 0,
        lambda i: f"{percent(share[i])} of the programs could not be judged",
        "The sandbox does not work as it should; these completions are excluded",
        [Change("", "`troll doctor` reports what is missing")],
    )


@rule("cut_completions", "truncated completions", "completions/clipped_ratio", rollouts=ROLLOUTS)
def cut(history: History) -> Finding | None:
    """completions/clipped_ratio > ``CUT`` on ``ROLLOUTS`` rollouts."""
    share = history.first("completions/clipped_ratio")
    return found(
        history,
        throughout(share > CUT, ROLLOUTS),
        lambda i: f"{percent(share[i])} of the completions were truncated at the maximum length",
        "Truncated completions are scored without their end, which penalizes length instead of mistakes",
        [scaled(history, "max_completion_length", 2, "room to finish")],
        ROLLOUTS,
    )


@rule("gradient_spikes", "gradient spikes", "grad_norm", rollouts=FEWEST + SPIKES)
def spikes(history: History) -> Finding | None:
    """grad_norm > ``SPIKE`` × the median of earlier rollouts, on ``SPIKES`` of the last ``SPIKE_ROLLOUTS``."""
    norm = history.most("grad_norm")
    typical = np.full(norm.size, math.nan)
    for n in range(FEWEST, TYPICAL_ROLLOUTS + 1):  # the first ones have fewer before them
        earlier = before(trailing(norm, n, np.median), 1)
        typical = np.where(np.isfinite(earlier), earlier, typical)
    spike = (norm > SPIKE * typical) & (typical > 0)
    count = trailing(spike.astype(np.float64), SPIKE_ROLLOUTS, np.sum)
    return found(
        history,
        spike & (count >= SPIKES),
        lambda i: (
            f"the gradient norm was {number(norm[i])}, {norm[i] / typical[i]:.0f} times the median of earlier "
            f"rollouts, one of {count[i]:.0f} spikes in {SPIKE_ROLLOUTS} rollouts"
        ),
        "Single batches move the network far; only max_grad_norm limits them",
        [
            slower(history, "the same batch moves the network less"),
            Change("--max_grad_norm 0.2", "limits the effect of one batch"),
        ],
        SPIKE_ROLLOUTS,
        NOTE,
    )


@rule(
    "sampler_mismatch",
    "difference between sampler and trainer",
    "sampling/sampling_logp_difference/mean",
    rollouts=ROLLOUTS,
    when=has_sampler,
)
def sampler(history: History) -> Finding | None:
    """sampling/sampling_logp_difference/mean > ``MISMATCH`` on ``ROLLOUTS`` rollouts."""
    gap = history.first("sampling/sampling_logp_difference/mean")
    return found(
        history,
        throughout(gap > MISMATCH, ROLLOUTS),
        lambda i: f"sampler and trainer differ by {number(gap[i])} in the log-probability of a token, on average",
        "Completions come from a different policy than the one that scores them; the trust region cannot correct this",
        [Change("--vllm_importance_sampling_correction true", "reweights completions by the difference")],
        ROLLOUTS,
    )


@rule("unconverged", "convergence of the solver", "troll/unconverged_tokens", when=projects)
def unconverged(history: History) -> Finding | None:
    """unconverged_tokens > 0: the solver stopped at its step limit."""
    count = history.most("troll/unconverged_tokens")
    return found(
        history,
        count > 0,
        lambda i: f"the solver stopped early for {plural(max(1, round(count[i])), 'token')}",
        "The solver should always converge",
        [Change("", "please report it, with the run's tokens.jsonl")],
    )
