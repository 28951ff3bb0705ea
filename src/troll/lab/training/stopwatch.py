"""Where the time of a run goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds by activity. An activity inside another stops the outer one's clock; a ``whole`` one has none inside."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._whole = False
        self._since = self._lap = now()

    @contextmanager
    def __call__(self, activity: str, *, whole: bool = False) -> Iterator[None]:
        """Count the time of this block for an activity."""
        if self._whole:
            yield
            return
        self._settle()
        self._running.append(activity)
        self._whole = whole
        try:
            yield
        finally:
            self._settle()
            self._running.pop()
            self._whole = False

    def lap(self) -> dict[str, float]:
        """Seconds of every activity since the last lap, and the ``other`` ones."""
        self._settle()
        seconds, self._seconds = self._seconds, {}
        total, self._lap = self._since - self._lap, self._since
        return {**seconds, "other": seconds.get("other", 0.0) + max(0.0, total - sum(seconds.values()))}

    def _settle(self) -> None:
        now = self._now()
        if self._running:
            activity = self._running[-1]
            self._seconds[activity] = self._seconds.get(activity, 0.0) + now - self._since
        self._since = now
