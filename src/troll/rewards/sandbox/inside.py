"""The code that runs in the sandbox beside model-written code. ``Sandbox`` sends this file there as text.

A run starts one of four functions: ``serve_calls`` (the program's functions are called), ``run_program`` (the program
reads standard input and prints), ``run_test`` (a test that is code, in a process away from the program) or ``probe``.
Each reads requests from one file descriptor and writes replies to another.

This code shares its process with the program. No reply is trusted, and no expected result is ever here. It imports
only the standard library.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import errno
import json
import os
import sys
import threading
import types
from collections import Counter
from collections.abc import Sequence
from typing import Any

LIMIT = "limit"
_OUT_OF_RESOURCES = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM, errno.EAGAIN)


class Unsendable(BaseException):
    """The value is not a Python literal. No ``except Exception`` of a test catches it."""


def serve_calls(requests: int, replies: int) -> None:
    """Execute code, evaluate expressions and call functions, one JSON line each, until the requests end.

    The reply is a value or the name of an exception.
    """
    module = types.ModuleType("program")
    sys.modules["program"] = module  # dataclasses look it up there
    for line in os.fdopen(requests, "rb"):
        request = json.loads(line)
        try:
            reply = {"value": _result(request, module.__dict__)}
        except BaseException as error:
            reply = {"error": error_name(error)}
        rest = memoryview(json.dumps(reply).encode() + b"\n")
        while rest:
            rest = rest[os.write(replies, rest) :]


def _result(request: dict[str, Any], scope: dict[str, Any]) -> Any:
    if "run" in request:
        exec(compile(request["run"], "program", "exec"), scope)
        return None
    if "call" in request:
        args, kwargs = (decode(part) for part in request["with"])
        value = scope[request["call"]](*args, **kwargs)
    else:
        value = eval(compile(request["evaluate"], "expression", "eval"), scope)
    try:
        return encode(value)
    except TypeError as error:
        raise Unsendable from error


def run_program(requests: int, replies: int) -> None:
    """Run one program with standard input and output. Its length and text come first, then its input.

    The exit code is 0, 1 for an exception, or 3 if a resource ran out.
    """
    program = _read(requests, int.from_bytes(_read(requests, 8), "big")).decode()
    os.dup2(requests, 0)
    os.dup2(replies, 1)
    os.close(requests)
    os.close(replies)
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


def run_test(requests: int, replies: int) -> None:
    """Run one test that is code, such as ``assert math.isclose(f(3), 9)``; the last line says whether it passed.

    The program is in another process, which this one cannot reach. A call of one of its functions is written as a
    request, and the result comes back as a plain value. So the program cannot see the test, and can answer only with
    values.
    """
    lines = os.fdopen(requests, "rb")
    order = json.loads(lines.readline())
    scope: dict[str, Any] = {"__name__": "test"}
    outcome: dict[str, Any] = {"held": True}
    try:
        exec(compile(order["setup"], "setup", "exec"), scope)
        for name in order["names"]:
            scope.setdefault(name, RemoteFunction(name, lines, replies))
        exec(compile(order["test"], "test", "exec"), scope)
    except AssertionError:
        outcome = {"held": False}
    except BaseException as error:
        outcome = {"held": False, "error": type(error).__name__}
    os.write(replies, json.dumps(outcome).encode() + b"\n")


class RemoteFunction:
    """A function of the program, called in the program's process."""

    def __init__(self, name: str, requests: Any, replies: int) -> None:
        self.name, self.requests, self.replies = name, requests, replies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the call; the exception if it raised one."""
        try:
            request = {"call": self.name, "with": [encode(list(args)), encode(kwargs)]}
        except TypeError as error:
            raise Unsendable from error
        os.write(self.replies, json.dumps(request).encode() + b"\n")
        reply = json.loads(self.requests.readline())
        if "error" in reply:
            kind = getattr(builtins, reply["error"], Exception)
            raised = kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception
            raise RuntimeError if raised is StopIteration else raised  # or all(map(f, …)) would be true
        return decode(reply["value"])


def probe(requests: int, replies: int) -> None:
    """Reply once, with seven times the number in the request: shows that the sandbox works."""
    os.write(replies, json.dumps(7 * json.loads(os.read(requests, 100))).encode() + b"\n")


def error_name(error: BaseException) -> str:
    """The name of an exception; ``LIMIT`` if memory, disk, files or processes ran out."""
    out = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES)
    return LIMIT if out else type(error).__name__


def encode(value: Any) -> Any:
    """A Python value as JSON with its types: plain values as themselves, others as ``{type: content}``.

    An instance of a subclass is written as its base type.

    >>> encode({"a": (1, None)})
    {'dict': [['a', {'tuple': [1, None]}]]}

    Raises:
        TypeError: the value is not a Python literal.
    """
    if value is None or value is True or value is False:
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    for name, kinds in (("tuple", tuple), ("set", set | frozenset)):
        if isinstance(value, kinds):
            return {name: [encode(item) for item in value]}
    raise TypeError(f"{type(value).__name__} is not a literal")


def decode(value: Any) -> Any:
    """The value that was encoded.

    Raises:
        ValueError: ``encode`` does not write this.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"tuple": list(items), **rest} if not rest:
            return tuple(decode(item) for item in items)
        case {"set": list(items), **rest} if not rest:
            return set(_hashable([decode(item) for item in items]))
        case {"dict": list(items), **rest} if not rest:
            keys = _hashable([decode(key) for key, _ in items])
            return dict(zip(keys, [decode(item) for _, item in items], strict=True))
        case {"bytes": str(digits), **rest} if not rest:
            return bytes.fromhex(digits)
        case {"complex": [int() | float() as real, int() | float() as imaginary], **rest} if not rest:
            return complex(real, imaginary)
    raise ValueError("not an encoded value")


def _hashable(items: Sequence[Any]) -> Sequence[Any]:
    """The items; ValueError if more than 100 share a hash, because a set of colliding items takes minutes to build."""
    if max(Counter(map(hash, items)).values(), default=0) > 100:
        raise ValueError("more than 100 items with the same hash")
    return items
