"""The arm of a run by its settings, and the conclusions of a comparison from folders with known numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from troll.errors import InputError
from troll.lab.runs.comparison import ARMS, arm_of, check_arms, check_seeds, conclude
from troll.lab.runs.statistics import interval
from troll.lab.runs.writer import begin_comparison
from troll.trl import TROLLConfig

HELD_OUT = {"troll": [0.9, 0.95, 0.93], "clip": [0.8, 0.84, 0.84], "none": [0.94, 0.9, 0.95]}


def write_run(folder: Path, arm: str, seed: int, held_out: float, **about) -> None:
    """Four rollouts of two updates, and three evaluations."""
    folder.mkdir()
    described = {
        "format": 1,
        "status": "finished",
        "seconds": 100.0 + seed + (7 if arm == "troll" else 0),
        "seed": seed,
        "task": {"name": "arithmetic", "description": "sums"},
        "model": {"name": "tiny", "parameters": 7},
        "arm_label": f"label of {arm}",
    }
    (folder / "run.json").write_text(json.dumps(described | about))
    lines = [{"step": 0, "eval_reward": 0.1}]
    for step in range(1, 9):
        line = {"step": step, "entropy": float(step), "troll/kl_before/mean": 0.01 * step}
        if step % 2:
            line["reward"] = held_out - 0.1 * (8 - step)
        lines.append(line)
    lines += [{"step": 4, "eval_reward": held_out - 0.2}, {"step": 8, "eval_reward": held_out}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def comparison(folder: Path, arms=HELD_OUT, seeds=(0, 1, 2), jobs: int = 1) -> Path:
    begin_comparison(
        folder, {arm: arm for arm in arms}, seeds, {"name": "t"}, {"name": "m"}, jobs=jobs, keep_models=False
    )
    for arm in arms:
        for seed, value in zip(seeds, arms[arm], strict=True):
            if value is not None:
                write_run(folder / f"{arm}-{seed}", arm, seed, value)
    return folder


def measure(found, key):
    (one,) = [m for m in found["measures"] if m["key"] == key]
    return one, {row["arm"]: row for row in one["table"]}, {v["b"]: v for v in one["verdicts"]}


def test_tables_and_verdicts(tmp_path):
    folder = comparison(tmp_path / "c")
    before = (folder / "comparison.json").read_bytes()
    found = conclude(folder)
    assert (folder / "comparison.json").read_bytes() == before
    assert (found["format"], found["name"], found["seeds"], found["missing"]) == (1, "c", [0, 1, 2], [])
    assert found["task"] == {"name": "arithmetic", "description": "sums"}
    assert found["model"]["parameters"] == 7
    assert found["arms"][1] == {"arm": "clip", "label": "label of clip", "runs": ["clip-0", "clip-1", "clip-2"]}
    _, table, verdicts = measure(found, "held_out_last")
    assert table["troll"]["values"] == HELD_OUT["troll"]
    expected = interval(HELD_OUT["clip"])
    assert (table["clip"]["mean"], table["clip"]["low"], table["clip"]["high"]) == (
        expected.mean,
        expected.low,
        expected.high,
    )
    gap = interval([0.1, 0.11, 0.09])
    assert verdicts["clip"]["a"] == "troll"
    assert verdicts["clip"]["says"] == "TROLL is better"
    assert [verdicts["clip"][x] for x in ("difference", "low", "high")] == pytest.approx([gap.mean, gap.low, gap.high])
    assert verdicts["none"]["says"] == "inconclusive"
    assert found["comparisons"] == 10  # five judged measures, two other arms
    assert verdicts["none"]["because"].endswith("contains 0; one of 10 comparisons, not corrected")


def test_each_measure_is_what_it_says(tmp_path):
    found = conclude(comparison(tmp_path / "c"))
    rewards = [0.9 - 0.1 * (8 - step) for step in (1, 3, 5, 7)]
    expected = {
        "held_out_last": 0.9,
        "held_out_mean": 0.8,  # of 0.7 and 0.9: not the one before training
        "reward_last": sum(rewards[1:]) / 3,
        "reward_mean": sum(rewards) / 4,
        "kl_mean": 0.045,
        "entropy_last": (3 + 4 + 5 + 6 + 7 + 8) / 6,  # the updates on the last three rollouts
        "seconds": 107.0,
    }
    assert [m["key"] for m in found["measures"]] == list(expected)
    for key, value in expected.items():
        assert measure(found, key)[1]["troll"]["values"][0] == pytest.approx(value), key
    assert [m["key"] for m in found["measures"] if not m["judged"]] == ["kl_mean", "entropy_last"]
    assert all(bool(m["verdicts"]) == m["judged"] for m in found["measures"])


def test_fewer_seconds_are_better_unless_runs_shared_the_machine(tmp_path):
    folder = comparison(tmp_path / "c")
    run = folder / "clip-1" / "run.json"
    run.write_text(json.dumps(json.loads(run.read_text()) | {"seconds": 101.5}))
    _, _, verdicts = measure(conclude(folder), "seconds")
    assert verdicts["clip"]["says"] == "TROLL is worse"  # 7, 6.5 and 7 seconds more
    assert verdicts["none"]["says"] == "no verdict"  # 7 every time
    shared = comparison(tmp_path / "d", jobs=2)
    assert measure(conclude(shared), "seconds")[2] == {}


def test_only_seeds_that_every_arm_has_count(tmp_path):
    arms = {"troll": [0.9, 0.95, 0.93], "clip": [0.8, None, 0.84], "none": [0.94, 0.9, 0.95], "gspo": [None] * 3}
    folder = comparison(tmp_path / "c", arms)
    about = json.loads((folder / "none-0" / "run.json").read_text())
    found = conclude(folder)
    assert found["missing"] == ["clip-1", "gspo-0", "gspo-1", "gspo-2"]
    _, table, verdicts = measure(found, "held_out_last")
    assert table["clip"]["values"] == [0.8, None, 0.84]
    assert table["troll"]["mean"] == pytest.approx((0.9 + 0.93) / 2)
    assert table["gspo"]["mean"] is None
    assert set(verdicts) == {"clip", "none"}
    assert "paired difference over 2 seeds" in verdicts["clip"]["because"]
    (folder / "none-0" / "run.json").write_text(json.dumps(about | {"status": "interrupted"}))
    found = conclude(folder)
    assert "none-0" in found["missing"]
    assert measure(found, "held_out_last")[2]["clip"]["says"] == "no verdict"


def test_without_runs_and_without_evaluations(tmp_path):
    empty = conclude(comparison(tmp_path / "c", {"troll": [None] * 3, "clip": [None] * 3}))
    assert len(empty["missing"]) == 6
    assert empty["comparisons"] == 0
    assert empty["task"] == {"name": "t"}
    folder = comparison(tmp_path / "d")
    for run in folder.glob("*-*"):
        lines = [x for x in (run / "metrics.jsonl").read_text().splitlines() if "eval_" not in x or '"step": 0' in x]
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = conclude(folder)
    assert measure(found, "held_out_last")[1]["troll"]["values"] == [None] * 3  # before training is not the end
    assert measure(found, "held_out_last")[2] == {}
    assert measure(found, "reward_mean")[2]["clip"]["says"] == "TROLL is better"


def test_the_first_arm_is_compared_with_the_others(tmp_path):
    found = conclude(comparison(tmp_path / "c", {"clip": HELD_OUT["clip"], "troll": HELD_OUT["troll"]}))
    assert measure(found, "held_out_last")[2]["troll"]["says"] == "clip is worse"


@pytest.mark.parametrize(
    ("arms", "problem"),
    [
        (["troll", "ppo"], "--arms has the unknown arm 'ppo'"),
        (["troll", "clip", "troll"], "--arms contains troll 2 times"),
        (["troll"], "--arms troll names one arm, but a comparison needs two"),
        ([], "--arms names no arm"),
    ],
)
def test_arms_that_cannot_be_compared(arms, problem):
    with pytest.raises(InputError, match=problem):
        check_arms(arms)


@pytest.mark.parametrize(
    ("seeds", "problem"),
    [
        ([0, 1, 0], "--seeds contains the seed 0 2 times"),
        ([-1], "got -1"),
        ([2**32], "got 4294967296"),
        ([], "names no seed"),
    ],
)
def test_invalid_seeds(seeds, problem):
    with pytest.raises(InputError, match=problem):
        check_seeds(seeds)


def test_a_folder_without_a_comparison(tmp_path):
    with pytest.raises(InputError, match=r"comparison\.json"):
        conclude(tmp_path)


# ---------------------------------------------------------------------- arms


def settings(**changes: Any) -> dict[str, Any]:
    """As run.json has them."""
    return TROLLConfig("unused", use_cpu=True, bf16=False, **changes).to_dict()


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_recognised(arm: str) -> None:
    assert arm_of(settings(**ARMS[arm]))[0] == arm


def test_labels_tell_the_arms_apart() -> None:
    labels = {arm: arm_of(settings(**given))[1] for arm, given in ARMS.items()}
    assert labels == {
        "troll": "TROLL, KL ≤ 0.2",
        "clip": "clip ±0.2",
        "clip-higher": "clip −0.2, +0.28",
        "gspo": "GSPO clip −0.0003, +0.0004",
        "none": "no trust region",
    }


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({"trust_region": "clip", "epsilon": 0.1}, "clip ±0.1"),
        ({"trust_region": "clip", "epsilon": 0.2, "epsilon_high": 0.3}, "clip −0.2, +0.3"),
        ({"trust_region": "clip", "importance_sampling_level": "sequence"}, "GSPO clip ±0.2"),
        ({"trust_region": "troll", "importance_sampling_level": "sequence"}, "TROLL, KL ≤ 0.2, sequence ratio"),
        ({"trust_region": "none", "importance_sampling_level": "sequence"}, "no trust region, sequence ratio"),
        ({"trust_region": "clip", "loss_type": "cispo", "epsilon_high": 5.0}, "TRL's cispo"),
    ],
)
def test_settings_of_ones_own(changes: dict[str, Any], label: str) -> None:
    assert arm_of(settings(**changes)) == ("custom", label)


def test_the_bound_is_part_of_the_name_and_not_of_the_arm() -> None:
    assert arm_of(settings(kl_bound=0.01)) == ("troll", "TROLL, KL ≤ 0.01")
    assert arm_of(settings(kl_bound=float("inf"))) == ("troll", "TROLL, KL ≤ inf")
    assert arm_of(settings()) == ("troll", "TROLL, KL ≤ 0.2")
    assert arm_of({**settings(), "bound": "projected", "bound_target": 0.03}) == (
        "troll",
        "TROLL, projected bound",
    )  # of 0.1.0
    assert arm_of(settings(kl_bound_schedule="projected target=0.03")) == ("troll", "TROLL, projected bound")


def test_an_upper_clip_like_the_lower_one_is_the_plain_clip() -> None:
    assert arm_of(settings(trust_region="clip", epsilon=0.2, epsilon_high=0.2)) == ("clip", "clip ±0.2")
