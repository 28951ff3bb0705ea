"""The result line of a run: its labels in the study, its settings, and metrics per rollout."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from study import Case

from troll.lab.runs import Run
from troll.lab.runs.folder import Line

RESULTS = Path(__file__).parent / "results"
REWARD = ("reward", "completions/mean_length", "frac_reward_zero_std")
"""Metrics of the rollout."""
MEANS = (
    *("entropy", "grad_norm", "clip_ratio/region_mean"),
    *("troll/regression", "troll/projected_fraction", "troll/mix", "troll/kl_bound", "troll/regression_coef"),
)
"""Averaged over the updates on a rollout."""
LAST = (
    *(f"troll/{name}" for name in ("kl_before/mean", "kl_before/p99", "kl_after/mean", "ratio/mean", "ratio/max")),
    *(f"troll/{name}" for name in ("sequence_kl_before", "sequence_kl_after", "kept_mass/old", "support_size/old")),
)
"""From the last update on a rollout, where the network is farthest from the old policy."""
MOST = tuple(f"troll/{name}" for name in ("kl_before/max", "solver_steps/mean", "solver_steps/max", "lost_mass"))
"""The largest of the updates on a rollout."""
SETTINGS = (
    *("trust_region", "kl_bound", "regression_coef", "max_support", "tail_mass", "tail"),
    *("epsilon", "epsilon_high", "importance_sampling_level", "loss_type", "advantage_estimator", "scale_rewards"),
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_grad_norm", "weight_decay", "adam_beta2", "beta"),
    *("num_generations", "updates_per_generation", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("max_steps", "max_completion_length", "temperature", "bf16", "use_liger_kernel", "seed"),
)
"""Recorded settings that affect training, whether given as a flag or not."""


def line_of(case: Case, folder: Path) -> Line:
    """The result of a run that ended."""
    run = Run.open(folder)
    about = run.about
    return {
        "study": case.study,
        "name": case.name,
        "place": case.place,
        "status": about["status"],
        **({"error": about["error"].replace(f"{folder.parent}/", "")} if about.get("error") else {}),
        "task": about["task"]["name"],
        "parameters": about["model"].get("parameters"),
        "flags": {name: value for name, value in case.flags.items() if not str(value).startswith("/")},
        "settings": {name: about["settings"].get(name) for name in SETTINGS},
        "seconds": round(about["seconds"], 1),
        "machine": {name: about["machine"].get(name) for name in ("gpu", "processor")},
        "versions": {name: about["versions"].get(name) for name in ("torch", "transformers", "trl", "troll")},
        "held_out": [[line["step"], short(line["eval_reward"])] for line in run.evaluations()],
        "rollouts": by_rollout(run.metrics()),
    }


def by_rollout(lines: Sequence[Line]) -> dict[str, list[float | None]]:
    """Metric → one number per rollout; a rollout begins with the line that has its reward."""
    starts = [i for i, line in enumerate(lines) if line.get("reward") is not None]
    groups = [lines[a:b] for a, b in zip(starts, [*starts, len(lines)][1:], strict=True)]
    columns = {name: [group[0].get(name) for group in groups] for name in ("step", *REWARD)}
    columns |= {name: [_mean(_values(group, name)) for group in groups] for name in MEANS}
    columns |= {name: [group[-1].get(name) for group in groups] for name in LAST}
    columns |= {name: [max(_values(group, name), default=None) for group in groups] for name in MOST}
    short_names = {name: name.removeprefix("troll/") for name in columns}
    return {
        short_names[name]: [short(x) for x in values]
        for name, values in columns.items()
        if any(x is not None for x in values)
    }


def _values(lines: Iterable[Line], name: str) -> list[float]:
    return [x for line in lines if (x := line.get(name)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def short(value: float | None) -> float | None:
    """Rounded to four digits."""
    return None if value is None else float(f"{value:.4g}")


def read(results: Path, study: str) -> list[Line]:
    """The results of a study, each run once."""
    path = results / f"{study}.jsonl"
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return list({line["name"]: line for line in lines}.values())
