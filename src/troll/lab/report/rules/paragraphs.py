"""A run in paragraphs: what it was, what the reward did, what the trust region did, what is wrong, what to change."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from troll.lab.report.rules.all_rules import changes, find
from troll.lab.report.rules.finding import WARNING, Change, Finding
from troll.lab.report.rules.history import History, finite
from troll.lab.report.rules.reward import SMOOTH, STALLED, smoothed, stalled
from troll.lab.runs.folder import CONFIG, Line, Run
from troll.lab.runs.formatting import count, duration, number, percent, plural, score
from troll.lab.runs.listing import Entry, entry_of


@dataclass(frozen=True)
class Explanation:
    """A run in words."""

    entry: Entry
    what: list[str]
    reward: list[str]
    region: list[str]
    findings: list[Finding]
    changes: list[Change]
    commands: list[str]
    """To go on with the run, if it ended early, and to make it again with the first change."""

    def as_json(self) -> Line:
        """Every field."""
        return {
            "name": self.entry.name,
            "path": self.entry.path,
            "state": self.entry.state,
            "what": self.what,
            "reward": self.reward,
            "region": self.region,
            "findings": [finding.as_json() for finding in self.findings],
            "changes": [{"flags": change.flags, "why": change.why} for change in self.changes],
            "commands": self.commands,
        }


def explain(folder: Path) -> Explanation:
    """What the files of a run say; of one that is still going on, what they say now."""
    run = Run.open(folder)
    entry = entry_of(folder)
    if entry is None or entry.state == "broken":
        why = "it cannot be read" if entry is None else f"it cannot be read: {entry.why}"
        entry = entry or Entry(folder.name, str(folder), "run", "broken")
        return Explanation(entry, [f"{entry.name}: {why}."], [], [], [], [], [])
    about, history = run.about, History.read(run)
    findings = find(history)
    wanted = changes([x for x in findings if x.level == WARNING] or findings)
    return Explanation(
        entry,
        list(_what(about, history, entry)),
        list(_reward(history)),
        list(_region(history)),
        findings,
        wanted,
        list(_commands(folder, entry, wanted)),
    )


def _what(about: Line, history: History, entry: Entry) -> Iterator[str]:
    """What was trained and how, and how far it got."""
    task, model = about.get("task") or {}, about.get("model") or {}
    size = finite(model.get("parameters"))
    weights = f" ({count(size)} weights)" if size else ""
    details = [str(about.get("arm_label") or history.region)]
    for name, form in (
        ("learning_rate", "learning rate {:g}"),
        ("regression_coef", "α = {:g}"),
        ("updates_per_generation", "{:g} updates on each rollout"),
        ("num_generations", "{:g} completions of each prompt"),
    ):
        value = history.setting(name)
        if value is not None and (name != "regression_coef" or history.region == "troll"):
            text = form.format(value)
            details.append(text.replace("updates", "update") if text.startswith("1 ") else text)
    yield f"{model.get('name', 'a model')}{weights} on {task.get('name', 'a task')}: {', '.join(details)}."
    most = f" of {entry.max_steps:,}" if entry.max_steps else ""
    logged = [finite(lines[-1].get("seconds")) or 0.0 for lines in history.rollouts[-1:]]
    seconds = max([finite(about.get("seconds")) or 0.0, *logged])
    done = f"{entry.step or 0:,}{most} updates, {plural(len(history), 'rollout')}, {duration(seconds)}"
    yield {
        "finished": f"It is finished: {done}.",
        "running": f"It is still running: {done} so far.",
        "interrupted": f"It was interrupted: {done}.",
        "failed": f"It failed after {done}.",
        "killed": f"It ended without a word, as when it is killed or out of memory: {done}.",
    }[entry.state]
    if entry.why:
        yield f"The error: {entry.why.rstrip('.')}."


def _reward(history: History) -> Iterator[str]:
    """Start, highest, end, held-out, and whether it still rises."""
    reward, mean = history.reward, smoothed(history)
    if not np.isfinite(reward).any():
        yield "No reward was logged, so there is nothing to say about it."
    elif not np.isfinite(mean).any():
        yield f"Sampled reward {', '.join(score(x) for x in reward)}: too few rollouts to say more."
    else:
        best = int(np.nanargmax(mean))
        end = f"{score(mean[-1])} at the end"
        peak = f"{score(mean[best])} at its highest (up to update {history.ends(best)}), {end}"
        path = f"{end}, the highest" if best == len(mean) - 1 else peak
        yield f"Sampled reward {score(reward[0])} in the first rollout. Its mean over {SMOOTH} rollouts: {path}."
        yield _direction(history)
    held_out = [(x["step"], y) for x in history.evaluations if (y := finite(x.get("eval_reward"))) is not None]
    if not held_out:
        yield "No held-out reward was measured (--eval_strategy no, or it was not reached)."
        return
    path = " → ".join(f"{score(y)} (update {step})" for step, y in _thinned(held_out))
    yield f"Held-out reward {path}."


def _direction(history: History) -> str:
    rests, mean = stalled(history), smoothed(history)
    if len(mean) < SMOOTH + STALLED:
        return f"Whether it still rises cannot be said before {SMOOTH + STALLED} rollouts."
    if not rests[-1]:
        return "It was still rising: more updates may give more (--max_steps)."
    return "It no longer rises."


def _thinned(values: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """First, highest and last."""
    best = max(values, key=lambda pair: pair[1])
    return sorted({values[0], best, values[-1]})


def _region(history: History) -> Iterator[str]:
    """What the trust region did, and how far the network went."""
    if not len(history):
        yield "No update was logged."
        return
    reach, mean = history.most("troll/kl_before/max"), history.mean("troll/kl_before/mean")
    known = np.isfinite(reach).any()
    went = (
        f"The network went {number(float(np.nanmean(mean)))} nats per token from the old policy on average, and "
        f"{number(np.nanmax(reach))} at the most"
        if known and np.isfinite(mean).any()
        else ""
    )
    yield from {"troll": _projected, "clip": _clipped}.get(history.region, _nothing)(history)
    if history.setting("updates_per_generation") == 1:
        return
    if not went:
        yield "How far the network went was not logged (--measure_kl true)."
        return
    after = history.most("troll/kl_after/max")
    if history.region == "troll" and np.isfinite(after).any():
        bound = history.setting("kl_bound")
        within = f"; the bound is {number(bound)}" if bound is not None else ""
        yield f"{went}; after projection {number(np.nanmax(after))} at the most{within}."
    else:
        yield f"{went}, which nothing bounds."


def _projected(history: History) -> Iterator[str]:
    share = history.mean("troll/projected_fraction")
    if history.setting("updates_per_generation") == 1:
        yield "The trust region could not act: each rollout served one update."
    elif not np.isfinite(share).any():
        yield "How much was projected was not logged."
    elif np.nanmax(share) == 0:
        yield "No token left the region: the projection changed nothing."
    else:
        at = history.begins(int(np.nanargmax(share)))
        yield (
            f"{percent(float(np.nanmean(share)))} of the tokens were projected, most in the rollout of update {at} "
            f"({percent(np.nanmax(share))})."
        )


def _clipped(history: History) -> Iterator[str]:
    share = history.mean("clip_ratio/region_mean")
    if history.setting("updates_per_generation") == 1:
        yield "The clip could not act: each rollout served one update."
    elif not np.isfinite(share).any():
        yield "How much was clipped was not logged."
    elif np.nanmax(share) == 0:
        yield "No token was clipped."
    else:
        yield f"The clip removed the gradient of {percent(float(np.nanmean(share)))} of the tokens."


def _nothing(history: History) -> Iterator[str]:
    yield "Nothing kept the updates close to the old policy."


def _commands(folder: Path, entry: Entry, wanted: list[Change]) -> Iterator[str]:
    if entry.resumable_from is not None:
        yield f"troll train --resume {shlex.quote(str(folder))}"
    first = next((change.flags for change in wanted if change.flags), None)
    if first is not None and (folder / CONFIG).is_file():
        yield f"troll train --config {shlex.quote(str(folder / CONFIG))} {first}"
