"""What the reward does: smoothed, its noise, whether it still rises, and on held-out problems."""

from __future__ import annotations

import math

import numpy as np

from troll.lab.report.rules.history import Array, History, Mask, before, finite, highest, trailing

SMOOTH = 3
"""Rollouts that a reward is averaged over: one alone has the noise of its completions."""
STALLED = 5
"""Rollouts without a new highest reward, after which it no longer rises: twice as many as are averaged."""
NEAR_TOP = 0.85
"""Of rewards between 0 and 1: above, a reward that no longer rises and an entropy near 0 are the end of learning."""


def smoothed(history: History) -> Array:
    """Mean reward of the last ``SMOOTH`` rollouts [R]."""
    return trailing(history.reward, SMOOTH)


def noise(history: History) -> Array:
    """Mean size of a step of the reward from rollout to rollout, up to each [R]; NaN before there are two steps."""
    sizes = np.abs(np.diff(history.reward))
    means = np.cumsum(sizes) / np.arange(1, sizes.size + 1)
    return np.concatenate([np.full(min(2, history.reward.size), math.nan), means[1:]])


def stalled(history: History) -> Mask:
    """No new highest smoothed reward, by more than the noise, in the last ``STALLED`` rollouts [R]."""
    best = highest(smoothed(history))
    return np.asarray(best <= before(best, STALLED) + noise(history))


def near_top(history: History) -> Mask:
    """Rewards that were between 0 and 1 so far, and are now near 1, but for one rollout in three at most [R]."""
    reward = history.reward
    within = (highest(reward) <= 1) & (highest(-reward) <= 0)
    return np.asarray(within & (trailing(reward, SMOOTH, np.median) >= NEAR_TOP))


def held_out(history: History) -> Array:
    """The held-out reward last measured up to each rollout [R]; NaN before the first evaluation after step 0."""
    values = np.full(len(history), math.nan)
    ends = [history.ends(i) for i in range(len(history))]
    for line in history.evaluations:
        i = int(np.searchsorted(ends, line["step"]))
        if line["step"] > 0 and i < len(ends) and (value := finite(line.get("eval_reward"))) is not None:
            values[i:] = value
    return values


def held_out_rise(history: History) -> Array:
    """Above the evaluation before training, at its highest [R]; NaN where there was none."""
    start = [finite(line.get("eval_reward")) for line in history.evaluations[:1] if line["step"] == 0]
    return highest(held_out(history)) - (math.nan if start in ([], [None]) else float(start[0] or 0.0))
