"""Word problems and competition mathematics: reading of the data, reading of the answer, equality."""

from __future__ import annotations

import json
import threading

import pytest

from troll.errors import InputError
from troll.tasks import load_task
from troll.tasks.word_problems import SameExpression, boxed, expression, final_number, number

GSM8K = [
    {"question": f"Ann has {n} nuts and buys {n}.", "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n:,}"}
    for n in (2, 600, 31, 4)
]
MATH = [
    {"problem": "Half?", "answer": "\\frac{1}{2}", "difficulty": 3.0},
    {"problem": "Third?", "solution": "It is $\\boxed{\\frac{1}{3}}$.", "level": "Level 5"},
    {"problem": "Two?", "answer": 2, "level": "Level ?"},
]


@pytest.fixture
def file(tmp_path):
    def file(rows) -> str:
        path = tmp_path / "problems.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return file


def rows_of(task) -> dict[str, dict]:
    rows = task.train.to_list() + task.held_out.to_list()
    return {row["prompt"][-1]["content"]: row for row in rows}


def test_gsm8k(file):
    task = load_task("gsm8k", data=file(GSM8K))
    rows = rows_of(task)
    row = rows["Ann has 600 nuts and buys 600."]
    assert [m["role"] for m in row["prompt"]] == ["system", "user"]
    assert (row["answer"], row["difficulty"]) == ("1200", 1.0)
    replies = [
        [{"role": "assistant", "content": text}] for text in ("1,200 it is.\n#### $1,200.00", "#### 1201", "1200")
    ]
    assert task.reward_funcs[0](prompts=[[]] * 3, completions=replies, answer=["1200"] * 3) == [1.0, 0.0, 0.0]


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
    ],
)
def test_number(text, value):
    assert number(text) == value


def test_math(file):
    task = load_task("math", data=file(MATH))
    rows = rows_of(task)
    assert {q: (r["answer"], r["difficulty"]) for q, r in rows.items()} == {
        "Half?": ("\\frac{1}{2}", 3.0),
        "Third?": ("\\frac{1}{3}", 5.0),
        "Two?": ("2", None),
    }
    reward = task.reward_funcs[0]
    replies = [[{"role": "assistant", "content": text}] for text in ("\\boxed{0.5}", "\\boxed{\\frac{1}{3}}", "1/2")]
    assert reward(prompts=[[]] * 3, completions=replies, answer=["\\frac{1}{2}"] * 3) == [1.0, 0.0, 0.0]


def test_boxed():
    assert boxed("\\boxed{1} and \\boxed{\\frac{1}{2}} end") == "\\frac{1}{2}"
    assert boxed("\\boxed{\\frac{1}{2}") is None
    assert boxed("\\boxed{}") is None
    assert boxed("none") is None
    assert expression("\\boxed{ \\dfrac{1}{2} }") == expression("\\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"


@pytest.fixture(scope="module")
def same():
    return SameExpression()


@pytest.mark.parametrize(
    ("given", "right", "reward"),
    [
        ("10", "10.0", 1),
        ("10", "11", 0),
        ("90^\\circ", "90", 1),
        ("x + 1", "1 + x", 1),
        ("2 \\sin x", "2\\sin(x)", 1),
        ("\\begin{pmatrix} 3 \\\\ 1 \\end{pmatrix}", "\\begin{pmatrix}3\\\\1\\end{pmatrix}", 1),
        ("\\begin{pmatrix} 1 \\\\ 3 \\end{pmatrix}", "\\begin{pmatrix}3\\\\1\\end{pmatrix}", 0),
        ("(1, 2)", "(2, 1)", 0),
        ("\\sqrt{8}", "2\\sqrt{2}", 1),
        ("", "1", 0),
        ("\\frac{1", "1", 0),
        ("x" * 400, "1", 0),
        (None, "1", 0),
    ],
)
def test_same_expression(same, given, right, reward):
    assert same.one(given, right) == reward


def test_an_expression_that_takes_for_ever_earns_nothing(same, monkeypatch):
    monkeypatch.setattr("troll.tasks.checker.DEADLINE", 0.5)
    assert same.one("9^{9^{9}}", "x") == 0.0
    monkeypatch.setattr("troll.tasks.checker.DEADLINE", 60.0)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(same.one("2x", "x + x")))  # not the main one
    thread.start()
    thread.join()
    assert answers == [1.0]


def test_a_checker_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    checker = SameExpression()
    checker.checker._command = [*checker.checker._command[:1], "-c", "raise SystemExit('no memory')"]
    with pytest.raises(InputError, match="did not start \\(no memory\\)"):
        checker.one("x", "y")


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("gsm8k", {"question": "a", "answer": "twelve"}, "line 2: the answer ends in 'twelve'; expected: a number"),
        ("gsm8k", {"question": "a"}, "line 2: question; expected: the field 'answer' or 'final_answer'"),
        ("gsm8k", {"question": 3, "answer": "1"}, "line 2: question=3"),
        ("math", {"problem": "a", "solution": "so 3"}, "line 2: the solution has no"),
        ("math", {"problem": "a", "answer": None}, "line 2: answer=None"),
        ("math", {"problem": "a"}, "line 2: problem; expected: the field 'answer' or 'final_answer' or"),
    ],
)
def test_records_that_cannot_be_used_are_said(file, name, row, says):
    start = {"question": "q", "problem": "q", "answer": "1"}
    with pytest.raises(InputError, match=says):
        load_task(name, data=file([start, row, start]))
