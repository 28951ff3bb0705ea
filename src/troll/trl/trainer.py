"""How TROLL hooks into TRL: five methods of ``GRPOTrainer``, wrapped and never copied.

=======================================  ===============================================================================
``_generate_and_score_completions``      A rollout is generated and scored by TRL; while TRL scores it, the sparse old
                                         policy π_old of every token is recorded and attached to the batch.
``_get_per_token_logps_and_entropies``   TRL's scoring function. Our pass (``passes``) runs inside its forward: it
                                         records π_old, or returns projected log-probabilities.
``_compute_loss``                        TRL's loss on the ratio of the projected policy, plus α times the regression.
``_calculate_rewards``                   Keeps the rewards, for the advantage estimators that TRL does not have.
``_generate_single_turn``                Generation with faster decoding; same tokens.
=======================================  ===============================================================================

TRL's clip becomes the identity (ε_low = ε_high = ∞). Aggregation, masks, reference KL, importance-sampling correction,
tools, vision and logging are TRL's own. ``TROLLTrainer`` combines this with ``robust``: checkpoints, resume, guards.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl import GRPOTrainer

from troll.deferred import run_checks
from troll.errors import InputError
from troll.modeling import check_dropout, disable_broken_cudnn_attention, fast_decoding
from troll.objective import Aggregation, TokenStats, aggregate, summarise
from troll.objective.bounds import Measured
from troll.trl.checks import check_datasets, check_rollout_size
from troll.trl.config import TROLLConfig
from troll.trl.estimators import estimate
from troll.trl.metrics import print_important_metrics, reduce_passes
from troll.trl.passes import (
    ADVANTAGE_SIZE,
    BOUND_MEAN,
    OLD_POLICY,
    REWARDS,
    OldPolicyRecorder,
    Pass,
    ProjectedScorer,
    Scorer,
)
from troll.trl.robust.checkpoints import ExactResume, SafeCheckpoints
from troll.trl.robust.guards import SkipInvalidUpdates
from troll.trl.robust.oom_retry import OOMRetry
from troll.trl.robust.reward_validation import RewardValidation
from troll.trl.trust_region import ObserveUpdates, TrustRegionState

logger = get_logger(__name__)


class TrustRegionTrainer(GRPOTrainer):
    """``GRPOTrainer`` with a KL trust region instead of the clip."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: TROLLConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *rest: Any,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = TROLLConfig(f"{name.split('/')[-1]}-TROLL")
        elif not isinstance(args, TROLLConfig):
            raise InputError(f"args must be a TROLLConfig, got a {type(args).__name__}", "Use TROLLConfig(...)")
        check_datasets(model, reward_funcs, args, train_dataset, eval_dataset, *rest, **kwargs)
        if (workaround := disable_broken_cudnn_attention()) is not None:
            logger.warning(workaround)
        self.region = TrustRegionState(args)
        self._pass: Pass | None = None
        self._rewards: Tensor | None = None
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, *rest, **kwargs)
        if args.trust_region != "clip":
            self.epsilon_low = self.epsilon_high = math.inf  # TRL's clip becomes the identity
        check_rollout_size(args, self.train_dataset)
        if args.trust_region == "troll":
            check_dropout(
                self.model,
                "Set disable_dropout=True, the default; if dropout is still on, set it to 0.0 in the configuration of "
                "the model or the adapter",
            )
        self.add_callback(ObserveUpdates(self.region))
        print_important_metrics(self)
        args.warn_about_settings()

    # ------------------------------------------------------------------ the five wrapped methods of TRL

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        other_engine = self.use_vllm or self.use_transformers_continuous_batching
        with nullcontext() if other_engine else fast_decoding(self.accelerator):
            return super()._generate_single_turn(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        recorder = OldPolicyRecorder(self.model, self.args)
        with self._scored_by(recorder if self._needs_old_policy else None):
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self._needs_old_policy:
            output[OLD_POLICY] = recorder.of(output["old_per_token_logps"])
            output |= self._bound_mean(output)
        if self.args.advantage_estimator != "grpo":
            output["advantages"] = self._advantages(_loss_mask(output))
        if self._needs_old_policy and self.args.scale_regression:
            output[ADVANTAGE_SIZE] = self._advantage_size(output["advantages"], _loss_mask(output))
        if self._mode == "train":
            size = len(output["completion_ids"])
            output[REWARDS] = self._weighted_rewards[self.accelerator.process_index * size :][:size]
            self.region.begin_rollout()
        return output

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *rest: Any, **kwargs: Any
    ) -> Any:
        scoring = self._pass if self._pass is not None and self._pass.wants(model) else None
        if scoring is not None:
            model = Scorer(model, scoring, logits_to_keep)
        result = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *rest, **kwargs
        )
        if scoring is not None:
            scoring.finish(result[0])
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        old = inputs.get(OLD_POLICY)
        if old is None:
            loss: Tensor = super()._compute_loss(model, inputs)
        else:
            mask = _loss_mask(inputs)
            bound = self.region.bound, inputs.get(BOUND_MEAN)
            step = ProjectedScorer(old, inputs["old_per_token_logps"], mask, self.args, *bound)
            with self._scored_by(step):
                loss = super()._compute_loss(model, inputs)
            if step.regression is not None:
                loss = loss + self._regression_coef(inputs) * self._aggregate(step.regression, mask, inputs)
            try:
                run_checks(step.checks)
            except InputError as error:
                self._on_failed_check(error, step)
            self._report(step, inputs)
        if self.args.trust_region != "clip":  # always zero without a clip
            for name in [name for name in self._metrics[self._mode] if name.startswith("clip_ratio/")]:
                del self._metrics[self._mode][name]
        return loss

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*args, **kwargs)
        self._rewards = rewards
        return rewards

    # ------------------------------------------------------------------ scoring and the loss

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _needs_old_policy(self) -> bool:
        """Whether TRL scores rollouts on this schedule, and the old policy is used."""
        scores = self.args.trust_region_can_act or (self.use_vllm and self.vllm_importance_sampling_correction)
        return bool(scores and (self.args.trust_region == "troll" or self.args.measure_kl))

    @contextmanager
    def _scored_by(self, scoring: Pass | None) -> Iterator[None]:
        """Inside, TRL's scoring function runs this pass."""
        self._pass = scoring
        try:
            yield
        finally:
            self._pass = None

    def _aggregate(self, values: Tensor, mask: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Reduce values per token to a loss as TRL reduces its own."""
        training = self.model.training
        accumulation = self.current_gradient_accumulation_steps if training else 1
        if self.loss_type == "dapo":  # over the tokens of the whole rollout, of all processes and updates
            total = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
            if training:
                total = total * accumulation / self.args.steps_per_generation
            return aggregate(values, mask, "token_mean", total=total)
        if self.loss_type == "bnpo":
            return aggregate(values, mask, "token_mean") / accumulation
        rules: dict[str, Aggregation] = {"grpo": "sequence_mean", "dr_grpo": "constant", "luspo": "sequence_sum"}
        longest = self.max_completion_length if self.loss_type == "dr_grpo" else None
        return aggregate(values, mask, rules[self.loss_type], max_length=longest, total=len(values)) / accumulation

    def _regression_coef(self, inputs: dict[str, Any]) -> float | Tensor:
        """α, times the mean |A| of the rollout with ``scale_regression``."""
        size = inputs.get(ADVANTAGE_SIZE)
        return self.region.regression_coef if size is None else self.region.regression_coef * size

    def _on_failed_check(self, error: InputError, step: ProjectedScorer) -> None:
        """Handle invalid numbers in a forward pass: raise. ``SkipInvalidUpdates`` skips the update instead."""
        raise error

    # ------------------------------------------------------------------ rewards, advantages, means over a rollout

    @property
    def _weighted_rewards(self) -> Tensor:
        """[B] weighted sum of the rewards of each sample of all processes; NaN if no function scored it."""
        rewards, weights = self._rewards, self.reward_weights
        assert rewards is not None
        unscored = rewards.isnan().all(1)
        weighted: Tensor = (rewards * weights.to(rewards.device)).nansum(1).masked_fill(unscored, math.nan)
        return weighted

    def _advantages(self, loss_mask: Tensor) -> Tensor:
        """Advantages of this process's samples, from the rewards of all processes."""
        masks = self._gather(loss_mask)
        size = self.num_generations if self.model.training else self.num_generations_eval
        advantages = estimate(self.args.advantage_estimator, self._weighted_rewards, size, masks)
        shown = advantages if advantages.dim() == 1 else advantages.gather(1, masks.int().argmax(1, keepdim=True))[:, 0]
        for _ in range(min(len(shown), len(self._logs["advantages"]))):  # TRL has logged its own
            self._logs["advantages"].pop()
        self._logs["advantages"].extend(shown.tolist())
        B, T = loss_mask.shape
        mine = advantages[self.accelerator.process_index * B :][:B]
        return mine if mine.dim() == 1 else mine[:, :T]

    def _bound_mean(self, output: dict[str, Any]) -> dict[str, Tensor]:
        """Mean over the rollout that the token bounds are relative to; empty if they need none."""
        sums = self.region.sums(output[OLD_POLICY], _loss_mask(output))
        return {} if sums is None else {BOUND_MEAN: self._quotient(sums)}

    def _advantage_size(self, advantages: Tensor, loss_mask: Tensor) -> Tensor:
        """Mean |A| over the tokens of all processes, []."""
        sizes = advantages.abs() if advantages.dim() == 2 else advantages.abs().unsqueeze(1).expand(loss_mask.shape)
        return self._quotient(torch.stack([torch.where(loss_mask, sizes, 0.0).sum(), loss_mask.sum().to(sizes.dtype)]))

    def _quotient(self, sums: Tensor) -> Tensor:
        """Numerator over denominator, each summed over all processes, [2] → []."""
        if self.accelerator.num_processes > 1:
            sums = self.accelerator.reduce(sums, reduction="sum")
        return sums[0] / sums[1].clamp(min=1)

    def _gather(self, x: Tensor) -> Tensor:
        """[B, T, ...] of all processes, padded with zeros to the longest T and concatenated."""
        if self.accelerator.num_processes == 1:
            return x
        padded = self.accelerator.pad_across_processes(x, dim=1).to(x.dtype)  # padding turns bool into integers
        gathered: Tensor = self.accelerator.gather(padded)
        return gathered

    # ------------------------------------------------------------------ metrics

    def _report(self, step: ProjectedScorer, inputs: dict[str, Any]) -> None:
        """Add the metrics of a forward pass, over the tokens of all processes, to TRL's."""
        assert step.stats is not None
        *columns, counted = self._gather(step.stats).unbind(-1)
        stats = dict(zip(step.names, columns, strict=True))
        self.observe_tokens(stats, counted > 0, inputs)
        metrics = summarise(stats, counted > 0)
        if ADVANTAGE_SIZE in inputs:
            metrics["regression_coef"] = torch.as_tensor(self._regression_coef(inputs))
        dtype = step.stats.dtype
        *numbers, tokens = torch.stack([x.to(dtype) for x in (*metrics.values(), counted.sum())]).tolist()
        values = dict(zip(metrics, numbers, strict=True))
        if self._mode == "train" and self.region.now:
            self.region.measured.append(Measured(tokens, values["projected_fraction"], values["kl_before/mean"]))
        for name, value in {**self.region.now, **values}.items():
            self._metrics[self._mode][f"troll/{name}"].append(value)

    def observe_tokens(self, stats: TokenStats, counted: Tensor, inputs: dict[str, Any]) -> None:
        """Hook for subclasses, called with the statistics of every token of a forward pass.

        Args:
            stats: [B, T] statistics per token by name (``troll.objective.token_stats``), of all processes.
            counted: [B, T] bool, the tokens that count.
            inputs: TRL's batch of this process.
        """

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as TRL, which averages over forward passes; maxima, minima and counts are reduced as such."""
        reduce_passes(self._metrics[self._mode])
        super().log(logs, *args, **kwargs)


def _loss_mask(batch: dict[str, Any]) -> Tensor:
    """[B, T] completion tokens that count; tokens written by tools do not."""
    mask: Tensor = batch["completion_mask"]
    return (mask * batch["tool_mask"] if "tool_mask" in batch else mask).bool()


class TROLLTrainer(SafeCheckpoints, ExactResume, SkipInvalidUpdates, OOMRetry, RewardValidation, TrustRegionTrainer):
    """Train as with ``GRPOTrainer``, and keep every token's distribution within ``kl_bound`` of the rollout's.

    Same arguments, methods, callbacks and checkpoints as ``GRPOTrainer``; ``args`` is a ``TROLLConfig``.

    >>> from troll.trl import TROLLConfig, TROLLTrainer                            # doctest: +SKIP
    >>> trainer = TROLLTrainer(
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     reward_funcs=accuracy_reward,
    ...     args=TROLLConfig("out", kl_bound=0.2),
    ...     train_dataset=dataset,
    ... )
    >>> trainer.train()
    """

    _tag_names = ["trl", "troll"]  # noqa: RUF012, as in TRL
    _name = "TROLL"
    _paper = {  # noqa: RUF012, as in TRL
        "title": "TROLL: Trust Regions improve Reinforcement Learning for Large Language Models",
        "id": "2510.03817",
        "citation": textwrap.dedent("""\
            @article{becker2025troll,
                title        = {{TROLL: Trust Regions improve Reinforcement Learning for Large Language Models}},
                author       = {P. Becker and N. Freymuth and S. Thilges and F. Otto and G. Neumann},
                year         = 2025,
                eprint       = {arXiv:2510.03817},
            }"""),
    }
