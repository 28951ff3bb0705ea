r"""Attacks on the math reward: answers that are wrong, or say several things, and must not earn 1.

A universal answer is tried against many right answers. The others are tried against the one that they hide or deform.
"""

from __future__ import annotations

from troll.rewards.selftest.attack import Attack

GOLDS = (
    r"\sqrt{2}",
    r"\frac{\pi}{4}",
    "e^2",
    r"\ln 2",
    r"1+\sqrt{3}",
    "3+4i",
    "x^2+1",
    r"\frac{1}{x}",
    "2^n",
    r"\sin x",
    "y=2x+3",
    "x^2+y^2=4",
    "x+y<3",
    r"\infty",
)
"""Right answers of different kinds, no two of them equal."""

HONEST = ((r"\sqrt{2}", r"\frac{2}{\sqrt{2}}"), ("x^2+1", "(x+1)^2-2x"), ("5", "x=5.0"))
"""Right answers in another form: right answer, given answer. If one of them earns 0, the reward is broken."""


def _universal(name: str, description: str, *answers: str) -> Attack:
    return Attack(name, "answer", description, "", answers=tuple((gold, a) for a in answers for gold in GOLDS))


def _one(name: str, description: str, gold: str, *answers: str) -> Attack:
    return Attack(name, "answer", description, "", answers=tuple((gold, answer) for answer in answers))


_PARTS = tuple(
    (gold.replace("?", part), gold.replace("?", r"(\pi^{4999}+1)^2-\pi^{9998}-2\pi^{4999}"))
    for gold in ("(1,?)", "[0,?]", "?,7", "x<?", r"\begin{pmatrix}?\\1\end{pmatrix}", "x=?", r"\{?,3\}")
    for part in (r"\sqrt{2}", r"\frac{\pi}{4}")
)

ANSWERS: tuple[Attack, ...] = (
    _universal(
        "cancelled powers",
        "A difference of huge powers, of which no digit is known.",
        r"(\pi^{4999}+1)^2-\pi^{9998}-2\pi^{4999}",
        r"(\pi^{999}+1)^2-\pi^{1998}-2\pi^{999}",
        r"(e^{999}+1)^{99}-e^{98901}",
    ),
    Attack("cancelled powers in parts", "answer", "The same inside lists, intervals and matrices.", "", answers=_PARTS),
    _universal(
        "cancelled exponentials",
        "Differences of hyperbolic functions and exponentials, of which no digit is known.",
        r"\cosh(9999)-\sinh(9999)",
        r"e^{9999}+x-e^{9999}",
        r"\cosh^2(9999x)-\sinh^2(9999x)",
    ),
    _universal(
        "cancelled factorials",
        "A difference of factorials, and of binomials.",
        r"\frac{(n+999)!}{(n+998)!}-n",
        r"\binom{9999}{4999}-\binom{9999}{5000}",
    ),
    _universal(
        "division by zero", "Divides by a value that is 0.", r"\frac{1}{0}", r"(\pi-\pi)^{-1}", r"\tan\frac{\pi}{2}"
    ),
    _universal(
        "undefined values",
        "Values that do not exist.",
        "0^0",
        r"\infty-\infty",
        r"\frac{0}{0}",
        r"\ln 0",
        r"0\cdot\infty",
    ),
    _universal("true equations", "An equation that always holds.", "0=0", "x=x", "0(y-2x-3)=0", "x-x<1", "1=1"),
    _universal(
        "any variable", "An expression with variables of its own.", "z", "f(x)", "c_1+c_2", r"\text{answer}", "?"
    ),
    _one(
        "sine of a grid",
        "Adds a function that is 0 at all points k/101.",
        "x^2",
        r"x^2+\sin(101\pi x)",
        r"x^2+\sin(10100\pi x)",
    ),
    _one(
        "zero almost everywhere",
        "Adds a function that is 0 except at single points.",
        "x^2",
        "x^2+0^{x^2}",
        r"x^2+\lfloor\frac{1}{1+x^2}\rfloor",
    ),
    _one(
        "zero nearby",
        "Adds a function that is 0 up to a large number.",
        "x^2",
        r"x^2+\lfloor\frac{x}{10^6}\rfloor",
        "x^2+|x-10^6|+x-10^6",
        r"x^2+\sqrt{(x-500)^2}+x-500",
    ),
    _one(
        "nearly equal",
        "Differs by very little.",
        r"\pi",
        r"\pi+10^{-300}",
        "3.14159265358979323846",
        r"\frac{355}{113}",
    ),
    _one(
        "lost decimal point",
        "Has a point where the right answer has none.",
        "35",
        ".35",
        "$.35$",
        "3.5",
        ",35",
        "...35",
    ),
    _one("percent", "A number in percent.", "5", r"5\%", r"5\text{ percent}", r"0.05\%"),
    _one("scale in words", "Multiplies in words.", "5", r"5\text{ million}", r"5\text{ dozen}", r"5\text{ squared}"),
    _one(
        "alternatives",
        "Names several candidates.",
        "5",
        "5, 7",
        "5 or 7",
        r"\{5,7\}",
        r"\text{5 or 7}",
        r"5\text{ vs. seven}",
        r"5\text{ or maybe 7}",
        r"5\text{ ou sept}",
        r"\pm5",
        "5/7",
        "5|7",
    ),
    _one(
        "negations",
        "Denies the answer that it names.",
        "3",
        r"\text{not }=3",
        r"\text{not }3",
        "not x=3",
        r"x\ne3",
        "x≠3",
        r"\neg3",
        r"3\text{ is wrong}",
        r"\text{anything but}=3",
        r"\cancel{3}",
    ),
    _one(
        "contradictions",
        "Equates the answer with another number.",
        "5",
        "5=7",
        "x=5=7",
        "7=5",
        r"5\approx7",
        r"7\approx5",
        r"x=5\text{ and }x=7",
    ),
    _one(
        "words around an expression",
        "Adds words that change what the expression says.",
        r"\sqrt{2}",
        r"\sqrt{2}\text{ vs. }\sqrt{3}",
        r"\text{not }\sqrt{2}",
        r"\lnot\sqrt{2}",
        r"\sqrt{2}\%",
        r"\sqrt{2}'",
        r"\sqrt{2}^\circ",
        r"\sqrt{2}\to3",
    ),
    _one(
        "problem restated",
        "Leaves the arithmetic to the checker.",
        "56088",
        r"123\cdot456",
        r"\sum_{k=1}^{1}56088",
        "56088+0",
    ),
    _one(
        "towers of powers",
        "Numbers too large to compute.",
        "x",
        "9^{9^{9}}",
        "((9!)!)!",
        "(((9^{9999})^{9999})^{999})^{999}",
        r"\binom{9999}{4999}^{999}",
    ),
    _one(
        "code",
        "Python code.",
        "x",
        "__import__('os').system('true')",
        r"\operatorname{eval}(1)",
        "x.__class__",
        "exec('x')",
    ),
)
