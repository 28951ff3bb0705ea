"""Programming problems: test cases and the comparison of results with expected values.

Expected values stay outside the sandbox: of ``assert f(3) == 9`` only ``f(3)`` is sent in.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from troll.errors import InputError


@dataclass(frozen=True)
class Expression:
    """An expression that must have this value.

    Attributes:
        json: the value comes from JSON, which has no tuples; some data sets also wrap it into a list of one.
    """

    source: str
    value: Any
    json: bool = False

    def accepts(self, given: Any) -> bool:
        """Whether the value is correct."""
        if not self.json:
            return equal_values(given, self.value)
        given, wrapped = _as_json(given), isinstance(self.value, list) and len(self.value) == 1
        return equal_values(given, self.value) or (wrapped and equal_values(given, self.value[0]))


@dataclass(frozen=True)
class Statement:
    """Test code that must run to its end. It runs in another process than the program whose functions it calls."""

    source: str

    @property
    def names(self) -> list[str]:
        """Names in the test that are not builtins. Those that neither it nor the setup defines are the program's."""
        names = {node.id for node in ast.walk(ast.parse(self.source)) if isinstance(node, ast.Name)}
        return sorted(name for name in names - self.modules if not hasattr(builtins, name))

    @property
    def modules(self) -> set[str]:
        """Modules of the standard library that the test uses, such as ``math``; often only the program imports them."""
        used = (node.value for node in ast.walk(ast.parse(self.source)) if isinstance(node, ast.Attribute))
        return {node.id for node in used if isinstance(node, ast.Name)} & sys.stdlib_module_names


@dataclass(frozen=True)
class Stream:
    """A standard input and the output that the program must print for it."""

    given: str
    printed: str

    def accepts(self, printed: str) -> bool:
        """Whether the text is the same, except for white space at the ends of lines and of the text."""
        return _lines(printed) == _lines(self.printed)


Case = Expression | Statement | Stream


@dataclass(frozen=True)
class Problem:
    """A programming problem.

    Attributes:
        cases: either all about functions, or all about standard input and output.
        setup: code that runs before the program, and before test code.
        prepare: code that runs after the program and before the cases, with access to the program's definitions.
    """

    cases: tuple[Case, ...]
    setup: str = ""
    prepare: str = ""


def read_problem(tests: Any, setup: str | None = None, prepare: str | None = None) -> Problem:
    """A problem in one of the formats of common data sets.

    Args:
        tests: a list of Python code, mostly one assert each; or ``{"inputs": [...], "outputs": [...]}`` for programs
            that read standard input, with ``"fn_name": "f"`` for functions and lists of arguments; or JSON of either.
        setup: code that runs before the program.
        prepare: code that runs between the program and the tests.
    """
    return _read(tests if isinstance(tests, str) else json.dumps(tests), setup or "", prepare or "")


@functools.lru_cache(maxsize=4096)  # the completions of a prompt have the same tests
def _read(text: str, setup: str, prepare: str) -> Problem:
    try:
        tests = json.loads(text)
    except ValueError as error:
        raise _unreadable(text, f"not JSON: {error}") from error
    if isinstance(tests, dict):
        cases = _pairs(tests)
    elif isinstance(tests, list):
        cases = [parse_test(test) for test in tests]
    else:
        raise _unreadable(tests, f"a {type(tests).__name__}")
    if not cases:
        raise _unreadable(tests, "no tests")
    for code in (setup, prepare):
        _parsed(code)
    return Problem(tuple(cases), setup, prepare)


def parse_test(source: str) -> Expression | Statement:
    """``assert expression == literal``, on either side, and ``assert f(...)`` as an Expression; else a Statement."""
    match _parsed(source).body:
        case [ast.Assert(test=ast.Call(func=ast.Name(id=name)) as asked)] if not hasattr(builtins, name):
            return Expression(f"bool({ast.unparse(asked)})", True)
        case [ast.Assert(test=ast.UnaryOp(ast.Not(), ast.Call(func=ast.Name(id=name)) as asked))] if not hasattr(
            builtins, name
        ):
            return Expression(f"bool({ast.unparse(asked)})", False)
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            for code, literal in ((left, right), (right, left)):
                try:
                    return Expression(ast.unparse(code), _literal(literal))
                except ValueError:
                    continue
    return Statement(source)


def equal_values(given: Any, right: Any) -> bool:
    """Whether two Python literals are equal in value and type, where integers and floats are both numbers.

    >>> equal_values([1, 2.0], [1, 2]), equal_values(1, True), equal_values((1,), [1])
    (True, False, False)
    """
    if isinstance(given, list | tuple) and type(given) is type(right) and len(given) == len(right):
        return all(map(equal_values, given, right))
    if isinstance(given, dict) and isinstance(right, dict):
        return given.keys() == right.keys() and all(equal_values(given[key], right[key]) for key in right)
    return bool(given == right) and isinstance(given, bool) == isinstance(right, bool)


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
