"""The table of verl's keys: every key that a run sets, the flags it follows from, and its value.

``python -m troll.lab.verl.keys`` prints it as in ``docs/verl.md``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from troll.lab.verl.setup import Setup

LEAVE = object()
"""The value of a key that keeps verl's default."""

DATA = "verl"
"""The subfolder of a run for the files that verl reads and writes."""
CHECKPOINTS = "checkpoints"
NEVER = 1e9
"""A clip range that no ratio reaches."""

_LOSS = "actor_rollout_ref.actor.policy_loss"
_ENGINE = "actor_rollout_ref.actor.fsdp_config"
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "nodes", "gpus_per_node")
_ROLLOUT = ("updates_per_generation", "steps_per_generation", "generation_batch_size", "num_iterations")
_TASK = ("task", "data", "eval_data", "task_options", "reward", "train_size", "eval_size")

_SUMS = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "dr_grpo": "seq-mean-token-sum-norm",
}
_ESTIMATORS = {
    "grpo": "grpo",
    "dr_grpo": "grpo",
    "rloo": "rloo",
    "reinforce_pp": "reinforce_plus_plus",
    "reinforce_pp_baseline": "reinforce_plus_plus_baseline",
}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}
LOSS_TYPES, DTYPES, SCHEDULES = tuple(_SUMS), tuple(_DTYPES), tuple(_SCHEDULES)


@dataclass(frozen=True)
class Key:
    """One key of verl, with hydra's ``+`` in front where verl has no default for it."""

    name: str
    flags: tuple[str, ...]
    value: Callable[[Setup], Any]
    words: str = ""


def _only_if(condition: Callable[[Setup], Any], value: Callable[[Setup], Any]) -> Callable[[Setup], Any]:
    return lambda s: value(s) if condition(s) else LEAVE


def _set(*names: str) -> Callable[[Setup], bool]:
    return lambda s: any(name in s.explicit for name in names)


def _troll(s: Setup) -> bool:
    return not s.clips


def _reference(s: Setup) -> bool:
    return bool(s.args.beta)


def _precision(s: Setup) -> Any:
    """The precision of the arithmetic; verl's default is bf16."""
    return LEAVE if s.args.bf16 else "fp16" if s.args.fp16 else "fp32"


def _clip(side: str) -> Callable[[Setup], Any]:
    def value(s: Setup) -> Any:
        high = s.args.epsilon if s.args.epsilon_high is None else s.args.epsilon_high
        epsilon = {"low": s.args.epsilon, "high": high}[side]
        return NEVER if s.args.trust_region == "none" else epsilon

    return _only_if(lambda s: s.clips, value)


def _frequency(what: str) -> Callable[[Setup], Any]:
    def value(s: Setup) -> Any:
        strategy = getattr(s.args, f"{what}_strategy")
        if strategy == "epoch":
            return s.rollouts_per_epoch
        if strategy != "no":
            return s.between_rollouts(f"{what}_steps", getattr(s.args, f"{what}_steps"))
        return s.rollouts if what == "save" and keeps_model(s) else -1

    return value


def keeps_model(s: Setup) -> bool:
    """Whether verl saves the trained model in transformers' format, which it cannot do with an adapter."""
    return bool(s.run.save_model and not s.model.use_peft)


def _contents(s: Setup) -> list[str]:
    for_resuming = [] if s.args.save_strategy == "no" else ["model", "optimizer", "extra"]
    return for_resuming + ["hf_model"] * keeps_model(s) or ["model"]


def _warmup(s: Setup) -> Any:
    steps = s.args.warmup_steps
    return s.between_rollouts("warmup_steps", steps) if steps >= 1 else LEAVE


KEYS: dict[str, tuple[Key, ...]] = {
    "the trust region": (
        Key("hydra.searchpath", ("trust_region",), _only_if(_troll, lambda s: ["pkg://troll.verl.configs"])),
        Key(
            "+trust_region",
            ("trust_region",),
            _only_if(_troll, lambda s: "troll"),
            "`troll`; left out with `clip` and `none`",
        ),
        Key(
            f"{_LOSS}.preset",
            ("preset",),
            _only_if(_troll, lambda s: s.args.preset),
            "its values are set explicitly, too",
        ),
        Key(f"{_LOSS}.kl_bound", ("kl_bound",), _only_if(_troll, lambda s: s.args.kl_bound)),
        Key(f"{_LOSS}.regression_coef", ("regression_coef",), _only_if(_troll, lambda s: s.args.regression_coef)),
        Key(f"{_LOSS}.tail", ("tail",), _only_if(_troll, lambda s: s.args.tail)),
        Key(
            f"{_LOSS}.importance_sampling_level",
            ("importance_sampling_level",),
            _only_if(_troll, lambda s: s.args.importance_sampling_level),
        ),
        Key(f"{_ENGINE}.max_support", ("max_support",), _only_if(_troll, lambda s: s.args.max_support)),
        Key(f"{_ENGINE}.tail_mass", ("tail_mass",), _only_if(_troll, lambda s: s.args.tail_mass)),
        Key(
            f"{_LOSS}.loss_mode",
            ("trust_region", "importance_sampling_level"),
            _only_if(lambda s: s.clips, lambda s: "gspo" if s.by_sequence else "vanilla"),
            "with `clip` and `none`: `vanilla`, or `gspo` for `sequence`",
        ),
        Key("actor_rollout_ref.actor.clip_ratio", ("trust_region", "epsilon"), _clip("low"), "1e9 with `none`"),
        Key("actor_rollout_ref.actor.clip_ratio_low", ("trust_region", "epsilon"), _clip("low"), "the same"),
        Key("actor_rollout_ref.actor.clip_ratio_high", ("trust_region", "epsilon_high"), _clip("high"), "the same"),
        Key(
            "actor_rollout_ref.actor.clip_ratio_c",
            ("trust_region", "delta"),
            _only_if(lambda s: s.clips, lambda s: s.args.delta or NEVER),
            "TRL's upper clip of the ratio, 1e9 if unset; verl's default is 3",
        ),
        Key(
            "+actor_rollout_ref.rollout.agent.agent_loop_manager_class",
            ("trust_region",),
            _only_if(lambda s: s.clips, lambda s: "troll.verl.driver.WatchedAgentLoopManager"),
            "the watchdog and the metrics of the rewards, which are part of `+trust_region=troll`",
        ),
    ),
    "loss and advantages": (
        Key(
            "actor_rollout_ref.actor.loss_agg_mode",
            ("loss_type",),
            lambda s: _SUMS[s.args.loss_type],
            "; ".join(f"`{ours}`: `{theirs}`" for ours, theirs in _SUMS.items()),
        ),
        Key(
            "actor_rollout_ref.actor.loss_scale_factor",
            ("loss_type", "max_completion_length"),
            _only_if(lambda s: s.args.loss_type == "dr_grpo", lambda s: s.args.max_completion_length),
            "with `dr_grpo`",
        ),
        Key("actor_rollout_ref.actor.entropy_coeff", ("entropy_coef",), lambda s: s.args.entropy_coef),
        Key("actor_rollout_ref.actor.use_kl_loss", ("beta",), _reference, "if it is not 0"),
        Key("actor_rollout_ref.actor.kl_loss_coef", ("beta",), _only_if(_reference, lambda s: s.args.beta)),
        Key(
            "actor_rollout_ref.actor.kl_loss_type",
            ("beta",),
            _only_if(_reference, lambda s: "low_var_kl"),
            "TRL's estimator (k3), not weighted by the ratio",
        ),
        Key(
            "algorithm.adv_estimator",
            ("advantage_estimator",),
            lambda s: _ESTIMATORS[s.args.advantage_estimator],
            "; ".join(f"`{ours}`: `{theirs}`" for ours, theirs in _ESTIMATORS.items()),
        ),
        Key(
            "algorithm.norm_adv_by_std_in_grpo",
            ("advantage_estimator", "scale_rewards"),
            lambda s: s.args.advantage_estimator == "grpo" and s.args.scale_rewards == "group",
            "true for `grpo` with `scale_rewards group`",
        ),
    ),
    "model": (
        Key("actor_rollout_ref.model.path", ("model",), lambda s: s.model_path),
        Key("actor_rollout_ref.model.trust_remote_code", ("trust_remote_code",), lambda s: s.args.trust_remote_code),
        Key("data.trust_remote_code", ("trust_remote_code",), lambda s: s.args.trust_remote_code),
        Key(
            "+actor_rollout_ref.model.override_config.attn_implementation",
            ("attn_implementation",),
            lambda s: s.model.attn_implementation or LEAVE,
            "verl's default is `flash_attention_2`",
        ),
        Key(
            "actor_rollout_ref.model.enable_gradient_checkpointing",
            ("gradient_checkpointing",),
            lambda s: s.args.gradient_checkpointing,
        ),
        Key("actor_rollout_ref.actor.strategy", ("engine",), lambda s: "fsdp2"),
        Key(f"{_ENGINE}.model_dtype", ("dtype",), lambda s: _DTYPES[s.model.dtype], "precision of the parameters"),
        Key(
            f"+{_ENGINE}.mixed_precision.param_dtype",
            ("bf16", "fp16"),
            _precision,
            "precision of the arithmetic, for `bf16 false`",
        ),
        Key(
            "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype",
            ("bf16", "fp16"),
            _only_if(_reference, _precision),
            "the same, for the reference",
        ),
        Key(
            "actor_rollout_ref.rollout.dtype",
            ("bf16", "fp16"),
            lambda s: "bfloat16" if s.args.bf16 else "float16" if s.args.fp16 else "float32",
            "the same, for the sampler",
        ),
        Key(
            "actor_rollout_ref.model.lora_rank",
            ("use_peft", "lora_r"),
            lambda s: s.model.lora_r if s.model.use_peft else 0,
            "0 without an adapter",
        ),
        Key(
            "actor_rollout_ref.model.lora_alpha",
            ("lora_alpha",),
            _only_if(lambda s: s.model.use_peft, lambda s: s.model.lora_alpha),
        ),
        Key(
            "actor_rollout_ref.model.target_modules",
            ("lora_target_modules",),
            _only_if(lambda s: s.model.use_peft, lambda s: s.model.lora_target_modules or "all-linear"),
        ),
        Key(
            "actor_rollout_ref.rollout.load_format",
            ("use_peft",),
            _only_if(lambda s: s.model.use_peft, lambda s: "safetensors"),
            "with an adapter: the sampler loads the base model",
        ),
    ),
    "task": (
        Key("data.train_files", _TASK, lambda s: s.file(DATA, "train.parquet"), "the problems as parquet"),
        Key("data.val_files", _TASK, lambda s: s.file(DATA, "held_out.parquet"), "the held-out problems"),
        Key("data.max_prompt_length", _TASK, lambda s: s.prompt_tokens, "the longest prompt"),
        Key("data.max_response_length", ("max_completion_length",), lambda s: s.args.max_completion_length),
        Key("data.shuffle", ("shuffle_dataset",), lambda s: s.args.shuffle_dataset),
        Key(
            "actor_rollout_ref.model.custom_chat_template",
            ("task",),
            lambda s: s.chat_template or LEAVE,
            "for plain-text prompts: renders the text unchanged",
        ),
        Key(
            "+data.apply_chat_template_kwargs",
            ("chat_template_kwargs",),
            lambda s: s.args.chat_template_kwargs or LEAVE,
        ),
        Key(
            "reward.custom_reward_function.path",
            ("task", "reward"),
            lambda s: "pkg://troll.lab.verl.data",
            "the rewards of the task",
        ),
        Key("reward.custom_reward_function.name", ("task", "reward"), lambda s: "score"),
        Key(
            "+reward.custom_reward_function.reward_kwargs.task",
            (*_TASK, "reward_weights", "allow_unsandboxed_code"),
            lambda s: s.file(DATA, "task.json"),
            "which task, with which weights",
        ),
        Key(
            "actor_rollout_ref.rollout.agent.agent_loop_config_path",
            ("task",),
            _only_if(lambda s: s.stop is not None, lambda s: s.file(DATA, "stop.yaml")),
            "if the task has a stop string",
        ),
        Key(
            "actor_rollout_ref.rollout.agent.default_agent_loop",
            ("task",),
            _only_if(lambda s: s.stop is not None, lambda s: "troll_stop"),
            "the same",
        ),
    ),
    "rollout": (
        Key("actor_rollout_ref.rollout.name", ("rollout",), lambda s: s.run.rollout),
        Key("actor_rollout_ref.rollout.n", ("num_generations",), lambda s: s.args.num_generations),
        Key("actor_rollout_ref.rollout.temperature", ("temperature",), lambda s: s.args.temperature),
        Key("actor_rollout_ref.rollout.top_p", ("top_p",), lambda s: s.args.top_p),
        Key("actor_rollout_ref.rollout.top_k", ("top_k",), lambda s: s.args.top_k or -1, "-1 for the whole vocabulary"),
        Key(
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            ("vllm_tensor_parallel_size",),
            lambda s: s.args.vllm_tensor_parallel_size,
        ),
        Key(
            "actor_rollout_ref.rollout.gpu_memory_utilization",
            ("vllm_gpu_memory_utilization",),
            _only_if(_set("vllm_gpu_memory_utilization"), lambda s: s.args.vllm_gpu_memory_utilization),
            "0.5, verl's default, unless set",
        ),
        Key(
            "actor_rollout_ref.rollout.max_model_len",
            ("vllm_max_model_length",),
            lambda s: s.args.vllm_max_model_length or LEAVE,
        ),
        Key("actor_rollout_ref.rollout.val_kwargs.n", ("num_generations_eval",), lambda s: s.args.num_generations_eval),
        Key(
            "actor_rollout_ref.rollout.val_kwargs.do_sample",
            ("temperature",),
            lambda s: True,
            "held-out problems use the same sampling parameters",
        ),
        Key("actor_rollout_ref.rollout.val_kwargs.temperature", ("temperature",), lambda s: s.args.temperature),
        Key("actor_rollout_ref.rollout.val_kwargs.top_p", ("top_p",), lambda s: s.args.top_p),
        Key("actor_rollout_ref.rollout.val_kwargs.top_k", ("top_k",), lambda s: s.args.top_k or -1),
    ),
    "schedule": (
        Key("data.train_batch_size", (*_ROLLOUT, *_BATCH), lambda s: s.prompts_per_rollout, "prompts per rollout"),
        Key(
            "actor_rollout_ref.actor.ppo_mini_batch_size", _BATCH, lambda s: s.prompts_per_update, "prompts per update"
        ),
        Key("actor_rollout_ref.actor.ppo_epochs", ("num_iterations",), lambda s: s.args.num_iterations),
        Key(
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            ("per_device_train_batch_size",),
            lambda s: s.args.per_device_train_batch_size,
            "completions per pass",
        ),
        Key(
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
            ("per_device_train_batch_size",),
            lambda s: s.args.per_device_train_batch_size,
            "the same, for scoring the rollout",
        ),
        Key(
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
            ("per_device_train_batch_size",),
            lambda s: s.args.per_device_train_batch_size,
            "the same, for the reference",
        ),
        Key(
            "trainer.total_training_steps",
            ("max_steps", "num_train_epochs", "updates_per_generation"),
            lambda s: s.rollouts,
            "rollouts: `max_steps` / `updates_per_generation`, or those of `num_train_epochs`",
        ),
        Key("trainer.total_epochs", ("max_steps", "num_train_epochs"), lambda s: s.epochs, "enough for these rollouts"),
    ),
    "optimizer": (
        Key("actor_rollout_ref.actor.optim.lr", ("learning_rate",), lambda s: s.args.learning_rate),
        Key(
            "actor_rollout_ref.actor.optim.lr_scheduler_type",
            ("lr_scheduler_type",),
            lambda s: _SCHEDULES[s.args.lr_scheduler_type.value],
            "`constant`, `constant_with_warmup` or `cosine`; changes once per rollout",
        ),
        Key(
            "actor_rollout_ref.actor.optim.lr_warmup_steps",
            ("warmup_steps",),
            _warmup,
            "in rollouts; the learning rate of the first is 0",
        ),
        Key("actor_rollout_ref.actor.optim.weight_decay", ("weight_decay",), lambda s: s.args.weight_decay),
        Key(
            "actor_rollout_ref.actor.optim.betas",
            ("adam_beta1", "adam_beta2"),
            lambda s: [s.args.adam_beta1, s.args.adam_beta2],
        ),
        Key(
            "+actor_rollout_ref.actor.optim.override_optimizer_config.eps",
            ("adam_epsilon",),
            _only_if(_set("adam_epsilon"), lambda s: s.args.adam_epsilon),
            "1e-8 unless set",
        ),
        Key(
            "actor_rollout_ref.actor.optim.clip_grad",
            ("max_grad_norm",),
            lambda s: s.args.max_grad_norm or math.inf,
            "`inf` for 0: no gradient clipping",
        ),
    ),
    "run": (
        Key("trainer.nnodes", ("nodes",), lambda s: s.run.nodes),
        Key("trainer.n_gpus_per_node", ("gpus_per_node",), lambda s: s.gpus, "default: the GPUs of this machine"),
        Key("trainer.test_freq", ("eval_strategy", "eval_steps"), _frequency("eval"), "in rollouts; -1 for `no`"),
        Key(
            "trainer.val_before_train",
            ("eval_strategy", "eval_on_start"),
            lambda s: bool(s.args.eval_on_start and s.args.eval_strategy != "no"),
        ),
        Key(
            "trainer.save_freq",
            ("save_strategy", "save_steps", "save_model"),
            _frequency("save"),
            "in rollouts; with `no`, only at the end if the model is saved",
        ),
        Key(
            "actor_rollout_ref.actor.checkpoint.save_contents",
            ("save_strategy", "save_model"),
            _contents,
            "with `hf_model` if the model is saved",
        ),
        Key("trainer.max_actor_ckpt_to_keep", ("save_total_limit",), lambda s: s.args.save_total_limit),
        Key("trainer.default_local_dir", ("runs_dir", "run_name"), lambda s: s.file(CHECKPOINTS)),
        Key("trainer.project_name", (), lambda s: "troll"),
        Key("trainer.experiment_name", ("run_name",), lambda s: s.folder.name),
        Key(
            "trainer.logger",
            ("report_to",),
            lambda s: ["console", "file", *s.args.report_to],
            "in addition to console and file",
        ),
        Key("trainer.resume_mode", ("resume",), lambda s: "auto" if s.resumes else "disable"),
        Key("data.seed", ("seed",), lambda s: s.args.seed),
        Key(f"{_ENGINE}.seed", ("seed",), lambda s: s.args.seed),
        Key("actor_rollout_ref.actor.data_loader_seed", ("seed",), lambda s: s.args.seed),
        Key("actor_rollout_ref.rollout.seed", ("seed",), lambda s: s.args.seed),
        Key("hydra.run.dir", ("runs_dir", "run_name"), lambda s: s.file(DATA, "hydra")),
        Key(
            "+ray_kwargs.ray_init.runtime_env.env_vars",
            ("runs_dir", "run_name", "allow_unsandboxed_code"),
            lambda s: dict(s.environment),
            "path of verl's metrics file",
        ),
    ),
}


def overrides(setup: Setup) -> list[str]:
    """The arguments of ``python -m verl.trainer.main_ppo``; ``--verl_overrides`` come last and win."""
    return [*_translated(setup), *setup.run.verl_overrides]


def _translated(setup: Setup) -> Iterator[str]:
    for key in (key for keys in KEYS.values() for key in keys):
        value = key.value(setup)
        if value is LEAVE:
            continue
        if isinstance(value, Mapping):  # verl's default is empty, and hydra adds names to it one by one only
            for name, item in value.items():
                yield f"{key.name}.{name}={written(item)}"
        else:
            yield f"{key.name}={written(value)}"


def written(value: Any) -> str:
    r"""A value in hydra's grammar.

    >>> written([1e-06, None, True, "a b", "plain/path"])
    "[1e-06,null,true,'a b',plain/path]"
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{written(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(written, value))}]"
    text = str(value).replace("${", r"\${")  # else an interpolation
    plain = re.fullmatch(r"[A-Za-z_/][\w./:+-]*", text) and text.lower() not in ("null", "true", "false", "inf", "nan")
    return text if plain else "'" + re.sub(r"(\\*)('|$)", _escaped, text) + "'"


def _escaped(match: re.Match[str]) -> str:
    """Hydra requires backslashes before a quote to be doubled, and only those."""
    return match[1] * 2 + match[2].replace("'", r"\'")


def table() -> str:
    """All keys as a Markdown table, as in ``docs/verl.md``."""
    lines = ["| verl | flags of `troll train` | |", "|---|---|---|"]
    for title, keys in KEYS.items():
        lines.append(f"| **{title}** | | |")
        for key in keys:
            flags = "the task" if key.flags[: len(_TASK)] == _TASK else ", ".join(f"`{x}`" for x in key.flags)
            lines.append(f"| `{key.name}` | {flags} | {key.words} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
