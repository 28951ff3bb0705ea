"""Equality of two sympy expressions, decided by interval arithmetic at random points.

Each expression is evaluated with rounding outwards, so that its value is certain to lie in the resulting interval. Two
are equal only if their intervals overlap and are narrow: many digits of both are known, and all of them agree. A value of
which no digit is known, e.g. after a cancellation, is equal to nothing. Neither is an undefined value, nor a function
that is not listed here.

The points are drawn from a hash of both texts: the same ones in every run, others for every answer.

The worker process loads this file by its path, so it imports nothing of this package.
"""

from __future__ import annotations

import functools
import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
from mpmath import iv  # type: ignore[import-untyped]
from mpmath.libmp import to_int  # type: ignore[import-untyped]
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]

LOW, HIGH, CONSTANT = 192, 1100, 3400  # bits: of most evaluations, of one point of a function, of a constant
POINTS, TRIES = 3, 24  # where two functions must agree; draws to find these points in the domain of the right answer
_MAX_EXPONENT = 24  # bits of a power of e or 2, so that it can be computed
_MAX_ANGLE = 1 << 14  # bits of an argument of sin, which is reduced modulo π
_MAX_FACTORIAL = 12  # bits
_MAX_BINOMIAL = 60  # lower index that is multiplied out
_SUMS = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)
_STEPS = (sympy.floor, sympy.ceiling, sympy.sign, sympy.Mod, sympy.Max, sympy.Min, sympy.frac)
_REVERSED = {sympy.Gt: sympy.Lt, sympy.Ge: sympy.Le}

Point = Mapping[Any, Any]
Values = Callable[[int], tuple[Any, Any]]  # of two expressions, by the number of bits


class Undefined(Exception):
    """The value does not exist, is not real, or cannot be enclosed."""


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
    if not _comparable(gold, answer):
        return False
    if gold - answer == 0:
        return True
    if not gold.free_symbols:
        return _agree(lambda bits: (value(gold, {}, bits), value(answer, {}, bits)), CONSTANT)

    def values(point: Point, real: bool, known: Any) -> Values:
        return lambda bits: (
            known if bits == LOW else value(gold, point, bits, real),
            value(answer, point, bits, real),
        )

    return _at_points(gold, seed, values)


def rounds_to(exact: Any, rounded: Any, digits: int) -> bool:
    """Whether a constant differs from a rounded number by at most one in its last digit after the point."""
    if not _exists(exact) or exact.free_symbols or not rounded.is_Rational:
        return False
    try:
        error = abs(value(exact, {}, LOW) - _number(rounded))
        return bool(error.b <= _number(sympy.Rational(1, 10**digits)).a)
    except Undefined:
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
            if any(map(_has_zero, (there, mine, yours))):
                raise Undefined
            starts.setdefault(real, point)
            if kind not in (sympy.Eq, sympy.Ne) and not (_is_real(there / yours) and (there / yours).a > 0):
                raise Undefined
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
    for real in (True, False):
        found = 0
        for point, counted in _points(gold, seed):
            if real and gold.has(sympy.I):
                break
            if found >= points and counted:
                continue
            try:
                known = value(gold, point, LOW, real)
            except Undefined:
                continue
            if not _agree(values(point, real, known), HIGH if found == points - 1 and counted else LOW):
                return False
            found += counted
        if found >= points:
            return True
    return False


def _points(gold: Any, seed: str) -> Iterator[tuple[Point, bool]]:
    """Random points and whether they count: ordinary ones; then, for what differs only there, far ones and a near one."""
    draw = random.Random(seed)
    variables = sorted(gold.free_symbols, key=str)
    ranges = [((-3, 2), True)] * TRIES + [((10, 35), False), ((40, 70), False), ((-60, -10), False)]
    for (low, high), counted in ranges:
        yield (
            {
                x: sympy.Rational(draw.choice((-1, 1)) * draw.randrange(1 << 80, 1 << 81), 1 << 80)
                * sympy.Integer(2) ** draw.randint(low, high)
                for x in variables
            },
            counted,
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
        one, other = (_parts(number) for number in values(bits))
    except Undefined:
        return None
    if any(a.b < b.a or b.b < a.a for a, b in zip(one, other, strict=True)):
        return False
    width = max(part.delta.b for part in (*one, *other))
    size = max(abs(part).a for part in (*one, *other))
    return True if width == 0 or width <= size * iv.mpf(2) ** (-bits // 2) else None


def _parts(number: Any) -> tuple[Any, Any]:
    """Real and imaginary part, both finite."""
    parts = (number, iv.mpf(0)) if _is_real(number) else (number.real, number.imag)
    if not all(-iv.inf < part.a <= part.b < iv.inf for part in parts):
        raise Undefined
    return parts


def value(expression: Any, point: Point, bits: int, real: bool = False) -> Any:
    """An interval, or a rectangle of complex numbers, that contains the value of an expression at a point.

    Args:
        expression: of sympy.
        point: a rational number for every variable.
        bits: working precision.
        real: raise ``Undefined`` where a part of the expression is not a real number.
    """
    iv.prec = bits
    known: dict[Any, Any] = {}

    def visit(part: Any) -> Any:
        if part in known:
            return known[part]
        if part in point:
            result = _number(point[part])
        elif part.is_Rational or part.is_Float:
            result = _number(part)
        elif type(part) in _CONSTANTS:
            result = _CONSTANTS[type(part)]()
        elif part.is_Pow:
            result = _power(part, visit)
        elif type(part) in _FUNCTIONS:
            result = _FUNCTIONS[type(part)](*map(visit, part.args))
        else:
            raise Undefined
        if real and not _is_real(result):
            raise Undefined
        known[part] = result
        return result

    try:
        return visit(expression)
    except (ArithmeticError, ValueError, NotImplementedError, iv.ComplexResult, AttributeError, TypeError) as error:
        raise Undefined from error


def _number(rational: Any) -> Any:
    rational = sympy.Rational(rational)
    return iv.mpf(int(rational.p)) / iv.mpf(int(rational.q)) if rational.q != 1 else iv.mpf(int(rational.p))


def _is_real(number: Any) -> bool:
    return isinstance(number, iv.mpf)


def _complex(number: Any) -> Any:
    return iv.mpc(number, 0) if _is_real(number) else number


def _has_zero(number: Any) -> bool:
    return all(part.a <= 0 <= part.b for part in _parts(number))


def _nonzero(number: Any) -> Any:
    if _has_zero(number):
        raise Undefined
    return number


def _bits(number: Any) -> int:
    """An upper bound of the logarithm to the base 2 of the absolute value."""
    ends = [end for part in ([number] if _is_real(number) else [number.real, number.imag]) for end in part._mpi_]
    if any(not mantissa and exponent for _, mantissa, exponent, _ in ends):
        raise Undefined  # infinite
    return max(exponent + size + (not _is_real(number)) for _, _, exponent, size in ends)


def _bounded(number: Any, bits: int) -> Any:
    if _bits(number) > bits:
        raise Undefined
    return number


def _exp(x: Any) -> Any:
    return iv.exp(_bounded(x, _MAX_EXPONENT))


def _log(x: Any) -> Any:
    _nonzero(x)
    return iv.log(x if _is_real(x) and x.a > 0 else _complex(x))


def _integer_power(base: Any, exponent: int) -> Any:
    if exponent < 0:
        return 1 / _nonzero(_integer_power(base, -exponent))
    if max(_bits(base), 1) * exponent >> _MAX_EXPONENT:
        raise Undefined
    if _is_real(base):
        return base**exponent
    result = iv.mpf(1)
    for bit in bin(exponent)[2:]:  # squaring keeps an exact 0 exact
        result = result * result * base if bit == "1" else result * result
    return result


def _power(part: Any, visit: Callable[[Any], Any]) -> Any:
    base, exponent = part.base, part.exp
    if exponent.is_Integer:
        return _integer_power(visit(base), int(exponent))
    if base is sympy.E:
        return _exp(visit(exponent))
    low = visit(base)
    if exponent.is_Rational and exponent.q == 2 and _is_real(low) and low.a >= 0:
        return _integer_power(iv.sqrt(low), int(exponent.p))
    if _is_real(low) and low.a == low.b == 0 and exponent.is_Rational and exponent > 0:
        return low
    return _exp(visit(exponent) * _log(low))  # a power of 0 is undefined


def _angle(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: function(_bounded(x, _MAX_ANGLE if _is_real(x) else _MAX_EXPONENT))


_sin, _cos = _angle(lambda x: iv.sin(x)), _angle(lambda x: iv.cos(x))


def _root(x: Any) -> Any:
    return iv.sqrt(x) if _is_real(x) and x.a >= 0 else _exp(_log(x) / 2)


def _asin(x: Any) -> Any:
    if _is_real(x) and -1 <= x.a and x.b <= 1:
        return iv.atan2(x, _root((1 - x) * (1 + x)))
    return -iv.j * _log(iv.j * x + _root(1 - x * x))


def _atan(x: Any) -> Any:
    if _is_real(x):
        return iv.atan2(x, iv.mpf(1))
    return iv.j * (_log(1 - iv.j * x) - _log(1 + iv.j * x)) / 2


def _acosh(x: Any) -> Any:
    return _log(x + _root(x + 1) * _root(x - 1))


def _abs(x: Any) -> Any:
    return abs(x) if _is_real(x) else _root(x.real * x.real + x.imag * x.imag)


def _gamma(x: Any) -> Any:
    _bounded(x, _MAX_FACTORIAL)
    if _is_real(x):
        low, high = int(to_int(x._mpi_[0], "c")), int(to_int(x._mpi_[1], "f"))  # the integers in the interval
        if low <= min(high, 0):
            raise Undefined  # a pole
        if low == high and x.a == x.b == low:
            return iv.mpf(math.factorial(low - 1))
    return iv.gamma(x)


def _binomial(n: Any, k: Any) -> Any:
    if _is_real(k) and k.a == k.b and k.a == int(k.a) and 0 <= int(k.a) <= _MAX_BINOMIAL:
        factors = ((n - i) / iv.mpf(i + 1) for i in range(int(k.a)))
        return functools.reduce(operator.mul, factors, iv.mpf(1))
    return _gamma(n + 1) / (_gamma(k + 1) * _gamma(n - k + 1))


def _floor(x: Any) -> Any:
    low, high = (int(to_int(end, "f")) for end in x._mpi_)
    if low != high:
        raise Undefined
    return iv.mpf(low)


def _sign(x: Any) -> Any:
    return iv.mpf(1) if _nonzero(x).a > 0 else iv.mpf(-1)


def _sum(*terms: Any) -> Any:
    return functools.reduce(operator.add, terms)


def _product(*factors: Any) -> Any:
    return functools.reduce(operator.mul, factors)


def _inverse(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: 1 / _nonzero(function(x))


def _of_inverse(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: function(1 / _nonzero(x))


def _sinh(x: Any) -> Any:
    return (_exp(x) - _exp(-x)) / 2


def _cosh(x: Any) -> Any:
    return (_exp(x) + _exp(-x)) / 2


def _tan(x: Any) -> Any:
    return _sin(x) / _nonzero(_cos(x))


def _tanh(x: Any) -> Any:
    return _sinh(x) / _nonzero(_cosh(x))


def _atanh(x: Any) -> Any:
    return (_log(1 + x) - _log(1 - x)) / 2


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    def of(*numbers: Any) -> Any:
        if not all(map(_is_real, numbers)):
            raise Undefined
        return function(*numbers)

    return of


_CONSTANTS: dict[Any, Callable[[], Any]] = {
    type(sympy.pi): lambda: iv.pi + 0,
    type(sympy.E): lambda: iv.e + 0,
    type(sympy.I): lambda: iv.mpc(0, 1),
    type(sympy.GoldenRatio): lambda: (1 + iv.sqrt(iv.mpf(5))) / 2,
}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    sympy.Add: _sum,
    sympy.Mul: _product,
    sympy.UnevaluatedExpr: lambda x: x,
    sympy.exp: _exp,
    sympy.log: lambda x, base=None: _log(x) if base is None else _log(x) / _nonzero(_log(base)),
    sympy.sin: _sin,
    sympy.cos: _cos,
    sympy.tan: _tan,
    sympy.cot: _inverse(_tan),
    sympy.sec: _inverse(_cos),
    sympy.csc: _inverse(_sin),
    sympy.asin: _asin,
    sympy.acos: lambda x: iv.pi / 2 - _asin(x),
    sympy.atan: _atan,
    sympy.acot: _of_inverse(_atan),
    sympy.asec: _of_inverse(lambda x: iv.pi / 2 - _asin(x)),
    sympy.acsc: _of_inverse(_asin),
    sympy.sinh: _sinh,
    sympy.cosh: _cosh,
    sympy.tanh: _tanh,
    sympy.coth: _inverse(_tanh),
    sympy.sech: _inverse(_cosh),
    sympy.csch: _inverse(_sinh),
    sympy.asinh: lambda x: _log(x + _root(x * x + 1)),
    sympy.acosh: _acosh,
    sympy.atanh: _atanh,
    sympy.Abs: _abs,
    sympy.re: lambda x: x if _is_real(x) else x.real,
    sympy.im: lambda x: iv.mpf(0) if _is_real(x) else x.imag,
    sympy.conjugate: lambda x: x if _is_real(x) else iv.mpc(x.real, -x.imag),
    sympy.factorial: lambda x: _gamma(x + 1),
    sympy.gamma: _gamma,
    sympy.binomial: _binomial,
    sympy.sign: _real(_sign),
    sympy.floor: _real(_floor),
    sympy.ceiling: _real(lambda x: -_floor(-x)),
    sympy.frac: _real(lambda x: x - _floor(x)),
    sympy.Mod: _real(lambda x, y: x - y * _floor(x / _nonzero(y))),
}
