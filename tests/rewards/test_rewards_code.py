"""The reward of programs: what passes, which status the rest has, and that no result is lost or mixed up."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import threading

import pytest

from troll.errors import InputError
from troll.rewards import judge
from troll.rewards.code import CodeReward, code_of
from troll.rewards.judge import CodeWorker, Job, Verdict
from troll.rewards.problems import Expression, Statement, Stream, equal_values, parse_test, read_problem
from troll.rewards.sandbox import Sandbox, SandboxError, isolations
from troll.rewards.sandbox.values import decode, encode
from troll.rewards.workers.pool import PoolError, WorkerFailed

SQUARE = "def f(x):\n    return x * x\n"
TESTS = ["assert f(3) == 9", "assert f(-2) == 4", "assert abs(f(0.5) - 0.25) < 1e-9"]
ADD = {"inputs": ["1 2\n", "3 4\n", "-1 1\n"], "outputs": ["3\n", "7\n", "0\n"]}
SUM = "print(sum(map(int, input().split())))"


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def worker(request):
    made = CodeWorker({i.name: i for i in isolations()}[request.param])
    yield made
    made.end()


@pytest.fixture(scope="module")
def reward():
    made = CodeReward(seconds=20.0)
    yield made
    made.close()


def verdict(worker, program, tests=TESTS, **options) -> Verdict:
    problem = read_problem(tests, options.pop("setup", ""), options.pop("prepare", ""))
    return worker.do(Job(program, problem, **options))


@pytest.mark.parametrize(
    ("program", "tests", "status"),
    [
        (SQUARE, TESTS, "pass"),
        ("print('hello', flush=True)\nimport sys\nsys.stderr.write('x')\n" + SQUARE, TESTS, "pass"),
        ("def f(x): return 9", TESTS, "wrong"),
        ("def f(x): return 9", ["assert f(3) == 9"], "pass"),
        ("def f(x): return object()", TESTS, "wrong"),
        ("def f(x): return lambda: 9", ["assert f(3) == 9"], "wrong"),
        ("def f(x): raise ValueError", TESTS, "crash"),
        ("def f(x) return x", TESTS, "crash"),
        ("def g(x): return x", TESTS, "crash"),
        ("import no_such_module", TESTS, "crash"),
        ("import os\ndef f(x): os._exit(0)", TESTS, "crash"),
        ("import ctypes\ndef f(x): ctypes.string_at(0)", TESTS, "crash"),
        ("def f(x): return f(x)", TESTS, "crash"),
        ("def f(x): return bytearray(3 << 30)", TESTS, "limit"),
        ("x = [0] * 10**9", TESTS, "limit"),
        ("def f(x): return 'x' * 10**7", TESTS, "limit"),
        (SUM, ADD, "pass"),
        ("import sys\nfor line in sys.stdin: print(sum(map(int, line.split())), end='   \\n\\n')", ADD, "pass"),
        ("a, b = map(int, open(0).read().split())\nprint(a + b)", ADD, "pass"),
        ("import os\na, b = os.read(0, 99).split()\nos.write(1, str(int(a) + int(b)).encode())", ADD, "pass"),
        (f"def main():\n    {SUM}\nif __name__ == '__main__':\n    main()", ADD, "pass"),
        (f"{SUM}\nimport sys\nsys.exit(0)", ADD, "pass"),
        (f"import threading\nthreading.stack_size(1 << 27)\nthreading.Thread(target=lambda: exec({SUM!r})).start()",
         ADD, "pass"),
        ("import atexit, io, os\nout = io.StringIO()\natexit.register(lambda: os.write(1, out.getvalue().encode()))\n"
         "print(sum(map(int, input().split())), file=out)", ADD, "pass"),
        (f"{SUM}\nimport sys\nsys.exit(1)", ADD, "crash"),
        (f"{SUM}\nraise ValueError", ADD, "crash"),
        ("print(3)", ADD, "wrong"),
        ("", ADD, "wrong"),
        ("print('3\\n7\\n0')", ADD, "wrong"),
        ("print('x' * (5 << 20))", ADD, "limit"),
        ("x = bytearray(3 << 30)", ADD, "limit"),
    ],
)  # fmt: skip
def test_status(worker, program, tests, status):
    found = verdict(worker, program, tests)
    assert found.status == status
    assert (found.passed == found.cases) is (status == "pass")


def test_a_file_that_is_too_large():
    worker = CodeWorker()
    large = "def f(x): open('/tmp/x', 'wb').write(bytes(17 << 20))"
    assert verdict(worker, large).status == "limit"
    assert verdict(worker, "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n" + large).status == "limit"
    assert verdict(worker, "for n in range(2000): open(f'/tmp/{n}', 'w').close()").status == "limit"
    assert (
        verdict(
            worker, "import threading, time\nfor n in range(99): threading.Thread(target=time.sleep, args=(9,)).start()"
        ).status
        == "crash"
    )
    assert verdict(worker, SQUARE + large[10:].replace("17", "15")).status == "pass"
    worker.end()


SPIN = "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n"


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (SPIN + "while True: pass", TESTS),
        ("def f(x):\n    while True: pass", TESTS),
        ("import time\ndef f(x): time.sleep(1000)", TESTS),
        ("import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()\n" + SUM, ADD),
        ("while True: pass", ADD),
    ],
)
def test_a_program_that_does_not_stop(worker, program, tests):
    assert verdict(worker, program, tests, seconds=0.7).status == "timeout"
    assert verdict(worker, SQUARE).status == "pass"


def test_a_sandbox_without_namespaces_is_used_for_one_program():
    for isolation in isolations():
        worker = CodeWorker(isolation)
        used = set()
        for _ in range(3):
            assert verdict(worker, SQUARE).status == "pass"
            used.add(worker._sandbox._process.pid)
        assert len(used) == {"bubblewrap": 1, "landlock": 3}[isolation.name]
        worker.end()


def test_processor_time_is_limited_too(worker):
    assert verdict(worker, "def f(x):\n    while True: pass", seconds=60.0, cpu_seconds=1.0).status == "timeout"
    assert verdict(worker, "while True: pass", ADD, seconds=60.0, cpu_seconds=1.0).status == "timeout"


def test_every_status_of_a_killed_process_is_right():
    from troll.rewards.sandbox import Ending

    assert judge._status(Ending(None, 9, 6.01, 0)) == "timeout"
    assert judge._status(Ending(None, 9, 0.3, 0)) == "limit"  # the system ran out of memory
    assert judge._status(Ending(None, 25, 0.3, 0)) == "limit"
    assert judge._status(Ending(None, 11, 0.3, 0)) == "crash"
    assert judge._status(Ending(0, None, 0.3, 0)) == "crash"


def test_large_inputs_and_outputs(worker):
    numbers = list(range(200_000))
    given = "\n".join(map(str, numbers)) + "\n"
    tests = {"inputs": [given], "outputs": [given]}
    assert verdict(worker, "import sys\nsys.stdout.write(sys.stdin.read())", tests).status == "pass"
    assert (
        verdict(worker, "import sys\nprint(len(sys.stdin.read()))", {**tests, "outputs": [str(len(given))]}).status
        == "pass"
    )
    assert verdict(worker, "print('early')", {**tests, "outputs": ["early"]}).status == "pass"  # it never reads
    source = f"{SQUARE}\nx = {'9' * 4000!r}\n" + "# " + "x" * 300_000
    assert verdict(worker, source).status == "pass"


def test_what_a_problem_runs_before_and_after(worker):
    program = "class Node:\n    def __init__(self, v): self.v = v\ndef value(n): return n.v + shift\n"
    tests = ["assert value(node) == 8"]
    assert verdict(worker, program, tests, setup="shift = 1", prepare="node = Node(7)").status == "pass"
    assert (
        verdict(worker, program.replace("Node", "Knot"), tests, setup="shift = 1", prepare="node = Node(7)").status
        == "crash"
    )
    assert (
        verdict(worker, "print(shift + int(input()))", {"inputs": ["1"], "outputs": ["3"]}, setup="shift = 2").status
        == "pass"
    )


def test_a_setup_that_does_not_run_is_nobodys_fault(worker):
    with pytest.raises(WorkerFailed, match="import no_such_module"):
        verdict(worker, SQUARE, setup="import no_such_module")


STATEMENTS = [
    ("assert math.isclose(f(3), 9)", "pass"),
    ("import math\nassert math.isclose(f(3), 9)", "pass"),
    ("for x in range(5):\n    assert f(x) == x ** 2", "pass"),
    ("def check(candidate):\n    for n in range(3):\n        assert candidate(n) == n * n\ncheck(f)", "pass"),
    ("assert f(3) == helper(3)", "pass"),
    ("try:\n    f('x')\n    assert False\nexcept TypeError:\n    pass", "pass"),
    ("try:\n    f('x')\n    assert False\nexcept ValueError:\n    pass", "crash"),
    ("assert f(3) > 9", "wrong"),
    ("assert f(x=3) == f(3) and sorted(map(f, [2, 1])) == [1, 4]", "pass"),
    ("assert g(3) < 9", "crash"),
]


@pytest.mark.parametrize(("test", "status"), STATEMENTS)
def test_tests_that_are_code(worker, test, status):
    assert isinstance(parse_test(test), Statement)
    assert verdict(worker, SQUARE, [test], setup="def helper(x): return x * x").status == status


def test_code_that_tests_uses_its_own_helpers_and_not_those_of_the_program(worker):
    program = "def helper(x): return f(x)\ndef f(x): return 0"
    assert verdict(worker, program, ["assert f(3) == helper(3)"], setup="def helper(x): return x * x").status == "wrong"


def test_a_test_that_cannot_be_held_is_nobodys_fault(worker):
    with pytest.raises(WorkerFailed, match="not plain values"):
        verdict(worker, "def f(g): return g(1)", ["assert f(object()) >= 1"])


@pytest.mark.parametrize(
    "program",
    [
        "class A(float):\n    def __gt__(self, other): return True\n    def __lt__(self, other): return True\n"
        "    def __sub__(self, other): return self\n    def __abs__(self): return self\ndef f(x): return A('nan')",
        "class A(int):\n    __hash__ = int.__hash__\n    def __eq__(self, other): return True\ndef f(x): return A()",
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for v in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
        "            if isinstance(v, dict) and ('value' in v or 'test' in v): return v.get('value')\n"
        "        frame = frame.f_back",
        "import os\nos.write(4, b'{\"value\": 9}\\n' * 9)\ndef f(x): return 0",
        "import os\ndef f(x): os.write(4, b'{\"value\": 9}\\n'); return 0",
        "import os\ndef f(x): os.write(4, b'{\"held\": true}\\n'); os._exit(0)",
        "import os\ndef f(x): os.write(4, b'[' * 100000 + b'\\n'); return 0",
        "import os\ndef f(x): os.write(4, b'{\"value\": {\"set\": [[1]]}}\\n')",
        "import os\ndef f(x): os.write(4, b'{\"value\": {\"dict\": [1]}}\\n')",
        "import os\ndef f(x): os.write(4, b'\\xff\\xfe\\n')",
        "import os\ndef f(x): os.write(4, b'7\\n')",
        "import builtins, json\nbuiltins.repr = json.dumps = lambda *a, **k: '{\"value\": 9}'\ndef f(x): return 0",
    ],
)  # fmt: skip
def test_forged_answers_do_not_help(worker, program):
    tests = ["assert f(3) == 9", "assert f(-2) == 4", "assert f(5) > 24.9", "assert abs(f(2) - 4) < 1e-6"]
    assert verdict(worker, program, tests).status in ("wrong", "crash")
    for test in tests[1:]:
        assert verdict(worker, program, [test]).status in ("wrong", "crash")


def test_expected_values_never_enter_the_sandbox(monkeypatch):
    heard: list[str] = []
    say = judge.SandboxRun.__init__

    def listening(self, *given) -> None:
        say(self, *given)
        tell = self.lines.send
        self.lines.send = lambda seconds, request: (heard.append(json.dumps(request)), tell(seconds, request))[1]

    monkeypatch.setattr(judge.SandboxRun, "__init__", listening)
    worker = CodeWorker()
    assert verdict(worker, "def f(x): return 7777", ["assert f(1) == 7777", "assert f(2) == 8888"]).status == "wrong"
    assert any("f(1)" in line or "f(2)" in line for line in heard)
    assert not any("8888" in line for line in heard)
    worker.end()


def test_cases_come_in_an_order_that_a_program_cannot_count_on(worker):
    program = "answers = iter([1, 2, 3, 4, 5])\ndef f(x): return next(answers)"
    tests = [f"assert f({i}) == {i}" for i in range(1, 6)]
    assert sum(verdict(worker, program, tests).status == "pass" for _ in range(12)) <= 2  # 12 / 5! on average


def test_partial_credit(worker):
    tests = [f"assert f({x}) == {x * x}" for x in range(8)]
    some = "def f(x):\n    if x == 3: 1 / 0\n    if x == 4: import os; os._exit(0)\n    return x * x if x < 6 else 0"
    found = verdict(worker, some, tests, all_cases=True)
    assert (found.passed, found.cases) == (4, 8)
    assert found.status in ("wrong", "crash")
    streams = {"inputs": [f"{x}" for x in range(4)], "outputs": ["0", "1", "4", "9"]}
    assert verdict(worker, "x = int(input())\nprint(x * x if x != 2 else 5)", streams, all_cases=True).passed == 3
    late = "import time\ndef f(x):\n    if x == 7: time.sleep(100)\n    return x * x"
    found = verdict(worker, late, tests, all_cases=True, seconds=1.0)
    assert found.status == "timeout"
    assert found.passed < 8


def test_functions_of_json_data(worker):
    tests = {"fn_name": "f", "inputs": [[1, [2, 3]], [0, []]], "outputs": [[3, 4], []]}
    program = "def f(a, xs): return tuple(x + a for x in xs)"
    assert verdict(worker, program, tests).status == "pass"
    assert verdict(worker, program, json.dumps(tests)).status == "pass"
    assert verdict(worker, "def f(a, xs): return [1]", tests).status == "wrong"
    wrapped = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[2], [3]]}  # as in APPS
    assert verdict(worker, "def f(a): return a + 1", wrapped).status == "pass"
    assert verdict(worker, "def f(a): return [a + 1]", wrapped).status == "pass"
    assert verdict(worker, "def f(a): return [[a + 1]]", wrapped).status == "wrong"
    assert verdict(worker, "def f(a): return {1: a}", {**wrapped, "outputs": [{"1": 1}, {"1": 2}]}).status == "pass"


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ("no json", "not JSON"),
        ([], "no tests"),
        (["assert f( == 1"], "'assert f\\( == 1'"),
        ([3], "the tests '3'"),
        (7, "a int"),
        ({"inputs": ["1"]}, "'inputs' and 'outputs' are not lists"),
        ({"inputs": ["1"], "outputs": []}, "of the same length"),
        ({"inputs": [], "outputs": []}, "no tests"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "not lists of arguments"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "f()"}, "'fn_name' is not a name"),
    ],
)
def test_problems_that_cannot_be_read_are_said(tests, says):
    with pytest.raises(InputError, match=says):
        read_problem(tests)


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("assert f(1) == 2", Expression("f(1)", 2)),
        ("assert 2 == f(1), 'message'", Expression("f(1)", 2)),
        ("assert f((1, 2)) == -1.5", Expression("f((1, 2))", -1.5)),
        ("assert set(f(1)) == set((4, 5))", Statement("assert set(f(1)) == set((4, 5))")),
        ("assert f(1) == [('a', None), {'b': True}]", Expression("f(1)", [("a", None), {"b": True}])),
        ("assert f(1)", Expression("bool(f(1))", True)),
        ("assert not f(1, 2)", Expression("bool(f(1, 2))", False)),
        ("assert all(f(1))", Statement("assert all(f(1))")),
        ("assert f(1) == g(1)", Statement("assert f(1) == g(1)")),
        ("assert 1 == f(1) == 1", Statement("assert 1 == f(1) == 1")),
        ("assert f(1) != 2", Statement("assert f(1) != 2")),
        ("x = 1\nassert f(x) == 2", Statement("x = 1\nassert f(x) == 2")),
    ],
)
def test_expected_values_are_taken_out_of_tests(source, test):
    assert parse_test(source) == test


@pytest.mark.parametrize(
    ("given", "right", "equal"),
    [
        (1, 1.0, True),
        (True, 1, False),
        (1, True, False),
        ([True], [1], False),
        ((1, [2]), (1, [2.0]), True),
        ([1], (1,), False),
        ((1,), [1], False),
        ({"a": 1}, {"a": True}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({1: 2}, {1: 2}, True),
        ({1, 2}, {2, 1}, True),
        ("1", 1, False),
        (b"1", "1", False),
        ([1], [1, 2], False),
        (float("nan"), float("nan"), False),
        ([float("nan")], [float("nan")], False),
        (None, False, False),
        ("", None, False),
    ],
)
def test_equal_values(given, right, equal):
    assert equal_values(given, right) is equal


@pytest.mark.parametrize(
    ("printed", "right"),
    [("1\n2\n", True), ("1 \n2", True), ("1\n2\n\n", True), ("1\n", False), ("1\n2\n3", False), ("1 2", False),
     ("\n1\n2", False), ("1\n\n2", False), ("", False), (" 1\n2", False), ("1\n2.0", False)],
)  # fmt: skip
def test_what_is_printed_is_compared_line_by_line(printed, right):
    assert Stream("", "1\n2").accepts(printed) is right


VALUES = [
    None, True, 0, -(10**400), 1.5, float("inf"), -0.0, "a\ud800", b"\x00\xff", 2 - 1j, [], (), {}, set(),
    [1, (2, {3: {4, 5}}), {"tuple": [1]}], {(1, 2): [None]}, {"set": "x"},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_out_as_they_went_in(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert (repr(back), type(back)) == (repr(value), type(value))


def test_subclasses_are_written_as_what_they_extend():
    from collections import Counter, OrderedDict, namedtuple
    from enum import IntEnum

    Point = namedtuple("Point", "x y")
    Colour = IntEnum("Colour", "red green")
    given = [Counter("aab"), OrderedDict(a=1), Point(1, 2), Colour.green, frozenset({1})]
    assert decode(encode(given)) == [{"a": 2, "b": 1}, {"a": 1}, (1, 2), 2, {1}]
    with pytest.raises(TypeError, match="object is not a literal"):
        encode([object()])


@pytest.mark.parametrize("value", [{"list": [1]}, {"tuple": [1], "set": []}, {"tuple": 1}, {}, {"complex": ["1", 2]}])
def test_what_is_no_value_is_not_decoded(value):
    with pytest.raises(ValueError, match="not an encoded value"):
        decode(value)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a = 1", "a = 1"),
        ("x\n```python\na = 1\n```\ny\n```\nb = 2\n```\nz", "b = 2"),
        ("```py\na = 1", "a = 1"),  # cut off
        ("  a = 1\n", "  a = 1"),
        ("\n", None),
        ("```\n\n```", None),
    ],
)
def test_code_of_a_completion(text, code):
    assert code_of(text) == code


def test_as_a_reward_function_of_trl(reward):
    logged = {}
    completions = [f"```python\n{SQUARE}```", [{"role": "assistant", "content": SQUARE}], "def f(x): return 1", ""]
    given = reward(
        prompts=[""] * 4,
        completions=completions,
        tests=[TESTS] * 4,
        log_metric=lambda name, value: logged.update({name: value}),
    )
    assert given == [1.0, 1.0, 0.0, 0.0]
    assert logged == {"code/pass": 0.5, "code/wrong": 0.5}
    assert reward.__name__ == "passes_tests"
    half = CodeReward(partial=True, size=1)
    tests = ["assert f(3) == 9", "assert f(1) == 1", "assert f(2) == 4", "assert f(4) == 16"]
    assert half(completions=["def f(x): return 4", SQUARE, "no code"], tests=[tests] * 3) == [0.25, 1.0, 0.0]
    half.close()


def test_from_threads_and_from_a_running_loop(reward):
    programs = [f"def f(x): return x * {n}" for n in range(6)]
    tests = [[f"assert f(1) == {n % 3}"] for n in range(6)]
    right = [float(n == n % 3) for n in range(6)]
    found: list[list[float | None]] = []
    threads = [
        threading.Thread(target=lambda: found.append(reward(completions=programs, tests=tests))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [right] * 6

    async def many():
        inside = reward(completions=programs, tests=tests)  # blocks the loop, and is right
        return [
            inside,
            *await asyncio.gather(*(asyncio.to_thread(reward, completions=programs, tests=tests) for _ in range(4))),
        ]

    assert asyncio.run(many()) == [right] * 5


def test_a_sandbox_that_dies_is_replaced_and_the_program_judged(monkeypatch):
    worker_of: list[CodeWorker] = []
    start = CodeWorker.start
    killed = itertools.count()

    def dying(self, function, *limits):
        run = start(self, function, *limits)
        if next(killed) == 2:
            worker_of.append(self)
            self._sandbox._process.kill()
            self._sandbox._process.wait()
        return run

    monkeypatch.setattr(CodeWorker, "start", dying)
    reward = CodeReward(size=2)
    programs = [f"def f(x): return x + {n % 2}" for n in range(10)]
    assert reward(completions=programs, tests=[["assert f(1) == 1"]] * 10) == [1.0, 0.0] * 5
    assert len(worker_of) == 1
    reward.close()


def test_a_sandbox_that_always_fails_is_no_reward_and_ends_the_run(monkeypatch):
    monkeypatch.setattr("troll.rewards.workers.pool._PAUSE", 0.0)
    start = Sandbox.start

    def sometimes(self, function, *limits):
        if broken:
            raise SandboxError("the disk is full")
        return start(self, function, *limits)

    broken = False
    monkeypatch.setattr(Sandbox, "start", sometimes)
    reward = CodeReward(size=1)
    assert reward(completions=[SQUARE] * 30, tests=[TESTS] * 30) == [1.0] * 30
    broken = True
    logged = {}
    found = reward(completions=[SQUARE], tests=[TESTS], log_metric=lambda name, value: logged.update({name: value}))
    assert found == [None]  # not 0
    assert logged == {"code/infra_error": 1.0}
    with pytest.raises(PoolError, match=r"the disk is full.*troll doctor"):
        reward(completions=[SQUARE] * 30, tests=[TESTS] * 30)
    reward.close()


def test_without_a_sandbox_the_first_program_says_so(monkeypatch):
    def none():
        raise SandboxError("there is no working sandbox", "Run apt install bubblewrap")

    monkeypatch.setattr("troll.rewards.sandbox.sandbox.best", none)
    reward = CodeReward()
    with pytest.raises(SandboxError, match="apt install bubblewrap"):
        reward(completions=[SQUARE], tests=[TESTS])
    reward.close()


BOMBS = [
    "def f(x):\n    while True: pass",
    "import os\nwhile True: os.fork()",
    "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "import os\nos.kill(1, 9)\nos.kill(-1, 9)\ndef f(x): return 0",
    "def f(x): return 10**10**8",
    "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')",
    "import os\nos.write(4, b'x' * (8 << 20))",
    "import threading\nwhile True: threading.Thread(target=lambda: __import__('time').sleep(99)).start()",
    "import os\nfor n in range(10**6): open(f'/tmp/{n}', 'w').write('x' * 10**6)",
    "def f(x): return f(x)\nimport sys\nsys.setrecursionlimit(10**9)",
]


@pytest.mark.slow
def test_a_thousand_programs_with_bombs_among_them_each_get_their_own_verdict():
    rng = random.Random(0)
    reward = CodeReward(seconds=2.0)
    programs, tests, right = [], [], []
    for n in range(1000):
        kind = n % 20
        if kind == 0:  # 5 % bombs
            programs.append(BOMBS[(n // 20) % len(BOMBS)])
            tests.append([f"assert f({n}) == {n}"])
            right.append(0.0)
        elif kind % 3 == 0:
            programs.append(f"print(int(input()) + {n})")
            shift = rng.choice([n, n, n + 1])
            tests.append({"inputs": ["5", "7"], "outputs": [str(5 + shift), str(7 + shift)]})
            right.append(float(shift == n))
        else:
            shift = rng.choice([n, n, n + 1])
            programs.append(f"def f(x): return x * {n} + 1")
            tests.append([f"assert f(2) == {2 * shift + 1}", f"assert f(10) == {10 * shift + 1}"])
            right.append(float(shift == n))
    order = list(range(1000))
    rng.shuffle(order)
    found = reward(completions=[programs[i] for i in order], tests=[tests[i] for i in order])
    reward.close()
    assert len(found) == 1000
    assert [i for i, given in zip(order, found, strict=True) if given != right[i]] == []
    assert sum(right) > 500


def test_all_cores_are_used_and_no_more(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert CodeReward()._pool.size == len(os.sched_getaffinity(0))
    assert CodeReward(size=3)._pool.size == 3
