r"""The answer in a completion, and its comparison with the right one as far as no algebra is needed.

An answer is parsed into a tree: lists, sets, tuples, intervals, unions and matrices are split as text into leaves,
which are numbers, words or expressions. Numbers are compared as exact fractions, so ``0.333`` is not ``1/3``; words
as text. The remaining pairs of expressions are compared by ``troll.rewards.checker``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from troll.rewards.latex import fraction, number, split, strip_brackets, tidy
from troll.rewards.units import may_follow, read_unit

MAX_LENGTH = 300  # characters of an answer; a longer one is wrong
_MAX_DEPTH, _MAX_PARTS = 12, 40  # nesting of brackets; parts of a list
_UNIT = re.compile(
    r"(?P<value>.+?) ?(?:\\text\{(?P<text>[^{}]*)\}(?P<power>\^\{?\d\}?)?|(?P<percent>\\?%)|(?P<degree>\^\{?\\circ\}?)"
    r"|(?<=[0-9}.]) ?(?P<word>[cmk]m|inch(es)?|f(oo|ee)?t|miles?|meters?|(square ?)?units?|dollars?|cents?|degrees?"
    r"|seconds?|minutes?|hours?|days?|weeks?|months?|years?|percent))"
)
_BASE = re.compile(r"(?P<value>-?[0-9A-Z]+)_\{?(?P<base>\d+)\}?")
_NAME = r"(?:\\?[a-zA-Z]+'*(?:_\{\w+\}|_\w+)?|\\text\{[^{}]*\})(?: ?\([\w ,]*\)| [a-zA-Z]+)*"
_NAMED = re.compile(rf"({_NAME})(?:=|\\in(?![a-zA-Z]))(.+)", re.DOTALL)
_ORDER = re.compile(r"(<|>|\\le(?![a-z])|\\ge(?![a-z]))")
_RELATION = re.compile(r"=|<|>|\\(le|ge|ne|equiv|in|approx)(?![a-zA-Z])")
_BRACES = re.compile(r"\{[^{}]*\}")
_UNEVALUATED = re.compile(
    r"\\(sum|prod|int|iint|oint|lim|limsup|liminf|max|min|sup|inf|gcd|lcm|det|deg|mod|bmod|pmod|operatorname|partial)"
    r"(?![a-zA-Z])|\\frac\{d\}|(?<![a-z])(gcd|lcm|max|min|mod|lim|sum)(?![a-z])"
)
_ONLY_AS_TEXT = re.compile(
    r"\\[lc]?dots|\.\.\.|:|(?<![_^\d])\d+ \d|\d_\{?\d|(?<![\^_])\d\{|\\(sim|cong|parallel|perp)(?![a-z])"
)
_BOMB = re.compile(
    r"\^\{?[\d.]*\^|\^\{[^{}a-z]*\^|\^\{?[\d.,]{5,}|\d{5,}\}?\)?!|[)!}]!|binom\{?\d{5,}|\d{60,}"  # e.g. towers
)
_UNKNOWN = re.compile(r"(?<![a-zA-Z\\])[a-df-hj-zA-Z](?![a-zA-Z])|(?<![a-zA-Z\\])[a-zA-Z]{2,}")
_SYMBOL = re.compile(  # a name that an answer may add: x, \theta, S_n, f(x), AB, \angle ABC, "the area"
    r"(?:[a-zA-Z]|[A-Z]{2}|\\(?:angle|triangle) ?[A-Z]{1,3}|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|rho))"
    r"'*(?:_\{?\w+\}?)?(?: ?\([\w ,]*\))?"
    r"|(?:\\text\{)? ?(?:the )?(?:final )?(?:answer|area|volume|perimeter|length|width|height|radius|distance|slope"
    r"|total|sum|product|probability|cost|price|time|speed|number|value) ?\}?",
    re.IGNORECASE,
)
_COMMANDS = re.compile(  # that the parser reads as what they mean; it takes \lnot for \ln and \cdots for \cdot
    r"frac|sqrt|pi|cdot|times|div|binom|infty|pm|mp|le|ge|(arc)?(sin|cos|tan|cot|sec|csc)|(sin|cos|tan|cot)h|ln|log|lg|exp"
    r"|[lr](floor|ceil)|[aA]lpha|[bB]eta|[gG]amma|[dD]elta|(var)?epsilon|[zZ]eta|eta|[tT]heta|iota|kappa|[lL]ambda|mu|nu"
    r"|[xX]i|Pi|rho|[sS]igma|tau|(var)?phi|Phi|chi|[pP]si|[oO]mega"
)
_DEGREES = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)\^(?:\{\\circ\}|\\circ(?![a-zA-Z]))")
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_COMMAND = re.compile(r"\\([a-zA-Z]+|[^a-zA-Z\\{}])")
_MISREAD = re.compile(  # the parser takes 1,5 for 15, and leaves out the index of a function
    r"\d,(?!\d{3}(?!\d))\d|\d{4},\d|\\(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|exp|sqrt|frac) ?_"
)


@dataclass(frozen=True)
class Leaf:
    """A number, words in quotation marks, or an expression, with the variable it is the value of and its unit."""

    text: str
    value: Fraction | None = None
    unit: str = ""
    name: str = ""
    rounded: str = ""
    """The number after ``\\approx``."""

    @property
    def relation(self) -> str:
        """The expression, as an equation if the variable is named."""
        return f"{self.name}={self.text}" if self.name else self.text


@dataclass(frozen=True)
class Group:
    """Several answers between brackets: ``{}`` is unordered; ``()``, ``[)`` and rows of a matrix are ordered."""

    ends: str
    parts: tuple[Leaf | Group, ...]
    name: str = ""


Answer = Leaf | Group
Pair = tuple[str, str]


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a completion, plain or chat, as TRL passes it to a reward."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion else ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{…}``; None if there is none, or its braces are not balanced.

    >>> boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = max(text.rfind("\\boxed{"), text.rfind("\\boxed {"))
    if start < 0:
        return None
    first = text.index("{", start)
    depth = 0
    for i in range(first, min(len(text), first + 4 * MAX_LENGTH)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[first + 1 : i].strip() or None
    return None


def final_number(text: str) -> str | None:
    """The number after the last ``####``, else the one in the last box."""
    _, mark, after = text.rpartition("####")
    line = after.strip().split("\n", 1)[0] if mark else boxed(text) or ""
    return number(line)


def expression(text: str) -> str | None:
    """The answer in the last box, in canonical form as far as that is cheap. For majority votes."""
    content = boxed(text)
    tree = None if content is None else parse(content)
    return None if tree is None else _format(tree)


def _format(tree: Answer) -> str:
    if isinstance(tree, Leaf):
        return tree.text + (f" {tree.unit}" if tree.unit == "%" else "")
    parts = [_format(part) for part in tree.parts]
    return f"{tree.ends[0]}{', '.join(sorted(parts) if tree.ends == '{}' else parts)}{tree.ends[-1]}"


@functools.lru_cache(maxsize=16384)
def parse(answer: str) -> Answer | None:
    """An answer as a tree; None if it is empty, too long, nested too deeply, or has control characters."""
    if len(answer) > MAX_LENGTH or any(not c.isprintable() and not c.isspace() for c in answer):
        return None
    text = tidy(answer)
    depth = deepest = 0
    for character in text:
        depth += {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(character, 0)
        deepest = max(deepest, depth)
    return None if not text or deepest > _MAX_DEPTH else _tree(text)


def _tree(text: str) -> Answer:
    if fraction(text) is not None:
        return _leaf(text)
    if (named := _NAMED.fullmatch(text)) and not _signs(named[2]):
        return replace(_tree(named[2]), name=named[1])
    if len(parts := split(text, "\\approx")) == 2 and all(parts):
        if re.fullmatch(_NAME, parts[0]):
            return replace(_tree(parts[1]), name=parts[0])
        exact, unit = _tree(parts[0]), _UNIT.fullmatch(parts[1])
        rounded = number(unit["value"] if unit else parts[1])
        if isinstance(exact, Leaf) and rounded is not None:
            return replace(exact, rounded=rounded)
    for parts in (split(text, ",;"), split(text, "\\cup")):
        if 1 < len(parts) <= _MAX_PARTS and all(parts):
            return _set(parts)
    if interval := _interval(text):
        return interval
    if text in ("\\emptyset", "\\varnothing", "\\{\\}"):
        return Group("{}", ())
    if found := strip_brackets(text):
        opened, middle, closed = found
        if opened.startswith("\\begin") and closed == opened.replace("begin", "end"):
            rows = [tuple(map(_tree, split(row, "&"))) for row in split(middle.removesuffix("\\\\"), "\\\\")]
            return Group(opened, tuple(Group("row", row) for row in rows))
        parts = split(middle, ",;")
        if opened == "\\{" and len(parts) <= _MAX_PARTS and all(parts):
            return _tree(parts[0]) if len(parts) == 1 else _set(parts)
        lines = [strip_brackets(part) for part in parts] if opened + closed == "[]" else [None]
        if all(line and line[0] + line[2] == "[]" for line in lines):  # [[1,2],[3,4]]
            rows = [tuple(map(_tree, split(line[1], ",;"))) for line in lines if line]
            return Group("\\begin{pmatrix}", tuple(Group("row", row) for row in rows))
        if 1 < len(parts) <= _MAX_PARTS and all(parts):
            return Group(opened + closed, tuple(map(_tree, parts)))
        if opened + closed == "()" and len(parts) == 1 and len(middle) > 1:
            return _tree(middle)
    if text.count("\\pm") == 1 and "\\mp" not in text:
        return Group("{}", tuple(_leaf(text.replace("\\pm", sign)) for sign in "+-"))
    return _leaf(text)


def _set(parts: Sequence[str]) -> Group:
    """The answers in a list or a set; a part with ± is two of them."""
    trees = [(_tree(part), "\\pm" in part) for part in parts]
    both = (
        tree.parts if double and isinstance(tree, Group) and tree.ends == "{}" else (tree,) for tree, double in trees
    )
    return Group("{}", tuple(part for some in both for part in some))


def _interval(text: str) -> Group | None:
    """An interval written as inequalities, such as ``1 < x ≤ 2`` or ``x > 1``."""
    parts = [part.strip() for part in _ORDER.split(text)]
    if len(parts) == 3 and re.fullmatch(_NAME, parts[2]):
        parts = [parts[2], _FLIPPED[parts[1]], parts[0]]  # the variable first
    if len(parts) == 3 and re.fullmatch(_NAME, parts[0]):
        name, sign, end = parts
        low, high = ("-\\infty", end) if sign in ("<", "\\le") else (end, "\\infty")
        first, last = "(" if low != end or sign == ">" else "[", ")" if high != end or sign == "<" else "]"
    elif len(parts) == 5 and re.fullmatch(_NAME, parts[2]) and (parts[1] in "<\\le") == (parts[3] in "<\\le"):
        low, before, name, after, high = parts
        if before in (">", "\\ge"):
            low, before, after, high = high, _FLIPPED[after], _FLIPPED[before], low
        first, last = "(" if before == "<" else "[", ")" if after == "<" else "]"
    else:
        return None
    return Group(first + last, (_tree(low), _tree(high)), name)


_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}


def _leaf(text: str) -> Leaf:
    text = text.removeprefix("+")
    unit, scale = "", 1
    match = None if _signs(text) else _UNIT.fullmatch(text)
    if match and not (match["degree"] and _ANGLE.search(text)):
        text = match["value"]
        percent, degree = match["percent"], match["degree"]
        words = "%" if percent else "degree" if degree else match["text"] or match["word"] or ""
        scale, unit = read_unit(words, (match["power"] or "").strip("^{}"))
    elif match := _BASE.fullmatch(text):
        text, unit = match["value"], f"base {match['base']}"
    if match := re.fullmatch(r"\\text\{([^{}]*)\}|\(?([A-Z])\)", text):
        words = re.sub(r"[\s.,;()]+", " ", match[1] or match[2]).strip().casefold()
        if fraction(words) is None:
            return Leaf(f'"{words}"', None, f"{scale} {unit}" if scale != 1 else unit)
        text = words
    value = fraction(text)
    if value is None:
        return Leaf(text, None, f"{scale} {unit}" if scale != 1 else unit)
    return Leaf(str(value * scale), value * scale, unit)


def equal_trees(gold: Answer, answer: Answer, leaf: Callable[[Leaf, Leaf], bool]) -> bool:
    """Whether two trees are equal, where ``leaf`` compares two leaves. It is called for every pair that could match."""
    renamed = answer.name and gold.name != answer.name and not _relations(gold, answer)
    if renamed and (gold.name or not _SYMBOL.fullmatch(answer.name) or _contains(answer, answer.name)):
        return False
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return leaf(gold, answer)
    if isinstance(gold, Leaf) or isinstance(answer, Leaf):
        return False
    if gold.ends != answer.ends or len(gold.parts) != len(answer.parts):
        return False
    if gold.ends != "{}":
        return all(equal_trees(g, a, leaf) for g, a in zip(gold.parts, answer.parts, strict=True))
    return _matched([[equal_trees(g, a, leaf) for a in answer.parts] for g in gold.parts])


def _signs(text: str) -> int:
    """The number of signs such as = and < outside of braces; an index of a sum is in braces."""
    while _RELATION.search(text) and (inner := _BRACES.search(text)):
        text = text[: inner.start()] + text[inner.end() :]
    return len(_RELATION.findall(text))


def _contains(tree: Answer, name: str) -> bool:
    """Whether a variable is in the expression that it is said to equal."""
    return isinstance(tree, Leaf) and bool(re.search(rf"(?<![a-zA-Z\\]){re.escape(name)}(?![a-zA-Z])", tree.text))


def _matched(table: Sequence[Sequence[bool]]) -> bool:
    """Whether every row can have a column of its own in which it is true (Kuhn's algorithm)."""
    rows: dict[int, int] = {}  # by their column

    def place(row: int, seen: set[int]) -> bool:
        for column, fits in enumerate(table[row]):
            if fits and column not in seen:
                seen.add(column)
                if column not in rows or place(rows[column], seen):
                    rows[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(table)))


def _relations(gold: Answer, answer: Answer) -> bool:
    """Whether one of them is an equation or inequality, which is compared as a whole."""
    return any(isinstance(tree, Leaf) and _signs(tree.text) > 0 for tree in (gold, answer))


def compare_leaves(gold: Leaf, answer: Leaf) -> bool | Pair:
    """Whether two leaves are equal; if only algebra can decide it, the two expressions to compare."""
    if _relations(gold, answer):
        if gold.relation == answer.relation:
            return True
        pair = (gold.relation, answer.relation)
        solved = gold.name and not _UNKNOWN.search(gold.text)  # then an equation that is not solved is wrong
        return pair if _signs(pair[0]) == _signs(pair[1]) and not solved and _readable(*pair) else False
    if gold.text.startswith('"') or answer.text.startswith('"'):
        words = answer.text.strip('"').replace(" ", "").casefold()
        return gold.unit == answer.unit and words == gold.text.strip('"').replace(" ", "").casefold()
    if answer.value is not None and answer.rounded:
        digits = len(answer.rounded.partition(".")[2])
        near = abs(answer.value - Fraction(answer.rounded)) < Fraction(1, 10**digits)
        return near and compare_leaves(gold, replace(answer, rounded=""))
    if "%" in (gold.unit, answer.unit) and gold.unit != answer.unit:
        return _equal_percent(gold, answer)
    if not may_follow(answer.unit, gold.unit, plain=gold.value is not None):
        return False
    if gold.text == answer.text and not answer.rounded:
        return True
    if gold.value is not None or _ONLY_AS_TEXT.search(gold.text) or _ONLY_AS_TEXT.search(answer.text):
        return False  # where the right answer is a number, unevaluated arithmetic is wrong
    one, other = _DEGREES.sub(r"\\frac{\1\\pi}{180}", gold.text), _DEGREES.sub(r"\\frac{\1\\pi}{180}", answer.text)
    if not _readable(one, other):
        return False
    return one, f"{other}\\approx{answer.rounded}" if answer.rounded else other


def _equal_percent(gold: Leaf, answer: Leaf) -> bool:
    """``5\\%`` is 0.05 and not 5. Where the right answer has the sign, it may be left out."""
    if gold.unit == "%":
        return not answer.unit and gold.value is not None and answer.value in (gold.value, gold.value / 100)
    return not gold.unit and gold.value is not None and answer.value == gold.value * 100


def _readable(gold: str, answer: str) -> bool:
    """Whether the parser will read all of the answer, and in short time."""
    if _BOMB.search(answer) or (_UNEVALUATED.search(answer) and not _UNEVALUATED.search(gold)):
        return False
    unknown = {command for command in _COMMAND.findall(answer) if not _COMMANDS.fullmatch(command)}
    if unknown - set(_COMMAND.findall(gold)) or gold.count("\\circ") != answer.count("\\circ"):
        return False
    return not _MISREAD.search(answer) and ("'" not in answer or "'" in gold)
