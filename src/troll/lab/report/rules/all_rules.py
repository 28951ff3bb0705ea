"""All rules, in the order of what to mend first, and what they find in a run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from troll.lab.report.rules import health as upkeep
from troll.lab.report.rules import learning
from troll.lab.report.rules import trust_region as region
from troll.lab.report.rules.finding import Change, Finding
from troll.lab.report.rules.history import History
from troll.lab.runs.folder import WARNINGS, Line, Run
from troll.lab.runs.writer import append_line

RULES: tuple[Callable[[History], Finding | None], ...] = (
    *(upkeep.skipped, upkeep.unscored, upkeep.infra, upkeep.unconverged),
    *(region.one_update, learning.reward_collapse, learning.no_signal, learning.flat, upkeep.cut, upkeep.sampler),
    *(region.projected, region.far, learning.entropy_collapse, region.regression, region.clipped),
    *(region.kept_mass, region.lost_mass, learning.held_out_gap, upkeep.spikes),
    *(learning.settled, learning.solved, region.idle),
)
"""Broken parts, then what keeps a run from learning, then what slows it down; within each as docs/settings.md."""


def find(history: History) -> list[Finding]:
    """What every rule has to say, each once; warnings before notes."""
    found = [x for x in (rule(history) for rule in RULES) if x is not None]
    return sorted(found, key=lambda x: x.level, reverse=True)


def changes(findings: Collection[Finding]) -> list[Change]:
    """What to do otherwise, the greatest effect first; of changes to the same flag, the first."""
    chosen: dict[str, Change] = {}
    for finding in findings:
        for change in finding.changes:
            chosen.setdefault(change.flags.split(" ")[0] or change.why, change)
    return list(chosen.values())


class Watch:
    """Rules over a run that goes on: each speaks once, when it first applies, and is written down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begin(0)

    def begin(self, step: int) -> None:
        """Go on after an update: what was logged and said up to there is known."""
        run = Run(self.folder)
        self._settings = run.about.get("settings") or {}
        self._lines = {x["step"]: x for x in run.metrics() if x["step"] <= step}
        self._evaluations = {x["step"]: x for x in run.evaluations() if x["step"] <= step}
        self._known = {x["name"] for x in run.warnings() if x["said"] <= step}

    def add(self, line: Line) -> None:
        """A line of training or of evaluation."""
        is_evaluation = any(name.startswith("eval_") for name in line)
        (self._evaluations if is_evaluation else self._lines)[line["step"]] = line

    def new(self) -> list[Finding]:
        """What has not been said; to be asked when the last update on a rollout has been logged."""
        history = History.of(list(self._lines.values()), list(self._evaluations.values()), self._settings)
        found = [x for x in find(history) if x.name not in self._known]
        for finding in found:
            self._known.add(finding.name)
            append_line(self.folder / WARNINGS, finding.as_json())
        return found
