"""What decides a run with verl: the flags, and the facts about task and model that verl's keys depend on."""

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
    """Flags as they were resolved, and what was found out about task and model."""

    run: RunSettings
    args: TROLLConfig
    model: ModelConfig
    said: frozenset[str]
    """The flags that were given, on the command line or in a file."""
    folder: Path
    model_path: str
    prompts: int
    """Training problems."""
    prompt_tokens: int
    """Length of the longest prompt."""
    gpus: int
    """Per node."""
    chat_template: str | None = None
    """For prompts that are plain text; None for chat messages."""
    stop: int | None = None
    """A token at which completions end, besides the end token."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the processes of verl need beyond what they inherit."""
    resumes: bool = False

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node"):
            given = getattr(self.run, name)
            if given is not None and given < 1:
                raise InputError(f"--{name} {given}", "at least 1", f"leaving --{name} out")
        if (self.args.updates_per_generation or 0.5) % self.args.num_iterations:
            raise InputError(
                f"a schedule of {self.args.steps_per_rollout} passes and num_iterations={self.args.num_iterations} "
                f"per rollout, gradient_accumulation_steps={self.args.gradient_accumulation_steps}",
                "whole updates on whole rollouts: verl cuts a rollout into equal updates",
                "--updates_per_generation alone",
            )
        if self.completions_per_update % self.args.num_generations:
            raise InputError(
                f"{self.completions_per_update} completions per update (per_device_train_batch_size × "
                f"gradient_accumulation_steps × GPUs) in groups of num_generations={self.args.num_generations}",
                "whole groups: verl's ppo_mini_batch_size counts prompts",
                f"--gradient_accumulation_steps {self._enough_accumulation}",
            )
        if self.prompts < self.prompts_per_rollout:
            raise InputError(
                f"{self.prompts} training problems, for rollouts of {self.prompts_per_rollout} prompts",
                "at least one rollout's",
                "more problems (--train_size), or a smaller batch",
            )

    @property
    def world(self) -> int:
        """GPUs in all."""
        return self.run.nodes * self.gpus

    @property
    def updates(self) -> int:
        """Optimizer updates on each rollout."""
        return int(self.args.updates_per_generation or 0)  # None is refused

    @property
    def completions_per_update(self) -> int:
        """Over all GPUs."""
        return int(self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * self.world)

    @property
    def prompts_per_update(self) -> int:
        """verl's mini-batch."""
        return self.completions_per_update // int(self.args.num_generations)

    @property
    def prompts_per_rollout(self) -> int:
        """verl's train batch."""
        return self.prompts_per_update * self.updates // int(self.args.num_iterations)

    @property
    def rollouts_per_epoch(self) -> int:
        """verl drops the last, incomplete one."""
        return self.prompts // self.prompts_per_rollout

    @property
    def rollouts(self) -> int:
        """Steps of verl's trainer: each is a rollout and all updates on it."""
        if self.args.max_steps > 0:
            return self.between_rollouts("max_steps", self.args.max_steps)
        return max(1, int(self.args.num_train_epochs * self.rollouts_per_epoch))

    @property
    def epochs(self) -> int:
        """Passes over the data that are begun."""
        return math.ceil(self.rollouts / self.rollouts_per_epoch)

    def between_rollouts(self, name: str, updates: float) -> int:
        """A number of updates in rollouts; one that was asked for must be whole, a default is rounded up."""
        if name in self.said and updates % self.updates:
            raise InputError(
                f"--{name} {updates:g} with {self.updates} updates per rollout",
                f"a multiple of {self.updates}: verl trains, evaluates and saves in whole rollouts",
                f"--{name} {max(1, round(updates / self.updates)) * self.updates}",
            )
        return math.ceil(updates / self.updates)

    def file(self, *names: str) -> str:
        """A path below the run, as every process finds it."""
        return str(self.folder.absolute().joinpath(*names))

    @property
    def clips(self) -> bool:
        """Whether verl's own loss is used, with a clip or with one that never acts."""
        return bool(self.args.trust_region != "troll")

    @property
    def by_sequence(self) -> bool:
        """Whether the ratio is that of the sequence."""
        return bool(self.args.importance_sampling_level == "sequence")

    @property
    def _enough_accumulation(self) -> int:
        per_pass = self.args.per_device_train_batch_size * self.world
        return int(math.lcm(per_pass, self.args.num_generations) // per_pass)


def value_of(setup: Setup, name: str) -> Any:
    """Of any flag."""
    for place in (setup.run, setup.args, setup.model):
        if hasattr(place, name):
            return getattr(place, name)
    raise KeyError(name)
