"""The reward of a program, as a plain reward function for TRL: whether it passes its tests, in a sandbox."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from troll.rewards.judge import SECONDS, CodeWorker, Job, Verdict
from troll.rewards.problems import Problem, read_problem
from troll.rewards.sandbox import Isolation
from troll.rewards.text import text_of
from troll.rewards.workers.pool import Pool


def code_of(text: str) -> str | None:
    """The program in a completion: its last block in backquotes, or else all of it; None if it is empty."""
    blocks = re.findall(r"```(?:[a-zA-Z0-9+]*)\n(.*?)(?:```|\Z)", text, flags=re.DOTALL)
    return (blocks[-1] if blocks else text).strip("\n") or None


class CodeReward:
    """1 for a program that passes all its cases, else 0; None where the sandbox failed, so that TRL leaves it out.

    The columns ``tests`` and, if there are any, ``setup`` and ``prepare`` are as ``read_problem`` takes them.

    Args:
        partial: the share of the cases that pass, instead of all or nothing.
        seconds: on the clock, for a program and all its cases.
        size: programs that run at the same time; as many as there are cores if not given.
        isolation: the walls of the sandbox; the best there are if not given.
    """

    __name__ = "passes_tests"

    def __init__(
        self,
        *,
        partial: bool = False,
        seconds: float = SECONDS,
        size: int | None = None,
        isolation: Isolation | None = None,
    ) -> None:
        self.partial, self.seconds = partial, seconds
        self._pool: Pool[Job, Verdict] = Pool(lambda: CodeWorker(isolation), size=size, name="code")

    def __call__(
        self,
        completions: Sequence[Any],
        tests: Sequence[Any],
        setup: Sequence[str | None] | None = None,
        prepare: Sequence[str | None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """One reward per completion."""
        nothing: list[str | None] = [None] * len(completions)
        columns = zip(tests, setup or nothing, prepare or nothing, strict=True)
        problems = [read_problem(*row) for row in columns]
        verdicts = self.verdicts([code_of(text_of(completion)) for completion in completions], problems)
        if log_metric is not None:
            for status, count in Counter(verdict.status for verdict in verdicts).items():
                log_metric(f"code/{status}", count / len(verdicts))
        return [self._reward(verdict) for verdict in verdicts]

    def verdicts(self, programs: Sequence[str | None], problems: Sequence[Problem]) -> list[Verdict]:
        """What becomes of each program; None for a program is one that was not written, and wrong."""
        written = [i for i, program in enumerate(programs) if program is not None]
        found = [Verdict("wrong", 0, len(problem.cases)) for problem in problems]
        jobs = (Job(programs[i] or "", problems[i], self.seconds, self.partial) for i in written)
        for i, verdict in zip(written, self._pool.map(jobs), strict=True):
            found[i] = verdict or Verdict("infra_error", 0, len(problems[i].cases))
        return found

    def _reward(self, verdict: Verdict) -> float | None:
        if verdict.status == "infra_error":
            return None
        return verdict.passed / verdict.cases if self.partial else float(verdict.status == "pass")

    def close(self) -> None:
        """End the sandboxes; they end with the program anyway."""
        self._pool.close()


_shared = CodeReward()  # it has no sandbox before it is asked


def code_reward(completions: Sequence[Any], tests: Sequence[Any], **columns: Any) -> list[float | None]:
    """TRL's reward function, ``CodeReward`` as it is by default: 1.0 for a program that passes its tests, else 0.0."""
    return _shared(completions, tests, **columns)
