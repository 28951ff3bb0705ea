"""``Setup``: the resolved flags of a run with verl, and the properties of task and model that verl's keys depend on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl import ModelConfig

from troll.errors import InputError
from troll.lab.training.settings import RunSettings
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
