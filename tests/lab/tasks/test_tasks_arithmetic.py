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
    for row in task.train_dataset:
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
    train = {problem(p) for seed in range(3) for p in load_task(options=options, seed=seed).train_dataset["prompt"]}
    task = load_task(options=options)
    held_out = {problem(p) for p in task.eval_dataset["prompt"]}
    shown = {problem(line.split("=")[0] + "=") for p in task.eval_dataset["prompt"] for line in p.split("\n")[:-1]}
    assert len(held_out) >= 10
    assert not held_out & train
    assert not held_out & shown


def test_only_the_training_set_depends_on_the_seed():
    one, two, again = load_task(seed=1), load_task(seed=2), load_task(seed=1, train_size=10)
    assert one.train_dataset["prompt"] != two.train_dataset["prompt"]
    assert one.train_dataset["prompt"][:10] == again.train_dataset["prompt"][:]
    assert one.eval_dataset.to_list() == two.eval_dataset.to_list() == again.eval_dataset.to_list()


def test_sizes():
    task = load_task(train_size=7, eval_size=3)
    assert (len(task.train_dataset), len(task.eval_dataset)) == (7, 3)


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
    assert max(map(len, task.train_dataset["answer"])) + 2 <= task.settings["max_completion_length"]  # space, newline


def test_options_come_as_strings_too():
    assert load_task(options={"digits": "2"}).train_dataset[:] == load_task(options={"digits": 2}).train_dataset[:]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"options": {"digit": 2}}, "The task arithmetic has no option 'digit'. Did you mean 'digits'?"),
        ({"options": {"digits": "two"}}, "digits must be of type int, got 'two'. The default is 1"),
        ({"options": {"digits": 1.5}}, "must be of type int, got 1.5"),
        ({"options": {"digits": True}}, "must be of type int, got True"),
        ({"options": {"digits": 0}}, "digits must be 1 to 12, got 0"),
        ({"options": {"operations": "+/"}}, "operations must be some of \\+ - \\*, got '\\+/'"),
        ({"options": {"shots": -1}}, "shots must be 0 to 16 worked examples, got -1"),
        ({"data": "x.jsonl"}, "generates its problems and takes no data, got 'x.jsonl'. Use --task data"),
        ({"train_size": 0}, "train_size must be at least 1, got 0"),
        ({"name": "aritmetic"}, "There is no task 'aritmetic'. Did you mean 'arithmetic'?"),
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
