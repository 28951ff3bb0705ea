"""The process of a test: it runs the code of the test, and asks the process of the program for values.

The program's functions, classes and objects are ``Remote`` here. Using one is a request to the other process, which
knows only the arguments. What comes back is a plain value, an object of a class that the problem defines, or another
``Remote``. Comparing a ``Remote`` with a value, or calculating with both, never asks the program: it would learn the
value and could answer anything. ``Sandbox`` sends this file into the sandbox as text.
"""

from __future__ import annotations

import ast
import builtins
import collections.abc
import copy
import enum
import json
import os
from collections.abc import Callable
from typing import Any

from troll.rewards.sandbox.values import Unsendable, Wire, decode, fill

_INVALID = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)
_READABLE = {
    "__name__",
    "__qualname__",
    "__doc__",
    "__dict__",
    "__annotations__",
}  # other special names are not asked for
_OF_VALUES = {name for kind in (str, list, dict, set, tuple, int, float, bytes) for name in dir(kind)}
_GENERAL = (Exception, BaseException, AssertionError)  # would catch the failed assertions of the test itself


def run_test(requests: int, replies: int) -> None:
    """Run one test that is code, such as ``assert math.isclose(f(3), 9)``; the last line says whether it passed."""
    lines = os.fdopen(requests, "rb")
    order = json.loads(lines.readline())
    examiner = Examiner(lines, replies, order["classes"])
    outcome: dict[str, Any] = {"held": True}
    try:
        for part in ("setup", "prepare", "test"):
            outcome["part"] = part
            exec(compile(_marked(order[part]), part, "exec"), examiner.scope)
    except AssertionError:
        outcome["held"] = False
    except BaseException as error:
        outcome |= {"held": False, "error": type(error).__name__}
    if examiner.problem:
        outcome |= {"held": False, "error": examiner.problem}
    os.write(replies, json.dumps(outcome).encode() + b"\n")


class Examiner:
    """The scope of a test, and the conversation with the process of the program.

    Attributes:
        problem: ``Unsendable`` if the test uses the program with something that cannot be sent, ``Invalid`` if a reply
            is not valid. The test has failed, whatever it does with the exception.
    """

    def __init__(self, requests: Any, replies: int, classes: list[str]) -> None:
        self._requests, self._replies, self._classes = requests, replies, set(classes)
        self.scope = _Scope(self)
        self.problem = ""
        self._remotes: dict[int, Any] = {}
        self._callbacks: list[Any] = []
        self._exceptions: dict[tuple[str, ...], type[BaseException]] = {}
        self._change: Callable[[], None] | None = None
        self._kind = "result"

    def operate(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """The result of an operation in the process of the program; the exception if it raised one."""
        wire = Wire(self)
        request = {"operation": operation, "value": self._packed(wire, [list(args), kwargs]), "objects": wire.states()}
        self._change = None
        reply = self._ask({**request, "mutable": operation == "call" and _mutable([*args[1:], *kwargs.values()])})
        self._kind = _kind_of(operation, *args)
        if "error" in reply:
            raise self._raised(reply)
        try:
            states = reply.get("given", [])
            copies = [item if isinstance(item, enum.Enum) else copy.copy(item) for item in wire.objects]
            value, found = Wire(self, copies if states else wire.objects).unpack(reply, "given")
            for item, state in zip(copies, found or [], strict=bool(found)):
                fill(item, state)  # what is returned has the changes; the arguments only if they are settled
        except _INVALID as error:
            self._fail("Invalid", error)
        if "changed" in reply:
            self._change = lambda: self._changed([list(args), kwargs], reply, wire.objects)
        if value is None:
            self.settle()
        return value

    def settle(self, value: Any = None) -> Any:
        """Copy what the last call has changed of its arguments: if it returned nothing, or its value is not used."""
        change, self._change = self._change, None
        if change is not None:
            change()
        return value

    def _changed(self, old: Any, reply: dict[str, Any], objects: list[Any]) -> None:
        try:
            _, new, states = Wire(self, objects).unpack(reply, "changed", "given")
            for item, state in zip(objects, states, strict=True):
                fill(item, state)
            _merge(old, new)
        except _INVALID as error:
            self._fail("Invalid", error)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._write({"ask": request})
        while "callback" in (reply := json.loads(self._requests.readline())):
            self._write({"ask": self._called_back(reply)})
        return reply  # type: ignore[no-any-return]

    def _called_back(self, reply: dict[str, Any]) -> dict[str, Any]:
        """The reply to a program that calls a function of the test."""
        wire = Wire(self)
        try:
            function = self._callbacks[reply["callback"]]
            args, kwargs = wire.unpack(reply)
        except _INVALID as error:
            self._fail("Invalid", error)
        try:
            value = function(*args, **kwargs)
        except Exception as error:
            return {"error": type(error).__name__}
        back = Wire(self, wire.objects)
        return {"value": self._packed(back, value), "objects": back.states()}

    def _write(self, message: dict[str, Any]) -> None:
        rest = memoryview(json.dumps(message).encode() + b"\n")
        while rest:
            rest = rest[os.write(self._replies, rest) :]

    def _packed(self, wire: Wire, value: Any) -> Any:
        try:
            return wire.pack(value)
        except (Unsendable, RecursionError) as error:
            self._fail("Unsendable", error)

    def _fail(self, problem: str, error: BaseException) -> Any:
        self.problem = self.problem or problem
        raise Unsendable from error

    def _raised(self, reply: dict[str, Any]) -> BaseException:
        """The exception of the program: one of the same names, with the same arguments."""
        try:
            names = reply.get("bases") or [reply["error"], "Exception"]
            args, state = Wire(self).unpack(reply) if "bases" in reply else ((), {})
            kind = self.exception(names)
        except _INVALID as invalid:
            self._fail("Invalid", invalid)
        if issubclass(kind, StopIteration) or not issubclass(kind, Exception):
            kind = RuntimeError  # or all(map(f, …)) would be true
        try:
            error = kind(*args)
        except Exception:
            error = kind.__new__(kind)
        if isinstance(state, dict):
            for name, value in state.items():
                if isinstance(name, str) and not hasattr(kind, name):
                    setattr(error, name, value)
        return error

    def exception(self, names: Any) -> type[BaseException]:
        """The class of exceptions with these names, its own first: of Python, of the problem, or a new one."""
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError("not the names of an exception")
        own = self.scope.get(names[0]) if names[0] in self._classes else getattr(builtins, names[0], None)
        if isinstance(own, type) and issubclass(own, BaseException):
            return own
        key = tuple(names)
        if key not in self._exceptions:
            base = self.exception(names[1:]) if names[1:] else Exception
            self._exceptions[key] = type(names[0], (base,), {})
        return self._exceptions[key]

    # What a Wire asks of its side.

    def shared_class(self, name: str) -> type | None:
        """The class of the problem of this name, if the program has it too."""
        found = self.scope.get(name) if name in self._classes else None
        return found if isinstance(found, type) else None

    def refer(self, value: Any) -> dict[str, Any] | None:
        """How an object that is no plain value is sent to the program."""
        number = _number(value)
        if number is not None:
            return {"remote": number}
        if isinstance(value, collections.abc.Iterator | collections.abc.KeysView | collections.abc.ValuesView):
            return {"iterator": Wire(self).pack(list(value))}
        if isinstance(value, collections.abc.ItemsView):
            return {"iterator": Wire(self).pack(list(value))}
        name = getattr(value, "__name__", "")
        if isinstance(value, type) and getattr(builtins, name, None) is value:
            return {"builtin": name}
        if callable(value) and not isinstance(value, type):
            self._callbacks.append(value)
            return {"callback": len(self._callbacks) - 1}
        return None

    def resolve(self, kind: str, content: Any) -> Any:
        """What the program has written: an object of its own, or an exception."""
        match kind, content:
            case "exception", [*names]:
                found = self.exception(names)
                return type(found.__name__, (Exception,), {}) if found in _GENERAL else found
            case "remote", int(number):
                return self._remotes.setdefault(number, Remote(self, number, self._kind))
            case "container", int(number):
                return self._remotes.setdefault(number, RemoteContainer(self, number, self._kind))
            case "remote", [int(number), plain]:
                value = decode(plain, Wire(self).resolve)
                extended = _EXTENDED[type(value)](value)
                extended._remote = (self, number)
                return extended
        raise ValueError("not an encoded value")


class _Scope(dict[str, Any]):
    """The names of the test. One that it does not define is the program's."""

    def __init__(self, examiner: Examiner) -> None:
        super().__init__(__name__="test", __settle__=examiner.settle, __coroutine__=_coroutine)
        self._examiner = examiner

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) or name.startswith("__"):
            raise KeyError(name)
        return self._examiner.operate("name", name)


class Remote:
    """An object of the program.

    Args:
        examiner: whom to ask.
        number: of the object.
        kind: ``class``, ``instance`` (or an attribute of one), or ``result`` of a function. A result has no methods
            with the names of those of plain values: ``assert f(3).startswith("a")`` is about a text, and an object
            could answer anything.
    """

    __slots__ = ("__examiner", "__kind", "__number")

    def __init__(self, examiner: Examiner, number: int, kind: str) -> None:
        for name, value in (("examiner", examiner), ("number", number), ("kind", kind)):
            object.__setattr__(self, f"_Remote__{name}", value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return _operate(self, "call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _READABLE:
            raise AttributeError(name)
        value = _operate(self, "getattr", self, name)
        if self.__kind == "result" and name in _OF_VALUES and isinstance(value, Remote):
            raise AttributeError(name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        _operate(self, "setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        _operate(self, "delattr", self, name)

    def __hash__(self) -> int:
        return hash(_number(self))

    def __eq__(self, other: object) -> Any:
        return self is other or _between(self, "eq", other)

    def __ne__(self, other: object) -> Any:
        return self is not other and _between(self, "ne", other)

    def __next__(self) -> Any:
        for value in _operate(self, "next", self):
            return value
        raise StopIteration

    def __instancecheck__(self, instance: Any) -> bool:
        return _number(instance) is not None and _operate(self, "isinstance", instance, self) is True

    def __await__(self) -> Any:
        return _operate(self, "await", self)
        yield

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        known = kind is not None and getattr(builtins, kind.__name__, None) is kind
        caught = _operate(self, "exit", self, kind if known else None) is True
        return caught and known and kind is not AssertionError

    def __deepcopy__(self, _: Any) -> Any:
        return _operate(self, "deepcopy", self)


class RemoteContainer(Remote):
    """An object of the program whose class extends a list, a dict or a set. It is compared by its content."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        other = _operate(other, "plain", other) if isinstance(other, RemoteContainer) else other
        return _operate(self, "plain", self) == other

    def __ne__(self, other: object) -> Any:
        return not self == other


class Extended:
    """A number, text or tuple whose class the program has extended: the plain value, with the added attributes."""

    _remote: tuple[Examiner, int]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _operate(self, "getattr", self, name)


_EXTENDED = {kind: type(kind.__name__, (Extended, kind), {}) for kind in (int, float, str, tuple)}


def _number(value: Any) -> int | None:
    """The number of an object of the program; None for anything else."""
    if isinstance(value, Remote):
        return object.__getattribute__(value, "_Remote__number")  # type: ignore[no-any-return]
    return value._remote[1] if isinstance(value, Extended) else None


def _operate(remote: Any, operation: str, *args: Any, **kwargs: Any) -> Any:
    examiner = remote._remote[0] if isinstance(remote, Extended) else remote._Remote__examiner
    return examiner.operate(operation, *args, **kwargs)


def _between(remote: Any, operation: str, other: object, compares: bool = True) -> Any:
    """The result of an operator between two objects of the program; Python decides if one of them is a value."""
    if not isinstance(other, Remote):
        return NotImplemented
    found = _operate(remote, operation, remote, other)
    return found is True if compares else found


def _alone(operation: str) -> Callable[..., Any]:
    return lambda self, *args: _operate(self, operation, self, *args)


def _two(operation: str, compares: bool) -> Callable[[Any, object], Any]:
    return lambda self, other: _between(self, operation, other, compares)


_ALONE = (
    """bool int float str repr len iter abs reversed round index neg pos invert enter copy getitem setitem delitem"""
)
for _name in _ALONE.split():
    setattr(Remote, f"__{_name}__", _alone(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _two(_name, True))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "matmul"):
    setattr(Remote, f"__{_name.strip('_')}__", _two(_name, False))


def _kind_of(operation: str, *args: Any) -> str:
    """The kind of a Remote that this operation returns. The names of classes begin with a capital."""
    match operation, args:
        case "name", [str(name)] if name[:1].isupper():
            return "class"
        case "call", [Remote() as called, *_] if called._Remote__kind == "class":
            return "instance"
        case _, [Remote() as item, *_] if operation != "call" and item._Remote__kind != "result":
            return "instance"
    return "result"


class _Marks(ast.NodeTransformer):
    """Marks calls whose value is not used, so that what they change of their arguments is copied; and asyncio.run."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Call):
            node.value = _called("__settle__", node.value)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(func=ast.Attribute(attr="run", value=ast.Name(id="asyncio")), args=[argument]):
                node.args = [_called("__coroutine__", argument)]  # it takes no other object that can be awaited
        return self.generic_visit(node)


def _called(name: str, argument: ast.expr) -> ast.Call:
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), [argument], []), argument)


async def _coroutine(value: Any) -> Any:
    return await value


def _marked(source: str) -> ast.Module:
    tree: ast.Module = ast.fix_missing_locations(_Marks().visit(ast.parse(source)))
    return tree


def _mutable(values: list[Any]) -> bool:
    """Whether a function could change one of these."""
    plain = (int, float, complex, str, bytes, type(None), Remote)
    return any(_mutable([*value]) if isinstance(value, tuple) else not isinstance(value, plain) for value in values)


def _merge(old: Any, new: Any) -> Any:
    """The new value, in the old object if it can be changed."""
    match old, new:
        case list(), list():
            old[:] = [*map(_merge, old, new), *new[len(old) :]]
        case dict(), dict():
            items = {key: _merge(old[key], item) if key in old else item for key, item in new.items()}
            old.clear()
            old.update(items)
        case set(), set():
            old.clear()
            old |= new
        case bytearray(), bytearray():
            old[:] = new
        case tuple(), tuple() if len(old) == len(new):
            list(map(_merge, old, new))
        case _:
            return new
    return old
