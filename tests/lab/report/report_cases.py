"""Folders of runs and comparisons as training writes them, with numbers from a random generator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
CONTROL = "\x1b[31mred\x00\u202ereversed\u2028\ufeff"
KL_EDGES = [0.0, *np.geomspace(1e-8, 100, 61).tolist()]
LOG_RATIO_EDGES = np.linspace(-3, 3, 61).tolist()
LABELS = {
    "troll": "TROLL, KL ≤ 0.05",
    "clip": "clip ±0.2",
    "clip-higher": "clip −0.2 +0.28",
    "gspo": "GSPO",
    "none": "no trust region",
}
BOUND = 0.05


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def about(name: str, arm: str, seed: int, updates: int, per_rollout: int) -> dict[str, Any]:
    return {
        "format": 1,
        "name": name,
        "status": "finished",
        "started": "2026-03-02T10:15:00+00:00",
        "finished": "2026-03-02T10:21:09+00:00",
        "seconds": 369.4,
        "command": f"troll train --run_name {name} --trust_region {arm} --seed {seed}",
        "seed": seed,
        "task": {"name": "arithmetic", "description": "sums and differences of one-digit numbers, few-shot"},
        "model": {"name": "smollm2-135m", "parameters": 134515008},
        "arm": arm,
        "arm_label": LABELS[arm],
        "settings": {
            "trust_region": arm,
            "kl_bound": BOUND,
            "regression_coef": 1.0,
            "epsilon": 0.2,
            "epsilon_high": None,
            "importance_sampling_level": "token",
            "advantage_estimator": "grpo",
            "learning_rate": 2e-5,
            "updates_per_generation": per_rollout,
            "num_generations": 8,
            "max_steps": updates,
            "temperature": 1.0,
            "report_to": [],
        },
        "versions": {
            "troll": "0.4.0",
            "torch": "2.13.0",
            "trl": "1.16.0",
            "transformers": "5.22.0",
            "python": "3.11.9",
        },
        "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": True},
        "machine": {"platform": "Linux", "processor": "Xeon", "cores": 2, "memory_gb": 15.6, "gpu": None},
    }


def write_run(
    folder: Path, arm: str = "troll", seed: int = 0, updates: int = 100, per_rollout: int = 4, reach: float = 1.0
) -> Path:
    """A run of some updates, a few of them on each rollout; ``reach`` scales how far tokens move."""
    rng = np.random.default_rng([seed, len(arm), ord(arm[0])])
    folder.mkdir(parents=True)
    described = about(folder.name, arm, seed, updates, per_rollout)
    (folder / "run.json").write_text(json.dumps(described), encoding="utf-8")
    (folder / "config.yaml").write_text(
        f"trust_region: {arm}\nseed: {seed}\nlearning_rate: 2.0e-05\n", encoding="utf-8"
    )
    metrics: list[dict[str, Any]] = []
    tokens: list[dict[str, Any]] = [{"format": 1, "kl_edges": KL_EDGES, "log_ratio_edges": LOG_RATIO_EDGES}]
    samples: list[dict[str, Any]] = []
    level = 0.95 if arm == "troll" else 0.88 if arm == "clip" else 0.8
    for step in range(1, updates + 1):
        update = (step - 1) % per_rollout
        skill = 0.47 + (level - 0.47) * (1 - np.exp(-step / 25))
        scale = reach * 3e-3 * update * (1 + 0.5 * np.sin(step / 9))
        kl = scale * rng.lognormal(-1.0, 1.6, 220)
        log_ratio = np.sqrt(2 * kl) * rng.standard_normal(220)
        projected = kl > BOUND
        after = np.where(projected, np.float32(BOUND) * 0.99999, kl)
        solver = rng.integers(3, 6, int(projected.sum()))
        metrics.append(
            {
                "step": step,
                "seconds": 3.6 * step,
                "loss": 0.02 * rng.standard_normal() - 0.01,
                "grad_norm": float(rng.lognormal(0, 0.4)),
                "learning_rate": 2e-5 * min(1.0, step / 10) * (1 - 0.8 * step / updates),
                "frac_reward_zero_std": float(min(1.0, step / updates)),
                "entropy": 0.9 * float(np.exp(-step / 60)) + 0.05,
                "completions/mean_length": 3.4,
                "num_tokens": 1400 * step,
                "tokens_per_second": 60.0,
                **spread("troll/kl_before", kl),
                "troll/sequence_kl_before": float(3.4 * kl.mean()),
                "troll/kl_by_sign/positive": float(kl[:80].mean()),
                "troll/kl_by_sign/negative": float(kl[80:].mean()),
                **{f"troll/kl_by_quarter/{i + 1}": float(kl[i::4].mean()) for i in range(4)},
                **spread("troll/ratio", np.exp(log_ratio)),
                "troll/ratio/min": float(np.exp(log_ratio).min()),
                **{f"time/{part}": float(s * rng.uniform(0.8, 1.2)) for part, s in TIMES.items() if s},
                "time/generate": 1.9 * float(rng.uniform(0.9, 1.1)) if update == 0 else 0.0,
                "time/evaluate": 2.5 if step % 20 == 0 else 0.0,
            }
        )
        if update == 0:  # where completions are sampled
            metrics[-1]["reward"] = float(np.clip(skill + 0.06 * rng.standard_normal(), 0, 1))
        tokens.append(
            {
                "step": step,
                "update": update,
                "count": kl.size,
                "kl": np.histogram(kl, KL_EDGES)[0].tolist(),
                "log_ratio": np.histogram(np.clip(log_ratio, -3, 2.999), LOG_RATIO_EDGES)[0].tolist(),
                "kl_quantiles": np.quantile(kl, [0.5, 0.9, 0.99, 1]).tolist(),
            }
        )
        if arm == "troll":
            metrics[-1] |= {
                **spread("troll/kl_after", after),
                "troll/projected_fraction": float(projected.mean()),
                "troll/sequence_kl_after": float(3.4 * after.mean()),
                "troll/regression": float((kl - after).mean()),
                "troll/solver_steps/mean": float(solver.mean()) if solver.size else 0.0,
                "troll/unconverged_tokens": 0.0,
            }
            tokens[-1]["kl_after"] = np.histogram(after, KL_EDGES)[0].tolist()
            tokens[-1]["solver_steps"] = {str(n): int((solver == n).sum()) for n in np.unique(solver)}
        elif arm != "none":
            metrics[-1]["clip_ratio/region_mean"] = float((abs(np.expm1(log_ratio)) > 0.2).mean())
        if step % 20 == 0 or step == 1:
            metrics.append(
                {
                    "step": step,
                    "seconds": 3.6 * step,
                    "eval_reward": float(skill + 0.01 * rng.standard_normal()),
                    "eval_runtime": 2.5,
                }
            )
        if step == 1 or step % max(1, updates // 8) == 0:
            samples += [sample(rng, step, update, place, arm, reach) for place in range(3)]
    metrics.insert(0, {"step": 0, "seconds": 0.0, "eval_reward": 0.46})
    lines(folder / "metrics.jsonl", metrics)
    lines(folder / "tokens.jsonl", tokens)
    lines(folder / "samples.jsonl", samples)
    return folder


TIMES = {
    "generate": 0.0,
    "reward": 0.05,
    "score": 0.3,
    "forward": 0.9,
    "backward": 1.3,
    "optimizer": 0.25,
    "other": 0.1,
}


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/p99": float(np.quantile(values, 0.99, method="lower")),
        f"{name}/max": float(values.max()),
    }


def sample(rng: np.random.Generator, step: int, update: int, place: int, arm: str, reach: float) -> dict[str, Any]:
    text = [
        [" ", "1", "2", "\n"],
        [" ", "4", " because", " eight", " minus", " four", " leaves", " four", ".", "<|im_end|>"] * 3,
        [" ", HOSTILE, CONTROL, "Ω" * 40, "🙂", "", "\n"],
    ][place]
    kl = reach * 0.01 * rng.lognormal(-1, 2.4, len(text))
    row = {
        "step": step,
        "update": update,
        "place": place,
        "prompt": "6 + 6 = 12\n8 - 4 = 4\n6 - 4 =",
        "tokens": text,
        "kl": kl.tolist(),
        "ratio": np.exp(np.sqrt(2 * kl) * rng.standard_normal(len(text))).tolist(),
        "reward": [1.0, 0.0, None][place],
        "advantage": [0.93, -1.07, 0.0][place],
    }
    if arm == "troll":
        row |= {"kl_after": np.minimum(kl, BOUND).tolist(), "projected": (kl > BOUND).tolist()}
    return row


def write_evaluation(folder: Path) -> None:
    def interval(value: float) -> dict[str, float]:
        return {"value": value, "low": value - 0.04, "high": min(1.0, value + 0.04)}

    models = [
        {
            "label": label,
            "path": "runs/x/model",
            "pass@1": interval(first),
            "pass@8": interval(second),
            "majority": interval(second - 0.05),
            "by_difficulty": {"0-5": first + 0.05, "5-10": first - 0.05},
        }
        for label, first, second in (("before", 0.46, 0.78), ("after", 0.9, 0.95))
    ]
    result = {"task": "arithmetic", "problems": 200, "samples": 8, "temperature": 1.0, "models": models}
    (folder / "eval.json").write_text(json.dumps(result), encoding="utf-8")


def write_comparison(folder: Path, arms: tuple[str, ...] = ("troll", "clip", "none"), updates: int = 60) -> Path:
    """Three seeds of each arm, and what `troll compare` concludes from them."""
    seeds = [0, 1, 2]
    folder.mkdir(parents=True)
    for arm in arms:
        for seed in seeds:
            write_run(folder / f"{arm}-{seed}", arm, seed, updates, reach=1.0 if arm == "troll" else 2.0)
    rng = np.random.default_rng(0)
    measures = []
    for key, label, centre in (
        ("held_out_last", "held-out accuracy, end", {"troll": 0.92, "clip": 0.86, "none": 0.79}),
        ("reward_mean", "sampled reward, mean of the run", {"troll": 0.81, "clip": 0.80, "none": 0.7}),
        ("kl_max", "largest token KL", {"troll": 0.9, "clip": 2.1, "none": 3.0}),
        ("seconds_per_update", "seconds per update", {"troll": 3.7, "clip": 3.5, "none": 3.4}),
    ):
        table = []
        for arm in arms:
            values = (centre.get(arm, 0.75) + 0.02 * rng.standard_normal(3)).tolist()
            mean, half = float(np.mean(values)), float(4.3 * np.std(values, ddof=1) / np.sqrt(3))
            table.append({"arm": arm, "values": values, "mean": mean, "low": mean - half, "high": mean + half})
        verdicts = []
        for row in table[1:]:
            gap = table[0]["mean"] - row["mean"]
            other = LABELS[row["arm"]]
            says = "inconclusive" if abs(gap) < 0.03 else f"TROLL is {'better' if gap > 0 else 'worse'} than {other}"
            verdicts.append(
                {
                    "a": "troll",
                    "b": row["arm"],
                    "difference": gap,
                    "low": gap - 0.04,
                    "high": gap + 0.04,
                    "says": says,
                    "because": "the 95 % interval of the difference over 3 seeds "
                    + ("contains 0" if says == "inconclusive" else "excludes 0"),
                }
            )
        measures.append({"key": key, "label": label, "table": table, "verdicts": verdicts})
    described = about("x", "troll", 0, updates, 4)
    result = {
        "format": 1,
        "name": folder.name,
        "task": described["task"],
        "model": described["model"],
        "seeds": seeds,
        "arms": [{"arm": a, "label": LABELS[a], "runs": [f"{a}-{s}" for s in seeds]} for a in arms],
        "measures": measures,
    }
    (folder / "comparison.json").write_text(json.dumps(result), encoding="utf-8")
    return folder
