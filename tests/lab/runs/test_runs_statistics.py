"""Intervals, verdicts, pass@k and majority vote against oracles."""

import itertools
import math
import random

import mpmath
import pytest

from troll.lab.runs.statistics import compare, interval, majority, over_problems, pass_at_k, resampled, t_quantile


def student(degrees: int, t: float) -> float:
    """P(|T| ≤ t), from the incomplete beta function."""
    x = degrees / (degrees + t * t)
    return float(1 - mpmath.betainc(degrees / 2, 0.5, 0, x, regularized=True))


@pytest.mark.parametrize("degrees", [*range(1, 21), 25, 30, 60])
def test_the_table_is_students(degrees):
    assert student(degrees, t_quantile(degrees)) == pytest.approx(0.95, abs=2e-4)


def test_between_the_entries_the_interval_is_too_wide_rather_than_too_narrow():
    assert all(student(d, t_quantile(d)) >= 0.9499 for d in (21, 24, 29, 45, 59, 61, 500))
    with pytest.raises(ValueError, match="0 degrees"):
        t_quantile(0)


def test_an_interval_computed_by_hand():
    found = interval([1.0, 2.0, 6.0])  # variance 7
    assert found.mean == 3
    assert found.high == pytest.approx(3 + 4.303 * math.sqrt(7 / 3))
    assert found.low == pytest.approx(3 - 4.303 * math.sqrt(7 / 3))
    assert (interval([2.0]).low, interval([2.0]).high) == (None, None)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = random.Random(0)
    inside = 0
    for _ in range(4000):
        found = interval([rng.gauss(1, 3) for _ in range(3)])
        inside += found.low <= 1 <= found.high
    assert inside / 4000 == pytest.approx(0.95, abs=0.012)


def test_verdicts_are_paired_by_seed():
    a, b = [0.5, 0.7, 0.9], [0.4, 0.59, 0.81]  # wide apart by seed, close in their differences
    assert interval(a).low < interval(b).high
    verdict = compare(a, b, "TROLL")
    assert verdict.says == "TROLL is better"
    assert verdict.because == "the 95 % confidence interval of the paired difference over 3 seeds excludes 0"
    assert verdict.difference.mean == pytest.approx(0.1)
    assert compare(b, a, "clip").says == "clip is worse"
    assert compare(a, b, "TROLL", higher_is_better=False).says == "TROLL is worse"
    shuffled = compare(a, [0.81, 0.4, 0.59], "TROLL")
    assert shuffled.says == "inconclusive"
    assert shuffled.because.endswith("contains 0")


def test_equal_arms_get_a_verdict_one_time_in_twenty():
    rng = random.Random(1)
    said = [compare(*([rng.gauss(0, 1) for _ in range(4)] for _ in "ab"), "x").says for _ in range(4000)]
    assert 1 - said.count("inconclusive") / 4000 == pytest.approx(0.05, abs=0.012)


def test_no_verdict_without_a_spread():
    assert compare([1.0], [0.0], "x").says == "no verdict"
    same = compare([0.3, 0.9, 0.5], [0.2, 0.8, 0.4], "x")  # always by 0.1: an interval of no width
    assert same.says == "no verdict"
    assert "same amount" in same.because
    assert compare([0.3, 0.9], [0.3, 0.9], "x").says == "inconclusive"
    with pytest.raises(ValueError, match="zip"):
        compare([1.0, 2.0], [1.0], "x")


@pytest.mark.parametrize("samples", range(1, 7))
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_one(samples):
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        judged = [i < right for i in range(samples)]
        choices = list(itertools.combinations(judged, k))
        assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_is_unbiased():
    """Its mean over all outcomes of 5 samples is the chance that 2 new ones have a right one among them."""
    p = 0.3
    expected = sum(math.comb(5, c) * p**c * (1 - p) ** (5 - c) * pass_at_k(5, c, 2) for c in range(6))
    assert expected == pytest.approx(1 - (1 - p) ** 2)


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_of_what_cannot_be(samples, right, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(samples, right, k)


def test_majority_is_the_chance_that_a_random_winner_is_right():
    """Enumerated: every way to break a tie, and then every sample that gave the answer."""
    for answers in itertools.product(["4", "5", "6", None], repeat=5):
        right = [answer == "4" for answer in answers]
        right[0] = False  # judged differently from other samples with the same answer
        counts = {a: answers.count(a) for a in answers if a is not None}
        winners = [a for a in counts if counts[a] == max(counts.values())]
        chance = [sum(r for x, r in zip(answers, right, strict=True) if x == a) / counts[a] for a in winners]
        assert majority(answers, right) == pytest.approx(sum(chance) / len(chance) if chance else 0)


def test_wilson_for_zeros_and_ones():
    """As solved from |p̂ − p| = z √(p (1 − p) / n)."""
    for ones in (0, 3, 20):
        found = over_problems([1.0] * ones + [0.0] * (20 - ones))
        ends = {found.low, found.high} - {0.0, 1.0}
        assert ends
        for p in ends:
            assert abs(found.mean - p) == pytest.approx(1.959964 * math.sqrt(p * (1 - p) / 20))
    assert over_problems([1.0] * 20).low < 0.9
    assert over_problems([1.0]).low is None


def test_the_bootstrap_is_close_to_the_normal_interval_and_always_the_same():
    rng = random.Random(2)
    values = [rng.choice([0.0, 0.25, 0.5, 1.0]) for _ in range(300)]
    found = over_problems(values)
    deviation = math.sqrt(sum((x - found.mean) ** 2 for x in values) / 300)
    assert found.high - found.mean == pytest.approx(1.96 * deviation / math.sqrt(300), rel=0.08)
    assert found.mean - found.low == pytest.approx(1.96 * deviation / math.sqrt(300), rel=0.08)
    assert found == resampled(values)
    assert resampled([0.5]).high is None
