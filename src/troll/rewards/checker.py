"""A worker that checks answers in another process, which is killed at the deadline.

An answer can keep a parser busy for ever (``9^{9^{9}}``). A parser's own timeouts do not stop everything and work only
on the main thread, so the check runs in another process.
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
from troll.rewards.sandbox.isolation import bubblewrap, sandbox_python
from troll.rewards.workers import NoReply, WorkerFailed, WorkerProcess
from troll.rewards.workers.process import ReplyLate

SECONDS = 3.0  # wall time for an answer
WORKER = Path(__file__).with_name("checker_worker.py")
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # for reproducible verdicts


class CheckerError(InputError):
    """The process that checks answers cannot be started, so no answer has a verdict."""


@dataclass(frozen=True)
class Question:
    """A question to the process and its deadline in seconds."""

    arguments: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True)
class Reply:
    """The reply; None if the question took too long, or killed the process twice."""

    value: Any


class Checker:
    """A worker for ``troll.rewards.workers.Pool``: a process that checks answers, restarted after it was killed.

    Args:
        settings: ``kind`` (math or gym) and the arguments of that kind.
        command, env: of the process; the settings are appended to the command.
    """

    def __init__(self, settings: Mapping[str, Any], command: Sequence[str], env: Mapping[str, str]) -> None:
        self._kind = settings["kind"]
        self._argv, self._env = [*command, json.dumps(settings)], env
        self._process: WorkerProcess | None = None
        try:
            self._process = WorkerProcess(self._argv, self._env)
        except NoReply as failure:
            raise CheckerError(
                f"the process that checks answers ({self._kind}) did not start ({failure})",
                "Run troll doctor, which checks its packages",
            ) from failure

    def do(self, question: Question) -> Reply:
        """The reply. If the process dies it is restarted and asked once more; a second death counts as no reply."""
        left = question.seconds
        for _ in range(2):
            if self._process is None:
                try:
                    self._process = WorkerProcess(self._argv, self._env)
                except NoReply as failure:
                    raise WorkerFailed(f"the {self._kind} checker did not start again: {failure}") from failure
            began = time.monotonic()
            try:
                return Reply(self._process.ask(left, seconds=left, arguments=dict(question.arguments)))
            except NoReply as failure:
                self.end()
                if isinstance(failure, ReplyLate):
                    break
                left -= time.monotonic() - began
        return Reply(None)

    def end(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.end()
            self._process = None


def plain_command() -> tuple[list[str], dict[str, str]]:
    """Command and environment of a checker process without a sandbox, for answers that are never run as code."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    return [sys.executable, "-P", str(WORKER)], {**keep, **_ENVIRONMENT}


def sandboxed_command(package: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a checker process that can read only Python and the folder of this package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise InputError(f"the package {package} is not installed", 'Run pip install "troll-rl[gym]"')
    visible = {"/packages": Path(spec.origin).parent.parent, "/worker.py": WORKER}
    env = {"PYTHONPATH": "/packages", **_ENVIRONMENT}
    return bubblewrap([sandbox_python(), "-P", "/worker.py"], visible, env), {}
