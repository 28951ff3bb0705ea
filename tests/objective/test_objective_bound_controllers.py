"""Numbers that change between rollouts: schedules by their formula, controllers on processes whose answer is known."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troll.errors import InputError
from troll.objective.bound_controllers import NetworkKLBound, ProjectedShareBound, RegressionController
from troll.objective.bounds import Adaptive, FixedBound, Measured, ScheduledBound

QUICK = settings(derandomize=True, deadline=None, max_examples=60)


def rollout(x, measured, updates=3):
    """One rollout: a first update by the old policy, which has moved nowhere, and others that measure the same."""
    x.begin_rollout()
    for update in range(updates):
        x.observe(Measured(1000, 0.0, 0.0) if update == 0 else measured)


def run(x, process, rollouts):
    """The values of x on so many rollouts of a process x ↦ measurement."""
    values = []
    for _ in range(rollouts):
        x.begin_rollout()
        values.append(x.now)
        x.observe(Measured(1000, 0.0, 0.0))
        for _ in range(3):
            x.observe(process(x.now))
    return values


# --- what is decided beforehand --------------------------------------------------------------------------------------


def test_a_fixed_bound_stays_whatever_is_measured():
    assert run(FixedBound(0.07), lambda _: Measured(10, 1.0, 9.0), 5) == [0.07] * 5


def test_a_linear_schedule_by_hand():
    expected = [0.1, 0.08, 0.06, 0.04, 0.02, 0.02, 0.02]
    found = run(ScheduledBound(0.1, 0.02, 4, "linear"), lambda _: Measured(1, 0, 0), 7)
    assert found == pytest.approx(expected, rel=1e-14)


def test_a_geometric_schedule_by_hand():
    expected = [0.16, 0.08, 0.04, 0.02, 0.01, 0.01]
    assert run(ScheduledBound(0.16, 0.01, 4), lambda _: Measured(1, 0, 0), 6) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("curve", ["linear", "geometric"])
def test_a_schedule_begins_and_ends_exactly_where_it_was_told(curve):
    values = run(ScheduledBound(0.3, 0.7, 3, curve), lambda _: Measured(1, 0, 0), 6)
    assert values[0] == 0.3
    assert values[3:] == [0.7] * 3


# --- controllers -----------------------------------------------------------------------------------------------------


def projected(c, p):
    """Share of the tokens that a bound projects: c ε^(−p), at most all."""
    return lambda epsilon: Measured(1000, min(1.0, c * epsilon**-p), 0.0)


def reached(c, p):
    """KL that the network reaches under a bound: c ε^p."""
    return lambda epsilon: Measured(1000, 0.0, c * epsilon**p)


def outside(c, p):
    """Share of the tokens outside of ε under a pull: c α^(−p)."""
    return lambda alpha: Measured(1000, min(1.0, c * alpha**-p), 0.0)


@QUICK
@given(p=st.floats(0.2, 2.0), there=st.floats(0.15, 6.0), target=st.floats(0.005, 0.3))
def test_the_projected_share_comes_to_its_target(p, there, target):
    """c such that the fixed point (c / target)^(1/p) is ``there`` · 0.05, inside the limits."""
    fixed_point = there * 0.05
    values = run(ProjectedShareBound(0.05, target), projected(target * fixed_point**p, p), 120)
    # The slowest, p = 0.2, shrinks the distance in log ε, at most 1.9, by 0.9 per rollout: 1.9 · 0.9^119 = 7e-6.
    assert values[-1] == pytest.approx(fixed_point, rel=1e-4)
    steps = [b - a for a, b in itertools.pairwise(values)]
    assert all(step * (there - 1) >= -1e-15 for step in steps)  # p ≤ 2: from one side alone


@QUICK
@given(p=st.floats(0.2, 2.0), there=st.floats(0.15, 6.0), target=st.floats(1e-4, 1.0))
def test_the_KL_of_the_network_comes_to_its_target(p, there, target):
    fixed_point = there * 0.05
    values = run(NetworkKLBound(0.05, target), reached(target / fixed_point**p, p), 120)
    assert values[-1] == pytest.approx(fixed_point, rel=1e-4)  # as above
    assert all((b - a) * (there - 1) >= -1e-15 for a, b in itertools.pairwise(values))


@QUICK
@given(p=st.floats(0.2, 2.0), there=st.floats(1.2, 8.0), tolerance=st.floats(0.005, 0.1))
def test_the_share_outside_comes_down_to_what_is_tolerated(p, there, tolerance):
    process = outside(tolerance * there**p, p)
    values = run(RegressionController(1.0, tolerance), process, 120)
    assert values[-1] == pytest.approx(there, rel=1e-4)
    assert process(values[-1]).projected == pytest.approx(tolerance, rel=1e-3)


def test_one_step_by_hand():
    """√(measured / target), where that is below the largest step."""
    for kind, measured, factor in (
        (ProjectedShareBound, Measured(10, 0.06, 0.0), math.sqrt(0.06 / 0.04)),
        (ProjectedShareBound, Measured(10, 0.03, 0.0), math.sqrt(0.03 / 0.04)),
        (NetworkKLBound, Measured(10, 0.0, 0.06), math.sqrt(0.04 / 0.06)),
        (RegressionController, Measured(10, 0.06, 0.0), math.sqrt(0.06 / 0.04)),
    ):
        x = kind(0.5, 0.04)
        rollout(x, measured)
        assert x.now == 0.5  # not before the next rollout
        x.begin_rollout()
        assert x.now == pytest.approx(0.5 * factor, rel=1e-14)


def test_with_noise_the_mean_is_near_the_target():
    """100 tokens, each projected with probability c / ε: a share with a spread of a fifth of itself, sometimes none."""
    draw = random.Random(0)
    fixed_point, target = 0.08, 0.2

    def process(epsilon):
        probability = min(1.0, target * fixed_point / epsilon)
        return Measured(100, sum(draw.random() < probability for _ in range(100)) / 100, 0.0)

    values = run(ProjectedShareBound(0.05, target), process, 1200)[200:]
    # log ε is the mean of log shares, each with standard deviation 0.2/√3 (three updates), over an AR(1) with factor ½.
    log_mean = math.fsum(map(math.log, values)) / len(values)
    assert log_mean == pytest.approx(math.log(fixed_point), abs=0.03)
    spread = math.sqrt(math.fsum((math.log(x) - log_mean) ** 2 for x in values) / len(values))
    assert spread == pytest.approx(0.5 * 0.2 / math.sqrt(3) / math.sqrt(1 - 0.25), rel=0.2)


@QUICK
@given(
    kind=st.sampled_from([ProjectedShareBound, NetworkKLBound, RegressionController]),
    shares=st.lists(st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1)), min_size=1, max_size=30),
    step=st.floats(1.01, 4.0),
)
def test_whatever_is_measured_a_step_is_limited_and_so_is_the_number(kind, shares, step):
    x = kind(0.05, 0.03, step=step)
    low, high = (0.05 if kind is RegressionController else 0.005), 0.5
    for share in shares:
        before = x.now
        rollout(x, Measured(7, share, share))
        x.begin_rollout()
        assert low * (1 - 1e-15) <= x.now <= high * (1 + 1e-15)
        assert before / step * (1 - 1e-15) <= x.now <= before * step * (1 + 1e-15)
        up = (share > 0.03) if kind is not NetworkKLBound else (share < 0.03)
        assert x.now >= before if up else x.now <= before


@pytest.mark.parametrize(
    ("kind", "end"), [(ProjectedShareBound, 0.005), (NetworkKLBound, 0.5), (RegressionController, 0.05)]
)
def test_where_nothing_is_ever_measured_above_zero_the_limit_is_reached(kind, end):
    x = kind(0.05, 0.03)
    values = run(x, lambda _: Measured(100, 0.0, 0.0), 20)
    assert values[-1] == pytest.approx(end, rel=1e-14)
    assert values[1] == pytest.approx(max(0.05 / 1.5, end) if end < 0.1 else 0.05 * 1.5, rel=1e-14)


@pytest.mark.parametrize("kind", [ProjectedShareBound, NetworkKLBound, RegressionController])
@pytest.mark.parametrize("seen", [[], [Measured(50, 0.9, 9.0)], [Measured(50, 0.9, 9.0), Measured(0, 0.0, 0.0)]])
def test_a_rollout_without_an_update_off_policy_changes_nothing(kind, seen):
    x = kind(0.05, 0.03)
    for _ in range(3):
        x.begin_rollout()
        for measured in seen:
            x.observe(measured)
    x.begin_rollout()
    assert x.now == 0.05


def test_what_is_not_a_number_changes_nothing():
    x = NetworkKLBound(0.05, 0.03)
    rollout(x, Measured(10, 0.5, math.nan))
    x.begin_rollout()
    assert x.now == 0.05


def test_which_updates_are_looked_at():
    """The projected share of all updates but the first, by tokens; of the network, the last update alone."""
    seen = [Measured(100, 0.9, 5.0), Measured(100, 0.02, 0.02), Measured(300, 0.06, 0.08)]
    factors = {}
    for kind in (ProjectedShareBound, NetworkKLBound, RegressionController):
        x = kind(0.5, 0.05, step=10.0, lowest=0.01, highest=100.0)
        x.begin_rollout()
        for measured in seen:
            x.observe(measured)
        x.begin_rollout()
        factors[kind] = x.now / 0.5
    assert factors[ProjectedShareBound] == pytest.approx(math.sqrt((0.02 + 3 * 0.06) / 4 / 0.05), rel=1e-13)
    assert factors[NetworkKLBound] == pytest.approx(math.sqrt(0.05 / 0.08), rel=1e-13)
    assert factors[RegressionController] == pytest.approx(math.sqrt(0.06 / 0.05), rel=1e-13)


def test_the_passes_of_an_update_together():
    parts = [Measured(10, 0.5, 1.0), Measured(0, 0.0, 0.0), Measured(30, 0.1, 3.0)]
    assert Measured.of(parts) == pytest.approx((40, (5 + 3) / 40, (10 + 90) / 40))
    assert Measured.of([]) == (0, 0, 0)


# --- state -----------------------------------------------------------------------------------------------------------

KINDS = {
    "fixed": lambda: FixedBound(0.05),
    "schedule": lambda: ScheduledBound(0.1, 0.01, 7),
    "projected": lambda: ProjectedShareBound(0.05, 0.03),
    "network": lambda: NetworkKLBound(0.05, 0.01),
    "regression": lambda: RegressionController(1.0, 0.05),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", range(13))
def test_saved_anywhere_and_loaded_it_goes_on_bit_for_bit(kind, cut):
    draw = random.Random(1)
    events = []
    for _ in range(4):
        events += [None, *(Measured(draw.randint(1, 99), draw.random(), draw.random()) for _ in range(2))]

    def go(x: Adaptive, some):
        for event in some:
            x.begin_rollout() if event is None else x.observe(event)
        return x

    whole = go(KINDS[kind](), [*events, None])
    first = go(KINDS[kind](), events[:cut])
    state = json.loads(json.dumps(first.state_dict()))
    second = KINDS[kind]()
    second.load_state_dict(state)
    assert second == first
    assert go(second, [*events[cut:], None]) == whole
    assert kind == "fixed" or whole.now != KINDS[kind]().now


def test_the_state_of_another_kind_is_refused():
    with pytest.raises(InputError, match="the state of a ProjectedShareBound has the entries"):
        ProjectedShareBound(0.05, 0.03).load_state_dict(ScheduledBound(0.1, 0.01, 7).state_dict())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FixedBound(-1.0), "kl_bound must be a number ≥ 0, got -1"),
        (lambda: ScheduledBound(0.1, 0.01, 0), "over must be an integer ≥ 1, got 0"),
        (lambda: ScheduledBound(0.1, 0.0, 5), "end must be a finite number > 0, got 0"),
        (lambda: ScheduledBound(math.inf, 0.1, 5, "linear"), "start must be a finite number ≥ 0, got inf"),
        (lambda: ScheduledBound(0.1, 0.2, 5, "cosine"), "got 'cosine'"),
        (lambda: ProjectedShareBound(0.05, 0.0), "target must be a fraction of the tokens, .*got 0"),
        (lambda: ProjectedShareBound(0.05, 1.0), "target must be a fraction of the tokens, .*got 1"),
        (lambda: ProjectedShareBound(0.0, 0.1), "start must be a finite number > 0, got 0"),
        (lambda: ProjectedShareBound(math.inf, 0.1), "start must be a finite number > 0, got inf"),
        (lambda: ProjectedShareBound(0.05, 0.1, step=1.0), "step must be a number > 1, .*got 1"),
        (lambda: ProjectedShareBound(0.05, 0.1, gain=-1.0), "gain must be a finite number > 0, got -1"),
        (lambda: ProjectedShareBound(0.05, 0.1, lowest=0.1), "lowest=0.1"),
        (lambda: NetworkKLBound(0.05, -0.1), "target must be a finite number > 0, got -0.1"),
        (lambda: RegressionController(0.0, 0.1), "start must be a finite number > 0, got 0"),
        (lambda: RegressionController(1.0, 1.5), "target must be a fraction of the tokens, .*got 1.5"),
    ],
)
def test_what_makes_no_sense_is_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()
