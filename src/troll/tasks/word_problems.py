"""Word problems (GSM8K) and competition mathematics (MATH): a chat prompt, a final answer to compare.

An answer in GSM8K is a number. An answer in MATH is any expression: first compared as text and as a number, which
settles most of them exactly, then by math-verify in a process with a deadline.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from troll.errors import InputError
from troll.tasks.checker import Checker
from troll.tasks.data import sources, splits
from troll.tasks.records import Place, Record, need, to_dataset
from troll.tasks.task import Request, Task, text_of

_DOLLAR = r"\\?\$?"
_NUMBER = (
    rf"{_DOLLAR}\s*([-+]?)\s*{_DOLLAR}([0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]{{1,40}})?(\.[0-9]{{0,40}})?\s*{_DOLLAR}\.?"
)
_LONGEST = 300  # characters of an answer; a longer one is wrong


def load(request: Request) -> Task:
    """The tasks ``gsm8k`` and ``math``."""
    kind = _KINDS[request.name]
    if request.name == "math" and importlib.util.find_spec("math_verify") is None:
        raise InputError("the task math without math-verify", "the package", 'pip install "troll-rl[tasks]"')
    train, held_out = splits(request, *sources(request, kind.problem, kind.hub))
    return Task(
        name=request.name,
        description=f"{kind.description}, {request.data or kind.hub[0].source}",
        train=to_dataset(train),
        held_out=to_dataset(held_out),
        reward_funcs=[kind.reward()],
        answer_of=kind.answer_of,
        settings={"max_completion_length": kind.length},
    )


def number(text: str) -> str | None:
    """A number in one way of writing; None if the text is not a plain number.

    >>> number("$1,200.00"), number("-0"), number("2/3")
    ('1200', '0', None)
    """
    match = re.fullmatch(_NUMBER, text.strip())
    if match is None or not (match[2] or (match[3] and match[3] != ".")):
        return None
    value = Decimal(f"{match[1]}{(match[2] or '0').replace(',', '')}{match[3] or ''}")
    return f"{value.normalize():f}" if value else "0"


def boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{…}`` with its braces in balance; None if there is none.

    >>> boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 7 : i].strip() or None
    return None


def final_number(text: str) -> str | None:
    """The number after the last ``####``, else in the last box."""
    _, mark, after = text.rpartition("####")
    line = after.strip().split("\n", 1)[0] if mark else boxed(text) or ""
    return number(line)


def expression(text: str) -> str | None:
    """The answer in the last box, in one way of writing where that is cheap."""
    inside = boxed(text)
    return None if inside is None or len(inside) > _LONGEST else plain(inside)


def plain(answer: str) -> str:
    """An expression without what changes only its looks; a number as ``number`` writes it."""
    text = answer.strip().strip("$").rstrip(".")
    text = re.sub(r"\\(left|right|displaystyle|!|,|;|:| )(?![a-zA-Z])|(?<!\\)\s+", "", text)
    text = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\^\{?\\circ\}?|\\%|%", "", text) if number(re.sub(r"\^\{?\\circ\}?|\\%|%", "", text)) else text
    return number(text) or text


def same_number(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for the right final number, 0 for a wrong one and for none."""
    return [float(final_number(text_of(c)) == right) for c, right in zip(completions, answer, strict=True)]


class SameExpression:
    """1 for an answer that is equal to the right one, 0 for a wrong one, for none, and for one that takes too long."""

    __name__ = "same_expression"

    def __init__(self) -> None:
        self.checker = Checker({"kind": "math"})

    def __call__(self, completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
        """One reward per completion."""
        return [self.one(boxed(text_of(c)), right) for c, right in zip(completions, answer, strict=True)]

    def one(self, given: str | None, right: str) -> float:
        """The reward of one answer."""
        if given is None or len(given) > _LONGEST:
            return 0.0
        if plain(given) == plain(right):
            return 1.0
        if number(plain(given)) and number(plain(right)):
            return 0.0  # two plain numbers, and not the same
        return float(self.checker.ask(right=right, answer=given) is True)


def _gsm8k(record: Record) -> Record:
    question = need(record, ("question", "problem", "prompt"))
    answer = need(record, ("answer", "final_answer"), (str, int, float))
    right = number(str(answer)) or final_number(str(answer))
    if right is None:
        raise InputError(
            f"{record.place}: the answer ends in {str(answer)[-60:]!r}",
            "a number, or text that ends in '#### number'",
            "that",
        )
    steps = str(answer).count("<<")  # GSM8K marks every calculation
    extra = {"difficulty": float(steps)} if steps else {}
    return _chat(record, _SHARPS, question, right, extra)


def _math(record: Record) -> Record:
    problem = need(record, ("problem", "question", "prompt"))
    if any(name in record.row for name in _ANSWERS) or "solution" not in record.row:
        right = str(need(record, _ANSWERS, (str, int, float)))
        right = boxed(right) or right
    else:
        solved = boxed(need(record, "solution"))
        if solved is None:
            raise InputError(f"{record.place}: the solution has no \\boxed{{…}}", "an answer", "a field 'answer'")
        right = solved
    level = re.search(r"\d+(\.\d+)?", str(record.row.get("difficulty", record.row.get("level", ""))))
    return _chat(record, _BOX, problem, right, {"difficulty": float(level[0])} if level else {})


def _chat(record: Record, system: str, question: str, answer: str, extra: dict[str, float]) -> Record:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return Record({"prompt": messages, "answer": answer, **extra}, record.place)


_ANSWERS = ("answer", "final_answer", "expected_answer")
_SHARPS = (
    "Solve the problem step by step. End with a line that has #### and the final answer as a plain number, "
    "for example: #### 42"
)
_BOX = "Solve the problem step by step. Put the final answer in \\boxed{}."


@dataclass(frozen=True)
class _Kind:
    description: str
    hub: tuple[Place, Place]  # to train on, to hold out
    problem: Callable[[Record], Record]
    reward: Callable[[], Any]
    answer_of: Callable[[str], str | None]
    length: int


_KINDS = {
    "gsm8k": _Kind(
        "grade-school word problems",
        (Place("openai/gsm8k", "train", "main"), Place("openai/gsm8k", "test", "main")),
        _gsm8k,
        lambda: same_number,
        final_number,
        512,
    ),
    "math": _Kind(
        "competition mathematics",
        (Place("DigitalLearningGmbH/MATH-lighteval"), Place("HuggingFaceH4/MATH-500", "test")),
        _math,
        SameExpression,
        expression,
        1024,
    ),
}
