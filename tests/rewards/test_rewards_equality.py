"""Equality by interval arithmetic: right enclosures, no universal answer, no near miss, the same in every run."""

from __future__ import annotations

import random
import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from math_cases import CANCELLED, CASES
from mpmath import iv

from troll.rewards import MathReward
from troll.rewards.answers import parse
from troll.rewards.enclosures import UndefinedError, parts_of, value
from troll.rewards.equality import CONSTANT, HIGH, LOW, _points, equal, rounds_to
from troll.rewards.selftest.answers import GOLDS
from troll.rewards.units import may_follow, read_unit

X, Y = sympy.symbols("x y", real=True)
POINT = {X: sympy.Rational(12345, 7919), Y: sympy.Rational(-777, 541)}
FUNCTIONS = (
    sympy.sin, sympy.cos, sympy.tan, sympy.cot, sympy.sec, sympy.csc, sympy.asin, sympy.acos, sympy.atan, sympy.acot,
    sympy.sinh, sympy.cosh, sympy.tanh, sympy.asinh, sympy.acosh, sympy.atanh, sympy.exp, sympy.log, sympy.sqrt,
    sympy.Abs, sympy.gamma, sympy.factorial, sympy.floor, sympy.ceiling, sympy.re, sympy.im, sympy.conjugate,
)  # fmt: skip


@pytest.fixture(scope="module")
def reward():
    reward = MathReward(size=1)
    yield reward
    reward.close()


def leaves():
    numbers = st.builds(sympy.Rational, st.integers(-9, 9), st.integers(1, 7))
    return st.one_of(st.sampled_from([X, Y, sympy.pi, sympy.E, sympy.I]), numbers)


def grow(inner):
    small = st.sampled_from([-2, -1, 2, 3, sympy.Rational(1, 2), sympy.Rational(1, 3), X])
    return st.one_of(
        st.builds(sympy.Add, inner, inner),
        st.builds(sympy.Mul, inner, inner),
        st.builds(sympy.Pow, inner, small),
        st.builds(lambda function, part: function(part), st.sampled_from(FUNCTIONS), inner),
    )


@settings(deadline=None, max_examples=150)
@given(st.recursive(leaves(), grow, max_leaves=5))
def test_the_value_lies_in_its_enclosure(expression):
    """Against sympy's own evaluation, which is another algorithm; and a narrow enclosure against a wide one."""
    if expression.has(sympy.nan, sympy.zoo, sympy.oo):
        return
    try:
        wide, narrow = (parts_of(value(expression, POINT, bits)) for bits in (LOW, HIGH))
    except UndefinedError:
        return
    iv.prec = HIGH
    assert all(a.a <= b.b and b.a <= a.b for a, b in zip(wide, narrow, strict=True))
    expected = expression.subs(POINT).evalf(40).as_real_imag()
    scale = 1 + max(abs(part).b for part in wide)
    for part, right in zip(narrow, expected, strict=True):
        if right.is_Float or right.is_Rational:
            if getattr(right, "_prec", 2) == 1:
                continue  # no digit of sympy's value is right
            number = sympy.Rational(right)
            near = iv.mpf(int(number.p)) / iv.mpf(int(number.q))
            assert abs(near - part).a <= scale * iv.mpf(10) ** -30


@pytest.mark.parametrize(
    "expression",
    [
        sympy.Pow(sympy.Add(X, -X, evaluate=False), -1, evaluate=False),
        sympy.log(sympy.Add(X, -X, evaluate=False), evaluate=False),
        sympy.Pow(0, X**2),
        sympy.gamma(sympy.Integer(-3), evaluate=False),
        sympy.exp(sympy.exp(sympy.exp(sympy.exp(9)))),
        sympy.exp(sympy.Integer(10) ** 9),
        sympy.Pow(sympy.pi, 10**9),
        sympy.sin(sympy.exp(10**6)),
        sympy.factorial(sympy.Integer(10) ** 6 + sympy.Rational(1, 2)),
        sympy.zeta(3),
        sympy.Symbol("z"),
    ],
    ids=str,
)
def test_what_has_no_value_here_is_undefined_at_once(expression):
    began = time.monotonic()
    with pytest.raises(UndefinedError):
        parts_of(value(expression, POINT, CONSTANT))
    assert time.monotonic() - began < 5.0


def test_real_values_only_where_asked():
    assert value(sympy.sqrt(Y), POINT, LOW) is not None
    with pytest.raises(UndefinedError):
        value(sympy.sqrt(Y), POINT, LOW, real=True)


def test_a_value_without_known_digits_equals_nothing():
    nothing = (sympy.pi**4999 + 1) ** 2 - sympy.pi**9998 - 2 * sympy.pi**4999
    for gold in (sympy.sqrt(2), sympy.pi / 4, sympy.Integer(0), sympy.Rational(1, 3), X**2 + 1, sympy.sin(X)):
        assert not equal(gold, nothing, "seed")
        assert not equal(nothing, gold, "seed")
        assert not equal(gold, gold + nothing, "seed")
        assert not equal(gold, gold * nothing, "seed") or gold == 0
    assert not equal(sympy.Eq(Y, 2 * X + 3), sympy.Eq(nothing, 1), "seed")


def test_points_are_the_same_in_every_run_and_different_for_every_answer():
    def drawn(seed):
        return [point[X] for point, _ in _points(X**2, seed)]

    assert drawn("gold\0answer") == drawn("gold\0answer")
    assert not set(drawn("gold\0answer")) & set(drawn("gold\0answer "))
    assert all(x.q > 1 << 40 or abs(x) > 1 << 9 for x in drawn("any"))  # no small denominators
    assert {x > 0 for x in drawn("any")} == {True, False}


def test_rounded_numbers():
    assert rounds_to(sympy.sqrt(2), sympy.Rational("1.414"), 3)
    assert rounds_to(sympy.sqrt(2), sympy.Rational("1.415"), 3)
    assert not rounds_to(sympy.sqrt(2), sympy.Rational("1.416"), 3)
    assert not rounds_to(sympy.sqrt(2), sympy.Integer(7), 0)
    assert not rounds_to(X, sympy.Integer(1), 0)


def test_units():
    assert read_unit("square feet") == read_unit("ft", "2") == read_unit("sq. ft.") == (1, "ft^2")
    assert read_unit("miles per hour") == (1, "mi / h")
    for unit in ("cm", "mi / h", "apple", "degree", "unit^2"):
        assert may_follow(unit, "", plain=True)
    for unit in ("vs seven", "or seven", "seven", "not", "is the answer", "x y", "base 7", "%", "( 7 )", "7"):
        assert not may_follow(unit, "", plain=True)
    assert not may_follow("cm", "in", plain=True)
    assert not may_follow("cm^2", "cm", plain=True)
    assert not may_follow("degree", "", plain=False)


# Answers of a random grammar that has many ways to lose all digits, to be undefined, and to say two things at once.
ATOMS = [
    "0",
    "1",
    "2",
    "x",
    "y",
    "n",
    "e",
    "i",
    "\\pi",
    "\\infty",
    "\\pi^{499}",
    "e^{999}",
    "10^{-300}",
    "f(x)",
    "\\sqrt{2}",
]
ATOMS += ["0^0", "\\frac{1}{0}", "\\infty-\\infty", "x-x", "5", "\\text{a}", "", "\\%", "z_1", "99!"]
FORMS = [
    "({a})^2-({b})^2", "({a}+1)-({a})", "({a})({b})", "({a})-({b})", "\\frac{{{a}}}{{{b}}}", "({a})^{{{b}}}",
    "0^{{{a}}}", "0\\cdot({a})", "\\sqrt{{{a}}}", "\\ln({a})", "\\sin({a})", "\\tan({a})",
    "\\cosh({a})-\\sinh({a})", "\\arcsin({a})", "\\lfloor {a}\\rfloor", "|{a}|", "({a})!", "\\log_{{{a}}}({b})",
    "({a}+1)^2-({a})^2-2({a})", "{a}'", "({a})^\\circ", "{a}\\%", "{a}={b}", "{a}<{b}", "({a},{b})", "{a},{b}",
    "x={a}", "y={a}", "{a}\\text{{ cm}}", "{a}\\approx1", "{a}\\pm{b}", "x\\ne{a}",
]  # fmt: skip


def grammar(draw: random.Random, depth: int) -> str:
    if depth == 0:
        return draw.choice(ATOMS)
    return draw.choice(FORMS).format(a=grammar(draw, depth - 1), b=grammar(draw, max(0, depth - 2)))


def test_no_answer_of_a_random_grammar_is_accepted_for_two_right_answers(reward):
    draw = random.Random(7)
    answers = [grammar(draw, draw.choice((1, 2, 2))) for _ in range(150)] + [CANCELLED]
    scores = iter(reward.score([answer for answer in answers for _ in GOLDS], GOLDS * len(answers)))
    accepted = {answer: [gold for gold in GOLDS if next(scores) == 1.0] for answer in answers}
    assert {answer: golds for answer, golds in accepted.items() if len(golds) > 1} == {}


def test_right_answers_in_many_notations_are_right_and_near_misses_are_wrong(reward):
    golds = [gold for gold in GOLDS if not re.search("[=<]|infty", gold)]
    same = [
        "{}",
        "0+{}",
        "({})",
        "\\frac{{2({})}}{{2}}",
        "\\left({}\\right)",
        "$ {} $",
        "\\mathbf{{{}}}",
        "1\\cdot({})",
        "--({})",
    ]
    same += ["\\color{{red}}{{{}}}", "\\,{}\\,", "\\boldsymbol{{{}}}.", "({})^1", "{}+x-x"]
    near = [
        "{}+10^{{-9}}",
        "({})\\cdot1.0001",
        "{}-\\frac{{1}}{{10^{{40}}}}",
        "-({})",
        "({})^{{1.01}}",
        "2({})",
        "{}+10^{{-99}}",
    ]
    for forms, score in ((same, 1.0), (near, 0.0)):
        pairs = [(gold, form.format(gold)) for gold in golds for form in forms]
        scores = reward.score([answer for _, answer in pairs], [gold for gold, _ in pairs])
        assert {pair for pair, one in zip(pairs, scores, strict=True) if one != score} == set()


def test_right_answers_of_different_kinds_are_different(reward):
    for gold, other in pairwise(GOLDS):
        assert reward.score([other, gold], [gold, other]) == [0.0, 0.0]


def test_no_text_keeps_the_parser_of_text_busy():
    """Text is parsed in the trainer's process, which has no deadline."""
    draw = random.Random(3)
    pieces = [
        "(",
        "[",
        "{",
        "}",
        "]",
        ")",
        "\\{",
        ",",
        ";",
        "x",
        "1",
        "\\text{",
        "\\text{a}",
        "\\frac",
        " ",
        "\\color{red}",
        "a b ",
    ]
    pieces += [
        "=",
        "and",
        "\\phantom{",
        "^",
        "_",
        "e5",
        "\\pm",
        "\\approx",
        "**",
        '"',
        "$",
        ".",
        "\\begin{pmatrix}",
        "&",
        "not ",
    ]
    spent = []
    for _ in range(300):
        few = [draw.choice(pieces) for _ in range(draw.choice((1, 2, 3, 5)))]
        text = "".join(draw.choice(few) for _ in range(300))[:300]
        began = time.process_time()
        parse(text)
        spent.append(time.process_time() - began)
    assert sorted(spent)[-3] < 0.2  # milliseconds on a quiet machine


def test_the_page_counts_the_cases():
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    assert f"no wrong answer of the {len(CASES)} test cases" in page
    assert f"has {len(CASES)} cases" in page
