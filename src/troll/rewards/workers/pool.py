"""Workers that each do one job at a time, as many as there are cores, shared by all threads of a process.

Jobs are taken as fast as they are done: a few per worker wait, so they may come from a generator that makes them one by
one. A failure of a worker is no result of its job, which goes to a new worker; a job on which every try failed so has
the result None.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from troll.errors import InputError

J = TypeVar("J")
R = TypeVar("R")
J_contra = TypeVar("J_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
_ROOM = 3  # jobs per worker that wait or are being done
_PAUSE = 0.1  # seconds before a job is tried again, doubled each time
_WINDOW, _ENOUGH, _FAILURES, _SHARE = 200, 20, 3, 0.05  # the last jobs; when to judge; how many failures are too many


class WorkerFailed(Exception):  # noqa: N818, not an error of the job
    """The worker failed, not the job: there is no verdict on the job."""


class PoolError(InputError):
    """Too many jobs have no result, because their workers fail."""


class Worker(Protocol[J_contra, R_co]):
    """Does one job at a time, not always from the same thread. ``do`` raises WorkerFailed if the worker is to blame."""

    def do(self, job: J_contra, /) -> R_co: ...  # noqa: D102
    def end(self) -> None: ...  # noqa: D102


def cores() -> int:
    """How many cores a process may keep busy: its own share, where several trainers run on this machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    beside = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, usable // max(1, int(beside) if beside.isdecimal() else 1))


class Pool(Generic[J, R]):
    """Workers, started when there is a job for them, ended with the pool or the interpreter. A fork has its own.

    Args:
        start: makes a worker, or raises ``WorkerFailed``, ``OSError`` or ``InputError``.
        size: most workers at a time; ``cores()`` where nothing is said.
        tries: how often a job is given to a worker before it counts as failed.
        name: of the threads, and in errors.
    """

    def __init__(
        self, start: Callable[[], Worker[J, R]], *, size: int | None = None, tries: int = 3, name: str = "reward"
    ) -> None:
        self.size = cores() if size is None else size
        for option, value in (("size", self.size), ("tries", tries)):
            if value < 1:
                raise InputError(f"{option}={value} of the {name} pool", "at least 1", f"leaving {option} out")
        self._start, self._tries, self._name = start, tries, name
        self._begin()
        _POOLS.add(self)

    def _begin(self) -> None:
        """Threads, workers and locks of this process."""
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix=self._name)
        self._room = threading.Semaphore(_ROOM * self.size)
        self._idle: list[Worker[J, R]] = []
        self._failed: deque[bool] = deque(maxlen=_WINDOW)
        self._started = False
        self._end = weakref.finalize(self, _end_all, self._idle, os.getpid())

    def map(self, jobs: Iterable[J]) -> list[R | None]:
        """The results, in the order of the jobs; None where no worker could do the job.

        Raises:
            PoolError: more than 5 % of the last 200 jobs of this pool ended as None (at least 3, of at least 20).
            InputError: of ``start``, where no worker has ever started.
            Exception: of a job; what else was to be done for this call is dropped.
        """
        found: list[Future[R | None]] = []
        broken = threading.Event()

        def done(job: Future[R | None], room: threading.Semaphore = self._room) -> None:
            room.release()
            if not job.cancelled() and job.exception() is not None:
                broken.set()

        try:
            for job in jobs:
                self._room.acquire()
                try:
                    found.append(self._threads.submit(self._done, job))
                except BaseException:
                    self._room.release()
                    raise
                found[-1].add_done_callback(done)
                if broken.is_set():
                    break
            return [future.result() for future in found]
        except BaseException:
            for future in found:
                future.cancel()
            raise

    def close(self) -> None:
        """End the workers, once they have done what they are doing. A map under way raises, and so does a later one."""
        self._threads.shutdown(cancel_futures=True)
        self._end()

    def _done(self, job: J) -> R | None:
        """A job from its first try to its last."""
        for tried in range(self._tries):
            time.sleep(_PAUSE * 2 ** (tried - 1) if tried else 0)
            try:
                worker = self._worker()
            except (WorkerFailed, OSError, InputError) as error:
                if isinstance(error, InputError) and not self._started:
                    raise
                failure: Exception = error
                continue
            try:
                result = worker.do(job)
            except BaseException as error:
                worker.end()
                if not isinstance(error, WorkerFailed):
                    raise
                failure = error
            else:
                self._idle.append(worker)
                self._failed.append(False)
                return result
        self._failed.append(True)
        self._judge(failure)
        return None

    def _worker(self) -> Worker[J, R]:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        worker = self._start()
        self._started = True
        return worker

    def _judge(self, failure: Exception) -> None:
        seen = list(self._failed)
        if len(seen) >= _ENOUGH and sum(seen) >= _FAILURES and sum(seen) > _SHARE * len(seen):
            raise PoolError(
                f"{sum(seen)} of the last {len(seen)} jobs of the {self._name} pool without a result ({failure})",
                f"workers that fail for at most {_SHARE:.0%} of the jobs",
                "troll doctor, which says what is missing",
            ) from failure


def _end_all(workers: list[Worker[Any, Any]], owner: int) -> None:
    while workers and os.getpid() == owner:
        workers.pop().end()


def _after_fork() -> None:
    for pool in list(_POOLS):
        pool._end.detach()
        pool._begin()


_POOLS: weakref.WeakSet[Pool[Any, Any]] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
