"""What a run is told beyond TRL's and TROLL's settings, and the settings it has unless told otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

DEFAULT_MODEL = "smollm2-135m"


@dataclass
class RunSettings:
    """The task, the model, and where the run is kept."""

    model: str = field(
        default=DEFAULT_MODEL,
        metadata={"help": "A folder, a name on the hub, or smollm2-135m: the model that comes with a package."},
    )
    task: str = field(
        default="arithmetic",
        metadata={
            "help": "arithmetic; gym:NAME for any task of reasoning-gym; gsm8k, math, mbpp, humaneval, code; a "
            "Python file of your own; or data, for any data set with prompts and a --reward."
        },
    )
    data: str | None = field(
        default=None,
        metadata={"help": "Training problems: a .jsonl, .json, .parquet or .csv file, or a name on the hub."},
    )
    eval_data: str | None = field(default=None, metadata={"help": "The same, for the held-out problems."})
    task_options: list[str] = field(
        default_factory=list,
        metadata={"help": "Options of the task as key=value, e.g. digits=2 operations=+-."},
    )
    reward: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Reward functions in place of the task's own: module:function or file.py:function, each as TRL "
            "takes them."
        },
    )
    train_size: int | None = field(default=None, metadata={"help": "Use this many training problems."})
    eval_size: int | None = field(default=None, metadata={"help": "Use this many held-out problems."})
    runs_dir: str = field(default="runs", metadata={"help": "The folder that has one folder per run."})
    resume: str | None = field(
        default=None,
        metadata={
            "help": "Go on with this run (its name, or its folder), with the settings it has; with others only if "
            "--allow_changes."
        },
    )
    dry_run: bool = field(
        default=False,
        metadata={"help": "Print the settings and what the run will need in memory and time, and stop."},
    )
    allow_unsandboxed_code: bool = field(
        default=False,
        metadata={
            "help": "Where there is no sandbox, run what the model writes without one: it can then do to this machine "
            "whatever you can."
        },
    )
    engine: Literal["trl", "verl"] = field(default="trl", metadata={"help": "TRL, or verl on many machines."})
    nodes: int = field(default=1, metadata={"help": "With verl: machines of the Ray cluster."})
    gpus_per_node: int | None = field(default=None, metadata={"help": "With verl: of each; if not said, as here."})
    rollout: Literal["vllm", "sglang"] = field(default="vllm", metadata={"help": "With verl: what generates."})
    verl_overrides: list[str] = field(default_factory=list, metadata={"help": "With verl: its own keys, key=value."})
    save_model: bool = field(default=True, metadata={"help": "Keep the trained model with the run."})
    keep_checkpoints: bool = field(
        default=True,
        metadata={"help": "Keep them when the run has finished; of smollm2-135m, only if you say so."},
    )
    write_report: bool = field(default=True, metadata={"help": "Write report.html at the end."})


ONLY_VERL = ("nodes", "gpus_per_node", "rollout", "verl_overrides")
"""Flags that TRL does not have."""

GENERAL: dict[str, Any] = {
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 8,
    "num_train_epochs": 1,
    "logging_steps": 1,
    "measure_kl": True,
    "report_to": "none",
    "eval_strategy": "steps",
    "eval_steps": 32,
    "eval_on_start": True,
    "num_generations_eval": 1,
    "save_steps": 32,
    "save_total_limit": 2,
    "seed": 0,
}
"""The authors' settings but for the bound, with measurements on; for a model of a billion weights or more on a GPU."""

SMALL: dict[str, Any] = {
    "learning_rate": 5e-6,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "updates_per_generation": 8,
    "regression_coef": 0.1,
    "max_steps": 80,
    "warmup_steps": 8,
    "eval_steps": 40,
    "per_device_eval_batch_size": 64,
    "gradient_checkpointing": False,
    "save_steps": 40,
    "save_total_limit": 1,
}
"""For the embedded model: rollouts of 64 completions, 8 updates on each, minutes on a laptop. With so few completions,
the regression term at 1, the default, outweighs what is learnt (``experiments/regression``)."""


def defaults(model: str, task_settings: dict[str, Any], has_gpu: bool, engine: str = "trl") -> dict[str, Any]:
    """The settings of a run that was told nothing else."""
    settings = GENERAL | (SMALL if model == DEFAULT_MODEL else {}) | task_settings
    if engine == "verl":
        settings.pop("warmup_steps", None)  # verl's goes by rollouts, and the first would be at rate 0
        return settings if has_gpu else settings | {"use_cpu": True}  # the GPUs may be those of a cluster
    return settings if has_gpu else settings | {"use_cpu": True, "bf16": False}
