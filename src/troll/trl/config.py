"""``TROLLConfig``: TRL's ``GRPOConfig`` and the trust region."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trl import GRPOConfig

from troll.errors import InputError, require_choice
from troll.objective import check_regression_coef, trust_region_can_act
from troll.policy import MAX_SUPPORT, TAIL, TAIL_MASS, Tail, check_support
from troll.projection import KL_BOUND, check_kl_bound
from troll.trl.bound_settings import BoundSettings, check_bounds
from troll.trl.estimators import Estimator
from troll.trl.robust.reward_validation import RewardErrors

TrustRegion = Literal["troll", "clip", "none"]
LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")  # those whose ratio is unclipped once epsilon is infinite
DEFAULT_UPDATES = 8


@dataclass
class TROLLConfig(BoundSettings, GRPOConfig):
    """Everything ``GRPOConfig`` takes, and a trust region in place of the clip.

    Two defaults differ from TRL's. A rollout is used for ``updates_per_generation=8`` updates, as by the authors: with
    one, TRL's default, neither a clip nor a trust region ever acts. A schedule of your own (``steps_per_generation``,
    ``generation_batch_size``, ``num_iterations``) is left as it is. And dropout is off: it would make the policy differ
    from itself.
    """

    trust_region: TrustRegion = field(
        default="troll",
        metadata={
            "help": "What keeps an update close to the policy that made the rollout: 'troll' projects every token's "
            "distribution onto KL <= kl_bound; 'clip' is TRL's own loss with epsilon, unchanged; 'none' is TRL's loss "
            "without clipping."
        },
    )
    kl_bound: float = field(
        default=KL_BOUND,
        metadata={
            "help": "Radius of the trust region, in nats of KL(projected || old) per token. The authors use 0.05; "
            "0.2 was faster on three of our four tasks and as robust (docs/does-it-help.md). 0 keeps the old policy, "
            "inf constrains nothing."
        },
    )
    regression_coef: float = field(
        default=1.0,
        metadata={"help": "Weight of the regression term, which pulls the network towards its projection."},
    )
    max_support: int = field(
        default=MAX_SUPPORT,
        metadata={"help": "Most tokens kept per position. 16 is worse, 256 no better."},
    )
    tail_mass: float = field(
        default=TAIL_MASS,
        metadata={"help": "Probability per position that may be dropped: tokens are kept until 1 - tail_mass."},
    )
    tail: Tail = field(
        default=TAIL,
        metadata={
            "help": "What becomes of the dropped probability: 'bucket' counts it as one more outcome, never exceeds "
            "the true KL and needs one selection per rollout; 'floor' gives a missing token 1e-12, as the authors do, "
            "which overstates the KL where the kept mass is clearly below 1 (small models at temperature 1)."
        },
    )
    updates_per_generation: int | None = field(
        default=None,
        metadata={
            "help": "Optimizer updates made on each rollout: 8 unless TRL's steps_per_generation, "
            "generation_batch_size or num_iterations is set. Sets steps_per_generation = updates_per_generation * "
            "gradient_accumulation_steps / num_iterations, so a rollout has that many batches of completions."
        },
    )
    advantage_estimator: Estimator = field(
        default="grpo",
        metadata={
            "help": "'grpo' is TRL's own (scaled as scale_rewards says); 'dr_grpo' does not divide by the standard "
            "deviation; 'rloo' leaves the sample out of its baseline; 'reinforce_pp' whitens the rewards over all "
            "tokens of the rollout; 'reinforce_pp_baseline' does so after subtracting the mean of the group."
        },
    )
    measure_kl: bool = field(
        default=False,
        metadata={
            "help": "With trust_region 'clip' or 'none': report the KL to the old policy and the other troll/ metrics "
            "too, at the cost of scoring as 'troll' does. Does not change the training."
        },
    )
    allow_changes: bool = field(
        default=False,
        metadata={
            "help": "Resume although settings, code or data differ from those the checkpoint was made with; if not, "
            "the differences are shown and the run is refused."
        },
    )
    max_skipped_updates: int = field(
        default=3,
        metadata={
            "help": "An update with a loss or gradient that is not finite is skipped, its batches written to the "
            "folder 'skipped'. After this many of them in a run, the next one stops it. 0 stops at the first."
        },
    )
    reward_errors: RewardErrors = field(
        default="stop",
        metadata={
            "help": "What becomes of a reward function that raises or returns what is no finite number: 'stop' ends "
            "the run and names it; 'mask' leaves the completions out, with advantage 0 and in no baseline, and counts "
            "them in troll/unscored_completions. None leaves a completion out in both cases."
        },
    )
    disable_dropout: bool = field(
        default=True,
        metadata={"help": "Whether to disable dropout in the model. With dropout the old policy is not reproducible."},
    )

    def __post_init__(self) -> None:
        for name, choices in (
            ("trust_region", TrustRegion),
            ("tail", Tail),
            ("advantage_estimator", Estimator),
            ("reward_errors", RewardErrors),
        ):
            require_choice(name, getattr(self, name), get_args(choices))
        if self.max_skipped_updates < 0:
            raise InputError(f"max_skipped_updates={self.max_skipped_updates}", "at least 0", "3, the default")
        check_kl_bound(self.kl_bound)
        check_regression_coef(self.regression_coef)
        check_support(self.max_support, self.tail_mass)
        self._fill_in_schedule()
        super().__post_init__()
        self._check_schedule()
        self._check_loss()
        self._check_estimator()
        check_bounds(self)

    @property
    def steps_per_rollout(self) -> int:
        """Forward and backward passes made on each rollout."""
        return int(self.steps_per_generation * self.num_iterations)

    @property
    def trust_region_can_act(self) -> bool:
        """Whether any update is made with a policy that differs from the one that made its rollout."""
        return trust_region_can_act(self.gradient_accumulation_steps, self.steps_per_rollout)

    def _fill_in_schedule(self) -> None:
        """From ``updates_per_generation``, unless TRL's own schedule is set."""
        free = self.steps_per_generation is None and self.generation_batch_size is None
        if self.updates_per_generation is None and free and self.num_iterations == 1:
            self.updates_per_generation = DEFAULT_UPDATES
        if self.updates_per_generation is None or not free:
            return
        if self.updates_per_generation < 1:
            raise InputError(f"updates_per_generation={self.updates_per_generation}", "at least 1", "8, the default")
        steps, rest = divmod(self.updates_per_generation * self.gradient_accumulation_steps, self.num_iterations)
        if rest or not steps:
            raise InputError(
                f"updates_per_generation={self.updates_per_generation} with num_iterations={self.num_iterations} and "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}",
                "updates that go evenly into the passes over a rollout",
                f"updates_per_generation={self.num_iterations}, or num_iterations=1",
            )
        self.steps_per_generation: Any = steps

    def _check_schedule(self) -> None:
        updates, rest = divmod(self.steps_per_rollout, self.gradient_accumulation_steps)
        actual = updates if not rest else None
        if self.updates_per_generation not in (None, actual):
            raise InputError(
                f"updates_per_generation={self.updates_per_generation} with "
                f"steps_per_generation={self.steps_per_generation}, num_iterations={self.num_iterations} and "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}",
                "a schedule that agrees: steps_per_generation * num_iterations / gradient_accumulation_steps updates",
                "setting updates_per_generation alone",
            )
        self.updates_per_generation = actual

    def _check_loss(self) -> None:
        if self.trust_region == "clip":
            return
        if self.loss_type not in LOSS_TYPES:
            raise InputError(
                f"loss_type={self.loss_type!r} with trust_region={self.trust_region!r}",
                f"one of {', '.join(LOSS_TYPES)}: other losses of TRL bound or reweigh the ratio in a way of their own",
                "loss_type='dapo', which sums over tokens as 'cispo' and 'vespo' do, or 'grpo' for 'sapo'; "
                "or trust_region='clip' for TRL's loss as it is",
            )
        if self.delta is not None:
            raise InputError(
                f"delta={self.delta} with trust_region={self.trust_region!r}",
                "no upper clip of the ratio: the projection bounds the policy already",
                "delta=None, or trust_region='clip'",
            )

    def _check_estimator(self) -> None:
        if self.advantage_estimator == "grpo":
            return
        if self.scale_rewards == "batch":
            raise InputError(
                f"scale_rewards='batch' with advantage_estimator={self.advantage_estimator!r}",
                "an estimator that scales by the standard deviation of the batch, or not at all",
                "leaving scale_rewards out: only advantage_estimator='grpo' reads it",
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise InputError(
                f"multi_objective_aggregation={self.multi_objective_aggregation!r} with "
                f"advantage_estimator={self.advantage_estimator!r}",
                "'sum_then_normalize': this estimator takes one reward per sample",
                "advantage_estimator='grpo'",
            )
