from __future__ import annotations

import re

import pytest

from troll.errors import InputError
from troll.lab.tasks import load_task, task_names, text_of


def problem(prompt: str) -> tuple[str, frozenset[int] | tuple[int, ...]]:
    """Sign and operands of the question asked; 3 + 4 and 4 + 3 are the same."""
    left, sign, right = re.fullmatch(r"(\d+) ([-+*]) (\d+) =", prompt.split("\n")[-1]).groups()
    pair = (int(left), int(right))
    return sign, tuple(sorted(pair)) if sign != "-" else pair


def test_prompts_are_right_sums():
    task = load_task("arithmetic", options={"digits": 2, "operations": "+-*", "shots": 4}, train_size=300)
    signs = set()
    for row in task.train:
        *examples, asked = row["prompt"].split("\n")
        assert len(examples) == 4
        assert len({*examples}) == 4
        for line in [*examples, f"{asked} {row['answer']}"]:
            left, right = line.split(" = ")
            assert eval(left) == int(right) >= 0
            signs.add(left.split()[1])
        assert not any(example.startswith(asked) for example in examples)
        assert row["difficulty"] == len(row["answer"])
    assert signs == {"+", "-", "*"}


@pytest.mark.parametrize("options", [{}, {"digits": 2}, {"operations": "*", "shots": 0}])
def test_held_out_problems_are_not_trained_on_nor_shown(options):
    train = {problem(p) for seed in range(3) for p in load_task(options=options, seed=seed).train["prompt"]}
    task = load_task(options=options)
    held_out = {problem(p) for p in task.held_out["prompt"]}
    shown = {problem(line.split("=")[0] + "=") for p in task.held_out["prompt"] for line in p.split("\n")[:-1]}
    assert len(held_out) >= 10
    assert not held_out & train
    assert not held_out & shown


def test_only_the_training_set_depends_on_the_seed():
    one, two, again = load_task(seed=1), load_task(seed=2), load_task(seed=1, train_size=10)
    assert one.train["prompt"] != two.train["prompt"]
    assert one.train["prompt"][:10] == again.train["prompt"][:]
    assert one.held_out.to_list() == two.held_out.to_list() == again.held_out.to_list()


def test_sizes():
    task = load_task(train_size=7, held_out_size=3)
    assert (len(task.train), len(task.held_out)) == (7, 3)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [(" 12\n", 1), ("12", 1), ("\t12 \nand 7", 1), (" 12.", 0), (" 12 or so\n", 0), ("\n12", 0), ("", 0), ("012", 0)],
)
def test_reward_is_for_exactly_the_answer(completion, reward):
    task = load_task(train_size=1)
    [plain] = task.reward_funcs[0](prompts=["6 + 6 ="], completions=[completion], answer=["12"])
    [chat] = task.reward_funcs[0](
        prompts=[[]], completions=[[{"role": "assistant", "content": completion}]], answer=["12"]
    )
    assert plain == chat == reward
    assert (task.answer_of(completion) == "12") == bool(reward)


def test_what_the_task_asks_of_generation():
    task = load_task(options={"digits": 3, "operations": "*"})
    assert task.stop == "\n"
    assert max(map(len, task.train["answer"])) + 2 <= task.settings["max_completion_length"]  # space, newline


def test_options_come_as_strings_too():
    assert load_task(options={"digits": "2"}).train[:] == load_task(options={"digits": 2}).train[:]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"options": {"digit": 2}}, "digit=2 of arithmetic; expected: digits=1, operations='\\+-', shots=1"),
        ({"options": {"digits": "two"}}, "digits='two' of arithmetic; expected: int, e.g. 1"),
        ({"options": {"digits": 1.5}}, "expected: int"),
        ({"options": {"digits": True}}, "expected: int"),
        ({"options": {"digits": 0}}, "digits=0; expected: 1 to 12"),
        ({"options": {"operations": "+/"}}, "operations='\\+/'; expected: some of \\+ - \\*"),
        ({"options": {"shots": -1}}, "shots=-1"),
        ({"data": "x.jsonl"}, 'makes its own problems; try: the task "data"'),
        ({"train_size": 0}, "train_size=0; expected: a number of problems, at least 1"),
        ({"name": "aritmetic"}, "'aritmetic'; expected: arithmetic, gym:NAME, .*; try: arithmetic"),
        ({"name": "FILE.py"}, "'FILE.py'"),
        ({"name": "gym:NAME"}, "'gym:NAME'"),
    ],
)
def test_what_cannot_be_used_is_said(arguments, says):
    with pytest.raises(InputError, match=says):
        load_task(**{"name": "arithmetic", **arguments})


def test_every_task_has_a_line():
    names = {"arithmetic", "gym:NAME", "gsm8k", "math", "mbpp", "humaneval", "code", "FILE.py", "data"}
    assert set(task_names()) == names
    assert all("\n" not in line and len(line) > 20 for line in task_names().values())


def test_text_of_a_completion():
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert text_of([{"role": "tool", "content": "no"}, {"role": "assistant", "content": parts}]) == "ab"
    assert text_of([]) == ""
