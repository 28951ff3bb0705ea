"""Remainders as plain few-shot text, ``25 % 9 = 7``: short answers, and a long way from guessing to knowing."""

import random

stop = "\n"
settings = {"max_completion_length": 5}


def problem(pair, shown):
    """A prompt with four worked examples, and the answer."""
    shots = "".join(f"{a} % {b} = {a % b}\n" for a, b in shown)
    a, b = pair
    return {"prompt": f"{shots}{a} % {b} =", "answer": str(a % b), "difficulty": float(b)}


def reward(completions, answer, **columns):
    """1 for the right remainder, 0 for a wrong one."""
    return [float(text.split("\n")[0].strip() == right) for text, right in zip(completions, answer, strict=True)]


rng = random.Random(0)
pairs = [(a, b) for a in range(10, 100) for b in range(3, 20)]
rng.shuffle(pairs)
test, rest = pairs[:256], pairs[256:]
eval_dataset = [problem(pair, rng.sample(rest, 4)) for pair in test]
train_dataset = [problem(pair, rng.sample(rest, 4)) for pair in rest * 4]
