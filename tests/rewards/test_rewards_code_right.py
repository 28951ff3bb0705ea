"""Right programs that earn 1, whatever they look like, and limits that each test has for itself."""

from __future__ import annotations

import pytest

from troll.errors import InputError
from troll.rewards.code import CodeReward, code_of
from troll.rewards.judge import CodeWorker, Job
from troll.rewards.problems import Stream, _Cache, equal_values, read_problem
from troll.rewards.sandbox import isolations

SQUARE = "def f(x):\n    return x * x\n"


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def worker(request):
    made = CodeWorker({i.name: i for i in isolations()}[request.param])
    yield made
    made.end()


def status(worker, program, tests, setup="", prepare="", given="", **options) -> str:
    return worker.do(Job(program, read_problem(tests, setup, prepare, given), **options)).status


STACK = """
class Empty(Exception):
    def __init__(self, message='empty'):
        super().__init__(message)
        self.code = 7
class Stack:
    def __init__(self, items=()):
        self.items = list(items)
    def push(self, x):
        self.items.append(x)
        return self
    def pop(self):
        if not self.items: raise Empty()
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __eq__(self, other): return self.items == other.items
    def __add__(self, other): return Stack(self.items + other.items)
    def __enter__(self): return self
    def __exit__(self, *_): self.items.clear()
    @property
    def top(self): return self.items[-1]
def numbers(n):
    for i in range(n): yield i
def made(): return Stack([1])
"""
OBJECTS = [
    ("s = Stack()\ns.push(3)\ns.push(4)\nassert s.pop() == 4\nassert len(s) == 1", "pass"),
    ("s = Stack([1, 2])\nassert s.top == 2 and s.items == [1, 2]", "pass"),
    ("s = Stack()\ns.push(1).push(2)\nassert list(s) == [1, 2] and 2 in s and 3 not in s and s[0] == 1", "pass"),
    ("try:\n    Stack().pop()\n    assert False\nexcept Empty as error:\n"
     "    assert str(error) == 'empty' and error.code == 7", "pass"),
    ("try:\n    Stack().pop()\nexcept Exception as error:\n    assert type(error).__name__ == 'Empty'", "pass"),
    ("try:\n    Stack([1]).pop()\n    assert False\nexcept Empty:\n    pass", "wrong"),
    ("import unittest\nwith unittest.TestCase().assertRaises(Empty):\n    Stack().pop()", "pass"),
    ("assert Stack([1]) == Stack([1]) and Stack([1]) != Stack([2])", "pass"),
    ("assert (Stack([1]) + Stack([2])).items == [1, 2]", "pass"),
    ("with Stack([1]) as s:\n    assert s.top == 1\nassert len(s) == 0", "pass"),
    ("s = Stack([1])\nassert isinstance(s, Stack) and isinstance(made(), Stack) and not isinstance(3, Stack)", "pass"),
    ("s = Stack()\nassert s.push(1) is s", "pass"),
    ("s = Stack([5])\ns.items = [7]\nassert s.pop() == 7", "pass"),
    ("assert list(numbers(3)) == [0, 1, 2] and sum(numbers(4)) == 6 and next(numbers(2)) == 0", "pass"),
    ("assert [x for x in numbers(3)] == [0, 1, 2]", "pass"),
    ("assert made().items == [1]", "pass"),
    ("assert Stack([1]).top == 2", "wrong"),
    ("assert Stack([1]) == 1", "wrong"),
]  # fmt: skip


@pytest.mark.parametrize(("test", "right"), OBJECTS)
def test_objects_of_the_program(worker, test, right):
    assert status(worker, STACK, [test]) == right


EXTENDED = """
from collections import namedtuple, deque, OrderedDict
from fractions import Fraction
import datetime, enum
Point = namedtuple('Point', 'x y')
class Bag(list):
    def twice(self):
        self.extend(list(self))
        return len(self)
class Word(str):
    def loud(self): return self.upper() + '!'
class Colour(enum.Enum):
    RED = 1
def point(): return Point(1, 2)
def bag(): return Bag([1])
def word(): return Word('a')
def queue(): return deque([1, 2])
def half(): return Fraction(1, 2)
def day(): return datetime.date(2024, 1, 2)
async def later(x): return x * x
def apply(g, x): return g(x)
def twice(g): return lambda x: g(g(x))
def tally(xs): return sum(xs)
def kind(t): return t('7')
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert point() == (1, 2) and point().x == 1 and point()[1] == 2",
        "b = bag()\nassert b == [1] and b.twice() == 2 and b == [1, 1] and len(b) == 2",
        "assert word() == 'a' and word().loud() == 'A!'",
        "assert Colour.RED.value == 1 and Colour.RED is Colour.RED",
        "import collections\nassert queue() == collections.deque([1, 2]) and list(queue()) == [1, 2]",
        "from fractions import Fraction\nassert half() == Fraction(1, 2) and half() * 2 == 1",
        "import datetime\nassert day() == datetime.date(2024, 1, 2) and day().year == 2024",
        "import asyncio\nassert asyncio.run(later(3)) == 9",
        "assert apply(lambda x: x + 1, 3) == 4",
        "def g(x):\n    return x * 2\nassert twice(g)(3) == 12",
        "assert apply(str.upper, 'a') == 'A' and apply(len, 'abc') == 3",
        "assert tally(iter([1, 2])) == 3 and tally(x for x in (1, 2)) == 3 and tally({1: 2}.values()) == 2",
        "assert kind(int) == 7",
        "assert list(map(later.__name__.upper, [])) == [] and later.__name__ == 'later'",
    ],
)
def test_values_that_are_no_literals(worker, test):
    assert status(worker, EXTENDED, [test]) == "pass"


@pytest.mark.parametrize(
    ("program", "test", "right"),
    [
        ("def f(xs): xs.sort()", "x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]", "pass"),
        ("def f(xs):\n    xs.sort()\n    return xs", "x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]", "pass"),
        ("def f(xs): return sorted(xs)", "x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]", "wrong"),
        ("def f(xs): xs.sort()", "x = [3, 1, 2]\nassert f(x) is None and x == [1, 2, 3]", "pass"),
        ("def f(m): m[0].reverse()", "x = [[1, 2], [3]]\ny = x[0]\nf(x)\nassert y == [2, 1] and x == [[2, 1], [3]]",
         "pass"),
        ("def f(d): d['a'] = 1", "d = {}\nf(d)\nassert d == {'a': 1}", "pass"),
        ("def f(s): s.add(2)", "s = {1}\nf(s)\nassert s == {1, 2}", "pass"),
        ("def f(b): b[0] = 9", "b = bytearray(2)\nf(b)\nassert b == bytearray([9, 0])", "pass"),
        # What a program does to its arguments does not change what its result is compared with.
        ("def f(xs):\n    xs.clear()\n    return xs", "x = [3, 1, 2]\nassert f(x) == sorted(x)", "wrong"),
        ("def f(xs):\n    xs.clear()\n    return xs", "x = [3, 1, 2]\ny = f(x)\nassert y == sorted(x)", "wrong"),
        ("def f(xs):\n    xs.clear()\n    return 0", "x = [3, 1, 2]\ny = f(x)\nassert y == sum(x)", "wrong"),
    ],
)  # fmt: skip
def test_arguments_that_are_changed_in_place(worker, program, test, right):
    assert status(worker, program, [test]) == right


LISTS = """
class ListNode:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next
    def __eq__(self, other):
        return isinstance(other, ListNode) and (self.val, self.next) == (other.val, other.next)
    def last(self):
        return self if self.next is None else self.next.last()
def build(values):
    head = None
    for value in reversed(values): head = ListNode(value, head)
    return head
def values(node):
    found = []
    while node: found.append(node.val); node = node.next
    return found
"""
REVERSE = """
def f(head):
    before = None
    while head: head.next, before, head = before, head, head.next
    return before
"""
OWN = "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val, self.next = val, next\n"


@pytest.mark.parametrize(
    ("program", "right"),
    [
        (REVERSE, "pass"),
        (OWN + REVERSE, "pass"),  # as many write it out
        ("def f(n, out=None):\n    while n: out = ListNode(n.val, out); n = n.next\n    return out", "pass"),
        ("def f(head): return head", "wrong"),
        ("ListNode.__eq__ = lambda *_: True\ndef f(head): return ListNode(0)", "wrong"),
        ("def f(head):\n    head.last = lambda: head\n    return head", "wrong"),
        ("Yes = type('ListNode', (), {'__eq__': lambda *_: True, 'val': 0, 'next': None})\ndef f(head): return Yes()",
         "wrong"),
        ("def f(head): return build([3, 2, 1])", "crash"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "test",
    [
        "assert values(f(build([1, 2, 3]))) == [3, 2, 1]",
        "assert f(build([1, 2, 3])) == build([3, 2, 1])",
        "assert f(build([1, 2, 3])).val == 3 and f(build([1, 2, 3])).last().val == 1",
        "assert values(f(build(list(range(900))))) == list(range(899, -1, -1))",
    ],
)
def test_classes_that_the_problem_defines(worker, program, test, right):
    if "range(900)" in test and "[3, 2, 1]" in program:
        return
    assert status(worker, program, [test], setup=LISTS) == right


def test_a_reference_solution_in_the_setup_cannot_be_called(worker):
    setup = "import math\nshift = 1\ndef reference(x):\n    return x * x\n"
    setup += "class Reference:\n    def f(self, x):\n        return x * x"
    tests = ["assert f(3) == reference(3)", "assert f(4) == Reference().f(4)"]
    assert status(worker, SQUARE, tests, setup) == "pass"
    assert status(worker, "def f(x): return math.prod([x, x]) * shift", tests, setup) == "pass"
    for cheat in ("reference(x)", "Reference().f(x)", "__import__('program').reference(x)"):
        assert status(worker, f"def f(x): return {cheat}", tests[:1], setup) == "crash"
        assert status(worker, f"def f(x): return {cheat}", ["assert f(3) == 9"], setup) == "crash"
    assert status(worker, "def f(x): return reference(x)", tests, given=setup) == "pass"  # here it is allowed to


@pytest.mark.parametrize(
    ("test", "says"),
    [
        ("assert same(f(3), 9)", r"the program's own same\(\) would decide.*define same in setup"),
        ("assert same(f(3), 9) == True", "the program's own same"),
        ("y = f(3)\nassert not same(y, 9)", "the program's own same"),
        ("ok = same(f(3), 9)\nassert ok", "the program's own same"),
        ("assert all(same(f(x), x * x) for x in range(3))", "the program's own same"),
        ("assert np.allclose(f(3), 9)", "the program's own np"),
        ("assert eval(f(3)) > 5", r"eval\(\) would execute text of the program"),
        ("x = f(3)\nexec(x)", r"exec\(\) would execute"),
    ],
)
def test_a_test_that_cannot_be_judged_is_reported_when_it_is_read(test, says):
    with pytest.raises(InputError, match=says):
        read_problem([test])


def test_functions_of_the_library_need_no_import(worker):
    tests = ["assert isclose(f(0.5), 0.25)", "assert math.isclose(f(0.5), 0.25)", "x = f(3)\nassert gcd(x, 6) == 3"]
    assert status(worker, SQUARE, tests) == "pass"
    for test in tests:
        cheat = "import math\nisclose = math.isclose = gcd = math.gcd = lambda *_: 9\ndef f(x): return 0"
        assert status(worker, cheat, [test]) == "wrong"
    assert status(worker, "def gcd(a, b): return a if not b else gcd(b, a % b)", ["assert gcd(12, 18) == 6"]) == "pass"


SUM = "print(sum(map(int, input().split())))"
ADD = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("class Solution:\n    def f(self, x): return x * x", {"fn_name": "f", "inputs": [[3]], "outputs": [9]}),
        ("class Solution:\n    def f(self, x): return x * x", ["assert f(3) == 9", "assert f(3) > 8"]),
        ("class Solution:\n    def f(self, x): return x * x", ["assert Solution().f(3) == 9"]),
        (SQUARE + "if __name__ == 'program':\n    exit()", ["assert f(3) == 9"]),
        (SQUARE + "quit()", ["assert f(3) == 9"]),
        (SQUARE + "import sys\nsys.exit()", ["assert f(3) == 9"]),
        (f"{SUM}\nexit()", ADD),
        (f"{SUM}\nquit(0)", ADD),
        (f"def main():\n    {SUM}\n    exit(0)\nmain()", ADD),
        (f"{SUM}\nimport sys\nsys.stdout.close()", ADD),
        (f"{SUM}\nimport os, sys\nsys.stdout.flush()\nos.close(1)", ADD),
        (f"{SUM}\nimport sys, time\nsys.stdout.close()\ntime.sleep(0.2)", ADD),
        ("print(sum(map(int, open('/dev/stdin').read().split())))", ADD),
        ("import sys\nsys.stdin = open('/dev/stdin')\n" + SUM, ADD),
        ("import pathlib\nprint(sum(map(int, pathlib.Path('/dev/stdin').read_text().split())))", ADD),
        ("import os\nprint(sum(map(int, os.read(os.open('/dev/stdin', os.O_RDONLY), 99).split())))", ADD),
        ("print(sum(map(int, open('/dev/fd/0', 'rb').read().split())))", ADD),
        (f"{SUM[:-1]}, file=open('/dev/stdout', 'w'))", ADD),
        ("print(0.1 + 0.2)", {"inputs": [""], "outputs": ["0.3"]}),
        ("def f(): return 0.1 + 0.2", ["assert f() == 0.3"]),
        ("def f(): return [0.1 + 0.2]", {"fn_name": "f", "inputs": [[]], "outputs": [[0.3]]}),
        ("def f(): return 0.1 + 0.2 - 0.3", ["assert f() == 0.0"]),
    ],
)
def test_right_programs(worker, program, tests):
    for _ in range(3):
        assert status(worker, program, tests) == "pass"


def test_an_exit_with_an_error_is_a_crash(worker):
    assert status(worker, SQUARE + "exit(1)", ["assert f(3) == 9"]) == "crash"
    assert status(worker, "exit()\n" + SQUARE, ["assert f(3) == 9"]) == "crash"
    assert status(worker, f"{SUM}\nexit('no')", ADD) == "crash"


@pytest.mark.parametrize(
    ("given", "right", "equal"),
    [
        (complex(9, 0), 9, False), (9, complex(9, 0), False), (9 + 0j, 9 + 0j, True), ({True}, {1}, False),
        ({1}, {True}, False), ({1.0}, {1}, True), ({True: 1}, {1: 1}, False), ({(1, True)}, {(1, 1)}, False),
        ({(1, 2)}, {(1, 2)}, True), ([{True}], [{1}], False), ({9 + 0j}, {9}, False), (frozenset({1}), {1}, True),
    ],
)  # fmt: skip
def test_types_of_equal_values(given, right, equal):
    assert equal_values(given, right) is equal


@pytest.mark.parametrize(
    ("given", "right", "equal"),
    [
        (0.1 + 0.2, 0.3, True), (0.3001, 0.3, False), (9.000000000000002, 9, False), (9, 9.0, True), (True, 1.0, False),
        (10**400, 0.3, False), (float("inf"), float("inf"), True), (float("nan"), float("nan"), False),
        (1e-17, 0.0, True),
        (1e-17, 2e-17, False), ({"a": (0.1 + 0.2,)}, {"a": (0.3,)}, True), (0.1 + 0.2 + 0j, 0.3, False),
    ],
)  # fmt: skip
def test_tolerance(given, right, equal):
    assert equal_values(given, right, 1e-9) is equal
    assert equal_values(0.1 + 0.2, 0.3) is False


@pytest.mark.parametrize(
    ("printed", "expected", "equal"),
    [
        ("0.30000000000000004", "0.3", True), ("a 0.30000000000000004", "a 0.3", True), ("0.31", "0.3", False),
        ("9.0", "9", False), ("9", "9.0", True), ("1e-1", "0.1", True), ("nan", "0.1", False), ("0.3 1", "0.3", False),
        ("0.3  1", "0.3 1", False), ("1522756.0000000001", "1522756", False), ("0.3x", "0.3", False),
        ("inf", "1e999", False),
    ],
)  # fmt: skip
def test_tolerance_of_what_is_printed(printed, expected, equal):
    assert Stream("", expected).accepts(printed) is equal
    assert Stream("", expected).accepts(printed, 0.0) is False


BLOCK = "def f(x):\n    return x * x"


@pytest.mark.parametrize(
    "text",
    [
        f"``` python\n{BLOCK}\n```",
        f"```python \n{BLOCK}\n``` ",
        f"```python3.11\n{BLOCK}\n```",
        f"```python title=\"a.py\"\n{BLOCK}\n```",
        f"```Python\r\n{BLOCK}\r\n```\r\n".replace("\n ", "\r\n "),
        f"~~~python\n{BLOCK}\n~~~",
        f"````python\n{BLOCK}\n````",
        f"  ```python\n{BLOCK}\n  ```",
        "1. So:\n   ```python\n   def f(x):\n       return x * x\n   ```\n",
        f"Here: ```python\n{BLOCK}```",
        f"```python\n{BLOCK}\n```\nExample:\n```\nf(3)  # 9\n```",
        f"```python\n{BLOCK}\n```\n```python\nprint(f(3))\n```",
        f"```python\n{BLOCK}\n```\nOutput:\n```\n9\n```",
        f"```python\n{BLOCK}\n```\n```text\nit squares, as asked\n```",
        f"```python\n{BLOCK}\n```\n```bash\npip install nothing\n```",
        f"```python\n{BLOCK}\n```\nDone.\n```\n```",
        f"```python\ndef f(x): return 0\n```\nBetter:\n```python\n{BLOCK}\n```",
    ],
)  # fmt: skip
def test_the_block_of_the_solution(text):
    assert code_of(text) == code_of(text, ["f"]) == BLOCK


def test_the_block_that_defines_what_is_asked_for():
    text = f"```python\n{BLOCK}\n```\nTests:\n```python\ndef test_f():\n    assert f(3) == 9\n```"
    assert code_of(text, ["f"]) == BLOCK
    stdin = f"```python\n{SUM}\n```\nFor example:\n```\n1 2\n```\nprints\n```\n3\n```"
    assert code_of(stdin) == SUM
    reward = CodeReward(size=1)
    assert reward([text, stdin], [["assert f(3) == 9"], ADD]) == [1.0, 1.0]
    reward.close()


@pytest.mark.parametrize("kind", ["spin", "sleep", "stdin"])
def test_a_test_that_hangs_costs_only_itself(worker, kind):
    tests = [f"assert f({x}) == {x * x}" for x in range(12)]
    hang = "while True: pass" if kind == "spin" else "__import__('time').sleep(99)"
    program = f"def f(x):\n    if x in (3, 7):\n        {hang}\n    return x * x"
    if kind == "stdin":
        tests = {"inputs": [str(x) for x in range(12)], "outputs": [str(x * x) for x in range(12)]}
        program += "\nprint(f(int(input())))"
    limits = {"seconds": 30.0, "cpu_seconds": 0.3} if kind == "spin" else {"seconds": 0.7}
    for _ in range(3):
        found = worker.do(Job(program, read_problem(tests), all_cases=True, **limits))
        assert (found.passed, found.cases, found.status) == (10, 12, "timeout")


def test_a_test_does_not_depend_on_those_before_it(worker):
    program = "seen = []\ndef f(x):\n    seen.append(x)\n    return x if len(seen) < 3 or x > 4 else 0"
    tests = [f"assert f({x}) == {x}" for x in range(1, 9)] + ["assert f(1) + f(2) + f(3) == 3"]
    for _ in range(4):
        assert worker.do(Job(program, read_problem(tests), all_cases=True)).passed == 9


def test_each_test_has_its_own_processor_time(worker):
    program = "import time\ndef f(x):\n    end = time.process_time() + 0.5\n"
    program += "    while time.process_time() < end: pass\n    return x"
    tests = [f"assert f({x}) == {x}" for x in range(4)] + ["assert f(5) < 6"]
    assert status(worker, program, tests, cpu_seconds=1.0) == "pass"  # 2.5 s in all
    assert status(worker, program, tests, cpu_seconds=0.3) == "timeout"


def test_the_cache_of_problems_is_bounded_by_their_size(monkeypatch):
    monkeypatch.setattr("troll.rewards.problems._CACHED_CHARACTERS", 10_000)
    cache = _Cache()
    for n in range(50):
        cache.get((f'["assert f({n}) == {"1" * 500}"]', "", "", ""))
    assert cache.characters <= 10_000
    assert 5 < len(cache._problems) < 25
    cache.get((f"[\"assert f(0) == '{'0' * 20_000}'\"]", "", "", ""))
    assert (cache.characters, len(cache._problems)) == (0, 0)
