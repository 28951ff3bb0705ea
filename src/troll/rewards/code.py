"""The code reward, a plain reward function for TRL: whether a program passes its tests in the sandbox."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from troll.rewards.answers import text_of
from troll.rewards.judge import SECONDS, CodeWorker, Job, Verdict
from troll.rewards.problems import Problem, read_problem
from troll.rewards.sandbox import Isolation
from troll.rewards.workers.pool import Pool


def code_of(text: str) -> str | None:
    """The program in a completion: its last fenced block, or the whole text; None if it is empty."""
    blocks = re.findall(r"```(?:[a-zA-Z0-9+]*)\n(.*?)(?:```|\Z)", text, flags=re.DOTALL)
    return (blocks[-1] if blocks else text).strip("\n") or None


class CodeReward:
    """1 for a program that passes all its cases, else 0; None, which TRL masks, if the sandbox failed.

    The columns ``tests`` and, optionally, ``setup`` and ``prepare`` are the arguments of ``read_problem``.

    Args:
        partial: the reward is the share of cases that pass.
        seconds: wall time for a program and all its cases.
        size: number of programs that run at the same time; default one per core.
        isolation: of the sandbox; default the best one that works here.
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
        empty: list[str | None] = [None] * len(completions)
        columns = zip(tests, setup or empty, prepare or empty, strict=True)
        problems = [read_problem(*row) for row in columns]
        verdicts = self.verdicts([code_of(text_of(completion)) for completion in completions], problems)
        if log_metric is not None:
            for status, count in Counter(verdict.status for verdict in verdicts).items():
                log_metric(f"code/{status}", count / len(verdicts))
        return [self._reward(verdict) for verdict in verdicts]

    def verdicts(self, programs: Sequence[str | None], problems: Sequence[Problem]) -> list[Verdict]:
        """The verdict on each program; None stands for a completion without a program, which is wrong."""
        written = [i for i, program in enumerate(programs) if program is not None]
        verdicts = [Verdict("wrong", 0, len(problem.cases)) for problem in problems]
        jobs = (Job(programs[i] or "", problems[i], self.seconds, self.partial) for i in written)
        for i, verdict in zip(written, self._pool.map(jobs), strict=True):
            verdicts[i] = verdict or Verdict("infra_error", 0, len(problems[i].cases))
        return verdicts

    def _reward(self, verdict: Verdict) -> float | None:
        if verdict.status == "infra_error":
            return None
        return verdict.passed / verdict.cases if self.partial else float(verdict.status == "pass")

    def close(self) -> None:
        """End the sandboxes. They also end with the interpreter."""
        self._pool.close()


_shared = CodeReward()  # starts no sandbox before its first use


def code_reward(completions: Sequence[Any], tests: Sequence[Any], **columns: Any) -> list[float | None]:
    """TRL's reward function, ``CodeReward`` with its defaults: 1.0 for a program that passes its tests, else 0.0."""
    return _shared(completions, tests, **columns)
