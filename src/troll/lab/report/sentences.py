"""What the numbers of a run say, in a few plain sentences, and the headline numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from troll.lab.report.data import Missing, RunData, series
from troll.lab.report.rules import Finding, History, find
from troll.lab.runs.comparison import ROLLOUTS_AVERAGED
from troll.lab.runs.formatting import number, percent, plural, score


@dataclass(frozen=True)
class Card:
    """A headline number."""

    label: str
    value: str
    note: str = ""
    before: str = ""


@dataclass(frozen=True)
class Constraint:
    """What the trust region did over a run; None where it was not logged."""

    mean_share: float | None
    largest_share: float | None
    largest_before: float | None
    largest_after: float | None
    unconverged: float

    @classmethod
    def of(cls, run: RunData) -> Constraint:
        """From what was logged."""
        share = "troll/projected_fraction" if run.projects else "clip_ratio/region_mean"
        _, shares = series(run.metrics, share)
        _, before = series(run.metrics, "troll/kl_before/max")
        _, after = series(run.metrics, "troll/kl_after/max")
        _, unconverged = series(run.metrics, "troll/unconverged_tokens")

        def most(values: np.ndarray) -> float | None:
            return float(values.max()) if values.size else None

        return cls(
            float(shares.mean()) if shares.size else None,
            most(shares),
            most(before),
            most(after),
            float(unconverged.sum()),
        )


def within(value: float, bound: float) -> bool:
    """Whether a KL keeps a bound; both in the precision it was computed in."""
    return bool(np.float32(value) <= np.float32(bound))


def cards(run: RunData) -> list[Card]:
    """The headline numbers, as far as they are known."""
    found: list[Card] = []
    done = Constraint.of(run)
    try:
        _, rewards = run.series("reward")
    except Missing:
        pass
    else:
        first, last = float(rewards[0]), float(rewards[-ROLLOUTS_AVERAGED:].mean())
        note = f"first rollout, mean of the last {ROLLOUTS_AVERAGED}"
        if rewards.size <= ROLLOUTS_AVERAGED:
            last, note = float(rewards[-1]), "first and last rollout"
        if rewards.size == 1:
            found.append(Card("sampled reward", score(last), "first rollout"))
        else:
            found.append(Card("sampled reward", score(last), note, before=score(first)))
    steps, held_out = run.held_out()
    if held_out.size > 1:
        note = f"step {steps[0]:.0f} and step {steps[-1]:.0f}"
        found.append(Card("held-out reward", score(held_out[-1]), note, before=score(held_out[0])))
    elif held_out.size:
        found.append(Card("held-out reward", score(held_out[0]), f"step {steps[0]:.0f}"))
    if done.mean_share is not None and done.largest_share is not None:
        label = "tokens projected" if run.projects else "tokens clipped"
        found.append(Card(label, percent(done.mean_share), f"at most {percent(done.largest_share)} in one update"))
    if run.bound is not None and done.largest_after is not None:
        kept = within(done.largest_after, run.bound)
        note = (
            f"never above {number(run.bound)}" if kept else f"above the bound {number(run.bound)}: please report this"
        )
        found.append(Card("largest KL, projected", number(done.largest_after), note))
    elif done.largest_before is not None:
        note = "before projection; the bound adapts" if run.adapts else "nothing bounds it"
        found.append(Card("largest KL of a token", number(done.largest_before), note))
    return found


def warnings(run: RunData) -> list[Finding]:
    """Signs of trouble, as the rules find them in what was logged."""
    return find(History.of(run.metrics, run.evaluations, run.about.get("settings") or {}))


def sentences(run: RunData) -> list[str]:
    """What happened, from the numbers alone."""
    if not run.metrics:
        state = {"running": "The run has logged no update yet.", "failed": "The run failed before its first update."}
        return [state.get(str(run.about.get("status")), "No update was logged.")]
    return [*_learning(run), *_region(run)]


def _learning(run: RunData) -> list[str]:
    steps, held_out = run.held_out()
    if held_out.size < 2:
        return []
    first, last = float(held_out[0]), float(held_out[-1])
    n = int(steps[-1] - steps[0])
    if score(first) == score(last):
        return [f"Held-out reward is the same after {plural(n, 'update')}: {score(last)}."]
    verb = "rose" if last > first else "fell"
    return [f"Held-out reward {verb} from {score(first)} to {score(last)} in {plural(n, 'update')}."]


def _region(run: RunData) -> list[str]:
    done = Constraint.of(run)
    if done.largest_before == 0:
        return [
            "No token moved between sampling and update: each rollout serves one update, so no trust region could act. "
            "This run says nothing about the choice of trust region."
        ]
    if not run.projects:
        moved = f" the largest token KL was {number(done.largest_before)}" if done.largest_before is not None else ""
        if done.mean_share is None:
            return [f"Nothing constrained the update;{moved}."] if run.arm == "none" and moved else []
        if done.largest_share == 0:
            return ["No token was clipped: the run is the one that no trust region would have given."]
        tail = f";{moved}, which clipping does not bound." if moved else "."
        return [f"Clipping removed the gradient of {percent(done.mean_share)} of the tokens{tail}"]
    if done.largest_share is None or done.mean_share is None:
        return []
    if run.adapts and done.largest_share > 0:
        return [f"The projection acted on {percent(done.mean_share)} of the tokens, under a bound that adapts."]
    if run.bound is None:
        return []
    if done.largest_share == 0:
        return [
            f"No token left the region (largest KL {number(done.largest_before or 0)}, bound {number(run.bound)}): "
            "the projection changed nothing, and this is the run that no trust region would have given."
        ]
    said = [
        f"The projection acted on {percent(done.mean_share)} of the tokens: it brought the largest KL from "
        f"{number(done.largest_before or 0)} to {number(done.largest_after or 0)}"
        + (
            f", and no token ended above the bound of {number(run.bound)}."
            if done.largest_after is not None and within(done.largest_after, run.bound)
            else f"; the bound is {number(run.bound)}."
        )
    ]
    if done.mean_share > 0.1:
        said.append(
            "That is a lot: a lower learning rate or fewer updates per rollout would stay inside by themselves."
        )
    if done.unconverged:
        said.append(f"The solver stopped early for {plural(int(done.unconverged), 'token')}: please report this.")
    return said


def verdict(found: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """What was found, with both arms named: "TROLL is better than clip", "TROLL against clip: inconclusive"."""
    says = str(found["says"])
    first, second = (labels.get(found[key], str(found[key])) for key in ("a", "b"))
    if says in ("inconclusive", "no verdict"):
        return f"{first} against {second}: {says}"
    return says if " than " in says else f"{says} than {second}"


def conclusion(measures: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    """The verdicts on the first measure, as a sentence."""
    found = [verdict(x, labels) for measure in measures[:1] for x in measure.get("verdicts") or []]
    return f"{str(measures[0]['label']).capitalize()}: {'; '.join(found)}." if found else ""
