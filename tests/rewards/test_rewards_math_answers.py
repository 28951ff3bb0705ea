"""Answers as text: which one a completion gives, exact numbers, trees."""

from __future__ import annotations

import string
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from math_cases import CASES

from troll.rewards.answers import Group, Leaf, boxed, compare_leaves, equal_trees, expression, final_number, parse
from troll.rewards.latex import fraction, number, split, strip_brackets, tidy


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 42", "42"),
        ("#### 41\nno\n#### 42.", "42"),
        ("so \\boxed{-1,000.50}", "-1000.5"),
        ("#### 42\nMore text", "42"),
        ("#### about 42", None),
        ("#### 4 2", None),
        ("\\boxed{7} #### x", None),
        ("42", None),
        ("#### " + "9" * 5000, None),
    ],
)
def test_final_number(text, value):
    assert final_number(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234", "1234"),
        ("12,34", None),
        ("007", "7"),
        ("-0.0", "0"),
        (".5", "0.5"),
        ("5.", "5"),
        (".", None),
        ("", None),
        ("1e3", None),
        ("\\$5", "5"),
        ("$-5$", "-5"),
        ("+3", "3"),
        ("٣", None),
        ("1/2", None),
        ("100", "100"),
        ("0.10", "0.1"),
        ("10000000000000000000000000000001", "10000000000000000000000000000001"),
    ],
)
def test_number(text, value):
    assert number(text) == value


def test_boxed():
    assert boxed("\\boxed{1} and \\boxed{\\frac{1}{2}} end") == "\\frac{1}{2}"
    assert boxed("\\boxed {7}") == "7"
    assert boxed("\\boxed{\\frac{1}{2}") is None
    assert boxed("\\boxed{}") is None
    assert boxed("none") is None
    assert boxed("\\boxed{" + "x" * 100_000 + "}") is None
    assert boxed("\\boxed{" * 100_000) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,200.50", Fraction(2401, 2)),
        ("\\frac{-3}{4}", Fraction(-3, 4)),
        ("-\\frac{3}{4}", Fraction(-3, 4)),
        ("3/4", Fraction(3, 4)),
        ("0.5/2", Fraction(1, 4)),
        ("-1\\frac{1}{2}", Fraction(-3, 2)),
        ("1 1/2", Fraction(3, 2)),
        ("11/2", Fraction(11, 2)),
        ("2.5\\times10^{3}", Fraction(2500)),
        ("-10^{2}", Fraction(-100)),
        ("10^2", Fraction(100)),
        ("1/0", None),
        ("1\\frac{1}{0}", None),
        ("1/2/3", None),
        ("10^{9999}", None),
        ("2^3", None),
        ("", None),
        ("-", None),
    ],
)
def test_fraction(text, value):
    assert fraction(text) == value


@given(st.fractions(max_denominator=10**6))
def test_fractions_are_exact(value):
    sign, above = "-" if value < 0 else "", abs(value.numerator)
    for text in (f"{value.numerator}/{value.denominator}", f"{sign}\\frac{{{above}}}{{{value.denominator}}}"):
        assert fraction(text) == value
        tree = parse(text)
        assert isinstance(tree, Leaf)
        assert tree.value == value


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("$ x $", "x"),
        ("\\left( x + 1 \\right)", "(x+1)"),
        ("\\dfrac 12", "\\frac{1}{2}"),
        ("\\frac{\\frac12}3", "\\frac{\\frac{1}{2}}{3}"),
        ("\\frac\\pi2", "\\frac{\\pi}{2}"),
        ("\\sqrt(2)", "\\sqrt{2}"),
        ("\\pi r", "\\pi r"),
        ("4 2", "4 2"),
        ("3 x", "3x"),
        ("\\text{a b}", "\\text{a b}"),
        ("1{,}000", "1000"),
        ("x.", "x"),
    ],
)
def test_tidy(text, plain):
    assert tidy(text) == plain


def test_brackets():
    assert split("a,(b,c),\\{d,e\\}", ",") == ["a", "(b,c)", "\\{d,e\\}"]
    assert split("(a,b", ",") == ["(a,b"]
    assert split("a),(b", ",") == ["a),(b"]
    assert strip_brackets("(a,b]") == ("(", "a,b", "]")
    assert strip_brackets("(a)(b)") is None
    assert strip_brackets("(a") is None


def test_trees():
    half_open = parse("(1,2]")
    assert isinstance(half_open, Group)
    assert (half_open.ends, [leaf.text for leaf in half_open.parts]) == ("(]", ["1", "2"])
    assert parse("x \\in (1,2]") == Group("(]", half_open.parts, "x")
    assert parse("1 < x \\le 2") == parse("2 \\ge x > 1") == Group("(]", half_open.parts, "x")
    assert parse("\\{1, 2\\}") == parse("1 \\text{ and } 2") == Group("{}", half_open.parts)
    assert parse("5\\text{ cm}") == Leaf("5", Fraction(5), "cm")
    for nothing in ("", "  ", "x" * 301, "x\x07", "{" * 20 + "}" * 20):
        assert parse(nothing) is None


@pytest.mark.parametrize("bomb", [case.answer for case in CASES if case.why == "bomb"])
def test_bombs_are_seen_before_any_process_has_them(bomb):
    gold, answer = parse("x"), parse(bomb)
    assert isinstance(gold, Leaf)
    assert isinstance(answer, Leaf)
    assert compare_leaves(gold, answer) is False


def test_answers_for_majority_votes_are_alike_where_they_are_equal():
    def vote(answer):
        return expression(f"\\boxed{{{answer}}}")

    assert vote("\\dfrac{1}{2}") == vote("0.5") == vote("x=\\frac12") == vote("\\frac{2}{4}")
    assert vote("(1, 2)") == vote("\\left(1,2\\right)") != vote("(2,1)")
    assert vote("\\{1,2\\}") == vote("2, 1") != vote("(1,2)")
    assert vote("50\\%") != vote("50")
    assert vote("90^\\circ") == vote("90")
    assert vote("") is None
    assert expression("5") is None


@given(st.text(alphabet=string.printable + "\\\\{}()[]^_,;=<>&πé\ud800", max_size=60))
def test_any_text_is_read_and_equals_itself(text):
    tree = parse(text)
    if tree is not None:
        assert equal_trees(tree, tree, lambda gold, answer: compare_leaves(gold, answer) is True)
