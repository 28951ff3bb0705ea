"""``TROLLTrainer``: TRL's ``GRPOTrainer`` with a trust region in place of the clip."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl import GRPOTrainer

from troll.deferred import run_checks
from troll.errors import InputError
from troll.modeling import check_dropout
from troll.objective import Aggregation, TokenStats, aggregate, summarise
from troll.objective.bounds import Measured
from troll.trl import startup_checks as startup
from troll.trl.config import TROLLConfig
from troll.trl.estimators import estimate
from troll.trl.forward import Pass, Scorer
from troll.trl.generation import token_by_token
from troll.trl.passes import OldPolicyRecorder, ProjectedScorer
from troll.trl.region_state import Region
from troll.trl.robust import rollout_state as rollout
from troll.trl.robust.checkpoints import Checkpointed
from troll.trl.robust.guards import Guarded
from troll.trl.robust.skipped_batches import REWARDS

logger = get_logger(__name__)


class TROLLTrainer(Checkpointed, Guarded, GRPOTrainer):
    """Train as with ``GRPOTrainer``, and keep every token's distribution within ``kl_bound`` of the rollout's.

    Takes what ``GRPOTrainer`` takes, with ``args`` a ``TROLLConfig``; does what it does, with the same methods,
    callbacks and checkpoints.

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

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: TROLLConfig | None = None, *rest: Any, **named: Any
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = TROLLConfig(f"{name.split('/')[-1]}-TROLL")
        startup.check_args(args)
        startup.choose_attention()
        self.region = Region(args)
        self._pass: Pass | None = None
        self._rewards: Tensor | None = None
        super().__init__(model, reward_funcs, args, *rest, **named)
        if args.trust_region != "clip":
            self.epsilon_low = self.epsilon_high = math.inf  # TRL's clip becomes the identity
        startup.check_dataset(self)
        if args.trust_region == "troll":
            check_dropout(
                self.model,
                "disable_dropout=True, the default; or 0.0 for it in the configuration of the model or the adapter",
            )
        startup.say_what_acts(args)

    # ------------------------------------------------------------------ the five wrapped methods of TRL

    def _generate_single_turn(self, *args: Any, **named: Any) -> Any:
        elsewhere = self.use_vllm or self.use_transformers_continuous_batching
        with nullcontext() if elsewhere else token_by_token(self.accelerator):
            return super()._generate_single_turn(*args, **named)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        record = OldPolicyRecorder(self.model, self.args)
        with self._scored_by(record if self._needs_old_policy else None):
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self._needs_old_policy:
            output[rollout.OLD_POLICY] = record.of(output["old_per_token_logps"])
            output |= self._bound_mean(output)
        if self.args.advantage_estimator != "grpo":
            output["advantages"] = self._advantages(_loss_mask(output))
        if self._needs_old_policy and self.args.scale_regression:
            output[rollout.ADVANTAGE_SIZE] = self._advantage_size(output["advantages"], _loss_mask(output))
        if self._mode == "train":
            size = len(output["completion_ids"])
            output[REWARDS] = self._weighed_rewards[self.accelerator.process_index * size :][:size]
            self.region.begin_rollout()
        return output

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *rest: Any, **named: Any
    ) -> Any:
        scoring = self._pass if self._pass is not None and self._pass.wants(model) else None
        if scoring is not None:
            model = Scorer(model, scoring, logits_to_keep)
        result = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *rest, **named
        )
        if scoring is not None:
            scoring.finish(result[0])
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        old = inputs.get(rollout.OLD_POLICY)
        if old is None:
            loss: Tensor = super()._compute_loss(model, inputs)
        else:
            mask = _loss_mask(inputs)
            bound = self.region.bound, inputs.get(rollout.BOUND_MEAN)
            step = ProjectedScorer(old, inputs["old_per_token_logps"], mask, self.args, *bound)
            with self._scored_by(step):
                loss = super()._compute_loss(model, inputs)
            if step.regression is not None:
                loss = loss + self._regression_coef(inputs) * self._aggregate(step.regression, mask, inputs)
            try:
                run_checks(step.checks)
            except InputError as error:
                self._forgive(error, step)
            self._report(step, inputs)
        if self.args.trust_region != "clip":  # always zero without a clip
            for name in [name for name in self._metrics[self._mode] if name.startswith("clip_ratio/")]:
                del self._metrics[self._mode][name]
        return loss

    def _calculate_rewards(self, *args: Any, **named: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*args, **named)
        self._rewards = rewards
        return rewards

    # ------------------------------------------------------------------ what they need

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
        self._pass = scoring
        try:
            yield
        finally:
            self._pass = None

    def _aggregate(self, values: Tensor, mask: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Values per token → their part of the loss, weighed as TRL weighs its own."""
        training = self.model.training
        accumulation = self.current_gradient_accumulation_steps if training else 1
        if self.loss_type == "dapo":  # the tokens of the whole rollout, shared out among processes and updates
            total = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
            if training:
                total = total * accumulation / self.args.steps_per_generation
            return aggregate(values, mask, "token_mean", total=total)
        if self.loss_type == "bnpo":
            return aggregate(values, mask, "token_mean") / accumulation
        rules: dict[str, Aggregation] = {"grpo": "sequence_mean", "dr_grpo": "constant", "luspo": "sequence_sum"}
        longest = self.max_completion_length if self.loss_type == "dr_grpo" else None
        return aggregate(values, mask, rules[self.loss_type], max_length=longest, total=len(values)) / accumulation

    @property
    def _weighed_rewards(self) -> Tensor:
        """Of each sample of all processes, weighed and added; NaN where no function could score it."""
        rewards, weights = self._rewards, self.reward_weights
        assert rewards is not None
        unscorable = rewards.isnan().all(1)
        weighed: Tensor = (rewards * weights.to(rewards.device)).nansum(1).masked_fill(unscorable, math.nan)
        return weighed

    def _advantages(self, loss_mask: Tensor) -> Tensor:
        """Advantages of this process's samples, from the rewards of all."""
        masks = self._gather(loss_mask)
        size = self.num_generations if self.model.training else self.num_generations_eval
        advantages = estimate(self.args.advantage_estimator, self._weighed_rewards, size, masks)
        shown = advantages if advantages.dim() == 1 else advantages.gather(1, masks.int().argmax(1, keepdim=True))[:, 0]
        for _ in range(min(len(shown), len(self._logs["advantages"]))):  # TRL has logged its own
            self._logs["advantages"].pop()
        self._logs["advantages"].extend(shown.tolist())
        B, T = loss_mask.shape
        mine = advantages[self.accelerator.process_index * B :][:B]
        return mine if mine.dim() == 1 else mine[:, :T]

    def _bound_mean(self, output: dict[str, Any]) -> dict[str, Tensor]:
        """What the bounds of a rollout are relative to, if anything: a mean over the tokens of all processes."""
        sums = self.region.sums(output[rollout.OLD_POLICY], _loss_mask(output))
        return {} if sums is None else {rollout.BOUND_MEAN: self._quotient(sums)}

    def _advantage_size(self, advantages: Tensor, loss_mask: Tensor) -> Tensor:
        """Mean |A| over the tokens of all processes, []."""
        sizes = advantages.abs() if advantages.dim() == 2 else advantages.abs().unsqueeze(1).expand(loss_mask.shape)
        return self._quotient(torch.stack([torch.where(loss_mask, sizes, 0.0).sum(), loss_mask.sum().to(sizes.dtype)]))

    def _quotient(self, sums: Tensor) -> Tensor:
        """Of two sums over all processes, [2] → []."""
        if self.accelerator.num_processes > 1:
            sums = self.accelerator.reduce(sums, reduction="sum")
        return sums[0] / sums[1].clamp(min=1)

    def _regression_coef(self, inputs: dict[str, Any]) -> float | Tensor:
        """α, on the scale of the advantages if it is to be."""
        size = inputs.get(rollout.ADVANTAGE_SIZE)
        return self.region.regression_coef if size is None else self.region.regression_coef * size

    def _gather(self, x: Tensor) -> Tensor:
        """[B, T, ...] of every process, padded with zeros to the longest T, one after another."""
        if self.accelerator.num_processes == 1:
            return x
        padded = self.accelerator.pad_across_processes(x, dim=1).to(x.dtype)  # where it pads, bool becomes integer
        gathered: Tensor = self.accelerator.gather(padded)
        return gathered

    def _report(self, step: ProjectedScorer, inputs: dict[str, Any]) -> None:
        """Metrics over the tokens of all processes."""
        assert step.stats is not None
        *columns, counted = self._gather(step.stats).unbind(-1)
        stats = dict(zip(step.names, columns, strict=True))
        self.observe_tokens(stats, counted > 0, inputs)
        metrics = summarise(stats, counted > 0)
        if rollout.ADVANTAGE_SIZE in inputs:
            metrics["regression_coef"] = torch.as_tensor(self._regression_coef(inputs))
        dtype = step.stats.dtype
        *values, tokens = torch.stack([x.to(dtype) for x in (*metrics.values(), counted.sum())]).tolist()
        found = dict(zip(metrics, values, strict=True))
        if self._update is not None and self.region.now:
            self._update.measured.append(Measured(tokens, found["projected_fraction"], found["kl_before/mean"]))
        for name, value in {**self.region.now, **found}.items():
            self._metrics[self._mode][f"troll/{name}"].append(value)

    def observe_tokens(self, stats: TokenStats, counted: Tensor, inputs: dict[str, Any]) -> None:
        """What happened to every token of a forward pass; to be overridden, does nothing here.

        Args:
            stats: [B, T] numbers per token by name (``troll.objective.token_stats``), of all processes.
            counted: [B, T] which of them count.
            inputs: the batch of this process as TRL has it.
        """

    def log(self, logs: dict[str, float], *args: Any, **named: Any) -> None:
        """As TRL, which averages over forward passes; of our extremes the extreme, of our counts the sum."""
        sums = dict.fromkeys(("unconverged_tokens", "unscored_completions"), sum)
        reductions: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, **sums}
        for name, values in self._metrics[self._mode].items():
            reduce = reductions.get(name.rsplit("/")[-1]) if name.startswith("troll/") else None
            if reduce is not None and values:
                values[:] = [reduce(values)]
        super().log(logs, *args, **named)


def _loss_mask(batch: dict[str, Any]) -> Tensor:
    """[B, T] completion tokens that count: tokens of tools do not."""
    mask: Tensor = batch["completion_mask"]
    return (mask * batch["tool_mask"] if "tool_mask" in batch else mask).bool()
