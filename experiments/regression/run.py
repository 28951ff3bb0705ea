"""How strong should the regression term be when an update sees few completions?

    python experiments/regression/run.py --runs_dir DIR [--jobs 8] [any flag of troll train]   trains
    python experiments/regression/run.py --collect DIR                                         results.json, figure.svg

The embedded default of ``troll train`` (8 completions per update, 8 updates per rollout) under several weights α of the
regression term, and the same with 64 completions per update.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from matplotlib.figure import Figure

from troll.lab.runs import Run

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
SMALL: dict[str, object] = {"kl_bound": 0.05}  # the authors' bound; 8 completions per update, 10 rollouts
LARGE: dict[str, object] = {**SMALL, "per_device_train_batch_size": 64, "learning_rate": 1e-5}
VARIANTS = {
    "8, α = 0": {**SMALL, "regression_coef": 0.0},
    "8, α = 0.1": {**SMALL, "regression_coef": 0.1},
    "8, α = 1": {**SMALL, "regression_coef": 1.0},
    "8, α = 1, KL ≤ 0.2": {**SMALL, "regression_coef": 1.0, "kl_bound": 0.2},
    "8, clip ±0.2": {**SMALL, "trust_region": "clip"},
    "64, α = 0.1": {**LARGE, "regression_coef": 0.1},
    "64, α = 1": {**LARGE, "regression_coef": 1.0},
    "64, clip ±0.2": {**LARGE, "trust_region": "clip"},
}
"""Completions per update, and what differs."""


def name_of(variant: int, seed: int) -> str:
    """Of the folder of a run."""
    return f"variant{variant}-{seed}"


def train(folder: Path, jobs: int, flags: list[str]) -> None:
    """All variants and seeds, ``jobs`` at a time."""

    def one(number: int, settings: dict[str, object], seed: int) -> None:
        given = [f"--{key}={value}" for key, value in settings.items()]
        place = ["--runs_dir", str(folder), "--run_name", name_of(number, seed), "--seed", str(seed)]
        nothing_kept = ["--save_model", "false", "--write_report", "false"]
        subprocess.run([sys.executable, "-m", "troll", "train", *place, *given, *nothing_kept, *flags], check=True)

    with ThreadPoolExecutor(jobs) as pool:
        futures = [
            pool.submit(one, number, settings, seed)
            for seed in SEEDS
            for number, settings in enumerate(VARIANTS.values())
        ]
        for future in futures:
            future.result()


def collect(folder: Path) -> None:
    """The rewards of all runs into one file, and a figure."""
    rows = []
    for number, (label, settings) in enumerate(VARIANTS.items()):
        for seed in SEEDS:
            run = Run.open(folder / name_of(number, seed))
            metrics = run.metrics()
            rows.append(
                {
                    "variant": label,
                    "seed": seed,
                    "settings": settings,
                    "machine": run.about["machine"]["gpu"] or run.about["machine"]["processor"],
                    "rewards": [round(x["reward"], 4) for x in metrics if "reward" in x],
                    "held_out": [round(x["eval_reward"], 4) for x in run.evaluations()],
                    "projected": _mean(metrics, "troll/projected_fraction"),
                    "kl": _mean(metrics, "troll/kl_before/mean"),
                }
            )
    (HERE / "results.json").write_text(
        "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n", encoding="utf-8"
    )
    draw(rows)


def _mean(metrics: list[dict], name: str) -> float | None:
    values = [line[name] for line in metrics if name in line]
    return round(sum(values) / len(values), 5) if values else None


def draw(rows: list[dict]) -> None:
    """Sampled reward over the rollouts, mean of the seeds; one panel per size of the updates."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, size in zip(panels, ("8", "64"), strict=True):
        for label in (x for x in VARIANTS if x.startswith(f"{size}, ")):
            curves = [row["rewards"] for row in rows if row["variant"] == label]
            means = [sum(x) / len(x) for x in zip(*curves, strict=True)]
            panel.plot(range(1, len(means) + 1), means, label=label.split(", ", 1)[1])
        panel.set(xlabel="rollout", title=f"{size} completions per update", ylim=(0, 1))
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, loc="lower right")
    panels[0].set_ylabel("sampled reward, mean of 3 seeds")
    figure.savefig(HERE / "figure.svg", metadata={"Date": None})


def main() -> None:
    """Train or collect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs_dir", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--collect", type=Path)
    args, flags = parser.parse_known_args()
    if args.collect:
        collect(args.collect)
    elif args.runs_dir:
        train(args.runs_dir, args.jobs, flags)
    else:
        parser.error("give --runs_dir or --collect")


if __name__ == "__main__":
    main()
