"""The sentences about a run: every fact is worded once, for the console, the report and ``troll explain``.

The narrator states facts. Whether a fact is a problem is decided by ``troll.lab.report.rules`` alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from troll.lab.report.rules import WARNING, Change, Finding, History, Unchecked, changes, find, unchecked
from troll.lab.report.rules.history import Array
from troll.lab.report.rules.learning import SMOOTH, STALLED, fallen, near_top, smoothed, stalled
from troll.lab.runs.folder import CONFIG, Line, Run
from troll.lab.runs.formatting import count, duration, number, percent, plural, score
from troll.lab.runs.listing import Entry, entry_of
from troll.lab.runs.statistics import column, finite


@dataclass(frozen=True)
class Explanation:
    """A run in paragraphs, with the findings of the rules."""

    entry: Entry
    what: list[str]
    reward: list[str]
    region: list[str]
    findings: list[Finding]
    unchecked: list[Unchecked]
    changes: list[Change]
    commands: list[str]
    """The commands that resume the run, if it ended early, and that repeat it with the first change."""

    def as_json(self) -> Line:
        """Every field, for JSON."""
        return {
            "name": self.entry.name,
            "path": self.entry.path,
            "state": self.entry.state,
            "what": self.what,
            "reward": self.reward,
            "region": self.region,
            "findings": [finding.as_json() for finding in self.findings],
            "unchecked": [x.as_json() for x in self.unchecked],
            "changes": [{"flags": change.flags, "why": change.why} for change in self.changes],
            "commands": self.commands,
        }


def explain(folder: Path) -> Explanation:
    """The explanation of a run in any state, from its files."""
    run = Run.open(folder)
    entry = entry_of(folder)
    if entry is None or entry.state == "broken":
        reason = "it cannot be read" if entry is None else f"it cannot be read: {entry.why}"
        entry = entry or Entry(folder.name, str(folder), "run", "broken")
        return Explanation(entry, [f"{entry.name}: {reason}."], [], [], [], [], [], [])
    about, history = run.about, History.read(run)
    findings = find(history)
    suggested = changes([x for x in findings if x.level == WARNING] or findings)
    return Explanation(
        entry,
        [setup(about, history), *progress(entry, about, history)],
        [*sampled_reward(history, finished=entry.state == "finished"), *held_out_reward(history)],
        trust_region(history),
        findings,
        unchecked(history),
        suggested,
        list(_commands(folder, entry, suggested)),
    )


def conclusion(run: Run) -> list[str]:
    """The lines that a finished run prints: rewards, trust region, and the findings of the rules."""
    history = History.read(run)
    held_out = held_out_reward(history) if history.has("eval_reward") else []
    findings = [finding.line() for finding in find(history)]
    return [*sampled_reward(history), *held_out, *trust_region(history), *findings]


def lede(about: Line, history: History) -> list[str]:
    """The first sentences of the report: the held-out reward and the trust region."""
    if not len(history):
        running = about.get("status") == "running"
        return ["The run has logged no update yet." if running else "No update was logged."]
    return [*(held_out_reward(history) if history.has("eval_reward") else []), *trust_region(history)]


# ---------------------------------------------------------------------- what was trained, and how far it got


def setup(about: Line, history: History) -> str:
    """Model, task, trust region and the settings that matter most."""
    task, model = about.get("task") or {}, about.get("model") or {}
    size = finite(model.get("parameters"))
    details = [
        str(about.get("arm_label") or _REGION.get(str(history.settings.get("trust_region")), "unknown trust region"))
    ]
    for name, form in (
        ("learning_rate", "learning rate {:g}"),
        ("regression_coef", "α = {:g}"),
        ("updates_per_generation", "{:g} updates per rollout"),
        ("num_generations", "{:g} completions per prompt"),
    ):
        value = history.setting(name)
        if value is not None and (name != "regression_coef" or history.region == "troll"):
            text = form.format(value)
            details.append(text.replace("updates", "update") if text.startswith("1 ") else text)
    parameters = f" ({count(size)} parameters)" if size else ""
    names = (model.get("name") or "unknown model", task.get("name") or "unknown task")
    return f"{names[0]}{parameters} on {names[1]}: {', '.join(details)}."


_REGION = {"troll": "TROLL", "clip": "clip", "none": "no trust region"}


def progress(entry: Entry, about: Line, history: History) -> Iterator[str]:
    """Status, updates, rollouts, time, and the error if there is one."""
    most = f" of {entry.max_steps:,}" if entry.max_steps else ""
    logged = [finite(lines[-1].get("seconds")) or 0.0 for lines in history.rollouts[-1:]]
    seconds = max([finite(about.get("seconds")) or 0.0, *logged])
    done = f"{entry.step or 0:,}{most} updates, {plural(len(history), 'rollout')}, {duration(seconds)}"
    yield {
        "finished": f"Finished: {done}.",
        "running": f"Still running: {done} so far.",
        "interrupted": f"Interrupted: {done}.",
        "failed": f"Failed after {done}.",
        "killed": f"Ended without a message, as when killed or out of memory: {done}.",
    }[entry.state]
    if entry.why:
        yield f"The error: {entry.why.rstrip('.')}."


# ---------------------------------------------------------------------- reward


def sampled_reward(history: History, finished: bool = True) -> list[str]:
    """The reward of the first rollout, the highest and the last mean, and the trend."""
    reward, mean = history.reward, smoothed(history)
    known = np.isfinite(reward)
    if not known.any():
        return ["No reward was logged."]
    gaps = [] if known.all() else [f"{int((~known).sum())} of {plural(len(reward), 'rollout')} logged no reward."]
    at = np.flatnonzero(np.isfinite(mean))
    if not at.size:
        values = ", ".join(score(x) for x in reward[known])
        return [f"Sampled reward {values}: too few rollouts for a trend.", *gaps]
    best, last = int(np.nanargmax(mean)), int(at[-1])
    end = f"{score(mean[last])} {'at the end' if last == len(mean) - 1 else f'(update {history.ends(last)}), the last'}"
    peak = f"{score(mean[best])} at its highest (update {history.ends(best)}), {end}"
    path = f"{end}, the highest" if best == last else peak
    first = int(np.flatnonzero(known)[0])
    where = "in the first rollout" if first == 0 else f"in the rollout of update {history.begins(first)}"
    return [
        f"Sampled reward {score(reward[first])} {where}; mean over {SMOOTH} rollouts: {path}.",
        _trend(history, best, last, finished),
        *gaps,
    ]


def _trend(history: History, best: int, last: int, finished: bool) -> str:
    """Whether the reward fell, rose or plateaued up to the rollout ``last``; its highest mean is that of ``best``."""
    if fallen(history)[last]:
        return f"The reward has fallen since update {history.ends(best)}."
    if len(history) < SMOOTH + STALLED:
        return f"A trend needs {SMOOTH + STALLED} rollouts, the run has {len(history)}."
    if stalled(history)[last]:
        return f"The reward has plateaued: the last {STALLED} rollouts brought no clearly higher mean."
    more = finished and not near_top(history)[last]
    return f"The reward rose in the last {STALLED} rollouts{': more updates may help (--max_steps)' if more else ''}."


def held_out_reward(history: History) -> list[str]:
    """First, highest and last held-out reward."""
    values = [(x["step"], y) for x in history.evaluations if (y := finite(x.get("eval_reward"))) is not None]
    if not values:
        return ["No held-out reward was logged: evaluation is off (--eval_strategy no) or has not run yet."]
    shown = sorted({values[0], max(values, key=lambda pair: pair[1]), values[-1]})
    return [f"Held-out reward {' → '.join(f'{score(y)} (update {step})' for step, y in shown)}."]


# ---------------------------------------------------------------------- trust region


def trust_region(history: History) -> list[str]:
    """The share of constrained tokens, and the distance of the network from the old policy."""
    if not len(history):
        return ["No update was logged."]
    if history.updates == 1:
        actor = _ACTOR.get(history.region)
        why = "each rollout is used for one update"
        return [f"{actor} could not act: {why}." if actor else f"Nothing constrained the updates; {why}."]
    return [_constrained(history), _distance(history)]


_ACTOR = {"troll": "The trust region", "clip": "The clip"}


def _constrained(history: History) -> str:
    if history.region not in _ACTOR:
        return "Nothing constrained the updates."
    projects = history.region == "troll"
    share = history.mean("troll/projected_fraction" if projects else "clip_ratio/region_mean")
    if not np.isfinite(share).any():
        return f"The share of {'projected' if projects else 'clipped'} tokens was not logged."
    if np.nanmax(share) == 0:
        return f"No token was {'projected' if projects else 'clipped'}: the run is the same as without a trust region."
    if not projects:
        return f"The clip removed the gradient of {percent(float(np.nanmean(share)))} of the tokens."
    first = history.begins(int(np.nanargmax(share)))
    return (
        f"{percent(float(np.nanmean(share)))} of the tokens were projected, most in the rollout of update {first} "
        f"({percent(np.nanmax(share))})."
    )


def _distance(history: History) -> str:
    largest, mean = history.most("troll/kl_before/max"), history.mean("troll/kl_before/mean")
    if not np.isfinite(largest).any() or not np.isfinite(mean).any():
        return "The token KL was not logged (--measure_kl true)."
    text = f"Token KL to the old policy: mean {number(float(np.nanmean(mean)))}, largest {number(np.nanmax(largest))}"
    if history.region != "troll":
        return f"{text}, without a bound."
    after, bound = history.most("troll/kl_after/max"), history.setting("kl_bound")
    projected = f", after projection {number(np.nanmax(after))}" if np.isfinite(after).any() else ""
    limit = (
        "" if bound is None else f"; the bound {'adapts, starting from' if history.adapts else 'is'} {number(bound)}"
    )
    return f"{text}{projected}{limit}."


# ---------------------------------------------------------------------- cards of the report


@dataclass(frozen=True)
class Card:
    """A headline number."""

    label: str
    value: str
    note: str = ""
    before: str = ""


def cards(history: History) -> list[Card]:
    """The headline numbers that were logged."""
    shown: list[Card] = []
    rewards = history.reward[np.isfinite(history.reward)]
    if rewards.size == 1:
        shown.append(Card("sampled reward", score(float(rewards[0])), "first rollout"))
    elif rewards.size:
        few = rewards.size <= SMOOTH
        last = float(rewards[-1] if few else rewards[-SMOOTH:].mean())
        note = "first and last rollout" if few else f"first rollout, mean of the last {SMOOTH}"
        shown.append(Card("sampled reward", score(last), note, before=score(float(rewards[0]))))
    held_out = [(x["step"], y) for x in history.evaluations if (y := finite(x.get("eval_reward"))) is not None]
    if len(held_out) > 1:
        (first, before), (last_step, value) = held_out[0], held_out[-1]
        shown.append(Card("held-out reward", score(value), f"update {first} and update {last_step}", score(before)))
    elif held_out:
        shown.append(Card("held-out reward", score(held_out[0][1]), f"update {held_out[0][0]}"))
    projects = history.region == "troll"
    name = "troll/projected_fraction" if projects else "clip_ratio/region_mean"
    shares = _logged(history, name)
    if shares.size:
        label = "tokens projected" if projects else "tokens clipped"
        note = f"at most {percent(float(shares.max()))} in one {'rollout' if history.engine == 'verl' else 'update'}"
        shown.append(Card(label, percent(float(np.nanmean(history.mean(name)))), note))  # as in the sentence
    before_max, after_max = (_logged(history, f"troll/kl_{when}/max") for when in ("before", "after"))
    if history.bound is not None and after_max.size:
        note = f"the bound is {number(history.bound)}"
        shown.append(Card("largest KL after projection", number(float(after_max.max())), note))
    elif before_max.size:
        note = "before projection; the bound adapts" if history.adapts else "without a bound"
        shown.append(Card("largest token KL", number(float(before_max.max())), note))
    return shown


def _logged(history: History, name: str) -> Array:
    return np.array(column((line for lines in history.rollouts for line in lines), name), dtype=np.float64)


# ---------------------------------------------------------------------- comparisons


def verdict(pair: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """A verdict with both arms: "TROLL is better than clip", "TROLL against clip: inconclusive"."""
    says = str(pair["says"])
    first, second = (labels.get(pair[key], str(pair[key])) for key in ("a", "b"))
    if says in ("inconclusive", "no verdict"):
        return f"{first} against {second}: {says}"
    return says if " than " in says else f"{says} than {second}"


def verdicts(measures: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    """The verdicts on the first measure, as a sentence."""
    shown = [verdict(x, labels) for measure in measures[:1] for x in measure.get("verdicts") or []]
    return f"{str(measures[0]['label']).capitalize()}: {'; '.join(shown)}." if shown else ""


def _commands(folder: Path, entry: Entry, suggested: Sequence[Change]) -> Iterator[str]:
    if entry.resumable_from is not None:
        yield f"troll train --resume {shlex.quote(str(folder))}"
    first = next((change.flags for change in suggested if change.flags), None)
    if first is not None and (folder / CONFIG).is_file():
        yield f"troll train --config {shlex.quote(str(folder / CONFIG))} {first}"
