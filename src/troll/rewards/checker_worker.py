"""The process behind ``checker.Checker``: it reads questions as JSON lines and answers them one by one.

It is run by its path and imports nothing of this package, so that it starts fast and holds no secrets.
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
ORPHAN_SECONDS = 2  # after the deadline this process ends, in case its parent is gone and cannot kill it
POINTS = 3  # at which two expressions with variables are compared


def math_checker() -> Callable[..., Any]:
    """A function that says which pairs of expressions are equal, or which expressions can be parsed.

    math-verify's parser reads the expressions; no text is run as code. Their difference is evaluated at a few points,
    to as many digits as necessary. If it cannot be evaluated, math-verify decides.
    """
    import sympy  # type: ignore[import-untyped]
    import sympy.parsing.sympy_parser  # type: ignore[import-untyped]
    from latex2sympy2_extended import latex2sympy2 as latex  # type: ignore[import-untyped]
    from math_verify import verify

    sympy.parsing.sympy_parser.parse_expr = _number  # sympy's own runs text as Python
    config = latex.ConversionConfig(lowercase_symbols=False)
    logging.disable()  # the parser logs every text it cannot parse

    @functools.lru_cache(maxsize=8192)
    def parsed(text: str) -> Any:
        """The expression, with i as the imaginary unit; None if it cannot be parsed."""
        try:
            result = latex.latex2sympy(text, is_real=True, normalization_config=None, conversion_config=config)
            if result.has(sympy.Sum, sympy.Product, sympy.Integral):  # where i is an index
                return result
            return result.xreplace({sympy.Symbol("i", real=True): sympy.I})
        except Exception:  # of many kinds
            return None

    def zero(value: Any) -> bool | None:
        """Whether a constant is 0; None if that cannot be decided."""
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
        """Whether an expression is 0 at random values of its variables; None if that cannot be decided."""
        variables = sorted(value.free_symbols, key=str)
        if not variables:
            return zero(value)
        draw = random.Random(seed)
        results = []
        for _ in range(POINTS):
            point = {x: sympy.Rational(draw.choice((-1, 1)) * draw.randint(50, 400), 101) for x in variables}
            results.append(zero(value.subs(point)))
        return False if False in results else None if None in results else True

    def equations(gold: Any, answer: Any, seed: str) -> bool | None:
        """Whether one equation is a multiple of the other; None if that cannot be decided."""
        ratio = (gold.lhs - gold.rhs) / (answer.lhs - answer.rhs)
        variables = sorted(ratio.free_symbols, key=str)
        draw = random.Random(seed)
        values = [ratio.subs({x: sympy.Rational(draw.randint(50, 400), 101) for x in variables}) for _ in range(2)]
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
        except Exception:  # the difference cannot be formed or evaluated
            decided = None
        return bool(verify(one, other, timeout_seconds=None)) if decided is None else decided

    def check(pairs: list[list[str]] | None = None, texts: list[str] | None = None) -> list[bool]:
        if texts is not None:
            return [parsed(text) is not None for text in texts]
        return [equal(gold, answer) for gold, answer in pairs or []]

    if check([["\\frac{x}{2}", "0.5x"], ["x+\\sqrt{2}", "x"]]) != [True, False]:  # also triggers late imports
        raise SystemExit("math-verify, sympy or one of their dependencies does not work")
    return check


def _number(text: str, *_: Any, **__: Any) -> Any:
    """The exact number that a text is; SyntaxError for any other text."""
    import sympy

    if not re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)\s*", text, re.ASCII):
        raise SyntaxError(text)
    return sympy.Rational(text.strip())


def gym_checker(dataset: str, settings: list[dict[str, Any]]) -> Callable[..., Any]:
    """A function that returns a problem of a reasoning-gym dataset, by seed and index, or the score of an answer."""
    import reasoning_gym

    datasets = {given["seed"]: reasoning_gym.create_dataset(dataset, **given) for given in settings}
    problem = functools.lru_cache(maxsize=4096)(lambda seed, index: datasets[seed][index])

    def check(seed: int, index: int, answer: str | None = None) -> Any:
        entry = problem(seed, index)
        if answer is None:
            return {"question": entry["question"], "answer": str(entry["answer"] or "")}
        return float(datasets[seed].score_answer(answer, entry))

    return check


def main() -> None:
    """Send "ready", then answer every line until the input ends."""
    settings = json.loads(sys.argv[1])
    kind = settings.pop("kind")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY[kind], MEMORY[kind]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(1), "w")
    check = math_checker() if kind == "math" else gym_checker(**settings)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(null, stream)  # libraries that print must not write replies
    print('"ready"', file=replies, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        signal.alarm(int(question["seconds"]) + ORPHAN_SECONDS)
        try:
            reply = check(**question["arguments"])
        except Exception:  # caused by the answer, which is then wrong
            reply = None
        print(json.dumps({"token": question["token"], "reply": reply}), file=replies, flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    main()
