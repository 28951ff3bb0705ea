"""Measures of a run by hand, pairing by seed, bootstraps on cases whose answer is known, and best against best."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from studies_cases import Line, cell, flat, line, scores

RISE_AND_FALL = [0.0, 0.3, 0.6, 0.9, 0.6, 0.3, 0.0, 0.6]


def test_the_end_is_the_last_quarter_and_the_mean_is_everything():
    run = line(RISE_AND_FALL)
    assert scores.planned(run) == 8
    assert scores.end(run) == pytest.approx((0.0 + 0.6) / 2)
    assert scores.mean(run) == pytest.approx(3.3 / 8)


@pytest.mark.parametrize(("rollouts", "last"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (20, 5)])
def test_a_quarter_is_rounded_up(rollouts, last):
    assert scores.end(line([0.0] * (rollouts - last) + [1.0] * last)) == 1.0
    if rollouts > last:
        assert scores.end(line([0.0] * (rollouts - last + 1) + [1.0] * (last - 1))) < 1.0


def test_updates_that_do_not_fill_a_rollout_are_one_more():
    run = line([0.1, 0.2, 0.4])
    run["flags"] |= {"max_steps": 9, "updates_per_generation": 4}
    assert scores.planned(run) == 3
    assert scores.end(run) == 0.4


def test_rollouts_that_a_failed_run_did_not_make_count_nothing():
    run = line([0.4, 0.8, 0.8, 0.8], planned=8, status="failed")
    assert scores.rewards(run) == [0.4, 0.8, 0.8, 0.8, 0, 0, 0, 0]
    assert scores.end(run) == 0
    assert scores.mean(run) == pytest.approx(2.8 / 8)
    assert scores.drop(run) == pytest.approx(0.8)  # from 0.8 to nothing at all
    late = line([0.4] * 7, planned=8, status="failed")
    assert scores.end(late) == pytest.approx(0.2)


def test_a_run_that_failed_at_once_has_a_score_too():
    run = line([], planned=4, status="failed")
    run["rollouts"] = {}
    assert (scores.end(run), scores.mean(run), scores.drop(run)) == (0, 0, 0)
    assert scores.eval_reward(run) is scores.kl_max(run) is scores.entropy(run) is None


def test_the_drop_is_the_largest_fall_of_a_mean_of_three():
    # means of three: 0.3, 0.6, 0.7, 0.6, 0.3, 0.3
    assert scores.smoothed(RISE_AND_FALL) == pytest.approx([0.3, 0.6, 0.7, 0.6, 0.3, 0.3])
    assert scores.drop(line(RISE_AND_FALL)) == pytest.approx(0.4)
    assert scores.drop(line([0.1, 0.2, 0.3, 0.4, 0.5])) == 0
    assert scores.drop(line([0.9, 0.0])) == 0  # too short to tell
    falling_from_below = line([-0.1, -0.1, -0.1, -0.4, -0.4, -0.4])
    assert scores.drop(falling_from_below) == pytest.approx(0.3)  # from its own highest, not from 0


def test_held_out_is_the_last_after_training_began():
    run = line([0.5] * 4)
    assert scores.eval_reward(run | {"held_out": [[0, 0.1], [4, 0.3], [8, 0.25]]}) == 0.25
    assert scores.eval_reward(run | {"held_out": [[0, 0.1], [4, 0.3], [8, None]]}) == 0.3
    assert scores.eval_reward(run | {"held_out": [[0, 0.1]], "status": "failed"}) is None


def test_what_the_network_did():
    run = line([0.5] * 8)
    run["rollouts"] |= {
        "kl_before/max": [0.2, 3.0, None, 0.1, 0.1, 0.1, 0.1, 0.1],
        "kl_before/mean": [0.1, 0.3, None, 0.2, 0.2, 0.2, 0.2, 0.2],
        "sequence_kl_before": [1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0],
        "sequence_kl_after": [0.5] * 8,
        "entropy": [9.0, 9, 9, 9, 9, 9, 2.0, 1.0],
    }
    assert scores.kl_max(run) == 3.0
    assert scores.kl_mean(run) == pytest.approx(0.2)
    assert scores.sequence_kl(run) == 2.5
    assert scores.sequence_kl_after(run) == 0.5
    assert scores.entropy(run) == 1.5
    assert scores.sequence_kl_after(line([0.5])) is None


def test_entropy_at_the_end_of_a_failed_run_is_what_was_made_of_the_last_quarter():
    run = line([0.5] * 7, planned=8, status="failed")
    run["rollouts"]["entropy"] = [9.0] * 6 + [2.0]
    assert scores.entropy(run) == 2.0
    run["rollouts"]["entropy"] = [9.0] * 6
    assert scores.entropy(run) is None


MEASURES = [
    *(scores.end, scores.mean, scores.eval_reward, scores.drop, scores.kl_max, scores.kl_mean),
    *(scores.sequence_kl, scores.sequence_kl_after, scores.entropy),
]


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("status", ["interrupted", "running"])
def test_a_run_that_has_not_ended_has_no_score(measure, status):
    with pytest.raises(ValueError, match=f"made-up/troll-0 is {status}: only a run that finished or failed"):
        measure(line([0.5] * 4, region="troll", status=status) | {"name": "troll-0"})


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="finished with 3 rollouts, and 4 were planned"):
        scores.end(line([0.5] * 3, planned=4))
    with pytest.raises(ValueError, match="failed with 5 rollouts, and 4 were planned"):
        scores.end(line([0.5] * 5, planned=4, status="failed"))
    run = line([0.5])
    del run["flags"]["max_steps"]
    with pytest.raises(ValueError, match="does not set max_steps"):
        scores.end(run)


def test_labels_have_an_order_of_their_own():
    mixed = ["none", "troll-0.2", "gspo", "clip-higher", "clip", "troll", "other"]
    expected = ["troll", "troll-0.2", "clip", "clip-higher", "gspo", "none", "other"]
    assert scores.ordered(mixed) == scores.ordered(reversed(mixed)) == expected
    assert scores.ordered(["1e-05", "4e-06", "0.0001"]) == ["4e-06", "1e-05", "0.0001"]
    assert scores.ordered(["32", "8", "16"]) == ["8", "16", "32"]
    assert scores.ordered(["K 256", "base", "K 64", "A"]) == ["base", "A", "K 64", "K 256"]


def test_strata_are_what_no_axis_tells_apart():
    lines = [flat(0.5, task=task, region="clip", estimator=e) for task in ("b", "a") for e in ("rloo", "grpo")]
    assert list(scores.strata(lines, "region")) == [
        "a, estimator grpo",
        "a, estimator rloo",
        "b, estimator grpo",
        "b, estimator rloo",
    ]
    assert list(scores.strata(lines, "region", "task", "estimator", None)) == [""]
    assert [len(x) for x in scores.strata(lines, "region", "estimator").values()] == [2, 2]
    with pytest.raises(ValueError, match="has other axes than"):
        scores.strata([*lines, flat(0.5, region="clip")], "region")
    with pytest.raises(ValueError, match="runs with one seed in one cell"):
        scores.by_seed(lines, scores.end)


def test_a_cell_has_students_interval():
    found = scores.over_seeds(cell([0.5, 0.6, 0.7]), scores.end)
    assert found is not None
    assert found.mean == pytest.approx(0.6)
    assert found.high - found.mean == pytest.approx(4.303 * 0.1 / math.sqrt(3))  # t(2), deviation, three seeds
    assert scores.over_seeds([line([], planned=4, status="failed")], scores.eval_reward) is None


def test_arms_are_paired_by_seed_in_whatever_order_and_only_where_both_have_it():
    a = [flat(level, seed=seed) for seed, level in {3: 0.9, 10: 0.5, 0: 0.7, 7: 0.1}.items()]
    b = [flat(level, seed=seed) for seed, level in {10: 0.3, 0: 0.6, 5: 0.99, 3: 0.6}.items()]
    random.Random(0).shuffle(b)
    gap = scores.difference(a, b, scores.end)
    assert gap is not None
    assert gap.values == pytest.approx({"0": 0.1, "3": 0.3, "10": 0.2})
    assert list(gap.values) == ["0", "3", "10"]
    assert gap.student.mean == pytest.approx(0.2)
    assert scores.difference(a, cell([0.5], first=99), scores.end) is None


def test_a_verdict_needs_both_intervals():
    base = cell([0.0, 0.0, 0.0])
    wide = scores.difference(cell([0.1, 0.2, 0.3]), base, scores.end)
    assert wide.student.low < 0 < wide.bootstrap.low  # 0.2 − 4.303 · 0.1 / √3 < 0, and the smallest is 0.1
    assert wide.says == "inconclusive"
    sure = scores.difference(cell([0.19, 0.2, 0.21]), base, scores.end)
    assert sure.says == "better"
    assert scores.difference(base, cell([0.19, 0.2, 0.21]), scores.end).says == "worse"
    assert scores.difference(cell([0.19, 0.2, 0.21]), base, scores.end, higher=False).says == "worse"
    assert scores.difference(cell([0.2]), cell([0.0]), scores.end).says == "insufficient data"


def test_a_bootstrap_that_reaches_0_takes_a_verdict_back():
    # Many seeds a little ahead and three far behind: resamples lean to the long side, Student's interval does not.
    found = scores.difference(cell([1.1] * 22 + [0.725] * 3), cell([1.0] * 25), scores.end)
    assert found.student.low > 0 >= found.bootstrap.low
    assert found.says == "inconclusive"


def test_with_three_seeds_the_bootstrap_is_the_range_and_always_the_same():
    a, b = cell([0.5, 0.9, 0.6]), cell([0.4, 0.4, 0.4])
    found = scores.difference(a, b, scores.end)
    assert (found.bootstrap.low, found.bootstrap.high) == pytest.approx((0.1, 0.5))
    assert scores.difference(a, b, scores.end) == found


def coverage(strata: int, seeds: int, trials: int = 400) -> float:
    """How often the bootstrap covers the truth, 0."""
    rng = np.random.default_rng(1)
    drawn = [scores.stratified(rng.normal(size=(strata, seeds)).tolist()) for _ in range(trials)]
    return sum(x.low <= 0 <= x.high for x in drawn) / trials


@pytest.mark.parametrize(("strata", "seeds", "expected"), [(1, 3, 0.75), (6, 3, 0.89), (1, 30, 0.94)])
def test_the_bootstrap_covers_what_it_is_said_to_cover(strata, seeds, expected):
    # Three values are all above or all below 0 once in four; √(2/3) · 1.96 deviations are 89 %; 30 seeds are nearly
    # enough. Of 400 trials, three standard deviations are at most 0.065.
    assert coverage(strata, seeds) == pytest.approx(expected, abs=3 * math.sqrt(expected * (1 - expected) / 400))


def test_seeds_are_resampled_within_their_stratum():
    apart = scores.stratified([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    assert (apart.mean, apart.low, apart.high) == (0.5, 0.5, 0.5)  # tasks differ, seeds do not: nothing is uncertain
    uneven = scores.stratified([[0.0, 0.0], [3.0, 3.0, 3.0, 3.0]])
    assert uneven.mean == uneven.low == 1.5  # a task counts once, however many seeds it has
    single = scores.stratified([[0.2], [0.4]])
    assert (single.mean, single.low) == (pytest.approx(0.3), None)
    values = np.random.default_rng(0).normal(size=(3, 7)).tolist()
    assert scores.stratified(values) == scores.stratified(values)


def sweep(levels: dict[str, dict[str, list[float]]], first: int = 0) -> list[Line]:
    """Arm → rate → a level per seed."""
    return [x for arm, r in levels.items() for rate, ls in r.items() for x in cell(ls, first, region=arm, rate=rate)]


def began(lines: list[Line], length: float) -> list[Line]:
    """The same runs, with this mean length of the completions of their first rollout."""
    return [{**x, "rollouts": {**x["rollouts"], "completions/mean_length": [length, 9.0, 9.0, 9.0]}} for x in lines]


def test_seeds_are_paired_only_if_their_runs_began_with_the_same_rollout():
    same = [line([0.2, *[level] * 3], seed=i) for i, level in enumerate((0.5, 0.6, 0.7))]
    other = [line([0.2, *[level] * 3], seed=i) for i, level in enumerate((0.1, 0.22, 0.3))]
    paired = scores.difference(began(same, 12.5), began(other, 12.5), scores.end)
    assert paired.paired
    assert paired.values == pytest.approx({"0": 0.4, "1": 0.38, "2": 0.4})
    apart = scores.difference(began(same, 12.5), began(other, 12.6), scores.end)
    assert not apart.paired
    # Variances 0.01 and 0.010133, a third of each: 0.006711. Welch has 3.9998 degrees of freedom: 3, and so 3.182.
    assert apart.student.mean == pytest.approx(0.6 - 0.62 / 3)
    assert apart.student.high - apart.student.mean == pytest.approx(3.182 * math.sqrt(0.0067111), rel=1e-4)
    assert apart.values == pytest.approx({"0": 0.5 - 0.62 / 3, "1": 0.6 - 0.62 / 3, "2": 0.7 - 0.62 / 3})
    assert (apart.says, scores.difference(began(other, 1.0), began(same, 2.0), scores.end).says) == ("better", "worse")
    first = [{**x, "rollouts": {**x["rollouts"], "reward": [0.3, *x["rollouts"]["reward"][1:]]}} for x in same]
    assert not scores.began_alike(began(same, 12.5), began(first, 12.5))


def test_what_is_unpaired_needs_two_runs_on_each_side_and_a_spread():
    few = scores.difference(began(cell([0.9, 0.8]), 1.0), began(cell([0.1]), 2.0), scores.end)
    assert (few.says, few.student) == ("insufficient data", scores.Interval(pytest.approx(0.75), None, None))
    equal = scores.difference(began(cell([0.9, 0.9]), 1.0), began(cell([0.1, 0.1]), 2.0), scores.end)
    assert equal.says == "insufficient data"
    noise = scores.difference(began(cell([0.1, 0.9, 0.5]), 1.0), began(cell([0.2, 0.8, 0.3]), 2.0), scores.end)
    assert noise.says == "inconclusive"


def test_strata_less_others_are_resampled_by_themselves():
    found = scores.stratified([[0.5, 0.7], [0.4, 0.4]], [[0.1, 0.3], None])
    # (0.6 − 0.2 + 0.4) / 2; from 0.5 − 0.3 to 0.7 − 0.1 in the first: paired, the two would cancel.
    assert (found.mean, found.low, found.high) == pytest.approx((0.4, 0.3, 0.5))


SWEEP = {
    "troll": {"1e-05": [0.50, 0.52], "2e-05": [0.60, 0.58], "4e-05": [0.57, 0.55]},
    "clip": {"1e-05": [0.40, 0.42], "2e-05": [0.50, 0.50], "4e-05": [0.10, 0.90]},
}


def test_the_best_value_is_chosen_by_the_mean_over_seeds():
    assert scores.best(sweep(SWEEP), "region", "rate") == {"troll": "2e-05", "clip": "2e-05"}
    tied = sweep({"clip": {"4e-05": [0.5], "1e-05": [0.5]}})
    assert scores.best(tied, "region", "rate") == {"clip": "1e-05"}


def test_finalists_are_judged_on_fresh_seeds():
    fresh = sweep(
        {"troll": {"2e-05": [0.3, 0.4], "4e-05": [0.9, 0.9]}, "clip": {"2e-05": [0.2, 0.3], "4e-05": [0.8, 0.8]}}, 5
    )
    stale = sweep({"troll": {"2e-05": [1.0]}}, first=1)  # a seed that the choice was made on
    found = scores.finalists(sweep(SWEEP), "region", "rate", [*fresh, *stale])
    assert {arm: x.value for arm, x in found.items()} == {"troll": "2e-05", "clip": "2e-05"}
    assert scores.by_seed(found["troll"].lines, scores.end) == {"5": 0.3, "6": 0.4}
    assert scores.by_seed(found["clip"].lines, scores.end) == {"5": 0.2, "6": 0.3}
    assert all(x.fresh and x.chosen_on == ["0", "1"] for x in found.values())


def test_an_arm_without_fresh_runs_at_its_best_is_not_judged_by_others():
    fresh = sweep({"troll": {"4e-05": [0.9]}, "clip": {"2e-05": [0.2]}}, first=5)
    found = scores.finalists(sweep(SWEEP), "region", "rate", fresh)
    assert found["troll"].lines == []
    assert len(found["clip"].lines) == 1


def test_fresh_runs_may_have_a_rate_of_their_own_instead_of_an_axis():
    fresh = cell([0.7], first=9, region="troll")
    fresh[0]["flags"]["learning_rate"] = 2e-5
    assert scores.finalists(sweep(SWEEP), "region", "rate", fresh)["troll"].lines == fresh
    fresh[0]["flags"]["learning_rate"] = 1e-5
    assert scores.finalists(sweep(SWEEP), "region", "rate", fresh)["troll"].lines == []


def test_without_fresh_seeds_the_same_ones_judge_and_it_is_known():
    found = scores.finalists(sweep(SWEEP), "region", "rate")
    assert scores.by_seed(found["troll"].lines, scores.end) == {"0": 0.6, "1": 0.58}
    assert not found["troll"].fresh
    alone = scores.finalists(cell([0.1, 0.2], region="troll"), "region", None)
    assert (alone["troll"].value, alone["troll"].chosen_on, len(alone["troll"].lines)) == (None, [], 2)


def test_the_width_is_what_comes_near_the_best():
    # Means: troll 0.51, 0.59, 0.56; clip 0.41, 0.50, 0.50. 90 % of the best of all is 0.531, of clip's own 0.45.
    found = scores.widths(sweep(SWEEP), "region", "rate")
    assert found["troll"] == scores.Width(["2e-05", "4e-05"], ["2e-05", "4e-05"])
    assert found["clip"] == scores.Width([], ["2e-05", "4e-05"])
    assert scores.factor(["2e-05", "8e-05", "4e-05"]) == pytest.approx(4)
    assert scores.factor(["2e-05"]) == 1
    assert scores.factor([]) is None
    exactly = sweep({"a": {"1": [1.0], "2": [0.9], "3": [0.8999]}})
    assert scores.widths(exactly, "region", "rate")["a"].of_all == ["1", "2"]


@pytest.mark.parametrize("seeds", [2, 3, 4, 5, 6, 9])
def test_p_is_5_percent_where_the_interval_touches_0(seeds):
    gaps = [math.sin(i) for i in range(seeds)]
    found = scores.interval(gaps)
    assert scores.p_value([x - found.low for x in gaps]) == pytest.approx(0.05, abs=1e-4)  # quantiles of four digits
    assert scores.p_value([x - found.high for x in gaps]) == pytest.approx(0.05, abs=1e-4)  # quantiles of four digits
    assert scores.p_value([x - found.mean for x in gaps]) == pytest.approx(1)


def test_holm_corrects_from_the_smallest_on():
    assert scores.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert scores.holm([0.6, 0.5]) == [1.0, 1.0]
