"""Measures of a run, and statistics over runs.

A measure is a function of one result line (`results.line_of`). Lines that differ in nothing but the seed are one cell;
its 95 % confidence interval over seeds is Student's. Two cells are compared by Student's interval and a bootstrap,
paired by seed if the runs of a seed began with the same rollout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from troll.lab.runs.comparison import ARMS
from troll.lab.runs.folder import Line
from troll.lab.runs.statistics import Interval, interval, resampled, t_quantile

Measure = Callable[[Line], float | None]
SEED = "seed"
RESAMPLES = 2000
FEWEST = 3
"""Fewest seeds for an interval: Student's for two is 9 times as wide as their distance."""
BETTER, WORSE, INCONCLUSIVE, TOO_FEW = "better", "worse", "inconclusive", "insufficient data"
GOOD = 0.9
"""A setting is good if it reaches this fraction of the best."""


def planned(line: Line) -> int:
    """The planned number of rollouts; refuses a run that has not ended."""
    name = f"{line['study']}/{line['name']}"
    if line["status"] not in ("finished", "failed"):
        raise ValueError(f"{name} is {line['status']}: only a run that finished or failed has a result; resume it")
    missing = {"max_steps", "updates_per_generation"} - line["flags"].keys()
    if missing:
        raise ValueError(f"{name}: the study does not set {', '.join(sorted(missing))}, which say how long a run is")
    rollouts = -(-int(line["flags"]["max_steps"]) // int(line["flags"]["updates_per_generation"]))
    made = len(line["rollouts"].get("reward", []))
    if made > rollouts or (made < rollouts and line["status"] == "finished"):
        raise ValueError(f"{name} is {line['status']} with {made} rollouts, and {rollouts} were planned")
    return rollouts


def rewards(line: Line) -> list[float]:
    """The sampled reward of every planned rollout; rollouts missing from a failed run count 0."""
    rollouts = planned(line)
    made: list[float] = line["rollouts"].get("reward", [])
    return [*made, *[0.0] * (rollouts - len(made))]


def smoothed(values: Sequence[float]) -> list[float]:
    """Means over three neighbours, so two fewer than there are values; of fewer than three, their mean."""
    return [_mean(values[i : i + 3]) for i in range(max(1, len(values) - 2))]


def column(line: Line, *names: str) -> list[float]:
    """The values over the rollouts of the first of these metrics that was logged; missing values are left out."""
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


def eval_reward(line: Line) -> float | None:
    """The last reward on held-out problems; None without an evaluation after training began."""
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
    """The largest token KL between network and old policy, in any update."""
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
    """A flag of the run, or else its recorded setting."""
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
    """`BETTER`, `WORSE`, `INCONCLUSIVE` (an interval contains 0) or `TOO_FEW`."""
    terms: tuple[list[float], list[float] | None]
    """What is resampled: the differences of the seeds, or the one side and the other."""

    @property
    def paired(self) -> bool:
        """Whether seeds were compared one by one."""
        return self.terms[1] is None


def difference(a: Sequence[Line], b: Sequence[Line], measure: Measure, higher: bool = True) -> Difference | None:
    """The difference of two cells, paired by seed if their runs began alike; None without a common seed.

    n seeds have few distinct resamples, C(2n − 1, n): 10 for three, 126 for five. So with three to five seeds the
    bootstrap is too narrow; for three it reaches from the smallest to the largest difference, which covers 75 %, not
    95 %. A difference needs both intervals to exclude 0, and in practice Student's decides.
    """
    first, second = by_seed(a, measure), by_seed(b, measure)
    both = [seed for seed in first if seed in second]
    if not both:
        return None
    if not began_alike(a, b):
        return _unpaired(first, second, higher)
    values = {seed: first[seed] - second[seed] for seed in both}
    gaps = list(values.values())
    student, bootstrap = interval(gaps), resampled(gaps)
    if len(gaps) < 2 or _all_equal(gaps, [*first.values(), *second.values()]):
        says = TOO_FEW
    elif _contains_zero(student) or _contains_zero(bootstrap):
        says = INCONCLUSIVE
    else:
        says = BETTER if (student.mean > 0) == higher else WORSE
    return Difference(values, student, bootstrap, says, (gaps, None))


def _all_equal(gaps: Sequence[float], values: Sequence[float]) -> bool:
    """Whether all seeds differ by the same amount that is not 0: then nothing is known about the spread."""
    centre, size = _mean(gaps), max(map(abs, values))
    return centre != 0 and float(np.std(gaps, ddof=1)) <= 1e-9 * size


def p_value(gaps: Sequence[float]) -> float:
    """Two-sided p of Student's t-test that the mean of some paired differences is 0.

    The distribution function has a finite sum for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    degrees = len(gaps) - 1
    error = float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps))
    angle = math.atan2(abs(_mean(gaps)), error * math.sqrt(degrees))
    odd = degrees % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(1, (degrees - odd) // 2 + 1):
        total += term
        term *= math.cos(angle) ** 2 * ((2 * k) / (2 * k + 1) if odd else (2 * k - 1) / (2 * k))
    within = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return max(0.0, 1.0 - within)


def holm(values: Sequence[float]) -> list[float]:
    """Holm-corrected p of some tests, in their order."""
    corrected, least = [0.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        least = max(least, min(1.0, (len(values) - rank) * values[i]))
        corrected[i] = least
    return corrected


def began_alike(a: Sequence[Line], b: Sequence[Line]) -> bool:
    """Whether runs with one seed had the same first rollout, which no setting of an update has touched yet.

    They did not if they used different kernels or another rollout size; then two runs with the same seed have nothing
    in common. Runs that did not record it are assumed to have begun alike.
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
        return Difference(values, Interval(gap, None, None), Interval(gap, None, None), TOO_FEW, (x, y))
    parts = [float(np.var(z, ddof=1)) / len(z) for z in (x, y)]
    error = sum(parts)
    share = sum(part**2 / (len(z) - 1) for part, z in zip(parts, (x, y), strict=True))
    half = t_quantile(max(1, int(error**2 / share))) * math.sqrt(error) if error else 0.0
    student, bootstrap = Interval(gap, gap - half, gap + half), stratified([x], [y])
    if not error or _contains_zero(student) or _contains_zero(bootstrap):
        return Difference(values, student, bootstrap, INCONCLUSIVE if error else TOO_FEW, (x, y))
    return Difference(values, student, bootstrap, BETTER if (gap > 0) == higher else WORSE, (x, y))


def stratified(values: Sequence[Sequence[float]], less: Sequence[Sequence[float] | None] | None = None) -> Interval:
    """Mean over strata (tasks, settings) of the means over their seeds, with its 95 % percentile bootstrap.

    Seeds are resampled within each stratum, as Agarwal et al. (2021) do: strata are given, seeds are chance. However
    many strata there are, n seeds in each make it narrower by √((n − 1) / n): with three, 89 % are covered, not 95 %.
    With ``less``, the mean of other runs, resampled separately, is subtracted from that of each stratum.
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
    """An arm at the best value of the swept axis, and the runs that evaluate it."""

    value: str | None
    lines: list[Line]
    chosen_on: list[str]
    """The seeds that the value was chosen on; empty without a sweep."""
    fresh: bool
    """Whether it is evaluated on other seeds than those."""


def best(lines: Sequence[Line], arms: str, sweep: str, measure: Measure = end) -> dict[str, str]:
    """Arm → the value with the highest measure, in the mean over the seeds; of equal ones the first."""
    return {arm: max(cells, key=lambda x: cells[x]) for arm, cells in _levels(lines, arms, sweep, measure).items()}


def finalists(
    lines: Sequence[Line], arms: str, sweep: str | None, fresh: Sequence[Line] = (), measure: Measure = end
) -> dict[str, Finalist]:
    """Each arm at its best, evaluated on fresh seeds if the study has any, else on the seeds it was chosen on.

    Where there are fresh runs, an arm without one at its best value has no runs.
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
