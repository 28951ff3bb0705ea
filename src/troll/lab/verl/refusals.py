"""The flags and values that ``--engine verl`` refuses because verl has no key for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from troll.errors import InputError
from troll.lab.verl.keys import DTYPES, KEYS, LOSS_TYPES, SCHEDULES
from troll.lab.verl.setup import Setup, value_of

OWN = (
    *("config", "help", "help_all", "engine", "dry_run", "write_report", "verl_overrides"),
    *("allow_changes", "keep_checkpoints"),
)
"""Flags of ``troll train`` that verl does not need."""
LOGGERS = ("clearml", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")


@dataclass(frozen=True)
class Limit:
    """The values of a flag that verl supports, in words too, and why it supports no others."""

    accepts: Callable[[Any, Setup], Any]
    words: str
    why: str
    fix: str = ""


def _one_of(*values: Any) -> Callable[[Any, Setup], bool]:
    return lambda value, _: value in values


def _is(expected: Any) -> Callable[[Any, Setup], bool]:
    return lambda value, _: bool(value == expected)


LIMITS: dict[str, Limit] = {
    "average_tokens_across_devices": Limit(_is(True), "`true`", "verl always averages over the whole mini-batch"),
    "delta": Limit(
        lambda v, s: v is None or (not s.by_sequence and v > 1 + (s.args.epsilon_high or s.args.epsilon)),
        "above 1 + `epsilon_high`, with the ratio of tokens",
        "verl's `clip_ratio_c` acts outside of the clip, and `gspo` has none",
    ),
    "disable_dropout": Limit(_is(True), "`true`", "with dropout the old policy is not reproducible"),
    "dtype": Limit(
        _one_of(*DTYPES), " or ".join(f"`{x}`" for x in DTYPES), "verl has no automatic precision of the parameters"
    ),
    "eval_strategy": Limit(_one_of("no", "steps", "epoch"), "`no`, `steps` or `epoch`", "verl has no other"),
    "logging_steps": Limit(_is(1), "1", "verl logs every rollout"),
    "logging_strategy": Limit(_is("steps"), "`steps`", "verl logs every rollout"),
    "lora_dropout": Limit(_is(0), "0", "verl's adapters have none"),
    "loss_type": Limit(
        _one_of(*LOSS_TYPES),
        ", ".join(f"`{x}`" for x in LOSS_TYPES),
        "TRL's other losses bound or reweight the ratio themselves",
        "Use --trust_region clip --verl_overrides actor_rollout_ref.actor.policy_loss.loss_mode=cispo, or sapo",
    ),
    "lr_scheduler_type": Limit(_one_of(*SCHEDULES), ", ".join(f"`{x}`" for x in SCHEDULES), "verl has no other"),
    "measure_kl": Limit(
        lambda v, s: not v or not s.clips,
        "`false` with `clip` and `none`",
        "with verl's own loss the old policy is not recorded; `actor/ppo_kl` is verl's estimate",
    ),
    "min_p": Limit(_is(None), "unset", "verl does not pass it to its samplers"),
    "model_revision": Limit(
        _is("main"),
        "`main`",
        "verl always loads the newest revision",
        "Download the revision and pass the folder as --model",
    ),
    "multi_objective_aggregation": Limit(
        _is("sum_then_normalize"), "`sum_then_normalize`", "one reward per completion reaches verl's advantages"
    ),
    "optim": Limit(
        _one_of("adamw_torch", "adamw_torch_fused"),
        "`adamw_torch`",
        "verl's default is torch's AdamW",
        "Use --verl_overrides actor_rollout_ref.actor.optim.optimizer=… actor_rollout_ref.actor.optim.optimizer_impl=…",
    ),
    "repetition_penalty": Limit(_is(1.0), "1", "verl's samplers do not use it"),
    "report_to": Limit(
        lambda v, s: set(v) <= set(LOGGERS), "`none`, " + ", ".join(f"`{x}`" for x in LOGGERS), "verl has no other"
    ),
    "save_strategy": Limit(_one_of("no", "steps", "epoch"), "`no`, `steps` or `epoch`", "verl has no other"),
    "scale_rewards": Limit(
        _one_of("group", "none", True, False),
        "`group` or `none`",
        "verl's grpo divides by the standard deviation of the group",
    ),
    "use_bias_correction_kl": Limit(
        lambda v, s: not v or not s.args.beta,
        "`false`",
        "verl's reference KL is not weighted by the ratio",
    ),
    "use_cpu": Limit(_is(False), "`false`", "verl does not train on a CPU", "Use --engine trl"),
    "use_vllm": Limit(
        lambda v, s: v and s.run.rollout == "vllm",
        "`true`, with `rollout vllm`",
        "verl always generates with vLLM or SGLang",
        "Use --rollout vllm or --rollout sglang",
    ),
    "vllm_importance_sampling_correction": Limit(
        _is(False),
        "`false`",
        "verl's correction for the sampler is a different one, and off by default",
        "Use --verl_overrides algorithm.rollout_correction.rollout_is=token",
    ),
    "vllm_mode": Limit(_is("colocate"), "`colocate`", "verl's trainer and sampler share GPUs"),
    "warmup_steps": Limit(
        lambda v, s: v == 0 or v >= 1, "a number of updates", "a fraction of the run is not a whole number of rollouts"
    ),
}
"""Flags that verl supports for some values only."""

REASONS: dict[tuple[str, ...], str] = {
    ("fsdp", "fsdp_config", "deepspeed", "parallelism_config", "accelerator_config"): (
        "verl shards with FSDP2; its settings are under actor_rollout_ref.actor.fsdp_config"
    ),
    ("per_device_eval_batch_size", "eval_accumulation_steps"): "verl sends all held-out prompts to the sampler at once",
    ("mask_truncated_completions", "off_policy_mask_threshold", "top_entropy_quantile"): "verl's loss has no such mask",
    ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"): "verl's reference is always the initial model",
    (
        "load_in_8bit",
        "load_in_4bit",
        "bnb_4bit_quant_type",
        "use_bnb_nested_quant",
    ): "verl does not train quantised parameters",
    ("use_rslora", "use_dora", "lora_modules_to_save", "lora_task_type", "lora_target_parameters"): (
        "verl supports rank, alpha and target modules of an adapter only"
    ),
    ("kl_bound_schedule",): "with verl the bound is fixed: its loss keeps no state from one rollout to the next",
    ("regression_coef_schedule", "scale_regression"): "with verl the regression coefficient is fixed",
    ("push_to_hub", "hub_model_id", "hub_token", "hub_strategy", "hub_private_repo"): "verl does not upload models",
    ("log_completions", "num_completions_to_print"): "verl has trainer.rollout_data_dir for this",
    ("data_seed", "full_determinism"): "one seed is used for everything; verl has rollout.full_determinism",
    ("use_liger_kernel", "liger_kernel_config"): "verl has actor_rollout_ref.model.use_liger for this",
}
"""Why some flags have no key. All others: verl has no equivalent."""


def translated() -> set[str]:
    """The flags that determine some key."""
    return {flag for keys in KEYS.values() for key in keys for flag in key.flags}


def refuse(setup: Setup) -> None:
    """Refuse every explicit flag without a key, and every value that verl does not support."""
    known = translated() | LIMITS.keys() | set(OWN)
    for name in sorted(setup.explicit - known):
        reasons = [why for names, why in REASONS.items() if name in names]
        raise InputError(
            f"--{name} is not supported with --engine verl: {(reasons or ['verl has no equivalent'])[0]}",
            "Leave it out; verl's own keys go to --verl_overrides",
        )
    for name, limit in LIMITS.items():
        value = value_of(setup, name)
        if _has_effect(setup, name) and not limit.accepts(value, setup):
            raise InputError(
                f"--{name} {value} is not supported with --engine verl, which supports {limit.words.replace('`', '')}: "
                f"{limit.why}",
                limit.fix or f"Leave --{name} out",
            )
    for pair in setup.run.verl_overrides:
        if "=" not in pair and not pair.startswith("~"):
            raise InputError(
                f"--verl_overrides takes key=value, got {pair!r}", "Example: trainer.log_val_generations=4"
            )


def config_of(config: dict[str, Any], setup: Setup) -> dict[str, Any]:
    """The flags that reproduce the run: those that have an effect, with step counts in whole rollouts."""
    kept = {name: value for name, value in config.items() if _has_effect(setup, name) or name in OWN}
    for name in ("max_steps", "eval_steps", "save_steps"):
        if name in kept and kept[name] >= 1:
            kept[name] = setup.between_rollouts(name, kept[name]) * setup.updates
    return kept


def _has_effect(setup: Setup, name: str) -> bool:
    """Whether a flag has an effect: it is explicit, or a key follows from it."""
    return name in setup.explicit or name in translated()
