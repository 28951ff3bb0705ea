"""Answers checked in a process of its own, which is killed if it takes too long.

What a model wrote can keep a parser busy for ever (``9^{9^{9}}``), and a parser's own timeouts do not stop everything
and do not work outside the main thread. So the check runs elsewhere, and the deadline is a kill.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from troll.errors import InputError
from troll.tasks import sandbox
from troll.tasks.conversation import Conversation, NoReply

DEADLINE = 3.0  # seconds for an answer
_WORKER = Path(__file__).with_name("checker_worker.py")
_SAME = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class CheckerError(InputError):
    """The process that checks answers cannot be started: no verdict on any answer."""


class Checker:
    """A process that checks answers, started at the first question and again after it was killed.

    Args:
        what: ``kind`` (math or gym) and what that kind needs.
        needs: the package that must be found inside a sandbox; without it, there is none, and only a deadline.
    """

    def __init__(self, what: dict[str, Any], needs: str | None = None) -> None:
        self.what = what
        self._command, self._env = _sandboxed(needs) if needs else _apart()
        self._lock = threading.Lock()
        self._conversation: Conversation | None = None

    def ask(self, seconds: float | None = None, **question: Any) -> Any:
        """The reply; None where it did not come in time (``DEADLINE`` if not said), or the question broke the check."""
        with self._lock:
            if self._conversation is None:
                self._conversation = self._start()
            try:
                return self._conversation.ask(DEADLINE if seconds is None else seconds, **question)
            except NoReply:
                self._conversation.end()
                self._conversation = None
                return None

    def _start(self) -> Conversation:
        try:
            return Conversation([*self._command, json.dumps(self.what)], self._env)
        except NoReply as failure:
            raise CheckerError(
                f"the process that checks answers ({self.what['kind']}), which did not start ({failure})",
                "its packages, and 4 GB of memory that may be reserved",
                "troll doctor, which says what is missing",
            ) from failure


def _apart() -> tuple[list[str], dict[str, str]]:
    """Command and environment of a worker without a sandbox."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    return [sys.executable, "-P", str(_WORKER)], {**keep, **_SAME}


def _sandboxed(package: str) -> tuple[list[str], dict[str, str]]:
    """The same for one that sees nothing but Python and the packages beside this one."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise InputError(f"no package {package}", "it", 'pip install "troll-rl[gym]"')
    visible = {"/packages": Path(spec.origin).parent.parent, "/worker.py": _WORKER}
    env = {"PYTHONPATH": "/packages", **_SAME}
    return sandbox.command([sandbox.python(), "-P", "/worker.py"], visible, env), {}
