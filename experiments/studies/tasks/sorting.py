"""Digits in order, as plain few-shot text: ``sorted([9, 0, 4]) = [0, 4, 9]``, of two to five different digits."""

import random

stop = "\n"
settings = {"max_completion_length": 17}


def draw(rng):
    """Two to five different digits."""
    return tuple(rng.sample(range(10), rng.randint(2, 5)))


def problem(digits, shown):
    """A prompt with a worked example, and the answer."""
    shot = f"sorted({list(shown)}) = {sorted(shown)}\n"
    answer = str(sorted(digits))
    return {"prompt": f"{shot}sorted({list(digits)}) =", "answer": answer, "difficulty": float(len(digits))}


def reward(completions, answer, **columns):
    """1 for the right list, 0 for a wrong one."""
    return [float(text.split("\n")[0].strip() == right) for text, right in zip(completions, answer, strict=True)]


rng = random.Random(0)
test = list(dict.fromkeys(draw(rng) for _ in range(300)))[:256]
rest = [digits for digits in (draw(rng) for _ in range(10_000)) if digits not in test][:8192]
eval_dataset = [problem(digits, rng.choice(rest)) for digits in test]
train_dataset = [problem(digits, rng.choice(rest)) for digits in rest]
