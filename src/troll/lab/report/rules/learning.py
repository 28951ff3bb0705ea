"""Rules about the reward: whether there is anything to learn from, whether it is learnt, and whether it lasts."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from troll.lab.report.rules.history import (
    NOTE,
    Array,
    Change,
    Finding,
    History,
    Mask,
    before,
    found,
    highest,
    larger_groups,
    rule,
    scaled,
    slower,
    throughout,
    trailing,
)
from troll.lab.runs.formatting import percent, plural, score
from troll.lab.runs.statistics import finite

# ---------------------------------------------------------------------- the reward

SMOOTH = 3
"""Rollouts over which the reward is averaged: a single one has the noise of its completions."""
STALLED = 5
"""Rollouts without a new highest reward after which it has plateaued: about twice as many as are averaged."""
NEAR_TOP = 0.85
"""Of rewards between 0 and 1: above it, a plateau and an entropy near 0 mean that learning is complete."""
FALL = 1.5
"""Steps of the reward, of mean size, below its highest mean at which it is called fallen instead of plateaued."""


def smoothed(history: History) -> Array:
    """Mean reward of the last ``SMOOTH`` rollouts [R]."""
    return trailing(history.reward, SMOOTH)


def noise(history: History) -> Array:
    """Mean absolute change of the reward from rollout to rollout so far [R]; NaN before there are two changes."""
    sizes = np.abs(np.diff(history.reward))
    number = np.cumsum(np.isfinite(sizes))  # a rollout without a reward has no step
    means = np.where(number > 1, np.nancumsum(sizes) / np.maximum(number, 1), math.nan)
    return np.concatenate([np.full(min(1, history.reward.size), math.nan), means])


def stalled(history: History) -> Mask:
    """No new highest smoothed reward, by more than the noise, in the last ``STALLED`` rollouts [R]."""
    best = highest(smoothed(history))
    return np.asarray(best <= before(best, STALLED) + noise(history))


def fallen(history: History) -> Mask:
    """Smoothed reward below its highest value by more than ``FALL`` × the noise [R]."""
    now = smoothed(history)
    return np.asarray(highest(now) - now > FALL * noise(history))


def trend(history: History, i: int) -> str:
    """The end of a sentence about a reward that no longer rises: where it has plateaued, or to what it fell."""
    verb = "fell to" if fallen(history)[i] else "has plateaued at"
    return f"the reward {verb} {score(smoothed(history)[i])}"


def near_top(history: History) -> Mask:
    """Rewards within [0, 1] so far, with a median over the last ``SMOOTH`` rollouts of at least ``NEAR_TOP`` [R]."""
    reward = history.reward
    within = (highest(reward) <= 1) & (highest(-reward) <= 0)
    return np.asarray(within & (trailing(reward, SMOOTH, np.median) >= NEAR_TOP))


def held_out(history: History) -> Array:
    """The latest held-out reward at each rollout [R]; NaN before the first evaluation after step 0."""
    values = np.full(len(history), math.nan)
    ends = [history.ends(i) for i in range(len(history))]
    for line in history.evaluations:
        i = int(np.searchsorted(ends, line["step"]))
        if line["step"] > 0 and i < len(ends) and (value := finite(line.get("eval_reward"))) is not None:
            values[i:] = value
    return values


def held_out_rise(history: History) -> Array:
    """Highest held-out reward so far minus the one before training [R]; NaN without that evaluation."""
    start = [finite(line.get("eval_reward")) for line in history.evaluations[:1] if line["step"] == 0]
    return highest(held_out(history)) - (math.nan if start in ([], [None]) else float(start[0] or 0.0))


# ---------------------------------------------------------------------- rules

COLLAPSED, COLLAPSED_ROLLOUTS = 0.5, 5
"""Share of its highest mean over so many rollouts that the reward loses: runs that wander lose less, or come back."""
FALLEN, RISEN = 3.0, 1.5
"""Steps of the reward, of mean size, that a fall or a rise must exceed to be no noise. Such a step is 1.13 standard
deviations of pure noise, which falls by two from the highest to the lowest mean of five in 100 rollouts, and rises by
one from its first rollout to its highest mean of three."""
SUDDEN, SUDDEN_ROLLOUTS = 4.0, 2
"""The same for a fall that the mean of five does not see yet: so many steps, on each of the last rollouts. In pure
noise, to be four steps below the highest mean twice in a row is as rare as three are for the mean of five."""
ENTROPY_LEFT = 0.1
"""Of the first rollout's. Good runs get below it as well, by reward near the top: the reward decides."""
SAME_REWARD = 0.9
"""Share of groups whose completions all have the same reward: one group in ten teaches."""
LEFT = 0.03
"""Share of groups that are alike and below 1, above which nothing is called solved: one in thirty. Below are rounding
and the odd problem. It is a lower bound by arithmetic, no guess at what comes."""
NO_BOUND = 0.05
"""In place of the bound in runs without one, a clip's too: a fifth of it is hardly a move, twenty times it is far."""
FLAT_ROLLOUTS = 10
"""Before a reward that has not risen is called flat. The slowest good runs show theirs after four."""
HELD_OUT, HELD_OUT_TIMES = 0.75, 2
"""Share of the sampled reward, on as many evaluations in a row: one alone has the noise of its problems."""
LARGER = "rewards in larger groups are less often equal"


@rule("reward_collapse", "collapse of the reward", "reward", rollouts=COLLAPSED_ROLLOUTS)
def reward_collapse(history: History) -> Finding | None:
    """Mean reward of ``COLLAPSED_ROLLOUTS`` down by ``COLLAPSED`` of its highest, beyond the noise; or each of the last
    ``SUDDEN_ROLLOUTS`` rewards, so that a fall at the end of a run is seen.

    Measured from 0 where no reward was negative, else from the first rollouts.
    """
    now, last = trailing(history.reward, COLLAPSED_ROLLOUTS), trailing(history.reward, SUDDEN_ROLLOUTS, np.max)
    best = highest(now)
    start = now[np.isfinite(now)][:1]
    base = np.where(highest(-history.reward) <= 0, 0.0, start[0] if start.size else math.nan)

    def fallen(to: Array, steps: float) -> Mask:
        return (best - to > COLLAPSED * (best - base)) & (best - to > steps * noise(history)) & (best > base)

    slowly, suddenly = fallen(now, FALLEN), fallen(last, SUDDEN)
    holds = slowly | suddenly

    def seen(i: int) -> str:
        text = f"the reward fell from {score(best[i])} to"
        if slowly[i]:
            return f"{text} {score(now[i])}, each over {COLLAPSED_ROLLOUTS} rollouts"
        return f"{text} at most {score(last[i])} on {SUDDEN_ROLLOUTS} rollouts"

    changes: list[Change | None] = [slower(history, "a high learning rate is the most common cause", 1 / 3)]
    if history.region != "troll":
        changes.append(Change("--trust_region troll", "bounds the KL of every token"))
    elif not history.setting("regression_coef"):
        changes.append(Change("--regression_coef 1", "pulls the network towards its projection"))
    else:
        changes.append(scaled(history, "regression_coef", 2, "pulls the network more strongly towards its projection"))
    return found(
        history,
        holds,
        seen,
        "The policy has lost what it had learned",
        changes,
        SUDDEN_ROLLOUTS if suddenly[holds][:1].any() else COLLAPSED_ROLLOUTS,
    )


@rule("entropy_collapse", "collapse of the entropy", ("entropy", "troll/entropy"), "reward", rollouts=SMOOTH + STALLED)
def entropy_collapse(history: History) -> Finding | None:
    """Entropy below ``ENTROPY_LEFT`` of the first rollout's, a reward that no longer rises and is not near the top."""
    entropy = history.entropy
    start = entropy[np.isfinite(entropy)][:1]
    first = float(start[0]) if start.size else math.nan
    holds = throughout(entropy < ENTROPY_LEFT * first, SMOOTH) & stalled(history) & ~near_top(history)
    return found(
        history,
        holds,
        lambda i: f"entropy fell from {first:.3g} to {entropy[i]:.2g}, and {trend(history, i)}",
        "The completions of a group are nearly identical, so there is little left to learn from",
        [
            slower(history, "smaller updates keep the entropy longer", 1 / 3),
            Change("--entropy_coef 0.01", "rewards diverse completions"),
            Change("--beta 0.01", "keeps the policy close to the initial model"),
        ],
        SMOOTH,
    )


@rule("no_signal", "groups with equal rewards", "frac_reward_zero_std", "reward", rollouts=SMOOTH)
def no_signal(history: History) -> Finding | None:
    """frac_reward_zero_std > ``SAME_REWARD`` on ``SMOOTH`` rollouts, with a reward that is not near the top."""
    larger = larger_groups(history, LARGER)
    easier = Change("", "easier problems or a larger model; `troll eval` measures pass@8 before training")
    means = "Such groups have zero advantage, so almost nothing is learned"
    holds, spoilt = _alike(history) & ~near_top(history), _if_spoilt(history)
    changes = [spoilt, larger] if spoilt else [larger, easier]
    return found(history, holds, _alike_seen(history), means, changes, SMOOTH)


@rule("settled", "convergence before all problems are solved", "frac_reward_zero_std", "reward", rollouts=SMOOTH)
def settled(history: History) -> Finding | None:
    """The same with a reward near the top, where more than ``LEFT`` of the groups are alike and below 1."""
    left, alike = _left(history), _alike_seen(history)
    return found(
        history,
        _alike(history) & near_top(history) & (left > LEFT),
        # A lower bound is rounded down; 0.95 − 0.9 is 5 %.
        lambda i: (
            f"{alike(i)}, so in at least {math.floor(100 * left[i] + 1e-9)}\N{NO-BREAK SPACE}% of the groups all are "
            f"below 1, if no reward is negative"
        ),
        "Almost nothing more is learned, and not all problems are solved: those groups fail every time",
        [
            larger_groups(history, LARGER),
            slower(history, "the policy converged before it found the rest", 1 / 3),
            Change("--entropy_coef 0.01", "rewards diverse completions"),
            Change("", "`troll eval` measures pass@8, which shows whether more samples find the missing solutions"),
        ],
        SMOOTH,
        NOTE,
    )


@rule("solved", "problems that are all solved", "frac_reward_zero_std", "reward", rollouts=SMOOTH)
def solved(history: History) -> Finding | None:
    """The same where no more than ``LEFT`` are known to be: nearly all answers are right."""
    means = "Nearly all training problems are solved, and little is left to learn from them"
    harder = Change("", "harder problems, or stop here; `troll eval` measures what was gained")
    holds = _alike(history) & near_top(history) & (_left(history) <= LEFT)
    return found(history, holds, _alike_seen(history), means, [harder], SMOOTH, NOTE)


def _alike(history: History) -> Mask:
    return throughout(history.first("frac_reward_zero_std") > SAME_REWARD, SMOOTH)


def _same(history: History) -> Array:
    return trailing(history.first("frac_reward_zero_std"), SMOOTH)


def _left(history: History) -> Array:
    """At least this share of the groups of ``SMOOTH`` rollouts is alike and below 1, if no reward is negative [R].

    The mean reward is no less than the share of groups whose rewards are all 1 or more: the alike ones beyond it are
    below.
    """
    return _same(history) - smoothed(history)


def _alike_seen(history: History) -> Callable[[int], str]:
    same, now = _same(history), smoothed(history)
    return lambda i: (
        f"in {percent(same[i])} of the groups all completions have the same reward; the mean is {score(now[i])}"
    )


@rule("flat", "reward that does not rise", "reward", rollouts=FLAT_ROLLOUTS)
def flat(history: History) -> Finding | None:
    """After ``FLAT_ROLLOUTS`` neither the smoothed nor the held-out reward was above its start, beyond the noise."""
    best = highest(smoothed(history))
    enough = np.arange(len(history)) >= FLAT_ROLLOUTS - 1
    start = min([math.inf, *history.reward[:1], *best[SMOOTH - 1 : SMOOTH]])  # less if learning began at once
    rise = np.fmax(best - start, held_out_rise(history))
    holds = enough & (rise <= RISEN * noise(history)) & ~near_top(history)
    return found(
        history,
        holds,
        lambda i: (
            f"the reward was {score(history.reward[0])} in the first of {plural(i + 1, 'rollout')}, and its mean over "
            f"{SMOOTH} at most {score(best[i])}"
        ),
        "It has not risen beyond its noise",
        _instead_of_flat(history),
        FLAT_ROLLOUTS,
    )


def _if_spoilt(history: History) -> Change | None:
    """A lower rate where the reward was twice as high at the start: then it is not the problems that are too hard."""
    now = smoothed(history)
    if not len(now) or not now[-1] < history.reward[0] / 2:
        return None
    return slower(
        history, "the reward was more than twice as high at the start: large updates have damaged the policy", 1 / 3
    )


def _typical(values: Array) -> float:
    return float(np.median(values[np.isfinite(values)])) if np.isfinite(values).any() else math.nan


def _instead_of_flat(history: History) -> list[Change | None]:
    """By how far the network moved: too little, too much, or neither."""
    bound = (history.setting("kl_bound") if history.region == "troll" else None) or NO_BOUND
    typical, mean = (_typical(history.last(f"troll/kl_before/{name}")) for name in ("p99", "mean"))
    easier = Change("", "easier problems or a larger model; `troll eval` measures pass@8 before training")
    spoilt = _if_spoilt(history)
    if spoilt is not None:
        return [spoilt]
    if math.isnan(typical):
        if mean > bound:  # says the same as p99 > 20 bounds in 456 of the 472 stored runs that have both
            return [slower(history, f"the mean token KL is {mean / bound:.0f} times the bound", 1 / 3), easier]
        unknown = "the log has no troll/kl_before/p99, so it is unknown whether the updates are too small or too large"
        return [Change("", unknown), easier]
    if typical < bound / 5:
        return [scaled(history, "learning_rate", 3, "updates are very small"), easier]
    if typical > 20 * bound:
        return [slower(history, "updates are large and nothing is learned", 1 / 3), easier]
    return [larger_groups(history, "less noise in the advantages"), easier]


@rule(
    "held_out_gap", "gap to the held-out reward", "eval_reward", "reward", rollouts=SMOOTH, evaluations=HELD_OUT_TIMES
)
def held_out_gap(history: History) -> Finding | None:
    """Held-out reward < ``HELD_OUT`` × sampled reward on ``HELD_OUT_TIMES`` evaluations in a row after the first."""
    now, values = smoothed(history), held_out(history)
    at = [line["step"] for line in history.evaluations if line.get("eval_reward") is not None and line["step"] > 0]
    ends = [history.ends(i) for i in range(len(history))]
    low = (now > 0) & (values < HELD_OUT * now)
    low_then = [bool(low[i]) for i in np.searchsorted(ends, at) if i < len(low)]
    count = np.searchsorted(at, ends, side="right")  # evaluations up to each rollout
    holds = np.array([n >= HELD_OUT_TIMES and all(low_then[n - HELD_OUT_TIMES : n]) for n in count], dtype=np.bool_)
    return found(
        history,
        holds,
        lambda i: f"held-out reward {score(values[i])}, sampled reward {score(now[i])}",
        "The policy does not generalize to the held-out problems",
        [
            Change("", "more training problems (--train_size, --data), of the kind of the held-out ones"),
            Change("--beta 0.01", "keeps the policy close to the initial model"),
        ],
    )
