"""The scripts in ``examples/verl``: they parse, verl accepts what they say, and their two arms differ in the loss."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "verl"
SCRIPTS = sorted(path.name for path in FOLDER.glob("qwen3*.sh"))

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning"),
    pytest.mark.filterwarnings("ignore:Disabled critic:UserWarning"),
]


def arguments(script: str, tmp_path: Path, *more: str, **environment: str) -> list[str]:
    """What a script gives to Python."""
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    stub.chmod(0o755)
    clean = {
        name: value for name, value in os.environ.items() if name not in ("TRUST_REGION", "DRY_RUN", "NNODES", "DATA")
    }
    run = subprocess.run(
        [str(FOLDER / script), *more],
        env={**clean, "PYTHON": str(stub), **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    module, *rest = run.stdout.removesuffix("\0").removeprefix("-m\0").split("\0")
    assert module == "verl.trainer.main_ppo"
    return rest


def composed(given: list[str]) -> Any:
    pytest.importorskip("verl")
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    names = [x.partition("=")[2] for x in given if x.startswith("--config-name=")]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(*(names or ["ppo_trainer"]), overrides=[x for x in given if not x.startswith("--")])
    OmegaConf.resolve(config)
    return config


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {key: leaf for inner in value for key, leaf in flat(value[inner], f"{name}.{inner}".strip(".")).items()}


def test_there_are_scripts_for_every_setting():
    assert SCRIPTS == [
        "qwen3_235b_megatron.sh",
        "qwen3_code.sh",
        "qwen3_dapo_math.sh",
        "qwen3_dapo_math_multinode.sh",
        "qwen3_gsm8k.sh",
    ]
    for path in FOLDER.glob("*.sh"):
        subprocess.run(["bash", "-n", str(path)], check=True)
        assert os.access(path, os.X_OK) == (path.name != "common.sh")


@pytest.mark.slow  # the first import of verl
@pytest.mark.parametrize("script", SCRIPTS)
def test_verl_accepts_both_arms_and_they_differ_in_the_loss_alone(script: str, tmp_path: Path):
    pytest.importorskip("verl")
    from omegaconf import OmegaConf

    configs = [composed(arguments(script, tmp_path, TRUST_REGION=region)) for region in ("troll", "clip")]
    troll, clip = (flat(OmegaConf.to_container(config)) for config in configs)
    actor = "actor_rollout_ref.actor"
    engine = f"{actor}.megatron" if "megatron" in script else f"{actor}.fsdp_config"
    differ = {name for name in troll.keys() | clip.keys() if troll.get(name) != clip.get(name)}
    assert not {name for name in differ if name.startswith(f"{actor}.policy_loss.")} - troll.keys()
    assert {name for name in differ if not name.startswith(f"{actor}.policy_loss.")} == {
        *(f"{engine}.{name}" for name in ("_target_", "preset")),
        *("actor_rollout_ref.model.model_type", "actor_rollout_ref.model.external_lib"),
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
        *("trainer.experiment_name", "trainer.default_local_dir", "actor_rollout_ref.rollout.trace.experiment_name"),
    }
    expected = {
        f"{actor}.policy_loss.preset": "paper",
        f"{engine}.preset": "paper",
        **{f"{actor}.policy_loss.{name}": None for name in ("kl_bound", "regression_coef", "tail")},
        **{f"{engine}.{name}": None for name in ("max_support", "tail_mass")},
        f"{actor}.policy_loss.loss_mode": "troll",
    }
    assert {name: troll[name] for name in expected} == expected
    authors = {
        f"{actor}.clip_ratio_low": 0.2,
        f"{actor}.clip_ratio_high": 0.2,
        f"{actor}.policy_loss.loss_mode": "vanilla",
        f"{actor}.optim.lr": 1e-6,
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.optim.clip_grad": 1.0,
        f"{actor}.use_kl_loss": False,
        f"{actor}.ppo_mini_batch_size": 32,
        f"{actor}.ppo_epochs": 1,
        "data.train_batch_size": 256,
        "actor_rollout_ref.rollout.n": 8,
        "algorithm.adv_estimator": "grpo",
    }
    assert {name: clip[name] for name in authors} == authors
    schedule = f"{actor}.optim.{'lr_decay_style' if 'megatron' in script else 'lr_scheduler_type'}"
    assert clip[schedule] == "constant"


@pytest.mark.slow
@pytest.mark.parametrize("script", [script for script in SCRIPTS if "megatron" not in script])
@pytest.mark.parametrize("region", ["troll", "clip"])
def test_verl_finds_nothing_wrong(script: str, region: str, tmp_path: Path):
    config = composed(arguments(script, tmp_path, TRUST_REGION=region))
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    assert not need_reference_policy(config)
    validate_config(config, need_reference_policy(config), need_critic(config))


def test_what_the_scripts_take(tmp_path: Path):
    usual = arguments("qwen3_dapo_math.sh", tmp_path, "trainer.save_freq=-1", DATA="/x", MODEL="mine")
    assert usual[-1] == "trainer.save_freq=-1"
    assert {"data.train_files=/x/train.parquet", "actor_rollout_ref.model.path=mine", "+trust_region=troll"} <= set(
        usual
    )
    assert "--cfg" not in usual
    assert arguments("qwen3_gsm8k.sh", tmp_path, "a=1", DRY_RUN="1")[-3:] == ["a=1", "--cfg", "job"]
    many = arguments("qwen3_dapo_math_multinode.sh", tmp_path, NNODES="3", TRUST_REGION="clip")
    assert [x for x in many if x.startswith("trainer.nnodes")][-1] == "trainer.nnodes=3"
    assert many[-1] == "trainer.experiment_name=qwen3-dapo-math-3-nodes-clip"
    assert "+trust_region=troll" not in many
    with pytest.raises(subprocess.CalledProcessError) as error:
        arguments("qwen3_gsm8k.sh", tmp_path, TRUST_REGION="ppo")
    assert "must be troll or clip, got ppo" in error.value.stderr


def test_many_nodes_train_what_one_does(tmp_path: Path):
    one, many = (arguments(f"qwen3_dapo_math{x}.sh", tmp_path) for x in ("", "_multinode"))
    assert many[: len(one)] == one
    assert {x.partition("=")[0] for x in many[len(one) :]} == {"trainer.nnodes", "trainer.experiment_name"}


def test_code_is_judged_by_a_reward_that_exists(tmp_path: Path):
    given = dict(x.split("=", 1) for x in arguments("qwen3_code.sh", tmp_path) if "=" in x)
    place = "reward.custom_reward_function"
    module = importlib.import_module(given[f"{place}.path"].removeprefix("pkg://"))
    reward = getattr(module, given[f"{place}.name"])
    task = given[f"+{place}.reward_kwargs.task"]
    assert task == str(tmp_path / "data" / "code" / "task.json")
    problems = [{"prompt": f"add {i}", "tests": [f"assert f(1) == {i}"]} for i in range(12)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    command = [sys.executable, str(FOLDER / "prepare_data.py"), "code", "data/code", "--data", "p.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"+{place}.reward_kwargs.task={task}" in done.stdout
    assert {"train.parquet", "held_out.parquet", "task.json"} == {
        x.name for x in (tmp_path / "data" / "code").iterdir()
    }
    import pyarrow.parquet

    (row, *_) = pyarrow.parquet.read_table(tmp_path / "data" / "code" / "train.parquet").to_pylist()
    asked = json.loads(row["reward_model"]["ground_truth"])
    number = re.search(r"== (\d+)", str(asked["tests"]))[1]
    for program, expected in ((f"def f(x): return {number}", 1.0), ("def f(x): return -1", 0.0)):
        found = reward(row["data_source"], program, row["reward_model"]["ground_truth"], row["extra_info"], task=task)
        assert found["score"] == expected


def test_plain_prompts_are_refused(tmp_path: Path):
    command = [sys.executable, str(FOLDER / "prepare_data.py"), "arithmetic", "data"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "troll train --engine verl" in done.stderr


@pytest.mark.slow
def test_a_dry_run_prints_the_configuration(tmp_path: Path):
    pytest.importorskip("verl")
    import yaml

    bare = {name: value for name, value in os.environ.items() if name not in ("TRUST_REGION", "DATA")}
    run = subprocess.run(
        [str(FOLDER / "qwen3_gsm8k.sh"), "data.seed=5"],
        env={**bare, "PYTHON": sys.executable, "DRY_RUN": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    config = yaml.safe_load(run.stdout)
    assert config["actor_rollout_ref"]["actor"]["policy_loss"]["loss_mode"] == "troll"
    assert config["data"]["seed"] == 5


def test_the_required_version_is_that_of_the_package():
    (line,) = [x for x in (FOLDER / "REQUIRED_VERL.txt").read_text().splitlines() if not x.startswith("#")]
    assert f'"{line}"' in (ROOT / "pyproject.toml").read_text()


def test_the_page_names_every_script_and_only_these():
    page = (FOLDER / "README.md").read_text()
    assert set(re.findall(r"\]\((\w+\.\w+)\)", page)) == {path.name for path in FOLDER.iterdir() if path.is_file()} - {
        "README.md"
    }
