"""Histories that never were, with numbers that can be checked by hand, and those of the studies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from troll.explain import History

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "studies" / "results"
UPDATES = 4
SETTINGS: dict[str, Any] = {
    "trust_region": "troll",
    "kl_bound": 0.05,
    "regression_coef": 1.0,
    "tail": "bucket",
    "max_support": 64,
    "learning_rate": 1e-5,
    "updates_per_generation": UPDATES,
    "num_generations": 8,
    "max_completion_length": 32,
}
OF_ROLLOUT = ("reward", "frac_reward_zero_std", "completions/", "sampling/")
RISING = [0.1 + 0.04 * i for i in range(20)]
WITHOUT_PREFIX = ("step", "reward", "completions/mean_length", "frac_reward_zero_std", "entropy", "grad_norm")


def lines(rewards: Sequence[float], columns: Mapping[str, Any], updates: int = UPDATES) -> list[dict[str, Any]]:
    """``updates`` lines for each reward. A column has a number for all rollouts, or one for each."""
    made = []
    for i in range(len(rewards)):
        for update in range(updates):
            line: dict[str, Any] = {"step": updates * i + update + 1}
            for name, values in {**columns, "reward": rewards}.items():
                value = values[i] if isinstance(values, Sequence) else values
                if value is not None and (update == 0 or not name.startswith(OF_ROLLOUT)):
                    line[name] = value
            made.append(line)
    return made


def history(
    rewards: Sequence[float] = RISING,
    columns: Mapping[str, Any] | None = None,
    held_out: Sequence[tuple[int, float]] = (),
    **settings: Any,
) -> History:
    """A run with these rewards, in which nothing else is logged but what is given."""
    evaluations = [{"step": step, "eval_reward": value} for step, value in held_out]
    settings = {**SETTINGS, **settings}
    updates = settings["updates_per_generation"]
    return History.of(lines(rewards, columns or {}, updates), evaluations, settings)


def stored() -> dict[str, list[tuple[dict[str, Any], History]]]:
    """The runs of the studies, by study and place without the seed: one line per rollout."""
    groups: dict[str, list[tuple[dict[str, Any], History]]] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for run in {x["name"]: x for x in map(json.loads, path.read_text().splitlines())}.values():
            columns = run["rollouts"]
            names = {n: n if n in WITHOUT_PREFIX or n.startswith("clip_ratio/") else f"troll/{n}" for n in columns}
            made = [{names[n]: columns[n][i] for n in columns} for i in range(len(columns["step"]))]
            evaluations = [{"step": step, "eval_reward": value} for step, value in run["held_out"]]
            place = " ".join(str(x) for axis, x in run["place"].items() if axis != "seed")
            groups.setdefault(f"{path.stem} {place}", []).append((run, History.of(made, evaluations, run["settings"])))
    return groups
