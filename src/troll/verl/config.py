"""What a user can set: the loss under ``actor.policy_loss``, what is recorded under ``actor.fsdp_config``."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, get_args

from verl.base_config import BaseConfig
from verl.workers.config import FSDPEngineConfig, McoreEngineConfig, PolicyLossConfig

from troll.errors import InputError, require_choice
from troll.objective import ImportanceSamplingLevel, check_regression_coef
from troll.policy import MAX_SUPPORT, TAIL, TAIL_MASS, Tail, check_support
from troll.projection import KL_BOUND, MAX_LOST_MASS, check_kl_bound

LOSS_MODE = "troll"
MODEL_TYPE = "troll_lm"

logger = logging.getLogger(__name__)


@dataclass
class RunFacts(BaseConfig):
    """What the loss must know of the rest of the run. ``configs/trust_region`` fills it in; it is not to be set.

    verl builds the configuration of the actor before anything else, so a run that cannot work ends in its first second.
    """

    use_v1: bool = True
    bypass_mode: bool = False
    distillation: bool = False
    use_fused_kernels: bool = False
    model_type: str = MODEL_TYPE
    train_batch_size: int | None = None
    ppo_mini_batch_size: int | None = None
    ppo_epochs: int = 1

    def __post_init__(self) -> None:
        for wrong, given, expected, hint in (
            (
                not self.use_v1,
                "trainer.use_v1=False",
                "verl's V1 trainer: the old one does not bring the old policy to the update",
                "trainer.use_v1=True, the default",
            ),
            (
                self.bypass_mode,
                "algorithm.rollout_correction.bypass_mode=True",
                "an old policy that the trainer scores itself: the sampler reports single tokens, no distributions",
                "algorithm.rollout_correction.bypass_mode=False; importance weights correct for the sampler",
            ),
            (
                self.distillation,
                "distillation.enabled=True",
                "no distillation: it uses verl's one hook for logits, which the trust region needs",
                "distillation.enabled=False",
            ),
            (
                self.use_fused_kernels,
                "actor_rollout_ref.model.use_fused_kernels=True",
                "logits: verl's fused kernels make none, and the trust region is about whole distributions",
                "actor_rollout_ref.model.use_fused_kernels=False, the default",
            ),
            (
                self.model_type != MODEL_TYPE,
                f"actor_rollout_ref.model.model_type={self.model_type} with loss_mode={LOSS_MODE}",
                f"the engine {MODEL_TYPE}, which records the old policy",
                f"actor_rollout_ref.model.model_type={MODEL_TYPE}, or policy_loss.loss_mode=vanilla for verl's clip",
            ),
        ):
            if wrong:
                raise InputError(given, expected, hint)
        if self.train_batch_size is not None and not self.trust_region_can_act:
            logger.warning(
                "No trust region acts on this schedule: one update is made on a rollout, by the policy that generated "
                f"it (data.train_batch_size={self.train_batch_size}, actor.ppo_mini_batch_size="
                f"{self.ppo_mini_batch_size}, actor.ppo_epochs={self.ppo_epochs}). "
                "The authors make 8: train_batch_size=256, ppo_mini_batch_size=32."
            )

    @property
    def trust_region_can_act(self) -> bool:
        """Whether any update is made with a policy that differs from the one that scored its rollout."""
        return self.ppo_epochs > 1 or (self.train_batch_size or 0) > (self.ppo_mini_batch_size or 0)


@dataclass
class TrollPolicyLossConfig(PolicyLossConfig):
    """``actor_rollout_ref.actor.policy_loss``: the trust region."""

    loss_mode: str = LOSS_MODE
    kl_bound: float = KL_BOUND
    """ε, radius of the trust region, in nats of KL(projected ‖ old) per token; 0 keeps the old policy, .inf is none."""
    bound: str = "fixed"
    """The same ε for every token of the run; bounds that adapt are refused."""
    regression_coef: float = 1.0
    """α, weight of the regression term, which pulls the network towards its projection."""
    tail: str = TAIL
    """What becomes of dropped probability: one more outcome (``bucket``), or 1e-12 a token (``floor``)."""
    importance_sampling_level: str = "token"
    """``token``, or ``sequence`` for the length-normalised ratio of GSPO."""
    max_lost_mass: float = MAX_LOST_MASS
    """Most mass, on average, that the proposal may have on tokens the old policy excludes; more is an error."""
    run: RunFacts = field(default_factory=RunFacts)

    def __post_init__(self) -> None:
        if self.loss_mode != LOSS_MODE:
            raise InputError(
                f"policy_loss.loss_mode={self.loss_mode} with a configuration of the trust region",
                f"loss_mode={LOSS_MODE}",
                f"actor_rollout_ref.actor.policy_loss.loss_mode={LOSS_MODE}; without the trust region, leave out "
                "+trust_region=troll",
            )
        if self.bound != "fixed":
            raise InputError(
                f"policy_loss.bound={self.bound}",
                "fixed: verl's loss keeps nothing from one rollout to the next that a bound could adapt to",
                f"actor_rollout_ref.actor.policy_loss.bound=fixed, or TRL with bound={self.bound!r}",
            )
        require_choice("tail", self.tail, get_args(Tail))
        require_choice("importance_sampling_level", self.importance_sampling_level, get_args(ImportanceSamplingLevel))
        check_kl_bound(self.kl_bound)
        check_regression_coef(self.regression_coef)


@dataclass
class _Recorded:
    """What is recorded of the old policy, and of the proposal with ``tail=floor``."""

    max_support: int = MAX_SUPPORT
    """K, most tokens kept per position."""
    tail_mass: float = TAIL_MASS
    """δ, probability that may be dropped: tokens are kept until 1 − δ."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        check_support(self.max_support, self.tail_mass)


@dataclass
class TrollFSDPEngineConfig(_Recorded, FSDPEngineConfig):
    """``actor_rollout_ref.actor.fsdp_config``: verl's, and how much of the old policy is kept."""


@dataclass
class TrollMcoreEngineConfig(_Recorded, McoreEngineConfig):
    """``actor_rollout_ref.actor.megatron``: verl's, and how much of the old policy is kept."""


def recorded(engine_config: Any) -> tuple[int, float]:
    """``max_support`` and ``tail_mass`` of an engine; the defaults where verl's own configuration was left in place."""
    return engine_config.get("max_support", _Recorded.max_support), engine_config.get("tail_mass", _Recorded.tail_mass)
