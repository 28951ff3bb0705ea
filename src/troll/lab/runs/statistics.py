"""Means over seeds and problems with 95 % confidence intervals, and paired comparisons of two arms.

Seeds are few: their interval is Student's, and arms are compared by paired differences, since runs with the same seed
start from the same model, problems and order. Problems are many: their interval is Wilson's where every problem scores
0 or 1, otherwise a bootstrap over problems with a fixed seed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T_MORE = ((16, 2.120), (17, 2.110), (18, 2.101), (19, 2.093), (20, 2.086), (25, 2.060), (30, 2.042), (60, 2.000))
_Z = 1.959964
_RESAMPLES = 2000


def finite(value: Any) -> float | None:
    """``value`` if it is a finite number, otherwise None."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def column(lines: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """The finite values of a key, of the lines that have one."""
    return [x for line in lines if (x := finite(line.get(key))) is not None]


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of no values."""
    return math.fsum(values) / len(values) if values else None


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval; a single value has no interval."""

    mean: float
    low: float | None
    high: float | None


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's distribution; between the entries of the table, the larger one.

    >>> t_quantile(2), t_quantile(27), t_quantile(1000)
    (4.303, 2.06, 2.0)
    """
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom")
    if degrees <= len(_T):
        return _T[degrees - 1]
    return [value for least, value in _T_MORE if least <= degrees][-1]


def interval(values: Sequence[float]) -> Interval:
    """Mean over seeds with Student's 95 % confidence interval.

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
class PairVerdict:
    """The paired comparison of two arms."""

    difference: Interval
    says: str
    """"NAME is better", "NAME is worse", "inconclusive", or "no verdict"."""
    because: str


def compare(a: Sequence[float], b: Sequence[float], name: str, higher_is_better: bool = True) -> PairVerdict:
    """Whether the arm ``name``, which reached ``a``, is better than the one that reached ``b``, paired by seed.

    An interval of the difference that contains 0 is inconclusive: it shows neither a difference nor equality.
    """
    gaps = [x - y for x, y in zip(a, b, strict=True)]
    difference = interval(gaps)
    if difference.low is None or difference.high is None:
        return PairVerdict(difference, "no verdict", "one seed has no interval: run at least two, better three or more")
    size = max(abs(x) for x in [*a, *b])
    if difference.mean and _deviation(gaps, difference.mean) <= 1e-9 * size:
        because = f"all {len(gaps)} seeds differ by the same amount, so their spread is unknown"
        return PairVerdict(difference, "no verdict", because)
    contains_zero = difference.low <= 0 <= difference.high
    verb = "contains" if contains_zero else "excludes"
    because = f"the 95 % confidence interval of the paired difference over {len(gaps)} seeds {verb} 0"
    if contains_zero:
        return PairVerdict(difference, "inconclusive", because)
    better = (difference.mean > 0) == higher_is_better
    return PairVerdict(difference, f"{name} is {'better' if better else 'worse'}", because)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The probability that ``k`` of the samples, drawn without replacement, contain a right one: 1 − C(n−c,k)/C(n,k).

    An unbiased estimate of the probability that at least one of k new samples is right.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} with {right} of {samples} samples right")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """1 if the most frequent answer is right, 0 if not; of several equally frequent answers, the share that is right.

    A sample without an answer has no vote. An answer whose samples are scored differently counts by the share of them
    that is right.

    >>> majority(["4", "4", "5", None], [True, True, False, False]), majority(["4", "5"], [True, False])
    (1.0, 0.5)
    """
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer, good in zip(answers, right, strict=True):
        if answer is not None:
            votes[answer].append(good)
    most = max(map(len, votes.values()), default=0)
    winners = [sum(scores) / most for scores in votes.values() if len(scores) == most]
    return math.fsum(winners) / len(winners) if winners else 0.0


def over_problems(values: Sequence[float]) -> Interval:
    """Mean over problems with its 95 % confidence interval: Wilson's for values 0 and 1, otherwise a bootstrap."""
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
    """Mean with the 95 % percentile interval of a bootstrap; the values may be differences."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.size < 2:
        return Interval(float(numbers.mean()), None, None)
    rng = np.random.default_rng(0)
    means = [numbers[rng.integers(numbers.size, size=numbers.size)].mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(numbers.mean()), float(low), float(high))
