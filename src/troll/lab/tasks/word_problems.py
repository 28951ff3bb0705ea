"""Word problems (GSM8K) and competition mathematics (MATH): a chat prompt, a final answer to compare.

An answer in GSM8K is a number. An answer in MATH is any expression (``troll.rewards.mathematics``).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from troll.errors import InputError
from troll.lab.tasks.data import sources, splits
from troll.lab.tasks.records import Place, Record, need, to_dataset
from troll.lab.tasks.task import Request, Reward, Task
from troll.rewards.answers import boxed, expression, final_number
from troll.rewards.exact import number
from troll.rewards.mathematics import MathReward
from troll.rewards.text import text_of


def load(request: Request) -> Task:
    """The tasks ``gsm8k`` and ``math``."""
    kind = _KINDS[request.name]
    train, held_out = splits(request, *sources(request, kind.problem, kind.hub))
    reward = kind.reward()
    if isinstance(reward, MathReward):
        _warn([*train, *held_out], reward)
    return Task(
        name=request.name,
        description=f"{kind.description}, {request.data or kind.hub[0].source}",
        train=to_dataset(train),
        held_out=to_dataset(held_out),
        reward_funcs=[reward],
        answer_of=kind.answer_of,
        settings={"max_completion_length": kind.length},
    )


def same_number(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for the right final number, 0 for a wrong one and for none."""
    return [float(final_number(text_of(c)) == right) for c, right in zip(completions, answer, strict=True)]


def _warn(problems: Sequence[Record], reward: MathReward) -> None:
    """Say which right answers can be compared with others only as text."""
    readable = reward.readable([problem.row["answer"] for problem in problems])
    rest = [problem for problem, fine in zip(problems, readable, strict=True) if not fine]
    if len(rest) == len(problems):
        raise InputError(
            f"{rest[0].place}: the answer {rest[0].row['answer']!r:.80}, and all others, cannot be read",
            "mathematical expressions in LaTeX",
            "the final answers alone in the field 'answer'",
        )
    if rest:
        shown = "; ".join(f"{problem.place}: {problem.row['answer']!r:.60}" for problem in rest[:3])
        warnings.warn(
            f"{len(rest)} of {len(problems)} right answers cannot be read as mathematics, and only the same text "
            f"counts as right: {shown}{'; …' if len(rest) > 3 else ''}",
            stacklevel=2,
        )


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
    reward: Callable[[], Reward]
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
        MathReward,
        expression,
        1024,
    ),
}
