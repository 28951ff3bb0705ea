"""A pool of workers, one per core, shared by all threads of a process. Each worker does one job at a time.

Jobs may come from a generator: only a few per worker are taken in advance. If a worker fails, its job goes to a new
worker. After the last failed attempt the result of the job is None.
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
_QUEUED = 3  # jobs per worker that wait or are being done
_PAUSE = 0.1  # seconds before a job is tried again, doubled each time
_WINDOW = 200  # the last jobs, of which at most _MAX_SHARE may fail
_MIN_JOBS, _MIN_FAILURES, _MAX_SHARE = 20, 3, 0.05


class WorkerFailed(Exception):  # noqa: N818, not an error of the job
    """The worker failed, not the job: nothing is known about the job."""


class PoolError(InputError):
    """Too many jobs have no result because their workers failed."""


class Worker(Protocol[J_contra, R_co]):
    """Does one job at a time, from changing threads. ``do`` raises WorkerFailed if the worker failed, not the job."""

    def do(self, job: J_contra, /) -> R_co: ...  # noqa: D102
    def end(self) -> None: ...  # noqa: D102


def cores() -> int:
    """The number of usable cores, divided by the number of trainer processes on this machine (LOCAL_WORLD_SIZE)."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    trainers = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, usable // max(1, int(trainers) if trainers.isdecimal() else 1))


class Pool(Generic[J, R]):
    """A pool of workers. They start with the first jobs and end with the pool or the interpreter; a fork has new ones.

    Args:
        start: returns a worker, or raises ``WorkerFailed``, ``OSError`` or ``InputError``.
        size: maximal number of workers; default ``cores()``.
        tries: attempts per job.
        name: of the threads, and in errors.
    """

    def __init__(
        self, start: Callable[[], Worker[J, R]], *, size: int | None = None, tries: int = 3, name: str = "reward"
    ) -> None:
        self.size = cores() if size is None else size
        for option, value in (("size", self.size), ("tries", tries)):
            if value < 1:
                raise InputError(f"{option} of the {name} pool must be at least 1, got {value}", f"Omit {option}")
        self._start, self._tries, self._name = start, tries, name
        self._begin()
        _POOLS.add(self)

    def _begin(self) -> None:
        """Create the threads, locks and the list of workers for this process."""
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix=self._name)
        self._slots = threading.Semaphore(_QUEUED * self.size)
        self._idle: list[Worker[J, R]] = []
        self._failed: deque[bool] = deque(maxlen=_WINDOW)
        self._started = False
        self._end = weakref.finalize(self, _end_all, self._idle, os.getpid())

    def map(self, jobs: Iterable[J]) -> list[R | None]:
        """The results in the order of the jobs; None for a job that no worker could do.

        Raises:
            PoolError: more than 5 % of the last 200 jobs of this pool ended as None (at least 3, of at least 20).
            InputError: from ``start``, if no worker has ever started.
            Exception: from a job; the remaining jobs of this call are dropped.
        """
        futures: list[Future[R | None]] = []
        broken = threading.Event()

        def done(job: Future[R | None], slots: threading.Semaphore = self._slots) -> None:
            slots.release()
            if not job.cancelled() and job.exception() is not None:
                broken.set()

        try:
            for job in jobs:
                self._slots.acquire()
                try:
                    futures.append(self._threads.submit(self._run, job))
                except BaseException:
                    self._slots.release()
                    raise
                futures[-1].add_done_callback(done)
                if broken.is_set():
                    break
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def close(self) -> None:
        """End the workers after their current jobs. A ``map`` that is running raises, and so does a later one."""
        self._threads.shutdown(cancel_futures=True)
        self._end()

    def _run(self, job: J) -> R | None:
        """The result of a job, after up to ``tries`` attempts."""
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
        self._check_failures(failure)
        return None

    def _worker(self) -> Worker[J, R]:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        worker = self._start()
        self._started = True
        return worker

    def _check_failures(self, failure: Exception) -> None:
        recent = list(self._failed)
        if len(recent) >= _MIN_JOBS and sum(recent) >= _MIN_FAILURES and sum(recent) > _MAX_SHARE * len(recent):
            raise PoolError(
                f"{sum(recent)} of the last {len(recent)} jobs of the {self._name} pool have no result ({failure})",
                "Run troll doctor, which checks what they need",
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
