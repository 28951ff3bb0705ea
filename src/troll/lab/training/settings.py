"""What a run is started with: its settings besides those of TRL and TROLL, the defaults of ``troll train``, and its
provenance, that is versions, machine and git commit."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from troll.objective import Preset

DEFAULT_MODEL = "smollm2-135m"
_PRESET_FIELDS = {field.name for field in fields(Preset)}


@dataclass
class RunSettings:
    """The task, the model and the run folder."""

    model: str = field(
        default=DEFAULT_MODEL,
        metadata={"help": "A folder, a name on the hub, or smollm2-135m, the embedded model."},
    )
    task: str = field(
        default="arithmetic",
        metadata={
            "help": "arithmetic; gym:NAME for any task of reasoning-gym; gsm8k, math, mbpp, humaneval, code; a "
            "Python file of your own; or data, for any dataset with prompts, together with --reward."
        },
    )
    data: str | None = field(
        default=None,
        metadata={"help": "Training problems: a .jsonl, .json, .parquet or .csv file, or a name on the hub."},
    )
    eval_data: str | None = field(default=None, metadata={"help": "Held-out problems, in the same formats."})
    task_options: list[str] = field(
        default_factory=list,
        metadata={"help": "Options of the task as key=value, e.g. digits=2 operations=+-."},
    )
    reward: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Reward functions in place of those of the task: module:function or file.py:function, with TRL's "
            "signature."
        },
    )
    train_size: int | None = field(default=None, metadata={"help": "Number of training problems."})
    eval_size: int | None = field(default=None, metadata={"help": "Number of held-out problems."})
    runs_dir: str = field(default="runs", metadata={"help": "The folder that contains the run folders."})
    resume: str | None = field(
        default=None,
        metadata={
            "help": "Resume this run (its name or folder) with its settings; other settings need --allow_changes."
        },
    )
    dry_run: bool = field(
        default=False,
        metadata={"help": "Print the settings and the estimated memory and time, and stop."},
    )
    allow_unsandboxed_code: bool = field(
        default=False,
        metadata={"help": "If there is no sandbox, run model-written code without one, with all of your permissions."},
    )
    engine: Literal["trl", "verl"] = field(default="trl", metadata={"help": "TRL, or verl for many machines."})
    nodes: int = field(default=1, metadata={"help": "With verl: number of machines in the Ray cluster."})
    gpus_per_node: int | None = field(default=None, metadata={"help": "With verl: GPUs per machine."})
    rollout: Literal["vllm", "sglang"] = field(default="vllm", metadata={"help": "With verl: the inference engine."})
    verl_overrides: list[str] = field(default_factory=list, metadata={"help": "With verl: Hydra overrides, key=value."})
    save_model: bool = field(default=True, metadata={"help": "Keep the trained model with the run."})
    keep_checkpoints: bool = field(
        default=True,
        metadata={"help": "Keep checkpoints after the run has finished."},
    )
    write_report: bool = field(default=True, metadata={"help": "Write report.html at the end."})


ONLY_VERL = ("nodes", "gpus_per_node", "rollout", "verl_overrides")
"""Flags of verl only."""

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
"""The settings of the paper except the bound, with KL measurement, for models of 1 B parameters or more on a GPU."""

SMALL: dict[str, Any] = {
    "learning_rate": 5e-6,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "updates_per_generation": 8,
    "regression_coef": 0.1,
    "max_steps": 80,
    "eval_steps": 40,
    "per_device_eval_batch_size": 64,
    "gradient_checkpointing": False,
    "save_steps": 40,
    "save_total_limit": 1,
}
"""For the embedded model: rollouts of 64 completions with 8 updates each, minutes on a laptop. With so few completions,
a regression coefficient of 1, the default, outweighs the policy gradient (``experiments/regression``)."""


def defaults(
    model: str, task_settings: dict[str, Any], has_gpu: bool, engine: str = "trl", preset_given: bool = False
) -> dict[str, Any]:
    """The default settings of a run; with an explicit ``--preset``, none that the preset sets."""
    settings = GENERAL | (SMALL if model == DEFAULT_MODEL else {}) | task_settings
    if preset_given:
        settings = {name: value for name, value in settings.items() if name not in _PRESET_FIELDS}
    if engine == "verl":
        return settings if has_gpu else settings | {"use_cpu": True}  # the GPUs may be in a cluster
    return settings if has_gpu else settings | {"use_cpu": True, "bf16": False}


# Provenance


def versions() -> dict[str, str]:
    """Versions of Python, troll and the packages that affect training or load its data."""
    from troll.trl.robust import fingerprint  # which needs trl; `troll doctor` runs without it

    return fingerprint.versions((*fingerprint.PACKAGES, "datasets"))


def machine() -> dict[str, Any]:
    """Processor, memory and GPU."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "platform": platform.platform(terse=True),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(memory / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpus": torch.cuda.device_count(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit of the working directory and whether it has changes; None outside a repository."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
