"""Programming problems (MBPP, HumanEval): the model writes a function, its tests decide, in a sandbox.

The expected results stay outside. A test ``assert f(3) == 9`` becomes the expression ``f(3)``, which goes in, and the
value 9, with which what comes out is compared here. Tests of another form have to run inside.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from troll.errors import InputError
from troll.tasks.conversation import NoReply
from troll.tasks.data import sources, splits
from troll.tasks.records import Place, Record, need, to_dataset
from troll.tasks.sandbox import Sandbox, SandboxError, sandbox_status
from troll.tasks.task import Request, Task, text_of

SECONDS = 15.0  # on the clock, for a program and all its tests; the sandbox limits the processor time to less


@dataclass(frozen=True)
class Expression:
    """A test: this expression must have this value."""

    source: str
    value: Any


@dataclass(frozen=True)
class Statement:
    """A test: this code must run to its end."""

    source: str


Test = Expression | Statement


def load(request: Request) -> Task:
    """The tasks ``mbpp`` and ``humaneval``."""
    usable, name, why = sandbox_status()
    if not usable:
        raise InputError(
            f"the task {request.name}, with the sandbox {name} ({why})",
            "a sandbox, because it runs model-written code",
            "apt install bubblewrap (0.8 or newer), on Linux with user namespaces",
        )
    kind = _KINDS[request.name]
    train, held_out = splits(request, *sources(request, kind.problem, kind.hub))
    return Task(
        name=request.name,
        description=f"{kind.description}, {request.data or kind.hub[0].source}",
        train=to_dataset(train),
        held_out=to_dataset(held_out),
        reward_funcs=[passes_tests],
        answer_of=code_of,
        settings={"max_completion_length": 512},
    )


def passes_tests(
    completions: Sequence[Any], tests: Sequence[Sequence[str]], setup: Sequence[str], **_: Any
) -> list[float]:
    """1 for a program that passes all its tests, else 0."""
    programs = [code_of(text_of(completion)) for completion in completions]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(_reward, programs, tests, setup))


def _reward(program: str | None, tests: Sequence[str], setup: str) -> float:
    return 0.0 if program is None else float(verdict(program, tests, setup) == "pass")


def code_of(text: str) -> str | None:
    """The program in a completion: its last block in backquotes, or else all of it; None if it is empty."""
    blocks = re.findall(r"```(?:[a-zA-Z0-9+]*)\n(.*?)(?:```|\Z)", text, flags=re.DOTALL)
    return (blocks[-1] if blocks else text).strip("\n") or None


def verdict(program: str, tests: Sequence[str], setup: str = "") -> str:
    """``pass``, or why not: ``error`` (the program does not run), ``wrong``, or what is wrong with its replies.

    Args:
        program: written by a model.
        tests: code, mostly one assert each.
        setup: code that runs before the program.
    """
    try:
        with Sandbox(SECONDS) as sandbox:
            if not sandbox.run(setup):
                raise SandboxError(f"the setup of a problem, which does not run there: {setup!r}")
            if not sandbox.run(program):
                return "error"
            return "pass" if all(_holds(sandbox, parse_test(test)) for test in tests) else "wrong"
    except NoReply as failure:
        return str(failure)


def _holds(sandbox: Sandbox, test: Test) -> bool:
    if isinstance(test, Statement):
        return sandbox.run(test.source)
    value = sandbox.evaluate(test.source)
    try:
        return value is not None and same(ast.literal_eval(value), test.value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def same(given: Any, right: Any) -> bool:
    """Whether two values made of Python's literals are equal, and true is not 1.

    >>> same([1, 2.0], [1, 2]), same(1, True), same((1,), [1])
    (True, False, False)
    """
    if isinstance(given, list | tuple) and type(given) is type(right) and len(given) == len(right):
        return all(map(same, given, right))
    if isinstance(given, dict) and isinstance(right, dict):
        return given.keys() == right.keys() and all(same(given[key], right[key]) for key in right)
    return bool(given == right) and isinstance(given, bool) == isinstance(right, bool)


def parse_test(source: str) -> Test:
    """``assert expression == literal``, on either side, as an Expression; any other code as a Statement."""
    match ast.parse(source).body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            for code, literal in ((left, right), (right, left)):
                try:
                    return Expression(ast.unparse(code), _literal(literal))
                except ValueError:
                    continue
    return Statement(source)


def _literal(node: ast.expr) -> Any:
    """The value of a literal, or of ``set(literal)``; ValueError for other code."""
    match node:
        case ast.Call(func=ast.Name(id="set"), args=[inside], keywords=[]):
            return set(ast.literal_eval(inside))
    return ast.literal_eval(node)


def _mbpp(record: Record) -> Record:
    text = need(record, ("text", "prompt"))
    tests = _tests(record, need(record, "test_list", (list,)))
    asked = f"{text}\nReply with the Python code in one block. It has to pass tests such as this one:\n{tests[0]}"
    after = record.row.get("test_setup_code")  # uses what the program defines
    return _problem(record, asked, [after, *tests] if after else tests, "\n".join(record.row.get("test_imports") or []))


def _humaneval(record: Record) -> Record:
    start, name, test = (need(record, field) for field in ("prompt", "entry_point", "test"))
    _tests(record, [start, test])
    asked = f"Complete this function. Reply with all of its Python code in one block.\n```python\n{start}```"
    return _problem(record, asked, _checks(test, name), start)


def _checks(source: str, name: str) -> list[str]:
    """The asserts in HumanEval's ``check(candidate)``, or all of the code where there is more than asserts in it."""
    whole = [f"{source}\ncheck({name})"]
    bodies = [
        node.body for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "check"
    ]
    if len(bodies) != 1:
        return whole
    asserts = [node for node in bodies[0] if isinstance(node, ast.Assert)]
    rest = [node for node in bodies[0] if not isinstance(node, ast.Assert | ast.Pass)]
    if not asserts or any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in rest):
        return whole
    for node in asserts:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id == "candidate":
                inner.id = name
    return [ast.unparse(node) for node in asserts if not isinstance(node.test, ast.Constant)] or whole


def _tests(record: Record, tests: list[str]) -> list[str]:
    """The same tests, if they are Python."""
    for test in tests:
        try:
            ast.parse(test)
        except (SyntaxError, ValueError, TypeError) as error:
            raise InputError(f"{record.place}: {test!r:.80} ({error})", "Python code", "mending that test") from error
    return tests


def _problem(record: Record, asked: str, tests: list[str], setup: str) -> Record:
    messages = [{"role": "user", "content": asked}]
    return Record({"prompt": messages, "tests": tests, "setup": setup}, record.place)


@dataclass(frozen=True)
class _Kind:
    description: str
    hub: tuple[Place, Place | None]  # to train on, to hold out
    problem: Callable[[Record], Record]


_MBPP = "google-research-datasets/mbpp"
_KINDS = {
    "mbpp": _Kind(
        "short Python functions",
        (
            Place("google-research-datasets/mbpp", "train", "full"),
            Place("google-research-datasets/mbpp", "test", "full"),
        ),
        _mbpp,
    ),
    "humaneval": _Kind(
        "Python functions from their docstring", (Place("openai/openai_humaneval", "test"), None), _humaneval
    ),
}
