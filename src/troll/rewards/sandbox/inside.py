"""The code that runs in the sandbox beside model-written code. ``Sandbox`` sends this file there as text.

A run starts one of three functions: ``serve_calls`` (the program's functions are called), ``run_program`` (the program
reads standard input and prints) or ``probe``. A test that is code runs in another process, in ``examiner.run_test``.
Each reads requests from one file descriptor and writes replies to another.

This code shares its process with the program. No reply is trusted, and no expected result is ever here. It imports
only the standard library.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import copy
import errno
import io
import json
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

from troll.rewards.sandbox.values import Unsendable, Wire, encode, state_of

LIMIT = "limit"
_OUT_OF_RESOURCES = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM, errno.EAGAIN)


def serve_calls(requests: int, replies: int) -> None:
    """Execute code, evaluate expressions and use objects, one JSON line each, until the requests end."""
    _provide_exit()
    _Program(requests, replies).serve()


class _Program:
    """The scope of the program, and those of its objects that the test refers to by a number."""

    def __init__(self, requests: int, replies: int) -> None:
        self._lines, self._replies = os.fdopen(requests, "rb"), replies
        module = types.ModuleType("program")
        sys.modules["program"] = module  # dataclasses look it up there
        self.scope, self._shared = module.__dict__, set[str]()
        self._held: list[Any] = []
        self._numbers: dict[int, int] = {}

    def serve(self) -> None:
        while line := self._lines.readline():
            self.send(self._reply(json.loads(line)))

    def send(self, message: dict[str, Any]) -> None:
        rest = memoryview(json.dumps(message).encode() + b"\n")
        while rest:
            rest = rest[os.write(self._replies, rest) :]

    def call_back(self, number: int, args: Any, kwargs: Any) -> Any:
        """The result of a function of the test."""
        sent = Wire(self)
        packed = sent.pack([list(args), kwargs])
        self.send({"callback": number, "value": packed, "objects": sent.states()})
        reply = json.loads(self._lines.readline())
        if "error" in reply:
            raise getattr(builtins, reply["error"], Exception)
        return Wire(self, sent.objects).unpack(reply)

    def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if "run" in request:
                self._run(request["run"], request.get("shared", False))
                return {"value": None}
            if "evaluate" in request:
                return {"value": self._evaluate(request["evaluate"], request.get("function", ""))}
            return self._operate(request)
        except BaseException as error:
            reply: dict[str, Any] = {"error": error_name(error)}
            if "operation" in request:
                with contextlib.suppress(BaseException):
                    reply |= self._details(error)
            return reply

    def _run(self, source: str, shared: bool) -> None:
        try:
            exec(compile(source, "program", "exec"), self.scope)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        if shared:
            self._shared = {name for name, value in self.scope.items() if isinstance(value, type)}

    def _evaluate(self, source: str, function: str) -> Any:
        methods = {} if not function or function in self.scope else self._method(function)
        value = eval(compile(source, "expression", "eval"), self.scope, methods)
        try:
            return encode(value)
        except TypeError as error:
            raise Unsendable from error

    def _method(self, name: str) -> dict[str, Any]:
        """A method of ``class Solution``, which some problems ask for in place of a function."""
        return {name: getattr(self.scope["Solution"](), name)} if hasattr(self.scope.get("Solution"), name) else {}

    def _name(self, name: str) -> Any:
        found = self.scope if name in self.scope else self._method(name)
        if name not in found:
            raise NameError(name)
        return found[name]

    def _operate(self, request: dict[str, Any]) -> dict[str, Any]:
        received = Wire(self)
        args, kwargs = received.unpack(request)
        if request["operation"] == "name":
            value = self._name(*args)
        else:
            value = _OPERATIONS[request["operation"]](*args, **kwargs)
        reply = Wire(self, received.objects)
        message = {"value": reply.pack(value)}
        if request.get("mutable"):
            message["changed"] = reply.pack([list(args), kwargs])
            message["given"] = [reply.pack(state_of(item)) for item in received.objects]
        return {**message, "objects": reply.states()}

    def _details(self, error: BaseException) -> dict[str, Any]:
        wire = Wire(self)
        packed = wire.pack([list(error.args), vars(error)])
        return {"bases": _ancestry(type(error)), "value": packed, "objects": wire.states()}

    # What a Wire asks of its side.

    def shared_class(self, name: str) -> type | None:
        found = self.scope.get(name) if name in self._shared else None
        return found if isinstance(found, type) else None

    def refer(self, value: Any) -> dict[str, Any] | None:
        """The object by its number, and by its content if it extends a plain type; None for a plain value."""
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": _ancestry(value)}
        base = next((kind for kind in _BASES if isinstance(value, kind)), None)
        if base is not None and type(value).__module__ != "program":
            return None
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._held)
            self._held.append(value)
        if base in (list, dict, set):
            return {"container": number}
        return {"remote": number if base is None else [number, encode(base(value), self.refer)]}

    def resolve(self, kind: str, content: Any) -> Any:
        if kind == "remote":
            return self._held[content]
        if kind == "builtin":
            return getattr(builtins, content)
        if kind == "callback":
            return lambda *args, **kwargs: self.call_back(content, args, kwargs)
        raise ValueError("not an encoded value")


_BASES: tuple[Any, ...] = (int, float, str, tuple, list, dict, set)


def _ancestry(kind: type) -> list[str]:
    return [base.__name__ for base in kind.__mro__ if base is not object]


def _next(iterator: Any) -> tuple[Any, ...]:
    try:
        return (next(iterator),)
    except StopIteration:
        return ()


def _exit(manager: Any, kind: type[BaseException] | None = None) -> Any:
    return manager.__exit__(kind, None if kind is None else kind(), None)


def _await(value: Any) -> Any:
    import asyncio

    async def result() -> Any:
        return await value

    return asyncio.run(result())


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "call": lambda *args, **kwargs: args[0](*args[1:], **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "isinstance": isinstance,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "await": _await,
    "enter": lambda value: value.__enter__(),
    "exit": _exit,
    "next": _next,
    "plain": lambda value: next(kind for kind in _BASES if isinstance(value, kind))(value),
    **{kind.__name__: kind for kind in (bool, int, float, str)},
    **{function.__name__: function for function in (len, iter, repr, abs, reversed, round)},
    **{name: getattr(operator, name) for name in (
        "getitem", "setitem", "delitem", "index", "neg", "pos", "invert", "eq", "ne", "lt", "le", "gt", "ge",
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "matmul",
    )},
}  # fmt: skip


def run_program(requests: int, replies: int) -> None:
    """Run one program with standard input and output. Its length and text come first, then its input.

    The exit code is 0, 1 for an exception, or 3 if a resource ran out.
    """
    program = _read(requests, int.from_bytes(_read(requests, 8), "big")).decode()
    os.dup2(requests, 0)
    os.dup2(replies, 1)
    os.close(requests)
    os.close(replies)
    _provide_exit()
    _provide_stdin()
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogateescape")
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape")
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    code = 0
    try:
        exec(compile(program, "program", "exec"), module.__dict__)
    except SystemExit as error:
        code = 0 if error.code in (None, 0) else 1
    except BaseException as error:
        code = 3 if error_name(error) == LIMIT else 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the program's threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
    os._exit(code)


def _read(handle: int, size: int) -> bytes:
    """Exactly this many bytes: what follows is the program's input."""
    data = b""
    while len(data) < size:
        part = os.read(handle, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def probe(requests: int, replies: int) -> None:
    """Reply once, with seven times the number in the request: shows that the sandbox works."""
    os.write(replies, json.dumps(7 * json.loads(os.read(requests, 100))).encode() + b"\n")


def error_name(error: BaseException) -> str:
    """The name of an exception; ``LIMIT`` if memory, disk, files or processes ran out."""
    out = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES)
    return LIMIT if out else type(error).__name__


def _provide_exit() -> None:
    """Define ``exit`` and ``quit``, which the module ``site`` defines elsewhere."""
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]


def _provide_stdin() -> None:
    """Let a program open the standard streams by their names; the links to them lead through /proc, which is absent."""
    numbers = {f"{folder}{name}": number for number, stream in enumerate(("stdin", "stdout", "stderr"))
               for folder, name in (("/dev/", stream), ("/dev/fd/", number), ("/proc/self/fd/", number))}  # fmt: skip
    opened, opened_by_os = io.open, os.open

    def open_file(file: Any, *args: Any, **kwargs: Any) -> Any:
        name = os.fspath(file) if isinstance(file, str | os.PathLike) else None
        return opened(os.dup(numbers[name]) if name in numbers else file, *args, **kwargs)

    def open_handle(path: Any, *args: Any, **kwargs: Any) -> int:
        name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
        return os.dup(numbers[name]) if name in numbers else opened_by_os(path, *args, **kwargs)

    builtins.open = io.open = open_file
    os.open = open_handle
