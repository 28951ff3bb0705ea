"""Programming problems: test cases and the comparison of results with expected values.

Expected values stay away from the program: of ``assert f(3) == 9`` only ``f(3)`` is sent to its process.
"""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import json
import math
import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from troll.errors import InputError
from troll.rewards.testcode import TestCode, bound, classes, for_program, loaded

TOLERANCE = 1e-9  # relative, of numbers that are not whole
_CACHED_CHARACTERS = 32 << 20


@dataclass(frozen=True)
class Expression:
    """An expression that must have this value.

    Attributes:
        json: the value comes from JSON, which has no tuples; some data sets also wrap it into a list of one.
    """

    source: str
    value: Any
    json: bool = False

    @property
    def function(self) -> str:
        """The function of the program. A ``class Solution`` may have it as a method."""
        return re.sub(r"^bool\(", "", self.source).split("(")[0].split(".")[0]

    def accepts(self, given: Any, tolerance: float = TOLERANCE) -> bool:
        """Whether the value is correct."""
        if not self.json:
            return equal_values(given, self.value, tolerance)
        given, wrapped = _as_json(given), isinstance(self.value, list) and len(self.value) == 1
        return equal_values(given, self.value, tolerance) or (wrapped and equal_values(given, self.value[0], tolerance))


@dataclass(frozen=True)
class Statement:
    """Test code that must run to its end. It runs in another process than the program whose functions it calls.

    Attributes:
        imports: code that imports modules and functions of the standard library which the test uses.
    """

    source: str
    imports: str = ""


@dataclass(frozen=True)
class Stream:
    """A standard input and the output that the program must print for it."""

    given: str
    printed: str

    def accepts(self, printed: str, tolerance: float = TOLERANCE) -> bool:
        """Whether the text is the same, except for white space at the ends of lines and of the text.

        Decimals, such as 0.3, may differ by the tolerance.
        """
        given, right = _lines(printed), _lines(self.printed)
        return given == right or (
            len(given) == len(right) and all(_same_line(*lines, tolerance) for lines in zip(given, right, strict=True))
        )


Case = Expression | Statement | Stream


@dataclass(frozen=True)
class Problem:
    """A programming problem.

    Attributes:
        cases: either all about functions, or all about standard input and output.
        setup: code that tests need. A program gets only its imports, its classes without ordinary methods, and its
            variables that no test uses: the rest could tell it the answers.
        prepare: test code that runs before each case and can use the program's definitions.
        given: code that the program may use, and the tests too.
    """

    cases: tuple[Case, ...]
    setup: str = ""
    prepare: str = ""
    given: str = ""

    @functools.cached_property
    def before_program(self) -> str:
        """The code that runs before the program, in its process."""
        tests = [ast.parse(case.source) for case in self.cases if isinstance(case, Statement)]
        used = set().union(*map(loaded, [*tests, ast.parse(self.prepare)]))
        kept = for_program(ast.parse(self.setup), used)
        return "\n".join(filter(None, [self.given, ast.unparse(kept)]))

    @functools.cached_property
    def classes(self) -> list[str]:
        """The names of the classes that both the program and the tests have."""
        return classes(ast.parse(f"{self.given}\n{self.setup}"))

    @functools.cached_property
    def functions(self) -> frozenset[str]:
        """The names that tests expect the program to define."""
        known = _defined(self.setup, self.prepare, self.given)
        names = {case.function for case in self.cases if isinstance(case, Expression)}
        return frozenset(names).union(
            *(TestCode(ast.parse(case.source), known).own for case in self.cases if isinstance(case, Statement))
        )


def read_problem(tests: Any, setup: str | None = None, prepare: str | None = None, given: str | None = None) -> Problem:
    """A problem in one of the formats of common data sets. InputError if a test cannot be judged.

    Args:
        tests: a list of Python code, mostly one assert each; or ``{"inputs": [...], "outputs": [...]}`` for programs
            that read standard input, with ``"fn_name": "f"`` for functions and lists of arguments; or JSON of either.
        setup, prepare, given: as in ``Problem``.
    """
    text = tests if isinstance(tests, str) else json.dumps(tests)
    return _cache.get((text, setup or "", prepare or "", given or ""))


class _Cache:
    """Problems that were read before, because the completions of a prompt have the same tests."""

    def __init__(self) -> None:
        self._problems: collections.OrderedDict[tuple[str, str, str, str], Problem] = collections.OrderedDict()
        self._lock, self.characters = threading.Lock(), 0

    def get(self, key: tuple[str, str, str, str]) -> Problem:
        with self._lock:
            if key in self._problems:
                self._problems.move_to_end(key)
                return self._problems[key]
        problem = _read(*key)
        with self._lock:
            if key not in self._problems:
                self._problems[key] = problem
                self.characters += sum(map(len, key))
            while self.characters > _CACHED_CHARACTERS:
                self.characters -= sum(map(len, self._problems.popitem(last=False)[0]))
        return problem


_cache = _Cache()


def _read(text: str, setup: str, prepare: str, given: str) -> Problem:
    try:
        tests = json.loads(text)
    except ValueError as error:
        raise _unreadable(text, f"not JSON: {error}") from error
    for code in (setup, prepare, given):
        _parsed(code)
    if isinstance(tests, dict):
        cases = _pairs(tests)
    elif isinstance(tests, list):
        known = _defined(setup, prepare, given)
        cases = [parse_test(test, known, direct=not prepare.strip()) for test in tests]
    else:
        raise _unreadable(tests, f"a {type(tests).__name__}")
    if not cases:
        raise _unreadable(tests, "no tests")
    return Problem(tuple(cases), setup, prepare, given)


def _defined(*sources: str) -> set[str]:
    return set().union(*(bound(ast.parse(source)) for source in sources))


def parse_test(source: str, known: Collection[str] = (), direct: bool = True) -> Expression | Statement:
    """``assert f(...) == literal``, on either side, and ``assert f(...)`` as an Expression; else a Statement.

    Only such a call of a function of the program may be evaluated as a whole in the program's process.

    Args:
        source: the test.
        known: names that the problem defines, which are not the program's.
        direct: whether an Expression may be returned.
    """
    tree = _parsed(source)
    code = TestCode(tree, known)
    problem = code.problem()
    if problem is not None:
        raise _unreadable(source, problem)
    match tree.body if direct else []:
        case [ast.Assert(test=ast.Call() as call)] if _is_call(call, code, known, builtin=False):
            return Expression(f"bool({ast.unparse(call)})", True)
        case [ast.Assert(test=ast.UnaryOp(ast.Not(), ast.Call() as call))] if _is_call(
            call, code, known, builtin=False
        ):
            return Expression(f"bool({ast.unparse(call)})", False)
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            for asked, literal in ((left, right), (right, left)):
                if isinstance(asked, ast.Call) and _is_call(asked, code, known, builtin=True):
                    try:
                        return Expression(ast.unparse(asked), _literal(literal))
                    except ValueError:
                        continue
    return Statement(source, code.imports)


def _is_call(call: ast.Call, code: TestCode, known: Collection[str], builtin: bool = False) -> bool:
    """Whether this calls ``f(…)`` or ``Class(…).f(…)`` of the program, with inputs that the problem does not define."""
    names = loaded(call)
    match call.func:
        case ast.Name(id=name) if not names & set(known):
            return name in code.own or (builtin and not names & code.own - {name} and hasattr(builtins, name))
        case ast.Attribute(value=ast.Call(func=ast.Name(id=name))) if not names & set(known):
            return name in code.own and name[:1].isupper()
    return False


def equal_values(given: Any, right: Any, tolerance: float = 0.0) -> bool:
    """Whether two Python literals are equal in value and type, where integers and floats are both numbers.

    Args:
        given: the value to compare.
        right: the expected one.
        tolerance: by which a number may differ from an expected float, relative to it.

    >>> equal_values([1, 2.0], [1, 2]), equal_values(1, True), equal_values((1,), [1])
    (True, False, False)
    """
    if isinstance(given, list | tuple) and type(given) is type(right) and len(given) == len(right):
        return all(equal_values(*pair, tolerance) for pair in zip(given, right, strict=True))
    if isinstance(given, dict) and isinstance(right, dict):
        mine, others = ({_typed(key): item for key, item in each.items()} for each in (given, right))
        return mine.keys() == others.keys() and all(equal_values(mine[key], others[key], tolerance) for key in others)
    if isinstance(given, set | frozenset) and isinstance(right, set | frozenset):
        return set(map(_typed, given)) == set(map(_typed, right))
    if isinstance(right, float) and isinstance(given, int | float) and not isinstance(given, bool) and tolerance:
        return _close(given, right, tolerance)
    return bool(given == right) and all(isinstance(given, kind) == isinstance(right, kind) for kind in (bool, complex))


def _typed(key: Any) -> Any:
    """A key that differs for True and 1, and for 9 and 9+0j."""
    return tuple(map(_typed, key)) if isinstance(key, tuple) else (isinstance(key, bool), isinstance(key, complex), key)


def _close(given: float, right: float, tolerance: float) -> bool:
    try:
        return math.isclose(given, right, rel_tol=tolerance, abs_tol=0.0 if right else 1e-12)
    except OverflowError:
        return False


def _same_line(given: str, right: str, tolerance: float) -> bool:
    """Whether two lines differ at most in decimals, by the tolerance."""
    words, others = re.split(r"(\s+)", given), re.split(r"(\s+)", right)
    return len(words) == len(others) and all(map(lambda a, b: a == b or _same_decimal(a, b, tolerance), words, others))


def _same_decimal(given: str, right: str, tolerance: float) -> bool:
    decimal, number = r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?", r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
    if not tolerance or len(given) > 400 or not re.fullmatch(decimal, right) or not re.fullmatch(number, given):
        return False
    return _close(float(given), float(right), tolerance)


def _parsed(source: Any) -> ast.Module:
    try:
        parsed: ast.Module = ast.parse(source)
        return parsed
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise _unreadable(source, str(error)) from error


def _literal(node: ast.expr) -> Any:
    """The value of a literal, or of ``set(literal)``; ValueError for other code."""
    match node:
        case ast.Call(func=ast.Name(id="set"), args=[inside], keywords=[]):
            return set(ast.literal_eval(inside))
    return ast.literal_eval(node)


def _pairs(tests: Mapping[str, Any]) -> list[Case]:
    """The cases of a dict with inputs and outputs."""
    inputs, outputs, function = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
        raise _unreadable(tests, "'inputs' and 'outputs' are not lists of the same length")
    pairs = list(zip(inputs, outputs, strict=True))
    if function is None:
        return [Stream(_text(given), _text(printed)) for given, printed in pairs]
    if not (isinstance(function, str) and function.isidentifier()) or not all(isinstance(i, list) for i in inputs):
        raise _unreadable(tests, "'fn_name' is not a name, or 'inputs' are not lists of arguments")
    return [Expression(f"{function}(*{given!r})", value, json=True) for given, value in pairs]


def _text(lines: Any) -> str:
    """A text; some data sets have a list of lines."""
    if isinstance(lines, list):
        return "\n".join(map(str, lines))
    return str(lines)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _as_json(value: Any) -> Any:
    """The value as JSON would have it: lists for tuples, strings as keys."""
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _as_json(item) for key, item in value.items()}
    return value


def _unreadable(tests: Any, reason: str) -> InputError:
    return InputError(
        f"the tests {str(tests)[:80]!r} cannot be read ({reason})",
        'Use a list of Python asserts, or {"inputs": [...], "outputs": [...]}, with "fn_name" for functions',
    )
