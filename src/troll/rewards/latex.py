"""LaTeX as text: a normal form, splitting at separators and brackets, and exact values of numbers."""

from __future__ import annotations

import re
from fractions import Fraction

_SYMBOLS = str.maketrans(
    {
        "π": "\\pi ", "∞": "\\infty ", "√": "\\sqrt ", "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ",
        "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "∩": "\\cap ", "°": "^\\circ ", "²": "^2", "³": "^3",
        "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "±": "\\pm ", "θ": "\\theta ",
        "∈": "\\in ", "∅": "\\emptyset ", "≈": "\\approx ", "⟨": "(", "⟩": ")",
        "\u00a0": " ", "\u202f": " ", "\u2009": " ", "~": " ",
    }
)  # fmt: skip
_NESTED = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"  # up to three levels of braces
_ONE = r"[0-9a-zA-Z]|\\(?!(?:sqrt|frac|text)(?![a-zA-Z]))[a-zA-Z]+"  # a command's argument without braces
_PLAIN = (  # commands that change only the appearance of what follows
    r"\\(?:(?:text)?color\s*(?:\[\w*\])?\s*\{[^{}]*\}"
    r"|(?:boldsymbol|bm|pmb|underline|underbar|fbox|boxed|ensuremath|displaystyle)(?![a-zA-Z]))"
)
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(displaystyle|textstyle|limits|nolimits|left|right|middle|[bB]igg?[lr]?|bf|rm|[lL]arge)(?![a-zA-Z])", ""),
        (r"^(\*\*|__|`|\*|\")([^*`\"]+)\1$", r"\2"),  # Markdown, quotation marks
        (r"\"", "''"),  # which mark words later
        (rf"{_PLAIN}\s*\{{([0-9.,]+|[a-zA-Z])\}}(?!\d)", r"\1"),
        (_PLAIN, ""),
        (r"\\math(?:rm|bf|it|sf|tt|normal)\s*(?=\{[^{}]*[0-9+*/=^(\\-])", ""),
        (rf"\\[hv]?phantom\s*(\{{{_NESTED}\}}|[^\s\\{{])", ""),
        (r"(?<=\d)\s*(\{,\}|,\\!)\s*(?=\d{3})", ""),
        (r"(\\[a-zA-Z]+\s*|(?<![\w.}]))\.(?=\d)", r"\g<1>0."),
        (r"(?<![\w.}])(\d+(?:\.\d+)?)[eE]\+?(\d{1,3})(?![\w.])", r"\1\\cdot10^{\2}"),
        # 2e-3 is an expression with e; 1e-5, 2.5e-3, 2E-3 and 2e-03 are not
        (r"(?<![\w.}])(\d+\.\d+|\d+(?=E)|\d+(?=e-\d\d)|1(?=e))[eE]-(\d{1,3})(?![\w.])", r"\1\\cdot10^{-\2}"),
        (r"(?<=\d)\s*x\s*(?=10\^)", r"\\cdot"),
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
        (r"\\lbrack(?![a-zA-Z])", "["),
        (r"\\rbrack(?![a-zA-Z])", "]"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\[lr]?vert(?![a-zA-Z])", "|"),
        (r"\\(?:degree|deg(?=$))(?![a-zA-Z])", r"^\\circ "),
        (r"\\math(?:rm|bf|it|sf|normal)\s*\{([a-zA-Z]|[0-9.,]+)\}", r"\1"),
        (r"\\(?:math(?:rm|bf|it|sf)|text(?:bf|it|rm|normal|sf)|mbox|hbox)(?![a-zA-Z])\s*", r"\\text"),
        (r"\\text\s*\{\s*\}", ""),
        (
            r",?\s*(\\text\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*,?(?=\s*[^\s,;.)\]}])",
            ", ",
        ),
        (r"[(\[]\s*\\begin\{(?:array|matrix|smallmatrix)\}(?:\{[clr|]*\})?", r"\\begin{pmatrix}"),
        (r"\\end\{(?:array|matrix|smallmatrix)\}\s*[)\]]", r"\\end{pmatrix}"),
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
        (r"\^\s*\(([^()]+)\)", r"^{\1}"),
        (r"\\bar(?![a-zA-Z])", r"\\overline"),
        (r"(\\[a-zA-Z]+)\s+(?=\d)", r"\1"),
        # the parser takes 2(3) and 2(\frac{1}{2}) for mixed numbers
        (r"(?<![\d^_.])(\d+(?:\.\d+)?)\s*(?=\()", r"\1\\cdot"),
        (r"\)\s*(?=\(|\\frac(?![a-zA-Z]))", r")\\cdot"),
        (r"(\\frac\{[^{}]*\}\{[^{}]*\}|\d\.\d+)\s*(?=\\frac(?![a-zA-Z])|\()", r"\1\\cdot"),
        (r",(?=\s)", ";"),  # 10, 200 is not 10,200
    )
]
_ROOT = re.compile(r"√\s*(\d+(?:\.\d+)?)")
_FULL_STOP = re.compile(r"(?<![.,;])[.,;]$")
_END = r"(?:[^\[\](){},;]|\([^()]*\)|\{(?:[^{}]|\{[^{}]*\})*\})+"
_OUTWARD = re.compile(rf"([\[\](])({_END}[,;]{_END})([\[\])])")
_SPACE = re.compile(r"(?<=[a-zA-Z0-9]) (?=[a-zA-Z0-9])|(\\text\{[^{}]*\})| ")
_TOKEN = re.compile(r"\\begin\{\w+\}|\\end\{\w+\}|\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPEN, _CLOSE = ("(", "[", "{", "\\{"), (")", "]", "}", "\\}")
_DOLLAR = r"(?:\\?\$)?"
_NUMBER = re.compile(
    rf"{_DOLLAR}\s*([-+]?)\s*{_DOLLAR}([0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]{{1,40}})?(\.[0-9]{{0,40}})?\s*{_DOLLAR}\.?"
)
_MIXED = re.compile(r"(-?)(\d{1,40}) ?(?:\\frac\{(\d{1,40})\}\{(\d{1,40})\}|(?<= )(\d{1,40})/(\d{1,40}))", re.ASCII)
_QUOTIENT = re.compile(r"(-?)(?:\\frac\{([^{}]*)\}\{([^{}]*)\}|([^{}/]*)/([^{}/]*))")
_REPEATING = re.compile(r"(-?)(\d{0,20})\.(\d{0,20})\\overline\{(\d{1,20})\}", re.ASCII)
_POWER_OF_TEN = re.compile(r"(.*?)(?:\\times|\\cdot|\*)?10\^(?:\{([-+]?\d{1,3})\}|(-?\d{1,3}))", re.ASCII)


def tidy(text: str) -> str:
    """The text without markup that changes only its appearance.

    >>> tidy(r"$\\dfrac 12 \\left[ x, 1 \\right].$")
    '\\\\frac{1}{2}[x;1]'
    """
    text = _ROOT.sub(r"\\sqrt{\1}", text).translate(_SYMBOLS).strip()
    for first, last in (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$")):
        if len(text) > len(first + last) and text.startswith(first) and text.endswith(last):
            text = text[len(first) : -len(last)].strip()
    for _ in range(3):  # content of braces is rewritten after the braces
        before = text
        for pattern, replacement in _REWRITES:
            text = pattern.sub(replacement, text)
        if text == before:
            break
    text = re.sub(r"\s+", " ", text).strip()
    text = _SPACE.sub(lambda m: m[1] or (" " if _apart(text, m.start()) else ""), text)
    text = _FULL_STOP.sub("", text.removeprefix("\\approx").strip())
    for _ in range(3):
        found = strip_brackets(text)
        text = found[1] if found and found[0] + found[2] == "{}" else text
    return text if _balanced(text) else _OUTWARD.sub(_turned, text)


def _balanced(text: str) -> bool:
    return len(split(text + ",", ",")) > 1


def _turned(interval: re.Match[str]) -> str:
    """An interval with brackets that point outwards, such as ``]1,2[``, in the common notation."""
    return ("(" if interval[1] == "]" else interval[1]) + interval[2] + (")" if interval[3] == "[" else interval[3])


def _apart(text: str, space: int) -> bool:
    """Whether removing this space would change the meaning: ``1 1/2``, ``\\pi r``."""
    if not 0 < space < len(text) - 1:
        return False
    before, after = text[space - 1], text[space + 1]
    return before.isalnum() and after.isalnum() and not (before.isdigit() and after.isalpha())


def split(text: str, separators: str) -> list[str]:
    """The parts of a text between separators outside of all brackets; one part if brackets are not balanced.

    Args:
        text: in the normal form of ``tidy``.
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


def strip_brackets(text: str) -> tuple[str, str, str] | None:
    """The opening bracket, the content and the closing bracket, if one pair of brackets encloses the whole text."""
    tokens, depth = _TOKEN.findall(text), 0
    for i, token in enumerate(tokens):
        depth += (token in _OPEN or token.startswith("\\begin")) - (token in _CLOSE or token.startswith("\\end"))
        if depth <= 0:
            whole = i == len(tokens) - 1 > 0 and depth == 0
            return (tokens[0], "".join(tokens[1:-1]).strip(), token) if whole else None
    return None


def number(text: str) -> str | None:
    """The canonical form of a number; None if the text is not a plain number.

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
    r"""The exact value of a number, a fraction of two, a mixed number, a repeating decimal, or a number times 10^n.

    >>> fraction("-0.50"), fraction(r"1\frac{1}{2}"), fraction(r"3\times10^{2}"), fraction(r"\sqrt{4}")
    (Fraction(-1, 2), Fraction(3, 2), Fraction(300, 1), None)
    """
    plain = number(text)
    if plain is not None:
        return Fraction(plain)
    if match := _MIXED.fullmatch(text):
        whole, above, below = int(match[2]), int(match[3] or match[5]), int(match[4] or match[6])
        return (-1 if match[1] else 1) * (whole + Fraction(above, below)) if below else None
    if match := _REPEATING.fullmatch(text):
        known, repeated = Fraction(f"{match[2] or 0}.{match[3] or 0}"), Fraction(int(match[4]), 10 ** len(match[4]) - 1)
        value = known + repeated / Fraction(10) ** len(match[3])
        return -value if match[1] else value
    if match := _QUOTIENT.fullmatch(text):
        over, under = number(match[2] or match[4] or ""), number(match[3] or match[5] or "")
        if over is None or under is None or under == "0":
            return None
        return (-1 if match[1] else 1) * Fraction(over) / Fraction(under)
    if match := _POWER_OF_TEN.fullmatch(text):
        factor = number(match[1]) if match[1] not in ("", "-") else f"{match[1]}1"
        return None if factor is None else Fraction(factor) * Fraction(10) ** int(match[2] or match[3])
    return None
