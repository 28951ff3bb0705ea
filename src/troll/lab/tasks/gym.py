"""Any of reasoning-gym's problem makers, by name: ``gym:gcd``, ``gym:letter_counting``, …

Without worked examples the model is asked to think and to put its answer in tags; the answer is what stands in the last
``<answer>…</answer>``, and a completion without one earns 0. With ``shots=n``, n solved problems stand before the
question as turns of the chat, and the whole reply is the answer: shorter, and within reach of small models.
The score, from 0 to 1, is reasoning-gym's own.

Problems are made where they are scored, in a process whose hashes do not change from run to run: some makers depend on
the order of sets, and would make other problems each time.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from troll.errors import InputError
from troll.lab.tasks.task import Request, Row, Task
from troll.rewards.checker import SECONDS, Checker, Question, Reply, apart, sandboxed
from troll.rewards.text import text_of
from troll.rewards.workers import Pool

TRAIN_SIZE, HELD_OUT_SIZE = 1000, 100
_HELD_OUT_SEED = 2510_03817
_MAKE = 120.0  # seconds to make a problem
_AS_SHOWN = "Reply with the answer only, as in the examples."
Checkers = Pool[Question, Reply]
_RUNS_TEXT = re.compile(r"\b(eval|exec|parse_expr|sympify|__import__)\(")


def names() -> list[str]:
    """Of all problem makers."""
    return sorted(_makers())


def _makers() -> dict[str, Any]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise InputError(
            "a gym task without reasoning-gym", "the package", 'pip install "troll-rl[gym]", or reasoning-gym'
        ) from error
    return dict(DATASETS)


def load(request: Request) -> Task:
    """The task ``gym:<maker>``; every field of the maker's config is an option, and ``shots``."""
    request.refuse_data()
    maker, makers = request.name.partition(":")[2], _makers()
    if maker not in makers:
        close = difflib.get_close_matches(maker, makers, n=3, cutoff=0.5)
        near = " or ".join(f"gym:{name}" for name in close) or "gym:gcd"
        raise InputError(f"the task {request.name!r}", f"one of reasoning-gym's {len(makers)} names", near)
    options = request.choose({"shots": 0, **_config_defaults(makers[maker][1])})
    shots = options.pop("shots")
    given = {key: value for key, value in options.items() if key in request.options}
    seed = random.Random(f"gym {request.seed}").getrandbits(31)  # a maker's neighbouring seeds share problems
    fixed = _Source(_HELD_OUT_SEED, shots + (request.held_out_size or HELD_OUT_SIZE), "held_out_size")
    source = _Source(seed, request.train_size or TRAIN_SIZE, "train_size")
    checkers = _checkers(maker, given, [fixed, source])
    seen: set[str] = set()
    held_out = fixed.problems(maker, checkers, seen)
    train = source.problems(maker, checkers, seen)
    if not all(example["answer"] for example in held_out[:shots]):
        raise InputError(f"shots={shots}; {request.name} knows no right answers to show", "shots=0", "leaving it out")
    answer_of = _whole if shots else _tagged
    return Task(
        name=request.name,
        description=f"reasoning-gym's {maker}, " + (f"{shots} worked examples" if shots else "the answer in tags"),
        train=_dataset(train, held_out[:shots]),
        held_out=_dataset(held_out[shots:], held_out[:shots]),
        reward_funcs=[_Score(checkers, answer_of)],
        answer_of=answer_of,
        settings={"max_completion_length": 64 if shots else 256},
    )


def _checkers(maker: str, options: Row, sources: Sequence[_Source]) -> Checkers:
    """The processes that make the problems and score the answers."""
    import reasoning_gym

    try:
        reasoning_gym.create_dataset(maker, seed=0, size=10, **options)
    except Exception as error:  # of many kinds, mostly failed assertions
        shown = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"
        given = f"gym:{maker} with {shown} ({error})"
        raise InputError(given, "options that its config allows", "other values") from error
    settings = [{**options, "seed": source.seed, "size": source.most} for source in sources]
    what = {"kind": "gym", "maker": maker, "settings": settings}
    command, env = sandboxed("reasoning_gym") if _evaluates(maker) else apart()
    return Pool(lambda: Checker(what, command, env), name="gym")


@dataclass(frozen=True)
class _Source:
    """So many problems from a seed; ``name`` is the argument that asked for them."""

    seed: int
    wanted: int
    name: str

    @property
    def most(self) -> int:
        """How many problems are looked at to find new ones. Some makers make them all at once."""
        return 2 * self.wanted + 200

    def problems(self, maker: str, checkers: Checkers, seen: set[str]) -> list[Row]:
        """Those whose question is not in ``seen``, which grows."""
        found: list[Row] = []
        for start in range(0, self.most, self.wanted):
            indices = range(start, min(start + self.wanted, self.most))
            made = checkers.map(Question({"seed": self.seed, "index": index}, _MAKE) for index in indices)
            for index, reply in zip(indices, made, strict=True):
                problem = reply.value if reply else None
                if problem is not None and problem["question"] not in seen and len(found) < self.wanted:
                    seen.add(problem["question"])
                    found.append({**problem, "gym_seed": self.seed, "gym_index": index})
            if len(found) == self.wanted:
                return found
        raise InputError(
            f"{self.name}={self.wanted}; gym:{maker} ran out of new problems after {len(found)}",
            "no more problems than there are",
            f"{self.name}={max(1, len(found) // 2)}, or options that make more of them",
        )


def _config_defaults(config: Any) -> dict[str, Any]:
    """The fields of a maker's config and their defaults, without seed and size."""
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


def _whole(text: str) -> str | None:
    return text.strip() or None


def _evaluates(maker: str) -> bool:
    """Whether the maker may run text as Python to score it (sympy's parsers do too): then it belongs in a sandbox."""
    own = [kind for kind in _makers()[maker][0].__mro__ if kind.__module__.startswith("reasoning_gym.")]
    sources = [inspect.getsource(sys.modules[kind.__module__]) for kind in own]
    return maker == "composite" or any(map(_RUNS_TEXT.search, sources))


class _Score:
    """reasoning-gym's own score of an answer."""

    __name__ = "score"

    def __init__(self, checkers: Checkers, answer_of: Callable[[str], str | None]) -> None:
        self._checkers, self._answer_of = checkers, answer_of

    def __call__(
        self, completions: Sequence[Any], gym_seed: Sequence[int], gym_index: Sequence[int], **_: Any
    ) -> list[float | None]:
        """One score per completion, 0 for no answer and for one that cannot be scored; None where nothing is known."""
        answers = [self._answer_of(text_of(completion)) for completion in completions]
        asked = [
            {"seed": seed, "index": index, "answer": answer}
            for answer, seed, index in zip(answers, gym_seed, gym_index, strict=True)
            if answer is not None
        ]
        replies = iter(self._checkers.map(Question(question, SECONDS) for question in asked))
        return [0.0 if answer is None else _score(next(replies)) for answer in answers]


def _score(reply: Reply | None) -> float | None:
    return None if reply is None else reply.value or 0.0
