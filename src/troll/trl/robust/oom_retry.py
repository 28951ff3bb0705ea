"""When memory runs out: an update is made once more in parts, which give the gradient of the whole.

The batches of an update are kept until it is done, and what it measures is held back. Where a pass does not fit, the
gradients are dropped and all of its batches are made again, in parts of half the rows, as are those of later updates.
TRL weighs a loss by the tokens of the rollout (``dapo``), by the tokens of the batch (``bnpo``) or by its rows, so
parts are weighed by their share of these. What TRL takes over a batch in a way of its own, as the loss of a router or
a share of the tokens by their entropy, is taken over a part, as with a smaller ``per_device_train_batch_size``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from troll.errors import TrainingError
from troll.trl.forward import Scorer
from troll.trl.passes import OldPolicyRecorder
from troll.trl.robust.update_state import GuardState, Update

logger = get_logger(__name__)

_OVER_ROLLOUT = ("dapo", "cispo", "vespo")
_OVER_TOKENS = (*_OVER_ROLLOUT, "bnpo")
_ENTROPY = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")  # what a forward of TRL's moves on
_SMALLER = "a shorter max_completion_length, gradient_checkpointing=True or a smaller model"
_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory")


class Part(dict[str, Any]):
    """Some rows of a batch, and the weight of their loss."""

    weight: Tensor | float = 1.0


def ran_out(error: Exception) -> bool:
    """Whether this is memory that ran out, of a device or of the machine."""
    allocates = isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
    return isinstance(error, torch.OutOfMemoryError) or allocates


def rows_of(batch: dict[str, Any]) -> int:
    """Completions in a batch."""
    return len(batch["completion_ids"])


def largest_part(rows: int, halvings: int) -> int:
    """Rows of the largest part of a batch after some halvings."""
    return math.ceil(rows / min(1 << halvings, rows))


def parts(batch: dict[str, Any], halvings: int, loss_type: str) -> list[dict[str, Any]]:
    """The batch itself, or after halvings its rows in equal parts, whose losses add up to that of the batch."""
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
        if loss_type in _OVER_ROLLOUT:  # whose loss is a part of a sum already: for the weight, divided by less
            part["num_items_in_batch"] = batch["num_items_in_batch"] * part.weight
        result.append(part)
    return result


def _rows(value: Any, at: slice) -> Any:
    return value if value is None or (isinstance(value, Tensor) and value.dim() == 0) else value[at]


class OOMRetry(GRPOTrainer):
    """Makes an update in parts, once one did not fit."""

    guards: GuardState
    _update: Update | None = None

    def update_again(self) -> None:
        """Called before the passes of an update are made once more; to be overridden where they leave something."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As TRL, in parts after memory has run out."""
        if self._update is None:
            self._update = Update(model, self._tr_loss.clone(), {name: getattr(self, name) for name in _ENTROPY})
        update = self._update
        while True:
            try:
                loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
                break
            except Exception as error:
                if update.current is None or not ran_out(error):
                    raise
                said = str(error).split("\n")[0]
            self._halve(update, said)  # out here, where what the failed pass has allocated is free
        assert update.current is not None
        if update.loss_before_last is not None:
            loss = loss + update.loss_before_last
        update.done.append(update.current)
        update.losses.append(loss)
        update.current, update.again, update.loss_before_last = None, False, None
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """The batch TRL would take; of a batch in parts the last one, when the others are done."""
        update = self._update
        if isinstance(generation_batch, Part):
            return generation_batch
        if update is None or not self.model.training:
            return super()._prepare_inputs(generation_batch)
        if update.current is None:
            update.current = super()._prepare_inputs(generation_batch)
        for batch in update.done if update.again else []:
            for part in self._parts(batch):
                self._pass_before(update, part)
        *before, last = self._parts(update.current)
        losses = [self._pass_before(update, part) for part in before]
        update.loss_before_last = torch.stack(losses).sum() if losses else None
        return last

    def _parts(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        return parts(batch, self.guards.halvings, self.loss_type)

    def _pass_before(self, update: Update, part: dict[str, Any]) -> Tensor:
        """Forward and backward on a batch or part that is not the last of the update."""
        gradients, part = self.accelerator.gradient_state, part if isinstance(part, Part) else Part(part)
        synchronised = gradients.sync_gradients
        gradients._set_sync_gradients(False)
        try:
            loss: Tensor = super(GRPOTrainer, self).training_step(update.model, part)
        finally:
            gradients._set_sync_gradients(synchronised)
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Tensor:
        """As TRL; what is measured is held back until the update is made."""
        update = self._update
        if update is None or not self.model.training:
            return super().compute_loss(model, inputs, *args, **named)  # type: ignore[no-any-return]
        logged, self._metrics["train"] = self._metrics["train"], update.metrics
        try:
            loss: Tensor = super().compute_loss(model, inputs, *args, **named)
        finally:
            self._metrics["train"] = logged
        return loss * inputs.weight if isinstance(inputs, Part) else loss

    def _halve(self, update: Update, said: str) -> None:
        """Make smaller parts of a batch from now on, and nothing of the update undone."""
        assert update.current is not None
        rows = rows_of(update.current)
        before = largest_part(rows, self.guards.halvings)
        now = largest_part(rows, self.guards.halvings + 1)
        steps = self.args.gradient_accumulation_steps
        if self.accelerator.num_processes > 1 or self._steps_by_itself:
            raise TrainingError(
                f"memory that ran out in a pass over {rows} completions, on one of several processes ({said})",
                "a batch that fits: a pass that all processes make together cannot be repeated by one",
                f"per_device_train_batch_size={max(1, rows // 2)}, gradient_accumulation_steps={2 * steps}",
            )
        if before == 1:
            raise TrainingError(f"memory that ran out in a pass over one completion ({said})", "that it fits", _SMALLER)
        self.guards.halvings += 1
        self._undo(update)
        update.metrics.clear()
        update.measured.clear()
        update.doubts.clear()
        update.again = True
        self.update_again()
        clear_device_cache(garbage_collection=True)
        logger.warning(
            f"Out of memory ({said}): forward and backward were made on {before} completions at a time, and are made "
            f"on {now} from now on; the gradient of an update is the same. To set it from the start: "
            f"per_device_train_batch_size={now}, gradient_accumulation_steps={math.ceil(rows / now) * steps}."
        )

    @property
    def _steps_by_itself(self) -> bool:
        """DeepSpeed adds up gradients and makes the step in its backward pass: nothing can be taken back."""
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    def _undo(self, update: Update) -> None:
        """Take back what the passes of an update have left."""
        for parameter in update.model.parameters():
            parameter.grad = None
        for name, value in update.entropy_before.items():
            setattr(self, name, value)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **named: Any) -> Any:
        """As TRL, which scores a rollout in batches; in smaller ones after memory has run out."""
        size = named.get("batch_size")
        if size is None:
            return super()._get_per_token_logps_and_entropies(model, *args, **named)
        while True:
            named["batch_size"] = largest_part(size, self.guards.scoring_halvings)
            try:
                return super()._get_per_token_logps_and_entropies(model, *args, **named)
            except Exception as error:
                if not ran_out(error):
                    raise
                said = str(error).split("\n")[0]
            before = named["batch_size"]
            if before == 1 or self.accelerator.num_processes > 1:
                raise TrainingError(
                    f"memory that ran out when a rollout was scored, {before} completions at a time ({said})",
                    "a batch that fits",
                    _SMALLER if before == 1 else f"per_device_train_batch_size={before // 2}",
                )
            self.guards.scoring_halvings += 1
            if isinstance(model, Scorer) and isinstance(model.scoring, OldPolicyRecorder):
                model.done = 0
                model.scoring.policies.clear()
            clear_device_cache(garbage_collection=True)
            logger.warning(
                f"Out of memory ({said}): rollouts were scored {before} completions at a time, and are scored "
                f"{largest_part(size, self.guards.scoring_halvings)} at a time from now on."
            )

    def _generate(self, *args: Any, **named: Any) -> Any:
        try:
            return super()._generate(*args, **named)
        except Exception as error:
            if not ran_out(error):
                raise
            raise TrainingError(
                f"memory that ran out when a rollout was generated ({str(error).splitlines()[0]})",
                "a rollout that fits: all completions of a process at once, their prompts and the cache of all layers",
                "a smaller per_device_train_batch_size or fewer updates_per_generation, a shorter "
                "max_completion_length, or vLLM with a smaller vllm_gpu_memory_utilization",
            ) from error
