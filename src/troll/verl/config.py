"""Settings: the trust region under ``actor.policy_loss``, the recorded support under ``actor.fsdp_config``."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, get_args

from verl.base_config import BaseConfig
from verl.workers.config import FSDPEngineConfig, McoreEngineConfig, PolicyLossConfig

from troll.errors import InputError, require_choice
from troll.objective import ImportanceSamplingLevel, check_regression_coef, trust_region_can_act
from troll.objective.presets import PRESETS, resolve
from troll.policy import Tail, check_support
from troll.projection import MAX_LOST_MASS, check_kl_bound

LOSS_MODE = "troll"
MODEL_TYPE = "troll_lm"

_FROM_PRESET: Any = None  # replaced by the value of the preset in __post_init__

logger = logging.getLogger(__name__)


@dataclass
class RunFacts(BaseConfig):
    """Settings of the rest of the run that the trust region depends on.

    ``configs/trust_region`` fills them in by interpolation; users do not set them. verl builds the actor's
    configuration first, so that an impossible combination is refused within the first second of a run.
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
        for wrong, problem, fix in (
            (
                not self.use_v1,
                "trainer.use_v1=False: verl's old trainer does not pass the old policy on to the update",
                "Set trainer.use_v1=True, the default",
            ),
            (
                self.bypass_mode,
                "algorithm.rollout_correction.bypass_mode=True: the sampler would provide the old policy, and it "
                "reports log-probabilities of single tokens, not distributions",
                "Set bypass_mode=False; verl's importance weights (rollout_correction.rollout_is) correct for the "
                "sampler",
            ),
            (
                self.distillation,
                "distillation.enabled=True: distillation and the trust region need the same hook for logits in verl",
                "Set distillation.enabled=False",
            ),
            (
                self.use_fused_kernels,
                "actor_rollout_ref.model.use_fused_kernels=True: verl's fused kernels compute no logits, and the trust "
                "region needs them",
                "Set actor_rollout_ref.model.use_fused_kernels=False, the default",
            ),
            (
                self.model_type != MODEL_TYPE,
                f"loss_mode={LOSS_MODE} needs the engine {MODEL_TYPE}, which records the old policy, got "
                f"model_type={self.model_type}",
                f"Set actor_rollout_ref.model.model_type={MODEL_TYPE}, or leave +trust_region=troll out for the clip",
            ),
        ):
            if wrong:
                raise InputError(problem, fix)
        if self.train_batch_size and self.ppo_mini_batch_size and not self._trust_region_can_act:
            logger.warning(
                "The trust region has no effect on this schedule: each rollout is used for one update, made by the "
                f"policy that generated it (data.train_batch_size={self.train_batch_size}, actor.ppo_mini_batch_size="
                f"{self.ppo_mini_batch_size}, actor.ppo_epochs={self.ppo_epochs}). "
                "The paper uses 8 updates: train_batch_size=256, ppo_mini_batch_size=32."
            )

    @property
    def _trust_region_can_act(self) -> bool:
        return trust_region_can_act(self.ppo_mini_batch_size or 1, (self.train_batch_size or 1) * self.ppo_epochs)


@dataclass
class TrollPolicyLossConfig(PolicyLossConfig):
    """``actor_rollout_ref.actor.policy_loss``: the trust region. None means "as the preset says"."""

    loss_mode: str = LOSS_MODE
    preset: str = "default"
    """``default``, or ``paper`` for the paper's settings (``troll.objective.presets``)."""
    kl_bound: float = _FROM_PRESET
    """ε, the radius of the trust region in nats of KL(projected ‖ old) per token. 0 keeps the old policy."""
    kl_bound_schedule: Any = None
    """Must be None: verl's loss has no state that a schedule could be kept in."""
    regression_coef: float = _FROM_PRESET
    """α, the coefficient of the regression term, which pulls the network towards its projection."""
    tail: str = _FROM_PRESET
    """Dropped probability is one more outcome (``bucket``) or 1e-12 per missing token (``floor``)."""
    importance_sampling_level: str = "token"
    """``token``, or ``sequence`` for the length-normalised ratio of GSPO."""
    max_lost_mass: float = MAX_LOST_MASS
    """The most mass, on average, that the proposal may have on tokens the old policy excludes; more is an error."""
    run: RunFacts = field(default_factory=RunFacts)

    def __post_init__(self) -> None:
        if self.loss_mode != LOSS_MODE:
            raise InputError(
                f"the configuration of the trust region needs policy_loss.loss_mode={LOSS_MODE}, got {self.loss_mode}",
                "Leave out +trust_region=troll for verl's losses",
            )
        if self.kl_bound_schedule is not None:
            raise InputError(
                f"policy_loss.kl_bound_schedule={self.kl_bound_schedule} is not supported: verl's loss keeps no state "
                "between rollouts, so the bound is fixed",
                "Set kl_bound_schedule=null, or train with TRL",
            )
        if self.tail is not _FROM_PRESET:
            require_choice("tail", self.tail, get_args(Tail))
        require_choice("importance_sampling_level", self.importance_sampling_level, get_args(ImportanceSamplingLevel))
        explicit: dict[str, Any] = {name: getattr(self, name) for name in ("kl_bound", "regression_coef", "tail")}
        settings = resolve(self.preset, **explicit)  # type: ignore[arg-type]
        for name in explicit:
            object.__setattr__(self, name, getattr(settings, name))  # verl's configurations are frozen
        check_kl_bound(settings.kl_bound)
        check_regression_coef(settings.regression_coef)


@dataclass
class _Recorded:
    """How much of the old policy, and with ``tail=floor`` of the proposal, is kept. None means "as the preset says"."""

    preset: str = "default"
    max_support: int = _FROM_PRESET
    """K, the most tokens kept per position."""
    tail_mass: float = _FROM_PRESET
    """δ, the probability that may be dropped: tokens are kept until 1 − δ."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        settings = resolve(self.preset, max_support=self.max_support, tail_mass=self.tail_mass)  # type: ignore[arg-type]
        object.__setattr__(self, "max_support", settings.max_support)
        object.__setattr__(self, "tail_mass", settings.tail_mass)
        check_support(settings.max_support, settings.tail_mass)


@dataclass
class TrollFSDPEngineConfig(_Recorded, FSDPEngineConfig):
    """``actor_rollout_ref.actor.fsdp_config``: verl's settings and the recorded support."""


@dataclass
class TrollMcoreEngineConfig(_Recorded, McoreEngineConfig):
    """``actor_rollout_ref.actor.megatron``: verl's settings and the recorded support."""


def recorded(engine_config: Any) -> tuple[int, float]:
    """``max_support`` and ``tail_mass`` of an engine; the defaults for a configuration of verl's own class."""
    default = PRESETS["default"]
    return engine_config.get("max_support", default.max_support), engine_config.get("tail_mass", default.tail_mass)
