"""A run in words: what is said comes from the files, and what is not there is said to be missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import explain_cases as cases
import pytest

from troll.lab.report.rules import Watch, explain
from troll.lab.runs import Run, append_line, write_json
from troll.trl.robust.lock import locked
from troll.trl.robust.store import commit, stage

PEAK = [0.1, 0.3, 0.5, 0.7, 0.9, 0.9, 0.9, 0.9, 0.9]
COLUMNS = {
    "troll/projected_fraction": [0.2] + [0.04] * 8,
    "troll/kl_before/mean": 0.02,
    "troll/kl_before/max": [3.0] + [0.5] * 8,
    "troll/kl_after/max": 0.05,
    "troll/kl_before/p99": 0.2,
    "seconds": 75.0,
}


def write(folder: Path, status: str = "finished", rewards: Any = PEAK, columns: Any = None, **more: Any) -> Path:
    """The folder of a run of four updates on each rollout."""
    settings = {**cases.SETTINGS, **more.pop("settings", {})}
    about = {
        "format": 1, "name": folder.name, "status": status, "seconds": 0.0, "max_steps": 36, "settings": settings,
        "task": {"name": "arithmetic"}, "model": {"name": "smollm2-135m", "parameters": 134515008},
        "arm": "troll", "arm_label": "TROLL, KL ≤ 0.05", **more,
    }  # fmt: skip
    folder.mkdir(parents=True)
    write_json(folder / "run.json", about)
    (folder / "config.yaml").write_text("learning_rate: 1.0e-05\n")
    for line in cases.lines(rewards, COLUMNS if columns is None else columns, settings["updates_per_generation"]):
        append_line(folder / "metrics.jsonl", line)
    return folder


def test_a_run_that_went_well(tmp_path: Path) -> None:
    folder = write(tmp_path / "good")
    for step, value in ((0, 0.1), (16, 0.6), (32, 0.75), (36, 0.7)):
        append_line(folder / "metrics.jsonl", {"step": step, "eval_reward": value})
    told = explain(folder)
    assert told.what == [
        "smollm2-135m (135 M weights) on arithmetic: TROLL, KL ≤ 0.05, learning rate 1e-05, α = 1, 4 updates on each "
        "rollout, 8 completions of each prompt.",
        "It is finished: 36 of 36 updates, 9 rollouts, 1 min.",
    ]
    assert told.reward == [
        "Sampled reward 0.100 in the first rollout. Its mean over 3 rollouts: 0.900 at its highest (up to update 28), "
        "0.900 at the end.",
        "It was still rising: more updates may give more (--max_steps).",  # 0.7 five rollouts ago, and steps of 0.1
        "Held-out reward 0.100 (update 0) → 0.750 (update 32) → 0.700 (update 36).",
    ]
    assert told.region == [
        "5.8\xa0% of the tokens were projected, most in the rollout of update 1 (20\xa0%).",
        "The network went 0.02 nats per token from the old policy on average, and 3 at the most; after projection 0.05 "
        "at the most; the bound is 0.05.",
    ]
    assert (told.findings, told.changes, told.commands) == ([], [], [])


def test_the_end_may_be_the_highest(tmp_path: Path) -> None:
    told = explain(write(tmp_path / "x", rewards=[0.1, 0.2, 0.3, 0.4], columns={}))
    assert told.reward[0] == (
        "Sampled reward 0.100 in the first rollout. Its mean over 3 rollouts: 0.300 at the end, the highest."
    )


def test_what_to_type_makes_the_run_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "a run", rewards=[*PEAK, 0.2, 0.1, 0.1, 0.1, 0.1], columns={})
    told = explain(folder)
    assert [x.name for x in told.findings] == ["reward_collapse"]
    assert told.commands == [f"troll train --config '{folder}/config.yaml' --learning_rate 3.33e-06"]
    assert told.reward[1] == "It no longer rises."
    (folder / "config.yaml").unlink()
    assert explain(folder).commands == []


@pytest.mark.parametrize(
    ("region", "column", "said"),
    [
        ("clip", {"clip_ratio/region_mean": 0.02}, "The clip removed the gradient of 2.0\xa0% of the tokens."),
        ("clip", {"clip_ratio/region_mean": 0.0}, "No token was clipped."),
        ("clip", {}, "How much was clipped was not logged."),
        ("none", {}, "Nothing kept the updates close to the old policy."),
        ("troll", {"troll/projected_fraction": 0.0}, "No token left the region: the projection changed nothing."),
        ("troll", {}, "How much was projected was not logged."),
    ],
)
def test_every_region_and_what_was_not_logged(tmp_path: Path, region: str, column: Any, said: str) -> None:
    folder = write(tmp_path / "x", columns=column, settings={"trust_region": region})
    assert explain(folder).region == [said, "How far the network went was not logged (--measure_kl true)."]
    moved = {"troll/kl_before/mean": 0.5, "troll/kl_before/max": 8.0}
    other = write(tmp_path / "y", columns={**column, **moved}, settings={"trust_region": region})
    assert (
        explain(other).region[1].startswith("The network went 0.5 nats per token from the old policy on average, and 8")
    )
    assert explain(other).region[1].endswith("which nothing bounds.")


@pytest.mark.parametrize(("region", "who"), [("troll", "The trust region"), ("clip", "The clip")])
def test_one_update_per_rollout(tmp_path: Path, region: str, who: str) -> None:
    told = explain(write(tmp_path / "x", settings={"trust_region": region, "updates_per_generation": 1}))
    assert told.region == [f"{who} could not act: each rollout served one update."]
    assert "1 update on each rollout" in told.what[0]
    assert [x.name for x in told.findings] == ["one_update"]


def test_runs_that_ended_early(tmp_path: Path) -> None:
    failed = explain(write(tmp_path / "failed", "failed", PEAK[:3], {}, error="the disk is full."))
    assert failed.what[1:] == ["It failed after 12 of 36 updates, 3 rollouts, 0 s.", "The error: the disk is full."]
    assert failed.commands == [f"troll train --resume {tmp_path / 'failed'}"]
    assert (
        explain(write(tmp_path / "stopped", "interrupted", PEAK[:3], {})).what[1].startswith("It was interrupted: 12")
    )
    killed = write(tmp_path / "killed", "running", PEAK[:3], {})
    assert (
        explain(killed).what[1].startswith("It ended without a word, as when it is killed or out of memory: 12 of 36")
    )
    with locked(killed):
        running = explain(killed)
    assert running.what[1] == "It is still running: 12 of 36 updates, 3 rollouts, 0 s so far."
    assert running.commands == []
    assert running.reward[1] == "Whether it still rises cannot be said before 8 rollouts."


def test_a_run_with_nothing_in_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "empty", "failed", [])
    told = explain(folder)
    assert told.what[1] == "It failed after 0 of 36 updates, 0 rollouts, 0 s."
    assert told.reward[0] == "No reward was logged, so there is nothing to say about it."
    assert told.reward[1] == "No held-out reward was measured (--eval_strategy no, or it was not reached)."
    assert told.region == ["No update was logged."]
    assert told.findings == []
    bare = tmp_path / "bare"
    bare.mkdir()
    write_json(bare / "run.json", {"format": 1, "name": "bare", "status": "finished", "settings": {}})
    assert explain(bare).what[0] == "a model on a task: none."
    few = explain(write(tmp_path / "few", rewards=[0.25, 0.5], columns={}))
    assert few.reward[0] == "Sampled reward 0.250, 0.500: too few rollouts to say more."


def test_a_broken_one(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "name": "x"}))  # without a status
    told = explain(tmp_path)
    assert told.entry.state == "broken"
    assert "cannot be read" in told.what[0]


def test_the_json_has_every_field(tmp_path: Path) -> None:
    told = explain(write(tmp_path / "x", rewards=[0.0] * 4, columns={"frac_reward_zero_std": 1.0})).as_json()
    assert json.loads(json.dumps(told)) == told
    (finding,) = told["findings"]
    assert (finding["name"], finding["since"], finding["said"], finding["until"]) == ("no_signal", 1, 12, None)
    assert told["changes"][0]["flags"] == "--num_generations 16"
    assert (told["name"], told["state"]) == ("x", "finished")


# ---------------------------------------------------------------------- while it runs


def feed(watch: Watch, rewards: list[float], columns: Any, first: int = 0) -> list[list[str]]:
    """What is said after every rollout."""
    said = []
    for i, line in enumerate(cases.lines(rewards, columns)):
        if line["step"] > first:
            watch.add(line)
            if i % cases.UPDATES == cases.UPDATES - 1:
                said.append([x.name for x in watch.new()])
    return said


def test_a_warning_comes_once_and_is_written_down(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", rewards=[])
    watch = Watch(folder)
    assert feed(watch, PEAK, {"troll/projected_fraction": 0.3}) == [[], [], ["projected"], *[[]] * 6]
    (line,) = Run(folder).warnings()
    assert (line["name"], line["since"], line["said"], line["until"]) == ("projected", 1, 12, None)
    assert line["changes"][:2] == [
        {"flags": "--kl_bound 0.2", "why": "a narrow bound sets the pace, and this one learnt more in our runs"},
        {"flags": "--learning_rate 5e-06", "why": "updates that stay inside the region by themselves lose nothing"},
    ]


def test_a_resumed_run_says_no_more_than_it_must(tmp_path: Path) -> None:
    columns = {"troll/projected_fraction": 0.3}
    folder = write(tmp_path / "x", rewards=PEAK[:4], columns=columns)
    feed(Watch(folder), PEAK[:4], columns)
    on = Watch(folder)
    on.begin(16)
    assert feed(on, PEAK, columns, first=16) == [[]] * 5
    back = Watch(folder)
    back.begin(8)  # a checkpoint from before the warning, with lines after it in the file
    assert feed(back, PEAK, {"troll/projected_fraction": 0.0}, first=8) == [[]] * 7
    again = Watch(folder)
    again.begin(8)
    assert feed(again, PEAK, columns, first=8) == [["projected"], *[[]] * 6]
    assert len((folder / "warnings.jsonl").read_text().splitlines()) == 2
    assert len(Run(folder).warnings()) == 1


def test_held_out_rewards_are_watched_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", rewards=[])
    watch = Watch(folder)
    feed(watch, [0.8] * 4, {})
    for step in (12, 16):
        watch.add({"step": step, "eval_reward": 0.1, "eval_loss": 0.0})
    assert [x.name for x in watch.new()] == ["held_out_gap"]


def test_reading_goes_on_without_the_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "x")
    assert Run(folder).warnings() == []
    (folder / "warnings.jsonl").write_text('{"name": "a", "said": 8}\n{"name": "b"}\n{"name": "c", "sa')
    assert [x["name"] for x in Run(folder).warnings()] == ["a"]


def test_a_checkpoint_to_go_on_from_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", "interrupted")
    staged = stage(folder, 16)
    (staged / "weights").write_bytes(b"x")
    commit(staged)
    assert explain(folder).commands == [f"troll train --resume {folder}"]
