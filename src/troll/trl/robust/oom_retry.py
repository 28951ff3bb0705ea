"""Out-of-memory retries: an update is repeated on smaller parts, which give the same gradient.

The batches of an update are kept until it is done, and its metrics are held back. If a pass runs out of memory, the
gradients are dropped and all batches of the update are repeated in parts of half the rows; later updates use such parts
at once. TRL divides a loss by the tokens of the rollout (``dapo``), the tokens of the batch (``bnpo``) or its rows, so
each part is weighted by its share of these. Terms that TRL computes over a whole batch (the router's auxiliary loss,
the entropy quantile) are computed over a part, as with a smaller ``per_device_train_batch_size``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from troll.errors import TrainingError
from troll.trl.robust.guards import GuardState, UpdateState

logger = get_logger(__name__)

_OVER_ROLLOUT = ("dapo", "cispo", "vespo")
_OVER_TOKENS = (*_OVER_ROLLOUT, "bnpo")
_ENTROPY = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")  # attributes that a forward of TRL changes
_SMALLER = "Use a shorter max_completion_length, gradient_checkpointing=True or a smaller model"
_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory")


class Part(dict[str, Any]):
    """Some rows of a batch, and the weight of their loss."""

    weight: Tensor | float = 1.0


def is_out_of_memory(error: Exception) -> bool:
    """Whether the error means that a device or the machine ran out of memory."""
    allocates = isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
    return isinstance(error, torch.OutOfMemoryError) or allocates


def rows_of(batch: dict[str, Any]) -> int:
    """Number of completions in a batch."""
    return len(batch["completion_ids"])


def largest_part(rows: int, halvings: int) -> int:
    """Number of rows of the largest part of a batch after some halvings."""
    return math.ceil(rows / min(1 << halvings, rows))


def parts(batch: dict[str, Any], halvings: int, loss_type: str) -> list[dict[str, Any]]:
    """Split a batch, after halvings, into parts of about equal size whose weighted losses add up to its loss."""
    rows = rows_of(batch)
    if not halvings or rows == 1:
        return [batch]
    mask: Tensor = batch["completion_mask"]
    counted = (mask * batch["tool_mask"] if "tool_mask" in batch else mask).sum(-1)
    whole = split_pixel_values_by_grid(batch)
    result: list[dict[str, Any]] = []
    for indices in torch.arange(rows).tensor_split(min(1 << halvings, rows)):
        at = slice(int(indices[0]), int(indices[-1]) + 1)
        part = Part(unsplit_pixel_values_by_grid({name: _rows(value, at) for name, value in whole.items()}))
        part.weight = len(indices) / rows
        if loss_type in _OVER_TOKENS:
            part.weight = counted[at].sum() / counted.sum().clamp(min=1)
        if loss_type in _OVER_ROLLOUT:  # already divided by the rollout's tokens: undo that for the weight
            part["num_items_in_batch"] = batch["num_items_in_batch"] * part.weight
        result.append(part)
    return result


def _rows(value: Any, at: slice) -> Any:
    return value if value is None or (isinstance(value, Tensor) and value.dim() == 0) else value[at]


class OOMRetry(GRPOTrainer):
    """Repeats an update that runs out of memory on smaller parts."""

    guards: GuardState
    _update: UpdateState | None

    def update_again(self) -> None:
        """Hook for subclasses, called before the passes of an update are repeated."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward as TRL, in parts after memory has run out."""
        if self._update is None:
            self._update = UpdateState(model, self._tr_loss.clone(), {name: getattr(self, name) for name in _ENTROPY})
        update = self._update
        while True:
            try:
                loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
                break
            except Exception as error:
                if update.current is None or not is_out_of_memory(error):
                    raise
                message = _first_line(error)
            self._halve(update, message)  # outside of the except block, where the failed pass's memory is free
        assert update.current is not None
        if update.loss_before_last is not None:
            loss = loss + update.loss_before_last
        update.done.append(update.current)
        update.losses.append(loss)
        update.current, update.repeat, update.loss_before_last = None, False, None
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Return TRL's batch, or its last part after the passes over the other parts."""
        update = self._update
        if isinstance(generation_batch, Part):
            return generation_batch
        if update is None or not self.model.training:
            return super()._prepare_inputs(generation_batch)
        if update.current is None:
            update.current = super()._prepare_inputs(generation_batch)
        for batch in update.done if update.repeat else []:
            for part in self._parts(batch):
                self._pass_before(update, part)
        *before, last = self._parts(update.current)
        losses = [self._pass_before(update, part) for part in before]
        update.loss_before_last = torch.stack(losses).sum() if losses else None
        return last

    def _parts(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        return parts(batch, self.guards.halvings, self.loss_type)

    def _pass_before(self, update: UpdateState, part: dict[str, Any]) -> Tensor:
        """Forward and backward on a batch or part that is not the last of the update."""
        gradients, part = self.accelerator.gradient_state, part if isinstance(part, Part) else Part(part)
        synchronised = gradients.sync_gradients
        gradients._set_sync_gradients(False)
        try:
            loss: Tensor = super(GRPOTrainer, self).training_step(update.model, part)
        finally:
            gradients._set_sync_gradients(synchronised)
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return TRL's loss; its metrics are held back until the update is complete."""
        update = self._update
        if update is None or not self.model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[no-any-return]
        logged, self._metrics["train"] = self._metrics["train"], update.metrics
        try:
            loss: Tensor = super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._metrics["train"] = logged
        return loss * inputs.weight if isinstance(inputs, Part) else loss

    def _halve(self, update: UpdateState, message: str) -> None:
        """Halve the parts of a batch from now on, and start the update again."""
        assert update.current is not None
        rows = rows_of(update.current)
        before = largest_part(rows, self.guards.halvings)
        now = largest_part(rows, self.guards.halvings + 1)
        steps = self.args.gradient_accumulation_steps
        if self.accelerator.num_processes > 1 or self._steps_in_backward:
            raise TrainingError(
                f"Out of memory in a pass over {rows} completions on one of several processes, which cannot repeat it "
                f"alone ({message})",
                f"Set per_device_train_batch_size={max(1, rows // 2)} and gradient_accumulation_steps={2 * steps}",
            )
        if before == 1:
            raise TrainingError(f"Out of memory at micro-batch size 1 ({message})", _SMALLER)
        self.guards.halvings += 1
        self._undo(update)
        update.metrics.clear()
        update.failed_checks.clear()
        update.repeat = True
        self.update_again()
        clear_device_cache(garbage_collection=True)
        logger.warning(
            f"Out of memory ({message}): the micro-batch size is reduced from {before} to {now} completions; the "
            f"gradient of an update is the same. To set it from the start: per_device_train_batch_size={now}, "
            f"gradient_accumulation_steps={math.ceil(rows / now) * steps}."
        )

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Score as TRL; a rollout is scored in smaller batches after memory has run out."""
        size = kwargs.get("batch_size")
        if size is None:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        while True:
            kwargs["batch_size"] = largest_part(size, self.guards.scoring_halvings)
            try:
                return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                message = _first_line(error)
            before = kwargs["batch_size"]
            if before == 1 or self.accelerator.num_processes > 1:
                raise TrainingError(
                    f"Out of memory while scoring a rollout, {before} completions at a time ({message})",
                    _SMALLER if before == 1 else f"Set per_device_train_batch_size={before // 2}",
                )
            self.guards.scoring_halvings += 1
            clear_device_cache(garbage_collection=True)
            logger.warning(
                f"Out of memory ({message}): the batch size for scoring rollouts is reduced from {before} to "
                f"{largest_part(size, self.guards.scoring_halvings)} completions."
            )

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._generate(*args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"Out of memory while generating a rollout, all completions of a process at once "
                f"({_first_line(error)})",
                "Use a smaller per_device_train_batch_size, fewer updates_per_generation, a shorter "
                "max_completion_length, or vLLM with a smaller vllm_gpu_memory_utilization",
            ) from error


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]
