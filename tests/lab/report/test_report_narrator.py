"""The sentences about a run come from its files; what was not logged is named."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import explain_cases as cases
import numpy as np
import pytest
from test_explain_rules import SPOKEN

from troll.lab.cli import main
from troll.lab.report import write_report
from troll.lab.report.narrator import conclusion, explain
from troll.lab.report.rules import RULES, RuleMonitor
from troll.lab.runs import Run, append_line, write_json
from troll.trl.robust.store import commit, locked, stage

RUNS = Path(__file__).parent / "rules" / "runs"
SAME = "the run is the same as without a trust region"
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
        "smollm2-135m (135 M parameters) on arithmetic: TROLL, KL ≤ 0.05, learning rate 1e-05, α = 1, 4 updates per "
        "rollout, 8 completions per prompt.",
        "Finished: 36 of 36 updates, 9 rollouts, 1 min.",
    ]
    assert told.reward == [
        "Sampled reward 0.100 in the first rollout; mean over 3 rollouts: 0.900 at its highest (update 28), "
        "0.900 at the end.",
        "The reward rose in the last 5 rollouts.",  # 0.7 five rollouts ago, and steps of 0.1
        "Held-out reward 0.100 (update 0) → 0.750 (update 32) → 0.700 (update 36).",
    ]
    assert told.region == [
        "5.8\xa0% of the tokens were projected, most in the rollout of update 1 (20\xa0%).",
        "Token KL to the old policy: mean 0.02, largest 3, after projection 0.05; the bound is 0.05.",
    ]
    assert (told.findings, told.changes, told.commands) == ([], [], [])


def test_the_end_may_be_the_highest(tmp_path: Path) -> None:
    told = explain(write(tmp_path / "x", rewards=[0.1, 0.2, 0.3, 0.4], columns={}))
    assert told.reward[0] == (
        "Sampled reward 0.100 in the first rollout; mean over 3 rollouts: 0.300 at the end, the highest."
    )


def test_what_to_type_makes_the_run_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "a run", rewards=[*PEAK, 0.2, 0.1, 0.1, 0.1, 0.1], columns={})
    told = explain(folder)
    assert [x.name for x in told.findings] == ["reward_collapse"]
    assert told.commands == [f"troll train --config '{folder}/config.yaml' --learning_rate 3.33e-06"]
    assert told.reward[1] == "The reward has fallen since update 28."
    (folder / "config.yaml").unlink()
    assert explain(folder).commands == []


@pytest.mark.parametrize(
    ("region", "column", "said"),
    [
        ("clip", {"clip_ratio/region_mean": 0.02}, "The clip removed the gradient of 2.0\xa0% of the tokens."),
        (
            "clip",
            {"clip_ratio/region_mean": 0.0},
            "No token was clipped: the run is the same as without a trust region.",
        ),
        ("clip", {}, "The share of clipped tokens was not logged."),
        ("none", {}, "Nothing constrained the updates."),
        (
            "troll",
            {"troll/projected_fraction": 0.0},
            f"No token was projected: {SAME}.",
        ),
        ("troll", {}, "The share of projected tokens was not logged."),
    ],
)
def test_every_region_and_what_was_not_logged(tmp_path: Path, region: str, column: Any, said: str) -> None:
    folder = write(tmp_path / "x", columns=column, settings={"trust_region": region})
    assert explain(folder).region == [said, "The token KL was not logged (--measure_kl true)."]
    moved = {"troll/kl_before/mean": 0.5, "troll/kl_before/max": 8.0}
    other = write(tmp_path / "y", columns={**column, **moved}, settings={"trust_region": region})
    limit = "; the bound is 0.05." if region == "troll" else ", without a bound."
    assert explain(other).region[1] == f"Token KL to the old policy: mean 0.5, largest 8{limit}"


@pytest.mark.parametrize(("region", "who"), [("troll", "The trust region"), ("clip", "The clip")])
def test_one_update_per_rollout(tmp_path: Path, region: str, who: str) -> None:
    told = explain(write(tmp_path / "x", settings={"trust_region": region, "updates_per_generation": 1}))
    assert told.region == [f"{who} could not act: each rollout is used for one update."]
    assert "1 update per rollout" in told.what[0]
    assert [x.name for x in told.findings] == ["one_update"]


def test_runs_that_ended_early(tmp_path: Path) -> None:
    failed = explain(write(tmp_path / "failed", "failed", PEAK[:3], {}, error="the disk is full."))
    assert failed.what[1:] == ["Failed after 12 of 36 updates, 3 rollouts, 0 s.", "The error: the disk is full."]
    assert failed.commands == [f"troll train --resume {tmp_path / 'failed'}"]
    assert explain(write(tmp_path / "stopped", "interrupted", PEAK[:3], {})).what[1].startswith("Interrupted: 12")
    killed = write(tmp_path / "killed", "running", PEAK[:3], {})
    assert explain(killed).what[1].startswith("Ended without a message, as when killed or out of memory: 12 of 36")
    with locked(killed):
        running = explain(killed)
    assert running.what[1] == "Still running: 12 of 36 updates, 3 rollouts, 0 s so far."
    assert running.commands == []
    assert running.reward[1] == "A trend needs 8 rollouts, the run has 3."


def test_a_run_with_nothing_in_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "empty", "failed", [])
    told = explain(folder)
    assert told.what[1] == "Failed after 0 of 36 updates, 0 rollouts, 0 s."
    assert told.reward[0] == "No reward was logged."
    assert told.reward[1] == (
        "No held-out reward was logged: evaluation is off (--eval_strategy no) or has not run yet."
    )
    assert told.region == ["No update was logged."]
    assert told.findings == []
    bare = tmp_path / "bare"
    bare.mkdir()
    write_json(bare / "run.json", {"format": 1, "name": "bare", "status": "finished", "settings": {}})
    assert explain(bare).what[0] == "unknown model on unknown task: unknown trust region."
    few = explain(write(tmp_path / "few", rewards=[0.25, 0.5], columns={}))
    assert few.reward[0] == "Sampled reward 0.250, 0.500: too few rollouts for a trend."


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


def feed(monitor: RuleMonitor, rewards: list[float], columns: Any, first: int = 0) -> list[list[str]]:
    """What is said after every rollout."""
    said = []
    for i, line in enumerate(cases.lines(rewards, columns)):
        if line["step"] > first:
            monitor.add(line)
            if i % cases.UPDATES == cases.UPDATES - 1:
                said.append([x.name for x in monitor.new()])
    return said


def test_a_warning_comes_once_and_is_written_down(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", rewards=[])
    monitor = RuleMonitor(folder)
    assert feed(monitor, PEAK, {"troll/projected_fraction": 0.3}) == [[], [], ["projected"], *[[]] * 6]
    (line,) = Run(folder).warnings()
    assert (line["name"], line["since"], line["said"], line["until"]) == ("projected", 1, 12, None)
    assert line["changes"][:2] == [
        {"flags": "--kl_bound 0.2", "why": "a narrow bound slows learning; 0.2 learned more in the studies"},
        {"flags": "--learning_rate 5e-06", "why": "smaller updates stay inside the region"},
    ]


def test_a_resumed_run_says_no_more_than_it_must(tmp_path: Path) -> None:
    columns = {"troll/projected_fraction": 0.3}
    folder = write(tmp_path / "x", rewards=PEAK[:4], columns=columns)
    feed(RuleMonitor(folder), PEAK[:4], columns)
    on = RuleMonitor(folder)
    on.begin(16)
    assert feed(on, PEAK, columns, first=16) == [[]] * 5
    back = RuleMonitor(folder)
    back.begin(8)  # a checkpoint from before the warning, with lines after it in the file
    assert feed(back, PEAK, {"troll/projected_fraction": 0.0}, first=8) == [[]] * 7
    again = RuleMonitor(folder)
    again.begin(8)
    assert feed(again, PEAK, columns, first=8) == [["projected"], *[[]] * 6]
    assert len((folder / "warnings.jsonl").read_text().splitlines()) == 2
    assert len(Run(folder).warnings()) == 1


def test_held_out_rewards_are_watched_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", rewards=[])
    monitor = RuleMonitor(folder)
    feed(monitor, [0.8] * 4, {})
    for step in (12, 16):
        monitor.add({"step": step, "eval_reward": 0.1, "eval_loss": 0.0})
    assert [x.name for x in monitor.new()] == ["held_out_gap"]


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


# ---------------------------------------------------------------------- one judgement, and what cannot be judged


def page_of(folder: Path) -> str:
    """The text of the report."""
    html = write_report(folder, figures=False).read_text(encoding="utf-8")
    return " ".join(re.sub(r"<[^>]+>", " ", html.partition("<main")[2]).replace("\xa0", " ").split())


@pytest.mark.parametrize("share", [0.3, 0.04])
def test_page_console_and_explain_agree(tmp_path: Path, share: float) -> None:
    """A run with 30 % projected is warned of in all three places with the same numbers; one with 4 % in none."""
    folder = write(tmp_path / "x", columns={**COLUMNS, "troll/projected_fraction": share})
    seen = [finding.seen.replace("\xa0", " ") for finding in explain(folder).findings]
    assert seen == (["30 % of the tokens were projected, over 3 rollouts"] if share == 0.3 else [])
    page, console = page_of(folder), " ".join(conclusion(Run(folder))).replace("\xa0", " ")
    warning = "30 % of the tokens were projected, over 3 rollouts. Updates leave the trust region"
    for text in (page, console):
        assert (warning in text) == (share == 0.3)
        assert "a lot" not in text
    for sentence in explain(folder).region:
        assert sentence.replace("\xa0", " ") in page
        assert sentence.replace("\xa0", " ") in console


def test_a_rule_without_its_metric_is_not_checked(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", columns={"troll/kl_before/mean": 0.02, "entropy": 1.0, "grad_norm": 1.0})
    missing = not_checked(folder)
    assert missing["projected"] == "the log has no troll/projected_fraction"
    assert missing["no_signal"] == missing["solved"] == "the log has no frac_reward_zero_std"
    assert missing["regression_outweighs"] == "the log has no loss and no troll/regression"
    assert missing["held_out_gap"] == "the log has no eval_reward"
    assert not {"entropy_collapse", "gradient_spikes", "reward_collapse", "clipped", "infra_error"} & missing.keys()
    page = page_of(folder)
    assert "Groups with equal rewards, convergence before all problems are solved" in page
    assert "solved: the log has no frac_reward_zero_std" in page
    assert "The rules that could be checked found no problem." in page


def not_checked(folder: Path) -> dict[str, str]:
    """Rules that could not be checked, and why."""
    return {name: x["why"] for x in explain(folder).as_json()["unchecked"] for name in x["rules"]}


def test_a_rule_with_too_few_rollouts_is_not_checked(tmp_path: Path) -> None:
    """64 % projected tokens in two rollouts: the rule needs three, which is not the same as no problem."""
    columns = {**COLUMNS, "troll/projected_fraction": 0.64, "frac_reward_zero_std": 1.0, "grad_norm": 1.0}
    folder = write(tmp_path / "x", rewards=PEAK[:2], columns=columns)
    missing = not_checked(folder)
    assert missing["projected"] == missing["no_signal"] == "3 rollouts needed, the run has 2"
    assert missing["flat"] == "10 rollouts needed, the run has 2"
    assert missing["gradient_spikes"] == "7 rollouts needed, the run has 2"
    assert not {"one_update", "bound_exceeded", "unscored"} & missing.keys()
    page = page_of(folder)
    assert "The rules that could be checked found no problem." in page
    assert "Groups with equal rewards, share of projected tokens, distance from the old policy," in page
    assert "problems that are all solved: 3 rollouts needed, the run has 2." in page
    third = write(tmp_path / "y", rewards=PEAK[:3], columns=columns)
    assert [x.name for x in explain(third).findings] == ["no_signal", "projected"]
    assert "projected" not in not_checked(third)


def test_metrics_of_few_rollouts_and_few_evaluations(tmp_path: Path) -> None:
    columns = {**COLUMNS, "completions/clipped_ratio": [0.0, 0.0] + [None] * 7}
    folder = write(tmp_path / "x", columns=columns)
    append_line(folder / "metrics.jsonl", {"step": 0, "eval_reward": 0.1})
    append_line(folder / "metrics.jsonl", {"step": 36, "eval_reward": 0.1})
    missing = not_checked(folder)
    assert missing["cut_completions"] == "3 rollouts with completions/clipped_ratio needed, the log has 2"
    assert missing["held_out_gap"] == "2 evaluations during training needed, the run has 1"
    append_line(folder / "metrics.jsonl", {"step": 20, "eval_reward": 0.1})
    assert "held_out_gap" not in not_checked(folder)


def test_the_least_rollouts_of_every_rule() -> None:
    """With one rollout fewer than a rule asks for it is silent; it speaks with as many in a history made for it."""
    for case in SPOKEN:
        (rule,) = [x for x in RULES if x.name == case.name]
        for n in range(rule.rollouts):
            shown = replace(case.history, rollouts=case.history.rollouts[:n])
            assert rule(shown) is None, (case.name, n)
        assert rule.lacks(case.history) == ""


@pytest.mark.parametrize("name", sorted(path.name for path in RUNS.iterdir()))
def test_rules_have_titles_for_people(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(RUNS / name, tmp_path / name))
    assert main(["explain", str(folder)]) == 0
    shown = capsys.readouterr().out + page_of(folder)
    assert [x.name for x in RULES if "_" in x.name and re.search(rf"(?<![/_]){x.name}", shown)] == []
    assert len({x.title for x in RULES}) == len(RULES)


# ---------------------------------------------------------------------- the trend of the reward

FALLING = [0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]


@pytest.mark.parametrize(
    ("rewards", "trend"),
    [
        (FALLING, "The reward has fallen since update 12."),
        (FALLING[:6], "The reward has fallen since update 12."),
        ([*cases.RISING[:10], 0.1, 0.0], "The reward has fallen since update 40."),
        ([0.5] * 9, "The reward has plateaued: the last 5 rollouts brought no clearly higher mean."),
        ([0.5, 0.52] * 6, "The reward has plateaued: the last 5 rollouts brought no clearly higher mean."),
        (cases.RISING, "The reward rose in the last 5 rollouts: more updates may help (--max_steps)."),
        ([0.5] * 7, "A trend needs 8 rollouts, the run has 7."),
    ],
)
def test_the_trend(tmp_path: Path, rewards: list[float], trend: str) -> None:
    assert explain(write(tmp_path / "x", rewards=rewards, columns={})).reward[1] == trend


def test_no_advice_to_train_longer_before_the_end(tmp_path: Path) -> None:
    stopped = explain(write(tmp_path / "x", "interrupted", rewards=cases.RISING, columns={}))
    assert stopped.reward[1] == "The reward rose in the last 5 rollouts."


def test_rollouts_whose_reward_was_not_a_number(tmp_path: Path) -> None:
    nan = float("nan")
    told = explain(write(tmp_path / "x", rewards=[nan, 0.2, 0.3, 0.4, 0.5, nan], columns={}))
    assert told.what[1].startswith("Finished: 24 of 36 updates, 6 rollouts")
    assert told.reward[:3] == [
        "Sampled reward 0.200 in the rollout of update 5; mean over 3 rollouts: 0.400 (update 20), the last, "
        "the highest.",
        "A trend needs 8 rollouts, the run has 6.",
        "2 of 6 rollouts logged no reward.",
    ]
    fell = explain(write(tmp_path / "y", rewards=[*PEAK, nan, 0.2, 0.1, 0.1, 0.1, 0.1], columns={}))
    assert fell.reward[1:3] == ["The reward has fallen since update 28.", "1 of 15 rollouts logged no reward."]
    none = explain(write(tmp_path / "z", rewards=[nan] * 4, columns={}))
    assert none.reward[0] == "No reward was logged."


@pytest.mark.parametrize("name", ["verl-troll", "verl-far-outside"])
def test_a_real_verl_run(name: str, tmp_path: Path) -> None:
    """What verl does not log is named; p99 is there."""
    folder = Path(shutil.copytree(RUNS / name, tmp_path / name))
    missing = not_checked(folder)
    assert missing["sampler_mismatch"] == "the log has no sampling/sampling_logp_difference/mean"
    assert not {"far_outside", "projected", "kept_mass"} & missing.keys()
    assert "Not checked Groups with equal rewards" in page_of(folder)


def test_a_real_verl_run_far_outside_its_bound(tmp_path: Path) -> None:
    """A mean KL of 0.96 with a bound of 0.02: no bound that we would advise contains it, so the rate goes down."""
    folder = Path(shutil.copytree(RUNS / "verl-far-outside", tmp_path / "x"))
    (projected,) = [x for x in explain(folder).findings if x.name == "projected"]
    assert str(projected.changes[0]) == "--learning_rate 0.0333 (the mean token KL is 0.962, above the bound of 0.02)"
    assert not any("kl_bound" in x.flags for x in explain(folder).changes)
    assert projected.when == "since update 1"  # verl logs a rollout by its last update


def without_p99(folder: Path) -> Path:
    """As an earlier version of the verl plug-in logged it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").unlink()
    for line in lines:
        append_line(folder / "metrics.jsonl", {key: x for key, x in line.items() if not key.endswith("/p99")})
    return folder


def test_a_verl_log_without_p99(tmp_path: Path) -> None:
    folder = without_p99(Path(shutil.copytree(RUNS / "verl-troll", tmp_path / "verl-troll")))
    assert not_checked(folder)["far_outside"] == "the log has no troll/kl_before/p99"


@pytest.mark.parametrize(("mean", "flags"), [(2.0, "--learning_rate 3.33e-06"), (0.05, "")])
def test_advice_without_p99(tmp_path: Path, mean: float, flags: str) -> None:
    """A flat reward with a mean KL of ten bounds calls for a lower rate; a small one for nothing."""
    columns = {"troll/kl_before/mean": mean, "troll/kl_before/max": 9.0}
    settings = {"kl_bound": 0.2}
    explained = explain(write(tmp_path / "x", rewards=[0.3, 0.32] * 6, columns=columns, settings=settings))
    assert [x.name for x in explained.findings] == ["flat"]
    assert explained.changes[0].flags == flags
    assert "--num_generations 16" not in [x.flags for x in explained.changes]
    assert ("the log has no troll/kl_before/p99" in explained.changes[0].why) == (not flags)


def test_a_broken_bound_is_a_finding(tmp_path: Path) -> None:
    within = {**COLUMNS, "troll/kl_after/max": float(np.float32(0.05))}  # 0.0500000007
    assert explain(write(tmp_path / "x", columns=within)).findings == []
    above = {**COLUMNS, "troll/kl_after/max": 0.0501}
    (finding,) = explain(write(tmp_path / "y", columns=above)).findings
    assert (finding.name, finding.since) == ("bound_exceeded", 1)
    adaptive = {"kl_bound_schedule": "projected target=0.03"}
    assert explain(write(tmp_path / "z", columns=above, settings=adaptive)).findings == []


def test_the_end_of_a_run_on_the_console(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", rewards=[0.5], columns={**COLUMNS, "troll/projected_fraction": 0.0})
    for step, value in ((0, 0.25), (4, 0.75)):
        append_line(folder / "metrics.jsonl", {"step": step, "eval_reward": value})
    assert conclusion(Run(folder)) == [
        "Sampled reward 0.500: too few rollouts for a trend.",
        "Held-out reward 0.250 (update 0) → 0.750 (update 4).",
        f"No token was projected: {SAME}.",
        "Token KL to the old policy: mean 0.02, largest 3, after projection 0.05; the bound is 0.05.",
    ]
    adaptive = write(tmp_path / "y", settings={"kl_bound_schedule": "projected target=0.03"})
    assert conclusion(Run(adaptive))[-1].endswith("the bound adapts, starting from 0.05.")
    infinite = write(tmp_path / "z", settings={"kl_bound": float("inf")})  # JSON has no infinity
    assert conclusion(Run(infinite))[-1].endswith("largest 3, after projection 0.05.")


@pytest.mark.parametrize(
    ("share", "text"),
    [({"troll/projected_fraction": 0.0}, "No token was projected."), (COLUMNS, "No solver steps were recorded")],
)
def test_a_log_without_solver_steps_is_not_one_without_projected_tokens(tmp_path: Path, share: Any, text: str) -> None:
    page = page_of(write(tmp_path / "x", columns=share))
    assert f"Solver steps {text}" in page
