"""One-line Python functions from a phrase, as plain few-shot text; the function is run and its results decide."""

import random

from troll.rewards.code import CodeReward

stop = "\n"
settings = {"max_completion_length": 24}
INPUTS = (-4, 0, 3, 7, 12)
FIRST = {
    "x": "x",
    "x plus {n}": "(x + {n})",
    "x minus {n}": "(x - {n})",
    "x times {n}": "x * {n}",
    "the remainder of x by {n}": "x % {n}",
    "the larger of x and {n}": "max(x, {n})",
    "the smaller of x and {n}": "min(x, {n})",
    "the absolute value of x": "abs(x)",
    "the square of x": "x ** 2",
}
THEN = {"": "{y}", ", plus {n}": "{y} + {n}", ", minus {n}": "{y} - {n}", ", times {n}": "({y}) * {n}"}
SHOTS = "# x times 3\ndef f(x): return x * 3\n# the larger of x and 5, plus 2\ndef f(x): return max(x, 5) + 2\n"
START = "def f(x):"
run = CodeReward()


def problem(first, then, m, n):
    """A prompt with two worked examples, and the tests."""
    phrase = first.format(n=m) + then.format(n=n)
    code = THEN[then].format(n=n, y=FIRST[first].format(n=m))
    tests = [f"assert f({x}) == {eval(code, {'x': x})}" for x in INPUTS]
    return {"prompt": f"{SHOTS}# {phrase}\n{START}", "tests": tests, "difficulty": (first != "x") + bool(then) + 0.0}


def reward(completions, tests, **columns):
    """1 for a function with the right results."""
    lines = [text.split("\n")[0] for text in completions]
    return run([f"```python\n{START}{line}\n```" for line in lines], tests)


rng = random.Random(0)
kinds = [(first, then) for first in FIRST for then in THEN if (first, then) != ("x", "")]
problems = {
    p["prompt"]: p for kind in kinds for m in range(2, 10) for n in range(2, 10) for p in [problem(*kind, m, n)]
}
rows = list(problems.values())
rng.shuffle(rows)
eval_dataset, train_dataset = rows[:128], rows[128:]
