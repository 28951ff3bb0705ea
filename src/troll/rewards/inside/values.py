"""Python values as JSON, with their types: what leaves the sandbox, and what goes in. And errors, as one word."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Sequence
from typing import Any

LIMIT = "limit"
_FULL = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM, errno.EAGAIN)


def word_of(error: BaseException) -> str:
    """The name of an error; ``LIMIT`` where memory, disk, files or processes ran out."""
    out = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _FULL)
    return LIMIT if out else type(error).__name__


def encode(value: Any) -> Any:
    """Plain values as themselves, others as ``{type: content}``. Subclasses are written as what they extend.

    >>> encode({"a": (1, None)})
    {'dict': [['a', {'tuple': [1, None]}]]}

    Raises:
        TypeError: for a value that is no literal of Python.
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
    raise TypeError(f"{type(value).__name__} is no literal")


def decode(value: Any) -> Any:
    """The value that was encoded.

    Raises:
        ValueError: for what ``encode`` does not write.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"tuple": list(items), **rest} if not rest:
            return tuple(decode(item) for item in items)
        case {"set": list(items), **rest} if not rest:
            return set(_spread([decode(item) for item in items]))
        case {"dict": list(items), **rest} if not rest:
            keys = _spread([decode(key) for key, _ in items])
            return dict(zip(keys, [decode(item) for _, item in items], strict=True))
        case {"bytes": str(digits), **rest} if not rest:
            return bytes.fromhex(digits)
        case {"complex": [int() | float() as real, int() | float() as imaginary], **rest} if not rest:
            return complex(real, imaginary)
    raise ValueError("no encoded value")


def _spread(items: Sequence[Any]) -> Sequence[Any]:
    """The same items; ValueError if many have one hash, which are chosen so that a set of them takes minutes."""
    if max(Counter(map(hash, items)).values(), default=0) > 100:
        raise ValueError("items with the same hash")
    return items
