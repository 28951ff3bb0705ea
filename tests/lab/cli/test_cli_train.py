"""``troll train`` from its flags to its folder, with a tiny model."""

from __future__ import annotations

import functools
import json
import math
import platform
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from cli_cases import (
    EVAL_STEPS,
    HELD_OUT,
    MAX_STEPS,
    ROWS,
    UPDATES,
    flags,
    lines,
    same_weights,
    shared,
    start,
    timeless,
    train,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from troll import __version__
from troll.lab.cli import main
from troll.lab.runs import Run
from troll.lab.tasks import load_task
from troll.lab.tasks.load import find_reward
from troll.lab.training.recorder import RecordedTrainer
from troll.lab.training.settings import defaults

Runs = Callable[[str], Run]
BOUND = 0.05


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Trust region → a run under it."""
    return functools.cache(
        lambda region: train(tmp_path_factory.mktemp("runs"), "--trust_region", region, "--kl_bound", str(BOUND))
    )


REGIONS = pytest.mark.parametrize("region", ["troll", "clip", "none"])


@REGIONS
def test_the_folder_of_a_run(runs: Runs, region: str) -> None:
    run = runs(region)
    assert run.path.name == f"arithmetic-{region}"
    names = {path.name for path in run.path.iterdir()}
    assert {"run.json", "config.yaml", "metrics.jsonl", "tokens.jsonl", "samples.jsonl", "model"} <= names
    about = run.about
    assert (about["status"], about["name"], about["arm"], about["seed"]) == ("finished", run.path.name, region, 0)
    assert about["arm_label"] == {"troll": "TROLL, KL ≤ 0.05", "clip": "clip ±0.2", "none": "no trust region"}[region]
    assert about["task"]["name"] == "arithmetic"
    assert "one-digit" in about["task"]["description"]
    model = AutoModelForCausalLM.from_pretrained(shared() / "model")
    assert about["model"] == {"name": str(shared() / "model"), "parameters": model.num_parameters()}
    assert about["command"].startswith("troll train --model ")
    assert f"--trust_region {region}" in about["command"]
    assert (about["versions"]["troll"], about["versions"]["torch"]) == (__version__, torch.__version__)
    assert about["versions"]["python"] == platform.python_version()
    assert {"trl", "transformers"} < about["versions"].keys()
    assert about["machine"]["cores"] >= 1
    assert about["machine"]["memory_gb"] > 0
    assert about["started"] <= about["finished"]
    settings = about["settings"]
    expected = {"trust_region": region, "kl_bound": BOUND, "learning_rate": 1e-2, "max_steps": MAX_STEPS}
    assert {name: settings[name] for name in expected} == expected
    assert settings["updates_per_generation"] == UPDATES
    assert not [name for name in settings if "token" in name and "hub" in name]


@REGIONS
def test_every_metric_of_every_update_is_there(runs: Runs, region: str) -> None:
    metrics = runs(region).metrics()
    assert [line["step"] for line in metrics] == list(range(1, MAX_STEPS + 1))
    always = {"loss", "grad_norm", "learning_rate", "entropy", "time/forward", "time/backward", "time/optimizer"}
    always |= {"time/other", "seconds", "troll/kept_mass/old", "troll/support_size/proposal"}
    always |= {f"troll/{name}/{of}" for name in ("kl_before", "ratio") for of in ("mean", "p99", "max")}
    always |= {"troll/ratio/min", "troll/sequence_kl_before", "troll/sequence_kl_before/max"}
    rollout = {"reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "num_tokens"}
    rollout |= {"time/generate", "time/reward", "time/score"}
    projection = {f"troll/kl_after/{of}" for of in ("mean", "p99", "max")} | {"troll/projected_fraction", "troll/mix"}
    projection |= {"troll/sequence_kl_after", "troll/regression", "troll/solver_steps/mean", "troll/solver_steps/max"}
    projection |= {"troll/sequence_kl_after/max", "troll/unconverged_tokens"}
    for line in metrics:
        assert always <= line.keys()
        assert (rollout <= line.keys()) == ((line["step"] - 1) % UPDATES == 0)
        assert (projection <= line.keys()) == (region == "troll")
        assert any(name.startswith("clip_ratio/") for name in line) == (region == "clip")
        assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in line.values())
    assert "tokens_per_second" in metrics[UPDATES]  # from the second rollout on
    assert metrics[UPDATES]["tokens_per_second"] > 0
    assert {"time/evaluate"} <= metrics[0].keys() & metrics[EVAL_STEPS].keys()


@REGIONS
def test_times_add_up_to_no_more_than_the_run_took(runs: Runs, region: str) -> None:
    run = runs(region)
    metrics = run.metrics()
    for line in metrics:
        assert all(value >= 0 for name, value in line.items() if name.startswith("time/"))
    spent = np.cumsum([sum(v for name, v in line.items() if name.startswith("time/")) for line in metrics])
    seconds = [line["seconds"] for line in metrics]
    assert seconds == sorted(seconds)
    assert all(a <= b + 1e-3 for a, b in zip(spent, seconds, strict=True))  # seconds are rounded to thousandths
    assert seconds[-1] <= run.evaluations()[-1]["seconds"] <= run.about["seconds"] + 1e-3


@REGIONS
def test_evaluations_before_during_and_after(runs: Runs, region: str) -> None:
    evaluations = runs(region).evaluations()
    assert [line["step"] for line in evaluations] == [0, EVAL_STEPS, MAX_STEPS]
    for line in evaluations:
        assert line["eval_reward"] == pytest.approx(line["eval_rewards/spread/mean"])
    assert len({line["eval_reward"] for line in evaluations}) > 1
    assert not any("eval_reward" in line for line in runs(region).metrics())


def test_the_last_update_is_evaluated_even_if_none_is_due(tmp_path: Path) -> None:
    steps = [line["step"] for line in train(tmp_path, "--eval_steps", "5").evaluations()]
    assert steps == [0, 5, MAX_STEPS]


@REGIONS
def test_histograms_agree_with_the_metrics(runs: Runs, region: str) -> None:
    run = runs(region)
    history = run.tokens()
    assert history is not None
    assert len(lines(run.path / "tokens.jsonl")) == 1 + MAX_STEPS
    for update, line in zip(history.updates, run.metrics(), strict=True):
        assert update["step"] == line["step"]
        assert update["update"] == (line["step"] - 1) % UPDATES
        assert sum(update["kl"]) == sum(update["log_ratio"]) == update["count"] > ROWS
        assert update["kl_quantiles"][-1] == pytest.approx(line["troll/kl_before/max"], rel=1e-6)
        assert update["kl_quantiles"][2] == pytest.approx(line["troll/kl_before/p99"], rel=1e-6)
        assert update["kl_quantiles"] == sorted(update["kl_quantiles"])
        _is_in_last_filled_bin(line["troll/kl_before/max"], update["kl"], history.kl_edges)
        _is_in_last_filled_bin(math.log(line["troll/ratio/max"]), update["log_ratio"], history.log_ratio_edges)
        assert ("kl_after" in update) == ("solver_steps" in update) == (region == "troll")
        if region == "troll":
            assert sum(update["kl_after"]) == update["count"]
            _is_in_last_filled_bin(line["troll/kl_after/max"], update["kl_after"], history.kl_edges)
            assert line["troll/kl_after/max"] <= BOUND * (1 + 1e-5)
            projected = line["troll/projected_fraction"] * update["count"]
            assert sum(update["solver_steps"].values()) == pytest.approx(projected, abs=1e-3)
            assert max(map(int, update["solver_steps"]), default=0) == line["troll/solver_steps/max"]
    first = [update for update in history.updates if update["update"] == 0]
    assert all(update["kl"][0] == update["count"] for update in first)  # the policy that made the rollout
    assert max(line["troll/kl_before/max"] for line in run.metrics()) > BOUND


def by_group(observed: list[tuple[torch.Tensor, ...]]) -> dict[str, float]:
    """The mean over forward passes of the mean KL of each group, token by token."""
    means: dict[str, list[float]] = defaultdict(list)
    for kl, counted, advantages in observed:
        groups: dict[str, list[float]] = defaultdict(list)
        for i in range(len(kl)):
            places = counted[i].nonzero()[:, 0].tolist()
            for place, t in enumerate(places):
                advantage = float(advantages[i] if advantages.dim() == 1 else advantages[i, t])
                groups[f"troll/kl_by_quarter/{4 * place // len(places) + 1}"].append(float(kl[i, t]))
                if advantage:
                    groups[f"troll/kl_by_sign/{'positive' if advantage > 0 else 'negative'}"].append(float(kl[i, t]))
        for name, values in groups.items():
            means[name].append(math.fsum(values) / len(values))
    return {name: math.fsum(values) / len(values) for name, values in means.items()}


@pytest.mark.parametrize("more", [(), ("--gradient_accumulation_steps", "2", "--advantage_estimator", "reinforce_pp")])
def test_the_kl_by_sign_and_by_quarter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    observed: dict[int, list[tuple[torch.Tensor, ...]]] = defaultdict(list)
    observe = RecordedTrainer.observe_tokens

    def seen(self: RecordedTrainer, stats: Any, counted: torch.Tensor, inputs: Any) -> None:
        if self._mode == "train":
            observed[self.state.global_step + 1].append((stats["kl_before"], counted, inputs["advantages"]))
        observe(self, stats, counted, inputs)

    monkeypatch.setattr(RecordedTrainer, "observe_tokens", seen)
    run = train(tmp_path, *more)
    moved = 0
    for line in run.metrics():
        found = {name: value for name, value in line.items() if name.startswith("troll/kl_by_")}
        assert found == pytest.approx(by_group(observed[line["step"]]), rel=1e-6, abs=1e-12)  # sums of fp32 numbers
        moved += len(set(found.values())) == 6
    assert moved > MAX_STEPS / 2  # so that the groups can be told apart


def _is_in_last_filled_bin(value: float, counts: list[int], edges: list[float]) -> None:
    last = max(i for i, n in enumerate(counts) if n)
    assert edges[last] - 1e-6 <= value <= edges[last + 1] + 1e-6


@REGIONS
def test_samples_say_what_happened_to_every_token(runs: Runs, region: str) -> None:
    run = runs(region)
    samples = run.samples()
    metrics = {line["step"]: line for line in run.metrics()}
    reward = find_reward(f"{shared() / 'rewards.py'}:spread")
    prompts = set(load_task(eval_size=HELD_OUT).train_dataset["prompt"])
    assert {sample["step"] for sample in samples} == {UPDATES, 2 * UPDATES}
    assert {sample["update"] for sample in samples} == {UPDATES - 1}
    assert len(samples) == 2 * 4
    for sample in samples:
        columns = ["kl", "ratio"] + (["kl_after", "projected"] if region == "troll" else [])
        assert {len(sample[name]) for name in columns} == {len(sample["tokens"])}
        assert ("kl_after" in sample) == ("projected" in sample) == (region == "troll")
        assert sample["prompt"] in prompts
        assert max(sample["kl"]) <= metrics[sample["step"]]["troll/kl_before/max"] * (1 + 1e-6)
        assert max(sample["ratio"]) <= metrics[sample["step"]]["troll/ratio/max"] * (1 + 1e-6)
        if region == "troll":
            assert sample["projected"] == [kl > BOUND for kl in sample["kl"]]
            assert max(sample["kl_after"]) <= BOUND * (1 + 1e-5)
        assert sample["reward"] == pytest.approx(reward([_without_special("".join(sample["tokens"]))])[0], rel=1e-5)
    assert len({sample["advantage"] for sample in samples}) > 2
    assert len({sample["reward"] for sample in samples}) > 2


def _without_special(text: str) -> str:
    """As TRL hands a completion to a reward."""
    tokenizer = AutoTokenizer.from_pretrained(shared() / "model")
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, "")
    return text


def test_advantages_are_those_of_the_group(tmp_path: Path) -> None:
    """The four samples that are shown are the whole rollout, of one prompt, used for two updates."""
    more = ["--updates_per_generation", "2", "--num_iterations", "2", "--scale_rewards", "none", "--max_steps", "4"]
    run = train(tmp_path, *more, "--per_device_train_batch_size", "4")
    for step in (2, 4):
        group = [sample for sample in run.samples() if sample["step"] == step]
        assert len({sample["prompt"] for sample in group}) == 1
        mean = sum(sample["reward"] for sample in group) / len(group)
        for sample in group:
            assert sample["advantage"] == pytest.approx(sample["reward"] - mean, rel=1e-5, abs=1e-4)


def test_a_completion_without_a_reward_has_none_in_the_samples(tmp_path: Path) -> None:
    rewards = [sample["reward"] for sample in train(tmp_path, reward="sometimes").samples()]
    assert None in rewards
    assert any(isinstance(value, float) for value in rewards)


def test_a_completion_ends_at_the_newline_of_the_task(tmp_path: Path) -> None:
    """Nothing after it is trained on; the saved model ends where it did before."""
    run = train(tmp_path, "--max_completion_length", "96", "--max_steps", "2", "--updates_per_generation", "2")
    texts = ["".join(sample["tokens"]) for sample in run.samples()]
    assert all("\n" not in text[:-1] for text in texts)
    lengths = [line["completions/mean_terminated_length"] for line in run.metrics() if "reward" in line]
    assert max(lengths) > 0
    model = AutoModelForCausalLM.from_pretrained(run.path / "model")
    before = AutoModelForCausalLM.from_pretrained(shared() / "model")
    assert model.generation_config.eos_token_id == before.generation_config.eos_token_id


def test_the_config_makes_the_same_run_again(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs("troll")
    config = run.path / "config.yaml"
    assert main(["train", "--config", str(config)]) == 0
    again = Run.open(run.path.with_name(f"{run.path.name}-2"))
    assert [timeless(line) for line in again.metrics()] == [timeless(line) for line in run.metrics()]
    assert [timeless(line) for line in again.evaluations()] == [timeless(line) for line in run.evaluations()]
    for name in ("tokens.jsonl", "samples.jsonl"):
        assert (again.path / name).read_bytes() == (run.path / name).read_bytes()
    assert yaml.safe_load((again.path / "config.yaml").read_text()) == yaml.safe_load(config.read_text())
    assert same_weights(run, again)
    paths = {"output_dir", "run_name"}
    settings = [{k: v for k, v in x.about["settings"].items() if k not in paths} for x in (run, again)]
    assert settings[0] == settings[1]


def test_another_seed_is_another_run(runs: Runs, tmp_path: Path) -> None:
    other = train(tmp_path, "--seed", "1", "--kl_bound", str(BOUND))
    assert not same_weights(runs("troll"), other)
    assert other.about["seed"] == 1


def test_the_trust_region_decides_the_weights(runs: Runs) -> None:
    assert not same_weights(runs("troll"), runs("clip"))
    assert not same_weights(runs("clip"), runs("none"))


def test_an_existing_name_is_refused_and_left_alone(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs("none")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert main(flags(run.path.parent, "--run_name", run.path.name)) == 2
    assert f"--resume {run.path.name}" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_run_that_fails_later_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_AT", "4")  # step 0, the first rollout, step 4, the second rollout
    assert main(flags(tmp_path, reward="fails_later")) == 2
    (made,) = tmp_path.iterdir()
    run = Run.open(made)
    assert run.about["status"] == "failed"
    assert "enough" in run.about["error"]
    assert len(run.metrics()) == UPDATES
    assert run.about["seconds"] >= run.metrics()[-1]["seconds"]


def test_the_model_may_be_left_out(tmp_path: Path) -> None:
    run = train(tmp_path, "--no_save_model", "--save_strategy", "no")
    assert not list(run.path.rglob("*.safetensors"))


def test_a_report_is_written_unless_told_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, "--write_report", "true")
    assert (run.path / "report.html").stat().st_size > 10_000
    assert f"Report: {run.path / 'report.html'}" in capsys.readouterr().out


def test_a_run_without_evaluation(tmp_path: Path) -> None:
    run = train(tmp_path, "--eval_strategy", "no")
    assert [line["step"] for line in run.metrics()] == list(range(1, 9))
    assert run.evaluations() == []


def test_what_a_run_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared()  # the first test that asks for the model makes it, aloud
    capsys.readouterr()
    run = train(tmp_path, "--kl_bound", "inf")  # which JSON has no word for
    out, err = capsys.readouterr()
    assert err == ""
    said = out.splitlines()
    assert said[0].startswith("arithmetic: one-digit sums and differences, shots: 1")
    assert said[1] == f"{shared() / 'model'} → {run.path}"
    assert [line.split("  ")[0] for line in said if "tokens/s" in line] == ["step 8/8"]
    assert [line.split(":")[0] for line in said if "held-out reward" in line] == ["step 0", "step 4", "step 8"]
    assert said[-2] == "No token was projected: the run is the same as without a trust region."
    assert re.fullmatch(r"Token KL to the old policy: mean [\d.]+, largest ([\d.]+), after projection \1\.", said[-1])


EVIL = """\
train_dataset = [{"prompt": f"{i} ="} for i in range(64)]
eval_dataset = [{"prompt": f"{i} = ="} for i in range(8)]
description = "a [/x] [bold]task \\x1b]0;title\\x07\\x1b[2J\\n:smile:"
def reward(completions, **columns):
    return [float(len(text)) for text in completions]
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_description_cannot_do_anything_to_a_terminal(
    terminal: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    task = tmp_path / "my task.py"
    task.write_text(EVIL)
    run = train(tmp_path / "runs", "--task", str(task), reward=None)
    assert run.path.name == "my-task-troll"
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "my task: a [/x] [bold]task ]0;title [2J :smile:"
    assert ("\x1b" in out) == terminal
    assert "\x1b[2J" not in out
    assert "\x07" not in out


def test_a_run_that_fails_gives_the_terminal_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("FAIL_AT", "4")
    assert main(flags(tmp_path, reward="fails_later")) == 2
    out = capsys.readouterr().out
    hidden, shown = "\x1b[?25l", "\x1b[?25h"  # the cursor
    assert (out.count(hidden), out.count(shown)) == (1, 1)
    assert out.rindex(shown) > out.rindex("4/8")


def test_with_gradient_accumulation_a_line_has_the_tokens_of_both_passes(tmp_path: Path) -> None:
    run = train(tmp_path, "--gradient_accumulation_steps", "2", "--max_completion_length", "3")
    history = run.tokens()
    assert history is not None
    assert [(x["step"], x["update"]) for x in history.updates] == [(i + 1, i % UPDATES) for i in range(MAX_STEPS)]
    per_rollout = [sum(x["count"] for x in history.updates[i : i + UPDATES]) for i in (0, UPDATES)]
    lengths = [line["completions/mean_length"] for line in run.metrics() if "reward" in line]
    assert per_rollout == pytest.approx([length * 2 * ROWS * UPDATES for length in lengths])
    for update, line in zip(history.updates, run.metrics(), strict=True):
        assert update["kl_quantiles"][-1] == pytest.approx(line["troll/kl_before/max"], rel=1e-6)
    assert [(x["step"], x["place"]) for x in lines(run.path / "samples.jsonl")] == [
        (step, place) for step in (UPDATES, 2 * UPDATES) for place in range(4)
    ]


def test_an_adapter_is_trained_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, "--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj")
    assert capsys.readouterr().err == ""
    adapter = json.loads((run.path / "model" / "adapter_config.json").read_text())
    assert adapter["r"] == 4
    assert sorted(adapter["target_modules"]) == ["q_proj", "v_proj"]
    assert not (run.path / "model" / "model.safetensors").exists()
    assert max(line["troll/kl_before/max"] for line in run.metrics()) > 0
    assert yaml.safe_load((run.path / "config.yaml").read_text())["lora_target_modules"] == ["q_proj", "v_proj"]


def test_advantages_per_token(tmp_path: Path) -> None:
    run = train(tmp_path, "--advantage_estimator", "reinforce_pp")
    samples = run.samples()
    assert len(samples) == 8
    assert len({sample["advantage"] for sample in samples}) > 2
    best, worst = (f(samples[:4], key=lambda x: x["reward"]) for f in (max, min))
    assert best["advantage"] > worst["advantage"]


def test_tensorboard_writes_into_the_folder_of_the_run(tmp_path: Path) -> None:
    run = train(tmp_path, "--report_to", "tensorboard")
    (file,) = run.path.rglob("events.out.tfevents.*")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    logged: dict[str, dict[int, float]] = {}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            if value.HasField("tensor") and value.tensor.float_val:
                logged.setdefault(value.tag, {})[event.step] = value.tensor.float_val[0]
    shown = logged["train/troll/kl_before/max"]
    assert shown == pytest.approx({line["step"]: line["troll/kl_before/max"] for line in run.metrics()}, rel=1e-6)


def test_dry_run_prints_a_config_and_an_estimate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = flags(tmp_path / "runs", "--dry_run", "--kl_bound", "0.02", "--no_save_model")
    capsys.readouterr()  # progress of saving the model
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert not (tmp_path / "runs").exists()
    said = yaml.safe_load(out)
    expected: dict[str, Any] = {"kl_bound": 0.02, "learning_rate": 1e-2, "max_steps": MAX_STEPS, "save_model": False}
    expected |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": ROWS, "seed": 0}
    expected |= {"model": str(shared() / "model"), "reward": [f"{shared() / 'rewards.py'}:spread"]}
    assert {name: said.get(name) for name in expected} == expected
    assert "dry_run" not in said
    tokenizer = AutoTokenizer.from_pretrained(shared() / "model")
    lengths = [len(tokenizer(x)["input_ids"]) for x in load_task().train_dataset["prompt"][:64]]
    assert f"#   prompts of {sum(lengths) / 64:.0f} tokens" in out
    assert f"{MAX_STEPS} updates" in out
    assert re.search(r"^#   [1-9][\d,]* parameters in fp32", out, re.MULTILINE)  # a model of less than a million
    assert not re.search(r" 0(\.0+)? [kMG]", out)
    config = tmp_path / "c.yaml"
    config.write_text(out)
    assert main(["train", "--config", str(config), "--dry_run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == said


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--preset", "paper"], ["preset paper", "kl_bound 0.05", "regression_coef 1", "tail floor", "max_support 64"]),
        (["--preset", "paper", "--kl_bound", "0.1"], ["preset paper", "kl_bound 0.1", "tail floor", "tail_mass 1e-05"]),
        (["--kl_bound", "0.2"], ["preset default", "kl_bound 0.2", "regression_coef 1", "tail bucket"]),
        (["--trust_region", "clip", "--epsilon_high", "0.28"], ["clip −0.2, +0.28"]),
        (["--trust_region", "none"], ["no trust region"]),
    ],
)
def test_dry_run_shows_the_values_of_the_trust_region(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], shown: list[str]
) -> None:
    argv = flags(tmp_path / "runs")
    del argv[argv.index("--kl_bound") : argv.index("--kl_bound") + 2]
    assert main([*argv, "--dry_run", *given]) == 0
    block = capsys.readouterr().out.partition("# Trust region\n")[2].partition("#\n")[0]
    assert [x for x in map(" ".join, map(str.split, block.replace("#", " ").splitlines())) if x in shown] == shown


def test_dry_run_warns_of_a_warmup_without_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(flags(tmp_path / "runs", "--dry_run", "--warmup_steps", "4")) == 0
    assert "warmup_steps=4 has no effect with lr_scheduler_type='constant'" in caplog.text
    caplog.clear()
    more = ("--warmup_steps", "4", "--lr_scheduler_type", "constant_with_warmup")
    assert main(flags(tmp_path / "runs", "--dry_run", *more)) == 0
    assert not caplog.text
    assert "warmup_steps" not in defaults("smollm2-135m", {}, has_gpu=False)  # the schedule is constant


def test_dry_run_measures_chat_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "d.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"{i:02d}"}]} for i in range(80)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(flags(tmp_path / "runs", "--task", "data", "--data", str(data), "--dry_run")) == 0
    # <|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n: a token per byte, and one per special token
    assert f"prompts of {1 + 5 + 2 + 1 + 1 + 1 + 10} tokens" in capsys.readouterr().out


TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.slow
def test_two_processes_write_one_folder(tmp_path: Path) -> None:
    """Histograms are over the tokens of both, and metrics agree with them; one of them speaks."""
    process = start(flags(tmp_path, "--per_device_train_batch_size", str(ROWS // 2)), launch=TWO)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    said = [line for line in out.splitlines() if line.startswith(("Sampled reward ", "Held-out reward ", "Token KL "))]
    assert (out.count(f" → {tmp_path}"), len(said)) == (1, 3), out  # model → folder, and each sentence once
    (path,) = tmp_path.iterdir()
    run = Run.open(path)
    assert run.about["status"] == "finished"
    assert [line["step"] for line in lines(path / "metrics.jsonl") if "loss" in line] == list(range(1, MAX_STEPS + 1))
    assert [line["step"] for line in run.evaluations()] == [0, EVAL_STEPS, MAX_STEPS]
    history = run.tokens()
    assert history is not None
    lengths = [line["completions/mean_length"] for line in run.metrics() if "reward" in line]
    counts = [sum(x["count"] for x in history.updates[i : i + UPDATES]) for i in (0, UPDATES)]
    assert counts == pytest.approx([length * ROWS * UPDATES for length in lengths])
    for update, line in zip(history.updates, run.metrics(), strict=True):
        assert update["kl_quantiles"][-1] == pytest.approx(line["troll/kl_before/max"], rel=1e-6)
        low, high = sorted(line[f"troll/kl_by_sign/{sign}"] for sign in ("positive", "negative"))
        assert low * (1 - 1e-6) <= line["troll/kl_before/mean"] <= high * (1 + 1e-6)  # every token has a sign
    reward = find_reward(f"{shared() / 'rewards.py'}:spread")
    for sample in run.samples():
        assert sample["reward"] == pytest.approx(reward([_without_special("".join(sample["tokens"]))])[0], rel=1e-5)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_after_the_same_update(tmp_path: Path) -> None:
    signals = {"SIGNAL": str(int(signal.SIGTERM)), "SIGNAL_AT": "2", "SIGNAL_RANK": "1"}
    more = ["--per_device_train_batch_size", str(ROWS // 2), "--run_name", "two", "--save_strategy", "no"]
    process = start(flags(tmp_path, *more, reward="interrupts"), launch=TWO, env=signals)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err.strip()) == (
        0,
        "Stopping after this update, with a checkpoint. Press Ctrl-C again to stop at once.",
    )
    assert "Resume with: troll train --resume" in out
    assert Run.open(tmp_path / "two").about["status"] == "interrupted"
    rollouts = {x.name for x in (tmp_path / "two" / "checkpoint-1").glob("troll_rollout_*")}
    assert rollouts == {"troll_rollout_00000.safetensors", "troll_rollout_00001.safetensors"}


AGREE = """\
from pathlib import Path
from types import SimpleNamespace
from accelerate import PartialState
from troll.lab.cli.train import _agreed
here = PartialState(cpu=True).process_index
agreed = _agreed(SimpleNamespace(process_index=here), lambda: Path(f"of-{here}"))
Path(f"seen-{here}").write_text(str(agreed))  # two processes that print share a pipe, and may do so in pieces
PartialState().destroy_process_group()
"""


@pytest.mark.slow
def test_processes_agree_on_the_folder_of_the_first(tmp_path: Path) -> None:
    """Whatever another one sees: with names that are made free, it may see the folder that the first has just made."""
    (tmp_path / "agree.py").write_text(AGREE)
    subprocess.run([sys.executable, *TWO, "agree.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [(tmp_path / f"seen-{i}").read_text() for i in range(2)] == ["of-0", "of-0"]
