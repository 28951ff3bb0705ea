"""``Setup``: the resolved flags of a run with verl, and the properties of task and model that verl's keys depend on.

``refuse`` raises for the flags and values for which verl has no key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl import ModelConfig

from troll.errors import InputError
from troll.lab.training.settings import RunSettings
from troll.lab.verl.keys import DTYPES, KEYS, LOSS_TYPES, SCHEDULES
from troll.trl import TROLLConfig


@dataclass(frozen=True)
class Setup:
    """The resolved flags, and properties of the task and the model."""

    run: RunSettings
    args: TROLLConfig
    model: ModelConfig
    explicit: frozenset[str]
    """The flags that were given, on the command line or in a file."""
    folder: Path
    model_path: str
    prompts: int
    """Number of training problems."""
    prompt_tokens: int
    """Length of the longest prompt."""
    gpus: int
    """GPUs per node."""
    chat_template: str | None = None
    """For plain-text prompts; None for chat prompts."""
    stop: int | None = None
    """The task's stop token, at which completions end besides the end token."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are set for verl's processes."""
    resumes: bool = False

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node"):
            value = getattr(self.run, name)
            if value is not None and value < 1:
                raise InputError(f"--{name} must be at least 1, got {value}", f"Leave --{name} out for the default")
        if (self.args.updates_per_generation or 0.5) % self.args.num_iterations:
            raise InputError(
                f"verl splits a rollout into equal updates, and {self.args.steps_per_rollout} passes per rollout with "
                f"num_iterations={self.args.num_iterations} and gradient_accumulation_steps="
                f"{self.args.gradient_accumulation_steps} are not whole updates",
                "Set --updates_per_generation alone",
            )
        if self.completions_per_update % self.args.num_generations:
            raise InputError(
                f"{self.completions_per_update} completions per update (per_device_train_batch_size × "
                f"gradient_accumulation_steps × GPUs) are not a multiple of num_generations="
                f"{self.args.num_generations}: verl's mini-batches consist of whole groups",
                f"Use --gradient_accumulation_steps {self._enough_accumulation}",
            )
        if self.prompts < self.prompts_per_rollout:
            raise InputError(
                f"a rollout has {self.prompts_per_rollout} prompts, but there are {self.prompts} training problems",
                "Use more problems (--train_size) or a smaller batch",
            )

    @property
    def world(self) -> int:
        """Number of GPUs on all nodes."""
        return self.run.nodes * self.gpus

    @property
    def updates(self) -> int:
        """Optimizer updates on each rollout."""
        return int(self.args.updates_per_generation or 0)  # None is refused

    @property
    def completions_per_update(self) -> int:
        """Completions per update, on all GPUs."""
        return int(self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * self.world)

    @property
    def prompts_per_update(self) -> int:
        """Prompts per update, verl's ``ppo_mini_batch_size``."""
        return self.completions_per_update // int(self.args.num_generations)

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts per rollout, verl's ``train_batch_size``."""
        return self.prompts_per_update * self.updates // int(self.args.num_iterations)

    @property
    def rollouts_per_epoch(self) -> int:
        """Rollouts per epoch; verl drops the last, incomplete one."""
        return self.prompts // self.prompts_per_rollout

    @property
    def rollouts(self) -> int:
        """Number of rollouts. A step of verl's trainer is a rollout and all updates on it."""
        if self.args.max_steps > 0:
            return self.between_rollouts("max_steps", self.args.max_steps)
        return max(1, int(self.args.num_train_epochs * self.rollouts_per_epoch))

    @property
    def epochs(self) -> int:
        """Epochs, the last one possibly incomplete."""
        return math.ceil(self.rollouts / self.rollouts_per_epoch)

    def between_rollouts(self, name: str, updates: float) -> int:
        """Updates → rollouts. An explicit number must be a multiple of those per rollout; a default is rounded up."""
        if name in self.explicit and updates % self.updates:
            raise InputError(
                f"--{name} must be a multiple of {self.updates}, the updates per rollout, got {updates:g}: verl "
                "trains, evaluates and saves in whole rollouts",
                f"Use --{name} {max(1, round(updates / self.updates)) * self.updates}",
            )
        return math.ceil(updates / self.updates)

    def file(self, *names: str) -> str:
        """Absolute path of a file in the run's folder."""
        return str(self.folder.absolute().joinpath(*names))

    @property
    def clips(self) -> bool:
        """Whether verl's loss is used, with its clip or with an infinite one."""
        return bool(self.args.trust_region != "troll")

    @property
    def by_sequence(self) -> bool:
        """Whether the importance ratio is that of the sequence."""
        return bool(self.args.importance_sampling_level == "sequence")

    @property
    def _enough_accumulation(self) -> int:
        per_pass = self.args.per_device_train_batch_size * self.world
        return int(math.lcm(per_pass, self.args.num_generations) // per_pass)


def value_of(setup: Setup, name: str) -> Any:
    """The value of a flag."""
    for owner in (setup.run, setup.args, setup.model):
        if hasattr(owner, name):
            return getattr(owner, name)
    raise KeyError(name)


# Flags and values without a key

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
