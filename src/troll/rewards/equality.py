"""Equality of two sympy expressions, decided by interval arithmetic at random points.

Each expression is evaluated with rounding outwards, so that its value is certain to lie in the resulting interval. Two
are equal only if their intervals overlap and are narrow: many digits of both are known, and all of them agree. A value
of which no digit is known, e.g. after a cancellation, is equal to nothing; so is an undefined value, and a function
without an enclosure.

The points are drawn from a hash of both texts: the same ones in every run, others for every answer.

The worker process loads this file by its path, so it imports only ``enclosures`` of this package.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
from mpmath import iv  # type: ignore[import-untyped]
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]

from troll.rewards.enclosures import Point, UndefinedError, has_zero, is_real, number, parts_of, value

LOW, HIGH, CONSTANT = 192, 1100, 3400  # bits: of most evaluations, of one point of a function, of a constant
POINTS, TRIES = 3, 24  # where two functions must agree; draws to find these points in the domain of the right answer
_SUMS = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)
_STEPS = (sympy.floor, sympy.ceiling, sympy.sign, sympy.Mod, sympy.Max, sympy.Min, sympy.frac)
_REVERSED = {sympy.Gt: sympy.Lt, sympy.Ge: sympy.Le}

Values = Callable[[int], tuple[Any, Any]]  # of two expressions, by the number of bits


def equal(gold: Any, answer: Any, seed: str) -> bool:
    """Whether two expressions, equations or inequalities agree to at least 29 digits at random points."""
    if not _exists(gold) or not _exists(answer):
        return False
    if gold == answer:
        return True
    if isinstance(gold, sympy.Rel) and isinstance(answer, sympy.Rel):
        return _equal_relations(gold, answer, seed)
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
    gold, answer = _prepared(gold, answer)
    if gold - answer == 0:
        return True
    if not _comparable(gold, answer):
        return False
    if not gold.free_symbols:
        return _agree(lambda bits: (value(gold, {}, bits), value(answer, {}, bits)), CONSTANT)

    def values(point: Point, real: bool, known: Any) -> Values:
        return lambda bits: (
            known if bits == LOW else value(gold, point, bits, real),
            value(answer, point, bits, real),
        )

    return _at_points(gold, seed, values)


def rounds_to(exact: Any, rounded: Any, digits: int) -> bool:
    """Whether a constant differs from a rounded number by less than one in its last digit after the point."""
    if not _exists(exact) or exact.free_symbols or not rounded.is_Rational:
        return False
    try:
        error = abs(value(exact, {}, LOW) - number(rounded))
        return bool(error.b < number(sympy.Rational(1, 10**digits)).a)
    except UndefinedError:
        return False


def _exists(expression: Any) -> bool:
    return not expression.has(sympy.nan, sympy.zoo)


def _prepared(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Both with sums and the like computed, and unknown functions such as ``f(x)`` taken for variables."""
    unknown: dict[Any, Any] = {}
    found = []
    for expression in (gold, answer):
        if expression.has(*_SUMS):
            expression = expression.doit()
        for part in expression.atoms(AppliedUndef):
            unknown.setdefault(part, sympy.Dummy(str(part), real=True))
        found.append(expression.xreplace(unknown))
    return found[0], found[1]


def _comparable(gold: Any, answer: Any) -> bool:
    """Whether points can decide: the answer has no other variables, and no steps where the right answer has none."""
    if not answer.free_symbols <= gold.free_symbols or gold.has(sympy.oo, -sympy.oo) or answer.has(sympy.oo, -sympy.oo):
        return False
    if not gold.free_symbols:
        return True
    rough = [step for step in _STEPS if answer.has(step)]
    if answer.has(sympy.Abs) and not gold.has(sympy.Abs, sympy.log):
        kinks = any(not power.exp.is_Integer for power in gold.atoms(sympy.Pow))  # as in a root of a square
        rough += [] if kinks else [sympy.Abs]
    return all(gold.has(step) for step in rough)


def _equal_relations(gold: Any, answer: Any, seed: str) -> bool:
    """Whether one relation is a multiple of the other, by a constant that keeps its direction."""
    (kind, left), (other, right) = _one_sided(gold), _one_sided(answer)
    left, right = _prepared(left, right)
    if kind is not other or not left.free_symbols or left.free_symbols != right.free_symbols:
        return False
    if not _comparable(left, right):
        return False
    starts: dict[bool, Point] = {}

    def values(point: Point, real: bool, _: Any) -> Values:
        """The right side of a = c b, with the constant c from the first point."""

        def products(bits: int) -> tuple[Any, Any]:
            here, mine = value(left, point, bits, real), value(right, point, bits, real)
            start = starts.get(real, point)
            there, yours = value(left, start, bits, real), value(right, start, bits, real)
            if any(map(has_zero, (there, mine, yours))):
                raise UndefinedError
            starts.setdefault(real, point)
            if kind not in (sympy.Eq, sympy.Ne) and not (is_real(there / yours) and (there / yours).a > 0):
                raise UndefinedError
            return here * yours, there * mine

        return products

    return _at_points(left, seed, values, POINTS + 1)


def _one_sided(relation: Any) -> tuple[Any, Any]:
    """The kind of a relation and its left side, with 0 on the right and never > or ≥."""
    kind = type(relation)
    difference = sympy.Add(relation.lhs, sympy.Mul(-1, relation.rhs))
    return (_REVERSED[kind], -difference) if kind in _REVERSED else (kind, difference)


def _at_points(gold: Any, seed: str, values: Callable[[Point, bool, Any], Values], points: int = POINTS) -> bool:
    """Whether both values agree wherever the right answer is a real number; if that is nowhere, as complex numbers."""
    for real in (True, False) if not gold.has(sympy.I) else (False,):
        found = 0
        for point, ordinary in _points(gold, seed):
            if ordinary and found >= points:
                continue
            try:
                pair = values(point, real, value(gold, point, LOW, real))
            except UndefinedError:
                continue
            if ordinary and not _agree(pair, HIGH if found == points - 1 else LOW):
                return False
            if not ordinary and found >= points and _overlap(pair, LOW) is False:
                return False
            found += ordinary
        if found >= points:
            return True
    return False


def _points(gold: Any, seed: str) -> Iterator[tuple[Point, bool]]:
    """Random points, and whether they are ordinary. The others, two far from 0 and one near it, may only contradict."""
    draw = random.Random(seed)
    variables = sorted(gold.free_symbols, key=str)
    ranges = [((-3, 2), True)] * TRIES + [((10, 35), False), ((40, 70), False), ((-60, -10), False)]
    for (low, high), ordinary in ranges:
        yield (
            {
                x: sympy.Rational(draw.choice((-1, 1)) * draw.randrange(1 << 80, 1 << 81), 1 << 80)
                * sympy.Integer(2) ** draw.randint(low, high)
                for x in variables
            },
            ordinary,
        )


def _agree(values: Values, bits: int) -> bool:
    """Whether two values have many known digits, half of ``bits`` at least, and all of them agree."""
    for precision in (LOW, HIGH, CONSTANT):
        same = _overlap(values, precision)
        if same is False or (precision >= bits and (same or precision >= HIGH)):
            return bool(same)
    return False


def _overlap(values: Values, bits: int) -> bool | None:
    """Whether two values are in the same narrow interval; None if too few of their digits are known."""
    try:
        one, other = (parts_of(found) for found in values(bits))
    except UndefinedError:
        return None
    if any(a.b < b.a or b.b < a.a for a, b in zip(one, other, strict=True)):
        return False
    width = max(part.delta.b for part in (*one, *other))
    size = max(abs(part).a for part in (*one, *other))
    return True if width == 0 or width <= size * iv.mpf(2) ** (-bits // 2) else None
