"""The smallest run there is: seven times what it is asked."""

from __future__ import annotations

import json
import os


def main(requests: int, replies: int) -> None:
    """Reply once."""
    os.write(replies, json.dumps(7 * json.loads(os.read(requests, 100))).encode() + b"\n")
