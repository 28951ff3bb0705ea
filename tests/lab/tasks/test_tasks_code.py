"""Programming problems as tasks: what is read of the data, what is asked, what earns a reward."""

from __future__ import annotations

import json

import pytest

from troll.errors import InputError
from troll.lab.tasks import load_task
from troll.rewards.sandbox import SandboxError

MBPP = [
    {
        "task_id": n,
        "text": f"Write a function to add {n}.",
        "test_list": [f"assert add(1) == {n + 1}", f"assert add(-{n}) == 0"],
        "test_setup_code": "",
    }
    for n in range(4)
]
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "from typing import List\n\n\ndef top(xs: List[int]) -> int:\n    '''Largest of xs.'''\n",
    "entry_point": "top",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 3]) == 3, 'a'\n    assert True, 'b'\n"
    "    assert abs(candidate([-1.0]) + 1) < 1e-6\n",
}
GOOD = "def top(xs: List[int]) -> int:\n    return max(xs)"


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def reward(task, index, *texts):
    row = {key: [value] * len(texts) for key, value in task.train_dataset[index].items()}
    return task.reward_funcs[0](prompts=row.pop("prompt"), completions=[[{"content": t}] for t in texts], **row)


def test_mbpp(tmp_path):
    task = load_task("mbpp", data=write(tmp_path / "mbpp.jsonl", MBPP))
    row = task.train_dataset[0]
    n = int(row["prompt"][0]["content"].split("add ")[1].split(".")[0])
    assert f"assert add(1) == {n + 1}" in row["prompt"][0]["content"]
    assert f"add(-{n}) == 0" not in row["prompt"][0]["content"]  # only the first test is shown
    right = f"```python\ndef add(x):\n    return x + {n}\n```"
    assert reward(task, 0, f"Here:\n{right}\nIt adds.", f"def add(x): return {n + 1}", "", "Sorry.") == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]


def test_what_mbpp_sets_up_runs_after_the_program(tmp_path):
    row = {**MBPP[0], "test_setup_code": "node = Node(7)", "test_list": ["assert value(node) == 7"]}
    task = load_task("mbpp", data=write(tmp_path / "m.jsonl", [row, {**row, "text": "Other."}]), eval_size=1)
    program = "class Node:\n    def __init__(self, v): self.v = v\ndef value(n): return n.v\n"
    assert reward(task, 0, program, program.replace("Node", "Knot")) == [1.0, 0.0]


def test_humaneval(tmp_path):
    rows = [HUMANEVAL, {**HUMANEVAL, "prompt": HUMANEVAL["prompt"].replace("Largest", "Most")}]
    task = load_task("humaneval", data=write(tmp_path / "h.jsonl", rows), eval_size=1)
    assert task.train_dataset["tests"][0] == ["assert top([1, 3]) == 3, 'a'", "assert abs(top([-1.0]) + 1) < 1e-06"]
    assert reward(task, 0, GOOD, GOOD.replace("max", "min"), "def top(xs): return 3") == [1.0, 0.0, 0.0]


def test_humaneval_with_more_than_asserts_runs_whole(tmp_path):
    test = "def check(candidate):\n    for n in range(3):\n        assert candidate([n, 0]) == n\n"
    rows = [{**HUMANEVAL, "test": test}, {**HUMANEVAL, "test": test, "prompt": HUMANEVAL["prompt"] + "#"}]
    task = load_task("humaneval", data=write(tmp_path / "h.jsonl", rows), eval_size=1)
    assert task.train_dataset["tests"][0] == [f"{test}\ncheck(top)"]
    assert reward(task, 0, GOOD, GOOD.replace("max", "min")) == [1.0, 0.0]


def test_humaneval_leaves_the_function_to_the_model(tmp_path):
    start = "import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef top(xs):\n    '''Half of the largest.'''\n"
    test = "def check(candidate):\n    for n in range(3):\n        assert math.isclose(candidate([n, 0]), half(n))\n"
    rows = [{**HUMANEVAL, "prompt": start + "#" * n, "test": test} for n in range(2)]
    task = load_task("humaneval", data=write(tmp_path / "h.jsonl", rows), eval_size=1)
    assert "def half" in task.train_dataset["setup"][0]
    assert "def top" not in task.train_dataset["setup"][0]
    cheat = "def half(x): return 0\ndef top(xs): return 0"  # the test has its own
    assert reward(task, 0, "def top(xs): return half(max(xs))", cheat) == [1.0, 0.0]


CODE = [
    {"question": f"Add {n}.", "input_output": json.dumps({"inputs": ["1", "2"], "outputs": [str(1 + n), str(2 + n)]})}
    for n in range(2)
]


def test_any_problems_with_standard_input(tmp_path):
    task = load_task("code", data=write(tmp_path / "c.jsonl", CODE), eval_size=1)
    asked = task.train_dataset["prompt"][0][0]["content"]
    n = int(asked.split("Add ")[1].split(".")[0])
    assert "It reads standard input and prints the answer." in asked
    assert reward(task, 0, f"print(int(input()) + {n})", f"print(1 + {n})", "") == [1.0, 0.0, 0.0]


def test_any_problems_with_functions(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Double it."}]
    tests = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [2, 4]}
    rows = [
        {"prompt": chat, "tests": tests, "setup": "two = 2"},
        {"prompt": chat[::-1], "tests": ["assert f(3) == 6"]},
    ]
    task = load_task("code", data=write(tmp_path / "c.jsonl", rows), eval_size=1)
    for part in (task.train_dataset, task.eval_dataset):
        assert part["prompt"][0] in (chat, chat[::-1])
    texts = ("def f(x): return 2 * x", "def f(x): return 2")
    assert reward(task, 0, *texts) == [1.0, 0.0]
    named = task.train_dataset if task.train_dataset["setup"][0] else task.eval_dataset
    row = {key: [value] for key, value in named[0].items()}
    assert task.reward_funcs[0](completions=["def f(x): return two * x"], **row) == [1.0]


def test_partial_credit_and_time_are_options(tmp_path):
    data = write(tmp_path / "mbpp.jsonl", MBPP)
    task = load_task("mbpp", data=data, options={"partial": "true", "seconds": "1"})
    n = int(task.train_dataset[0]["prompt"][0]["content"].split("add ")[1].split(".")[0])
    half = f"def add(x): return {n + 1}" if n else "def add(x): return 1"
    assert reward(task, 0, half, f"def add(x): return x + {n}") == [0.5, 1.0]
    assert reward(task, 0, "while True: pass") == [0.0]
    with pytest.raises(InputError, match=r"seconds must be > 0, got 0.0"):
        load_task("mbpp", data=data, options={"seconds": 0})
    with pytest.raises(InputError, match=r"mbpp has no option 'parts'. The options are .*partial=False, seconds=15.0"):
        load_task("mbpp", data=data, options={"parts": 1})


def test_code_needs_data():
    with pytest.raises(InputError, match=r"--task code needs --data"):
        load_task("code")


def test_without_a_sandbox_no_task_loads(monkeypatch, tmp_path):
    def none():
        raise SandboxError("model-written code to run, and no sandbox for it", "apt install bubblewrap")

    monkeypatch.setattr("troll.lab.tasks.problem_sets.best", none)
    with pytest.raises(InputError, match=r"no sandbox for it.*apt install bubblewrap"):
        load_task("mbpp", data=write(tmp_path / "mbpp.jsonl", MBPP))


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        (
            "mbpp",
            {**MBPP[0], "test_list": ["assert f( == 1"]},
            "m.jsonl, line 1: .*'assert f\\( == 1' .*invalid syntax.*a list of Python asserts",
        ),
        ("mbpp", {**MBPP[0], "test_list": [3]}, "line 1: .*'3' .*a list of Python asserts"),
        ("mbpp", {**MBPP[0], "test_list": []}, "line 1: test_list is empty"),
        ("mbpp", {"text": "a"}, "line 1 has no field 'test_list'; its fields are: text"),
        ("humaneval", {**HUMANEVAL, "entry_point": None}, "line 1: entry_point must be text, got None"),
    ],
)
def test_records_that_cannot_be_used_are_said(tmp_path, name, row, says):
    with pytest.raises(InputError, match=says):
        load_task(name, data=write(tmp_path / "m.jsonl", [row, row]))
