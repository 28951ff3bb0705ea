"""Static analysis of test code: which names are the program's, what of the setup it may see, what cannot be judged."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import sys
from collections.abc import Collection, Iterator
from typing import TypeVar

_EXECUTES = {"eval", "exec", "compile", "__import__"}
_JUDGES = {"all", "any", "bool"}
_Node = TypeVar("_Node", bound=ast.AST)


def loaded(tree: ast.AST) -> set[str]:
    """The names that code uses."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def bound(tree: ast.AST) -> set[str]:
    """The names that code defines, at any level."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=given):
                names.add(given or name.split(".")[0])
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                names.add(name)
    return names


class TestCode:
    """The code of a test.

    Args:
        tree: the parsed test.
        known: names that the problem defines, so that they are not the program's.

    Attributes:
        unknown: names that neither the test nor the problem nor Python defines: functions and classes of the program,
            or modules and functions of the standard library.
        modules: the latter modules, as in ``math.isclose(f(3), 9)``.
        imports: code that imports them, and functions such as ``isclose`` in ``isclose(f(3), 9)``.
        own: names of the program.
    """

    __test__ = False  # not for pytest

    def __init__(self, tree: ast.Module, known: Collection[str] = ()) -> None:
        self.tree = tree
        unknown = {name for name in loaded(tree) - bound(tree) - set(known) if not hasattr(builtins, name)}
        bases = {node.value.id for node in _nodes(tree, ast.Attribute) if isinstance(node.value, ast.Name)}
        self.modules = unknown & bases & sys.stdlib_module_names
        self.own = unknown - self.modules
        functions = {name for call in _nodes(tree, ast.Call) if (name := self._wraps(call)) is not None}
        self.own -= functions
        imports = [f"import {name}" for name in sorted(self.modules)]
        self.imports = "\n".join([*imports, *(f"from {_library()[name]} import {name}" for name in sorted(functions))])

    def _wraps(self, call: ast.Call) -> str | None:
        """The name of a function of the standard library, if it is called with something of the program."""
        if isinstance(call.func, ast.Name) and call.func.id in self.own and call.func.id in _library():
            inner = [name for part in [*call.args, *call.keywords] for name in self._calls(part)]
            return call.func.id if set(inner) - {call.func.id} or self._from_program(call) else None
        return None

    def _calls(self, tree: ast.AST) -> Iterator[str]:
        """The functions of the program that are called; not classes, whose names begin with a capital."""
        for call in _nodes(tree, ast.Call):
            name = root(call)
            if name in self.own and not name[:1].isupper():
                yield name

    @functools.cached_property
    def _tainted(self) -> set[str]:
        """Names of the test whose values come from the program."""
        names: set[str] = set()
        for node in ast.walk(self.tree):
            match node:
                case ast.Assign(targets=targets, value=value) if any(self._calls(value)):
                    names |= set().union(*map(bound, targets))
                case ast.NamedExpr(target=target, value=value) if any(self._calls(value)):
                    names |= bound(target)
        return names

    def problem(self) -> str | None:
        """Why this test cannot be judged; None if it can."""
        for call in _nodes(self.tree, ast.Call):
            if isinstance(call.func, ast.Name) and call.func.id in _EXECUTES and self._from_program(call):
                return f"{call.func.id}() would execute text of the program in the process of the test"
        for verdict in self._verdicts():
            if isinstance(verdict, ast.Call) and (name := root(verdict)) in self.own and self._from_program(verdict):
                return f"the program's own {name}() would decide whether its result is right; define {name} in setup"
        return None

    def _from_program(self, call: ast.Call) -> bool:
        """Whether an argument is a result of the program."""
        return any(any(self._calls(part)) or self._tainted & loaded(part) for part in [*call.args, *call.keywords])

    def _verdicts(self) -> Iterator[ast.expr]:
        """The expressions whose truth decides the test."""
        assigned: dict[str, list[ast.expr]] = {}
        for node in _nodes(self.tree, ast.Assign):
            for name in set().union(*map(bound, node.targets)):
                assigned.setdefault(name, []).append(node.value)
        waiting = [node.test for node in ast.walk(self.tree) if isinstance(node, ast.Assert | ast.If | ast.IfExp)]
        seen: set[int] = set()
        while waiting:
            verdict = waiting.pop()
            if id(verdict) in seen:
                continue
            seen.add(id(verdict))
            yield verdict
            match verdict:
                case ast.BoolOp(values=values):
                    waiting += values
                case ast.UnaryOp(operand=value) | ast.NamedExpr(value=value):
                    waiting.append(value)
                case ast.Name(id=name):
                    waiting += assigned.get(name, [])
                case ast.Compare(left=left, comparators=others):
                    sides = [left, *others]
                    if any(isinstance(side, ast.Constant) and isinstance(side.value, bool) for side in sides):
                        waiting += sides
                case ast.Call(func=ast.Name(id=name), args=args) if name in _JUDGES:
                    for arg in args:
                        waiting += arg.elts if isinstance(arg, ast.List | ast.Tuple | ast.Set) else [arg]
                case ast.GeneratorExp(elt=value) | ast.ListComp(elt=value) | ast.SetComp(elt=value):
                    waiting.append(value)


def root(node: ast.expr) -> str | None:
    """The name at the beginning of a chain: ``a`` of ``a(1).b[2](3)``."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Call(func=inner) | ast.Attribute(value=inner) | ast.Subscript(value=inner):
            return root(inner)
    return None


def for_program(setup: ast.Module, used: Collection[str]) -> ast.Module:
    """The part of a setup that a program may have, because it cannot be a reference solution or an expected value.

    These are imports, classes with their fields and special methods, and variables that the tests do not use.

    Args:
        setup: code that tests need.
        used: the names that the tests use.
    """
    names = set(used).union(*(loaded(node) for node in setup.body if isinstance(node, ast.FunctionDef | ast.ClassDef)))
    return ast.Module([kept for node in setup.body for kept in _kept(node, names)], [])


def _kept(node: ast.stmt, used: set[str]) -> Iterator[ast.stmt]:
    match node:
        case ast.ClassDef():
            body = [part for part in node.body if not isinstance(part, ast.FunctionDef) or part.name.startswith("__")]
            kept = ast.ClassDef(node.name, node.bases, node.keywords, body or [ast.Pass()], node.decorator_list)
            yield ast.copy_location(kept, node)
        case ast.Import() | ast.ImportFrom() | ast.Expr():
            yield node
        case ast.Try() | ast.If() if all(isinstance(part, ast.Import | ast.ImportFrom) for part in node.body):
            yield node
        case ast.Assign() | ast.AnnAssign() if not bound(node) & used:
            yield node


def classes(setup: ast.Module) -> list[str]:
    """The names of the classes that code defines."""
    return sorted(node.name for node in setup.body if isinstance(node, ast.ClassDef))


def _nodes(tree: ast.AST, kind: type[_Node]) -> Iterator[_Node]:
    return (node for node in ast.walk(tree) if isinstance(node, kind))


@functools.cache
def _library() -> dict[str, str]:
    """Functions of the standard library that tests use, often without an import: name → module."""
    names: dict[str, str] = {}
    for module in ("statistics", "operator", "itertools", "functools", "copy", "collections", "math"):
        found = importlib.import_module(module)
        names |= {name: module for name in vars(found) if not name.startswith("_") and callable(getattr(found, name))}
    return names
