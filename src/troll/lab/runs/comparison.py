"""What a comparison says: a table per measure and verdicts, from the folders of its runs alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from troll.errors import InputError
from troll.lab.runs.arms import ARMS
from troll.lab.runs.folder import ABOUT, COMPARISON, FORMAT, Comparison, Line, Run, write_json
from troll.lab.runs.statistics import compare, interval
from troll.lab.runs.summary import ROLLOUTS_AVERAGED


@dataclass(frozen=True)
class Measure:
    """A number that every run has, and whether arms are judged by it."""

    key: str
    label: str
    of: Callable[[Run], float | None]
    judged: bool = True
    higher_is_better: bool = True


def check_arms(arms: Sequence[str]) -> None:
    """Refuse arms that do not exist, that are there twice, or that are too few to compare."""
    for arm in arms:
        if arm not in ARMS:
            raise InputError(f"the arm {arm!r}", " or ".join(ARMS), "--arms troll clip none, the default")
        if arms.count(arm) > 1:
            raise InputError(f"the arm {arm} {arms.count(arm)} times", "every arm once", f"{arm} once")
    if len(arms) < 2:
        given = f"--arms {' '.join(arms)}" if arms else "--arms without an arm"
        raise InputError(given, "at least two arms to compare", "--arms troll clip; or `troll train` for a single run")


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuse seeds that are there twice or that a random generator does not take."""
    for seed in seeds:
        if seeds.count(seed) > 1:
            raise InputError(f"the seed {seed} {seeds.count(seed)} times", "every seed once", "--seeds 0 1 2")
        if not 0 <= seed < 2**32:
            raise InputError(f"the seed {seed}", "a whole number from 0 to 4294967295", "--seeds 0 1 2")
    if not seeds:
        raise InputError("--seeds without a seed", "at least one, better three", "--seeds 0 1 2")


def begin(
    folder: Path, labels: Mapping[str, str], seeds: Sequence[int], task: Line, model: Line, **more: bool | int | str
) -> None:
    """Write down in a folder what will be compared: arm → label, and the seeds of each."""
    arms = [{"arm": arm, "label": label, "runs": [f"{arm}-{seed}" for seed in seeds]} for arm, label in labels.items()]
    about = {"format": FORMAT, "name": folder.name, "task": task, "model": model, "seeds": list(seeds), "arms": arms}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / COMPARISON, {**about, **more, "measures": []})


def conclude(folder: Path) -> Line:
    """The comparison in a folder with what follows from its runs; nothing is written.

    Only finished runs count, and only seeds with which every arm has one; an arm without any is left out of this.
    ``missing`` names the runs that are not there, ``comparisons`` says how many verdicts were sought.
    """
    about = Comparison.open(folder).about
    found = {arm["arm"]: [_finished(folder / name) for name in arm["runs"]] for arm in about["arms"]}
    names = {arm["arm"]: arm["runs"] for arm in about["arms"]}
    first = next((run for runs in found.values() for run in runs if run is not None), None)
    measures = [_conclude(measure, found) for measure in _measures(about.get("jobs", 1))]
    comparisons = sum(len(measure["verdicts"]) for measure in measures)
    for measure in measures:
        for verdict in measure["verdicts"]:
            verdict["because"] += f"; one of {comparisons} comparisons, not corrected"
    return {
        **about,
        **({} if first is None else {key: first.about[key] for key in ("task", "model")}),
        "arms": [{**arm, "label": _label(found[arm["arm"]], arm["label"])} for arm in about["arms"]],
        "missing": [name for arm, runs in found.items() for name, run in zip(names[arm], runs, strict=True) if not run],
        "comparisons": comparisons,
        "measures": measures,
    }


def short_name(arm: str) -> str:
    """What to call an arm in a sentence."""
    return "TROLL" if arm == "troll" else arm


def _measures(jobs: int) -> tuple[Measure, ...]:
    """Time is judged only where runs did not share the machine."""
    end = f"last {ROLLOUTS_AVERAGED} rollouts"
    return (
        Measure("held_out_last", "held-out reward, end", lambda run: _last(_held_out(run))),
        Measure("held_out_mean", "held-out reward, mean after the start", lambda run: _mean(_held_out(run))),
        Measure("reward_last", f"sampled reward, {end}", lambda run: _mean(_rewards(run)[-ROLLOUTS_AVERAGED:])),
        Measure("reward_mean", "sampled reward, mean of the run", lambda run: _mean(_rewards(run))),
        Measure("kl_mean", "token KL before projection, mean", _kl, judged=False),
        Measure("entropy_last", f"entropy, {end}", _entropy, judged=False),
        Measure("seconds", "seconds", lambda run: _number(run.about["seconds"]), jobs == 1, higher_is_better=False),
    )


def _conclude(measure: Measure, found: Mapping[str, Sequence[Run | None]]) -> Line:
    """One measure: its table, and the first arm against each other one."""
    values = {arm: [None if run is None else measure.of(run) for run in runs] for arm, runs in found.items()}
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
    """As the runs were labelled; as it was planned while there is none."""
    return next((str(run.about.get("arm_label", planned)) for run in runs if run is not None), planned)


def _number(value: object) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None  # type: ignore[arg-type]


def _column(lines: Sequence[Line], key: str) -> list[float]:
    return [x for line in lines if (x := _number(line.get(key))) is not None]


def _held_out(run: Run) -> list[float]:
    return _column([line for line in run.evaluations() if line["step"] > 0], "eval_reward")


def _rewards(run: Run) -> list[float]:
    return _column(run.metrics(), "reward")


def _kl(run: Run) -> float | None:
    return _mean(_column(run.metrics(), "troll/kl_before/mean"))


def _entropy(run: Run) -> float | None:
    """Over the updates on the last rollouts, each of which begins with a line that has its reward."""
    lines = run.metrics()
    starts = [i for i, line in enumerate(lines) if line.get("reward") is not None]
    return _mean(_column(lines[starts[-ROLLOUTS_AVERAGED:][0] :], "entropy")) if starts else None


def _last(values: Sequence[float]) -> float | None:
    return values[-1] if values else None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
