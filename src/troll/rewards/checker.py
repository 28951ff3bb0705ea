"""Answers checked in a process of its own, which is killed if it takes too long.

What a model wrote can keep a parser busy for ever (``9^{9^{9}}``), and a parser's own timeouts do not stop everything
and do not work outside the main thread. So the check runs elsewhere, and the deadline is a kill.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troll.errors import InputError
from troll.rewards.sandbox.isolation import bubblewrap, python
from troll.rewards.workers import Conversation, NoReply, WorkerFailed
from troll.rewards.workers.lines import Late

SECONDS = 3.0  # for an answer
WORKER = Path(__file__).with_name("checker_worker.py")
SAME = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # the same in every run


class CheckerError(InputError):
    """The process that checks answers cannot be started: no verdict on any answer."""


@dataclass(frozen=True)
class Question:
    """What the process is asked, and how long it may take."""

    asked: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True)
class Reply:
    """What it replied; None where the question took too long, or broke the process twice."""

    value: Any


class Checker:
    """A worker for ``troll.rewards.workers.Pool``: a process that checks answers, started again after it was killed.

    Args:
        what: ``kind`` (math or gym) and what that kind needs.
        command, env: of the process, without ``what``.
    """

    def __init__(self, what: Mapping[str, Any], command: Sequence[str], env: Mapping[str, str]) -> None:
        self._kind = what["kind"]
        self._argv, self._env = [*command, json.dumps(what)], env
        self._conversation: Conversation | None = None
        try:
            self._conversation = Conversation(self._argv, self._env)
        except NoReply as failure:
            raise CheckerError(
                f"the process that checks answers ({self._kind}), which did not start ({failure})",
                "its packages, and memory for it",
                "troll doctor, which says what is missing",
            ) from failure

    def do(self, question: Question) -> Reply:
        """The reply. A process that ends is started again and asked once more: the second time, the answer did it."""
        left = question.seconds
        for _ in range(2):
            if self._conversation is None:
                try:
                    self._conversation = Conversation(self._argv, self._env)
                except NoReply as failure:
                    raise WorkerFailed(f"{self._kind} did not start again: {failure}") from failure
            began = time.monotonic()
            try:
                return Reply(self._conversation.ask(left, seconds=left, asked=dict(question.asked)))
            except NoReply as failure:
                self.end()
                if isinstance(failure, Late):
                    break
                left -= time.monotonic() - began
        return Reply(None)

    def end(self) -> None:
        """Kill the process."""
        if self._conversation is not None:
            self._conversation.end()
            self._conversation = None


def apart() -> tuple[list[str], dict[str, str]]:
    """Command and environment of a process without a sandbox, for answers that are never run as code."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    return [sys.executable, "-P", str(WORKER)], {**keep, **SAME}


def sandboxed(package: str) -> tuple[list[str], dict[str, str]]:
    """The same for one that sees nothing but Python and the packages beside this one."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise InputError(f"no package {package}", "it", 'pip install "troll-rl[gym]"')
    visible = {"/packages": Path(spec.origin).parent.parent, "/worker.py": WORKER}
    env = {"PYTHONPATH": "/packages", **SAME}
    return bubblewrap([python(), "-P", "/worker.py"], visible, env), {}
