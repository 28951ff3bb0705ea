"""The rules: conditions on the log of a run that mean trouble, and what to change.

Only the rules judge a run. The console, the report and ``troll explain`` show their findings and state facts besides.
``docs/explain.md`` lists the rules. Nothing here needs torch or a trainer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from troll.lab.report.rules import health, learning, trust_region
from troll.lab.report.rules.history import NOTE, WARNING, Change, Finding, History, Rule
from troll.lab.runs.folder import WARNINGS, Line, Run, is_evaluation
from troll.lab.runs.writer import append_line

__all__ = [
    "NOTE",
    "RULES",
    "WARNING",
    "Change",
    "Finding",
    "History",
    "Rule",
    "RuleMonitor",
    "Unchecked",
    "changes",
    "find",
    "no_findings",
    "unchecked",
]

RULES: tuple[Rule, ...] = (
    *(health.skipped, health.unscored, health.infra, health.unconverged, trust_region.bound_exceeded),
    *(trust_region.one_update, learning.reward_collapse, learning.no_signal, learning.flat),
    *(health.cut, health.sampler, trust_region.projected, trust_region.far, learning.entropy_collapse),
    *(trust_region.regression, trust_region.clipped, trust_region.kept_mass, trust_region.lost_mass),
    *(learning.held_out_gap, health.spikes, learning.settled, learning.solved, trust_region.idle),
)
"""In the order in which to fix things: broken parts, what prevents learning, what slows it down, notes."""


@dataclass(frozen=True)
class Unchecked:
    """Rules that could not be checked, and what the log lacks."""

    rules: tuple[Rule, ...]
    why: str

    def __str__(self) -> str:
        titles = "all rules" if self.rules == RULES else ", ".join(rule.title for rule in self.rules)
        return f"{titles[:1].upper()}{titles[1:]}: {self.why}"

    def as_json(self) -> Line:
        """The names of the rules, and the reason."""
        return {"rules": [rule.name for rule in self.rules], "why": self.why}


def find(history: History) -> list[Finding]:
    """The findings of all rules, warnings before notes."""
    findings = [x for x in (rule(history) for rule in RULES) if x is not None]
    return sorted(findings, key=lambda x: x.level, reverse=True)


def unchecked(history: History) -> list[Unchecked]:
    """The rules for which the log has too few rollouts or lacks a metric, those with the same reason together."""
    if not len(history):
        return [Unchecked(RULES, "no update was logged")]
    by_reason: dict[str, list[Rule]] = {}
    for rule in RULES:
        if (why := rule.lacks(history)) and rule(history) is None:
            by_reason.setdefault(why, []).append(rule)
    by_length = sorted(by_reason.items(), key=lambda item: item[1][0].rollouts)
    return [Unchecked(tuple(rules), why) for why, rules in by_length]


def no_findings(missing: Sequence[Unchecked]) -> str:
    """The sentence in place of findings, given the rules that could not be checked."""
    if any(x.rules == RULES for x in missing):
        return "No rule could be checked."
    return "The rules that could be checked found no problem." if missing else "No rule found a problem."


def changes(findings: Collection[Finding]) -> list[Change]:
    """The suggested changes, the largest effect first; of changes to the same flag, the first."""
    chosen: dict[str, Change] = {}
    for finding in findings:
        for change in finding.changes:
            chosen.setdefault(change.flags.split(" ")[0] or change.why, change)
    return list(chosen.values())


class RuleMonitor:
    """The rules during training: each finding is returned once, when it first applies, and written to the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begin(0)

    def begin(self, step: int) -> None:
        """Continue after update ``step``: lines and warnings up to there are read from the folder."""
        run = Run(self.folder)
        self._about = run.about
        self._lines = {x["step"]: x for x in run.metrics() if x["step"] <= step}
        self._evaluations = {x["step"]: x for x in run.evaluations() if x["step"] <= step}
        self._known = {x["name"] for x in run.warnings() if x["said"] <= step}

    def add(self, line: Line) -> None:
        """Add a logged line of training or evaluation."""
        (self._evaluations if is_evaluation(line) else self._lines)[line["step"]] = line

    def new(self) -> list[Finding]:
        """Findings not returned before; call it when the last update on a rollout has been logged."""
        history = History.of_run(self._about, list(self._lines.values()), list(self._evaluations.values()))
        findings = [x for x in find(history) if x.name not in self._known]
        for finding in findings:
            self._known.add(finding.name)
            append_line(self.folder / WARNINGS, finding.as_json())
        return findings
