"""Numbers, durations and foreign text as the console and the report print them."""

from __future__ import annotations

import re
import unicodedata


def number(x: float) -> str:
    """Three significant digits."""
    if x != 0 and (abs(x) < 1e-3 or abs(x) >= 1e6):
        mantissa, exponent = f"{x:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}".replace("-", "−")
    text = f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"
    return text.replace("-", "−")


def digits(x: float) -> str:
    """Three significant digits with trailing zeros, for columns."""
    return f"{x:#.3g}".rstrip(".").replace("-", "−") if 1e-3 <= abs(x) < 1000 else number(x)


def score(x: float) -> str:
    """A reward with three decimals."""
    return f"{x:.3f}".replace("-", "−") if abs(x) < 100 else number(x)


def percent(x: float) -> str:
    """A fraction as a percentage."""
    text = "< 0.1" if 0 < x < 0.001 else f"{100 * x:.0f}" if x >= 0.1 else f"{100 * x:.1f}"
    return f"{text}\N{NO-BREAK SPACE}%".replace("-", "−")


def duration(seconds: float) -> str:
    """Wall time in seconds, minutes, or hours and minutes."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def clock(seconds: float) -> str:
    """Minutes and seconds for a countdown, with hours if needed.

    >>> clock(75), clock(3 * 3600 + 62)
    ('1:15', '3:01:02')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def plural(n: int, what: str) -> str:
    """``n`` and the noun, in the plural unless ``n`` is 1."""
    return f"{n:,} {what}" + ("" if n == 1 else "s")


def count(n: float) -> str:
    """A large number, such as a parameter count."""
    return f"{n / 1e9:.1f} B" if n >= 1e9 else f"{n / 1e6:.0f} M" if n >= 1e6 else f"{n:,.0f}"


def one_line(text: str) -> str:
    """The text on one line, without control characters: nothing that moves the cursor or colours the terminal.

    >>> one_line("a\\x1b[31mb\\n c")
    'a [31mb c'
    """
    plain = "".join("\n" if unicodedata.category(x)[0] == "C" or x in "\u2028\u2029" else x for x in text)
    return re.sub(r"\s*\n\s*", " ", plain).strip()
