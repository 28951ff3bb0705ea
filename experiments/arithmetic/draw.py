"""Collect runs of train.py in results.json and draw them: draw.py [RUN.json …]; without files, draw results.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import pyplot as plt

HERE = Path(__file__).parent
ARMS = {"bucket": "TROLL, bucket", "floor": "TROLL, floor", "clip": "clip ±0.2", "none": "no trust region"}
COLOURS = {"bucket": "#197278", "floor": "#5aa9a0", "clip": "#c44536", "none": "#8a8a8a"}
KEPT = ("reward", "kl_before/mean", "sequence_kl_before", "entropy", "kept_mass/old", "projected_fraction")


def gather(files: list[str]) -> None:
    """Store the columns of each run that the figure and the table need."""
    runs = []
    for run in sorted((json.loads(Path(file).read_text()) for file in files), key=lambda r: (r["arm"], r["seed"])):
        rows = run.pop("rows")
        runs.append({**run, **{name: [round(row[name], 5) for row in rows] for name in KEPT if name in rows[0]}})
    (HERE / "results.json").write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")


def table(runs: list[dict[str, Any]]) -> str:
    """Mean over the last ten rollouts: each seed's reward, their mean, and the token KL reached."""
    lines = ["| arm | reward by seed | mean | token KL |", "|---|---|---|---|"]
    for arm, name in ARMS.items():
        mine = [run for run in runs if run["arm"] == arm]
        rewards = [mean(run["reward"][-10:]) for run in mine]
        kl = mean(mean(run["kl_before/mean"][-10:]) for run in mine)
        lines.append(f"| {name} | {', '.join(f'{r:.3f}' for r in rewards)} | {mean(rewards):.3f} | {kl:.3f} |")
    return "\n".join(lines)


def draw(runs: list[dict[str, Any]]) -> None:
    """Mean and range over the seeds."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for panel, quantity, title in zip(
        panels,
        ("reward", "kl_before/mean"),
        ("reward of the sampled answers", "mean token KL to the old policy, during the updates"),
        strict=True,
    ):
        for arm, name in ARMS.items():
            curves = list(zip(*(run[quantity] for run in runs if run["arm"] == arm), strict=True))
            x = range(len(curves))
            panel.plot(x, [mean(c) for c in curves], color=COLOURS[arm], lw=2, label=name)
            panel.fill_between(x, [min(c) for c in curves], [max(c) for c in curves], color=COLOURS[arm], alpha=0.15)
        panel.set(xlabel="rollout (32 updates each)", title=title)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    panels[1].set_yscale("log")
    panels[1].axhline(0.05, color="black", lw=0.8, ls=":")
    panels[0].legend(loc="lower right", fontsize=9)
    figure.savefig(HERE / "figure.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    if sys.argv[1:]:
        gather(sys.argv[1:])
    gathered = json.loads((HERE / "results.json").read_text())
    draw(gathered)
    print(table(gathered))
