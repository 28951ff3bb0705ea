"""Tasks that generate their problems: ``arithmetic`` and ``gym:NAME``.

``arithmetic`` is sums as plain few-shot text, ``8 - 4 = 4\\n6 - 4 =``, learnable on a CPU. A hash of the problem
decides whether it is held out, so the split is the same for every seed and size, and 3 + 4 and 4 + 3 are on the same
side of it. The worked examples are training problems.

``gym:NAME`` is a problem generator of reasoning-gym, such as ``gym:gcd`` and ``gym:letter_counting``. Without worked
examples the model is asked to think and to put its answer in tags. The content of the last ``<answer>…</answer>`` is
the answer; a completion without one gets 0. With ``shots=n``, n solved problems precede the question as turns of the
chat, and the complete reply is the answer, which small models can learn. reasoning-gym computes the score, from 0 to 1.
Its problems are generated in the worker processes that score them, with a fixed hash seed: some generators depend on
the order of sets and would otherwise generate other problems in every run.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import inspect
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from datasets import Dataset

from troll.errors import InputError
from troll.lab.tasks.task import Request, Row, Task, exact_match, first_line
from troll.rewards.answers import text_of
from troll.rewards.checker import SECONDS, Checker, Question, Reply, plain_command, sandboxed_command
from troll.rewards.workers import Pool

ARITHMETIC_OPTIONS = {"digits": 1, "operations": "+-", "shots": 1}
ARITHMETIC_SIZES, GYM_SIZES = (1024, 64), (1000, 100)
"""Default numbers of problems to train on and to hold out."""
_EVAL_SEED = 2510_03817  # of held-out gym problems, and of the worked examples of held-out sums
_KINDS = {"+": "sums", "-": "differences", "*": "products"}
_GENERATE_SECONDS = 120.0  # per problem
_AS_SHOWN = "Reply with the answer only, as in the examples."
Checkers = Pool[Question, Reply]
_RUNS_TEXT = re.compile(r"\b(eval|exec|parse_expr|sympify|__import__)\(")


def load(request: Request) -> Task:
    """The task ``arithmetic`` or ``gym:NAME``."""
    request.refuse_data()
    return _gym(request) if request.name.startswith("gym:") else _arithmetic(request)


# Arithmetic


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


def _arithmetic(request: Request) -> Task:
    options = request.choose(ARITHMETIC_OPTIONS)
    digits, signs, shots = options["digits"], options["operations"], options["shots"]
    if not 1 <= digits <= 12:
        raise InputError(f"digits must be 1 to 12, got {digits}", f"The default is {ARITHMETIC_OPTIONS['digits']}")
    if not signs or set(signs) - set("+-*"):
        raise InputError(
            f"operations must be some of + - *, got {signs!r}", f"The default is {ARITHMETIC_OPTIONS['operations']!r}"
        )
    if not 0 <= shots <= 16:
        raise InputError(
            f"shots must be 0 to 16 worked examples, got {shots}", f"The default is {ARITHMETIC_OPTIONS['shots']}"
        )
    train = random.Random(f"arithmetic {request.seed}")
    fixed = random.Random(_EVAL_SEED)
    kind = f"{'one' if digits == 1 else f'up to {digits}'}-digit {' and '.join(_KINDS[sign] for sign in signs)}"
    return Task(
        name=request.name,
        description=f"{kind}, shots: {shots}; about a quarter of the problems is held out",
        train_dataset=_rows(train, request.train_size or ARITHMETIC_SIZES[0], False, digits, signs, shots),
        eval_dataset=_rows(fixed, request.eval_size or ARITHMETIC_SIZES[1], True, digits, signs, shots),
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


# reasoning-gym


def _generators() -> dict[str, Any]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise InputError("Tasks gym:NAME need the package reasoning-gym", 'pip install "troll-rl[gym]"') from error
    return dict(DATASETS)


def _gym(request: Request) -> Task:
    """Its options are the fields of the generator's config, and ``shots``."""
    generator, generators = request.name.partition(":")[2], _generators()
    if generator not in generators:
        close = difflib.get_close_matches(generator, generators, n=3, cutoff=0.65)
        near = " or ".join(f"gym:{name}" for name in close)
        fix = f"Did you mean {near}?" if near else f"It has {len(generators)}, such as gym:gcd and gym:letter_counting"
        raise InputError(f"reasoning-gym has no generator {generator!r}", fix)
    options = request.choose({"shots": 0, **_config_defaults(generators[generator][1])})
    shots = options.pop("shots")
    given = {key: value for key, value in options.items() if key in request.options}
    seed = random.Random(f"gym {request.seed}").getrandbits(31)  # neighbouring seeds of a generator share problems
    fixed = _Source(_EVAL_SEED, shots + (request.eval_size or GYM_SIZES[1]), "eval_size")
    source = _Source(seed, request.train_size or GYM_SIZES[0], "train_size")
    checkers = _checkers(generator, given, [fixed, source])
    seen: set[str] = set()
    held_out = fixed.problems(generator, checkers, seen)
    train = source.problems(generator, checkers, seen)
    if not all(example["answer"] for example in held_out[:shots]):
        raise InputError(f"shots={shots}, but {request.name} has no reference answers to show", "Leave shots out")
    answer_of = _complete_reply if shots else _tagged
    return Task(
        name=request.name,
        description=f"reasoning-gym's {generator}, " + (f"{shots} worked examples" if shots else "the answer in tags"),
        train_dataset=_dataset(train, held_out[:shots]),
        eval_dataset=_dataset(held_out[shots:], held_out[:shots]),
        reward_funcs=[_Score(checkers, answer_of)],
        answer_of=answer_of,
        settings={"max_completion_length": 64 if shots else 256},
    )


def _checkers(generator: str, options: Row, sources: Sequence[_Source]) -> Checkers:
    """The worker processes that generate problems and score answers."""
    import reasoning_gym

    try:
        reasoning_gym.create_dataset(generator, seed=0, size=10, **options)
    except Exception as error:  # many kinds, mostly failed assertions
        shown = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"
        raise InputError(f"gym:{generator} rejected its options ({shown}): {error}", "Change these values") from error
    settings = [{**options, "seed": source.seed, "size": source.limit} for source in sources]
    what = {"kind": "gym", "dataset": generator, "settings": settings}
    command, env = sandboxed_command("reasoning_gym") if _evaluates(generator) else plain_command()
    return Pool(lambda: Checker(what, command, env), name="gym")


@dataclass(frozen=True)
class _Source:
    """``wanted`` problems from a seed; ``name`` is the argument that set their number."""

    seed: int
    wanted: int
    name: str

    @property
    def limit(self) -> int:
        """The number of problems that are generated at most to get ``wanted`` different ones."""
        return 2 * self.wanted + 200

    def problems(self, generator: str, checkers: Checkers, seen: set[str]) -> list[Row]:
        """New problems: their questions are not in ``seen`` and are added to it."""
        problems: list[Row] = []
        for start in range(0, self.limit, self.wanted):
            indices = range(start, min(start + self.wanted, self.limit))
            made = checkers.map(Question({"seed": self.seed, "index": index}, _GENERATE_SECONDS) for index in indices)
            for index, reply in zip(indices, made, strict=True):
                problem = reply.value if reply else None
                if problem is not None and problem["question"] not in seen and len(problems) < self.wanted:
                    seen.add(problem["question"])
                    problems.append({**problem, "gym_seed": self.seed, "gym_index": index})
            if len(problems) == self.wanted:
                return problems
        raise InputError(
            f"{self.name}={self.wanted}, but gym:{generator} generated only {len(problems)} different problems",
            f"Use {self.name}={max(1, len(problems) // 2)}, or other options of the task",
        )


def _config_defaults(config: Any) -> dict[str, Any]:
    """The fields of a generator's config and their defaults, without seed and size."""
    values = {}
    for field in dataclasses.fields(config):
        if field.name not in ("seed", "size"):
            made = field.default_factory
            value = made() if made is not dataclasses.MISSING else field.default
            values[field.name] = None if value is dataclasses.MISSING else value
    return values


def _dataset(rows: list[Row], examples: list[Row]) -> Dataset:
    from reasoning_gym.utils import SYSTEM_PROMPTS

    start = [{"role": "system", "content": _AS_SHOWN if examples else SYSTEM_PROMPTS["default"]}]
    for example in examples:
        start.append({"role": "user", "content": example["question"]})
        start.append({"role": "assistant", "content": example["answer"]})
    return Dataset.from_list(
        [{"prompt": [*start, {"role": "user", "content": row.pop("question")}], **row} for row in map(dict, rows)]
    )


def _tagged(text: str) -> str | None:
    from reasoning_gym.utils import extract_answer

    return extract_answer(text)  # type: ignore[no-any-return]


def _complete_reply(text: str) -> str | None:
    return text.strip() or None


def _evaluates(generator: str) -> bool:
    """Whether the generator may evaluate text as Python to score it (sympy's parsers do): it then needs a sandbox."""
    classes = [kind for kind in _generators()[generator][0].__mro__ if kind.__module__.startswith("reasoning_gym.")]
    sources = [inspect.getsource(sys.modules[kind.__module__]) for kind in classes]
    return generator == "composite" or any(map(_RUNS_TEXT.search, sources))


class _Score:
    """The reward function: reasoning-gym's score of an answer."""

    __name__ = "score"

    def __init__(self, checkers: Checkers, answer_of: Callable[[str], str | None]) -> None:
        self._checkers, self._answer_of = checkers, answer_of

    def __call__(
        self, completions: Sequence[Any], gym_seed: Sequence[int], gym_index: Sequence[int], **_: Any
    ) -> list[float | None]:
        """One score per completion: 0 for a missing or unscorable answer, None if the scoring process failed."""
        answers = [self._answer_of(text_of(completion)) for completion in completions]
        questions = [
            {"seed": seed, "index": index, "answer": answer}
            for answer, seed, index in zip(answers, gym_seed, gym_index, strict=True)
            if answer is not None
        ]
        replies = iter(self._checkers.map(Question(question, SECONDS) for question in questions))
        return [0.0 if answer is None else _score(next(replies)) for answer in answers]


def _score(reply: Reply | None) -> float | None:
    return None if reply is None else reply.value or 0.0
