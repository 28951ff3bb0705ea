from __future__ import annotations

import pytest

from troll.errors import InputError
from troll.lab.tasks import load_task


def questions(data) -> set[str]:
    return {prompt[-1]["content"] for prompt in data["prompt"]}


def score(task, answers, split="train_dataset"):
    rows = getattr(task, split)[: len(answers)]
    replies = [[{"role": "assistant", "content": answer}] for answer in answers]
    return task.reward_funcs[0](prompts=rows.pop("prompt"), completions=replies, **rows)


def test_the_right_answer_in_tags_scores_one_in_both_sets():
    task = load_task("gym:gcd", train_size=20, eval_size=10)
    assert task.train_dataset["prompt"][0][0]["role"] == "system"
    assert "<answer>" in task.train_dataset["prompt"][0][0]["content"]
    for split in ("train_dataset", "eval_dataset"):
        right = getattr(task, split)["answer"][:]
        assert score(task, [f"I think <answer>{a}</answer>" for a in right], split) == [1.0] * len(right)
        assert score(task, [str(a) for a in right], split) == [0.0] * len(right)  # no tags
    first = task.train_dataset["answer"][0]
    assert score(task, [f"<answer>{first}</answer> no, <answer>{first}0</answer>"])[0] < 1  # the last one counts
    assert task.answer_of(f"<answer> {first} </answer>") == first
    assert task.answer_of(first) is None


def test_with_worked_examples_the_reply_is_the_answer():
    task = load_task("gym:gcd", options={"shots": 2, "max_value": "30"}, train_size=20, eval_size=10)
    prompt = task.train_dataset["prompt"][0]
    assert [message["role"] for message in prompt] == ["system", *["user", "assistant"] * 2, "user"]
    examples = {prompt[1]["content"], prompt[3]["content"]}
    assert not examples & (questions(task.train_dataset) | questions(task.eval_dataset))
    assert score(task, [f" {a}\n" for a in task.train_dataset["answer"]]) == [1.0] * 20
    assert score(task, ["0"]) == [0.0]


def test_sets_do_not_overlap_and_only_training_depends_on_the_seed():
    small = {"options": {"min_value": 1, "max_value": 12}, "train_size": 30, "eval_size": 10}
    one, two = load_task("gym:gcd", **small, seed=1), load_task("gym:gcd", **small, seed=2)
    assert one.eval_dataset.to_list() == two.eval_dataset.to_list()
    assert len(questions(one.train_dataset) & questions(two.train_dataset)) < 25  # of about 144 problems
    for task in (one, two):
        assert len(questions(task.train_dataset)) == 30
        assert not questions(task.train_dataset) & questions(task.eval_dataset)


def test_problems_are_the_same_in_every_run():
    first = load_task("gym:polynomial_multiplication", train_size=4, eval_size=2)  # depends on the order of a set
    again = load_task("gym:polynomial_multiplication", train_size=4, eval_size=2)
    assert first.train_dataset[:] == again.train_dataset[:]
    assert first.eval_dataset[:] == again.eval_dataset[:]
    right = first.train_dataset["answer"][:]
    assert score(first, [f"<answer>{a}</answer>" for a in right]) == [1.0] * 4


def test_an_answer_that_is_code_runs_in_the_sandbox_only(tmp_path):
    task = load_task("gym:spiral_matrix", train_size=2, eval_size=2)  # its score calls eval on the answer
    right = task.train_dataset["answer"][0]
    file = tmp_path / "escaped"
    assert score(task, [f"<answer>{right}</answer>"]) == [1.0]
    score(task, [f"<answer>[open({str(file)!r}, 'w').write('x')]</answer>"])
    assert not file.exists()
    assert score(
        task, ["<answer>[__import__('os')._exit(0)]</answer>", f"<answer>{task.train_dataset['answer'][1]}</answer>"]
    ) == [
        0.0,
        1.0,  # the process was started again
    ]


def test_an_answer_that_takes_for_ever_earns_nothing(monkeypatch):
    task = load_task("gym:countdown", train_size=1, eval_size=1)
    monkeypatch.setattr("troll.lab.tasks.generated.SECONDS", 0.5)
    assert score(task, ["<answer>factorial(10**9)</answer>"]) == [0.0]
    monkeypatch.setattr("troll.lab.tasks.generated.SECONDS", 60.0)
    assert score(task, [f"<answer>{task.train_dataset['answer'][0]}</answer>"]) == [1.0]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("gym:gdc", {}, "no generator 'gdc'. Did you mean gym:gcd"),
        ("gym:", {}, "no generator ''"),
        ("gym:composite", {}, "gym:composite rejected its options \\(no options\\): .*Must specify"),
        ("gym:rush_hour", {"options": {"shots": 1}, "train_size": 1, "eval_size": 1}, "has no reference answers"),
        (
            "gym:gcd",
            {"options": {"max_valu": 3}},
            "gym:gcd has no option 'max_valu'. Did you mean 'max_value'?",
        ),
        ("gym:gcd", {"options": {"max_value": "x"}}, "max_value must be of type int, got 'x'. The default is 1000"),
        (
            "gym:gcd",
            {"options": {"min_value": 9, "max_value": 2}},
            "gym:gcd rejected its options .*min_value=9",
        ),
        (
            "gym:gcd",
            {"options": {"max_value": 3, "min_numbers": 2, "max_numbers": 2}, "train_size": 50, "eval_size": 2},
            "train_size=50, but gym:gcd generated only \\d+ different problems",
        ),
    ],
)
def test_what_cannot_be_used_is_said(name, arguments, says):
    with pytest.raises(InputError, match=says):
        load_task(name, **arguments)
