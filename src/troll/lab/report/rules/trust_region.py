"""Rules about the trust region: whether it acts, how much, and how far the network goes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from troll.lab.report.rules.health import projects
from troll.lab.report.rules.history import (
    NOTE,
    WARNING,
    Array,
    Change,
    Finding,
    History,
    Mask,
    fewer_updates,
    found,
    highest,
    rule,
    scaled,
    slower,
    throughout,
    trailing,
)
from troll.lab.report.rules.learning import SMOOTH, STALLED, stalled, trend
from troll.lab.runs.folder import Line
from troll.lab.runs.formatting import number, percent, plural
from troll.lab.runs.statistics import finite

ROLLOUTS = 3
"""In a row, before anything is said: the first rollout of a run often goes far, as Adam's first steps are large."""
KEPT_MASS_FLOOR = 0.999
"""Below it the floor's KL is mostly its own: at 0.967 it measures 0.249 where the truth is 0.045 (docs/metrics.md)."""
KEPT_MASS_BUCKET = 0.9
"""The bucket never exceeds the true KL, and misses 11 % of the tokens outside the region at 0.901 (docs/metrics.md)."""
PROJECTED = 0.1
"""Good runs project a few percent; above a tenth, most of what an update does is taken back."""
CLIPPED, CLIPPED_SEQUENCES = 0.2, 0.5
"""In good runs 1 to 4 % of the tokens are clipped; GSPO's clip, a thousandth as wide, takes 20 to 30 % in its good."""
IDLE_ROLLOUTS = 5
"""Without a single token projected, or clipped: chance does not do that where the bound is near."""
FAR = 20.0
"""p99 of the KL in multiples of the bound. Good runs reach 3 to 10; without the regression term it is 30."""
FAR_NATS = 2.0
"""The same for runs without a bound. Runs that ended well had 0.2 to 1.7 on average, runs that fell 1.8 to 8."""
OUTWEIGHS = 0.1
"""Share of the regression term in the sizes of both terms of the loss, whose other one has the noise of the advantages.
In the embedded default it is at most 0.02 with α = 0.1 and 0.06 with 1; with 10, whose reward wanders, up to 0.36."""
WEAK = 0.1
"""The smallest α that is known to help: where that outweighs the rest, it is something else that is wrong."""
WIDE_BOUND = 0.2
"""Where a bound sets the pace, the one to try, and the default: at rates of 3e-5 and 1e-4 it ended higher than 0.05, on
both seeds."""


def _may_be_idle(history: History) -> bool:
    """Whether a trust region could have acted, and no log line shows that it did."""
    acted = history.most(_SHARE.get(history.region, "")) > 0
    return history.region != "none" and history.updates != 1 and not acted.any()


_SHARE = {"troll": "troll/projected_fraction", "clip": "clip_ratio/region_mean"}


def _pulls(history: History) -> bool:
    return projects(history) and (history.setting("regression_coef") or 0.0) > WEAK


@rule("bound_exceeded", "KL above the bound", "troll/kl_after/max", when=lambda h: h.bound is not None)
def bound_exceeded(history: History) -> Finding | None:
    """kl_after/max > kl_bound, both in single precision, in which the KL is computed."""
    largest, bound = history.most("troll/kl_after/max"), history.bound
    return found(
        history,
        largest.astype(np.float32) > np.float32(math.inf if bound is None else bound),
        lambda i: f"a projected token has a KL of {largest[i]:.6g}, above the bound of {number(bound or 0.0)}",
        "The projection must never exceed the bound",
        [Change("", "please report it, with the run's tokens.jsonl")],
    )


@rule("one_update", "one update per rollout")
def one_update(history: History) -> Finding | None:
    """updates per rollout = 1: proposal and old policy are the same, so nothing can be projected or clipped."""
    once = history.setting("updates_per_generation") == 1 and history.region != "none"
    means = "The proposal equals the old policy at every update, so the trust region never acts"
    change = Change("--updates_per_generation 8", "the trust region acts from the second update on each rollout")
    holds = np.full(len(history), once)
    return found(history, holds, lambda i: "each rollout is used for one update", means, [change])


@rule(
    "projected",
    "share of projected tokens",
    "troll/projected_fraction",
    rollouts=ROLLOUTS,
    when=lambda h: projects(h) and h.updates != 1,
)
def projected(history: History) -> Finding | None:
    """projected_fraction > ``PROJECTED`` on each of ``ROLLOUTS`` rollouts."""
    share = history.mean("troll/projected_fraction")
    bound, distance = history.setting("kl_bound") or math.inf, history.mean("troll/kl_before/mean")
    holds = throughout(share > PROJECTED, ROLLOUTS)
    last = np.flatnonzero(holds)[-1:]
    average = _recent(distance, int(last[0])) if last.size else math.nan
    far_on_average = average > max(bound, WIDE_BOUND)
    wider = Change(f"--kl_bound {WIDE_BOUND:g}", "a narrow bound slows learning; 0.2 learned more in the studies")
    changes = [
        wider if bound < WIDE_BOUND and not far_on_average else None,
        slower(history, f"the mean token KL is {number(average)}, above the bound of {number(bound)}", 1 / 3)
        if far_on_average
        else slower(history, "smaller updates stay inside the region"),
        fewer_updates(history, "the later updates on a rollout are the ones that leave the region"),
    ]
    return found(
        history,
        holds,
        lambda i: f"{percent(_recent(share, i))} of the tokens were projected, over {ROLLOUTS} rollouts",
        "Updates leave the trust region, and the projection undoes much of each",
        changes,
        ROLLOUTS,
    )


@rule(
    "idle",
    "trust region that never acts",
    ("troll/projected_fraction", "clip_ratio/region_mean"),
    rollouts=IDLE_ROLLOUTS,
    when=_may_be_idle,
)
def idle(history: History) -> Finding | None:
    """Nothing was projected, or clipped, on any of at least ``IDLE_ROLLOUTS`` rollouts of several updates each."""
    acted, reach = highest(history.most(_SHARE.get(history.region, ""))), highest(history.most("troll/kl_before/max"))
    several = history.setting("updates_per_generation") != 1
    enough = np.arange(len(history)) >= IDLE_ROLLOUTS - 1

    def seen(i: int) -> str:
        verb = "projected" if history.region == "troll" else "clipped"
        far = f"; the largest token KL was {number(reach[i])}" if math.isfinite(reach[i]) else ""
        bound = history.setting("kl_bound")
        beside = f", the bound is {number(bound)}" if far and history.region == "troll" and bound else ""
        return f"no token was {verb} in {plural(i + 1, 'rollout')}{far}{beside}"

    means = "The run is the same as without a trust region: fine if the reward rises, too slow if it does not"
    changes = [scaled(history, "learning_rate", 3, "updates use little of the region")]
    return found(history, enough & several & (acted == 0), seen, means, changes, IDLE_ROLLOUTS, NOTE)


@rule(
    "far_outside",
    "distance from the old policy",
    "troll/kl_before/p99",
    rollouts=ROLLOUTS,
    when=lambda h: h.updates != 1,
)
def far(history: History) -> Finding | None:
    """p99 of KL(π̃ ‖ π_old) in the last update > ``FAR`` bounds, or ``FAR_NATS`` without one, on ``ROLLOUTS``."""
    reach, after = history.last("troll/kl_before/p99"), highest(history.most("troll/kl_after/max"))
    bound = history.setting("kl_bound") if history.region == "troll" else None
    limit = FAR_NATS if bound is None else FAR * bound

    def seen(i: int) -> str:
        text = f"the 99th percentile of the token KL is {number(_recent(reach, i))}"
        if bound is None:
            return f"{text}, without a bound"
        kept = f", while the projected policy stays within {number(after[i])}" if math.isfinite(after[i]) else ""
        return f"{text}, {_recent(reach, i) / bound:.0f} times the bound{kept}"

    if bound is None:
        means = "The network moves far from the old policy, as in many runs that collapsed and in some good ones"
        changes: list[Change | None] = [slower(history, "smaller updates")]
        changes += [Change("--trust_region troll", "bounds the KL of every token")]
    else:
        means = "The network is far outside the trust region; only its projection is inside"
        coef = history.setting("regression_coef") or 0.0
        more = 1.0 if coef < 1 else 2 * coef
        changes = [Change(f"--regression_coef {more:g}", "pulls the network towards its projection")]
        changes += [slower(history, "smaller updates")]
    level = NOTE if bound is None else WARNING
    return found(history, throughout(reach > limit, ROLLOUTS), seen, means, changes, ROLLOUTS, level)


@rule(
    "regression_outweighs",
    "weight of the regression term",
    "loss",
    "troll/regression",
    "reward",
    rollouts=SMOOTH + STALLED,
    when=_pulls,
)
def regression(history: History) -> Finding | None:
    """α · regression / (α · regression + |loss − α · regression|) > ``OUTWEIGHS`` while the reward rests."""
    coef = history.setting("regression_coef") or 0.0
    pull, rest = np.array([_terms(lines, coef) for lines in history.rollouts], dtype=np.float64).reshape(-1, 2).T
    share = np.divide(pull, pull + rest, out=np.zeros_like(pull), where=pull + rest > 0)
    typical = trailing(share, ROLLOUTS, np.median)  # a rollout without advantages has nothing but the pull
    return found(
        history,
        (coef > WEAK) & (typical > OUTWEIGHS) & stalled(history),
        lambda i: f"{percent(typical[i])} of the loss is the regression term, and {trend(history, i)}",
        "The pull towards the projection outweighs the policy gradient",
        [scaled(history, "regression_coef", 0.1, "a weaker pull learns faster with few completions per update")],
        ROLLOUTS,
    )


@rule(
    "clipped",
    "share of clipped tokens",
    "clip_ratio/region_mean",
    rollouts=ROLLOUTS,
    when=lambda h: h.region == "clip" and h.updates != 1,
)
def clipped(history: History) -> Finding | None:
    """clip_ratio/region_mean > ``CLIPPED`` (ratios of sequences: ``CLIPPED_SEQUENCES``) on ``ROLLOUTS`` rollouts."""
    share = history.mean("clip_ratio/region_mean")
    by_sequence = history.settings.get("importance_sampling_level") == "sequence"
    return found(
        history,
        throughout(share > (CLIPPED_SEQUENCES if by_sequence else CLIPPED), ROLLOUTS),
        lambda i: f"the clip removed the gradient of {percent(_recent(share, i))} of the tokens",
        "Much of each rollout has no gradient in its later updates",
        [
            slower(history, "ratios stay inside the clip"),
            fewer_updates(history, "the later updates on a rollout are the ones that are clipped"),
            Change("--trust_region troll", "keeps the gradient along the boundary"),
        ],
        ROLLOUTS,
    )


@rule("kept_mass", "probability of the kept tokens", "troll/kept_mass/old", rollouts=ROLLOUTS, when=projects)
def kept_mass(history: History) -> Finding | None:
    """kept_mass/old < ``KEPT_MASS_FLOOR`` with the floor, < ``KEPT_MASS_BUCKET`` with the bucket, on ``ROLLOUTS``."""
    mass, floor = history.mean("troll/kept_mass/old"), history.settings.get("tail") == "floor"
    low: Mask = mass < (KEPT_MASS_FLOOR if floor else KEPT_MASS_BUCKET)
    if history.region != "troll":
        low &= False
    more = scaled(history, "max_support", 4, "more of the probability is kept, for more memory")
    bucket = Change("--tail bucket", "never exceeds the true KL")
    means = (
        "tail=floor then overestimates the KL and projects tokens that are inside the region"
        if floor
        else "tail=bucket sees no change among the tokens that are not kept, and misses some that leave the region"
    )
    return found(
        history,
        throughout(low, ROLLOUTS),
        lambda i: f"the kept tokens have {_recent(mass, i):.4f} of the probability",
        means,
        [bucket, more] if floor else [more],
        ROLLOUTS,
        WARNING if floor else NOTE,
    )


@rule("lost_mass", "probability on tokens that the old policy excludes", "troll/lost_mass", when=projects)
def lost_mass(history: History) -> Finding | None:
    """lost_mass > 0: the old policy was scored with truncated sampling."""
    lost = history.most("troll/lost_mass")
    return found(
        history,
        lost > 0,
        lambda i: f"{percent(lost[i])} of the proposal's probability is on tokens that the old policy excludes",
        "The old policy was scored with top-k, top-p or min-p, and these tokens have no KL",
        [Change("--top_k 0 --top_p 1.0", "scores and samples from all tokens")],
    )


def _recent(y: Array, i: int) -> float:
    return float(np.mean(y[max(0, i - ROLLOUTS + 1) : i + 1]))


def _terms(lines: Sequence[Line], coef: float) -> tuple[float, float]:
    """Mean size of the regression term, α as it was where it adapts, and of the rest of the loss; NaN if not logged."""
    pulls, rests = [], []
    for line in lines:
        loss, kl = finite(line.get("loss")), finite(line.get("troll/regression"))
        if loss is not None and kl is not None:
            adapted = finite(line.get("troll/regression_coef"))
            pulls.append((coef if adapted is None else adapted) * kl)
            rests.append(abs(loss - pulls[-1]))
    return (math.fsum(pulls) / len(pulls), math.fsum(rests) / len(rests)) if pulls else (math.nan, math.nan)
