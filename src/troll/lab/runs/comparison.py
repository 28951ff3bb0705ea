"""Conclusions of a comparison: a table per measure and a verdict per pair of arms, computed from the run folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from troll.errors import InputError
from troll.lab.runs.arms import ARMS
from troll.lab.runs.folder import ABOUT, COMPARISON, FORMAT, Comparison, Line, Run
from troll.lab.runs.statistics import column, compare, finite, interval, mean
from troll.lab.runs.writer import write_json

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


def begin(
    folder: Path, labels: Mapping[str, str], seeds: Sequence[int], task: Line, model: Line, **more: bool | int | str
) -> None:
    """Write ``comparison.json`` without measures: the label of every arm, and the seeds."""
    arms = [{"arm": arm, "label": label, "runs": [f"{arm}-{seed}" for seed in seeds]} for arm, label in labels.items()]
    about = {"format": FORMAT, "name": folder.name, "task": task, "model": model, "seeds": list(seeds), "arms": arms}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / COMPARISON, {**about, **more, "measures": []})


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
