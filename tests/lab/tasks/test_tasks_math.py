"""Word problems and competition mathematics: reading of the data, reading of the answer, equality."""

from __future__ import annotations

import json

import pytest

from troll.errors import InputError
from troll.lab.tasks import load_task

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
    rows = task.train_dataset.to_list() + task.eval_dataset.to_list()
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


def test_what_cannot_be_read_is_said_by_line_and_compared_as_text(file):
    odd = [{"problem": f"Odd {i}?", "answer": answer} for i, answer in enumerate(["5 @ 3", "\\foo{", "#", "@", "@@"])]
    with pytest.warns(
        UserWarning, match=r"5 of 8 reference answers .*line 4: '5 @ 3'; .*line 5: .*; .*line 6: '#'; …$"
    ):
        task = load_task("math", data=file(MATH + odd), eval_size=1)
    replies = [[{"role": "assistant", "content": text}] for text in ("\\boxed{5 @ 3}", "\\boxed{8}", "\\boxed{@}")]
    assert task.reward_funcs[0](completions=replies, answer=["5 @ 3", "5 @ 3", "@"]) == [1.0, 0.0, 1.0]


def test_data_without_any_answer_to_read_is_an_error(file):
    rows = [{"problem": f"Odd {i}?", "answer": "@" * (i + 1)} for i in range(3)]
    with pytest.raises(
        InputError, match=r"line [123]: the answer '@+' is not a mathematical expression, nor is any other"
    ):
        load_task("math", data=file(rows))


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("gsm8k", {"question": "a", "answer": "twelve"}, "line 2: the answer is not a number; it ends in 'twelve'"),
        ("gsm8k", {"question": "a"}, "line 2 has no field 'answer' or 'final_answer'; its fields are: question"),
        ("gsm8k", {"question": 3, "answer": "1"}, "line 2: question must be text, got 3"),
        ("math", {"problem": "a", "solution": "so 3"}, "line 2: the solution has no"),
        ("math", {"problem": "a", "answer": None}, "line 2: answer must be text or int or float, got None"),
        ("math", {"problem": "a"}, "line 2 has no field 'answer' or 'final_answer' or"),
    ],
)
def test_records_that_cannot_be_used_are_said(file, name, row, says):
    start = {"question": "q", "problem": "q", "answer": "1"}
    with pytest.raises(InputError, match=says):
        load_task(name, data=file([start, row, start]))
