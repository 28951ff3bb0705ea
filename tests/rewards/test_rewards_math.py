"""The math reward: the regression table, deadlines, dead processes, threads, asyncio, and that nothing runs as code."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest
from math_cases import CASES

from troll.errors import InputError
from troll.rewards import MathReward, math_reward
from troll.rewards import checker as checker_module
from troll.rewards.checker import Checker, CheckerError, Question, Reply
from troll.rewards.verl import math_score, require_reward
from troll.rewards.workers import Pool, PoolError, WorkerFailed

HANGS = "(((9^{9999})^{9999})^{999})^{999}"  # no cap sees it


def box(answer: str) -> str:
    return f"so it is \\boxed{{{answer}}}."


@pytest.fixture(scope="module")
def reward():
    reward = MathReward(size=2)
    reward.score(["x+1"], ["y"])  # has started
    yield reward
    reward.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.gold[:30]!a} {case.answer[:30]!a}")
def test_table(reward, case):
    began = time.monotonic()
    assert reward([box(case.answer)], [case.gold]) == [float(case.right != case.limit)]
    assert time.monotonic() - began < 2 * 3.0  # 3 s by the deadline; twice that on a machine with other things to do


def test_the_table_is_large_and_says_everything_once():
    assert len(CASES) >= 200
    assert len({case[:2] for case in CASES}) == len(CASES)
    assert all(case.right for case in CASES if case.limit)  # what is known to be judged wrongly is judged too strictly


def arithmetic(draw: random.Random, depth: int) -> tuple[str, Fraction]:
    """An expression with numbers only, and its value."""
    if depth == 0:
        whole = draw.randint(1, 12)
        return (str(whole), Fraction(whole)) if draw.random() < 0.8 else (f"{whole}.5", whole + Fraction(1, 2))
    (a, x), (b, y) = arithmetic(draw, depth - 1), arithmetic(draw, depth - 1)
    power = draw.randint(1, 3)
    forms = [
        (f"{a}+({b})", x + y),
        (f"({a})-({b})", x - y),
        (f"-({a})", -x),
        (f"({a}) \\cdot ({b})", x * y),
        (f"({a})({b})", x * y),
        (f"{power}({b})", power * y),
        (f"\\left({a}\\right)^{{{power}}}", x**power),
    ]
    if y:
        forms += [(f"\\frac{{{a}}}{{{b}}}", x / y), (f"({a})/({b})", x / y), (f"({a})\\dfrac{{1}}{{{b}}}", x / y)]
    return draw.choice(forms)


def test_arithmetic_is_read_as_it_is_written(reward):
    draw = random.Random(0)
    made = [arithmetic(draw, 2) for _ in range(120)]
    golds = [f"\\pi+\\frac{{{value.numerator}}}{{{value.denominator}}}" for _, value in made]
    assert reward.score([f"({text})+\\pi" for text, _ in made], golds) == [1.0] * len(made)
    others = [f"\\pi+\\frac{{{value.numerator + 1}}}{{{value.denominator}}}" for _, value in made]
    assert reward.score([f"({text})+\\pi" for text, _ in made], others) == [0.0] * len(made)


def test_a_right_answer_earns_one_in_every_form_of_completion():
    chat = [{"role": "assistant", "content": box("x+1")}]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": box("x+1")}]}]
    completions = [chat, parts, box("1+x"), "x+1", "", []]
    answers = ["1+x"] * len(completions)
    assert math_reward(prompts=["?"] * 6, completions=completions, answer=answers, level=[1] * 6) == [1, 1, 1, 0, 0, 0]
    assert math_reward([box("5"), box("0.5")], [5, 0.5]) == [1.0, 1.0]  # numbers as they come in data
    assert math_reward([box("5"), box("None"), "5"], ["", None, " "]) == [None] * 3  # no right answer, no reward


def test_a_hanging_answer_is_wrong_and_the_next_one_is_judged():
    reward = MathReward(size=1, seconds=0.7)
    reward.score(["x+1"], ["1+x"])
    assert reward.score([HANGS, "1+x", HANGS, "x+2"], ["x+1"] * 4) == [0.0, 1.0, 0.0, 0.0]
    reward.close()


def test_memory_is_limited(reward):
    reward.score(["1+x"], ["x+1"])
    (pid, *_) = [worker._process._popen.pid for worker in reward._pool._idle if worker._process]
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    assert [line.split()[3:5] for line in limits if "address space" in line] == [[str(1 << 30)] * 2]


def test_a_batch_with_bombs_has_every_result_in_its_place():
    reward = MathReward(size=2, seconds=1.0)
    given, golds, want = [], [], []
    for i in range(200):
        golds.append(f"x+{i}")
        given.append({0: f"{i}+x", 1: f"x+{i + 1}", 2: str(i)}[i % 3] if i % 40 else HANGS)
        want.append(1.0 if i % 40 and i % 3 == 0 else 0.0)
    assert reward.score(given, golds) == want
    reward.close()


def test_eight_threads(reward):
    found = {}

    def call(n):
        found[n] = reward([box(f"{i}+x") for i in range(10)], [f"x+{max(i, n)}" for i in range(10)])

    threads = [threading.Thread(target=call, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {n: [float(i >= n) for i in range(10)] for n in range(8)}


def test_asyncio():
    reward = MathReward(size=2, seconds=0.7)

    async def main():
        calls = [asyncio.to_thread(reward, [box(f"{n}+y"), box(HANGS)], ["y+1", "z"]) for n in range(4)]
        inside = reward([box("2y")], ["y+y"])  # on the thread of the running loop
        return await asyncio.gather(*calls), inside

    seen, inside = asyncio.run(main())
    assert seen == [[float(n == 1), 0.0] for n in range(4)]
    assert inside == [1.0]
    reward.close()


def test_a_killed_process_costs_no_answer(reward):
    for _ in range(2):
        reward.score(["1+x"] * 4, ["x+1"] * 4)
        running = [worker for worker in reward._pool._idle if worker._process is not None]
        assert running
        for worker in running:
            os.kill(worker._process._popen.pid, signal.SIGKILL)
        assert reward.score(["1+x", "2+x", "x+x"], ["x+1", "x+1", "2x"]) == [1.0, 0.0, 1.0]


FAKE = """
import json, os, sys
if os.path.exists(STOP):
    sys.exit("no memory")
print('"ready"', flush=True)
for line in sys.stdin:
    question = json.loads(line)
    if question["arguments"]["do"] == "die":
        os._exit(1)
    if question["arguments"]["do"] == "die for good":
        open(STOP, "w").close()
        os._exit(1)
    print(json.dumps({"token": question["token"], "reply": os.getpid()}), flush=True)
"""


def starter(tmp_path):
    """A file, and how to start a process that does as it is told; with the file there, it does not start."""
    script, stop = tmp_path / "fake.py", tmp_path / "stop"
    script.write_text(FAKE.replace("STOP", repr(str(stop))))
    return stop, lambda: Checker({"kind": "math"}, [sys.executable, str(script)], {})


def ask(do: str) -> Question:
    return Question({"do": do}, 60.0)


def test_a_question_on_which_the_process_dies_twice_has_no_reply(tmp_path):
    _, start = starter(tmp_path)
    worker = start()
    first = worker.do(ask("live")).value
    assert worker.do(ask("die")) == Reply(None)
    assert worker.do(ask("live")).value not in (None, first)
    worker.end()


def test_a_process_that_cannot_start_again_is_no_verdict(tmp_path):
    stop, start = starter(tmp_path)
    worker = start()
    with pytest.raises(WorkerFailed, match="did not start again: no memory"):
        worker.do(ask("die for good"))
    with pytest.raises(CheckerError, match=r"did not start \(no memory\).*troll doctor"):
        start()
    stop.unlink()
    assert worker.do(ask("live")).value


def test_rewards_are_masked_and_then_the_run_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("troll.rewards.workers.pool._PAUSE", 0.0)
    stop, start = starter(tmp_path)
    reward = MathReward(size=1)
    reward._pool = Pool(start, size=1, name="math")
    assert reward._pool.map([ask("live")])[0].value
    assert reward.score(["x+1"], ["1+x"]) == [0.0]  # it dies of the question, twice
    assert reward._pool.map([ask("die for good")]) == [None]
    assert stop.exists()
    assert reward.score(["x+1", "5", "6"], ["1+x", "5", "5"]) == [None, 1.0, 0.0]  # masked, and what is certain
    with pytest.raises(PoolError, match=r"jobs of the math pool have no result .*did not start"):
        reward.score(["x+1"] * 30, ["1+x"] * 30)


def test_a_worker_that_never_started_is_an_error_at_once(tmp_path):
    stop, start = starter(tmp_path)
    stop.touch()
    reward = MathReward(size=2)
    reward._pool = Pool(start, size=2, name="math")
    with pytest.raises(InputError, match="did not start"):
        reward.score(["x+1"], ["1+x"])


def test_without_math_verify_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(InputError, match=r"needs math-verify.*troll-rl\[rewards\]"):
        MathReward(size=1).score(["x+1"], ["1+x"])


@pytest.mark.parametrize("seconds", [0, -1, 61, float("nan")])
def test_deadlines_that_make_no_sense_are_refused(seconds):
    with pytest.raises(InputError, match="seconds must be above 0"):
        MathReward(seconds=seconds)


def test_nothing_of_an_answer_runs_as_code(tmp_path):
    """An audit hook counts what Python compiles, runs, opens and starts while answers of all kinds are checked."""
    code = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("w", {str(checker_module.WORKER)!r})
w = importlib.util.module_from_spec(spec)
spec.loader.exec_module(w)
check = w.math_checker()
seen, on = [], [False]
bad = ("compile", "open", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect")
sys.addaudithook(lambda event, args: on[0] and event in bad and seen.append((event, repr(args))))
on[0] = True
eval("1")
on[0] = False
assert len(seen) == 1, seen  # the hook works
seen.clear()
given = json.loads(sys.stdin.read())
on[0] = True
said = check(pairs=given)
on[0] = False
print(json.dumps([said, seen]))
"""
    mark = tmp_path / "ran"
    payloads = [
        f"__import__('os').system('touch {mark}')",
        f"\\text{{__import__('os').system('touch {mark}')}}",
        f"\\operatorname{{open}}('{mark}','w')",
        f"\\mathrm{{eval}}(\"open('{mark}','w')\")",
        f"open('{mark}','w').write('x')",
        "lambda: 0",
        "x.__class__.__mro__",
        "\\sin(__import__('os').getpid())",
        f"exec(\"open('{mark}','w')\")",
    ]
    honest = [
        ["x+1", "1+x"],
        ["0.5x", "\\frac{x}{2}"],
        ["\\sqrt{8}", "2\\sqrt{2}"],
        ["x^2=4", "4=x^2"],
        ["f(x)", "f(x)"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([["x", payload] for payload in payloads] + honest),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    said, seen = json.loads(done.stdout)
    assert said == [False] * len(payloads) + [True] * len(honest)
    told = [what for event, what in seen if event == "compile" and "def monomial_" not in what]  # sympy's own
    opened = [what for event, what in seen if event == "open" and "'rb'" not in what]  # imports
    assert (told, opened, {event for event, _ in seen} - {"compile", "open"}) == ([], [], set())
    assert math_reward([box(payload) for payload in payloads], ["x"] * len(payloads)) == [0.0] * len(payloads)
    assert not mark.exists()


def test_the_rewards_need_no_data_sets_and_no_trainer():
    code = "import sys, troll.rewards, troll.rewards.verl; print(*{'datasets', 'trl', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_a_process_left_alone_ends():
    """Its parent is killed while it is busy: it ends by itself, soon after the deadline."""
    code = f"""
import os, threading, time
from troll.rewards import MathReward
reward = MathReward(size=1, seconds=2.0)
reward.score(["x+1"], ["1+x"])
print(reward._pool._idle[0]._process._popen.pid, flush=True)
threading.Timer(0.5, os._exit, (0,)).start()
reward.score([{HANGS!r}], ["x"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pid = int(done.stdout)
    for _ in range(600):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("it still runs")


def test_verl():
    assert math_score("math", box("\\frac{2}{4}"), "0.5") == 1.0
    assert math_score(
        data_source="math", solution_str=box("x"), ground_truth="y", extra_info={"i": 1}, reward_router_address=None
    ) == (0.0)
    assert list(inspect.signature(math_score).parameters)[:4] == [
        "data_source", "solution_str", "ground_truth", "extra_info",
    ]  # fmt: skip
    with pytest.raises(PoolError, match="no math reward"):
        require_reward(None, "math")
