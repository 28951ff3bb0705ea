"""Any of reasoning-gym's problem makers, by name: ``gym:gcd``, ``gym:letter_counting``, …

Without worked examples the model is asked to think and to put its answer in tags; the answer is what stands in the last
``<answer>…</answer>``, and a completion without one earns 0. With ``shots=n``, n solved problems stand before the
question as turns of the chat, and the whole reply is the answer: shorter, and within reach of small models.
The score, from 0 to 1, is reasoning-gym's own.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from datasets import Dataset

from troll.errors import InputError
from troll.tasks.checker import Checker
from troll.tasks.task import Request, Row, Task, text_of

TRAIN_SIZE, HELD_OUT_SIZE = 1000, 100
_HELD_OUT_SEED = 2510_03817
_MISSES = 2000  # problems in a row that were seen before, until the maker counts as exhausted
_RUNS_TEXT = re.compile(r"\b(eval|exec|parse_expr|sympify|__import__)\(")


def names() -> list[str]:
    """Of all problem makers."""
    return sorted(_makers())


def _makers() -> dict[str, Any]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise InputError(
            "a gym task without reasoning-gym", "the package", 'pip install "troll-rl[tasks]", or reasoning-gym'
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
    _create(maker, given, 0)  # refuses options that do not fit together

    seed = random.Random(f"gym {request.seed}").getrandbits(31)  # a maker's neighbouring seeds share problems
    seen: set[str] = set()
    fixed = _problems(maker, given, _HELD_OUT_SEED, seen)
    examples = [next(fixed) for _ in range(shots)]
    held_out = _take(fixed, request.held_out_size or HELD_OUT_SIZE, "held_out_size", request)
    train = _problems(maker, given, seed, seen)
    return Task(
        name=request.name,
        description=f"reasoning-gym's {maker}, " + (f"{shots} worked examples" if shots else "the answer in tags"),
        train=_dataset(_take(train, request.train_size or TRAIN_SIZE, "train_size", request), examples),
        held_out=_dataset(held_out, examples),
        reward_funcs=[_Score(maker, given, [_HELD_OUT_SEED, seed], _whole if shots else _tagged)],
        answer_of=_whole if shots else _tagged,
        settings={"max_completion_length": 64 if shots else 256},
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


def _create(maker: str, options: Row, seed: int) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(maker, seed=seed, size=2**31 - 1, **options)
    except (AssertionError, ValueError, TypeError) as error:
        shown = ", ".join(f"{k}={v!r}" for k, v in options.items()) or "no options"
        raise InputError(
            f"gym:{maker} with {shown} ({error})", "options that its config allows", "other values"
        ) from error


def _problems(maker: str, options: Row, seed: int, seen: set[str]) -> Iterator[Row]:
    """Problems whose question is not in ``seen``, which grows; it ends when the maker has no new ones."""
    source, misses, index = _create(maker, options, seed), 0, 0
    while misses < _MISSES:
        entry = source[index]
        if entry["question"] in seen:
            misses += 1
        else:
            seen.add(entry["question"])
            misses = 0
            yield {"question": entry["question"], "answer": str(entry["answer"]), "gym_seed": seed, "gym_index": index}
        index += 1


def _take(problems: Iterator[Row], size: int, name: str, request: Request) -> list[Row]:
    taken = [row for row, _ in zip(problems, range(size), strict=False)]
    if len(taken) < size:
        raise InputError(
            f"{name}={size}; {request.name} ran out of new problems after {len(taken)}",
            "no more problems than there are",
            f"{name}={max(1, len(taken) // 2)}, or options that make more of them",
        )
    return taken


def _dataset(rows: list[Row], examples: list[Row]) -> Dataset:
    from reasoning_gym.utils import SYSTEM_PROMPTS

    if examples:
        start = [{"role": "system", "content": "Reply with the answer only, as in the examples."}]
        for example in examples:
            start += [{"role": "user", "content": example["question"]}]
            start += [{"role": "assistant", "content": example["answer"]}]
    else:
        start = [{"role": "system", "content": SYSTEM_PROMPTS["default"]}]
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
    """reasoning-gym's own score of an answer, found in a process apart."""

    __name__ = "score"

    def __init__(self, maker: str, options: Row, seeds: list[int], answer_of: Callable[[str], str | None]) -> None:
        self.answer_of = answer_of
        what = {"kind": "gym", "maker": maker, "options": options, "seeds": seeds}
        self.checker = Checker(what, needs="reasoning_gym" if _evaluates(maker) else None)

    def __call__(
        self, completions: Sequence[Any], gym_seed: Sequence[int], gym_index: Sequence[int], **_: Any
    ) -> list[float]:
        """One score per completion, 0 for no answer and for one that cannot be scored."""
        answers = [self.answer_of(text_of(completion)) for completion in completions]
        return [
            0.0 if answer is None else self.checker.ask(seed=seed, index=index, answer=answer) or 0.0
            for answer, seed, index in zip(answers, gym_seed, gym_index, strict=True)
        ]
