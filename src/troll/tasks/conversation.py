"""A process that is asked one thing after the other, in JSON lines over two pipes, and killed when it is too slow."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

START = 120.0  # seconds until a process that has not said "ready" counts as broken
_LONGEST = 1 << 20  # bytes of a reply


class NoReply(Exception):  # noqa: N818, not always an error
    """There was no reply as there should be: it was too late, too long, out of turn, not JSON, or the process ended."""


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
        self._replies = self._process.stdout.fileno()
        try:
            if self._hear(START) != "ready":
                raise NoReply("something else than ready")
        except NoReply as failure:
            self._process.kill()
            said = self._process.communicate()[1].decode(errors="replace").strip()
            raise NoReply(said.splitlines()[-1] if said else str(failure)) from failure

    def ask(self, seconds: float, **request: Any) -> Any:
        """What is replied to a request. Both carry a random token, so that no reply comes before its request."""
        token = secrets.token_hex(16)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"token": token, **request}).encode() + b"\n")
        except OSError as error:
            raise NoReply("it ended") from error
        match self._hear(seconds):
            case {"token": str(said), "reply": reply} if said == token:
                return reply
        raise NoReply("a reply to something else")

    def _waiting(self, seconds: float) -> bool:
        return bool(select.select([self._replies], [], [], max(0.0, seconds))[0])

    def _hear(self, seconds: float) -> Any:
        reply, until = b"", time.monotonic() + seconds
        while not reply.endswith(b"\n"):
            if not self._waiting(until - time.monotonic()):
                raise NoReply("out of time")
            part = os.read(self._replies, 1 << 16)
            reply += part
            if not part or len(reply) > _LONGEST:
                raise NoReply("a reply too long" if part else "it ended")
        try:
            return json.loads(reply)
        except (ValueError, RecursionError) as error:
            raise NoReply("a reply that is not JSON") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()
