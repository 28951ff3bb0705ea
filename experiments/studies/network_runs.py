"""Tables of the runs of ``experiments/network``: KL of the network, measured over the whole vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scores import spread
from tables import NONE, Table, plus_minus, significant, table

Run = Mapping[str, Any]
_SIZES = (16, 64, 256)


def read_runs(results: Path) -> list[Run]:
    """All stored runs."""
    path = results / "network.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def written(results: Path) -> dict[str, str]:
    """Name of a table → its text; empty without runs."""
    runs = read_runs(results)
    if not runs:
        return {}
    made = {name: make(runs) for name, make in TABLES.items()}
    return {name: f"{each.rows}\n\n{each.note}" for name, each in made.items()}


def reached(runs: Sequence[Run]) -> Table:
    """How far the network went from one rollout to the next."""
    names = {
        "token KL": "token KL mean",
        "99 % of tokens below": "token KL p99",
        "largest": "token KL max",
        "tokens outside": "tokens outside the bound",
        "sequence KL": "sequence KL(old, new) mean",
        "projected, last update": "sequence KL after projection, last update",
    }
    rows = [
        [title, *(_over(group, name, largest=name.endswith("max")) for name in names.values()), _last_reward(group)]
        for title, group in _groups(runs).items()
    ]
    return table(
        ["", *names, "reward, last rollout"],
        rows,
        "KL between the network after all updates on a rollout and the network that made it, over the whole "
        "vocabulary, at the tokens of the rollout; mean over the rollouts (maximum in the column `largest`) ± "
        "Student's 95 % confidence interval over seeds. Outside: KL(new ‖ old) > ε. The sequence KL is KL(old ‖ new), "
        "since the completions were sampled from the old policy.",
    )


def solver(runs: Sequence[Run]) -> Table:
    """Convergence of the projection's solver."""
    rows = []
    for title, group in _groups(runs).items():
        of_all = [row for run in group for row in run["rollouts"] if "steps mean" in row]
        if of_all:
            rows.append(
                [
                    title,
                    _over(group, "projected", percent=True),
                    f"{_over(group, 'steps mean')} ({max(row['steps max'] for row in of_all):.0f})",
                    _over(group, "mix median"),
                    _over(group, "variance median"),
                    f"{min(row['variance min'] for row in of_all):.3g}",
                    _over(group, "near the kink", percent=True),
                ]
            )
    head = ["", "projected", "solver steps", "t, median", "Var[d], median", "Var[d], smallest", "KL within 10 % of ε"]
    return table(
        head,
        rows,
        "Of the tokens outside ε in an update, which under the clip would be projected: mean (largest) steps of the "
        "solver, t = 1/(1+η), and the variance that the derivative divides by.",
    )


def kept(runs: Sequence[Run]) -> Table:
    """How much of the probability the most probable tokens hold, in the first rollout and the last."""
    rows = []
    for title, group in _groups(runs).items():
        for when, i in (("first", 0), ("last", -1)):
            cells = []
            for size in _SIZES:
                first = [run["rollouts"][i] for run in group]
                mass = sum(row[f"kept mass, {size}"] for row in first) / len(first)
                whole = sum(row[f"positions with 1 - 1e-5, {size}"] for row in first) / len(first)
                cells.append(f"{mass:.4f} ({100 * whole:.1f} %)")
            rows.append([f"{title}, {when} rollout", *cells])
    return table(
        ["", *(f"{size} tokens" for size in _SIZES)],
        rows,
        "Mean probability of the most probable tokens, and the fraction of positions where it is at least 1 − 1e-5.",
    )


def _groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run["task"], run["arm"] != "troll", run["learning_rate"], run["seed"])):
        arm = f"{run['arm']} {run['kl_bound']:g}" if run["arm"] == "troll" else run["arm"]
        rate = f"{run['learning_rate']:.0e}".replace("e-0", "e-")
        found.setdefault(f"{run['task']}, {arm}, {rate}", []).append(run)
    return found


def _over(group: Sequence[Run], name: str, largest: bool = False, percent: bool = False) -> str:
    """Mean (or largest) over the rollouts, then over the seeds."""
    values = []
    for run in group:
        seen = [row[name] for row in run["rollouts"] if row.get(name) is not None]
        if seen:
            values.append((max(seen) if largest else sum(seen) / len(seen)) * (100 if percent else 1))
    if not values:
        return NONE
    found = spread(values)
    return f"{plus_minus(found, 1)} %" if percent else significant(found)


def _last_reward(group: Sequence[Run]) -> str:
    return plus_minus(spread([run["rollouts"][-1]["reward"] for run in group]), 3)


TABLES = {"network-reached": reached, "network-solver": solver, "network-kept": kept}
