"""What may be said from few numbers: means over seeds and problems with 95 % intervals, and whether two arms differ.

Seeds are few: their interval is Student's, and arms are compared seed by seed, since runs with the same seed begin with
the same model, problems and order. Problems are many: their interval is Wilson's where every problem counts 0 or 1, and
else from resampling the problems, with the same resamples every time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T_MORE = ((16, 2.120), (17, 2.110), (18, 2.101), (19, 2.093), (20, 2.086), (25, 2.060), (30, 2.042), (60, 2.000))
_Z = 1.959964
_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A mean and the 95 % interval around it; without one if there is a single value."""

    mean: float
    low: float | None
    high: float | None


def t_quantile(degrees: int) -> float:
    """The 97.5 % point of Student's distribution, from above between the entries of the table.

    >>> t_quantile(2), t_quantile(27), t_quantile(1000)
    (4.303, 2.06, 2.0)
    """
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom")
    if degrees <= len(_T):
        return _T[degrees - 1]
    return [value for least, value in _T_MORE if least <= degrees][-1]


def interval(values: Sequence[float]) -> Interval:
    """Mean of the seeds, with Student's 95 % interval.

    >>> interval([0.5, 1.0])
    Interval(mean=0.75, low=-2.4265, high=3.9265)
    """
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return Interval(mean, None, None)
    half = t_quantile(n - 1) * _deviation(values, mean) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def _deviation(values: Sequence[float], mean: float) -> float:
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))


@dataclass(frozen=True)
class Verdict:
    """What the seeds say about two arms."""

    difference: Interval
    says: str
    """"NAME is better", "NAME is worse", "no difference", or "no verdict"."""
    because: str


def compare(a: Sequence[float], b: Sequence[float], name: str, higher_is_better: bool = True) -> Verdict:
    """Whether the arm of this name, which reached ``a``, is better than the one that reached ``b``, seed by seed."""
    gaps = [x - y for x, y in zip(a, b, strict=True)]
    difference = interval(gaps)
    if difference.low is None or difference.high is None:
        return Verdict(difference, "no verdict", "one seed has no interval: give at least two, better three or more")
    size = max(abs(x) for x in [*a, *b])
    if difference.mean and _deviation(gaps, difference.mean) <= 1e-9 * size:
        because = f"all {len(gaps)} seeds differ by the same amount, so that nothing is known about their spread"
        return Verdict(difference, "no verdict", because)
    contains_zero = difference.low <= 0 <= difference.high
    has_it = "contains" if contains_zero else "leaves out"
    because = f"the 95 % interval of the difference, paired over {len(gaps)} seeds, {has_it} 0"
    if contains_zero:
        return Verdict(difference, "no difference", because)
    better = (difference.mean > 0) == higher_is_better
    return Verdict(difference, f"{name} is {'better' if better else 'worse'}", because)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that among ``k`` of the samples, each taken once at most, one is right: 1 − C(n−c, k) / C(n, k).

    Over independent samples its mean is the chance that of k new ones at least one is right, whatever their number.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} with {right} of {samples} samples right")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Whether the answer most samples give is right; between answers with as many votes, the share that is.

    A sample without an answer has no vote. Where samples with the same answer are judged differently, it counts by the
    share of them that is right.

    >>> majority(["4", "4", "5", None], [True, True, False, False]), majority(["4", "5"], [True, False])
    (1.0, 0.5)
    """
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer, good in zip(answers, right, strict=True):
        if answer is not None:
            votes[answer].append(good)
    most = max(map(len, votes.values()), default=0)
    winners = [sum(judged) / most for judged in votes.values() if len(judged) == most]
    return math.fsum(winners) / len(winners) if winners else 0.0


def over_problems(values: Sequence[float]) -> Interval:
    """Mean over problems with its 95 % interval: Wilson's for values that are 0 or 1, else from resampling."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return Interval(mean, None, None)
    if all(x in (0, 1) for x in values):
        centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
        half = _Z / (1 + _Z**2 / n) * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
        return Interval(mean, max(0.0, centre - half), min(1.0, centre + half))
    return resampled(values)


def resampled(values: Sequence[float]) -> Interval:
    """Mean with the 95 % percentile interval of its bootstrap; the values may be differences."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.size < 2:
        return Interval(float(numbers.mean()), None, None)
    rng = np.random.default_rng(0)
    means = [numbers[rng.integers(numbers.size, size=numbers.size)].mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(numbers.mean()), float(low), float(high))
