"""Lists in order, as plain few-shot text: ``sorted([9, 0, 4]) = [0, 4, 9]``, of two to five numbers below 20."""

import random

stop = "\n"
settings = {"max_completion_length": 20}


def draw(rng):
    """A list of two to five different numbers below 20."""
    return tuple(rng.sample(range(20), rng.randint(2, 5)))


def problem(numbers, shown):
    """A prompt with two worked examples, and the answer."""
    shots = "".join(f"sorted({list(x)}) = {sorted(x)}\n" for x in shown)
    answer = str(sorted(numbers))
    return {"prompt": f"{shots}sorted({list(numbers)}) =", "answer": answer, "difficulty": float(len(numbers))}


def reward(completions, answer, **columns):
    """1 for the right list, 0 for a wrong one."""
    return [float(text.split("\n")[0].strip() == right) for text, right in zip(completions, answer, strict=True)]


rng = random.Random(0)
lists = list(dict.fromkeys(draw(rng) for _ in range(9000)))[:8448]
test, rest = lists[:256], lists[256:]
held_out = [problem(numbers, rng.sample(rest, 2)) for numbers in test]
train = [problem(numbers, rng.sample(rest, 2)) for numbers in rest]
