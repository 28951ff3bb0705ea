"""The loss of an update: verl's logits → projected log-ratios → verl's ``ppo_loss`` over them.

verl calls the loss function of an update twice per micro-batch: first with the logits, through the hook it has for
distillation, then with the outputs of that hook. ``TrustRegionLoss`` takes both calls. The second one calls verl's
``ppo_loss``, which adds the entropy bonus and the reference KL, and finds ``troll_policy_loss`` by its name
(``loss_mode=troll``). That function takes the projected ratios from a context variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from troll.deferred import DeferredCheck, DeferredChecks, run_checks
from troll.errors import InputError
from troll.objective import constrain, ratios, reduction, summarise, token_loss, token_stats
from troll.policy import SparsePolicy
from troll.verl.config import LOSS_MODE, MODEL_TYPE, TrollPolicyLossConfig
from troll.verl.transport import Positions, read

PREFIX = "actor/troll/"
_RATIO, _REGRESSION, _STAT = "troll_log_ratio", "troll_regression", "troll_stat/"

Score = Callable[[Tensor, SparsePolicy, Tensor], SparsePolicy]
"""Logits [T, V] (or a shard of them), the old policy [T] and the next tokens [T] → the proposal [T]."""


class _Completions(NamedTuple):
    """What ``troll_policy_loss`` needs besides verl's arguments, per token of the completions, [B, R]."""

    log_ratio: Tensor
    regression: Tensor


_current: ContextVar[_Completions] = ContextVar("troll_completions")


@contextmanager
def _using(completions: _Completions) -> Iterator[None]:
    token = _current.set(completions)
    try:
        yield
    finally:
        _current.reset(token)


@register_policy_loss(LOSS_MODE)  # type: ignore[untyped-decorator]
def troll_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """The negative of equation (8), aggregated by verl: −w π(o)/π_old(o) A + α KL(π̃ ‖ ⌊π⌋), all [B, R]."""
    completions = _current.get(None)
    if completions is None:
        raise InputError(
            f"policy_loss.loss_mode={LOSS_MODE} needs the engine {MODEL_TYPE}, which computes the projected ratios",
            f"Use +trust_region=troll, which sets all keys, or set actor_rollout_ref.model.model_type={MODEL_TYPE}",
        )
    options: TrollPolicyLossConfig = config.policy_loss
    losses, _ = token_loss(
        completions.log_ratio,
        advantages,
        response_mask,
        regression=completions.regression,
        regression_coef=options.regression_coef,
        importance_weights=rollout_is_weights,
        importance_sampling_level=options.importance_sampling_level,  # type: ignore[arg-type]
    )
    kl = torch.where(response_mask, old_log_prob - log_prob.detach(), 0.0).sum() / response_mask.sum().clamp(min=1)
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {"actor/ppo_kl": kl.item()}


class TrustRegionLoss:
    """Stands in for verl's loss function on one mini-batch.

    Args:
        loss_function: verl's, ``partial(ppo_loss, config=…)``.
        slots: K, the most tokens kept per position.
        score: logits → the proposal.
        local: values of all T positions → of the positions whose logits this process has.
    """

    def __init__(self, loss_function: Any, slots: int, score: Score, local: Callable[[Tensor], Tensor]) -> None:
        self._loss_function = loss_function
        self._options = options_of(loss_function)
        self._slots, self._score, self._local = slots, score, local
        self._checks: DeferredChecks = []

    def __call__(
        self,
        *,
        data: Any,
        student_logits: Tensor | None = None,
        model_output: dict[str, Tensor] | None = None,
        dp_group: Any = None,
    ) -> Any:
        """With ``student_logits``: the outputs of verl's hook. With ``model_output``: the loss and the metrics."""
        if student_logits is not None:
            return self._project(student_logits, data)
        assert model_output is not None
        return self._loss(model_output, data, dp_group)

    def _project(self, logits: Tensor, data: Any) -> dict[str, Tensor]:
        """Logits [1, T, V] → values per position, each [1, T]."""
        options, positions = self._options, Positions.of(data)
        with torch.autocast(logits.device.type, enabled=False):
            old = read(data, positions, self._slots, logits.shape[-1])._map(self._local)
            sampled, counted = self._local(positions.sampled), self._local(positions.counted)
            self._checks.append(DeferredCheck(((old.sampled != sampled) & counted).any(), _refuse_other_tokens))
            proposal = self._score(logits[0], old, sampled)
            step = constrain(
                proposal,
                old,
                options.kl_bound,
                counted,
                tail=options.tail,  # type: ignore[arg-type]
                max_lost_mass=options.max_lost_mass,
                deferred=self._checks,
            )
            ratio = step.log_ratio.detach().exp()
            stats = token_stats(proposal, old, ratio, step.projection, step.regression)
        output = {
            "log_probs": torch.where(counted, proposal.sampled_log_probs, 0.0),
            _RATIO: step.log_ratio,
            _REGRESSION: step.regression,
            **{_STAT + name: x for name, x in stats.items()},
        }
        return {name: x.unsqueeze(0) for name, x in output.items()}

    def _loss(self, model_output: dict[str, Tensor], data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
        completions = _Completions(*_of_completions(model_output, [_RATIO, _REGRESSION], data))
        with _using(completions):
            loss, metrics = self._loss_function(model_output=model_output, data=data, dp_group=dp_group)
        run_checks(self._checks)
        self._checks = []
        return loss, metrics | _metrics(model_output, data, self._options)


def _refuse_other_tokens() -> None:
    raise InputError(
        "the old policy in this batch was recorded for other tokens: a batch was reordered without all of its fields",
        "Please report this",
    )


def options_of(loss_function: Any) -> TrollPolicyLossConfig:
    """The trust region's settings in verl's loss function; any other loss is refused."""
    if not (isinstance(loss_function, partial) and loss_function.func is ppo_loss):
        raise InputError(
            f"the engine {MODEL_TYPE} supports verl's ppo_loss only, got {loss_function!r}",
            "Set actor_rollout_ref.model.model_type=language_model for distillation, fine-tuning and other losses",
        )
    options = loss_function.keywords["config"].policy_loss
    if not isinstance(options, TrollPolicyLossConfig):
        raise InputError(
            f"the engine {MODEL_TYPE} needs policy_loss.loss_mode={LOSS_MODE}, got {options.loss_mode}",
            "Use +trust_region=troll, which sets all keys, or set model_type=language_model for verl's losses",
        )
    return options


def _of_completions(model_output: dict[str, Tensor], names: list[str], data: Any) -> tuple[Tensor, ...]:
    """Values of all positions → of the tokens of the completions, each [B, R].

    verl's function synchronises with the device and loops over the sequences, so it is called once for all names.
    """
    columns = torch.stack([model_output[name].values() for name in names], dim=-1)
    return torch.unbind(no_padding_2_padding(columns, data), dim=-1)


@torch.no_grad()
def _metrics(model_output: dict[str, Tensor], data: Any, options: TrollPolicyLossConfig) -> dict[str, Metric]:
    """The metrics of ``troll.objective.metrics`` for one micro-batch, in the form in which verl reduces them.

    verl adds up the values of an update's micro-batches (``SUM``) or averages them (``MEAN``), and averages over
    processes. A mean over tokens or sequences is given as this micro-batch's share of the sum over all processes, so
    that the result is exact. A percentile, and the mean over projected tokens alone, are averaged over micro-batches
    and processes, as in TRL over forward passes.
    """
    names = [name for name in model_output if name.startswith(_STAT)]
    log_ratio, *columns = _of_completions(model_output, [_RATIO, *names], data)
    stats = {name.removeprefix(_STAT): x for name, x in zip(names, columns, strict=True)}
    counted = data["response_mask"].to_padded_tensor(padding=0).bool()
    stats["ratio"] = ratios(log_ratio, counted, options.importance_sampling_level)  # type: ignore[arg-type]
    metrics = summarise(stats, counted)
    metrics["ratio/min"] = torch.where(counted.any(), metrics["ratio/min"], 1.0)  # 0 would be the minimum of the update
    processes = data["dp_size"]
    of_tokens = processes * counted.sum() / max(data["batch_num_tokens"], 1)
    of_sequences = processes * counted.any(-1).sum() / data["global_batch_size"]
    kinds, values = [], []
    for name, value in metrics.items():
        kind, factor = AggregationType(reduction(name)), 1.0
        if kind is AggregationType.SUM:
            factor = processes
        elif kind is AggregationType.MEAN and not _per_pass(name):
            kind, factor = AggregationType.SUM, of_sequences if name.startswith("sequence_kl") else of_tokens
        kinds.append(kind)
        values.append(factor * value.double())
    return {
        PREFIX + name: Metric(kind, value)
        for name, kind, value in zip(metrics, kinds, torch.stack(values).tolist(), strict=True)
    }


def _per_pass(name: str) -> bool:
    """Whether a metric is averaged over micro-batches, since it is not a mean over all tokens or sequences."""
    return name.endswith("/p99") or name == "solver_steps/mean"
