"""Seconds by activity, on a clock that the test moves."""

from __future__ import annotations

import contextlib

import pytest

from troll.lab.training.progress import Stopwatch


class Clock:
    """Stands still unless told otherwise."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> Stopwatch:
    return Stopwatch(clock)


def test_what_is_no_activity_is_other(clock: Clock, watch: Stopwatch) -> None:
    clock.wait(1)
    with watch("generate"):
        clock.wait(2)
    clock.wait(4)
    assert watch.lap() == {"generate": 2, "other": 5}
    assert watch.lap() == {"other": 0}


def test_an_activity_inside_another_stops_its_clock(clock: Clock, watch: Stopwatch) -> None:
    with watch("backward"):
        clock.wait(1)
        with watch("forward"):
            clock.wait(2)
            with watch("backward"):
                clock.wait(4)
        clock.wait(8)
        with watch("forward"):
            clock.wait(16)
    assert watch.lap() == {"backward": 13, "forward": 18, "other": 0}


def test_what_is_called_other_counts_as_such(clock: Clock, watch: Stopwatch) -> None:
    with watch("backward"), watch("other"):
        clock.wait(3)
    clock.wait(1)
    assert watch.lap() == {"backward": 0, "other": 4}


def test_a_whole_activity_has_none_inside(clock: Clock, watch: Stopwatch) -> None:
    with watch("evaluate", exclusive=True):
        clock.wait(1)
        with watch("generate"), watch("score", exclusive=True):
            clock.wait(2)
        clock.wait(4)
    with watch("generate"):
        clock.wait(8)
    assert watch.lap() == {"evaluate": 7, "generate": 8, "other": 0}


def test_a_lap_in_the_middle_of_an_activity(clock: Clock, watch: Stopwatch) -> None:
    with watch("evaluate"):
        clock.wait(1)
        assert watch.lap() == {"evaluate": 1, "other": 0}
        clock.wait(2)
    clock.wait(4)
    assert watch.lap() == {"evaluate": 2, "other": 4}


@pytest.mark.parametrize("whole", [True, False])
def test_an_activity_that_fails_is_over(whole: bool, clock: Clock, watch: Stopwatch) -> None:
    with contextlib.suppress(RuntimeError), watch("outer", exclusive=whole):
        clock.wait(1)
        with watch("inner"):
            clock.wait(2)
            raise RuntimeError
    with watch("next"):
        clock.wait(4)
    expected = {"outer": 3} if whole else {"outer": 1, "inner": 2}
    assert watch.lap() == {**expected, "next": 4, "other": 0}
