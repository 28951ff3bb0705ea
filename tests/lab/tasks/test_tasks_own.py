"""Tasks and rewards of one's own: a Python file, a reward function by name, and what is said when they fail."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest

from troll.errors import InputError
from troll.lab.tasks import load_task
from troll.trl.robust.reward_validation import checked_rewards

EXAMPLES = Path(__file__).parents[3] / "examples" / "tasks"
WHOLE = """
'''Copy a letter.'''
from neighbour import LETTERS
train_dataset = [{"prompt": f"{x}{x}{x}", "answer": x} for x in LETTERS]
eval_dataset = [{"prompt": "zzz", "answer": "z"}, {"prompt": "aaa", "answer": "a"}]
stop = " "
settings = {"max_completion_length": 2}
def reward(completions, answer, **columns):
    return [float(c == a) for c, a in zip(completions, answer)]
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "mine.py") -> str:
        (tmp_path / "neighbour.py").write_text('LETTERS = "abcdef"\n')
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def run(task, completions, **columns):
    """As the trainer, the evaluation and verl call a reward."""
    return checked_rewards(task.reward_funcs[:1], prompts=["p"] * len(completions), completions=completions, **columns)[
        0
    ]


def test_a_file_with_three_names_is_a_task(write):
    before = list(sys.path)
    task = load_task(write(WHOLE))
    assert task.name == "mine"
    assert task.description == "Copy a letter."
    assert task.train_dataset["prompt"][:] == ["bbb", "ccc", "ddd", "eee", "fff"]  # aaa is held out
    assert task.eval_dataset["answer"][:] == ["z", "a"]
    assert (task.stop, task.settings) == (" ", {"max_completion_length": 2})
    assert run(task, ["a", "b"], answer=["a", "a"]) == [1.0, 0.0]
    assert task.answer_of(" x\ny") == "x"
    assert sys.path == before


def test_sizes_of_a_file(write):
    path = write(WHOLE)
    chosen = [load_task(path, train_size=2, eval_size=1, seed=seed) for seed in range(9)]
    assert {len(task.train_dataset) for task in chosen} == {2}
    assert len({tuple(task.train_dataset["prompt"]) for task in chosen}) > 1
    assert len({tuple(task.eval_dataset["prompt"]) for task in chosen}) == 1
    with pytest.raises(InputError, match=r"train_size=6, but .*mine.py has only 5 problems"):
        load_task(path, train_size=6)


def test_a_file_with_load(write):
    path = write(
        WHOLE.replace("stop = ", "end = ")
        + """
from datasets import Dataset
from troll.lab.tasks import Task, first_line
def load():
    data = Dataset.from_list(train_dataset)
    return Task("letters", "d", data, Dataset.from_list(eval_dataset), [reward], first_line, stop=end)
"""
    )
    task = load_task(path, train_size=3)
    assert (task.name, task.stop, len(task.train_dataset), len(task.eval_dataset)) == ("letters", " ", 3, 2)
    assert run(task, ["q"], answer=["q"]) == [1.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\ntrain_dataset = [", "mine.py, line 2: .*never closed. Correct this line"),
        ("x = 1\n\nimport no_such_module", "mine.py, line 3: ModuleNotFoundError: .*no_such_module"),
        ("def f():\n    return 1 / 0\n\nf()", "mine.py, line 2: ZeroDivisionError"),
        ("raise SystemExit(3)", "mine.py, line 1: SystemExit: 3"),
        (
            "train_dataset = []",
            "does not define eval_dataset and reward. A task file defines train_dataset and eval_dataset",
        ),
        (WHOLE.replace("reward(", "other("), "does not define reward"),
        (WHOLE + "reward = 3", "reward must be a function or a list of functions, got 3"),
        (WHOLE + "train_dataset = []", "train_dataset is empty"),
        (WHOLE + "train_dataset = {'prompt': 'a'}", "train_dataset must be a list of {'prompt': …}, got a dict"),
        (WHOLE + "train_dataset[1] = 'a'", "train_dataset\\[1\\]: expected an object with fields, got a str"),
        (WHOLE + "train_dataset[1] = {'question': 'a'}", "train_dataset\\[1\\] has no field 'prompt'"),
        (WHOLE + "train_dataset[2] = {'prompt': 3}", "train_dataset\\[2\\]: prompt must be text or a list, got 3"),
        (WHOLE + "train_dataset[2] = {'prompt': ' '}", "train_dataset\\[2\\]: prompt is empty"),
        (WHOLE + "train_dataset = eval_dataset", "All problems of .* are also held out"),
        (WHOLE + "def load():\n    return 3", "load\\(\\) returned a int. Return a troll.lab.tasks.Task"),
        (WHOLE + "def load():\n    return 1 / 0", "load\\(\\) failed in .*mine.py, line 11: ZeroDivisionError"),
    ],
)
def test_a_file_that_cannot_be_used_is_said(write, text, says):
    with pytest.raises(InputError, match=says):
        load_task(write(text))


def test_a_file_that_is_not_there():
    with pytest.raises(InputError, match=r"The file nowhere\.py does not exist"):
        load_task("nowhere.py")


def test_the_example_task():
    task = load_task(str(EXAMPLES / "roman.py"))
    ask = lambda prompt: prompt.split("\n")[-1]  # noqa: E731
    assert not set(map(ask, task.train_dataset["prompt"])) & set(map(ask, task.eval_dataset["prompt"]))
    numerals = {
        int(ask(p).removesuffix(" =")): a
        for p, a in zip(task.train_dataset["prompt"], task.train_dataset["answer"], strict=True)
    }
    numerals |= {
        int(ask(p).removesuffix(" =")): a
        for p, a in zip(task.eval_dataset["prompt"], task.eval_dataset["answer"], strict=True)
    }
    assert set(numerals) == set(range(1, 100))
    assert [numerals[n] for n in (1, 4, 14, 49, 88, 99)] == ["I", "IV", "XIV", "XLIX", "LXXXVIII", "XCIX"]
    assert run(task, [" XIV\n", "XIII"], answer=["XIV", "XIV"]) == [1.0, 0.0]


def test_the_example_reward_replaces_that_of_the_task():
    task = load_task("arithmetic", reward=[f"{EXAMPLES / 'rewards.py'}:short"])
    assert len(task.reward_funcs) == 1
    assert task.reward_funcs[0].__name__ == "short"
    assert run(task, ["", "abc", "  "], answer=["7"] * 3) == [1.0, 0.25, None]


def test_rewards_of_modules_and_files_together(write):
    path = write("def two(completions, **columns):\n    return [2 for _ in completions]\n")
    task = load_task("arithmetic", reward=["troll.lab.tasks:exact_match", f"{path}:two"])
    assert [f.__name__ for f in task.reward_funcs] == ["exact_match", "two"]
    assert [f(prompts=["p"], completions=["7\n"], answer=["7"]) for f in task.reward_funcs] == [[1.0], [2.0]]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("exact", "The reward 'exact' is not of the form module:function or file.py:function"),
        ("a.b:", "not of the form module:function"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("troll.lab.tasks:nothing", "troll.lab.tasks defines no function 'nothing'"),
        ("troll.lab.tasks:__all__", "The reward 'troll.lab.tasks:__all__' is a list, not a function"),
        ("nowhere.py:f", "The file nowhere.py does not exist"),
    ],
)
def test_a_reward_that_is_not_found_is_said(name, says):
    with pytest.raises(InputError, match=says):
        load_task("arithmetic", reward=[name])


@pytest.fixture
def reward(write):
    def reward(body: str, start: str = "def"):
        path = write(f"{start} mine(completions, **columns):\n    {body}\n", "rewards.py")
        return load_task("arithmetic", train_size=2, reward=[f"{path}:mine"])

    return reward


def test_a_reward_that_raises_names_itself_the_line_and_the_completion(reward):
    task = reward("return [1 / len(text) for text in completions]")
    says = r"function 'mine' raised ZeroDivisionError: division by zero at rewards\.py:2, on completion 1 \(''\)"
    with pytest.raises(InputError, match=says) as raised:
        run(task, ["ab", "", "c"], answer=["1", "2", "3"], trainer_state=object())
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert "1 / len(text)" in "".join(traceback.format_exception(raised.value))


def test_the_columns_of_the_completion_go_with_it(reward):
    task = reward("return [int(a) for a in columns['answer']]")
    with pytest.raises(InputError, match=r"on completion 1 .'second'"):
        run(task, ["first", "second", "third"], answer=["1", "x", "3"])


def test_a_reward_that_fails_only_on_all_together(reward):
    task = reward("return [1.0] if len(completions) == 1 else 1 / 0")
    with pytest.raises(InputError, match="on 2 completions, the first 'a'"):
        run(task, ["a", "b"])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return [1.0]", "returned 1 rewards for 2 completions. Return a list of 2 numbers"),
        ("return None", "the reward function 'mine' returned None instead of a list"),
        ("return [1.0, 'good']", "returned 'good' for completion 1 .'b'"),
        ("return [float('nan'), 1]", "returned nan for completion 0 .'a'"),
        ("return [1, float('inf')]", "returned inf for completion 1 .'b'"),
        ("return [[1], [2]]", "returned \\[1\\] for completion 0 .'a'"),
    ],
)
def test_results_that_are_no_rewards_are_said(reward, body, says):
    with pytest.raises(InputError, match=says):
        run(reward(body), ["a", "b"])


def test_results_of_numpy_and_torch_become_numbers(reward):
    task = reward("import numpy, torch; return [numpy.float32(0.5), torch.tensor(2.0), True, None]")
    assert run(task, list("abcd")) == [0.5, 2.0, 1.0, None]


def test_an_object_that_can_be_called_is_a_reward_too(write):
    path = write(
        "class Half:\n    def __call__(self, completions, **c): return [0.5 for _ in completions]\nhalf = Half()"
    )
    task = load_task("arithmetic", reward=[f"{path}:half"])
    assert run(task, ["a"]) == [0.5]
    assert task.reward_funcs[0].__name__ == "Half"
    with pytest.raises(InputError, match="The reward Half is a type, not a function"):
        load_task("arithmetic", reward=[f"{path}:Half"])


def test_an_async_reward_stays_async(reward):
    task = reward("return [1 / len(text) for text in completions]", start="async def")
    assert run(task, ["ab"]) == [0.5]
    with pytest.raises(InputError, match="the reward function 'mine' raised ZeroDivisionError"):
        run(task, [""])
