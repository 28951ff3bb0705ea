"""Results → Markdown. Every function takes the runs of one task; how sure a number is stands beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scores import (
    BETTER,
    FEWEST,
    Difference,
    Finalist,
    Measure,
    at,
    best,
    by_seed,
    column,
    difference,
    drop,
    end,
    entropy,
    eval_reward,
    factor,
    holm,
    kl_max,
    kl_mean,
    labels,
    mean,
    ordered,
    over_seeds,
    p_value,
    seeds,
    sequence_kl,
    sequence_kl_after,
    stratified,
    widths,
)

from troll.lab.runs.folder import Line
from troll.lab.runs.statistics import Interval

NONE = "–"
AUTHORS, DEFAULT = "troll", "troll-0.2"
"""The arms with the authors' bound and with our default; all arms with the projection begin with the first."""
RIVALS = {
    DEFAULT: "TROLL, ε = 0.2 (default)",
    "clip": "clip ±0.2",
    "clip-0.4": "clip ±0.4",
    "gspo": "GSPO's sequence clip",
    "none": "no constraint",
}
"""Arms of the table in the README."""
_END = "Mean sampled reward over the last quarter of the rollouts (rollouts missing from a failed run count 0)"
_WHOLE = "Mean sampled reward over the whole run"
_MEASURES: dict[Measure, str] = {end: _END, mean: _WHOLE, eval_reward: "Last reward on held-out problems"}
_PAIRED = (
    "paired by seed; marked ° and not paired where the runs of a seed did not begin with the same rollout (different "
    "kernel or size)"
)
_RULE = (
    f"Differences are {_PAIRED}: ± Student's or Welch's 95 % confidence interval, then in brackets a bootstrap over "
    "seeds, which is too narrow for so few. Better or worse: both intervals exclude 0; inconclusive: one contains 0. "
    "Not corrected for multiple comparisons."
)


class Table(NamedTuple):
    """Rows in Markdown, and the note below them."""

    rows: str
    note: str


def joined(found: Mapping[str, Table]) -> str:
    """Several tables under their titles; a note that all of them share comes once, at the end."""
    shared = len({x.note for x in found.values()}) == 1
    parts = []
    for title, each in found.items():
        parts += [f"**{title}**"] * bool(title) + [each.rows] + [each.note] * (not shared)
    return "\n\n".join([*parts, *[next(iter(found.values())).note] * shared])


def sweep_table(lines: Sequence[Line], arms: str, sweep: str, measure: Measure = end) -> Table:
    """Rows arms, columns the values swept: each arm's best in bold, and how many values are good."""
    values = labels(lines, sweep)
    chosen, good = best(lines, arms, sweep, measure), widths(lines, arms, sweep, measure)
    most = _most(lines, arms, sweep)
    rows = []
    for arm in labels(lines, arms):
        cells = []
        for value in values:
            text = score(at(lines, **{arms: arm, sweep: value}), measure, most)
            cells.append(_bold(text) if value == chosen[arm] else text)
        rows.append([arm, *cells, _width(good[arm].of_all), _width(good[arm].of_own)])
    head = [f"{_title(arms)} \\ {_title(sweep)}", *values, "≥ 90 % of the best", "≥ 90 % of this arm's best"]
    return table(
        head,
        rows,
        f"{_MEASURES[measure]} ± Student's 95 % confidence interval, {_count(most)}. Bold: the best of the row. "
        "Last columns: number of values at that level, and the ratio of the largest to the smallest of them.",
    )


def best_table(
    found: Mapping[str, Finalist], base: str, sweep: str | None, study: str = "", chosen_by: Measure = end
) -> Table:
    """Rows: arms at their best, with their scores and the differences to ``base`` in ``end`` and over the whole run."""
    most = max(len(x.lines) for x in found.values())
    rows = []
    for arm, finalist in found.items():
        scores = [score(finalist.lines, measure, most) for measure in (end, mean, eval_reward, drop)]
        other = found[base].lines if base in found and arm != base else []
        against = [_in_one(difference(finalist.lines, other, measure) if other else None) for measure in (end, mean)]
        rows.append([arm, *([finalist.value or NONE] if sweep else []), *scores, *against])
    head = ["arm", *([_title(sweep)] if sweep else []), "end", "whole run", "held-out", "largest drop"]
    return table(
        [*head, f"end, against {base}", f"whole run, against {base}"],
        rows,
        f"{_END}, over the whole run, last held-out reward, and largest drop of the reward below its maximum; ± "
        f"Student's 95 % confidence interval, {_count(most)}. {_selection(found, sweep, study, chosen_by)}{_RULE}",
    )


def pairs_table(found: Mapping[str, Finalist]) -> Table | None:
    """Rows: arms with the projection; columns: all others and two bounds; differences over the whole run."""
    ours = [arm for arm in found if arm.split("-")[0] == AUTHORS and found[arm].lines]
    others = [arm for arm in found if arm.split("-")[0] != AUTHORS and found[arm].lines]
    if not ours or len(others) < 2:
        return None
    others += [arm for arm in (AUTHORS, DEFAULT) if arm in ours and len(ours) > 1]
    rows = []
    for arm in ours:
        gaps = [difference(found[arm].lines, found[x].lines, mean) if x != arm else None for x in others]
        rows.append([arm, *map(_briefly, gaps)])
    most = max(len(found[arm].lines) for arm in (*ours, *others))
    return table(
        ["whole run, row − column", *others],
        rows,
        f"{_WHOLE}; differences, {_PAIRED}; ± Student's or Welch's 95 % confidence interval, {_count(most)}. Bold: "
        "better by this interval and by a bootstrap; not corrected for multiple comparisons.",
    )


def overview_table(tasks: Mapping[str, Mapping[str, Finalist]]) -> Table:
    """Rows arms, columns tasks: every arm at its best rate on each, over the whole run."""
    most = {task: max(len(x.lines) for x in found.values()) for task, found in tasks.items()}
    rows = []
    for arm in ordered({arm for found in tasks.values() for arm, x in found.items() if x.lines}):
        cells = []
        for task, found in tasks.items():
            there = found[arm].lines if arm in found else []
            cells.append(f"{score(there, mean, most[task])} at {found[arm].value}" if there else NONE)
        rows.append([arm, *cells])
    return table(
        ["arm", *(f"{task}, {'one seed' if n == 1 else f'{n} seeds'}" for task, n in most.items())],
        rows,
        f"{_WHOLE}, every arm at its best learning rate; ± Student's 95 % confidence interval.",
    )


def readme_table(
    tasks: Mapping[str, Mapping[str, Finalist]], high: Mapping[str, Mapping[str, Sequence[Line]]], rate: str
) -> Table:
    """Rows: tasks, at the best learning rates and at a high one; columns: the default bound and its rivals."""
    rows = []
    for task, found in tasks.items():
        cells = [score(found[arm].lines, mean, 0) if arm in found else NONE for arm in RIVALS]
        rows.append([f"{task}, best learning rate", *cells])
    for task, cells_at in high.items():
        rows.append([f"{task}, learning rate {rate}", *(score(cells_at.get(arm, []), end, 0) for arm in RIVALS)])
    seeds_best = max(len(x.lines) for found in tasks.values() for x in found.values())
    seeds_high = max(len(x) for cells_at in high.values() for x in cells_at.values())
    return table(
        ["", *RIVALS.values()],
        rows,
        "Best learning rate of each method: mean reward over the whole run ± 95 % confidence interval, "
        f"{seeds_best} fresh seeds. Learning rate {rate}: mean reward over the last quarter of the run, "
        f"{seeds_high} seeds.",
    )


def differences_table(tasks: Mapping[str, Mapping[str, Finalist]], arms: Sequence[str], bases: Sequence[str]) -> Table:
    """Rows: an arm minus another one on a task; columns: paired difference and Holm-corrected p, whole run and end."""
    pairs = [
        (task, arm, base)
        for task, found in tasks.items()
        for arm in arms
        for base in bases
        if all(name in found and found[name].lines for name in (arm, base))
    ]
    columns = []
    for measure in (mean, end):
        gaps = [difference(tasks[task][arm].lines, tasks[task][base].lines, measure) for task, arm, base in pairs]
        found = [gap for gap in gaps if gap is not None and gap.paired]
        if len(found) < len(pairs):
            raise ValueError("differences with a Holm-corrected p have to be paired by seed")
        corrected = holm([p_value(list(gap.values.values())) for gap in found])
        columns += [[plus_minus(gap.student, 3, "+") for gap in found], [_probability(p) for p in corrected]]
    rows = [
        [task, f"{arm} − {base}", *cells]
        for (task, arm, base), cells in zip(pairs, zip(*columns, strict=True), strict=True)
    ]
    return table(
        ["task", "arms", "whole run", "p", "end", "p"],
        rows,
        "Paired difference of the mean sampled reward over the whole run, and over the last quarter of the rollouts; ± "
        f"Student's 95 % confidence interval; p of the paired t-test, Holm-corrected over the {len(rows)} comparisons "
        "of the column. Bold: p < 0.05; everything else is inconclusive.",
    )


def axis_table(lines: Sequence[Line], axis: str, arms: str, base: str) -> Table:
    """Rows the values of an axis, columns arms: ``end``, in bold where it is better than ``base`` on the same row."""
    names, most = labels(lines, arms), _most(lines, axis, arms)
    rows = []
    for value in labels(lines, axis):
        cells = []
        for arm in names:
            mine, other = (at(lines, **{axis: value, arms: x}) for x in (arm, base))
            gap = difference(mine, other, end) if mine and other and arm != base else None
            text = score(mine, end, most)
            cells.append(_bold(text) if gap and gap.says == BETTER else text)
        rows.append([value, *cells])
    return table(
        [f"{_title(axis)} \\ {_title(arms)}", *names],
        rows,
        f"{_END} ± Student's 95 % confidence interval, {_count(most)}. Bold: better than {base} in the same row, by "
        "Student's interval and a bootstrap; not corrected for multiple comparisons.",
    )


def changes_table(lines: Sequence[Line], axis: str, base: str) -> Table:
    """Rows changes: ``end`` and the whole run, and the differences to ``base`` in both."""
    most = _most(lines, axis)
    reference = at(lines, **{axis: base})
    rows = []
    for change in labels(lines, axis):
        mine = at(lines, **{axis: change})
        other = reference if change != base else []
        gaps = [_in_one(difference(mine, other, measure) if other else None) for measure in (end, mean)]
        rows.append([change, *(score(mine, measure, most) for measure in (end, mean)), *gaps])
    return table(
        [axis, "end", "whole run", f"end, against {base}", f"whole run, against {base}"],
        rows,
        f"{_END}, and over the whole run; ± Student's 95 % confidence interval, {_count(most)}. {_RULE}",
    )


def overall_table(tasks: Sequence[Mapping[str, Sequence[Line]]], base: str) -> Table:
    """Rows arms: ``end`` over all tasks, and the difference to ``base``; seeds resampled within each task."""
    rows = []
    for arm in tasks[0]:
        if not all(task.get(arm) for task in tasks):
            continue
        reached = stratified([list(by_seed(task[arm], end).values()) for task in tasks])
        gaps = [difference(task[arm], task[base], end) if task.get(base) else None for task in tasks]
        terms = [gap.terms for gap in gaps if gap is not None]
        whole = arm != base and len(terms) == len(tasks)
        against = stratified([x for x, _ in terms], [y for _, y in terms]) if whole else None
        signed = [NONE, NONE] if against is None else [decimals(against.mean, sign="+"), _ends(against)]
        rows.append([arm, decimals(reached.mean), _ends(reached, ""), *signed])
    return table(
        ["arm", "end, mean of the tasks", "bootstrap", f"end, against {base}", "bootstrap"],
        rows,
        f"{_END}, mean of {len(tasks)} tasks; 95 % bootstrap, seeds resampled within each task, somewhat too narrow "
        "for few seeds.",
    )


def network_table(groups: Mapping[str, Sequence[Line]]) -> Table:
    """Rows: groups of runs; columns: KL of the network to the old policy, and what the trust region did."""
    rows = []
    for name, lines in groups.items():
        if lines:
            moved = [significant(over_seeds(lines, x)) for x in (kl_mean, kl_max, sequence_kl, sequence_kl_after)]
            left = significant(over_seeds(lines, entropy))
            rows.append([name, *moved, _share(lines), _steps(lines), *_support(lines), left])
    kl = ["token KL", "largest token KL", "sequence KL, network", "sequence KL, projected"]
    most = max((len(lines) for lines in groups.values()), default=0)
    return table(
        ["", *kl, "tokens projected or clipped", "solver steps", "kept mass", "tokens kept", "entropy, end"],
        rows,
        "Token and sequence KL of the network to the old policy in the last update on a rollout, mean over the "
        "rollouts; largest token KL of a run in any update; fraction of tokens projected or clipped; solver steps: "
        "mean (largest); mass and number of tokens kept of the old policy; entropy over the last quarter. ± Student's "
        f"95 % confidence interval, {_count(most)}.",
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> Table:
    """Cells → Markdown."""
    body = "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))
    return Table(body, note)


def _selection(found: Mapping[str, Finalist], sweep: str | None, study: str, chosen_by: Measure) -> str:
    """How the best values were chosen, and on which seeds they are evaluated."""
    chosen = next(iter(found.values()))
    if not chosen.chosen_on:
        return ""
    evaluated = seeds(line for finalist in found.values() for line in finalist.lines)
    fresh = f"evaluated on fresh seeds {', '.join(evaluated)}{f' of `{study}`' if study else ''}"
    same = "evaluated on the same seeds, which favours what was chosen"
    on = ", ".join(chosen.chosen_on)
    by = "`end`" if chosen_by is end else "the whole run"
    return f"The best {_title(sweep or '')} of each arm by {by} on seeds {on}; {fresh if chosen.fresh else same}. "


def score(lines: Sequence[Line], measure: Measure, most: int) -> str:
    """A cell over its seeds: mean, interval, missing seeds and failed runs."""
    if not lines:
        return NONE
    found, values = over_seeds(lines, measure), by_seed(lines, measure)
    failed = sum(line["status"] == "failed" for line in lines)
    remarks = [f"n = {len(values)}"] * (0 < len(values) < most) + [f"{failed} failed"] * bool(failed)
    return plus_minus(found, 3) + (f" ({', '.join(remarks)})" if remarks else "")


def plus_minus(found: Interval | None, places: int, sign: str = "") -> str:
    """Mean ± half the interval."""
    if found is None:
        return NONE
    half = "" if found.high is None else f" ± {found.high - found.mean:.{places}f}"
    return decimals(found.mean, places, sign) + half


def significant(found: Interval | None) -> str:
    """The same with three digits of the mean."""
    size = abs(found.mean) if found else 0.0
    return plus_minus(found, max(0, 2 - math.floor(math.log10(size))) if size else 3)


def decimals(value: float, places: int = 3, sign: str = "") -> str:
    """A number; with ``sign`` "+", always with its sign."""
    return f"{value:{sign}.{places}f}".replace("-", "−")


def _probability(p: float) -> str:
    return _bold(f"{p:.3f}") if p < 0.05 else f"{p:.2f}"


def _title(axis: str) -> str:
    """An axis of a study, as the head of a column."""
    return {"rate": "learning rate", "region": "arm", "updates": "updates per rollout"}.get(axis, axis)


def _ends(found: Interval, sign: str = "+") -> str:
    if found.low is None or found.high is None:
        return NONE
    return f"{decimals(found.low, sign=sign)} to {decimals(found.high, sign=sign)}"


def _against(gap: Difference | None) -> list[str]:
    if gap is None:
        return [NONE] * 3
    half = "" if gap.student.high is None else f" ± {gap.student.high - gap.student.mean:.3f}"
    says = _bold(gap.says) if gap.says == BETTER else gap.says
    return [decimals(gap.student.mean, sign="+") + half + "°" * (not gap.paired), _ends(gap.bootstrap), says]


def _in_one(gap: Difference | None) -> str:
    """The same in one cell."""
    student, bootstrap, says = _against(gap)
    return NONE if gap is None else f"{student} ({bootstrap}), {says}"


def _briefly(gap: Difference | None) -> str:
    """The same without the bootstrap; in bold where it is better."""
    student, _, _ = _against(gap)
    return _bold(student) if gap is not None and gap.says == BETTER else student


def _width(values: Sequence[str]) -> str:
    spread = factor(values)
    return "0" if spread is None else f"{len(values)} (×{spread:.3g})"


def _share(lines: Sequence[Line]) -> str:
    names = ("projected_fraction", "clip_ratio/region_mean")
    found = over_seeds(lines, lambda line: _mean(column(line, *names)))
    return NONE if found is None else f"{100 * found.mean:.3g} %"


def _steps(lines: Sequence[Line]) -> str:
    found = over_seeds(lines, lambda line: _mean(column(line, "solver_steps/mean")))
    largest = max((x for line in lines for x in column(line, "solver_steps/max")), default=None)
    return NONE if found is None or largest is None else f"{found.mean:.1f} ({largest:.0f})"


def _support(lines: Sequence[Line]) -> list[str]:
    mass = over_seeds(lines, lambda line: _mean(column(line, "kept_mass/old")))
    size = over_seeds(lines, lambda line: _mean(column(line, "support_size/old")))
    return [NONE if mass is None else f"{mass.mean:.4f}", NONE if size is None else f"{size.mean:.1f}"]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _most(lines: Sequence[Line], *axes: str) -> int:
    """The number of runs in the fullest cell."""
    cells = [tuple(line["place"][axis] for axis in axes) for line in lines]
    return max(map(cells.count, cells), default=0)


def _count(most: int) -> str:
    seeds = "one seed" if most == 1 else f"{most} seeds"
    return seeds if most >= FEWEST else f"{seeds}, too few for an interval"


def _bold(text: str) -> str:
    return text if text == NONE else f"**{text}**"
