"""``troll train --engine verl`` from flags to folder: with verl itself in one slow test, a stand-in in the others."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import yaml
from cli_cases import flags, shared, start
from transformers import AutoModelForCausalLM

from troll.errors import InputError
from troll.lab.cli import check_command, main
from troll.lab.cli import verl as cli_verl
from troll.lab.runs import Run
from troll.lab.training.settings import RunSettings
from troll.lab.verl import launch
from troll.trl.robust.store import locked

TESTS = Path(__file__).parents[2]
VERL = ("--engine", "verl", "--gpus_per_node", "1")

CHILD = """
import json, os, sys
from pathlib import Path
log = Path(os.environ["VERL_FILE_LOGGER_PATH"])
told = dict(x.split("=", 1) for x in sys.argv[1:])
updates = int(told["data.train_batch_size"]) // int(told["actor_rollout_ref.actor.ppo_mini_batch_size"])
first = 1 if told["trainer.resume_mode"] == "disable" else 2
with log.open("w") as file:
    for step in range(first, 3):
        if os.environ.get("FAIL_AT") == str(step):
            sys.exit("ValueError: enough")
        data = {"critic/score/mean": step / 4, "actor/pg_loss": 0.1, "timing_s/step": 3.0}
        file.write(json.dumps({"step": step, "data": data}) + "\\n")
        file.flush()
        place = Path(told["trainer.default_local_dir"].strip("'"))
        model = place / f"global_step_{step}" / "actor" / "huggingface"
        model.mkdir(parents=True)
        (model / "model.safetensors").write_text(str(updates))
        (place / "latest_checkpointed_iteration.txt").write_text(str(step))
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A verl that writes what verl writes."""
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    real = launch.command
    monkeypatch.setattr(launch, "command", lambda case: [sys.executable, str(child), *real(case)[3:]])
    monkeypatch.setattr(launch, "_PAUSE", 0.02)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setattr(launch.metadata, "version", lambda name: "1")
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name if name == "verl" else there(name, *more))


def test_a_dry_run_prints_the_script_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stand_in: None
):
    runs = tmp_path / "my runs"
    assert main(flags(runs, *VERL, "--dry_run", "--run_name", "x")) == 0
    text = capsys.readouterr().out
    assert not runs.exists()
    subprocess.run(["sh", "-n"], input=text, text=True, check=True)
    words = shlex.split(text.split("main_ppo", 1)[1].replace("\\\n", " "))
    assert f"data.train_files='{runs.absolute()}/x/verl/train.parquet'" in words
    assert {"+trust_region=troll", "trainer.total_training_steps=2", "data.train_batch_size=8"} <= set(words)
    assert {"data.max_response_length=4", "actor_rollout_ref.rollout.agent.default_agent_loop=troll_stop"} <= set(words)
    (prompt,) = [word for word in words if word.startswith("data.max_prompt_length=")]
    assert int(prompt.partition("=")[2]) > 10
    assert words[-1] == "$@"


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], stand_in: None):
    assert main(flags(tmp_path / "runs", *VERL, "--trust_region", "clip")) == 0
    run = Run.open(tmp_path / "runs" / "arithmetic-clip")
    names = {path.name for path in run.path.iterdir()}
    assert {"run.json", "config.yaml", "metrics.jsonl", "launch.sh", "overrides.txt", "verl", "model"} <= names
    assert {"train.parquet", "held_out.parquet", "task.json", "stop.yaml"} <= {
        x.name for x in (run.path / "verl").iterdir()
    }
    about = run.about
    assert (about["status"], about["engine"], about["arm"]) == ("finished", "verl", "clip")
    assert [line["reward"] for line in run.metrics()] == [0.25, 0.5]
    assert [line["step"] for line in run.metrics()] == [4, 8]
    out = capsys.readouterr().out
    assert "with verl, nodes: 1, GPUs per node: 1" in out
    assert "Sampled reward 0.250, 0.500: too few rollouts for a trend." in out
    assert (run.path / "model" / "model.safetensors").read_text() == "4"
    assert main(["report", str(run.path)]) == 0


def test_a_run_can_be_made_again_from_its_file(tmp_path: Path, stand_in: None):
    assert main(flags(tmp_path / "runs", *VERL, "--run_name", "first", "--seed", "3")) == 0
    first = tmp_path / "runs" / "first"
    assert yaml.safe_load((first / "config.yaml").read_text())["engine"] == "verl"
    assert main(["train", "--config", str(first / "config.yaml"), "--run_name", "second"]) == 0
    texts = [(tmp_path / "runs" / name / "overrides.txt").read_text() for name in ("first", "second")]
    assert texts[0].replace("/first", "/second").replace("=first", "=second") == texts[1]
    assert "data.seed=3" in texts[1]


def test_a_run_that_failed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stand_in: None
):
    monkeypatch.setenv("FAIL_AT", "2")
    assert main(flags(tmp_path / "runs", *VERL, "--run_name", "x", "--save_steps", "4")) == 2
    assert "ValueError: enough" in capsys.readouterr().err
    run = Run(tmp_path / "runs" / "x")
    assert (run.about["status"], [line["step"] for line in run.metrics()]) == ("failed", [4])
    monkeypatch.delenv("FAIL_AT")
    assert main(["train", "--resume", "x", "--runs_dir", str(tmp_path / "runs")]) == 0
    assert "trainer.resume_mode=auto" in (run.path / "overrides.txt").read_text().splitlines()
    assert (run.about["status"], [line["step"] for line in run.metrics()]) == ("finished", [4, 8])
    assert run.metrics()[-1]["seconds"] == 6.0
    assert main(["train", "--resume", "x", "--runs_dir", str(tmp_path / "runs")]) == 2
    assert "is finished and cannot be resumed" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stand_in: None
):
    monkeypatch.setenv("FAIL_AT", "1")
    assert main(flags(tmp_path / "runs", *VERL, "--run_name", "x")) == 2
    run = Run(tmp_path / "runs" / "x")
    resume = ["train", "--resume", str(run.path)]
    assert main([*resume, "--kl_bound", "0.1"]) == 2
    assert "(kl_bound: 0.05 → 0.1)" in capsys.readouterr().err
    with locked(run.path):  # which this process may take again, and verl's process does not need
        monkeypatch.delenv("FAIL_AT")
        assert main([*resume, "--kl_bound", "0.1", "--allow_changes"]) == 0
    assert "the run starts again from update 0." in capsys.readouterr().out
    assert run.about["status"] == "finished"
    assert (run.about["changes"][0]["differences"], run.about["max_steps"]) == (["kl_bound: 0.05 → 0.1"], 8)
    assert yaml.safe_load((run.path / "config.yaml").read_text())["kl_bound"] == 0.1


# ------------------------------------------------------------------ where it cannot be


def said(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    return capsys.readouterr().err


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stand_in: None
):
    monkeypatch.delenv("VERL_PLATFORM")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert "this machine has none" in said(flags(tmp_path, *VERL), capsys)
    assert not list(tmp_path.glob("runs*"))
    assert main(flags(tmp_path, *VERL, "--dry_run")) == 0
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    cli_verl._check_machine(RunSettings())


def test_without_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    assert "pip install 'troll-rl[train,verl]'" in said(flags(tmp_path, *VERL), capsys)


def test_in_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stand_in: None
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "verl starts its processes itself" in said(flags(tmp_path, *VERL), capsys)


@pytest.mark.parametrize(
    "more", [["--nodes", "2"], ["--gpus_per_node", "2"], ["--rollout", "vllm"], ["--verl_overrides", "a=1"]]
)
def test_flags_of_verl_are_refused_by_TRL(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert f"{more[0]} needs --engine verl" in said(flags(tmp_path, *more), capsys)
    with pytest.raises(InputError, match="--engine verl"):
        check_command(["train", *more])


def test_a_flag_without_a_key_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stand_in: None
):
    assert "--log_completions is not supported with --engine verl" in said(
        flags(tmp_path / "runs", *VERL, "--log_completions"), capsys
    )
    assert not (tmp_path / "runs").exists()
    with pytest.raises(InputError, match="--top_entropy_quantile"):
        check_command(["train", "--engine", "verl", "--top_entropy_quantile", "0.5"])
    with pytest.raises(InputError, match="multiple of 8"):
        check_command(["train", "--engine", "verl", "--max_steps", "9"])
    check_command(["train", "--engine", "verl", "--nodes", "64", "--gpus_per_node", "8", "--task", "gsm8k"])


# ------------------------------------------------------------------ verl itself

CPU = {
    "PYTHONPATH": os.pathsep.join([str(TESTS / "verl"), os.environ.get("PYTHONPATH", "")]),
    "PYTHONHASHSEED": "0",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_USE_EXTERNAL_MODULES": "verl_support.cpu",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
}
SMALL = (
    *("actor_rollout_ref.rollout.name=tiny", "trainer.device=cpu", "data.dataloader_num_workers=0"),
    *("actor_rollout_ref.actor.use_torch_compile=false", "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false"),
    *("actor_rollout_ref.rollout.agent.num_workers=1", "reward.num_workers=1"),
    *("transfer_queue.backend.SimpleStorage.num_data_storage_units=1", "ray_kwargs.ray_init.num_cpus=16"),
    *("+ray_kwargs.ray_init.num_gpus=1", "+ray_kwargs.ray_init.include_dashboard=false"),
)


@pytest.mark.slow
def test_verl_trains(tmp_path: Path):
    """A rollout and its updates on a CPU, with the rewards of the task, up to the model and the report."""
    pytest.importorskip("verl")
    ray = tempfile.mkdtemp(prefix="ray")  # a short path: sockets are made in it
    argv = flags(
        tmp_path / "runs",
        *VERL,
        "--bf16",
        "false",
        "--attn_implementation",
        "sdpa",
        "--gradient_checkpointing",
        "false",
        "--write_report",
        "true",
        "--max_steps",
        "4",
        "--verl_overrides",
        *SMALL,
    )
    child = start(argv, env={**CPU, "RAY_TMPDIR": ray}, cwd=tmp_path)
    try:
        out, err = child.communicate(timeout=580)
    finally:
        if child.poll() is None:  # once asks verl to end, twice ends all of its processes
            child.terminate()
            time.sleep(2)
            child.terminate()
            child.wait(60)
        shutil.rmtree(ray, ignore_errors=True)
    assert child.returncode == 0, (out, err)
    run = Run.open(tmp_path / "runs" / "arithmetic-troll")
    assert (run.about["status"], run.about["engine"]) == ("finished", "verl")
    (line,) = run.metrics()
    assert line["step"] == 4
    assert line["troll/kl_before/max"] > 0
    assert line["troll/kl_after/max"] <= 0.05 * (1 + 1e-5)
    assert line["completions/max_length"] <= 4
    evaluations = run.evaluations()
    assert [x["step"] for x in evaluations] == [0, 4]
    for evaluation in evaluations:
        assert evaluation["eval_reward"] == pytest.approx(
            evaluation["eval_rewards/spread/mean"], rel=1e-5
        )  # fp32 and fp64
    assert (run.path / "report.html").is_file()
    trained, untrained = (AutoModelForCausalLM.from_pretrained(x) for x in (run.path / "model", shared() / "model"))
    moved = [not torch.equal(a, b) for a, b in zip(trained.parameters(), untrained.parameters(), strict=True)]
    assert all(moved)
    assert "Report:" in out
