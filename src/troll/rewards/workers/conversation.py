"""A process that is asked one thing after the other, in JSON lines over two pipes, and killed when it is too slow."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from troll.rewards.workers.lines import Garbled, Lines, NoReply

START = 120.0  # seconds until a process that has not said "ready" counts as broken


class Conversation:
    """A process and the two pipes to it. It says "ready" first, and then ``{"token": …, "reply": …}`` to each request.

    Args:
        argv, env: of the process; ``env`` is all of its environment.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
        self.end = weakref.finalize(self, _end, self._process)
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._lines = Lines(self._process.stdout.fileno(), self._process.stdin.fileno())
        try:
            if self._lines.hear(START) != "ready":
                raise Garbled("something else than ready")
        except NoReply as failure:
            said = self._last_words()
            self.end()
            raise NoReply(said or str(failure)) from failure

    def ask(self, seconds: float, /, **request: Any) -> Any:
        """What is replied to a request. Both carry a random token, so that no reply comes before its request."""
        token = secrets.token_hex(16)
        match self._lines.ask(seconds, {"token": token, **request}):
            case {"token": str(said), "reply": reply} if said == token:
                return reply
        raise Garbled("a reply to something else")

    def _last_words(self) -> str:
        """The last line of what the process wrote to stderr."""
        self._process.kill()
        assert self._process.stderr is not None
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # of a parent's process, in a fork, Popen knows that it is no child, and does nothing
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()
