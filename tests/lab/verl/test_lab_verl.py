"""From the flags of ``troll train`` to verl: keys, refusals, data, reward, metrics, and the process itself."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import yaml
from rich.console import Console
from tokenizers.processors import TemplateProcessing

from troll.errors import InputError
from troll.lab.cli.flags import Flags
from troll.lab.runs import Run
from troll.lab.tasks import load_task
from troll.lab.training.run import RunPlan
from troll.lab.training.settings import RunSettings, defaults
from troll.lab.verl import data as verl_data
from troll.lab.verl import keys, launch
from troll.lab.verl.data import longest_prompt, plain_template, request_of, write_stop, write_task
from troll.lab.verl.keys import KEYS, NEVER, overrides, table, written
from troll.lab.verl.metrics import Translator, convert, read_new, translate
from troll.lab.verl.setup import LIMITS, OWN, REASONS, Setup, config_of, refuse, translated
from troll.rewards.workers import PoolError
from troll.trl import TROLLConfig, TROLLTrainer

ROOT = Path(__file__).parents[3]
ACTOR, LOSS, ENGINE = (f"actor_rollout_ref.actor{x}" for x in ("", ".policy_loss", ".fsdp_config"))
ROLLOUT = "actor_rollout_ref.rollout"
LOG = "VERL_FILE_LOGGER_PATH"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning"),
    pytest.mark.filterwarnings("ignore:Disabled critic:UserWarning"),
    pytest.mark.filterwarnings("ignore:Ray state API:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*with a literal:SyntaxWarning"),  # in a package of reasoning-gym
]


def setup(*argv: str, prompts: int = 1024, model: str = "Qwen/Qwen3-8B", **facts: Any) -> Setup:
    """Of flags, for a task with this many prompts."""
    flags = Flags(["--engine", "verl", *(["--model", model] if model else []), *argv])
    run = flags.run()
    args, model_config = flags.configs(defaults(run.model, {}, False, "verl"), "unused")
    known: dict[str, Any] = {
        "folder": Path("/runs/a run"),
        "model_path": run.model,
        "prompt_tokens": 17,
        "gpus": run.gpus_per_node or 1,
        "environment": {LOG: "/runs/a run/verl/metrics-1.jsonl"},
    }
    explicit = frozenset(flags.given)
    return Setup(run=run, args=args, model=model_config, explicit=explicit, prompts=prompts, **{**known, **facts})


def as_dict(lines: list[str]) -> dict[str, str]:
    pairs = [line.split("=", 1) for line in lines]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)  # type: ignore[arg-type]


def told(*argv: str, **facts: Any) -> dict[str, str]:
    return as_dict(overrides(setup(*argv, **facts)))


AUTHORS = (
    *("--kl_bound", "0.05"),
    *("--nodes", "2", "--gpus_per_node", "4", "--per_device_train_batch_size", "4"),
    *("--gradient_accumulation_steps", "8", "--updates_per_generation", "8", "--num_generations", "8"),
    *("--max_steps", "800", "--max_completion_length", "4096", "--eval_steps", "80", "--save_steps", "160"),
)
"""Settings of the authors: KL ≤ 0.05, 256 prompts of 8 samples per rollout, updates on 32 prompts."""

EXPECTED = {
    "hydra.searchpath": "[pkg://troll.verl.configs]",
    "+trust_region": "troll",
    f"{LOSS}.preset": "default",
    f"{LOSS}.kl_bound": "0.05",
    f"{LOSS}.regression_coef": "1.0",
    f"{LOSS}.tail": "bucket",
    f"{LOSS}.importance_sampling_level": "token",
    f"{ENGINE}.max_support": "64",
    f"{ENGINE}.tail_mass": "1e-05",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.entropy_coeff": "0.0",
    f"{ACTOR}.use_kl_loss": "false",
    "algorithm.adv_estimator": "grpo",
    "algorithm.norm_adv_by_std_in_grpo": "true",
    "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
    "actor_rollout_ref.model.trust_remote_code": "false",
    "data.trust_remote_code": "false",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "true",
    f"{ACTOR}.strategy": "fsdp2",
    f"{ENGINE}.model_dtype": "fp32",
    f"{ROLLOUT}.dtype": "bfloat16",
    "actor_rollout_ref.model.lora_rank": "0",
    "data.train_files": "'/runs/a run/verl/train.parquet'",
    "data.val_files": "'/runs/a run/verl/held_out.parquet'",
    "data.max_prompt_length": "17",
    "data.max_response_length": "4096",
    "data.shuffle": "true",
    "reward.custom_reward_function.path": "pkg://troll.lab.verl.data",
    "reward.custom_reward_function.name": "score",
    "+reward.custom_reward_function.reward_kwargs.task": "'/runs/a run/verl/task.json'",
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.n": "8",
    f"{ROLLOUT}.temperature": "1.0",
    f"{ROLLOUT}.top_p": "1.0",
    f"{ROLLOUT}.top_k": "-1",
    f"{ROLLOUT}.tensor_model_parallel_size": "1",
    f"{ROLLOUT}.val_kwargs.n": "1",
    f"{ROLLOUT}.val_kwargs.do_sample": "true",
    f"{ROLLOUT}.val_kwargs.temperature": "1.0",
    f"{ROLLOUT}.val_kwargs.top_p": "1.0",
    f"{ROLLOUT}.val_kwargs.top_k": "-1",
    "data.train_batch_size": "256",
    f"{ACTOR}.ppo_mini_batch_size": "32",
    f"{ACTOR}.ppo_epochs": "1",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": "4",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "4",
    "trainer.total_training_steps": "100",
    "trainer.total_epochs": "25",
    f"{ACTOR}.optim.lr": "1e-06",
    f"{ACTOR}.optim.lr_scheduler_type": "constant",
    f"{ACTOR}.optim.weight_decay": "0.0",
    f"{ACTOR}.optim.betas": "[0.9,0.999]",
    f"{ACTOR}.optim.clip_grad": "1.0",
    "trainer.nnodes": "2",
    "trainer.n_gpus_per_node": "4",
    "trainer.test_freq": "10",
    "trainer.val_before_train": "true",
    "trainer.save_freq": "20",
    f"{ACTOR}.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
    "trainer.max_actor_ckpt_to_keep": "2",
    "trainer.default_local_dir": "'/runs/a run/checkpoints'",
    "trainer.project_name": "troll",
    "trainer.experiment_name": "'a run'",
    "trainer.logger": "[console,file]",
    "trainer.resume_mode": "disable",
    "data.seed": "0",
    f"{ENGINE}.seed": "0",
    f"{ACTOR}.data_loader_seed": "0",
    f"{ROLLOUT}.seed": "0",
    "hydra.run.dir": "'/runs/a run/verl/hydra'",
    f"+ray_kwargs.ray_init.runtime_env.env_vars.{LOG}": "'/runs/a run/verl/metrics-1.jsonl'",
}


def test_the_settings_of_the_authors():
    assert told(*AUTHORS) == EXPECTED


CLIPS = {f"{ACTOR}.clip_ratio{x}" for x in ("", "_low", "_high", "_c")}
TROLLS = {
    *("hydra.searchpath", "+trust_region", f"{ENGINE}.max_support", f"{ENGINE}.tail_mass"),
    *(f"{LOSS}.{x}" for x in ("preset", "kl_bound", "regression_coef", "tail", "importance_sampling_level")),
}


@pytest.mark.parametrize("region", ["clip", "none"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_arms_differ_in_the_loss_alone(region: str, level: str):
    common = (*AUTHORS, "--importance_sampling_level", level, "--epsilon", "0.1", "--epsilon_high", "0.3")
    troll, other = told(*common), told(*common, "--trust_region", region)
    assert troll.keys() - other.keys() == TROLLS
    watchdog = f"+{ROLLOUT}.agent.agent_loop_manager_class"  # +trust_region=troll has it, too
    assert other.keys() - troll.keys() == CLIPS | {f"{LOSS}.loss_mode", watchdog}
    assert {name: troll[name] for name in troll.keys() & other.keys()} == {
        name: other[name] for name in troll.keys() & other.keys()
    }
    assert troll[f"{LOSS}.importance_sampling_level"] == level
    assert other[f"{LOSS}.loss_mode"] == {"token": "vanilla", "sequence": "gspo"}[level]
    low, high = ("0.1", "0.3") if region == "clip" else (repr(NEVER), repr(NEVER))
    assert [other[f"{ACTOR}.clip_ratio{x}"] for x in ("", "_low", "_high", "_c")] == [low, low, high, repr(NEVER)]


ONE_FLAG: list[tuple[list[str], dict[str, str | None]]] = [
    (["--kl_bound", "inf"], {f"{LOSS}.kl_bound": "inf"}),
    (["--preset", "paper"], {f"{LOSS}.preset": "paper", f"{LOSS}.kl_bound": "0.05", f"{LOSS}.tail": "floor"}),
    (["--preset", "paper", "--kl_bound", "0.1"], {f"{LOSS}.kl_bound": "0.1", f"{LOSS}.tail": "floor"}),
    (["--tail", "floor", "--max_support", "16"], {f"{LOSS}.tail": "floor", f"{ENGINE}.max_support": "16"}),
    (
        ["--tail_mass", "0.001", "--regression_coef", "2"],
        {f"{ENGINE}.tail_mass": "0.001", f"{LOSS}.regression_coef": "2.0"},
    ),
    (["--trust_region", "clip"], {f"{ACTOR}.clip_ratio_high": "0.2", f"{LOSS}.kl_bound": None, "+trust_region": None}),
    (["--trust_region", "clip", "--delta", "3"], {f"{ACTOR}.clip_ratio_c": "3.0"}),
    (["--loss_type", "grpo"], {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean", f"{ACTOR}.loss_scale_factor": None}),
    (
        ["--loss_type", "dr_grpo", "--max_completion_length", "99"],
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": "99"},
    ),
    (
        ["--beta", "0.01"],
        {f"{ACTOR}.use_kl_loss": "true", f"{ACTOR}.kl_loss_coef": "0.01", f"{ACTOR}.kl_loss_type": "low_var_kl"},
    ),
    (["--entropy_coef", "0.001"], {f"{ACTOR}.entropy_coeff": "0.001"}),
    (
        ["--advantage_estimator", "dr_grpo"],
        {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": "false"},
    ),
    (["--scale_rewards", "none"], {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": "false"}),
    (["--advantage_estimator", "rloo"], {"algorithm.adv_estimator": "rloo"}),
    (["--advantage_estimator", "reinforce_pp"], {"algorithm.adv_estimator": "reinforce_plus_plus"}),
    (["--advantage_estimator", "reinforce_pp_baseline"], {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"}),
    (
        ["--bf16", "false"],
        {
            f"{ROLLOUT}.dtype": "float32",
            f"+{ENGINE}.mixed_precision.param_dtype": "fp32",
            "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype": None,
        },
    ),
    (["--bf16", "false", "--beta", "1"], {"+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype": "fp32"}),
    (["--dtype", "bfloat16"], {f"{ENGINE}.model_dtype": "bf16", f"{ROLLOUT}.dtype": "bfloat16"}),
    (
        ["--use_peft", "--lora_r", "8", "--lora_target_modules", "q_proj", "v_proj"],
        {
            "actor_rollout_ref.model.lora_rank": "8",
            "actor_rollout_ref.model.lora_alpha": "32",
            f"{ROLLOUT}.load_format": "safetensors",
            "actor_rollout_ref.model.target_modules": "[q_proj,v_proj]",
            f"{ACTOR}.checkpoint.save_contents": "[model,optimizer,extra]",
        },
    ),
    (["--use_peft"], {"actor_rollout_ref.model.target_modules": "all-linear"}),
    (["--attn_implementation", "sdpa"], {"+actor_rollout_ref.model.override_config.attn_implementation": "sdpa"}),
    (
        ["--chat_template_kwargs", '{"enable_thinking": false}'],
        {"+data.apply_chat_template_kwargs.enable_thinking": "false"},
    ),
    (
        ["--rollout", "sglang", "--temperature", "0.7", "--top_k", "20", "--top_p", "0.9"],
        {
            f"{ROLLOUT}.name": "sglang",
            f"{ROLLOUT}.temperature": "0.7",
            f"{ROLLOUT}.top_k": "20",
            f"{ROLLOUT}.top_p": "0.9",
            f"{ROLLOUT}.val_kwargs.temperature": "0.7",
            f"{ROLLOUT}.val_kwargs.top_k": "20",
            f"{ROLLOUT}.val_kwargs.top_p": "0.9",
        },
    ),
    (
        ["--vllm_tensor_parallel_size", "4", "--vllm_gpu_memory_utilization", "0.6", "--vllm_max_model_length", "9000"],
        {
            f"{ROLLOUT}.tensor_model_parallel_size": "4",
            f"{ROLLOUT}.gpu_memory_utilization": "0.6",
            f"{ROLLOUT}.max_model_len": "9000",
        },
    ),
    (["--use_vllm"], {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.gpu_memory_utilization": None}),
    (
        ["--lr_scheduler_type", "cosine", "--warmup_steps", "16"],
        {f"{ACTOR}.optim.lr_scheduler_type": "cosine", f"{ACTOR}.optim.lr_warmup_steps": "2"},
    ),
    (
        ["--lr_scheduler_type", "constant_with_warmup"],
        {f"{ACTOR}.optim.lr_scheduler_type": "constant", f"{ACTOR}.optim.lr_warmup_steps": None},
    ),
    (
        ["--learning_rate", "3e-6", "--weight_decay", "0.1", "--adam_beta2", "0.95", "--adam_epsilon", "1e-6"],
        {
            f"{ACTOR}.optim.lr": "3e-06",
            f"{ACTOR}.optim.weight_decay": "0.1",
            f"{ACTOR}.optim.betas": "[0.9,0.95]",
            "+actor_rollout_ref.actor.optim.override_optimizer_config.eps": "1e-06",
        },
    ),
    (["--max_grad_norm", "0"], {f"{ACTOR}.optim.clip_grad": "inf"}),
    (["--gradient_checkpointing", "false"], {"actor_rollout_ref.model.enable_gradient_checkpointing": "false"}),
    (["--num_generations_eval", "4"], {f"{ROLLOUT}.val_kwargs.n": "4"}),
    (["--eval_strategy", "no"], {"trainer.test_freq": "-1", "trainer.val_before_train": "false"}),
    (["--eval_strategy", "epoch"], {"trainer.test_freq": "16"}),
    (["--eval_on_start", "false"], {"trainer.val_before_train": "false", "trainer.test_freq": "4"}),
    (["--save_strategy", "no"], {"trainer.save_freq": "16", f"{ACTOR}.checkpoint.save_contents": "[hf_model]"}),
    (["--save_strategy", "no", "--save_model", "false"], {"trainer.save_freq": "-1"}),
    (
        ["--save_strategy", "epoch", "--save_total_limit", "1"],
        {"trainer.save_freq": "16", "trainer.max_actor_ckpt_to_keep": "1"},
    ),
    (
        ["--save_model", "false"],
        {f"{ACTOR}.checkpoint.save_contents": "[model,optimizer,extra]", "trainer.save_freq": "4"},
    ),
    (["--report_to", "tensorboard"], {"trainer.logger": "[console,file,tensorboard]"}),
    (
        ["--seed", "7"],
        {"data.seed": "7", f"{ENGINE}.seed": "7", f"{ACTOR}.data_loader_seed": "7", f"{ROLLOUT}.seed": "7"},
    ),
    (["--shuffle_dataset", "false"], {"data.shuffle": "false"}),
    (["--trust_remote_code"], {"actor_rollout_ref.model.trust_remote_code": "true", "data.trust_remote_code": "true"}),
    (["--num_train_epochs", "2.5"], {"trainer.total_training_steps": "40", "trainer.total_epochs": "3"}),
    (["--updates_per_generation", "1"], {"data.train_batch_size": "8", f"{ACTOR}.ppo_mini_batch_size": "8"}),
    (
        ["--num_iterations", "2", "--updates_per_generation", "8"],
        {"data.train_batch_size": "32", f"{ACTOR}.ppo_mini_batch_size": "8", f"{ACTOR}.ppo_epochs": "2"},
    ),
    (
        ["--steps_per_generation", "16", "--gradient_accumulation_steps", "4"],
        {"data.train_batch_size": "16", f"{ACTOR}.ppo_mini_batch_size": "4"},
    ),
    (["--gpus_per_node", "8"], {"data.train_batch_size": "512", f"{ACTOR}.ppo_mini_batch_size": "64"}),
    (["--num_generations", "16"], {f"{ROLLOUT}.n": "16", f"{ACTOR}.ppo_mini_batch_size": "4"}),
]


@pytest.mark.parametrize(("argv", "expected"), ONE_FLAG)
def test_one_flag(argv: list[str], expected: dict[str, str | None]):
    found = told(*argv)
    assert {name: found.get(name) for name in expected} == expected


def test_the_embedded_model_trains_without_a_warmup():
    found = told(model="")
    assert f"{ACTOR}.optim.lr_warmup_steps" not in found  # which would be a whole rollout at rate 0
    assert (found["data.train_batch_size"], found["trainer.total_training_steps"]) == ("8", "10")
    assert found["trainer.save_freq"] == "5"


def test_facts_about_the_task():
    found = told(chat_template="{{ bos_token }}x", stop=198, resumes=True)
    assert found["actor_rollout_ref.model.custom_chat_template"] == "'{{ bos_token }}x'"
    assert found[f"{ROLLOUT}.agent.default_agent_loop"] == "troll_stop"
    assert found[f"{ROLLOUT}.agent.agent_loop_config_path"] == "'/runs/a run/verl/stop.yaml'"
    assert found["trainer.resume_mode"] == "auto"


def test_overrides_of_the_user_come_last():
    lines = overrides(setup("--verl_overrides", "data.seed=9", "~trainer.logger"))
    assert lines[-2:] == ["data.seed=9", "~trainer.logger"]


# ------------------------------------------------------------------ what is refused

REFUSED = [
    (["--sync_ref_model"], "--sync_ref_model.*always the initial model"),
    (["--hub_token", "x"], "--hub_token.*does not upload"),
    (["--load_in_4bit"], "quantised"),
    (["--generation_kwargs", '{"a": 1}'], "--generation_kwargs.*verl has no equivalent"),
    (["--per_device_eval_batch_size", "4"], "all held-out prompts"),
    (["--log_completions"], "rollout_data_dir"),
    (["--loss_type", "cispo", "--trust_region", "clip"], "--loss_type cispo.*loss_mode=cispo"),
    (["--scale_rewards", "batch"], "standard deviation of the group"),
    (["--measure_kl", "--trust_region", "clip"], "--measure_kl True.*not recorded"),
    (["--kl_bound_schedule", "entropy max=1.0"], "--kl_bound_schedule is not supported.*keeps no state"),
    (
        ["--kl_bound_schedule", "projected target=0.03"],
        "--kl_bound_schedule is not supported with --engine verl.*the bound is",
    ),
    (["--regression_coef_schedule", "projected target=0.05"], "--regression_coef_schedule is not supported"),
    (["--scale_regression", "true"], "--scale_regression is not supported"),
    (["--min_p", "0.1"], "--min_p"),
    (["--repetition_penalty", "1.1"], "--repetition_penalty"),
    (["--optim", "sgd"], "optimizer_impl"),
    (["--lr_scheduler_type", "linear"], "--lr_scheduler_type"),
    (["--logging_steps", "5"], "every rollout"),
    (["--model_revision", "abc"], "--model_revision"),
    (["--use_vllm", "--rollout", "sglang"], "--use_vllm"),
    (["--vllm_mode", "server"], "--vllm_mode"),
    (["--vllm_importance_sampling_correction", "true"], "rollout_correction.rollout_is"),
    (["--use_bias_correction_kl", "true", "--beta", "0.1"], "--use_bias_correction_kl"),
    (["--lora_dropout", "0.1"], "--lora_dropout"),
    (["--delta", "1.1", "--trust_region", "clip"], "--delta"),
    (["--delta", "3", "--trust_region", "clip", "--importance_sampling_level", "sequence"], "--delta"),
    (["--report_to", "comet_ml"], "--report_to"),
    (["--warmup_steps", "0.1"], "--warmup_steps"),
    (["--multi_objective_aggregation", "normalize_then_sum"], "--multi_objective_aggregation"),
    (["--disable_dropout", "false"], "--disable_dropout"),
    (["--use_cpu"], "--use_cpu True.*does not train on a CPU"),
    (["--verl_overrides", "nonsense"], "nonsense"),
]


@pytest.mark.parametrize(("argv", "words"), REFUSED)
def test_refused_by_name_and_with_the_reason(argv: list[str], words: str):
    with pytest.raises(InputError, match=f"(?s){words}"):
        refuse(setup(*argv))


ACCEPTED = [
    ["--measure_kl"],
    ["--preset", "paper"],
    ["--logging_steps", "1", "--optim", "adamw_torch"],
    ["--use_bias_correction_kl", "true"],
    ["--use_bias_correction_kl", "false", "--beta", "0.1"],
    ["--vllm_importance_sampling_correction", "false", "--use_vllm"],
    ["--dry_run", "--write_report", "false"],
]


@pytest.mark.parametrize("argv", ACCEPTED)
def test_not_refused(argv: list[str]):
    refuse(setup(*argv))


def test_every_flag_is_translated_limited_or_refused():
    flags = Flags([])
    names = {action.dest for action in flags.parser._actions}
    known = translated() | LIMITS.keys() | set(OWN)
    assert known <= names
    assert {name for group in REASONS for name in group} <= names - known
    for name in sorted(names - known):
        with pytest.raises(InputError, match=rf"--{name} is not supported with --engine verl"):
            refuse(setup_saying(name))
    for name in sorted(known - LIMITS.keys()):
        refuse(setup_saying(name))


def setup_saying(name: str) -> Setup:
    from dataclasses import replace

    return replace(setup(), explicit=frozenset({name}))


IMPOSSIBLE = [
    (["--max_steps", "12"], {}, "--max_steps must be a multiple of 8.*got 12"),
    (["--eval_steps", "3"], {}, "--eval_steps must .* got 3.*--eval_steps 8"),
    (["--save_steps", "20"], {}, "--save_steps must be .* got 20"),
    (["--warmup_steps", "4"], {}, "--warmup_steps must be .* got 4"),
    (["--gradient_accumulation_steps", "3"], {"prompts": 4}, "a rollout has 24 prompts, but there are 4"),
    (
        [
            "--num_generations",
            "3",
            "--per_device_train_batch_size",
            "6",
            "--gpus_per_node",
            "1",
            "--gradient_accumulation_steps",
            "1",
            "--updates_per_generation",
            "8",
        ],
        {"gpus": 1},
        None,
    ),
    (
        ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "4"],
        {},
        "--gradient_accumulation_steps 8",
    ),
    (
        ["--generation_batch_size", "8", "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "6"],
        {},
        "are not whole updates",
    ),
    (["--nodes", "0"], {}, "--nodes must be at least 1, got 0"),
    (["--gpus_per_node", "0"], {}, "--gpus_per_node must be at least 1, got 0"),
]


@pytest.mark.parametrize(("argv", "facts", "words"), IMPOSSIBLE)
def test_schedules_that_verl_cannot_keep(argv: list[str], facts: dict[str, Any], words: str | None):
    if words is None:
        overrides(setup(*argv, **facts))
        return
    with pytest.raises(InputError, match=f"(?s){words}"):
        overrides(setup(*argv, **facts))


def test_a_default_is_rounded_and_written_down_so_that_the_run_can_be_made_again():
    argv = ("--updates_per_generation", "6", "--trust_region", "clip")
    first = setup(*argv)
    flags = Flags(["--engine", "verl", "--model", "Qwen/Qwen3-8B", *argv])
    flags.configs(defaults("Qwen/Qwen3-8B", {}, False, "verl"), "unused")
    config = config_of(flags.resolved(), first)
    assert (config["eval_steps"], config["updates_per_generation"]) == (36, 6)  # 32 is the default
    assert "measure_kl" not in config  # the default, and not for clip
    assert {"logging_steps", "config", "run_name", "use_cpu"}.isdisjoint(config)
    again = setup(*[f"--{name}={value}" for name, value in config.items() if name not in ("model", "engine")])
    refuse(again)
    assert overrides(again) == overrides(first)


# ------------------------------------------------------------------ hydra and verl accept it


def composed(lines: list[str]) -> Any:
    """verl's configuration under these overrides, as ``main_ppo`` makes it."""
    pytest.importorskip("verl")
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=lines)
    OmegaConf.resolve(config)
    return config


def validate(config: Any) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    validate_config(config, need_reference_policy(config), need_critic(config))


COMPOSED = [
    (),
    AUTHORS,
    (*AUTHORS, "--trust_region", "clip", "--delta", "3", "--beta", "0.1"),
    ("--trust_region", "none", "--importance_sampling_level", "sequence", "--bf16", "false"),
    ("--attn_implementation", "sdpa", "--chat_template_kwargs", '{"enable_thinking": false}', "--adam_epsilon", "1e-6"),
    (
        "--loss_type",
        "dr_grpo",
        "--kl_bound",
        "inf",
        "--max_grad_norm",
        "0",
        "--warmup_steps",
        "16",
        "--report_to",
        "wandb",
    ),
    ("--use_peft", "--lora_target_modules", "q_proj", "--rollout", "sglang", "--bf16", "false", "--beta", "0.1"),
    ("--verl_overrides", "trainer.log_val_generations=4", "+data.extra=1"),
]


@pytest.mark.slow  # the first import of verl
@pytest.mark.parametrize("argv", COMPOSED)
def test_verl_accepts_the_overrides(argv: tuple[str, ...]):
    case = setup(*argv, chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", stop=3)
    refuse(case)
    config = composed(overrides(case))
    validate(config)
    actor = config.actor_rollout_ref.actor
    assert (actor.policy_loss.loss_mode == "troll") == (case.args.trust_region == "troll")
    assert config.actor_rollout_ref.model.custom_chat_template == case.chat_template
    assert config.data.train_files == "/runs/a run/verl/train.parquet"
    assert config.ray_kwargs.ray_init.runtime_env.env_vars[LOG] == "/runs/a run/verl/metrics-1.jsonl"
    assert type(actor.optim.lr) is float
    if case.args.trust_region == "troll":
        assert type(actor.policy_loss.kl_bound) is float
        assert (actor.policy_loss.kl_bound, actor.fsdp_config.tail_mass) == (case.args.kl_bound, 1e-5)
        assert config.actor_rollout_ref.model.model_type == "troll_lm"
    else:
        assert "external_lib" not in config.actor_rollout_ref.model or not config.actor_rollout_ref.model.external_lib
        assert "kl_bound" not in actor.policy_loss


@pytest.mark.slow
def test_an_unknown_key_does_not_compose():
    """So that the test above means something."""
    pytest.importorskip("verl")
    from hydra.errors import ConfigCompositionException

    with pytest.raises(ConfigCompositionException, match="total_training_stepz"):
        composed([*overrides(setup()), "trainer.total_training_stepz=1"])


WORDS = [
    "a b",
    "it's",
    "\\",
    "a\\'b",
    "'",
    "a\\",
    "${oc.env:HOME}",
    "$HOME",
    "null",
    "True",
    "1e5",
    "12",
    "",
    "ü=ß",
    '"',
    "[a]",
    "{a:b}",
    "~x",
    "a,b",
    "%d #",
]


@pytest.mark.parametrize("text", WORDS)
def test_any_text_survives_hydra(text: str):
    pytest.importorskip("hydra")
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    (override,) = OverridesParser.create().parse_overrides([f"k={written([text])}"])
    (read,) = OmegaConf.to_container(OmegaConf.create({"k": override.value()}), resolve=True)["k"]
    assert read == text


def test_values_survive_hydra():
    pytest.importorskip("hydra")
    from hydra.core.override_parser.overrides_parser import OverridesParser

    value = {"a": [1, 1e-06, math.inf, True, False, None], "b": {"c": "d e"}}
    (override,) = OverridesParser.create().parse_overrides([f"k={written(value)}"])
    read = override.value()
    assert read["a"] == value["a"]
    assert [type(x) for x in read["a"]] == [int, float, float, bool, bool, type(None)]
    assert str(read["b"]["c"]).strip("'") == "d e"


# ------------------------------------------------------------------ data


def test_plain_prompts_reach_the_model_as_in_TRL(tmp_path: Path):
    """verl's own data set and tokenization give the tokens that TRL generates from; with a token in front, too."""
    pytest.importorskip("verl")
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

    task = load_task("arithmetic", train_size=6, eval_size=4)
    write_task(task, {}, tmp_path)
    plain = tiny_models.tokenizer()
    begins = tiny_models.tokenizer()
    begins.bos_token = "<|im_start|>"
    begins.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", begins.convert_tokens_to_ids("<|im_start|>"))]
    )
    for tokenizer in (plain, begins):
        expected = [tokenizer(text=row["prompt"])["input_ids"] for row in task.train_dataset]
        template = plain_template(task, tokenizer)
        tokenizer.chat_template = template
        config = OmegaConf.create({"max_prompt_length": 64, "filter_overlong_prompts": False})
        config.cache_dir = str(tmp_path / "cache")
        read = RLHFDataset(str(tmp_path / "train.parquet"), tokenizer, config)
        tokens = [
            ContinuousTokenBuilder(tokenizer).build_initial_tokens(read[i]["raw_prompt"]) for i in range(len(read))
        ]
        assert tokens == expected
        held_out = [len(tokenizer(text=row["prompt"])["input_ids"]) for row in task.eval_dataset]
        assert longest_prompt(task, tokenizer, template, {}) == max(*map(len, expected), *held_out)
    assert len(expected[0]) == 1 + len(plain(text=task.train_dataset[0]["prompt"])["input_ids"])


def test_parquet_keeps_every_column_and_its_type(tmp_path: Path):
    pytest.importorskip("verl")
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    file = tmp_path / "mine.jsonl"
    rows = [
        {
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"ü {i}"}],
            "answer": None if i else "é",
            "tests": {"inputs": ["1\n"], "n": i},
        }
        for i in range(20)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.py").write_text("def one(completions, **_): return [1.0] * len(completions)\n")
    task = load_task("data", data=str(file), reward=[f"{tmp_path / 'r.py'}:one"], eval_size=2)
    write_task(task, {"task": {}}, tmp_path)
    config = OmegaConf.create({"filter_overlong_prompts": False, "cache_dir": str(tmp_path / "cache")})
    for name, data in (("train", task.train_dataset), ("held_out", task.eval_dataset)):
        read = RLHFDataset(str(tmp_path / f"{name}.parquet"), None, config)
        assert len(read) == len(data)
        for i, row in enumerate(data):
            got = read[i]
            assert got["raw_prompt"] == row["prompt"]
            assert json.loads(got["reward_model"]["ground_truth"]) == row
            assert (got["data_source"], got["reward_model"]["style"]) == ("data", "rule")
            assert got["extra_info"] == {"index": i, "split": name}
    assert plain_template(task, tiny_models.tokenizer()) is None


def test_a_chat_task_needs_a_chat_template(tmp_path: Path):
    task = chat_task(tmp_path)
    tokenizer = tiny_models.tokenizer()
    rendered = tokenizer.apply_chat_template(
        task.eval_dataset[0]["prompt"], add_generation_prompt=True, return_dict=True
    )
    assert longest_prompt(task, tokenizer, None, {}) == len(rendered["input_ids"])  # longer than those to train on
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="chat template"):
        longest_prompt(task, tokenizer, None, {})


def test_what_cannot_be_written_is_refused(tmp_path: Path):
    from datasets import Dataset

    good = load_task("arithmetic", train_size=2, eval_size=2)
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    for rows, words in (
        ([{"prompt": parts}], "supports text prompts only"),
        ([{"prompt": "x", "when": __import__("datetime").datetime(2026, 1, 1)}], r"train\[0\]"),
    ):
        from dataclasses import replace

        with pytest.raises(InputError, match=words):
            write_task(replace(good, train_dataset=Dataset.from_list(rows)), {}, tmp_path)


def test_paths_hold_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("t.py", "r.py", "d.jsonl"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    settings = RunSettings(task="t.py", data="d.jsonl", eval_data="owner/set", reward=["r.py:f", "math:sqrt"])
    asked = request_of(settings, {"a": 1}, 3, [1.0, 2.0])
    assert asked == {
        "task": {
            "name": str(tmp_path / "t.py"),
            "data": str(tmp_path / "d.jsonl"),
            "eval_data": "owner/set",
            "options": {"a": 1},
            "reward": [f"{tmp_path / 'r.py'}:f", "math:sqrt"],
            "train_size": None,
            "eval_size": None,
            "seed": 3,
        },
        "weights": [1.0, 2.0],
        "unsandboxed": False,
    }


# ------------------------------------------------------------------ the reward

REWARDS = '''\
"""Counting."""
train_dataset = [
    {"prompt": [{"role": "user", "content": f"say {i}"}], "answer": i, "tags": [str(i), None]} for i in range(12)
]
eval_dataset = [{"prompt": [{"role": "user", "content": "say 99, please"}], "answer": 99, "tags": []}]

def length(prompts, completions, answer, tags, **_):
    assert all(c[0]["role"] == "assistant" for c in completions)
    rows = zip(prompts, completions, answer, tags)
    return [len(c[0]["content"]) + a + len(t) + len(p[0]["content"]) / 10 for p, c, a, t in rows]

async def vowels(completions, **_):
    return [sum(x in "aeiou" for x in c[0]["content"]) for c in completions]

def sometimes(completions, **_):
    return [None if "q" in c[0]["content"] else 0.5 for c in completions]

reward = [length, vowels, sometimes]
'''


def chat_task(folder: Path) -> Any:
    (folder / "counting.py").write_text(REWARDS)
    return load_task(str(folder / "counting.py"))


def scored(folder: Path, rows: Any, texts: list[str]) -> list[dict[str, float]]:
    """As verl calls it: by keyword, from threads of a process in another folder."""
    call = {"data_source": "x", "extra_info": {"num_turns": 2}, "task": str(folder / "task.json")}
    return [
        verl_data.score(solution_str=text, ground_truth=json.dumps(row), **call)
        for row, text in zip(rows, texts, strict=True)
    ]


def test_rewards_are_those_of_TRL(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    task, weights = chat_task(tmp_path), [0.5, 2.0, -1.0]
    settings = RunSettings(task=str(tmp_path / "counting.py"))
    write_task(task, request_of(settings, {}, 0, weights), tmp_path)
    texts = ["", "aeiou", "quick", "x" * 40, "b\nc"]
    rows = [task.train_dataset[i] for i in range(len(texts))]
    model, tokenizer = tiny_models.build("dense")
    args = TROLLConfig(str(tmp_path / "out"), reward_weights=weights, use_cpu=True, bf16=False, report_to="none")
    trainer = TROLLTrainer(model, task.reward_funcs, args, train_dataset=task.train_dataset, processing_class=tokenizer)
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    prompts = [row["prompt"] for row in rows]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    each = trainer._calculate_rewards(rows, prompts, completions, ids)
    expected = (each * trainer.reward_weights).nansum(1).tolist()
    monkeypatch.chdir("/")
    found = scored(tmp_path, rows, texts)
    assert [x["score"] for x in found] == pytest.approx(expected, rel=1e-6)  # TRL's are in single precision
    assert len(set(expected)) == len(expected)
    assert found[1]["rewards/vowels"] == 5
    assert "rewards/sometimes" not in found[2]
    assert torch.isnan(each[2, 2])


@pytest.mark.parametrize(
    ("name", "options", "texts"),
    [
        ("arithmetic", {}, lambda row: [f" {row['answer']}\n", row["answer"], f" {row['answer']}1", ""]),
        ("gym:gcd", {"shots": 1}, lambda row: [row["answer"], "no"]),
    ],
)
def test_rewards_of_built_in_tasks(tmp_path: Path, name: str, options: dict[str, Any], texts: Any):
    settings = RunSettings(task=name, train_size=4, eval_size=2)
    task = load_task(name, options=options, train_size=4, eval_size=2, seed=5)
    write_task(task, request_of(settings, options, 5, None), tmp_path)
    for row in task.train_dataset:
        tried = texts(row)
        chat = not isinstance(row["prompt"], str)
        completions = [[{"role": "assistant", "content": x}] for x in tried] if chat else tried
        columns = {key: [value] * len(tried) for key, value in row.items() if key != "prompt"}
        (function,) = task.reward_funcs
        expected = function(prompts=[row["prompt"]] * len(tried), completions=completions, **columns)
        assert [x["score"] for x in scored(tmp_path, [row] * len(tried), tried)] == expected
        assert expected[0] == 1.0
        assert 0.0 in expected


def test_programs_are_run_in_the_sandbox(tmp_path: Path):
    rows = [{"prompt": f"add {i}", "tests": [f"assert f(1) == {i + 1}"]} for i in range(12)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = RunSettings(task="code", data=str(tmp_path / "p.jsonl"))
    task = load_task("code", data=str(tmp_path / "p.jsonl"))
    write_task(task, request_of(settings, {}, 0, None), tmp_path)
    row = task.train_dataset[0]
    number = int(row["prompt"][-1]["content"].split()[1].split(".")[0].split("\n")[0])
    right, wrong = f"```python\ndef f(x): return x + {number}\n```", "def f(x): return None"
    assert [x["score"] for x in scored(tmp_path, [row] * 2, [right, wrong])] == [1.0, 0.0]


def test_no_reward_is_an_error(tmp_path: Path):
    (tmp_path / "t.py").write_text(
        "train_dataset = [{'prompt': str(i)} for i in range(4)]\n"
        "eval_dataset = [{'prompt': 'x'}]\n"
        "def reward(completions, **_): return [None] * len(completions)\n"
    )
    task = load_task(str(tmp_path / "t.py"))
    write_task(task, request_of(RunSettings(task=str(tmp_path / "t.py")), {}, 0, None), tmp_path)
    with pytest.raises(PoolError, match=r"all rewards of a completion are None \(reward\)"):
        scored(tmp_path, [task.train_dataset[0]], ["a"])


def test_a_task_is_loaded_once_whatever_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    task = load_task("arithmetic", train_size=4, eval_size=2)
    write_task(task, request_of(RunSettings(train_size=4, eval_size=2), {}, 0, None), tmp_path)
    loaded, barrier = [], threading.Barrier(8)

    def slowly(**asked: Any) -> Any:
        loaded.append(asked)
        time.sleep(0.05)
        return load_task(**asked)

    monkeypatch.setattr(verl_data, "load_task", slowly)
    row = task.train_dataset[0]

    def one(_: int) -> float:
        barrier.wait()
        return scored(tmp_path, [row], [row["answer"]])[0]["score"]

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(one, range(8))) == [1.0] * 8
    assert len(loaded) == 1


# ------------------------------------------------------------------ the end of a completion


def test_completions_end_at_the_token_of_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("verl")
    from hydra.utils import get_class
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

    write_stop(tmp_path / "stop.yaml", 198)
    (loop,) = yaml.safe_load((tmp_path / "stop.yaml").read_text())
    assert loop["name"] == "troll_stop"
    kind = get_class(loop["_target_"])
    assert issubclass(kind, SingleTurnAgentLoop)
    monkeypatch.setattr(SingleTurnAgentLoop, "__init__", lambda self, *args, **named: None)

    async def generate(self: Any, sampling_params: dict[str, Any], **named: Any) -> Any:
        return sampling_params, named

    monkeypatch.setattr(SingleTurnAgentLoop, "run", generate)
    given = {"temperature": 0.5}
    asked, named = asyncio.run(kind(stop=loop["stop"]).run(given, raw_prompt=["p"], priority=2))
    assert asked == {"temperature": 0.5, "stop_token_ids": [198]}
    assert named == {"raw_prompt": ["p"], "priority": 2}
    assert given == {"temperature": 0.5}


# ------------------------------------------------------------------ metrics


def verl_line(step: int, **data: float) -> dict[str, Any]:
    """With the names that verl 0.9.1 logs."""
    usual = {
        "critic/score/mean": 0.25,
        "critic/score/std": 0.4,
        "critic/score/frac_zero_std": 0.125,
        "critic/rewards/mean": 0.2,
        "actor/pg_loss": -0.5,
        "actor/grad_norm": 2.0,
        "actor/lr": 1e-6,
        "actor/entropy": 1.5,
        "actor/pg_clipfrac": 0.1,
        "response_length/mean": 40.0,
        "response_length/max": 64.0,
        "response_length/clip_ratio": 0.5,
        "actor/troll/kl_before/mean": 0.01,
        "actor/troll/kl_after/max": 0.05,
        "actor/troll/projected_fraction": 0.04,
        "actor/troll/kl_before/p99": 0.03,
        "actor/troll/unconverged_tokens": 0.5,  # per update
        "perf/total_num_tokens": 1000,
        "timing_s/step": 10.0,
        "timing_s/gen": 5.0,
        "timing_s/old_log_prob": 1.0,
        "timing_s/ref": 0.5,
        "timing_s/adv": 0.5,
        "timing_s/update_actor": 2.0,
        "training/epoch": 0,
    }
    return {"step": step, "data": {**usual, **data}}


def test_a_line_of_verl_is_a_line_of_a_run():
    (line,) = translate([verl_line(3)], Translator(8))
    assert line == {
        "step": 24,
        "seconds": 10.0,
        "reward": 0.25,
        "reward_std": 0.4,
        "frac_reward_zero_std": 0.125,
        "loss": -0.5,
        "grad_norm": 2.0,
        "learning_rate": 1e-6,
        "entropy": 1.5,
        "completions/mean_length": 40.0,
        "completions/max_length": 64.0,
        "completions/clipped_ratio": 0.5,
        "troll/kl_before/mean": 0.01,
        "troll/kl_after/max": 0.05,
        "troll/projected_fraction": 0.04,
        "troll/kl_before/p99": 0.03,
        "troll/unconverged_tokens": 4.0,
        "num_tokens": 1000.0,
        "tokens_per_second": 100.0,
        "time/generate": 5.0,
        "time/score": 2.0,
        "time/update": 2.0,
        "time/other": 1.0,
    }
    (clipped,) = translate([verl_line(3)], Translator(8, clips=True))
    assert clipped["clip_ratio/region_mean"] == 0.1


def test_evaluations_are_lines_of_their_own():
    before = {"step": 0, "data": {"val-core/gym:gcd/reward/mean@1": 0.5, "val-aux/num_turns/mean": 2.0}}
    during = verl_line(
        1,
        **{
            "val-core/gym:gcd/reward/mean@4": 0.75,
            "val-core/gym:gcd/reward/best@4/mean": 1.0,
            "val-aux/gym:gcd/rewards/score/mean@4": 0.7,
            "val-aux/gym:gcd/reward/std@4": 0.1,
            "timing_s/testing": 3.0,
        },
    )
    first, training, second = translate([before, during], Translator(4))
    assert first == {"step": 0, "seconds": 0.0, "eval_reward": 0.5}
    assert second == {"step": 4, "seconds": 13.0, "eval_reward": 0.75, "eval_rewards/score/mean": 0.7}
    assert not any(name.startswith("eval") for name in training)
    assert (training["time/evaluate"], training["time/other"]) == (3.0, 1.0)


def test_tokens_and_seconds_add_up_and_nonsense_is_left_out():
    odd = verl_line(2, **{"actor/grad_norm": math.nan, "timing_s/save_checkpoint": 4.0, "timing_s/step": 14.0})
    first, second = translate([verl_line(1), odd], Translator(8, seconds=100.0))
    assert (first["num_tokens"], second["num_tokens"]) == (1000.0, 2000.0)
    assert (first["seconds"], second["seconds"]) == (110.0, 124.0)
    assert "grad_norm" not in second
    assert (second["time/save"], second["tokens_per_second"]) == (4.0, 100.0)


def test_only_whole_lines_are_read(tmp_path: Path):
    path = tmp_path / "log"
    assert read_new(path, 0) == ([], 0)
    path.write_bytes(b'{"step": 1}\n{"st')
    assert read_new(path, 0) == ([{"step": 1}], 12)
    with path.open("ab") as file:
        file.write(b'ep": 2}\n')
    assert read_new(path, 12) == ([{"step": 2}], 24)


def test_a_run_that_was_launched_by_hand(tmp_path: Path):
    (tmp_path / "verl").mkdir()
    settings = {"updates_per_generation": 4, "trust_region": "clip"}
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "settings": settings}))
    for number, steps in ((1, (1, 2)), (2, (2,)), (10, (3,))):
        lines = [json.dumps(verl_line(step, **{"critic/score/mean": number})) + "\n" for step in steps]
        (tmp_path / "verl" / f"metrics-{number}.jsonl").write_text("".join(lines))
    (tmp_path / "metrics.jsonl").write_text("old\n")
    assert convert(tmp_path) == 4
    metrics = Run(tmp_path).metrics()
    assert [(line["step"], line["reward"]) for line in metrics] == [(4, 1), (8, 2), (12, 10)]
    assert [line["seconds"] for line in metrics] == [10.0, 30.0, 40.0]


# ------------------------------------------------------------------ the process

CHILD = """
import json, os, signal, sys, time
from pathlib import Path
def log(step, **data):
    with open(os.environ["VERL_FILE_LOGGER_PATH"], "ab", buffering=0) as file:
        file.write(json.dumps({"step": step, "data": data}).encode() + b"\\n")
"""


def planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: str, *argv: str, **changes: Any
) -> tuple[RunPlan, Setup]:
    """A run whose verl is a few lines of Python."""
    folder = tmp_path / "a run"
    case = setup(*AUTHORS, *argv, folder=folder, environment={LOG: str(launch.next_log(folder))}, **changes)
    task = load_task("arithmetic", train_size=4, eval_size=2)
    plan = RunPlan(
        folder=folder,
        model="m",
        model_path="m",
        task=task,
        args=case.args,
        model_config=case.model,
        config={"seed": 0},
        command="troll train",
        resumes=case.resumes,
    )
    monkeypatch.setattr(launch, "command", lambda _: [sys.executable, "-c", CHILD + child])
    monkeypatch.setattr(launch, "_PAUSE", 0.02)
    monkeypatch.setattr(launch.metadata, "version", lambda name: f"{name} version")
    return plan, case


GOOD = """
print("hello from verl")
assert Path("{folder}/launch.sh").exists() and Path("{folder}/verl/train.parquet").exists()
log(0, **{{"val-core/x/reward/mean@1": 0.5}})
for step in (1, 2):
    log(step, **{{"critic/score/mean": step / 4, "actor/pg_loss": 0.1, "timing_s/step": 3.0}})
    time.sleep(0.1)
actor = Path("{folder}/checkpoints/global_step_2/actor/huggingface")
actor.mkdir(parents=True)
(actor / "model.safetensors").write_text("weights")
Path("{folder}/checkpoints/latest_checkpointed_iteration.txt").write_text("2")
"""


def test_a_run_is_followed_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    plan, case = planned(tmp_path, monkeypatch, GOOD.format(folder=tmp_path / "a run"))
    run = launch.execute(plan, case, {"task": {}}, Console(width=200))
    about = run.about
    assert (about["status"], about["engine"], about["seconds"]) == ("finished", "verl", 6.0)
    assert about["versions"]["verl"] == "verl version"
    assert [(line["step"], line["reward"]) for line in run.metrics()] == [(8, 0.25), (16, 0.5)]
    assert [line["eval_reward"] for line in run.evaluations()] == [0.5]
    assert (run.path / "model" / "model.safetensors").read_text() == "weights"
    assert "hello from verl" in (run.path / "verl" / "log.txt").read_text()
    out = capsys.readouterr().out
    assert "step 0: held-out reward 0.500" in out
    assert "step 16/800  reward 0.500" in out
    lines = (run.path / "overrides.txt").read_text().splitlines()
    assert lines == overrides(case)
    assert not (run.path / "verl" / "stop.yaml").exists()


def test_the_script_is_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    case = setup("--verl_overrides", "a='b c'", environment={LOG: "/x y/$1", "B": "it's"}, stop=4)
    monkeypatch.chdir(tmp_path)
    text = launch.script(case)
    subprocess.run(["sh", "-n"], input=text, text=True, check=True)
    stub = tmp_path / "python stub"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$VERL_FILE_LOGGER_PATH" "$B" "$@"\n')
    stub.chmod(0o755)
    text = text.replace(shlex.quote(sys.executable), shlex.quote(str(stub)))
    (tmp_path / "launch.sh").write_text(text)
    ran = subprocess.run(
        ["sh", str(tmp_path / "launch.sh"), "more=1"], cwd="/", capture_output=True, text=True, check=True
    )
    expected = [str(tmp_path), "/x y/$1", "it's", "-m", "verl.trainer.main_ppo", *overrides(case), "more=1"]
    assert ran.stdout.splitlines() == expected
    assert launch.command(case)[1:] == expected[3:-1]


def test_a_run_that_fails_says_why_and_keeps_what_verl_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    child = """
print("Traceback")
print("(TaskRunner pid=1) torch.OutOfMemoryError: CUDA out of memory")
print("    done cleaning up")
sys.exit(3)
"""
    plan, case = planned(tmp_path, monkeypatch, child)
    with pytest.raises(launch.EngineError, match=r"code 3 .*OutOfMemoryError: CUDA out of memory.*log\.txt"):
        launch.execute(plan, case, {}, Console())
    run = Run(plan.folder)
    assert run.about["status"] == "failed"
    assert "OutOfMemoryError" in run.about["error"]
    assert "CUDA out of memory" in (plan.folder / "verl" / "log.txt").read_text()


def test_a_run_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plan, case = planned(tmp_path, monkeypatch, "")
    monkeypatch.setattr(launch, "write_task", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        launch.execute(plan, case, {}, Console())
    assert not plan.folder.exists()


WAITS = """
log(1, **{"critic/score/mean": 0.5, "actor/pg_loss": 0.1, "timing_s/step": 3.0})
if ARMED:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
os.kill(os.getppid(), signal.SIGINT)
if ARMED:
    time.sleep(0.5)
    os.kill(os.getppid(), signal.SIGINT)
time.sleep(30)
log(2, **{"critic/score/mean": 0.5, "actor/pg_loss": 0.1, "timing_s/step": 3.0})  # nobody stopped it
"""


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_signal_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stubborn: bool):
    """To one that ends at the first, and to one that does not, at the second."""
    plan, case = planned(tmp_path, monkeypatch, WAITS.replace("ARMED", str(stubborn)))
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        launch.execute(plan, case, {}, Console())
    assert signal.getsignal(signal.SIGINT) is handler
    run = Run(plan.folder)
    assert (run.about["status"], run.about["seconds"]) == ("interrupted", 3.0)
    assert [line["step"] for line in run.metrics()] == [8]


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert launch.checkpoint_of(tmp_path) == 0
    plan, case = planned(tmp_path, monkeypatch, WAITS.replace("ARMED", "False"))
    with pytest.raises(KeyboardInterrupt):
        launch.execute(plan, case, {}, Console())
    (plan.folder / "checkpoints").mkdir()
    (plan.folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    child = 'log(2, **{"critic/score/mean": 0.75, "actor/pg_loss": 0.1, "timing_s/step": 4.0})'
    plan, case = planned(tmp_path, monkeypatch, child, "--save_model", "false", resumes=True)
    assert case.environment[LOG].endswith("a run/verl/metrics-2.jsonl")
    assert as_dict(overrides(case))["trainer.resume_mode"] == "auto"
    run = launch.execute(plan, case, {}, Console())
    assert [(line["step"], line["seconds"]) for line in run.metrics()] == [(8, 3.0), (16, 7.0)]
    assert (run.about["status"], run.about["seconds"]) == ("finished", 7.0)


def test_a_model_that_verl_did_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    child = GOOD.format(folder=tmp_path / "a run").replace('(actor / "model.safetensors").write_text("weights")', "")
    plan, case = planned(tmp_path, monkeypatch, child)
    launch.execute(plan, case, {}, Console(width=200))
    assert "verl.model_merger merge --backend fsdp" in capsys.readouterr().out
    assert not (plan.folder / "model").exists()


def test_without_checkpoints_only_the_model_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plan, case = planned(tmp_path, monkeypatch, GOOD.format(folder=tmp_path / "a run"), "--save_strategy", "no")
    launch.execute(plan, case, {}, Console())
    assert (plan.folder / "model" / "model.safetensors").exists()
    assert not (plan.folder / "checkpoints").exists()


# ------------------------------------------------------------------ the page


def test_the_page_has_the_table_of_keys():
    page = (ROOT / "docs" / "verl.md").read_text()
    assert table() in page
    assert len(KEYS) >= 7


def test_the_page_has_what_is_refused():
    page = (ROOT / "docs" / "verl.md").read_text()
    for name, limit in LIMITS.items():
        assert f"| `{name}` | {limit.words} | {limit.why} |" in page, name
    for names, why in REASONS.items():
        assert f"| {', '.join(f'`{name}`' for name in names)} | {why} |" in page, names


def test_the_page_has_the_settings_and_their_defaults():
    pytest.importorskip("verl")
    from dataclasses import asdict, fields

    from verl.workers.config import FSDPEngineConfig, PolicyLossConfig

    from troll.objective import PRESETS
    from troll.verl import TrollFSDPEngineConfig, TrollPolicyLossConfig

    page = (ROOT / "docs" / "verl.md").read_text()
    for place, ours, theirs in (
        ("policy_loss", TrollPolicyLossConfig, PolicyLossConfig),
        ("fsdp_config", TrollFSDPEngineConfig, FSDPEngineConfig),
    ):
        new = {
            field.name: field.default for field in fields(ours) if field.name not in {x.name for x in fields(theirs)}
        }
        assert len(new) >= 2
        for name, default in new.items():
            shown = asdict(PRESETS["default"]).get(name, default)
            known = name == "run" or (place, name) == ("fsdp_config", "preset")
            assert known or f"| `{place}.{name}` | `{shown}` |" in page, name


def test_the_table_is_printed():
    done = subprocess.run(
        [sys.executable, "-m", keys.__name__], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout.strip() == table()
