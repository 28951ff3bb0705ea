"""Roman numerals, as plain few-shot text: ``14 = XIV``."""

import random

NUMERALS = {100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I"}
stop = "\n"  # a completion ends with its line
settings = {"max_completion_length": 10}


def roman(number):
    """Write 1 to 399 in Roman numerals."""
    text = ""
    for value, letters in NUMERALS.items():
        times, number = divmod(number, value)
        text += letters * times
    return text


def problem(number, shown):
    """A prompt with two worked examples, the answer, and how hard it is."""
    shots = "".join(f"{n} = {roman(n)}\n" for n in shown)
    return {"prompt": f"{shots}{number} =", "answer": roman(number), "difficulty": len(roman(number))}


def reward(completions, answer, **columns):
    """1 for the right numeral, 0 for a wrong one."""
    return [float(text.split("\n")[0].strip() == right) for text, right in zip(completions, answer, strict=True)]


rng = random.Random(0)
numbers = rng.sample(range(1, 100), 99)
test, rest = numbers[:20], numbers[20:]  # 20 numbers are never trained on
eval_dataset = [problem(number, rng.sample(rest, 2)) for number in test]
train_dataset = [problem(number, rng.sample([n for n in rest if n != number], 2)) for number in rest for _ in range(4)]
