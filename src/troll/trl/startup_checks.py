"""What is checked and said once, before training: mistakes that would otherwise cost a run."""

from __future__ import annotations

from typing import Any

from accelerate.logging import get_logger

from troll.errors import InputError
from troll.modeling import disable_broken_cudnn_attention
from troll.trl.config import TROLLConfig

logger = get_logger(__name__)


def check_args(args: Any) -> None:
    """Refuse a configuration without a trust region."""
    if not isinstance(args, TROLLConfig):
        raise InputError(
            f"args of type {type(args).__name__}", "a TROLLConfig", "TROLLConfig(...) in place of GRPOConfig(...)"
        )


def check_dataset(trainer: Any) -> None:
    """Refuse a data set smaller than a rollout: TRL drops incomplete ones, and would train not a single step."""
    prompts = trainer.args.generation_batch_size // trainer.num_generations
    data = trainer.train_dataset
    if hasattr(data, "__len__") and len(data) < prompts:
        raise InputError(
            f"a train_dataset of {len(data)} prompts",
            f"at least {prompts}, which is one rollout: generation_batch_size={trainer.args.generation_batch_size} "
            f"completions, num_generations={trainer.num_generations} each",
            "more prompts, a smaller per_device_train_batch_size, or fewer updates_per_generation",
        )


def choose_attention() -> None:
    """Turn off what is known to compute wrong gradients, and say so."""
    done = disable_broken_cudnn_attention()
    if done is not None:
        logger.warning(done)


def say_what_acts(args: TROLLConfig) -> None:
    """Warn about settings without effect."""
    if args.trust_region != "none" and not args.trust_region_can_act:
        logger.warning(
            f"No trust region acts on this schedule: one update is made on a rollout, by the policy that generated it "
            f"(steps_per_generation={args.steps_per_generation}, num_iterations={args.num_iterations}, "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}), so trust_region={args.trust_region!r} "
            "changes nothing. Set updates_per_generation=8."
        )
    if args.trust_region == "troll" and (args.epsilon != 0.2 or args.epsilon_high is not None):
        logger.warning(
            f"epsilon={args.epsilon} and epsilon_high={args.epsilon_high} have no effect with trust_region='troll': "
            f"the radius of the trust region is kl_bound={args.kl_bound}."
        )
