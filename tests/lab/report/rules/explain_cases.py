"""Histories that never were, with numbers that can be checked by hand, and those of the studies."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from troll.lab.report.rules import Finding, History, find

RESULTS = Path(__file__).resolve().parents[4] / "experiments" / "studies" / "results"
WELL, BADLY = 0.8, 0.25
"""Of the last three rewards: a run that ended well, and one that ended very badly."""
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


@cache
def stored() -> dict[str, list[tuple[dict[str, Any], History]]]:
    """The runs of the studies, by study and place without the seed: one line per rollout."""
    groups: dict[str, list[tuple[dict[str, Any], History]]] = {}
    for path in sorted(set(RESULTS.glob("*.jsonl")) - {RESULTS / "network.jsonl"}):  # those are of a plain loop
        for run in {x["name"]: x for x in map(json.loads, path.read_text().splitlines())}.values():
            columns = run["rollouts"]
            names = {n: n if n in WITHOUT_PREFIX or n.startswith("clip_ratio/") else f"troll/{n}" for n in columns}
            made = [{names[n]: columns[n][i] for n in columns} for i in range(len(columns["step"]))]
            evaluations = [{"step": step, "eval_reward": value} for step, value in run["held_out"]]
            place = " ".join(str(x) for axis, x in run["place"].items() if axis != "seed")
            groups.setdefault(f"{path.stem} {place}", []).append((run, History.of(made, evaluations, run["settings"])))
    return groups


FIRST, LATER = r"(troll|troll-0\.2|clip|clip-higher|gspo|none)", r"(troll-1|troll-soft|troll-scaled|clip-0\.4)"
KINDS = {  # rows of docs/explain.md, and what the groups of a row look like; * is for settings new since the rules
    "the final runs: TROLL, clip, clip-higher": r"final (troll|troll-0\.2|clip|clip-higher)",
    "the final runs: GSPO, none": r"final (gspo|none)",
    "rate 1e-5, every region": rf"regions {FIRST} 1e-5",
    "rate 3e-5, every region": rf"regions {FIRST} 3e-5",
    "rate 1e-4, TROLL": r"regions (troll|troll-0\.2) 1e-4",
    "rate 1e-4, the others": r"regions (clip|clip-higher|gspo|none) 1e-4",
    "rate 3e-4, TROLL": r"regions troll.* 3e-4",
    "rate 3e-4, the others": r"regions (clip|clip-higher|gspo|none) 3e-4",
    "bound 0.01": r"changes bound 0\.01",
    "no regression": r"changes no regression",
    "regression 10": r"changes regression 10",
    "every other change": r"changes (?!bound 0\.01|no regression|regression 10).*",
    "every estimator": r"estimators .* (troll-0\.2|clip)",
    "one update per rollout": r"updates \S+ 1 .*",
    "4 to 32 updates, TROLL": r"updates \S+ (4|8|16|32) troll.*",
    "4 to 32 updates, clip": r"updates \S+ (4|8|16|32) clip",
    "* the final runs: ε = 1, less pull, a clip of 0.4": rf"final {LATER}",
    "* the same, rates 1e-5 and 3e-5": rf"regions {LATER} (1e-5|3e-5)",
    "* the same, rate 1e-4": rf"regions {LATER} 1e-4",
    "* every estimator, scaled pull": r"estimators .* troll-scaled",
    "* bounds that adapt": r"bounds (?!2 % outside at most).*",
    "* at most 2 % outside": r"bounds 2 % outside at most",
    "* stories, TROLL": r"stories(-final)? troll.*",
    "* stories, clips, GSPO": r"stories(-final)? (clip.*|gspo).*",
    "* stories, none": r"stories(-final)? none.*",
    "* functions, rates 1e-5 and 3e-5, TROLL": r"code troll.* (1e-5|3e-5)",
    "* functions, rates 1e-5 and 3e-5, the others": r"code (?!troll).* (1e-5|3e-5)",
    "* functions, rate 1e-4, TROLL": r"code troll.* 1e-4",
    "* functions, rate 1e-4, the others": r"code (?!troll).* 1e-4",
    "* functions, rate 3e-4, TROLL": r"code troll.* 3e-4",
    "* functions, rate 3e-4, the others": r"code (?!troll).* 3e-4",
    "* functions, the final runs": r"code-final .*",
    "* word problems, 1.5 billion parameters": r"gsm8k .*",
    "* word problems, 1.5 billion parameters, final runs": r"gsm8k-final .*",
}


def later(group: str) -> bool:
    """Whether its settings were first run after the rules, so that no threshold was chosen on runs like it."""
    return any(kind.startswith("*") and re.fullmatch(pattern, group) for kind, pattern in KINDS.items())


def end(run: Mapping[str, Any]) -> float:
    """Mean of the last three rewards."""
    return float(sum(run["rollouts"]["reward"][-3:]) / 3)


def warnings(history: History) -> list[Finding]:
    """What is found, notes aside."""
    return [x for x in find(history) if x.level == "warning"]


@cache
def by_end(star: bool, studies: str = ".*") -> dict[str, list[list[str]]]:
    """The warnings of each run, by how it ended, but of those with one update a rollout: theirs is about a setting."""
    ended: dict[str, list[list[str]]] = {"well": [], "between": [], "badly": []}
    for group, all_of in stored().items():
        if later(group) != star or not re.fullmatch(studies, group.split()[0]):
            continue
        for run, history in all_of:
            if history.setting("updates_per_generation") != 1:
                how = "well" if end(run) >= WELL else "badly" if end(run) < BADLY else "between"
                ended[how].append([x.name for x in warnings(history)])
    return ended


def table() -> list[str]:
    """Which rules speak in which runs, a row for each kind: runs, mean of their last three rewards, findings."""
    rows = []
    for kind, pattern in KINDS.items():
        runs = [pair for group, all_of in stored().items() if re.fullmatch(pattern, group) for pair in all_of]
        ends = sum(end(run) for run, _ in runs) / len(runs)
        count = Counter(x.name for _, history in runs for x in find(history))
        said = ", ".join(f"`{name}` {n}" for name, n in sorted(count.items(), key=lambda x: (-x[1], x[0])))
        rows.append(f"| {kind} | {len(runs)} | {ends:.2f} | {said or 'nothing'} |")
    return rows


ENDS = {"well": f"above {WELL:g}", "between": "between", "badly": f"below {BADLY:g}"}
COLUMNS = [(False, ".*"), (True, "(?!code|gsm8k).*"), (True, "code.*"), (True, "gsm8k.*"), (True, ".*")]


def table_of_ends() -> list[str]:
    """In how many runs there is a warning, by how they ended: those without a star, and those with, by task."""
    rows = []
    for how, words in ENDS.items():
        warned = [by_end(star, studies)[how] for star, studies in COLUMNS]
        cells = [f"{sum(map(bool, names))} of {len(names)}" if names else "–" for names in warned]
        rows.append(f"| {words} | " + " | ".join(cells) + " |")
    return rows
