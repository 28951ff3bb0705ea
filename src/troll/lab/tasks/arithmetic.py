"""Sums as plain few-shot text, ``6 + 6 = 12\\n8 - 4 = 4\\n6 - 4 =``: a task that a model of 135M learns on a CPU.

Which problems are held out is decided by the problem alone, so it is the same for every seed and size, and 3 + 4 and
4 + 3 fall on the same side. The worked examples are taken from the training side.
"""

from __future__ import annotations

import hashlib
import random
from typing import NamedTuple

from datasets import Dataset

from troll.errors import InputError
from troll.lab.tasks.task import Request, Row, Task, exact_match, first_line

OPTIONS = {"digits": 1, "operations": "+-", "shots": 1}
TRAIN_SIZE, HELD_OUT_SIZE = 1024, 64
_KINDS = {"+": "sums", "-": "differences", "*": "products"}
_HELD_OUT_SEED = 2510_03817  # of the worked examples; the problems themselves need none


class _Problem(NamedTuple):
    left: int
    sign: str
    right: int

    @property
    def text(self) -> str:
        return f"{self.left} {self.sign} {self.right} ="

    @property
    def answer(self) -> str:
        a, b = self.left, self.right
        return str({"+": a + b, "-": a - b, "*": a * b}[self.sign])

    @property
    def held_out(self) -> bool:
        """One in four, by the operands and the sign."""
        low, high = sorted((self.left, self.right))
        return hashlib.sha256(f"{low} {self.sign} {high}".encode()).digest()[0] % 4 == 0


def load(request: Request) -> Task:
    """The task ``arithmetic``."""
    request.refuse_data()
    options = request.choose(OPTIONS)
    digits, signs, shots = options["digits"], options["operations"], options["shots"]
    if not 1 <= digits <= 12:
        raise InputError(f"digits={digits}", "1 to 12", f"digits={OPTIONS['digits']}, the default")
    if not signs or set(signs) - set("+-*"):
        raise InputError(f"operations={signs!r}", "some of + - *", f"operations={OPTIONS['operations']!r}, the default")
    if not 0 <= shots <= 16:
        raise InputError(f"shots={shots}", "0 to 16 worked examples", f"shots={OPTIONS['shots']}, the default")
    train = random.Random(f"arithmetic {request.seed}")
    fixed = random.Random(_HELD_OUT_SEED)
    shown = f"{'one' if digits == 1 else f'up to {digits}'}-digit {' and '.join(_KINDS[sign] for sign in signs)}"
    return Task(
        name=request.name,
        description=f"{shown}, shots: {shots}; about a quarter of the problems is held out",
        train=_rows(train, request.train_size or TRAIN_SIZE, False, digits, signs, shots),
        held_out=_rows(fixed, request.held_out_size or HELD_OUT_SIZE, True, digits, signs, shots),
        reward_funcs=[exact_match],
        answer_of=first_line,
        stop="\n",
        settings={"max_completion_length": 2 * digits + 4},  # space, sign, digits, newline
    )


def _rows(rng: random.Random, size: int, held_out: bool, digits: int, signs: str, shots: int) -> Dataset:
    def draw(held_out: bool, other_than: list[_Problem]) -> _Problem:
        while True:
            sign, left, right = rng.choice(signs), _number(rng, digits), _number(rng, digits)
            problem = _Problem(max(left, right), sign, min(left, right)) if sign == "-" else _Problem(left, sign, right)
            if problem.held_out == held_out and problem not in other_than:
                return problem

    def row() -> Row:
        asked = draw(held_out, [])
        examples: list[_Problem] = []
        for _ in range(shots):
            examples.append(draw(False, [asked, *examples]))
        worked = "".join(f"{x.text} {x.answer}\n" for x in examples)
        return {"prompt": worked + asked.text, "answer": asked.answer, "difficulty": float(len(asked.answer))}

    return Dataset.from_list([row() for _ in range(size)])


def _number(rng: random.Random, digits: int) -> int:
    """Of at most so many digits, every length as likely as the others, so that long ones do not drown short ones."""
    length = rng.randint(1, digits)
    return rng.randrange(0 if length == 1 else 10 ** (length - 1), 10**length)
