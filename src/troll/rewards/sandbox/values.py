"""Python values as JSON, between the judge, the process of a program and the process of a test.

Plain values are sent by their content and types. Between program and test there are also objects of classes that both
have (by content) and objects that only one of them has (by a number). Nothing here is ever unpickled.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Special = Callable[[Any], dict[str, Any] | None]
_PLAIN = (int, float, str, bool, type(None), list, tuple, dict, set, frozenset, bytes, bytearray, complex)
_MADE: dict[str, tuple[type, Callable[[Any], list[Any]]]] = {  # how to write and make again what is not a literal
    "Fraction": (fractions.Fraction, lambda value: [value.numerator, value.denominator]),
    "Decimal": (decimal.Decimal, lambda value: [str(value)]),
    "deque": (deque, lambda value: [list(value), value.maxlen]),
    "range": (range, lambda value: [value.start, value.stop, value.step]),
    "timedelta": (datetime.timedelta, lambda value: [value.days, value.seconds, value.microseconds]),
    "datetime": (datetime.datetime, lambda value: [*value.timetuple()[:6], value.microsecond]),
    "date": (datetime.date, lambda value: [value.year, value.month, value.day]),
    "time": (datetime.time, lambda value: [value.hour, value.minute, value.second, value.microsecond]),
}


class Unsendable(BaseException):
    """The value is not a Python literal. No ``except Exception`` of a test catches it."""


def encode(value: Any, special: Special | None = None) -> Any:
    """A Python value as JSON with its types: plain values as themselves, others as ``{type: content}``.

    An instance of a subclass is written as its base type, unless ``special`` returns something else for it.

    >>> encode({"a": (1, None)})
    {'dict': [['a', {'tuple': [1, None]}]]}

    Raises:
        TypeError: the value is not a Python literal.
    """
    if value is None or value is True or value is False:
        return value
    if type(value) not in _PLAIN:
        if type(value).__module__ == "numpy":
            return _encode_numpy(value, special)
        for name, (made, parts) in _MADE.items():
            if type(value) is made:
                return {name: encode(parts(value), special)}
        if special is not None and (written := special(value)) is not None:
            return written
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes" if isinstance(value, bytes) else "bytearray": bytes(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[encode(key, special), encode(item, special)] for key, item in value.items()]}
    if isinstance(value, list):
        return [encode(item, special) for item in value]
    for name, kinds in (("tuple", tuple), ("set", set | frozenset)):
        if isinstance(value, kinds):
            return {name: [encode(item, special) for item in value]}
    raise TypeError(f"{type(value).__name__} is not a literal")


def _encode_numpy(value: Any, special: Special | None) -> Any:
    """A number of numpy as a plain number, an array by its type and content."""
    if hasattr(value, "tolist") and not hasattr(value, "__len__"):
        return encode(value.tolist(), special)
    if type(value).__name__ == "ndarray" and value.dtype.kind in "biufcU":
        return {"array": [value.dtype.str, encode(value.tolist(), special)]}
    if special is not None and (written := special(value)) is not None:
        return written
    raise TypeError(f"{type(value).__name__} is not a literal")


def decode(value: Any, resolve: Callable[[str, Any], Any] | None = None) -> Any:
    """The value that was encoded; ``resolve(kind, content)`` makes what is not a literal.

    Raises:
        ValueError: ``encode`` does not write this.
    """
    if isinstance(value, list):
        return [decode(item, resolve) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"tuple": list(items), **rest} if not rest:
            return tuple(decode(item, resolve) for item in items)
        case {"set": list(items), **rest} if not rest:
            return set(_hashable([decode(item, resolve) for item in items]))
        case {"dict": list(items), **rest} if not rest:
            keys = _hashable([decode(key, resolve) for key, _ in items])
            return dict(zip(keys, [decode(item, resolve) for _, item in items], strict=True))
        case {"bytes": str(digits), **rest} if not rest:
            return bytes.fromhex(digits)
        case {"bytearray": str(digits), **rest} if not rest:
            return bytearray.fromhex(digits)
        case {"complex": [int() | float() as real, int() | float() as imaginary], **rest} if not rest:
            return complex(real, imaginary)
    if resolve is None or len(value) != 1:
        raise ValueError("not an encoded value")
    return resolve(*next(iter(value.items())))


def _hashable(items: Sequence[Any]) -> Sequence[Any]:
    """The items; ValueError if more than 100 share a hash, because a set of colliding items takes minutes to build."""
    if max(Counter(map(hash, items)).values(), default=0) > 100:
        raise ValueError("more than 100 items with the same hash")
    return items


class Side(Protocol):
    """One end of the conversation between a program and its test."""

    def shared_class(self, name: str) -> type | None:
        """The class of this name that both sides have."""

    def refer(self, value: Any) -> dict[str, Any] | None:
        """How an object that is no plain value is written; None for one that is written as its base type."""

    def resolve(self, kind: str, content: Any) -> Any:
        """The object that the other side has written this way."""


class Wire:
    """The values of one message, which may share objects of classes that both sides have.

    Args:
        side: this end.
        given: the objects of the message to which this one replies. A reply refers to them, so that identity is kept.
    """

    def __init__(self, side: Side, given: Sequence[Any] = ()) -> None:
        self.side, self.objects = side, list[Any]()
        self._given = list(given)
        self._known = {id(item): {"given": number} for number, item in enumerate(self._given)}

    def pack(self, value: Any) -> Any:
        """The value as JSON; Unsendable if it cannot be written. ``states`` has the objects in it."""
        try:
            return encode(value, self._special)
        except TypeError as error:
            raise Unsendable from error

    def states(self) -> list[Any]:
        """Class and attributes of every object in the message, to be sent with it."""
        found: list[Any] = []
        while len(found) < len(self.objects):  # writing one may find others
            item = self.objects[len(found)]
            found.append([type(item).__name__, self.pack(state_of(item))])
        return found

    def unpack(self, message: dict[str, Any], *others: str) -> Any:
        """The value in a message; with ``others``, a list of it and the values under these keys (None if absent)."""
        states = message.get("objects", [])
        self.objects = [self._blank(name, state) for name, state in states]
        for item, (_, state) in zip(self.objects, states, strict=True):
            fill(item, decode(state, self.resolve))
        values = [decode(message.get(key), self.resolve) for key in ("value", *others)]
        return values if others else values[0]

    def _special(self, value: Any) -> dict[str, Any] | None:
        if id(value) in self._known:
            return self._known[id(value)]
        if self.side.shared_class(type(value).__name__) is not None:
            self._known[id(value)] = {"object": len(self.objects)}
            self.objects.append(value)
            return self._known[id(value)]
        return self.side.refer(value)

    def resolve(self, kind: str, content: Any) -> Any:
        """The object that is written this way."""
        if kind in ("object", "given"):
            return (self.objects if kind == "object" else self._given)[_index(content)]
        if kind in _MADE:
            try:
                return _MADE[kind][0](*decode(content))
            except Exception as error:
                raise ValueError("not an encoded value") from error
        if kind == "iterator" and isinstance(content, list):
            return iter(decode(content, self.resolve))
        if kind == "array":
            return _array(*content)
        return self.side.resolve(kind, content)

    def _blank(self, name: str, state: Any) -> Any:
        kind = self.side.shared_class(name)
        if kind is None:
            raise ValueError("not a shared class")
        return kind[state] if issubclass(kind, enum.Enum) else kind.__new__(kind)


def _index(content: Any) -> int:
    if not isinstance(content, int) or content < 0:
        raise ValueError("not an encoded value")
    return content


def _array(kind: str, content: Any) -> Any:
    if "numpy" not in sys.modules or kind.strip("<>|=")[:1] not in set("biufcU"):
        raise ValueError("not an encoded value")
    return sys.modules["numpy"].array(decode(content), dtype=kind)


def state_of(item: Any) -> Any:
    """The attributes of an object; the name of a member of an Enum."""
    if isinstance(item, enum.Enum):
        return item.name
    slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(item, name) for name in slots if hasattr(item, name)} | getattr(item, "__dict__", {})


def fill(item: Any, state: Any) -> None:
    """Give an object these attributes and no others; ValueError if one of them would hide a method of its class."""
    if isinstance(item, enum.Enum):
        return
    for name in state:
        hidden = getattr(type(item), name, None)
        if name.startswith("__") or not (type(hidden) in _PLAIN or isinstance(hidden, types.MemberDescriptorType)):
            raise ValueError("an attribute in place of a method")
    for name in getattr(item, "__dict__", {}).keys() - state.keys():
        object.__delattr__(item, name)
    for name, value in state.items():
        object.__setattr__(item, name, value)
