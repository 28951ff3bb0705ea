"""A test that is code of its own, such as ``assert math.isclose(f(3), 9)``, away from the program it tests.

The program is in another process, which this one cannot reach: a call of one of its functions is written down, and its
value comes back as a plain value. So the program can neither see the test nor answer with anything but values.
"""

from __future__ import annotations

import builtins
import json
import os
from typing import Any

from troll.rewards.inside.values import decode, encode


class Unsendable(BaseException):
    """The test calls a function with something that is no literal, and cannot be sent to where the program is."""


class Elsewhere:
    """A function of the program."""

    def __init__(self, name: str, requests: Any, replies: int) -> None:
        self.name, self.requests, self.replies = name, requests, replies

    def __call__(self, *positional: Any, **named: Any) -> Any:
        """What it returns there."""
        try:
            asked = {"call": self.name, "with": [encode(list(positional)), encode(named)]}
        except TypeError as error:
            raise Unsendable from error
        os.write(self.replies, json.dumps(asked).encode() + b"\n")
        reply = json.loads(self.requests.readline())
        if "error" in reply:
            kind = getattr(builtins, reply["error"], Exception)
            raised = kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception
            raise RuntimeError if raised is StopIteration else raised  # or all(map(f, …)) would be true
        return decode(reply["value"])


def main(requests: int, replies: int) -> None:
    """Hold one test; the last line says whether it held."""
    lines = os.fdopen(requests, "rb")
    order = json.loads(lines.readline())
    scope: dict[str, Any] = {"__name__": "test"}
    said: dict[str, Any] = {"held": True}
    try:
        exec(compile(order["setup"], "setup", "exec"), scope)
        for name in order["names"]:
            scope.setdefault(name, Elsewhere(name, lines, replies))
        exec(compile(order["test"], "test", "exec"), scope)
    except AssertionError:
        said = {"held": False}
    except BaseException as error:
        said = {"held": False, "error": type(error).__name__}
    os.write(replies, json.dumps(said).encode() + b"\n")
