"""What keeps a run alive when an update goes wrong: numbers that are not finite.

An update whose loss or gradient is not finite is not made: neither the weights nor the optimizer's moments move. It is
counted, its batches are written down, and after ``max_skipped_updates`` of them the run stops. This is decided once per
update, by all processes alike. What is done about memory that runs out is in ``memory``, about rewards in ``rewards``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from safetensors import SafetensorError

from troll.errors import InputError, TrainingError
from troll.trl.passes import ProjectedScorer
from troll.trl.region_state import Region
from troll.trl.robust.oom_retry import OOMRetry
from troll.trl.robust.reward_validation import RewardValidation
from troll.trl.robust.skipped_batches import dump, folder_of
from troll.trl.robust.update_state import GuardState, Update

logger = get_logger(__name__)

__all__ = ["GuardState", "Guarded"]


class Guarded(OOMRetry, RewardValidation):
    """Skips updates that are not finite, makes smaller parts of those that do not fit, and watches the rewards."""

    region: Region

    def __init__(self, *args: Any, **named: Any) -> None:
        self.guards = GuardState()
        self._told = set()
        super().__init__(*args, **named)

    def train(self, *args: Any, **named: Any) -> Any:
        """As TRL."""
        self._update = None
        return super().train(*args, **named)

    def _forgive(self, error: InputError, step: ProjectedScorer) -> None:
        """Let an update be skipped in which a pass could not be trusted; raise what is wrong where there is none.

        All processes go on to the end of the update, where they decide together; of this pass they report nothing.
        """
        update, stats = self._update, step.stats
        if update is None or not self.model.training or stats is None:
            raise error
        kept = stats[..., step.names.index("support_size/proposal")]
        strange = (stats[..., -1] > 0) & ((kept == 0) | ~stats.isfinite().all(-1))
        where = ""
        if bool(strange.any()) and not self.guards.halvings:  # of a part, the rows are not those of the batch
            row, token = strange.nonzero()[0].tolist()
            where = f", first in completion {row}, token {token} of batch {len(update.done)}"
        update.doubts.append(f"{error.given}{where} (expected: {error.expected})")
        step.stats = torch.zeros_like(stats)

    def _clip_grad_norm(self, model: Any) -> Any:
        self._look_at_gradients(model)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """As TRL, and the last thing before the optimizer: whether the update is made."""
        if grad_norm is None:
            self._look_at_gradients(model)
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        update, self._update = self._update, None
        if update is not None:
            self.guards.updates_since_log += 1
            if self._is_finite(update, norm):
                for name, values in update.metrics.items():
                    self._metrics["train"][name].extend(values)
                self.region.observe(update.measured)
            else:
                self._skip(update, norm)
        return norm

    def _look_at_gradients(self, model: Any) -> None:
        """Keep their norms: clipping spreads what is not finite to all of them."""
        if self._update is not None:
            named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            local = [x.to_local() if hasattr(x, "to_local") else x for x in named.values()]
            self._update.norms = dict(zip(named, torch._foreach_norm(local), strict=True)) if local else {}

    def _is_finite(self, update: Update, norm: Any) -> bool:
        """Whether all losses and the gradient are, on all processes; the one question to the device per update."""
        finite = torch.stack([x.float() for x in update.losses]).isfinite().all()
        if norm is not None and self.accelerator.scaler is None:  # a scaler looks at the gradient itself
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)
            finite = finite & norm.to(finite.device).isfinite()
        failed = (~finite).float() + len(update.doubts)
        if self.accelerator.num_processes > 1:
            failed = self.accelerator.reduce(failed, reduction="sum")
        return not bool(failed > 0)

    def _skip(self, update: Update, norm: Any) -> None:
        """Leave weights and optimizer as they are, write the batches down, and stop when it has happened too often."""
        self._undo(update)
        self._tr_loss.copy_(update.loss_before)
        guards, number = self.guards, self.state.global_step + 1
        guards.skipped_updates += 1
        guards.skipped_since_log += 1
        why = self._why(update, norm)
        folder = folder_of(self.args.output_dir, number)
        about = {
            "update": number,
            "why": why,
            "losses": [float(x) for x in update.losses],
            "norm": None if norm is None else float(norm),
        }
        written = f"Its batches are in {folder}"
        try:
            dump(folder, self.accelerator.process_index, update.done, about, self._tokenizer.decode)
        except (OSError, SafetensorError) as error:
            written = f"Its batches could not be written to {folder} ({error})"
        if self.accelerator.num_processes > 1:
            why = "; ".join(f"process {i}: {x}" for i, x in enumerate(gather_object([why])) if x)
        often = f"{guards.skipped_updates} so far, and max_skipped_updates={self.args.max_skipped_updates}"
        if guards.skipped_updates <= self.args.max_skipped_updates and not self._steps_by_itself:
            logger.warning(f"Update {number} was skipped: {why}. {written}. ({often}.)")
            return
        raise TrainingError(
            f"update {number}, which cannot be made: {why}; updates that were skipped: {often}. {written}",
            "a finite loss and gradient",
            "a lower learning_rate or max_grad_norm from an earlier checkpoint, bf16 in place of fp16, or looking at "
            "what the batches have in common",
        )

    def _why(self, update: Update, norm: Any) -> str:
        """What was not finite on this process."""
        said = list(update.doubts)
        said += [f"the loss of batch {i} is {float(x)}" for i, x in enumerate(update.losses) if not x.isfinite()]
        bad = [name for name, x in update.norms.items() if not bool(x.isfinite())]
        if bad:
            more = f" and {len(bad) - 1} of {len(update.norms) - 1} other parameters" if len(bad) > 1 else ""
            said.append(f"the gradient of {bad[0]}{more} is not finite")
        elif norm is not None and not math.isfinite(float(norm)):
            said.append(f"the norm of the gradient is {float(norm)}")
        return "; ".join(said)

    # ------------------------------------------------------------------ what is logged

    def log(self, logs: dict[str, float], *args: Any, **named: Any) -> None:
        """As TRL; the loss is the mean over the updates that were made, NaN if none was."""
        guards = self.guards
        if "loss" in logs:
            made = guards.updates_since_log - guards.skipped_since_log
            if guards.skipped_since_log:
                logs["loss"] = logs["loss"] * guards.updates_since_log / made if made else math.nan
            guards.updates_since_log = guards.skipped_since_log = 0
            if guards.skipped_updates:
                self._metrics["train"]["troll/skipped_updates"] = [float(guards.skipped_updates)]
        super().log(logs, *args, **named)
