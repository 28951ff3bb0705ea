"""A program whose functions are called: expressions come in one at a time, values go out."""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

from troll.rewards.inside.values import decode, encode, word_of


class Unsendable(Exception):  # noqa: N818, an outcome
    """The value is no literal of Python."""


def answer(request: dict[str, Any], scope: dict[str, Any]) -> Any:
    """Run code: None. Evaluate an expression, or call a function by its name: the value."""
    if "run" in request:
        exec(compile(request["run"], "program", "exec"), scope)
        return None
    if "call" in request:
        positional, named = (decode(part) for part in request["with"])
        value = scope[request["call"]](*positional, **named)
    else:
        value = eval(compile(request["evaluate"], "expression", "eval"), scope)
    try:
        return encode(value)
    except TypeError as error:
        raise Unsendable from error


def main(requests: int, replies: int) -> None:
    """Reply to every line until there are no more, with a value or with the kind of error."""
    module = types.ModuleType("program")
    sys.modules["program"] = module  # dataclasses look for it there
    for line in os.fdopen(requests, "rb"):
        request = json.loads(line)
        try:
            reply = {"value": answer(request, module.__dict__)}
        except BaseException as error:
            reply = {"error": word_of(error)}
        written = memoryview(json.dumps(reply).encode() + b"\n")
        while written:
            written = written[os.write(replies, written) :]
