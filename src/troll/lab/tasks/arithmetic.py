"""The task ``arithmetic``: sums as plain few-shot text, ``8 - 4 = 4\\n6 - 4 =``, learnable on a CPU.

A hash of the problem decides whether it is held out, so the split is the same for every seed and size, and 3 + 4 and
4 + 3 are on the same side of it. The worked examples are training problems.
"""

from __future__ import annotations

import hashlib
import random
from typing import NamedTuple

from datasets import Dataset

from troll.errors import InputError
from troll.lab.tasks.task import Request, Row, Task, exact_match, first_line

OPTIONS = {"digits": 1, "operations": "+-", "shots": 1}
TRAIN_SIZE, EVAL_SIZE = 1024, 64
_KINDS = {"+": "sums", "-": "differences", "*": "products"}
_EVAL_SEED = 2510_03817  # for the worked examples of held-out problems


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
        """Whether the problem is held out: about one in four, by operands and operation."""
        low, high = sorted((self.left, self.right))
        return hashlib.sha256(f"{low} {self.sign} {high}".encode()).digest()[0] % 4 == 0


def load(request: Request) -> Task:
    """The task ``arithmetic``."""
    request.refuse_data()
    options = request.choose(OPTIONS)
    digits, signs, shots = options["digits"], options["operations"], options["shots"]
    if not 1 <= digits <= 12:
        raise InputError(f"digits must be 1 to 12, got {digits}", f"The default is {OPTIONS['digits']}")
    if not signs or set(signs) - set("+-*"):
        raise InputError(
            f"operations must be some of + - *, got {signs!r}", f"The default is {OPTIONS['operations']!r}"
        )
    if not 0 <= shots <= 16:
        raise InputError(f"shots must be 0 to 16 worked examples, got {shots}", f"The default is {OPTIONS['shots']}")
    train = random.Random(f"arithmetic {request.seed}")
    fixed = random.Random(_EVAL_SEED)
    kind = f"{'one' if digits == 1 else f'up to {digits}'}-digit {' and '.join(_KINDS[sign] for sign in signs)}"
    return Task(
        name=request.name,
        description=f"{kind}, shots: {shots}; about a quarter of the problems is held out",
        train_dataset=_rows(train, request.train_size or TRAIN_SIZE, False, digits, signs, shots),
        eval_dataset=_rows(fixed, request.eval_size or EVAL_SIZE, True, digits, signs, shots),
        reward_funcs=[exact_match],
        answer_of=first_line,
        stop="\n",
        settings={"max_completion_length": 2 * digits + 4},  # space, sign, digits, newline
    )


def _rows(rng: random.Random, size: int, held_out: bool, digits: int, signs: str, shots: int) -> Dataset:
    def draw(held_out: bool, excluded: list[_Problem]) -> _Problem:
        while True:
            sign, left, right = rng.choice(signs), _number(rng, digits), _number(rng, digits)
            problem = _Problem(max(left, right), sign, min(left, right)) if sign == "-" else _Problem(left, sign, right)
            if problem.held_out == held_out and problem not in excluded:
                return problem

    def row() -> Row:
        question = draw(held_out, [])
        examples: list[_Problem] = []
        for _ in range(shots):
            examples.append(draw(False, [question, *examples]))
        worked = "".join(f"{x.text} {x.answer}\n" for x in examples)
        return {"prompt": worked + question.text, "answer": question.answer, "difficulty": float(len(question.answer))}

    return Dataset.from_list([row() for _ in range(size)])


def _number(rng: random.Random, digits: int) -> int:
    """A number of at most ``digits`` digits, with every length equally likely."""
    length = rng.randint(1, digits)
    return rng.randrange(0 if length == 1 else 10 ** (length - 1), 10**length)
