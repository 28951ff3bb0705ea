"""Numbers in text, exactly."""

from __future__ import annotations

import re
from fractions import Fraction

_DOLLAR = r"\\?\$?"
_NUMBER = re.compile(
    rf"{_DOLLAR}\s*([-+]?)\s*{_DOLLAR}([0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]{{1,40}})?(\.[0-9]{{0,40}})?\s*{_DOLLAR}\.?"
)
_MIXED = re.compile(r"(-?)(\d{1,40}) ?(?:\\frac\{(\d{1,40})\}\{(\d{1,40})\}|(?<= )(\d{1,40})/(\d{1,40}))", re.ASCII)
_FRACTION = re.compile(r"(-?)(?:\\frac\{([^{}]*)\}\{([^{}]*)\}|([^{}/]*)/([^{}/]*))")
_POWER_OF_TEN = re.compile(r"(.*?)(?:\\times|\\cdot|\*)?10\^(?:\{([-+]?\d{1,3})\}|(\d))", re.ASCII)


def number(text: str) -> str | None:
    """A number in one way of writing; None if the text is not a plain number.

    >>> number("$1,200.00"), number("-0"), number("2/3")
    ('1200', '0', None)
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or not (match[2] or (match[3] and match[3] != ".")):
        return None
    whole = (match[2] or "").replace(",", "").lstrip("0") or "0"
    digits = f"{whole}{match[3] or '.'}".rstrip("0").rstrip(".") if match[3] else whole
    return f"-{digits}" if match[1] == "-" and digits != "0" else digits


def fraction(text: str) -> Fraction | None:
    r"""The exact value of a number, a fraction of two, a mixed number, or a number times a power of ten.

    >>> fraction("-0.50"), fraction(r"1\frac{1}{2}"), fraction(r"3\times10^{2}"), fraction(r"\sqrt{4}")
    (Fraction(-1, 2), Fraction(3, 2), Fraction(300, 1), None)
    """
    plain = number(text)
    if plain is not None:
        return Fraction(plain)
    if match := _MIXED.fullmatch(text):
        whole, above, below = int(match[2]), int(match[3] or match[5]), int(match[4] or match[6])
        return (-1 if match[1] else 1) * (whole + Fraction(above, below)) if below else None
    if match := _FRACTION.fullmatch(text):
        over, under = number(match[2] or match[4] or ""), number(match[3] or match[5] or "")
        if over is None or under is None or under == "0":
            return None
        return (-1 if match[1] else 1) * Fraction(over) / Fraction(under)
    if match := _POWER_OF_TEN.fullmatch(text):
        factor = number(match[1]) if match[1] not in ("", "-") else f"{match[1]}1"
        return None if factor is None else Fraction(factor) * Fraction(10) ** int(match[2] or match[3])
    return None
