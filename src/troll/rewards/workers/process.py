"""A worker process: one JSON line per request and per reply, over two pipes, with a deadline that is a kill.

The other end may be slow, silent, hostile or dead. Each of these is an exception below ``NoReply``.
"""

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

START_SECONDS = 120.0  # a process that has not sent "ready" by then counts as broken


class NoReply(Exception):  # noqa: N818, not always an error
    """There was no valid reply."""


class ReplyLate(NoReply):
    """The reply did not come before the deadline."""


class ReplyTooLong(NoReply):
    """The reply has more bytes than allowed."""


class ReplyInvalid(NoReply):
    """The reply is not one line of JSON, answers another request, or came before its request."""


class PipeClosed(NoReply):
    """The other end has closed its pipe."""


def ready(handle: int, events: int, seconds: float) -> bool:
    """Whether a file descriptor becomes readable (``POLLIN``), writable (``POLLOUT``) or broken within that time."""
    poll = select.poll()
    poll.register(handle, events)
    return bool(poll.poll(1000 * max(0.0, seconds)))


class JsonLines:
    """Requests and replies over two pipes, one line of JSON each. A reply before its request is invalid.

    Args:
        replies, requests: file descriptors to read from and to write to. They become non-blocking.
        max_bytes: of a reply.
    """

    def __init__(self, replies: int, requests: int, max_bytes: int = 1 << 20) -> None:
        self.replies, self.requests, self.max_bytes = replies, requests, max_bytes
        os.set_blocking(replies, False)
        os.set_blocking(requests, False)

    def ask(self, seconds: float, request: Any) -> Any:
        """The reply to a request."""
        until = time.monotonic() + seconds
        if ready(self.replies, select.POLLIN, 0) and self._read() is not None:
            raise ReplyInvalid("a reply before its request")
        self.send(until - time.monotonic(), request)
        return self.receive(until - time.monotonic())

    def send(self, seconds: float, request: Any) -> None:
        """Write a line."""
        rest, until = memoryview(json.dumps(request).encode() + b"\n"), time.monotonic() + seconds
        while rest:
            if not ready(self.requests, select.POLLOUT, until - time.monotonic()):
                raise ReplyLate("out of time")
            try:
                rest = rest[os.write(self.requests, rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise PipeClosed("it ended") from error

    def receive(self, seconds: float) -> Any:
        """Read a line."""
        reply, until = bytearray(), time.monotonic() + seconds
        while not reply.endswith(b"\n"):
            if not ready(self.replies, select.POLLIN, until - time.monotonic()):
                raise ReplyLate("out of time")
            reply += self._read() or b""
            if len(reply) > self.max_bytes:
                raise ReplyTooLong("the reply is too long")
        try:
            return json.loads(reply)
        except (ValueError, RecursionError) as error:
            raise ReplyInvalid("the reply is not JSON") from error

    def _read(self) -> bytes | None:
        try:
            part = os.read(self.replies, 1 << 16)
        except BlockingIOError:
            return None
        except OSError as error:  # a socket whose other end has left without reading
            raise PipeClosed("it ended") from error
        if not part:
            raise PipeClosed("it ended")
        return part


class WorkerProcess:
    """A process that sends ``"ready"`` and then ``{"token": …, "reply": …}`` to each request.

    Args:
        argv: the command.
        env: its whole environment.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
        self.end = weakref.finalize(self, _end, self._popen)
        assert self._popen.stdout is not None
        assert self._popen.stdin is not None
        self._lines = JsonLines(self._popen.stdout.fileno(), self._popen.stdin.fileno())
        try:
            if self._lines.receive(START_SECONDS) != "ready":
                raise ReplyInvalid('the first line is not "ready"')
        except NoReply as failure:
            message = self._last_error_line()
            self.end()
            raise NoReply(message or str(failure)) from failure

    def ask(self, seconds: float, /, **request: Any) -> Any:
        """The reply to a request. Both carry a random token, so that no reply can be prepared before its request."""
        token = secrets.token_hex(16)
        match self._lines.ask(seconds, {"token": token, **request}):
            case {"token": str(returned), "reply": reply} if returned == token:
                return reply
        raise ReplyInvalid("a reply to another request")

    def _last_error_line(self) -> str:
        self._popen.kill()
        assert self._popen.stderr is not None
        lines = self._popen.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # in a fork, Popen knows that the process is not its child, and does nothing
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()
