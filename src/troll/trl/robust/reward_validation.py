"""Invalid rewards in training: raise with the function and the completion, or mask the completion and count it.

TRL treats NaN as None, gives every advantage of a group 0 if one reward is infinite, and stops with the reward
function's bare exception. Here the functions are wrapped during TRL's call (``reward_checks``), and all processes
handle invalid rewards together.
"""

from __future__ import annotations

import math
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer

from troll.errors import InputError, TrainingError
from troll.trl.robust.guards import GuardState
from troll.trl.robust.reward_checks import Fault, RewardChecks

logger = get_logger(__name__)


class RewardValidation(GRPOTrainer):
    """Raises on invalid rewards, or masks them."""

    guards: GuardState
    reward_funcs: list[Any]
    _reported_faults: set[tuple[str, str]]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Rewards as TRL computes them; NaN in all functions of a completion with an invalid one."""
        raises = self.args.on_invalid_reward == "raise"
        checks = RewardChecks(self.reward_funcs, self.reward_func_names, locate=raises)
        unwrapped, self.reward_funcs = self.reward_funcs, checks.functions
        try:
            rewards: Tensor = super()._calculate_rewards(*args, **kwargs)
        finally:
            self.reward_funcs = unwrapped
        invalid = checks.invalid(rewards)
        if bool(invalid.any()):
            if raises:
                raise self._first_fault(checks, rewards)
            for kind, error in checks.faults:
                if kind not in self._reported_faults:
                    self._reported_faults.add(kind)
                    logger.warning(
                        f"Masked, as will be all rewards like it (counted in troll/unscored_completions): "
                        f"{error.problem}.",
                        main_process_only=False,
                    )
            rewards[invalid] = math.nan  # in place: the tensor is also what the estimators of advantages read
        unscored = int(rewards.isnan().all(1).sum())
        if unscored:
            metrics = self._metrics["train" if self.model.training else "eval"]
            metrics["troll/unscored_completions"].append(float(unscored))
        if unscored == len(rewards) and self.model.training:
            self._nothing_scored(unscored, checks.faults)
        return rewards

    def _first_fault(self, checks: RewardChecks, rewards: Tensor) -> InputError:
        """The first fault of this process, or of another one."""
        faults = [(x.error.problem, x.error.fix) for x in checks.faults[:1]]
        if self.accelerator.num_processes > 1:
            faults = gather_object(faults)
        return (
            checks.faults[0].error if checks.faults else InputError(*faults[0]) if faults else checks.explain(rewards)
        )

    def _nothing_scored(self, completions: int, faults: list[Fault]) -> None:
        """Raise for a rollout without any reward; with masking, only after ``max_skipped_updates`` of them."""
        self.guards.unscored_rollouts += 1
        count, most = self.guards.unscored_rollouts, self.args.max_skipped_updates
        if self.args.on_invalid_reward == "raise" or count > most:
            reason = f" ({faults[0].error.problem})" if faults else ""
            raise TrainingError(
                f"None of the {completions} completions of a rollout has a reward{reason}; such rollouts: {count}",
                "Check what the reward functions return, and whether the services they call still answer",
            )
