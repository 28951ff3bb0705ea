"""Programming problems (MBPP, HumanEval, or any): the model writes a program, its tests decide, in a sandbox."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from troll.errors import InputError
from troll.lab.tasks import data
from troll.lab.tasks.data import sources, splits
from troll.lab.tasks.records import Place, Record, need, to_dataset
from troll.lab.tasks.task import Request, Task
from troll.rewards.code import CodeReward, code_of
from troll.rewards.judge import SECONDS
from troll.rewards.problems import Stream, read_problem
from troll.rewards.sandbox import best

OPTIONS = {**data.OPTIONS, "partial": False, "seconds": SECONDS}


def load(request: Request) -> Task:
    """The tasks ``mbpp``, ``humaneval`` and ``code``."""
    best()  # says what to do if there is no sandbox
    kind = _KINDS[request.name]
    if kind.hub is None and request.data is None:
        raise InputError(f"the task {request.name} without data", "a file, or a data set on the hub", "--data my.jsonl")
    options = request.choose(OPTIONS)
    if not options["seconds"] > 0:
        raise InputError(f"seconds={options['seconds']}", "a time above 0", f"leaving it out, for {SECONDS:g}")
    train, held_out = splits(request, *sources(request, kind.problem, kind.hub, OPTIONS))
    return Task(
        name=request.name,
        description=f"{kind.description}, {request.data or kind.hub[0].source}",  # type: ignore[index]
        train=to_dataset(train),
        held_out=to_dataset(held_out),
        reward_funcs=[CodeReward(partial=options["partial"], seconds=options["seconds"])],
        answer_of=code_of,
        settings={"max_completion_length": kind.length},
    )


def _mbpp(record: Record) -> Record:
    text = need(record, ("text", "prompt"))
    tests = need(record, "test_list", (list,))
    setup, after = "\n".join(record.row.get("test_imports") or []), record.row.get("test_setup_code") or ""
    asked = f"{text}\nReply with the Python code in one block. It has to pass tests such as this one:\n{tests[0]}"
    return _problem(record, asked, tests, setup, after)


def _humaneval(record: Record) -> Record:
    start, name, test = (need(record, field) for field in ("prompt", "entry_point", "test"))
    for code in (start, test):
        _problem(record, "", [code])  # can be read
    asked = f"Complete this function. Reply with all of its Python code in one block.\n```python\n{start}```"
    return _problem(record, asked, _checks(test, name), _without(start, name))


def _any(record: Record) -> Record:
    prompt = need(record, ("prompt", "question", "problem", "text"), (str, list))
    tests = need(record, ("tests", "input_output", "test_list"), (str, list, dict))
    tests = tests if isinstance(tests, str) else json.dumps(tests)  # one type, whatever the form
    setup = record.row.get("setup") or ""
    if isinstance(prompt, list):
        return _problem(record, prompt, tests, setup)
    return _problem(record, f"{prompt}\nReply with the Python code in one block.", tests, setup, hint=True)


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


def _without(source: str, name: str) -> str:
    """Code without its function of this name: what is left is imports, and what the function may call."""
    body = [node for node in ast.parse(source).body if getattr(node, "name", None) != name]
    return "\n".join(map(ast.unparse, body))


def _problem(record: Record, asked: Any, tests: Any, setup: str = "", prepare: str = "", hint: bool = False) -> Record:
    """The record of a problem that can be read; where it cannot, the error says in which line it is."""
    try:
        problem = read_problem(tests, setup, prepare)
    except InputError as error:
        raise InputError(f"{record.place}: {error.given}", error.expected, "mending that record") from error
    if hint and isinstance(problem.cases[0], Stream):
        asked += " It reads standard input and prints the answer."
    messages = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    row = {"prompt": messages, "tests": tests, "setup": setup, "prepare": prepare}
    return Record(row, record.place)


@dataclass(frozen=True)
class _Kind:
    description: str
    hub: tuple[Place, Place | None] | None  # to train on, to hold out
    problem: Callable[[Record], Record]
    length: int = 512


_MBPP = "google-research-datasets/mbpp"
_KINDS = {
    "mbpp": _Kind("short Python functions", (Place(_MBPP, "train", "full"), Place(_MBPP, "test", "full")), _mbpp),
    "humaneval": _Kind(
        "Python functions from their docstring", (Place("openai/openai_humaneval", "test"), None), _humaneval
    ),
    "code": _Kind("programs", None, _any, 1024),
}
