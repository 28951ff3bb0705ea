"""The arms of a comparison and its conclusions: a table per measure and a verdict per pair of arms.

Conclusions are computed from the run folders; ``writer`` writes ``comparison.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troll.errors import InputError
from troll.lab.runs.folder import ABOUT, Comparison, Line, Run
from troll.lab.runs.statistics import column, compare, finite, interval, mean
from troll.trl.robust.fingerprint import bound_kind

# ---------------------------------------------------------------------- arms

ARMS: dict[str, dict[str, Any]] = {
    "troll": {"trust_region": "troll"},
    "clip": {"trust_region": "clip", "epsilon": 0.2},
    "clip-higher": {"trust_region": "clip", "epsilon": 0.2, "epsilon_high": 0.28},
    "gspo": {
        "trust_region": "clip",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "none": {"trust_region": "none"},
}
"""PPO's clip, DAPO's higher upper clip, GSPO's clip of the sequence's ratio, each with its authors' settings."""

OTHER_CLIPS = ("cispo", "sapo", "vespo")
"""Losses of TRL that bound or reweight the ratio differently."""


def arm_of(settings: Mapping[str, Any]) -> tuple[str, str]:
    """The arm of a run with these settings, and its label."""
    region, level = settings["trust_region"], settings.get("importance_sampling_level", "token")
    by_sequence = level == "sequence"
    if region == "none":
        return ("custom" if by_sequence else "none"), "no trust region" + (", sequence ratio" if by_sequence else "")
    if region == "troll":
        kind = bound_kind(settings)
        label = f"TROLL, KL ≤ {settings['kl_bound']:g}" if kind == "fixed" else f"TROLL, {kind} bound"
        return ("custom" if by_sequence else "troll"), label + (", sequence ratio" if by_sequence else "")
    if settings.get("loss_type") in OTHER_CLIPS:
        return "custom", f"TRL's {settings['loss_type']}"
    low, high = settings["epsilon"], settings.get("epsilon_high")
    high = None if high == low else high
    label = f"clip ±{low:g}" if high is None else f"clip −{low:g}, +{high:g}"
    label = label.replace("clip", "GSPO clip") if by_sequence else label
    for arm, given in ARMS.items():
        full = {"importance_sampling_level": "token", "epsilon_high": None} | given
        if full == {"trust_region": region, "importance_sampling_level": level, "epsilon": low, "epsilon_high": high}:
            return arm, label
    return "custom", label


def check_arms(arms: Sequence[str]) -> None:
    """Refuse unknown or repeated arms, and fewer than two."""
    for arm in arms:
        if arm not in ARMS:
            raise InputError(f"--arms has the unknown arm {arm!r}", f"Choose from {', '.join(ARMS)}")
        if arms.count(arm) > 1:
            raise InputError(f"--arms contains {arm} {arms.count(arm)} times", "Give every arm once")
    if len(arms) < 2:
        given = f"--arms {' '.join(arms)} names one arm" if arms else "--arms names no arm"
        raise InputError(
            f"{given}, but a comparison needs two", "Try --arms troll clip, or `troll train` for a single run"
        )


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuse repeated seeds and numbers that are not valid seeds."""
    for seed in seeds:
        if seeds.count(seed) > 1:
            raise InputError(
                f"--seeds contains the seed {seed} {seeds.count(seed)} times", "Give every seed once: --seeds 0 1 2"
            )
        if not 0 <= seed < 2**32:
            raise InputError(f"a seed must be an integer from 0 to 4294967295, got {seed}", "Try --seeds 0 1 2")
    if not seeds:
        raise InputError("--seeds names no seed", "Give at least one, better three: --seeds 0 1 2")


# ---------------------------------------------------------------------- conclusions

ROLLOUTS_AVERAGED = 3
"""Rollouts whose mean is the reward at the end of a run."""


@dataclass(frozen=True)
class Measure:
    """A number of every run, and whether arms are compared by it."""

    key: str
    label: str
    of: Callable[[Run], float | None]
    judged: bool = True
    higher_is_better: bool = True


def conclude(folder: Path) -> Line:
    """The contents of ``comparison.json`` with measures and verdicts from the finished runs; nothing is written.

    A seed counts only if every arm has a finished run with it; an arm without finished runs is left out. ``missing``
    names the runs that are not finished, ``comparisons`` is the number of verdicts.
    """
    about = Comparison.open(folder).about
    runs = {arm["arm"]: [_finished(folder / name) for name in arm["runs"]] for arm in about["arms"]}
    names = {arm["arm"]: arm["runs"] for arm in about["arms"]}
    first = next((run for of_arm in runs.values() for run in of_arm if run is not None), None)
    measures = [_conclude(measure, runs) for measure in _measures(about.get("jobs", 1))]
    comparisons = sum(len(measure["verdicts"]) for measure in measures)
    for measure in measures:
        for verdict in measure["verdicts"]:
            verdict["because"] += f"; one of {comparisons} comparisons, not corrected"
    return {
        **about,
        **({} if first is None else {key: first.about[key] for key in ("task", "model")}),
        "arms": [{**arm, "label": _label(runs[arm["arm"]], arm["label"])} for arm in about["arms"]],
        "missing": [name for arm in runs for name, run in zip(names[arm], runs[arm], strict=True) if run is None],
        "comparisons": comparisons,
        "measures": measures,
    }


def short_name(arm: str) -> str:
    """The name of an arm in a sentence."""
    return "TROLL" if arm == "troll" else arm


def _measures(jobs: int) -> tuple[Measure, ...]:
    """Time is compared only where runs did not share the machine."""
    end = f"last {ROLLOUTS_AVERAGED} rollouts"
    return (
        Measure("held_out_last", "held-out reward, end", lambda run: mean(_held_out(run)[-1:])),
        Measure("held_out_mean", "held-out reward, mean after the start", lambda run: mean(_held_out(run))),
        Measure("reward_last", f"sampled reward, {end}", lambda run: mean(_rewards(run)[-ROLLOUTS_AVERAGED:])),
        Measure("reward_mean", "sampled reward, mean of the run", lambda run: mean(_rewards(run))),
        Measure("kl_mean", "token KL before projection, mean", _kl, judged=False),
        Measure("entropy_last", f"entropy, {end}", _entropy, judged=False),
        Measure("seconds", "seconds", lambda run: finite(run.about["seconds"]), jobs == 1, higher_is_better=False),
    )


def _conclude(measure: Measure, runs: Mapping[str, Sequence[Run | None]]) -> Line:
    """One measure: its table, and the first arm against each other arm."""
    values = {arm: [None if run is None else measure.of(run) for run in of_arm] for arm, of_arm in runs.items()}
    present = [row for row in values.values() if any(x is not None for x in row)]
    common = [i for i, at in enumerate(zip(*present, strict=True)) if None not in at]
    kept = {arm: [x for i in common if (x := row[i]) is not None] for arm, row in values.items()}
    table, verdicts = [], []
    for arm, row in values.items():
        at = interval(kept[arm]) if kept[arm] else None
        spread = {"mean": at.mean, "low": at.low, "high": at.high} if at else dict.fromkeys(("mean", "low", "high"))
        table.append({"arm": arm, "values": row, **spread})
    a, *others = values
    for b in others if measure.judged else ():
        if kept[a] and kept[b]:
            verdict = compare(kept[a], kept[b], short_name(a), measure.higher_is_better)
            gap = verdict.difference
            ends = {"difference": gap.mean, "low": gap.low, "high": gap.high}
            verdicts.append({"a": a, "b": b, **ends, "says": verdict.says, "because": verdict.because})
    return {"key": measure.key, "label": measure.label, "judged": measure.judged, "table": table, "verdicts": verdicts}


def _finished(path: Path) -> Run | None:
    if not (path / ABOUT).is_file():
        return None
    run = Run.open(path)
    return run if run.about.get("status") == "finished" else None


def _label(runs: Sequence[Run | None], planned: str) -> str:
    """The label of the finished runs; the planned one if there are none."""
    return next((str(run.about.get("arm_label", planned)) for run in runs if run is not None), planned)


def _held_out(run: Run) -> list[float]:
    return column([line for line in run.evaluations() if line["step"] > 0], "eval_reward")


def _rewards(run: Run) -> list[float]:
    return column(run.metrics(), "reward")


def _kl(run: Run) -> float | None:
    return mean(column(run.metrics(), "troll/kl_before/mean"))


def _entropy(run: Run) -> float | None:
    """Mean over the updates on the last rollouts; the first line of a rollout has its reward."""
    lines = run.metrics()
    starts = [i for i, line in enumerate(lines) if line.get("reward") is not None]
    return mean(column(lines[starts[-ROLLOUTS_AVERAGED:][0] :], "entropy")) if starts else None
