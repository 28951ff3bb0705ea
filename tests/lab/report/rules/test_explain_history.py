"""Lines become rollouts, and what a rule says of the first rollouts it says of a longer run too."""

from __future__ import annotations

import math
from typing import Any

import explain_cases as cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troll.lab.report.rules import RULES, History, find
from troll.lab.report.rules.history import before, highest, throughout, trailing
from troll.lab.report.rules.learning import held_out, held_out_rise, near_top, noise, smoothed, stalled


def test_a_rollout_begins_with_its_reward() -> None:
    rows = [
        {"step": 1, "entropy": 9.0},  # of a rollout whose first line is lost
        {"step": 2, "reward": 0.5, "entropy": 1.0, "grad_norm": 3.0},
        {"step": 3, "entropy": 2.0, "grad_norm": None},
        {"step": 4, "entropy": "high"},
        {"step": 5, "reward": 0.25, "grad_norm": float("inf")},
        {"step": 6, "grad_norm": True},
    ]
    history = History.of(rows, [], {"kl_bound": 0.1, "tail": "bucket"})
    assert [(history.begins(i), history.ends(i)) for i in range(len(history))] == [(2, 4), (5, 6)]
    assert history.reward.tolist() == [0.5, 0.25]
    assert history.mean("entropy")[0] == 1.5
    assert (history.first("entropy")[0], history.last("entropy")[0], history.most("entropy")[0]) == (1.0, 2.0, 2.0)
    assert math.isnan(history.mean("entropy")[1])
    assert np.isnan(history.most("grad_norm")).tolist() == [False, True]
    assert (history.setting("kl_bound"), history.setting("tail"), history.setting("gone")) == (0.1, None, None)


def test_without_rewards_all_lines_are_one_rollout() -> None:
    history = History.of([{"step": 1, "entropy": 1.0}, {"step": 2, "entropy": 3.0}], [], {})
    assert len(history) == 1
    assert history.mean("entropy").tolist() == [2.0]
    assert len(History.of([], [], {})) == 0


def test_entropy_is_that_of_the_kept_tokens_where_there_is_no_other() -> None:
    assert cases.history([0.0] * 2, {"troll/entropy": [0.5, 0.25]}).entropy.tolist() == [0.5, 0.25]
    both = cases.history([0.0] * 2, {"troll/entropy": [0.5, 0.25], "entropy": [2.0, 1.0]})
    assert both.entropy.tolist() == [2.0, 1.0]


def test_windows_look_back() -> None:
    y = np.array([1.0, 3.0, 5.0, 1.0])
    assert trailing(y, 3)[2:].tolist() == [3.0, 3.0]
    assert np.isnan(trailing(y, 3)[:2]).all()
    assert np.isnan(trailing(y, 5)).all()
    assert throughout(y >= 3, 2).tolist() == [False, False, True, False]
    assert highest(np.array([math.nan, 2.0, 1.0, 3.0]))[1:].tolist() == [2.0, 2.0, 3.0]
    assert before(y, 2)[2:].tolist() == [1.0, 3.0]
    assert before(y, 9).size == 4


def test_what_the_reward_does() -> None:
    history = cases.history([0.0, 0.3, 0.6, 0.3, 0.9, 0.9])
    assert smoothed(history)[2:] == pytest.approx([0.3, 0.4, 0.6, 0.7])
    assert noise(history)[2:] == pytest.approx([0.3, 0.3, 0.375, 0.3])  # of steps 0.3, 0.3, 0.3, 0.6, 0
    assert near_top(history).tolist() == [False] * 5 + [True]  # the median of 0.3, 0.9, 0.9
    assert not near_top(cases.history([0.9, 0.9, 1.1])).any()  # not a reward between 0 and 1
    assert not near_top(cases.history([-0.1, 0.9, 0.9])).any()


def test_it_rests_when_five_rollouts_bring_no_new_highest() -> None:
    rests = stalled(cases.history([0.2, 0.4, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6]))
    # Means of three from the third on: 0.4, 0.533, 0.6, 0.6 …; after eight steps of 0.05 on average 0.6 > 0.533 + 0.05.
    assert rests.tolist() == [False] * 9 + [True] * 2
    assert not stalled(cases.history(cases.RISING)).any()


def test_held_out_rewards_belong_to_the_rollout_they_follow() -> None:
    history = cases.history([0.5] * 4, held_out=[(0, 0.1), (8, 0.3), (12, 0.2), (99, 0.9)])
    assert np.isnan(held_out(history)[0])
    assert held_out(history)[1:].tolist() == [0.3, 0.2, 0.2]  # rollouts end with updates 4, 8, 12 and 16
    assert held_out_rise(history)[1:] == pytest.approx([0.2, 0.2, 0.2])
    assert np.isnan(held_out_rise(cases.history([0.5] * 4, held_out=[(8, 0.3)]))).all()


NAMES = (
    *("reward", "entropy", "grad_norm", "loss", "frac_reward_zero_std", "clip_ratio/region_mean"),
    *("completions/clipped_ratio", "sampling/sampling_logp_difference/mean", "code/infra_error"),
    *(f"troll/{x}" for x in ("projected_fraction", "regression", "kept_mass/old", "lost_mass", "kl_before/p99")),
    *(f"troll/{x}" for x in ("kl_before/max", "kl_after/max", "skipped_updates", "unscored_completions")),
)
VALUES = st.sampled_from([0.0, 0.02, 0.15, 0.5, 0.88, 0.95, 0.9995, 1.0, 30.0])
SETTINGS = st.fixed_dictionaries(
    {
        "trust_region": st.sampled_from(["troll", "clip", "none"]),
        "tail": st.sampled_from(["floor", "bucket"]),
        "updates_per_generation": st.sampled_from([1, 2, 8]),
        "regression_coef": st.sampled_from([0.0, 1.0]),
        "kl_bound": st.sampled_from([0.01, 0.05]),
        "learning_rate": st.just(1e-5),
    }
)


@st.composite
def runs(draw: Any) -> tuple[list[dict[str, float]], list[dict[str, float]], dict[str, Any]]:
    """Stretches of rollouts that are alike, so that rules apply and cease to."""
    rows: list[dict[str, float]] = []
    for _ in range(draw(st.integers(1, 4))):
        line = {name: draw(VALUES) for name in draw(st.sets(st.sampled_from(NAMES))) | {"reward"}}
        rows += [line] * draw(st.integers(1, 8))
    lines = [{**row, "step": 2 * i + 1} for i, row in enumerate(rows)]
    every = draw(st.integers(1, 3))
    evaluations = [{"step": line["step"], "eval_reward": draw(VALUES)} for line in lines[::every]]
    return lines, evaluations, draw(SETTINGS)


@settings(max_examples=200, deadline=None)
@given(runs(), st.data())
def test_what_was_said_stays_said(run: Any, data: Any) -> None:
    """find(first rollouts) are the findings of the whole run that were certain by then, with the same beginnings."""
    lines, evaluations, options = run
    n = data.draw(st.integers(1, len(lines)))
    last = lines[n - 1]["step"]
    early = find(History.of(lines[:n], [x for x in evaluations if x["step"] <= last], options))
    whole = find(History.of(lines, evaluations, options))
    assert {(x.name, x.level, x.since, x.said) for x in early} == {
        (x.name, x.level, x.since, x.said) for x in whole if x.said <= last
    }
    assert all(x.since <= x.said and (x.until is None or x.until >= x.said) for x in whole)
    assert len({x.name for x in whole}) == len(whole)


NUMBERS = st.one_of(st.floats(-1e9, 1e9), st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(-1000, 1000))
JUNK = st.one_of(st.none(), st.booleans(), st.text(max_size=3), NUMBERS, st.lists(st.integers(), max_size=2))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), JUNK), max_size=14), st.dictionaries(st.sampled_from(
    ["trust_region", "kl_bound", "learning_rate", "updates_per_generation", "num_generations", "regression_coef"]), JUNK
))  # fmt: skip
def test_no_file_can_stop_a_run(rows: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """Rules are asked during training: whatever a line has in it, they answer."""
    lines = [{**row, "step": i + 1} for i, row in enumerate(rows)]
    evaluations = [{"step": i, "eval_reward": row.get("reward")} for i, row in enumerate(rows)]
    for finding in find(History.of(lines, evaluations, options)):
        assert finding.line()


def test_there_are_rules_without_doubles() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES) == 23
    assert all(rule.check.__doc__ for rule in RULES)
