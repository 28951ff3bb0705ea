"""The process behind ``checker.Checker``: it reads questions as JSON lines and answers them one by one.

It is run by its path and imports nothing of this package but two files, so that it starts fast and holds no secrets.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY = {"math": 1 << 30, "gym": 4 << 30}  # bytes
ORPHAN_SECONDS = 2  # after the deadline this process ends, in case its parent is gone and cannot kill it


def math_checker() -> Callable[..., Any]:
    """A function that says which pairs of expressions are equal, or which expressions can be parsed.

    math-verify's parser reads the expressions; no text is run as code. ``equality.py`` compares them.
    """
    import sympy  # type: ignore[import-untyped]
    import sympy.parsing.sympy_parser  # type: ignore[import-untyped]
    from latex2sympy2_extended import latex2sympy2 as latex  # type: ignore[import-untyped]

    _load("enclosures")
    equality = _load("equality")
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

    def equal(gold: str, answer: str) -> bool:
        exact, _, rounded = answer.partition("\\approx")
        one, other = parsed(gold), parsed(exact)
        if one is None or other is None:
            return False
        try:
            if rounded and not equality.rounds_to(other, _number(rounded), len(rounded.partition(".")[2])):
                return False
            return bool(equality.equal(one, other, f"{gold}\0{answer}"))
        except Exception:  # of sympy, which cannot evaluate everything
            return False

    def check(pairs: list[list[str]] | None = None, texts: list[str] | None = None) -> list[bool]:
        if texts is not None:
            return [parsed(text) is not None for text in texts]
        return [equal(gold, answer) for gold, answer in pairs or []]

    if check([["\\frac{x}{2}", "0.5x"], ["x+\\sqrt{2}", "x"]]) != [True, False]:  # also triggers late imports
        raise SystemExit("math-verify, sympy or one of their dependencies does not work")
    return check


def _load(name: str) -> Any:
    """A module of this folder, loaded without the package around it, which would take seconds."""
    full = f"troll.rewards.{name}"
    spec = importlib.util.spec_from_file_location(full, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    return module


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
