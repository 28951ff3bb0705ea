"""JSON lines over two pipes to something that may be slow, silent, hostile or dead."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any


def ready(handle: int, events: int, seconds: float) -> bool:
    """Whether a file descriptor can be read (``POLLIN``) or written (``POLLOUT``), or is broken, within that time."""
    poll = select.poll()
    poll.register(handle, events)
    return bool(poll.poll(1000 * max(0.0, seconds)))


class NoReply(Exception):  # noqa: N818, not always an error
    """There was no reply as there should be."""


class Late(NoReply):
    """It did not come in time."""


class Long(NoReply):
    """It has more bytes than a reply may have."""


class Ended(NoReply):
    """The other end is closed."""


class Garbled(NoReply):
    """It is not one line of JSON."""


class Lines:
    """A conversation: one line of JSON each way, and nothing before it was asked for.

    Args:
        replies, requests: file descriptors to read from and to write to. They become non-blocking.
        longest: bytes of a reply.
    """

    def __init__(self, replies: int, requests: int, longest: int = 1 << 20) -> None:
        self.replies, self.requests, self.longest = replies, requests, longest
        os.set_blocking(replies, False)
        os.set_blocking(requests, False)

    def ask(self, seconds: float, request: Any) -> Any:
        """The reply to a request. Bytes that are there before it was made are no reply: Garbled."""
        until = time.monotonic() + seconds
        if ready(self.replies, select.POLLIN, 0) and self._read() is not None:
            raise Garbled("a reply before its request")
        self.say(until - time.monotonic(), request)
        return self.hear(until - time.monotonic())

    def say(self, seconds: float, request: Any) -> None:
        """Write a line."""
        rest, until = memoryview(json.dumps(request).encode() + b"\n"), time.monotonic() + seconds
        while rest:
            if not ready(self.requests, select.POLLOUT, until - time.monotonic()):
                raise Late("out of time")
            try:
                rest = rest[os.write(self.requests, rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise Ended("it ended") from error

    def hear(self, seconds: float) -> Any:
        """Read a line."""
        reply, until = bytearray(), time.monotonic() + seconds
        while not reply.endswith(b"\n"):
            if not ready(self.replies, select.POLLIN, until - time.monotonic()):
                raise Late("out of time")
            reply += self._read() or b""
            if len(reply) > self.longest:
                raise Long("a reply too long")
        try:
            return json.loads(reply)
        except (ValueError, RecursionError) as error:
            raise Garbled("a reply that is not JSON") from error

    def _read(self) -> bytes | None:
        try:
            part = os.read(self.replies, 1 << 16)
        except BlockingIOError:
            return None
        except OSError as error:  # a socket whose other end has left without reading
            raise Ended("it ended") from error
        if not part:
            raise Ended("it ended")
        return part
