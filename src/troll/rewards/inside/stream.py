"""A program that reads its input from standard input and writes its answer to standard output."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import types

from troll.rewards.inside.values import LIMIT, word_of


def read(handle: int, size: int) -> bytes:
    """So many bytes, and not one more."""
    data = b""
    while len(data) < size:
        part = os.read(handle, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def main(requests: int, replies: int) -> None:
    """Run one program. Its length and text come first; all that follows is its input."""
    program = read(requests, int.from_bytes(read(requests, 8), "big")).decode()
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
        code = 3 if word_of(error) == LIMIT else 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
    os._exit(code)
