"""LaTeX as text: one way of writing for what only looks different, and where its parts begin and end."""

from __future__ import annotations

import re

_SYMBOLS = str.maketrans(
    {
        "π": "\\pi ", "∞": "\\infty ", "√": "\\sqrt ", "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ",
        "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "∩": "\\cap ", "°": "^\\circ ", "²": "^2", "³": "^3",
        "½": "\\frac{1}{2}", "±": "\\pm ", "θ": "\\theta ", "∈": "\\in ", "∅": "\\emptyset ", "⟨": "(", "⟩": ")",
        "\u00a0": " ", "\u202f": " ", "\u2009": " ", "~": " ",
    }
)  # fmt: skip
_NESTED = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"  # braces within braces within braces
_ONE = r"[0-9a-zA-Z]|\\(?!(?:sqrt|frac|text)(?![a-zA-Z]))[a-zA-Z]+"  # a command's argument without braces
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(displaystyle|textstyle|limits|nolimits|left|right|middle|[bB]igg?[lr]?)(?![a-zA-Z])", ""),
        (rf"\\[hv]?phantom\s*(\{{{_NESTED}\}}|[^\s\\{{])", ""),
        (r"(?<=\d)\s*(\{,\}|,\\!)\s*(?=\d{3})", ""),
        (r"(?<=\d)\\[,;:]\s*(?=\d{3}(?!\d))", ""),
        (r"\\[!,;:>]|\\(q?quad|enspace|thinspace)(?![a-zA-Z])", " "),
        (r"(?<!\\)\\ ", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:leq|leqslant|leqq)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:geq|geqslant|geqq)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\neq(?![a-zA-Z])", r"\\ne"),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:langle|lparen)(?![a-zA-Z])", "("),
        (r"\\(?:rangle|rparen)(?![a-zA-Z])", ")"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\[lr]?vert(?![a-zA-Z])", "|"),
        (r"\\(?:degree|deg(?=$))(?![a-zA-Z])", r"^\\circ "),
        (r"\\math(?:rm|bf|it|sf|normal)\s*\{([a-zA-Z]|[0-9.,]+)\}", r"\1"),
        (r"\\(?:math(?:rm|bf|it|sf)|text(?:bf|it|rm|normal|sf)|mbox|hbox)(?![a-zA-Z])\s*", r"\\text"),
        (r"\\text\s*\{\s*\}", ""),
        (r",?\s*(\\text\s*\{\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*,?", ", "),
        (r"\\[bp]matrix|\\(begin|end)\{[bp]matrix\}", lambda m: m[0].replace("bmatrix", "pmatrix")),
        (r"\\sqrt\s*\(([^()]*)\)|(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)", lambda m: f"\\sqrt{{{m[1] or m[2]}}}"),
        (rf"\\sqrt\s*({_ONE})", r"\\sqrt{\1}"),
        (rf"\\frac\s*({_ONE})", r"\\frac{\1}"),
        (rf"\\frac\s*(\{{{_NESTED}\}})\s*({_ONE})", r"\\frac\1{\2}"),
        (r"(?<![a-zA-Z\\])(?:infinity|inf|infty)(?![a-zA-Z])", r"\\infty "),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"\)\s*U\s*\(", r")\\cup("),
        (r"\\\$|\$", ""),
        (r"\*\*", "^"),
        (r"(\\[a-zA-Z]+)\s+(?=\d)", r"\1"),
        # the parser takes 2(3) and 2(\frac{1}{2}) for mixed numbers
        (r"(?<![\d^_.])(\d+(?:\.\d+)?)\s*(?=\()", r"\1\\cdot"),
        (r"\)\s*(?=\(|\\frac(?![a-zA-Z]))", r")\\cdot"),
        (r"(\\frac\{[^{}]*\}\{[^{}]*\}|\d\.\d+)\s*(?=\\frac(?![a-zA-Z])|\()", r"\1\\cdot"),
        (r",(?=\s)", ";"),  # so that 10, 200 is not 10,200
    )
]
_SPACE = re.compile(r"(?<=[a-zA-Z0-9]) (?=[a-zA-Z0-9])|(\\text\{[^{}]*\})| ")
_TOKEN = re.compile(r"\\begin\{\w+\}|\\end\{\w+\}|\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPEN, _CLOSE = ("(", "[", "{", "\\{"), (")", "]", "}", "\\}")


def tidy(text: str) -> str:
    """The same without what changes only its looks.

    >>> tidy(r"$\\dfrac 12 \\left[ x, 1 \\right].$")
    '\\\\frac{1}{2}[x;1]'
    """
    text = text.translate(_SYMBOLS).strip()
    for first, last in (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$")):
        if len(text) > len(first + last) and text.startswith(first) and text.endswith(last):
            text = text[len(first) : -len(last)].strip()
    for _ in range(3):  # what stands in braces has its turn after them
        before = text
        for pattern, replacement in _REWRITES:
            text = pattern.sub(replacement, text)
        if text == before:
            break
    text = re.sub(r"\s+", " ", text).strip()
    text = _SPACE.sub(lambda m: m[1] or (" " if _apart(text, m.start()) else ""), text)
    return text.removeprefix("\\approx").strip(" .,;")


def _apart(text: str, space: int) -> bool:
    """Whether a space stands where its loss would change the meaning: ``1 1/2``, ``\\pi r``."""
    if not 0 < space < len(text) - 1:
        return False
    before, after = text[space - 1], text[space + 1]
    return before.isalnum() and after.isalnum() and not (before.isdigit() and after.isalpha())


def split(text: str, separators: str) -> list[str]:
    """The parts of a text between separators that stand outside of all brackets; unbalanced brackets: one part.

    Args:
        text: tidy.
        separators: characters, or one command such as ``\\\\cup``.
    """
    parts, depth = [""], 0
    for token in _TOKEN.findall(text):
        depth += (token in _OPEN or token.startswith("\\begin")) - (token in _CLOSE or token.startswith("\\end"))
        if depth < 0:
            return [text]
        if depth == 0 and (token == separators if separators[0] == "\\" else token in separators):
            parts.append("")
        else:
            parts[-1] += token
    return [text] if depth else [part.strip() for part in parts]


def inside(text: str) -> tuple[str, str, str] | None:
    """The opening bracket, the middle and the closing one, if one pair of brackets holds all of a text."""
    tokens, depth = _TOKEN.findall(text), 0
    for i, token in enumerate(tokens):
        depth += (token in _OPEN or token.startswith("\\begin")) - (token in _CLOSE or token.startswith("\\end"))
        if depth <= 0:
            whole = i == len(tokens) - 1 > 0 and depth == 0
            return (tokens[0], "".join(tokens[1:-1]).strip(), token) if whole else None
    return None
