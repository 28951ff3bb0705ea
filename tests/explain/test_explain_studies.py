"""The rules over 353 real runs, with good and bad endings: where they must speak, and where they must not."""

from __future__ import annotations

from collections import Counter

import explain_cases as cases
import numpy as np
import pytest

from troll.explain import History, find, learning

GROUPS = cases.stored()
WELL = 0.8
"""Of the last three rewards: a run that ended well."""


def told(group: str) -> list[set[str]]:
    """Names of what is found, by run."""
    return [{x.name for x in find(history)} for _, history in GROUPS[group]]


def warned(group: str) -> int:
    """How many of its runs have a warning, notes aside."""
    return sum(any(x.level == "warning" for x in find(history)) for _, history in GROUPS[group])


def end(run: dict) -> float:
    return sum(run["rollouts"]["reward"][-3:]) / 3


def test_all_runs_are_there() -> None:
    assert sum(map(len, GROUPS.values())) == 353
    assert sum(len(runs) for group, runs in GROUPS.items() if cases.later(group)) == 178


@pytest.mark.parametrize("region", ["clip", "clip-higher", "none"])
def test_a_rate_that_destroys_is_seen_in_every_run(region: str) -> None:
    for names in told(f"regions {region} 3e-4"):
        assert {"reward_collapse", "no_signal"} <= names


@pytest.mark.parametrize("region", ["troll", "troll-0.2", "gspo"])
def test_a_rate_that_is_ten_times_too_high_is_warned_of(region: str) -> None:
    group = f"regions {region} 3e-4"
    assert warned(group) >= len(GROUPS[group]) - (region == "gspo")
    assert all(names for names in told(group))


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("changes bound 0.01", "projected"),
        ("changes no regression", "far_outside"),
        ("changes no regression", "projected"),
        ("regions troll 1e-4", "projected"),
        ("updates 1e-5 1 troll-0.2", "one_update"),
        ("updates 3e-5 1 clip", "one_update"),
        ("regions clip 1e-4", "far_outside"),
        ("updates 3e-5 16 clip", "far_outside"),
        ("updates 3e-5 32 clip", "far_outside"),
    ],
)
def test_it_speaks_in_every_run_of(group: str, name: str) -> None:
    assert all(name in names for names in told(group))


@pytest.mark.parametrize(
    "group",
    [
        *(
            "final troll",
            "final troll-0.2",
            "final clip",
            "final clip-higher",
            "changes base",
            "changes twice the batch",
        ),
        *("regions troll-0.2 3e-5", "regions troll 1e-5", "regions clip 1e-5", "regions clip-higher 1e-5"),
        *(
            "changes twice the batch",
            "changes floor",
            "changes 256 tokens",
            "estimators GRPO troll-0.2",
            "estimators GRPO clip",
        ),
    ],
)
def test_runs_that_go_well_hear_nothing(group: str) -> None:
    assert [names for names in told(group) if names] == []


def warnings_by_end(later: bool) -> tuple[list[bool], list[bool]]:
    """Whether runs of several updates are warned: those that ended well, and those that ended very badly."""
    runs = [pair for group, all_of in GROUPS.items() if cases.later(group) == later for pair in all_of]
    several = [(run, h) for run, h in runs if h.setting("updates_per_generation") != 1]
    levels = [(end(run), any(x.level == "warning" for x in find(h)), len(h)) for run, h in several]
    badly = [warned for reward, warned, rollouts in levels if reward < 0.25 and rollouts >= 12]
    return [warned for reward, warned, _ in levels if reward >= WELL], badly


def test_warnings_are_for_runs_that_end_badly() -> None:
    """Of the runs that ended well a few are warned; of those that ended very badly, all but one."""
    well, badly = warnings_by_end(later=False)
    assert len(well) > 90
    assert sum(well) / len(well) < 0.05
    assert len(badly) >= 14
    assert badly.count(False) <= 1


def test_so_they_are_on_runs_that_no_threshold_was_chosen_on() -> None:
    """docs/explain.md says 12 of 167, and 2 of 2."""
    well, badly = warnings_by_end(later=True)
    assert (sum(well), len(well)) == (12, 167)
    assert badly == [True, True]


def test_a_fall_is_seen_before_it_ends() -> None:
    """clip at 1e-4, seed 1, has lost everything by its thirteenth rollout of twenty, each of eight updates."""
    (found,) = [
        x
        for run, history in GROUPS["regions clip 1e-4"]
        if run["place"]["seed"] == "1"
        for x in find(history)
        if x.name == "reward_collapse"
    ]
    assert found.said <= 137
    assert found.until is None


def test_a_fall_on_the_last_two_rollouts_is_seen() -> None:
    """clip at 3e-5, seed 1, ends with 0.95, 0.84, 0.09, 0.20: the mean of five has lost a third."""
    (history,) = [history for run, history in GROUPS["regions clip 3e-5"] if run["place"]["seed"] == "1"]
    found = learning.reward_collapse(history)
    assert found is not None
    assert found.seen == "the reward fell from 0.881 to at most 0.203 on 2 rollouts"
    assert (found.since, found.said, found.until) == (history.begins(18), history.ends(19), None)


def test_no_fall_is_seen_in_a_run_that_ended_well() -> None:
    well = [history for all_of in GROUPS.values() for run, history in all_of if end(run) > 0.5]
    assert len(well) > 100
    assert not any(map(learning.reward_collapse, well))


def test_nothing_is_said_in_every_kind_of_run() -> None:
    """A rule that always speaks says nothing."""
    count = Counter(name for group in GROUPS for names in told(group) for name in names)
    assert max(count.values()) < sum(map(len, GROUPS.values())) / 4


# ---------------------------------------------------------------------- nothing but noise


def noise_runs(share: float, completions: int, rollouts: int) -> list[History]:
    """100 runs that learn nothing: the reward is the share of right answers among so many."""
    rng = np.random.default_rng([completions, round(1000 * share), rollouts])
    return [cases.history(list(rng.binomial(completions, share, rollouts) / completions)) for _ in range(100)]


@pytest.mark.parametrize(("completions", "most"), [(16, 12), (64, 4)])
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_noise_is_seldom_taken_for_a_fall(share: float, completions: int, most: int) -> None:
    """docs/explain.md says up to 7 of 100, and hardly any: 7 of 100 has a standard deviation of 2.6."""
    found = [learning.reward_collapse(run) for run in noise_runs(share, completions, 100)]
    assert sum(x is not None for x in found) <= most


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_a_run_that_learns_nothing_is_called_flat(share: float) -> None:
    """80 to 90 of 100 were seen: 70 is four standard deviations below 86."""
    found = [learning.flat(run) for run in noise_runs(share, 64, 30)]
    assert sum(x is not None for x in found) >= 70
