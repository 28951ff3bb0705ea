"""``TROLLConfig``: TRL's ``GRPOConfig`` and the trust region."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from accelerate.logging import get_logger
from trl import GRPOConfig

from troll.errors import InputError, require_choice, suggestion
from troll.objective import check_regression_coef, trust_region_can_act
from troll.objective.presets import PRESETS, PresetName, resolve
from troll.policy import Tail, check_support
from troll.projection import check_kl_bound
from troll.trl import contract
from troll.trl.checks import check_types
from troll.trl.estimators import Estimator
from troll.trl.robust.reward_validation import OnInvalidReward
from troll.trl.trust_region import check_schedules

contract.check()
logger = get_logger(__name__)

TrustRegion = Literal["troll", "clip", "none"]
LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")  # those whose ratio is unclipped if epsilon is infinite
DEFAULT_UPDATES = 8
_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")  # schedulers of transformers that ignore warmup_steps
_FROM_PRESET: Any = None  # replaced by the preset's value in __post_init__


@dataclass
class TROLLConfig(GRPOConfig):
    """All arguments of ``GRPOConfig``, and a trust region in place of the clip.

    Two defaults differ from TRL's. A rollout is used for ``updates_per_generation=8`` updates, as in the paper: with
    one, TRL's default, neither a clip nor a trust region ever acts. If ``steps_per_generation``,
    ``generation_batch_size`` or ``num_iterations`` is set, that schedule is used. And dropout is off: with dropout, the
    policy differs from itself.
    """

    preset: PresetName = field(
        default="default",
        metadata={
            "help": "Values of kl_bound, regression_coef, tail, max_support and tail_mass that are not set: 'default' "
            "is 0.2, 1, 'bucket', 64, 1e-5; 'paper' is 0.05, 1, 'floor', 64, 1e-5, as in the paper."
        },
    )
    trust_region: TrustRegion = field(
        default="troll",
        metadata={
            "help": "What keeps an update close to the policy that generated the rollout: 'troll' projects every "
            "token's distribution onto KL <= kl_bound; 'clip' is TRL's own loss with epsilon, unchanged; 'none' is "
            "TRL's loss without clipping."
        },
    )
    kl_bound: float = field(
        default=_FROM_PRESET,
        metadata={
            "help": "Radius of the trust region, in nats of KL(projected || old) per token: 0.2, or 0.05 with "
            "preset 'paper'. 0 keeps the old policy, inf constrains nothing. With kl_bound_schedule, where it starts."
        },
    )
    regression_coef: float = field(
        default=_FROM_PRESET,
        metadata={"help": "Coefficient of the regression term, which pulls the network towards its projection: 1."},
    )
    max_support: int = field(
        default=_FROM_PRESET,
        metadata={"help": "Maximum number of tokens kept per position: 64. 16 is worse, 256 no better."},
    )
    tail_mass: float = field(
        default=_FROM_PRESET,
        metadata={"help": "Probability that may be dropped per position: 1e-5."},
    )
    tail: Tail = field(
        default=_FROM_PRESET,
        metadata={
            "help": "Treatment of the dropped probability: 'bucket' counts it as one more outcome, never exceeds the "
            "true KL and selects tokens once per rollout; 'floor' (preset 'paper') gives a missing token 1e-12, which "
            "overstates the KL if the kept mass is clearly below 1 (small models at temperature 1)."
        },
    )
    kl_bound_schedule: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "How the bound changes, starting at kl_bound: 'geometric end=0.01 rollouts=50' and 'linear ...' go "
            "to end; 'projected target=0.03' keeps the projected fraction of the tokens; 'network target=0.1' keeps "
            "the network's own KL; 'entropy max=1.0' gives uncertain tokens more room, kl_bound on average; "
            "'sequence limit=2.0 by_prefix=true' also bounds the sum over a completion. Unset: constant."
        },
    )
    regression_coef_schedule: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "How the coefficient of the regression changes, starting at regression_coef: 'projected "
            "target=0.05' raises it, up to ten times, while more than this fraction of the tokens is outside of the "
            "bound. Unset: constant."
        },
    )
    scale_regression: bool = field(
        default=False,
        metadata={
            "help": "Multiply regression_coef by the mean absolute advantage of the rollout, so that the balance of "
            "the two terms does not depend on the scale of the rewards."
        },
    )
    updates_per_generation: int | None = field(
        default=None,
        metadata={
            "help": "Optimizer updates per rollout: 8 unless TRL's steps_per_generation, generation_batch_size or "
            "num_iterations is set. Sets steps_per_generation = updates_per_generation * gradient_accumulation_steps "
            "/ num_iterations, so a rollout has that many batches of completions."
        },
    )
    advantage_estimator: Estimator = field(
        default="grpo",
        metadata={
            "help": "'grpo' is TRL's own (scaled by scale_rewards); 'dr_grpo' does not divide by the standard "
            "deviation; 'rloo' leaves the sample out of its baseline; 'reinforce_pp' whitens the rewards over all "
            "tokens of the rollout; 'reinforce_pp_baseline' does so after subtracting the mean of the group."
        },
    )
    measure_kl: bool = field(
        default=False,
        metadata={
            "help": "With trust_region 'clip' or 'none': log the KL to the old policy and the other troll/ metrics "
            "too, at the cost of scoring as 'troll' does. Does not change the training."
        },
    )
    allow_changes: bool = field(
        default=False,
        metadata={
            "help": "Resume although settings, versions or data differ from those of the checkpoint. Otherwise the "
            "differences are listed and the resume is refused."
        },
    )
    max_skipped_updates: int = field(
        default=3,
        metadata={
            "help": "An update with a non-finite loss or gradient is skipped and its batches are saved in the folder "
            "'skipped'. After this many in a run, the next one stops it. 0 stops at the first."
        },
    )
    on_invalid_reward: OnInvalidReward = field(
        default="raise",
        metadata={
            "help": "If a reward function raises or returns something other than finite numbers and None: 'raise' "
            "stops the run and names function and completion; 'mask' leaves the completions out, with advantage 0 and "
            "in no baseline, and counts them in troll/unscored_completions. None leaves a completion out in both."
        },
    )
    disable_dropout: bool = field(
        default=True,
        metadata={"help": "Disable dropout in the model. With dropout the old policy is not reproducible."},
    )

    def __new__(cls, *_: Any, **kwargs: Any) -> TROLLConfig:
        """Refuse unknown fields, with the nearest known one."""
        known = {entry.name for entry in fields(cls)}
        for name in kwargs:
            if name not in known:
                near = suggestion(name, known)
                fix = f"Did you mean {near!r}?" if near else "docs/settings.md lists all fields"
                raise InputError(f"TROLLConfig has no field {name!r}", fix)
        made: TROLLConfig = super().__new__(cls)
        return made

    def __post_init__(self) -> None:
        check_types(self)
        resolved = resolve(self.preset, **{name: getattr(self, name) for name in asdict(PRESETS["default"])})
        for name, value in asdict(resolved).items():
            setattr(self, name, value)
        for name, choices in (
            ("trust_region", TrustRegion),
            ("tail", Tail),
            ("advantage_estimator", Estimator),
            ("on_invalid_reward", OnInvalidReward),
        ):
            require_choice(name, getattr(self, name), get_args(choices))
        if self.max_skipped_updates < 0:
            raise InputError(f"max_skipped_updates must be ≥ 0, got {self.max_skipped_updates}", "The default is 3")
        check_kl_bound(self.kl_bound)
        check_regression_coef(self.regression_coef)
        check_support(self.max_support, self.tail_mass)
        self._fill_in_schedule()
        super().__post_init__()
        self._check_schedule()
        self._check_loss()
        self._check_estimator()
        check_schedules(self)

    def warn_about_settings(self) -> None:
        """Log a warning for settings that have no effect, or not the intended one."""
        if self.trust_region != "none" and not self.trust_region_can_act:
            logger.warning(
                f"trust_region={self.trust_region!r} has no effect on this schedule: each rollout is used for one "
                f"update, by the policy that generated it (steps_per_generation={self.steps_per_generation}, "
                f"num_iterations={self.num_iterations}, "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}). Set updates_per_generation=8."
            )
        if self.trust_region == "troll" and (self.epsilon != 0.2 or self.epsilon_high is not None):
            logger.warning(
                f"epsilon={self.epsilon} and epsilon_high={self.epsilon_high} have no effect with "
                f"trust_region='troll': the radius of the trust region is kl_bound={self.kl_bound}."
            )
        if self.warmup_steps > 0 and self.lr_scheduler_type in _WITHOUT_WARMUP:
            logger.warning(
                f"warmup_steps={self.warmup_steps:g} has no effect with lr_scheduler_type="
                f"{self.lr_scheduler_type.value!r}: the first update already has learning rate "
                f"{self.learning_rate:g}. Leave warmup_steps out, or set lr_scheduler_type='constant_with_warmup'."
            )
        elif 0 < self.max_steps <= self.warmup_steps:
            logger.warning(
                f"warmup_steps={self.warmup_steps} is not below max_steps={self.max_steps}: the learning rate never "
                f"reaches {self.learning_rate:g}. Set warmup_steps to about a tenth of max_steps."
            )

    @property
    def steps_per_rollout(self) -> int:
        """Number of forward and backward passes per rollout."""
        return int(self.steps_per_generation * self.num_iterations)

    @property
    def trust_region_can_act(self) -> bool:
        """Whether any update is made with a policy that differs from the one that generated the rollout."""
        return trust_region_can_act(self.gradient_accumulation_steps, self.steps_per_rollout)

    def _fill_in_schedule(self) -> None:
        """Set ``steps_per_generation`` from ``updates_per_generation``, unless TRL's own schedule is set."""
        free = self.steps_per_generation is None and self.generation_batch_size is None
        if self.updates_per_generation is None and free and self.num_iterations == 1:
            self.updates_per_generation = DEFAULT_UPDATES
        if self.updates_per_generation is None or not free:
            return
        if self.updates_per_generation < 1:
            raise InputError(
                f"updates_per_generation must be ≥ 1, got {self.updates_per_generation}", "The default is 8"
            )
        steps, rest = divmod(self.updates_per_generation * self.gradient_accumulation_steps, self.num_iterations)
        if rest or not steps:
            raise InputError(
                f"updates_per_generation={self.updates_per_generation} times "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} must be a multiple of "
                f"num_iterations={self.num_iterations}",
                f"Set updates_per_generation={self.num_iterations} or num_iterations=1",
            )
        self.steps_per_generation: Any = steps

    def _check_schedule(self) -> None:
        updates, rest = divmod(self.steps_per_rollout, self.gradient_accumulation_steps)
        actual = updates if not rest else None
        if self.updates_per_generation not in (None, actual):
            raise InputError(
                f"updates_per_generation={self.updates_per_generation} contradicts "
                f"steps_per_generation={self.steps_per_generation}, num_iterations={self.num_iterations} and "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}, whose quotient "
                "steps_per_generation * num_iterations / gradient_accumulation_steps is the number of updates",
                "Set updates_per_generation alone",
            )
        self.updates_per_generation = actual

    def _check_loss(self) -> None:
        if self.trust_region == "clip":
            return
        if self.loss_type not in LOSS_TYPES:
            raise InputError(
                f"loss_type={self.loss_type!r} bounds or reweights the ratio itself and cannot be combined with "
                f"trust_region={self.trust_region!r}; those that can are {', '.join(LOSS_TYPES)}",
                "Use loss_type='dapo', which sums over tokens as 'cispo' and 'vespo' do, 'grpo' in place of 'sapo', or "
                "trust_region='clip' for TRL's loss unchanged",
            )
        if self.delta is not None:
            raise InputError(
                f"delta={self.delta}, an upper clip of the ratio, cannot be combined with "
                f"trust_region={self.trust_region!r}",
                "Set delta=None or trust_region='clip'",
            )

    def _check_estimator(self) -> None:
        if self.advantage_estimator == "grpo":
            return
        if self.scale_rewards == "batch":
            raise InputError(
                f"scale_rewards='batch' has no effect with advantage_estimator={self.advantage_estimator!r}",
                "Leave scale_rewards out; only advantage_estimator='grpo' uses it",
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise InputError(
                f"advantage_estimator={self.advantage_estimator!r} takes one reward per sample and cannot be combined "
                f"with multi_objective_aggregation={self.multi_objective_aggregation!r}",
                "Use advantage_estimator='grpo' or multi_objective_aggregation='sum_then_normalize'",
            )
