"""The program inside the sandbox: runs code it is sent, evaluates expressions, and writes what comes out.

It shares its process with hostile code, so nothing it says is trusted: the other end judges the replies. It is run by
its path in an isolated interpreter, and imports nothing of this package.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

LIMITS = {
    "RLIMIT_AS": 1 << 30,
    "RLIMIT_CPU": 6,  # seconds
    "RLIMIT_FSIZE": 16 << 20,
    "RLIMIT_NOFILE": 64,
    "RLIMIT_NPROC": 1,  # of no effect for root
    "RLIMIT_CORE": 0,
}


def plain(value: Any) -> Any:
    """``value`` with subclasses of the built-in types made plain: a Counter is written as the dict it equals."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(plain(item) for item in value)
    if isinstance(value, frozenset):
        return {plain(item) for item in value}
    return value


def answer(request: dict[str, Any], scope: dict[str, Any]) -> Any:
    """Run code: True. Evaluate an expression: its value, as Python writes it."""
    if "run" in request:
        exec(compile(request["run"], "program", "exec"), scope)
        return True
    return repr(plain(eval(compile(request["evaluate"], "expression", "eval"), scope)))


def main() -> None:
    """Reply to every line until there are no more."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    for name, most in LIMITS.items():
        resource.setrlimit(getattr(resource, name), (most, most))
    sys.set_int_max_str_digits(4300)
    os.write(replies, b'"ready"\n')
    scope: dict[str, Any] = {"__name__": "program", "__builtins__": __builtins__}
    for line in requests:
        request = json.loads(line)
        try:
            reply = answer(request, scope)
        except BaseException:
            reply = None
        os.write(replies, json.dumps({"token": request["token"], "reply": reply}).encode() + b"\n")


if __name__ == "__main__":
    main()
