"""What a run amounts to, and what may be said of several of them.

A measure is a function of one result line (`results.line_of`). Lines are told apart by their labels on the axes of
their study; lines that differ in nothing but the seed are one cell, and its interval over seeds is Student's. Two cells
are compared with Student's interval and a bootstrap, seed by seed if the runs of a seed began with the same rollout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from troll.lab.runs.arms import ARMS
from troll.lab.runs.folder import Line
from troll.lab.runs.statistics import Interval, compare, interval, resampled, t_quantile

Measure = Callable[[Line], float | None]
SEED = "seed"
RESAMPLES = 2000
FEWEST = 3
"""Seeds for an interval: Student's for two is 9 times as wide as their distance."""
GOOD = 0.9
"""A setting is good if it reaches this share of the best."""


def planned(line: Line) -> int:
    """How many rollouts the run was to make; a run that has not ended says nothing."""
    name = f"{line['study']}/{line['name']}"
    if line["status"] not in ("finished", "failed"):
        raise ValueError(f"{name} is {line['status']}: only a run that finished or failed has a result; let it go on")
    missing = {"max_steps", "updates_per_generation"} - line["flags"].keys()
    if missing:
        raise ValueError(f"{name}: the study does not set {', '.join(sorted(missing))}, which say how long a run is")
    rollouts = -(-int(line["flags"]["max_steps"]) // int(line["flags"]["updates_per_generation"]))
    made = len(line["rollouts"].get("reward", []))
    if made > rollouts or (made < rollouts and line["status"] == "finished"):
        raise ValueError(f"{name} is {line['status']} with {made} rollouts, and {rollouts} were planned")
    return rollouts


def rewards(line: Line) -> list[float]:
    """The sampled reward of every planned rollout; one that a failed run did not make counts 0."""
    rollouts = planned(line)
    made: list[float] = line["rollouts"].get("reward", [])
    return [*made, *[0.0] * (rollouts - len(made))]


def smoothed(values: Sequence[float]) -> list[float]:
    """Means over three neighbours, so two fewer than there are values; of fewer than three, their mean."""
    return [_mean(values[i : i + 3]) for i in range(max(1, len(values) - 2))]


def column(line: Line, *names: str) -> list[float]:
    """What was logged over the rollouts under the first of these names that was, without what is missing."""
    planned(line)
    found: Iterable[float | None] = next((line["rollouts"][x] for x in names if x in line["rollouts"]), [])
    return [x for x in found if x is not None]


def end(line: Line) -> float:
    """Mean sampled reward over the last quarter of the planned rollouts, rounded up."""
    values = rewards(line)
    return _mean(values[-_quarter(len(values)) :])


def mean(line: Line) -> float:
    """Mean sampled reward over all planned rollouts: speed and level together."""
    return _mean(rewards(line))


def held_out(line: Line) -> float | None:
    """The last reward on held-out problems; None if there was none after training began."""
    planned(line)
    return next((reward for step, reward in reversed(line["held_out"]) if step and reward is not None), None)


def drop(line: Line) -> float:
    """The largest fall of the reward, smoothed over three rollouts, from the highest it had been."""
    highest = fall = 0.0
    for i, value in enumerate(smoothed(rewards(line))):
        highest = value if i == 0 else max(highest, value)
        fall = max(fall, highest - value)
    return fall


def kl_max(line: Line) -> float | None:
    """The largest KL of a token of the network's to the old policy's, in any update."""
    return max(column(line, "kl_before/max"), default=None)


def kl_mean(line: Line) -> float | None:
    """Mean token KL in the last update on a rollout, over the rollouts."""
    return _mean_or_none(column(line, "kl_before/mean"))


def sequence_kl(line: Line) -> float | None:
    """KL of a whole completion in the last update on a rollout, over the rollouts; before projection."""
    return _mean_or_none(column(line, "sequence_kl_before"))


def sequence_kl_after(line: Line) -> float | None:
    """The same after projection; None where nothing is projected."""
    return _mean_or_none(column(line, "sequence_kl_after"))


def entropy(line: Line) -> float | None:
    """Mean entropy of a token over the last quarter of the planned rollouts, as far as they were made."""
    rollouts = planned(line)
    last = line["rollouts"].get("entropy", [])[rollouts - _quarter(rollouts) :]
    return _mean_or_none([x for x in last if x is not None])


def setting(line: Line, name: str, default: Any = None) -> Any:
    """What a run was told, or else what was noted of its settings."""
    return line["flags"].get(name, line.get("settings", {}).get(name, default))


def axes(lines: Sequence[Line]) -> list[str]:
    """The axes of a study, without the seed."""
    found = list(lines[0]["place"]) if lines else []
    for line in lines:
        if set(line["place"]) != set(found):
            raise ValueError(f"{line['study']}: {line['name']} has other axes than {lines[0]['name']}")
    return [axis for axis in found if axis != SEED]


def axis_of(lines: Sequence[Line], *names: str) -> str | None:
    """The first of these axes that the lines have."""
    return next((name for name in names if name in axes(lines)), None)


def labels(lines: Sequence[Line], axis: str) -> list[str]:
    """The labels on an axis: numbers by size, then ``base``, arms as `troll compare` has them, others by name."""
    return ordered({line["place"][axis] for line in lines})


def ordered(found: Iterable[str]) -> list[str]:
    """The same order, whatever order the runs ended in."""
    known = ["base", *ARMS]

    def key(label: str) -> tuple[int, tuple[tuple[float, str], ...]]:
        ranks = [i for i, name in enumerate(known) if label == name or label.startswith(f"{name}-")]
        rank = -1 if number(label) is not None else max(ranks, default=len(known))
        parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", label)
        return rank, tuple((math.inf if (x := number(part)) is None else x, part) for part in parts if part)

    return sorted(found, key=key)


def number(label: str) -> float | None:
    """The number that a label is."""
    try:
        return float(label)
    except ValueError:
        return None


def at(lines: Iterable[Line], **place: str) -> list[Line]:
    """The lines with these labels."""
    return [line for line in lines if all(line["place"][axis] == label for axis, label in place.items())]


def strata(lines: Sequence[Line], *used: str | None) -> dict[str, list[Line]]:
    """The lines by their labels on all axes but these and the seed; all under "" if there are no others."""
    others = [axis for axis in axes(lines) if axis not in used]
    groups: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line["place"][axis] for axis in others), []).append(line)
    ranks = [ordered({key[i] for key in groups}) for i in range(len(others))]
    return {
        ", ".join(x if axis == "task" else f"{axis} {x}" for axis, x in zip(others, key, strict=True)): groups[key]
        for key in sorted(groups, key=lambda key: [rank.index(x) for rank, x in zip(ranks, key, strict=True)])
    }


def seeds(lines: Iterable[Line]) -> list[str]:
    """The seeds of some lines, each once."""
    return ordered({_seed(line) for line in lines})


def by_seed(lines: Sequence[Line], measure: Measure) -> dict[str, float]:
    """Seed → value, by seed; a run without a value is left out."""
    if len(seeds(lines)) < len(lines):
        names = ", ".join(line["name"] for line in lines)
        raise ValueError(f"{lines[0]['study']}: runs with one seed in one cell: {names}")
    found = {_seed(line): measure(line) for line in lines}
    return {seed: value for seed in ordered(found) if (value := found[seed]) is not None}


def over_seeds(lines: Sequence[Line], measure: Measure) -> Interval | None:
    """Mean and Student's 95 % interval of a cell; None if no run has a value."""
    values = list(by_seed(lines, measure).values())
    return spread(values) if values else None


def spread(values: Sequence[float]) -> Interval:
    """Mean and Student's 95 % interval; of fewer than three values the mean alone."""
    return interval(values) if len(values) >= FEWEST else Interval(_mean(values), None, None)


@dataclass(frozen=True)
class Difference:
    """How a cell differs from another one."""

    values: dict[str, float]
    """By seed: from the other run of the seed, or from the mean of all others if the seeds are not paired."""
    student: Interval
    bootstrap: Interval
    says: str
    """"better", "worse", "inconclusive" or "no verdict"."""
    terms: tuple[list[float], list[float] | None]
    """What is resampled: the differences of the seeds, or the one side and the other."""

    @property
    def paired(self) -> bool:
        """Whether seeds were compared one by one."""
        return self.terms[1] is None


def difference(a: Sequence[Line], b: Sequence[Line], measure: Measure, higher: bool = True) -> Difference | None:
    """Whether ``a`` is better than ``b``, seed by seed if their runs began alike; None if there is nothing to compare.

    n seeds have few distinct resamples, C(2n − 1, n): 10 for three, 126 for five. So with three to five seeds the
    bootstrap is too narrow; for three it reaches from the smallest to the largest difference, which covers 75 %, not
    95 %. A verdict needs both intervals to leave out 0, and in practice Student's decides.
    """
    first, second = by_seed(a, measure), by_seed(b, measure)
    both = [seed for seed in first if seed in second]
    if not both:
        return None
    if not began_alike(a, b):
        return _unpaired(first, second, higher)
    verdict = compare([first[x] for x in both], [second[x] for x in both], "it", higher_is_better=higher)
    values = {seed: first[seed] - second[seed] for seed in both}
    bootstrap = resampled(list(values.values()))
    says = verdict.says.removeprefix("it is ")
    if says in ("better", "worse") and _contains_zero(bootstrap):
        says = "inconclusive"
    return Difference(values, verdict.difference, bootstrap, says, (list(values.values()), None))


def began_alike(a: Sequence[Line], b: Sequence[Line]) -> bool:
    """Whether runs with one seed had the same first rollout, which no setting of an update has touched yet.

    They have not if they were made with other kernels, or with rollouts of another size: then a seed is nothing that
    two runs share. Of runs that did not note it nothing is known, and they are taken to.
    """
    firsts = [{_seed(line): _first(line) for line in lines} for lines in (a, b)]
    return all(firsts[0][seed] == firsts[1][seed] for seed in firsts[0].keys() & firsts[1].keys())


def _first(line: Line) -> tuple[float, float] | None:
    lengths, rewards = (line["rollouts"].get(x) for x in ("completions/mean_length", "reward"))
    return (lengths[0], rewards[0]) if lengths and rewards else None


def _unpaired(a: dict[str, float], b: dict[str, float], higher: bool) -> Difference:
    """Welch's interval, with his degrees of freedom rounded down, and a bootstrap of both."""
    x, y = list(a.values()), list(b.values())
    gap = _mean(x) - _mean(y)
    values = {seed: value - _mean(y) for seed, value in a.items()}
    if min(len(x), len(y)) < 2:
        return Difference(values, Interval(gap, None, None), Interval(gap, None, None), "no verdict", (x, y))
    parts = [float(np.var(z, ddof=1)) / len(z) for z in (x, y)]
    error = sum(parts)
    share = sum(part**2 / (len(z) - 1) for part, z in zip(parts, (x, y), strict=True))
    half = t_quantile(max(1, int(error**2 / share))) * math.sqrt(error) if error else 0.0
    student, bootstrap = Interval(gap, gap - half, gap + half), stratified([x], [y])
    if not error or _contains_zero(student) or _contains_zero(bootstrap):
        return Difference(values, student, bootstrap, "inconclusive" if error else "no verdict", (x, y))
    return Difference(values, student, bootstrap, "better" if (gap > 0) == higher else "worse", (x, y))


def stratified(values: Sequence[Sequence[float]], less: Sequence[Sequence[float] | None] | None = None) -> Interval:
    """Mean over strata (tasks, settings) of the means over their seeds, with its 95 % percentile bootstrap.

    Seeds are resampled within each stratum, as Agarwal et al. (2021) do: strata are given, seeds are chance. However
    many strata there are, n seeds in each make it narrower by √((n − 1) / n): with three, 89 % are covered, not 95 %.
    With ``less``, from a stratum's mean that of other runs is taken, whose seeds are resampled by themselves.
    """
    rng = np.random.default_rng(0)
    others = less or [None] * len(values)
    signed = [(1.0, x) for x in values] + [(-1.0, x) for x in others if x is not None]
    drawn, centre = np.zeros(RESAMPLES), 0.0
    for sign, stratum in signed:
        array = np.asarray(stratum, dtype=np.float64)
        drawn += sign * array[rng.integers(array.size, size=(RESAMPLES, array.size))].mean(axis=1) / len(values)
        centre += sign * _mean(stratum) / len(values)
    if all(len(stratum) < 2 for _, stratum in signed):
        return Interval(centre, None, None)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Interval(centre, float(low), float(high))


@dataclass(frozen=True)
class Finalist:
    """An arm at the best value of the axis that was swept, and the runs that it is judged by."""

    value: str | None
    lines: list[Line]
    chosen_on: list[str]
    """The seeds that the value was chosen on; none if there was nothing to choose."""
    fresh: bool
    """Whether it is judged on other seeds than those."""


def best(lines: Sequence[Line], arms: str, sweep: str, measure: Measure = end) -> dict[str, str]:
    """Arm → the value with the highest measure, in the mean over the seeds; of equal ones the first."""
    return {arm: max(cells, key=lambda x: cells[x]) for arm, cells in _levels(lines, arms, sweep, measure).items()}


def finalists(
    lines: Sequence[Line], arms: str, sweep: str | None, fresh: Sequence[Line] = (), measure: Measure = end
) -> dict[str, Finalist]:
    """Each arm at its best, judged on fresh seeds if there are any at all, else on those it was chosen on.

    Where there are fresh runs, an arm that has none at its best value has nothing to be judged by.
    """
    if sweep is None:
        return {arm: Finalist(None, at(lines, **{arms: arm}), [], False) for arm in labels(lines, arms)}
    used = set(seeds(lines))
    others = [line for line in fresh if _seed(line) not in used]
    found = {}
    for arm, value in best(lines, arms, sweep, measure).items():
        mine = at(lines, **{arms: arm})
        judged = [line for line in at(others, **{arms: arm}) if _same(_value(line, sweep), value)]
        chosen = at(mine, **{sweep: value})
        found[arm] = Finalist(value, judged if others else chosen, seeds(mine), bool(others))
    return found


@dataclass(frozen=True)
class Width:
    """The values of the swept axis that are good for an arm: near the best of all arms, and near its own."""

    of_all: list[str]
    of_own: list[str]


def widths(lines: Sequence[Line], arms: str, sweep: str, measure: Measure = end) -> dict[str, Width]:
    """Arm → the values whose measure is at least 90 % of the best."""
    levels = _levels(lines, arms, sweep, measure)
    top = max(max(cells.values()) for cells in levels.values())
    return {
        arm: Width(
            [x for x, level in cells.items() if level >= GOOD * top],
            [x for x, level in cells.items() if level >= GOOD * max(cells.values())],
        )
        for arm, cells in levels.items()
    }


def factor(values: Sequence[str]) -> float | None:
    """Between the largest and the smallest of some numbers."""
    numbers = [float(x) for x in values]
    return max(numbers) / min(numbers) if numbers else None


def _levels(lines: Sequence[Line], arms: str, sweep: str, measure: Measure) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for arm in labels(lines, arms):
        mine = at(lines, **{arms: arm})
        cells = {value: by_seed(at(mine, **{sweep: value}), measure) for value in labels(mine, sweep)}
        found[arm] = {value: _mean(list(cell.values())) for value, cell in cells.items()}
    return found


def _value(line: Line, sweep: str) -> str:
    """The label on the swept axis, or the learning rate of a study that gives every arm its own."""
    return str(line["place"].get(sweep, line["flags"].get("learning_rate")))


def _same(a: str, b: str) -> bool:
    return a == b or (number(a) is not None and number(a) == number(b))


def _seed(line: Line) -> str:
    return str(line["place"].get(SEED, line["flags"].get(SEED, 0)))


def _quarter(rollouts: int) -> int:
    return -(-rollouts // 4)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _mean_or_none(values: Sequence[float]) -> float | None:
    return _mean(values) if values else None


def _contains_zero(found: Interval) -> bool:
    return found.low is None or found.high is None or found.low <= 0 <= found.high
