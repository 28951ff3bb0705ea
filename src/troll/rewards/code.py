"""The code reward, a plain reward function for TRL: whether a program passes its tests in the sandbox."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from troll.errors import InputError
from troll.rewards.answers import text_of
from troll.rewards.judge import CPU_SECONDS, MEMORY, SECONDS, CodeWorker, Job, Verdict
from troll.rewards.problems import TOLERANCE, Problem, read_problem
from troll.rewards.sandbox import Isolation
from troll.rewards.workers.pool import Pool

_FENCE = re.compile(
    r"(?P<fence>`{3,}|~{3,})[^\n`]*\n(?P<code>.*?)(?:^[ \t]*(?P=fence)|(?P=fence)[ \t]*$|\Z)", re.MULTILINE | re.DOTALL
)
_READS = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\s*\(\s*0")


def code_of(text: str, names: Collection[str] = ()) -> str | None:
    """The program in a completion: a fenced block, or the whole text; None if it is empty.

    Of several blocks it is the last that defines one of the names; else the last that defines a function or a class or
    reads standard input; else the last that is Python; else the last.

    Args:
        text: the completion.
        names: functions and classes that the program should define.
    """
    text = text.replace("\r\n", "\n")
    blocks = [textwrap.dedent(match["code"]).strip("\n") for match in _FENCE.finditer(text)]
    if not blocks:
        return text.strip("\n") or None
    return max(enumerate(blocks), key=lambda block: (_rank(block[1], names), block[0]))[1] or None


def _rank(code: str, names: Collection[str]) -> int:
    """How much a block looks like the solution."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    defined = {node.name for node in tree.body if isinstance(node, kinds)}
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if (defined | stored) & {*names, "Solution"}:
        return 3
    return 2 if (defined and not names) or _READS.search(code) else 1 if tree.body else 0


class CodeReward:
    """1 for a program that passes all its cases, else 0; None, which TRL masks, if the sandbox failed.

    The columns ``tests`` and, optionally, ``setup``, ``prepare`` and ``given`` are the arguments of ``read_problem``.

    Args:
        partial: the reward is the share of cases that pass.
        seconds: wall time for each case, and for starting the program.
        cpu_seconds: the same in processor time.
        memory: of a program, in megabytes.
        tolerance: by which a number may differ from an expected float, relative to it.
        size: number of programs that run at the same time; default one per core.
        isolation: of the sandbox; default the best one that works here.
    """

    __name__ = "passes_tests"

    def __init__(
        self,
        *,
        partial: bool = False,
        seconds: float = SECONDS,
        cpu_seconds: float = CPU_SECONDS,
        memory: int = MEMORY,
        tolerance: float = TOLERANCE,
        size: int | None = None,
        isolation: Isolation | None = None,
    ) -> None:
        for name, value in (("seconds", seconds), ("cpu_seconds", cpu_seconds), ("memory", memory)):
            if not value > 0:
                raise InputError(f"{name} must be > 0, got {value}", f"Omit {name} for the default")
        if not 0 <= tolerance < 1:
            raise InputError(f"tolerance must be ≥ 0 and < 1, got {tolerance}", f"The default is {TOLERANCE}")
        self.partial, self.seconds, self.cpu_seconds, self.tolerance = partial, seconds, cpu_seconds, tolerance
        self._pool: Pool[Job, Verdict] = Pool(lambda: CodeWorker(isolation, int(memory)), size=size, name="code")

    def __call__(
        self,
        completions: Sequence[Any],
        tests: Sequence[Any],
        setup: Sequence[str | None] | None = None,
        prepare: Sequence[str | None] | None = None,
        given: Sequence[str | None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """One reward per completion."""
        empty: list[str | None] = [None] * len(completions)
        columns = zip(tests, setup or empty, prepare or empty, given or empty, strict=True)
        problems = [read_problem(*row) for row in columns]
        rows = zip(completions, problems, strict=True)
        programs = [code_of(text_of(completion), problem.functions) for completion, problem in rows]
        verdicts = self.verdicts(programs, problems)
        if log_metric is not None:
            for status, count in Counter(verdict.status for verdict in verdicts).items():
                log_metric(f"code/{status}", count / len(verdicts))
        return [self._reward(verdict) for verdict in verdicts]

    def verdicts(self, programs: Sequence[str | None], problems: Sequence[Problem]) -> list[Verdict]:
        """The verdict on each program; None stands for a completion without a program, which is wrong."""
        written = [i for i, program in enumerate(programs) if program is not None]
        verdicts = [Verdict("wrong", 0, len(problem.cases)) for problem in problems]
        limits = self.seconds, self.partial, self.cpu_seconds, self.tolerance
        jobs = (Job(programs[i] or "", problems[i], *limits) for i in written)
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
