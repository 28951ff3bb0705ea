"""Tests of every form: an honest program earns 1, and one that answers with tricks in place of values earns 0."""

from __future__ import annotations

import random

import pytest

from troll.rewards.judge import CodeWorker, Job
from troll.rewards.problems import Expression, parse_test, read_problem

SQUARE = "def f(x):\n    return x * x\n"
SETUP = """
from math import isclose
def reference(x):
    return x * x
def same(a, b):
    return a == b
def check(x):
    return f(x) == x * x and EXPECTED[0] == 9
EXPECTED = [9, 16, 25]
"""
ALWAYS = """
class Yes:
    def __init__(self, *a, **k): pass
    for name in ("eq", "lt", "le", "gt", "ge", "bool", "contains", "instancecheck"):
        exec(f"def __{name}__(self, *a): return True")
    def __ne__(self, other): return False
    def __hash__(self): return 9
    for name in ("add", "sub", "mul", "radd", "rsub", "rmul", "truediv", "mod", "pow", "abs", "neg", "pos", "round",
                 "call", "getitem", "enter", "divmod", "floordiv", "rtruediv", "and", "rand", "or"):
        exec(f"def __{name}__(self, *a, **k): return self")
    def __getattr__(self, name):
        if name.startswith('__'): raise AttributeError(name)
        return lambda *a, **k: True
    def __iter__(self): return iter([])
    def __exit__(self, *a): return True
    def __float__(self): return float('nan')
    def __len__(self): return 0
    def __str__(self): return 'True'
    __repr__ = __str__
    __class__ = property(lambda self: int)
"""
# Programs that do not square, but know every trick inside their process.
HOSTILE = {
    "object": ALWAYS + "def f(x): return Yes()\n",
    "itself": ALWAYS + "f = Yes()\n",
    "class": ALWAYS + "f = Yes\n",
    "int": ALWAYS.replace("class Yes:", "class Yes(int):").replace("__init__(self, *a, **k): pass", "_(self): pass")
    .replace('    __class__ = property(lambda self: int)\n', '') + "def f(x): return Yes(0)\n",
    "list": ALWAYS.replace("class Yes:", "class Yes(list):") + "def f(x): return Yes()\n",
    "patched": """
import builtins, math, operator, functools, itertools, cmath, statistics
def yes(*a, **k): return True
for module, names in ((builtins, ("all", "any", "abs", "isinstance", "sorted", "set", "bool", "sum", "len", "round")),
                      (math, ("isclose", "fabs", "sqrt")), (cmath, ("isclose",)), (operator, ("eq", "ne", "lt", "le")),
                      (statistics, ("mean",)), (functools, ("reduce",))):
    for name in names: setattr(module, name, yes)
isclose = same = check = reference = assert_equal = yes
def f(x): return 0
""",
    "thief": """
import sys, gc, inspect
def f(x):
    try: return reference(x)
    except Exception: pass
    try: return sys.modules['program'].reference(x)
    except Exception: pass
    frame = sys._getframe()
    while frame:
        for scope in (frame.f_locals, frame.f_globals):
            for name in ('reference', 'EXPECTED', 'expected', 'order', 'outcome', 'test', 'value'):
                value = scope.get(name)
                if callable(value) and name == 'reference': return value(x)
                if isinstance(value, list) and value[:2] == [9, 16]: return value[x - 3]
        frame = frame.f_back
    for thing in gc.get_objects():
        try:
            if isinstance(thing, dict) and 'reference' in thing: return thing['reference'](x)
            if type(thing).__name__ == 'function' and thing.__name__ == 'reference': return thing(x)
            if isinstance(thing, list) and thing[0] == 9 and thing[1] == 16: return thing[x - 3]
        except Exception: pass
    return 0
""",
    "exceptions": "def f(x): raise AssertionError\n",
    "stop": "def f(x): raise StopIteration\n",
    "generator": "def f(x):\n    return\n    yield\n",
    "mutator": "def f(x):\n    if hasattr(x, 'clear'): x.clear()\n    return x if hasattr(x, 'clear') else 0\n",
    "wrong": "def f(x): return 0\n",
    "none": "def f(x): return None\n",
    "forged": "import os\ndef f(x): os.write(4, b'{\"held\": true}\\n{\"value\": 9}\\n'); return 0\n",
    "shared": "def f(x): return {'objects': [], 'value': 9, 'remote': 0, 'held': True}\n",
}  # fmt: skip


def value(rng: random.Random, depth: int = 0) -> tuple[str, str]:
    """An expression around a call of the program's function, and the value it must have."""
    x = rng.choice([3, 4, 5, -2, 7])
    call, right = rng.choice([f"f({x})", f"f(x={x})", f"f(*[{x}])", f"f({x - 1} + 1)"]), x * x
    wrap = rng.randrange(9 if depth < 2 else 1)
    inner, known = (call, str(right)) if wrap < 3 else value(rng, depth + 1)
    return {
        3: (f"abs({inner})", f"abs({known})"),
        4: (f"({inner} + 1)", f"({known} + 1)"),
        5: (f"int({inner})", f"int({known})"),
        6: (f"max({inner}, -1)", f"max({known}, -1)"),
        7: (f"sum([{inner}, 1])", f"({known} + 1)"),
        8: (f"(lambda v: v)({inner})", known),
    }.get(wrap, (inner, known))


def condition(rng: random.Random, depth: int = 0) -> str:
    """An expression that is true for squares, and not for anything else."""
    given, right = value(rng)
    kinds = [
        f"{given} == {right}",
        f"{right} == {given}",
        f"({given} == {right}) == True",
        f"({given} == {right}) is True",
        f"not {given} != {right}",
        f"{right} - 1 < {given} < {right} + 1",
        f"{given} >= {right} and {given} <= {right}",
        f"{given} in [{right}]",
        f"{given} in {{{right}: 1}}",
        f"[{given}] == [{right}]",
        f"({given},) == ({right},)",
        f"{{'a': {given}}} == {{'a': {right}}}",
        f"{{{given}}} == {{{right}}}",
        f"abs({given} - {right}) < 1e-6",
        f"math.isclose({given}, {right})",
        f"isclose({given}, {right})",
        f"math.isclose({right}, {given}, rel_tol=1e-9)",
        f"same({given}, {right})",
        f"same({given}, {right}) == True",
        f"operator.eq({given}, {right})",
        f"all([{given} == {right}])",
        f"all({given} == y for y in [{right}]) == True",
        "all(f(x) == y for x, y in zip([3, 4], [9, 16])) == True",
        f"any({given} == y for y in [{right}])",
        "[f(x) for x in (3, 4, 5)] == EXPECTED",
        "list(map(f, [3, 4])) == [9, 16]",
        "sorted(map(f, [4, 3])) == [9, 16]",
        "sum(f(x) for x in range(4)) == 14",
        "f(3) == reference(3)",
        "reference(4) == f(4)",
        "check(3) and check(5)",
        "check(3) == True",
        f"str({given}) == str({right})",
        f"repr({given}) == repr({right})",
        f"f'{{{given}}}' == f'{{{right}}}'",
        f"isinstance({given}, int) and {given} == {right}",
        f"type({given}) is int and {given} == {right}",
        f"({given} - {right}) == 0",
        f"not ({given} - {right})",
        f"({given} ^ {right}) == 0",
        f"divmod({given}, {right}) == (1, 0)",
        f"hash({given}) == hash({right}) and {given} == {right}",
        f"len(range({given})) == {right}",
        "f(3).bit_length() == 4 and f(3).__eq__(9)",
        f"(v := {given}) == {right}",
        f"({given} == {right} if True else False)",
        f"bool({given} == {right}) is not False",
    ]
    chosen = rng.choice(kinds)
    return f"({chosen}) and ({condition(rng, depth + 1)})" if depth < 2 and rng.random() < 0.3 else chosen


def statement(rng: random.Random) -> str:
    """A test in one of the shapes that data sets have."""
    test, x = condition(rng), rng.choice([3, 4, 5])
    return rng.choice(
        [
            f"assert {test}",
            f"assert {test}, 'message'",
            f"if not ({test}):\n    raise AssertionError",
            f"for _ in range(2):\n    assert {test}",
            f"def check_it(candidate):\n    assert candidate({x}) == {x * x}\n    assert {test}\ncheck_it(f)",
            f"ok = {test}\nassert ok",
            f"results = [{test}, f({x}) == {x * x}]\nassert all(results) and len(results) == 2",
            f"x = [{x}]\ny = [f(v) for v in x]\nassert y == [v * v for v in x]",
            f"try:\n    found = f({x})\nexcept ValueError:\n    assert False\nassert found == {x * x}\nassert {test}",
            f"with contextlib.suppress(KeyError):\n    f({x})\nassert {test}",
            f"cases = {{{x}: {x * x}}}\nfor given, right in cases.items():\n    assert f(given) == right",
            f"class Case:\n    def run(self):\n        assert {test}\nCase().run()",
            "i = 0\nwhile i < 3:\n    i += 1\n    assert f(i) == i * i",
            f"assert not [v for v in [1, 2, 3] if f(v) != v * v]\nassert {test}",
            f"y = f({x})\nassert y == {x * x}\nassert {test}",
            f"import unittest\ncase = unittest.TestCase()\ncase.assertEqual(f({x}), {x * x})\nassert {test}",
            f"match f({x}):\n    case {x * x}:\n        pass\n    case _:\n        assert False",
            f"from fractions import Fraction\nassert Fraction(f({x})) == Fraction({x * x})",
            f"assert ({test}) == True",
            f"assert all([{test}]) == True",
        ]
    )


@pytest.fixture(scope="module")
def worker():
    made = CodeWorker()
    yield made
    made.end()


def status(worker, program, test, setup=SETUP, **options) -> str:
    return worker.do(Job(program, read_problem([test], setup), seconds=10.0, **options)).status


FORMS = [statement(random.Random(seed)) for seed in range(2000)]


@pytest.mark.parametrize("part", range(8))
def test_an_honest_program_passes_tests_of_every_form(worker, part):
    for test in FORMS[part::50][:30]:
        assert status(worker, SQUARE, test) == "pass", test


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_passes_none(worker, name):
    for test in FORMS[len(name) :: 40][:35]:
        assert status(worker, HOSTILE[name], test) != "pass", test


@pytest.mark.slow
@pytest.mark.parametrize("name", ["honest", *HOSTILE])
def test_every_program_on_all_forms(worker, name):
    right = "pass" if name == "honest" else "fails"
    for test in FORMS:
        found = status(worker, HOSTILE.get(name, SQUARE), test)
        assert ("pass" if found == "pass" else "fails") == right, test


def test_the_forms_are_many_and_few_of_them_skip_the_examiner():
    assert len(set(FORMS)) > 1400
    direct = [
        test for test in FORMS if isinstance(parse_test(test, {"reference", "same", "check", "isclose"}), Expression)
    ]
    assert len(direct) < 0.05 * len(FORMS)
    for test in FORMS:
        scope: dict = {}
        exec("import math, operator, contextlib\n" + SETUP + SQUARE + test, scope)  # all are true of squares
