"""The other end of ``checker.Checker``: a program that reads questions as JSON lines and answers them, one by one.

It is run by its path and imports nothing of this package, so that it starts fast and knows nothing worth stealing.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import random
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

MEMORY = {"math": 1 << 30, "gym": 4 << 30}  # bytes
ALONE = 2  # seconds after the deadline, when this process ends should nobody be there any more to kill it
POINTS = 3  # at which two expressions with unknowns are compared


def math_checker() -> Callable[..., Any]:
    """Which of these pairs of expressions are equal, or which of these expressions can be read.

    Expressions are read by math-verify's parser, and no text is run as code. Their difference is evaluated at a few
    points, to as many digits as it takes; where that cannot be done, math-verify decides.
    """
    import sympy  # type: ignore[import-untyped]
    import sympy.parsing.sympy_parser  # type: ignore[import-untyped]
    from latex2sympy2_extended import latex2sympy2 as latex  # type: ignore[import-untyped]
    from math_verify import verify

    sympy.parsing.sympy_parser.parse_expr = _number  # sympy's own runs text as Python
    config = latex.ConversionConfig(lowercase_symbols=False)
    logging.disable()  # it logs what it cannot parse

    @functools.lru_cache(maxsize=8192)
    def parsed(text: str) -> Any:
        """The expression, with i as the imaginary unit; None if it cannot be read."""
        try:
            found = latex.latex2sympy(text, is_real=True, normalization_config=None, conversion_config=config)
            if found.has(sympy.Sum, sympy.Product, sympy.Integral):  # where i counts
                return found
            return found.xreplace({sympy.Symbol("i", real=True): sympy.I})
        except Exception:  # of many kinds
            return None

    def zero(value: Any) -> bool | None:
        """Whether a constant is 0; None if that cannot be found out."""
        value = value.doit()
        if value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
            return None
        if value.is_Rational:
            return bool(value == 0)
        parts = value.evalf(2, maxn=1000).as_real_imag()
        if not all(part.is_Float or part.is_Rational for part in parts):
            return None
        return not any(part != 0 and getattr(part, "_prec", 2) > 1 for part in parts)

    def everywhere(value: Any, seed: str) -> bool | None:
        """Whether an expression is 0 whatever its unknowns are."""
        unknowns = sorted(value.free_symbols, key=str)
        if not unknowns:
            return zero(value)
        draw = random.Random(seed)
        found = []
        for _ in range(POINTS):
            point = {x: sympy.Rational(draw.choice((-1, 1)) * draw.randint(50, 400), 101) for x in unknowns}
            found.append(zero(value.subs(point)))
        return False if False in found else None if None in found else True

    def equations(gold: Any, answer: Any, seed: str) -> bool | None:
        """Whether one is a multiple of the other."""
        ratio = (gold.lhs - gold.rhs) / (answer.lhs - answer.rhs)
        unknowns = sorted(ratio.free_symbols, key=str)
        draw = random.Random(seed)
        values = [ratio.subs({x: sympy.Rational(draw.randint(50, 400), 101) for x in unknowns}) for _ in range(2)]
        if values[0].has(sympy.nan, sympy.zoo, sympy.oo) or zero(values[0]):
            return None
        return everywhere(ratio - values[0], seed)

    def equal(gold: str, answer: str) -> bool:
        one, other = parsed(gold), parsed(answer)
        if one is None or other is None:
            return False
        if one == other:
            return True
        decided: bool | None = None
        try:
            if isinstance(one, sympy.Eq) and isinstance(other, sympy.Eq):
                decided = equations(one, other, gold + answer)
            elif isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr):
                decided = everywhere(one - other, gold + answer)
        except Exception:  # what cannot be subtracted or evaluated
            decided = None
        return bool(verify(one, other, timeout_seconds=None)) if decided is None else decided

    def check(pairs: list[list[str]] | None = None, texts: list[str] | None = None) -> list[bool]:
        if texts is not None:
            return [parsed(text) is not None for text in texts]
        return [equal(gold, answer) for gold, answer in pairs or []]

    if check([["\\frac{x}{2}", "0.5x"], ["x+\\sqrt{2}", "x"]]) != [True, False]:  # imports what is imported late
        raise SystemExit("math-verify, sympy or what they need does not work")
    return check


def _number(text: str, *_: Any, **__: Any) -> Any:
    """An exact number for a text; any other text is refused."""
    import sympy

    if not re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)\s*", text, re.ASCII):
        raise SyntaxError(text)
    return sympy.Rational(text.strip())


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
    what = json.loads(sys.argv[1])
    kind = what.pop("kind")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY[kind], MEMORY[kind]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(1), "w")
    check = math_checker() if kind == "math" else gym_checker(**what)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(null, stream)  # what a library prints is no reply
    print('"ready"', file=replies, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        signal.alarm(int(question["seconds"]) + ALONE)
        try:
            reply = check(**question["asked"])
        except Exception:  # the answer is the one thing here that was not tried before: it is wrong
            reply = None
        print(json.dumps({"token": question["token"], "reply": reply}), file=replies, flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    main()
