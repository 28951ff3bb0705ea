"""Values of sympy expressions by interval arithmetic.

Every operation rounds outwards, so that the value is certain to lie in the resulting interval, or rectangle of complex
numbers. That assumes that mpmath's elementary functions are right.

The worker process loads this file by its path, so it imports nothing of this package.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
from mpmath import iv  # type: ignore[import-untyped]
from mpmath.libmp import to_int  # type: ignore[import-untyped]

_MAX_EXPONENT = 24  # bits of a power of e or 2, so that it can be computed
_MAX_ANGLE = 1 << 14  # bits of an argument of sin, which is reduced modulo π
_MAX_FACTORIAL = 12  # bits
_MAX_BINOMIAL = 60  # lower index that is multiplied out

Point = Mapping[Any, Any]


class UndefinedError(Exception):
    """The value does not exist, is not real, or cannot be enclosed."""


def value(expression: Any, point: Point, bits: int, real: bool = False) -> Any:
    """An interval, or a rectangle of complex numbers, that contains the value of an expression at a point.

    Args:
        expression: of sympy.
        point: a rational number for every variable.
        bits: working precision.
        real: raise ``UndefinedError`` where a part of the expression is not a real number.
    """
    iv.prec = bits
    known: dict[Any, Any] = {}

    def visit(part: Any) -> Any:
        if part in known:
            return known[part]
        if part in point:
            result = number(point[part])
        elif part.is_Rational or part.is_Float:
            result = number(part)
        elif type(part) in _CONSTANTS:
            result = _CONSTANTS[type(part)]()
        elif part.is_Pow:
            result = _power(part, visit)
        elif type(part) in _FUNCTIONS:
            result = _FUNCTIONS[type(part)](*map(visit, part.args))
        else:
            raise UndefinedError
        if real and not is_real(result):
            raise UndefinedError
        known[part] = result
        return result

    try:
        return visit(expression)
    except (ArithmeticError, ValueError, NotImplementedError, iv.ComplexResult, AttributeError, TypeError) as error:
        raise UndefinedError from error


def parts_of(number: Any) -> tuple[Any, Any]:
    """Real and imaginary part, both finite."""
    parts = (number, iv.mpf(0)) if is_real(number) else (number.real, number.imag)
    if not all(-iv.inf < part.a <= part.b < iv.inf for part in parts):
        raise UndefinedError
    return parts


def number(rational: Any) -> Any:
    """The interval of a rational number."""
    rational = sympy.Rational(rational)
    return iv.mpf(int(rational.p)) / iv.mpf(int(rational.q)) if rational.q != 1 else iv.mpf(int(rational.p))


def is_real(number: Any) -> bool:
    """Whether this is an interval and not a rectangle."""
    return isinstance(number, iv.mpf)


def _complex(number: Any) -> Any:
    return iv.mpc(number, 0) if is_real(number) else number


def has_zero(x: Any) -> bool:
    """Whether 0 is in the interval or rectangle."""
    return all(part.a <= 0 <= part.b for part in parts_of(x))


def _nonzero(number: Any) -> Any:
    if has_zero(number):
        raise UndefinedError
    return number


def _bits(number: Any) -> int:
    """An upper bound of the logarithm to the base 2 of the absolute value."""
    ends: list[tuple[int, int, int, int]] = [
        end for part in ([number] if is_real(number) else [number.real, number.imag]) for end in part._mpi_
    ]
    if any(not mantissa and exponent for _, mantissa, exponent, _ in ends):
        raise UndefinedError  # infinite
    return max(exponent + size + (not is_real(number)) for _, _, exponent, size in ends)


def _bounded(number: Any, bits: int) -> Any:
    if _bits(number) > bits:
        raise UndefinedError
    return number


def _exp(x: Any) -> Any:
    return iv.exp(_bounded(x, _MAX_EXPONENT))


def _log(x: Any) -> Any:
    _nonzero(x)
    return iv.log(x if is_real(x) and x.a > 0 else _complex(x))


def _integer_power(base: Any, exponent: int) -> Any:
    if exponent < 0:
        return 1 / _nonzero(_integer_power(base, -exponent))
    if max(_bits(base), 1) * exponent >> _MAX_EXPONENT:
        raise UndefinedError
    if is_real(base):
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
    if exponent.is_Rational and exponent.q == 2 and is_real(low) and low.a >= 0:
        return _integer_power(iv.sqrt(low), int(exponent.p))
    if is_real(low) and low.a == low.b == 0 and exponent.is_Rational and exponent > 0:
        return low
    return _exp(visit(exponent) * _log(low))  # a power of 0 is undefined


def _angle(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: function(_bounded(x, _MAX_ANGLE if is_real(x) else _MAX_EXPONENT))


_sin, _cos = _angle(lambda x: iv.sin(x)), _angle(lambda x: iv.cos(x))


def _root(x: Any) -> Any:
    return iv.sqrt(x) if is_real(x) and x.a >= 0 else _exp(_log(x) / 2)


def _asin(x: Any) -> Any:
    if is_real(x) and x.a >= -1 and x.b <= 1:
        return iv.atan2(x, _root((1 - x) * (1 + x)))
    return -iv.j * _log(iv.j * x + _root(1 - x * x))


def _atan(x: Any) -> Any:
    if is_real(x):
        return iv.atan2(x, iv.mpf(1))
    return iv.j * (_log(1 - iv.j * x) - _log(1 + iv.j * x)) / 2


def _acosh(x: Any) -> Any:
    return _log(x + _root(x + 1) * _root(x - 1))


def _abs(x: Any) -> Any:
    return abs(x) if is_real(x) else _root(x.real * x.real + x.imag * x.imag)


def _gamma(x: Any) -> Any:
    _bounded(x, _MAX_FACTORIAL)
    if is_real(x):
        low, high = int(to_int(x._mpi_[0], "c")), int(to_int(x._mpi_[1], "f"))  # the integers in the interval
        if low <= min(high, 0):
            raise UndefinedError  # a pole
        if low == high and x.a == x.b == low:
            return iv.mpf(math.factorial(low - 1))
    return iv.gamma(x)


def _binomial(n: Any, k: Any) -> Any:
    if is_real(k) and k.a == k.b and k.a == int(k.a) and 0 <= int(k.a) <= _MAX_BINOMIAL:
        factors = ((n - i) / iv.mpf(i + 1) for i in range(int(k.a)))
        return functools.reduce(operator.mul, factors, iv.mpf(1))
    return _gamma(n + 1) / (_gamma(k + 1) * _gamma(n - k + 1))


def _floor(x: Any) -> Any:
    low, high = (int(to_int(end, "f")) for end in x._mpi_)
    if low != high:
        raise UndefinedError
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
        if not all(map(is_real, numbers)):
            raise UndefinedError
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
    sympy.re: lambda x: x if is_real(x) else x.real,
    sympy.im: lambda x: iv.mpf(0) if is_real(x) else x.imag,
    sympy.conjugate: lambda x: x if is_real(x) else iv.mpc(x.real, -x.imag),
    sympy.factorial: lambda x: _gamma(x + 1),
    sympy.gamma: _gamma,
    sympy.binomial: _binomial,
    sympy.sign: _real(_sign),
    sympy.floor: _real(_floor),
    sympy.ceiling: _real(lambda x: -_floor(-x)),
    sympy.frac: _real(lambda x: x - _floor(x)),
    sympy.Mod: _real(lambda x, y: x - y * _floor(x / _nonzero(y))),
}
