"""The pool: order, back-pressure, failures of workers and of jobs, threads, asyncio, forks, the end."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest

from troll.errors import InputError
from troll.rewards.workers import Pool, PoolError, WorkerFailed, cores


class Squares:
    """Does what the job says: a number is squared, the rest is a failure of one kind or another."""

    def __init__(self, log: list[str] | None = None) -> None:
        self.log = log if log is not None else []
        self.log.append("start")
        self.busy = threading.Lock()

    def do(self, job):
        assert self.busy.acquire(blocking=False), "two jobs at a time"
        try:
            if callable(job):
                return job()
            if job == "fail":
                raise WorkerFailed("it broke")
            if job == "bug":
                raise KeyError("bug")
            return job * job
        finally:
            self.busy.release()

    def end(self) -> None:
        self.log.append("end")


@pytest.fixture
def log():
    return []


@pytest.fixture
def pool(log):
    pool = Pool(lambda: Squares(log), size=2)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr("troll.rewards.workers.pool._PAUSE", 0.0)


def test_results_come_in_the_order_of_the_jobs(pool, log):
    jobs = [lambda i=i: (time.sleep(0.002 * (i % 3)), i)[1] for i in range(60)]
    assert pool.map(jobs) == list(range(60))
    assert pool.map([]) == []
    assert 1 <= log.count("start") <= 2
    assert "end" not in log  # a worker stays for the next jobs


def test_all_workers_are_busy_at_once():
    both = threading.Barrier(3)
    pool = Pool(Squares, size=3)
    assert sorted(pool.map([lambda: both.wait(60)] * 3)) == [0, 1, 2]  # each job waits for the two others
    pool.close()


def test_jobs_are_taken_as_they_are_done(pool):
    taken, done = [], []

    def jobs():
        for i in range(300):
            taken.append(i)
            assert len(taken) - len(done) <= 3 * 2 + 1
            yield lambda i=i: done.append(i)

    assert pool.map(jobs()) == [None] * 300
    assert len(done) == 300


def test_a_failed_worker_is_replaced_and_the_job_tried_again(pool, log):
    left = [2]

    def once_more():
        left[0] -= 1
        if left[0] >= 0:
            raise WorkerFailed("not now")
        return "done"

    assert pool.map([once_more, 3]) == ["done", 9]
    assert log.count("end") == 2
    assert log.count("start") >= 3


def test_a_job_no_worker_can_do_has_no_result(pool, log):
    assert pool.map([2, "fail", 3]) == [4, None, 9]
    assert log.count("end") == 3  # three tries


def test_too_many_failures_end_the_run(pool):
    assert pool.map([1] * 200 + ["fail"] * 10).count(None) == 10  # of the last 200: not more than 5 %
    assert pool.map([1] * 200) == [1] * 200
    with pytest.raises(PoolError, match=r"of the reward pool have no result .it broke.*troll doctor"):
        pool.map(["fail"] * 11)
    assert pool.map([1] * 200) == [1] * 200  # it can recover
    assert pool.map(["fail"]) == [None]


def test_a_few_failures_at_the_start_are_not_judged(pool):
    assert pool.map(["fail"] * 19) == [None] * 19
    with pytest.raises(PoolError, match="20 of the last 20 jobs"):
        pool.map(["fail"])


def test_a_worker_that_cannot_start_is_said_at_once():
    def start():
        raise InputError("bubblewrap is missing", "Run apt install bubblewrap")

    pool = Pool(start, size=2)
    with pytest.raises(InputError, match="apt install bubblewrap"):
        pool.map([1, 2, 3])
    pool.close()


def test_a_start_that_fails_later_is_tried_again(log):
    fails = []

    def start():
        if fails:
            raise fails.pop()
        return Squares(log)

    pool = Pool(start, size=1)
    assert pool.map([1]) == [1]
    fails += [InputError("a", "b"), OSError("no process")]

    def break_once():
        if log.count("end"):
            return "done"
        raise WorkerFailed("once")

    fails.pop()
    assert pool.map([break_once]) == ["done"]  # failed, could not start, started
    assert not fails
    fails += [OSError("no memory")] * 3
    pool._idle.clear()
    assert pool.map([1, 5]) == [None, 25]
    pool.close()


def test_an_error_of_a_job_is_raised_and_the_pool_goes_on(pool, log):
    made = []

    def jobs():
        for i in range(10_000):
            made.append(i)
            yield "bug" if i == 5 else i

    with pytest.raises(KeyError, match="bug"):
        pool.map(jobs())
    assert len(made) < 5000  # it did not go on for long
    assert log.count("end") == 1  # no worker is used again after an error that it did not expect
    assert pool.map([1, 2]) == [1, 4]


def test_an_error_of_the_source_of_the_jobs_is_raised(pool):
    def jobs():
        yield 1
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        pool.map(jobs())
    assert pool.map([3]) == [9]


def test_eight_threads_each_have_their_own_results(pool):
    found = {}

    def call(n):
        found[n] = pool.map([(lambda n=n, i=i: (n, i)) for i in range(50)])

    threads = [threading.Thread(target=call, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {n: [(n, i) for i in range(50)] for n in range(8)}


def test_a_short_call_does_not_wait_for_a_long_one(pool):
    stop = threading.Event()
    rounds = []

    def endless():
        while not stop.is_set():
            rounds.append(1)
            yield lambda: time.sleep(0.005)

    thread = threading.Thread(target=pool.map, args=(endless(),))
    thread.start()
    while len(rounds) < 20:
        time.sleep(0.01)
    assert pool.map([7]) == [49]  # while the other one goes on
    assert thread.is_alive()
    stop.set()
    thread.join(60)
    assert not thread.is_alive()


def test_asyncio(pool):
    async def main():
        results = await asyncio.gather(*(asyncio.to_thread(pool.map, [n] * 20) for n in range(6)))
        return results, pool.map([5])  # also on the thread of the loop

    assert asyncio.run(main()) == ([[n * n] * 20 for n in range(6)], [25])


def test_an_interrupt_leaves_the_pool_usable(pool):
    hold = threading.Event()

    def jobs():
        for _ in range(3):
            yield lambda: hold.wait(60)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.map(jobs())
    hold.set()
    assert pool.map([1, 2, 3, 4, 5, 6]) == [1, 4, 9, 16, 25, 36]


def test_close_ends_workers_and_threads(log):
    before = threading.active_count()
    pool = Pool(lambda: Squares(log), size=3)
    pool.map([lambda: time.sleep(0.01)] * 6)
    pool.close()
    pool.close()
    assert log.count("end") == log.count("start") > 0
    assert threading.active_count() == before
    with pytest.raises(RuntimeError):
        pool.map([1])


def test_a_forgotten_pool_leaves_nothing(log):
    before = threading.active_count()
    pool = Pool(lambda: Squares(log), size=2)
    pool.map([1, 2, 3])
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    assert log.count("end") == log.count("start")
    for _ in range(500):
        if threading.active_count() == before:
            break
        time.sleep(0.01)
    assert threading.active_count() == before


def test_sizes(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (cores(), Pool(Squares).size) == (8, 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert cores() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert cores() == 1
    for option in ({"size": 0}, {"tries": 0}):
        with pytest.raises(InputError, match="of the reward pool must be at least 1, got 0"):
            Pool(Squares, **option)


PROCESS = """
import os, sys, threading, time
from troll.rewards.workers import Pool, WorkerProcess
CAT = '''
import json, os, sys
print('"ready"', flush=True)
for line in sys.stdin:
    print(json.dumps({"token": json.loads(line)["token"], "reply": os.getpid()}), flush=True)
'''
class Asked:
    def __init__(self):
        self.c = WorkerProcess([sys.executable, "-c", CAT], {})
    def do(self, job):
        return self.c.ask(60.0)
    def end(self):
        self.c.end()
pool = Pool(Asked, size=1)
(mine,) = pool.map([1])
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", PROCESS + code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_end_with_the_interpreter():
    assert not alive(run("print(mine)"))


def test_a_fork_has_workers_of_its_own():
    code = """
if (pid := os.fork()) == 0:
    (other,) = pool.map([1])
    print(other, flush=True)
    sys.exit(0)  # runs what is to run at exit
os.waitpid(pid, 0)
assert pool.map([1]) == [mine]  # the child has not ended it
print(mine)
"""
    child, parent = run(code).split()
    assert child != parent
    assert not alive(child)


def test_a_fork_while_another_thread_uses_the_pool():
    code = """
stop = threading.Event()
def endless():
    while not stop.is_set():
        yield 1
thread = threading.Thread(target=pool.map, args=(endless(),))
thread.start()
for _ in range(10):
    if (pid := os.fork()) == 0:
        assert len(pool.map([1, 2])) == 2
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
stop.set()
thread.join()
print("done")
"""
    assert run(code) == "done\n"


def test_an_interrupt_from_outside_ends_the_process():
    code = """
import _thread, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background may ignore it
threading.Timer(1.0, _thread.interrupt_main).start()
class Sleeper(Asked):
    def do(self, job):
        time.sleep(0.01)
        return 1
def endless():
    while True:
        yield 1
try:
    Pool(Sleeper, size=2).map(endless())
except KeyboardInterrupt:
    print("interrupted")
"""
    assert run(code) == "interrupted\n"
