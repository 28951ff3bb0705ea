"""Checks, at import time, that another package still has the names and signatures that this one builds on.

``troll.trl`` and ``troll.verl`` override private methods of TRL and verl, which may change in any release. An override
of a method that no longer exists is never called, and no error is raised. So each of the two has a table of what it
uses, and ``check_contract`` raises an ``ImportError`` if an entry no longer holds.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
from collections.abc import Mapping
from importlib import metadata
from typing import Any

EXISTS = "(exists)"
"""The name exists. Nothing is expected of its signature."""
ATTRIBUTE = "(attribute)"
"""The class has this attribute, or one of its methods assigns it to ``self``."""

Contract = Mapping[str, str]
"""``"module:Class.method"`` → its first parameters, ``"self, model, inputs"``; or ``EXISTS`` or ``ATTRIBUTE``.

Parameters after a ``*`` are passed by keyword, so their order does not matter. A function may have further parameters
if they are optional.
"""


def check_contract(supported: Mapping[str, str], contract: Contract) -> None:
    """Raise an ``ImportError`` for the first entry that does not hold in the installed versions of other packages.

    Args:
        supported: the packages, as ``pip`` knows them, and their supported versions, ``{"verl": ">=0.9,<0.10"}``.
        contract: what is used of them.
    """
    for name, expected in contract.items():
        problem = broken(name, expected)
        if problem:
            installed = ", ".join(f"{package} {_version(package)}" for package in supported)
            wanted = [f"{package}{versions}" for package, versions in supported.items()]
            raise ImportError(
                f"{name.replace(':', '.')} {problem} ({installed} installed); troll supports {', '.join(wanted)}. "
                f"Install supported versions with: pip install {' '.join(map(repr, wanted))}"
            )


def broken(name: str, expected: str) -> str:
    """The predicate of a sentence that says what is wrong with one entry of a contract; empty if it holds."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        return f"cannot be imported ({error})"
    *owners, last = path.split(".")
    for owner in owners:
        found = getattr(found, owner, None)
    if expected == ATTRIBUTE:
        return "" if hasattr(found, last) or _assigns(found, last) else "does not exist"
    if not hasattr(found, last):
        return "does not exist"
    return "" if expected == EXISTS else _differs(getattr(found, last), expected)


def _differs(function: Any, expected: str) -> str:
    parameters = [*inspect.signature(function).parameters.values()]
    positional = [x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    first, _, later = expected.partition("*")
    ordered, by_name = (
        [word.strip() for word in part.split(",") if word.strip()] for part in (first, later.lstrip(", "))
    )
    known = {x.name for x in parameters}
    same = [x.name for x in positional][: len(ordered)] == ordered and set(by_name) <= known
    optional = all(
        x.default is not x.empty or x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
        for x in parameters
        if x.name not in (*ordered, *by_name)
    )
    return "" if same and optional else f"takes ({', '.join(x.name for x in parameters)}) instead of ({expected})"


def _assigns(cls: Any, name: str) -> bool:
    """Whether a method of a class or of its bases assigns this attribute."""
    return any(
        instruction.opname == "STORE_ATTR" and instruction.argval == name
        for function in (_functions(cls) if isinstance(cls, type) else ())
        if name in function.__code__.co_names  # to disassemble all of them takes seconds
        for instruction in dis.get_instructions(function)
    )


@functools.cache
def _functions(cls: type) -> tuple[Any, ...]:
    plain = [getattr(x, "__func__", x) for base in cls.__mro__ for x in vars(base).values()]  # of a class method
    unwrapped = [inspect.unwrap(x) for x in plain if callable(x)]
    return tuple(x for x in unwrapped if inspect.isfunction(x))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(unknown version)"
