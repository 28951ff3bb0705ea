r"""Units of answers: their canonical form, and which unit an answer may have where the right one has another or none.

Only a known unit or a single noun is taken for a unit. Other words after a number could change what the answer says, as
in ``5\text{ vs. seven}``.
"""

from __future__ import annotations

import functools
import re

_NAMES = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "km": "kilometer kilometre",
    "m": "meter metre",
    "in": "inch inche",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "s": "sec second",
    "min": "minute",
    "h": "hr hour",
    "g": "gram",
    "kg": "kilogram",
    "lb": "pound",
    "oz": "ounce",
    "l": "liter litre",
    "ml": "milliliter millilitre",
    "dollar": "usd buck",
    "%": "percent",
    "degree": "deg",
}
_CANONICAL = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_MEASURE = re.compile(
    rf"(?:{'|'.join(_NAMES)}|day|week|month|year|decade|cent|euro|gallon|acre|hectare|[mk]ph|am|pm|pint|quart|tonn?e?"
    r"|rad|radian|pence|penny)(?:\^\d)?"
)
_FILLER = re.compile(r"(?:unit|square|cubic|of|a|the|total|in)(?:\^\d)?|/")
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_NO_NOUN = re.compile(  # words that could change the number before them, or add another one
    r"or|and|not?|if|maybe|either|neither|nor|none|vs|versus|perhaps|possibly|but|rather|instead|unless|never|isnt|wrong"
    r"|incorrect|false|about|around|roughly|approximately|almost|nearly|least|most|more|less|over|under|above|below|minus"
    r"|plus|times?|divided|by|negative|positive|squared?|cubed?|factorial|root|power|half|third|quarter|double|twice|pi"
    r"|infinity|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|(?:thir|fif|[a-z]+)(?:teen|ty)"
    r"|hundred|thousand|million|billion|trillion|dozen|alternatively|otherwise|except|base|modulo|mod|is|are"
)


@functools.lru_cache(maxsize=4096)
def read_unit(words: str, power: str = "") -> tuple[int, str]:
    r"""The factor and the canonical unit that words after a number stand for.

    >>> read_unit("square centimeters"), read_unit("cm", "2"), read_unit(" million dollars"), read_unit("p.m.")
    ((1, 'cm^2'), (1, 'cm^2'), (1000000, 'dollar'), (1, 'pm'))
    """
    words = re.sub(r"\b(square|cubic)(?=[a-z])", r"\1 ", words.casefold().replace(".", ""))
    tokens = re.findall(r"[^\W\d_]+|\S", words)
    scale = 1
    while tokens and tokens[0] in _SCALES:
        scale *= _SCALES[tokens.pop(0)]
    found: list[str] = []
    for token in tokens:
        if not _MEASURE.fullmatch(token) and len(token) > 2 and token.endswith("s") and not token.endswith("ss"):
            token = token[:-1]
        token = {"per": "/", "sq": "square", "cu": "cubic"}.get(token, _CANONICAL.get(token, token))
        if found and found[-1] in ("square", "cubic"):
            token += "^2" if found.pop() == "square" else "^3"
        found.append(token)
    if found and power:
        found[-1] += f"^{power}"
    return scale, " ".join(found)


def may_follow(unit: str, gold: str, *, plain: bool) -> bool:
    """Whether an answer may have this unit where the right answer has the unit ``gold``.

    Args:
        unit: of the answer.
        gold: of the right answer.
        plain: the right answer is a plain number.
    """
    if not unit or unit == gold or (unit == "base 10" and not gold):
        return True
    words, wanted = unit.split(), gold.split()
    if "%" in words or "base" in words or (unit == "degree" and not plain):
        return False
    if gold and _measures(words) != _measures(wanted):
        return False
    nouns = [w for w in words if w not in wanted and not _MEASURE.fullmatch(w) and not _FILLER.fullmatch(w)]
    return len(nouns) <= 1 and all(word.isalpha() and not _NO_NOUN.fullmatch(word) for word in nouns)


def _measures(words: list[str]) -> set[str]:
    return {word for word in words if _MEASURE.fullmatch(word)}
