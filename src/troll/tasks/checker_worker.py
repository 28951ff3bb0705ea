"""The other end of ``checker.Checker``: a program that reads questions as JSON lines and answers them, one by one.

It is run by its path and imports nothing of this package, so that it starts fast and knows nothing worth stealing.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

MEMORY = 4 << 30  # bytes


def math_checker() -> Callable[..., Any]:
    """Whether a mathematical answer equals the right one."""
    from math_verify import parse, verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    forms = [LatexExtractionConfig(), ExprExtractionConfig()]
    logging.disable()  # it logs every answer that it cannot parse

    @functools.lru_cache(maxsize=4096)
    def parsed(text: str) -> Any:
        return parse(f"${text}$", extraction_config=forms, parsing_timeout=None)

    def check(right: str, answer: str) -> bool:
        return bool(verify(parsed(right), parsed(answer), timeout_seconds=None))

    check("\\frac{1}{2}", "0.5")  # imports what is imported late
    return check


def gym_checker(maker: str, settings: list[dict[str, Any]]) -> Callable[..., Any]:
    """A maker of reasoning-gym: its problem of this seed and index, or the score it gives to an answer to it."""
    import reasoning_gym

    makers = {given["seed"]: reasoning_gym.create_dataset(maker, **given) for given in settings}
    problem = functools.lru_cache(maxsize=4096)(lambda seed, index: makers[seed][index])

    def check(seed: int, index: int, answer: str | None = None) -> Any:
        entry = problem(seed, index)
        if answer is None:
            return {"question": entry["question"], "answer": str(entry["answer"] or "")}
        return float(makers[seed].score_answer(answer, entry))

    return check


def main() -> None:
    """Say "ready", then answer every line until there are no more."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(1), "w")
    what = json.loads(sys.argv[1])
    check = math_checker() if what.pop("kind") == "math" else gym_checker(**what)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(null, stream)  # what a library prints is no reply
    print('"ready"', file=replies, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        token = question.pop("token")
        try:
            reply = check(**question)
        except Exception:  # the answer is the one thing here that was not tried before: it is wrong
            reply = None
        print(json.dumps({"token": token, "reply": reply}), file=replies, flush=True)


if __name__ == "__main__":
    main()
