"""Updates with a non-finite loss or gradient are skipped.

Neither the parameters nor the optimizer's moments change. The update is counted and its batches are saved in the folder
``skipped``, exactly as safetensors and readable as JSON. After ``max_skipped_updates`` of them, the next one stops the
run. All processes decide together, once per update.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, gather_object
from safetensors import SafetensorError
from torch import Tensor
from trl import GRPOTrainer

from troll.errors import InputError, TrainingError
from troll.trl.passes import REWARDS, ProjectedScorer
from troll.trl.robust.state import save_rollout
from troll.trl.trust_region import TrustRegionState

logger = get_logger(__name__)


@dataclass
class GuardState:
    """Failures of a run so far; saved in its checkpoints."""

    skipped_updates: int = 0
    unscored_rollouts: int = 0
    """Rollouts in which no completion has a reward."""
    halvings: int = 0
    """How often the batch of a forward and backward pass was halved."""
    scoring_halvings: int = 0
    """How often the batch that scores a rollout was halved."""
    updates_since_log: int = 0
    skipped_since_log: int = 0


@dataclass
class UpdateState:
    """The update in progress: its batches, kept until it is done, and what its passes produced."""

    model: Any
    loss_before: Tensor
    """The trainer's running loss before the update."""
    entropy_before: dict[str, Any]
    current: dict[str, Any] | None = None
    """The batch of the current forward and backward pass."""
    done: list[dict[str, Any]] = field(default_factory=list)
    """The batches before it."""
    repeat: bool = False
    """Whether the passes over ``done`` have to be repeated."""
    loss_before_last: Tensor | None = None
    """Loss of the parts of the current batch before the last."""
    losses: list[Tensor] = field(default_factory=list)
    failed_checks: list[str] = field(default_factory=list)
    norms: dict[str, Tensor] = field(default_factory=dict)
    """Gradient norm of each parameter, before clipping."""
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class SkipInvalidUpdates(GRPOTrainer):
    """Skips updates whose loss or gradient is not finite."""

    region: TrustRegionState
    _update: UpdateState | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.guards = GuardState()
        super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL, with no update in progress."""
        self._update = None
        return super().train(*args, **kwargs)

    def _on_failed_check(self, error: InputError, step: ProjectedScorer) -> None:
        """Mark the update as invalid; outside of an update, raise.

        All processes continue to the end of the update and decide there. The metrics of this pass are dropped.
        """
        update, stats = self._update, step.stats
        if update is None or not self.model.training or stats is None:
            raise error
        kept = stats[..., step.names.index("support_size/proposal")]
        invalid = (stats[..., -1] > 0) & ((kept == 0) | ~stats.isfinite().all(-1))
        place = ""
        if bool(invalid.any()) and not self.guards.halvings:  # the rows of a part are not those of the batch
            row, token = invalid.nonzero()[0].tolist()
            place = f", first in completion {row}, token {token} of batch {len(update.done)}"
        update.failed_checks.append(f"{error.problem}{place}")
        step.stats = torch.zeros_like(stats)

    def _clip_grad_norm(self, model: Any) -> Any:
        self._record_norms(model)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the norm as transformers; the last call before the optimizer, so the update is skipped here."""
        if grad_norm is None:
            self._record_norms(model)
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        update, self._update = self._update, None
        if update is not None:
            self.guards.updates_since_log += 1
            if self._is_finite(update, norm):
                for name, values in update.metrics.items():
                    self._metrics["train"][name].extend(values)
            else:
                self._skip(update, norm)
        return norm

    def _record_norms(self, model: Any) -> None:
        """Keep each gradient's norm before clipping, which spreads non-finite values to all of them."""
        if self._update is not None:
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            local = [x.to_local() if hasattr(x, "to_local") else x for x in gradients.values()]
            self._update.norms = dict(zip(gradients, torch._foreach_norm(local), strict=True)) if local else {}

    def _is_finite(self, update: UpdateState, norm: Any) -> bool:
        """Whether all losses and the gradient are finite on all processes: one synchronisation per update."""
        finite = torch.stack([x.float() for x in update.losses]).isfinite().all()
        if norm is not None and self.accelerator.scaler is None:  # a scaler checks the gradient itself
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)
            finite = finite & norm.to(finite.device).isfinite()
        failed = (~finite).float() + len(update.failed_checks)
        if self.accelerator.num_processes > 1:
            failed = self.accelerator.reduce(failed, reduction="sum")
        return not bool(failed > 0)

    def _skip(self, update: UpdateState, norm: Any) -> None:
        """Drop the gradients, save the batches, and stop the run if too many updates were skipped."""
        self._undo(update)
        self._tr_loss.copy_(update.loss_before)
        guards, number = self.guards, self.state.global_step + 1
        guards.skipped_updates += 1
        guards.skipped_since_log += 1
        reason = self._skip_reason(update, norm)
        folder = skipped_folder(self.args.output_dir, number)
        about = {
            "update": number,
            "why": reason,
            "losses": [float(x) for x in update.losses],
            "norm": None if norm is None else float(norm),
        }
        saved = f"Its batches are in {folder}"
        try:
            save_skipped(folder, self.accelerator.process_index, update.done, about, self._tokenizer.decode)
        except (OSError, SafetensorError) as error:
            saved = f"Its batches could not be written to {folder} ({error})"
        if self.accelerator.num_processes > 1:
            reason = "; ".join(f"process {i}: {x}" for i, x in enumerate(gather_object([reason])) if x)
        count = f"skipped updates: {guards.skipped_updates}, max_skipped_updates={self.args.max_skipped_updates}"
        if guards.skipped_updates <= self.args.max_skipped_updates and not self._steps_in_backward:
            logger.warning(f"Update {number} was skipped: {reason}. {saved} ({count}).")
            return
        raise TrainingError(
            f"Update {number} is not finite: {reason}. {saved} ({count})",
            "Resume from an earlier checkpoint with a lower learning_rate or max_grad_norm, use bf16 instead of fp16, "
            "or inspect the saved batches",
        )

    def _skip_reason(self, update: UpdateState, norm: Any) -> str:
        """The non-finite values of this process."""
        reasons = list(update.failed_checks)
        reasons += [f"the loss of batch {i} is {float(x)}" for i, x in enumerate(update.losses) if not x.isfinite()]
        bad = [name for name, x in update.norms.items() if not bool(x.isfinite())]
        if bad:
            more = f" and {len(bad) - 1} of {len(update.norms) - 1} other parameters" if len(bad) > 1 else ""
            reasons.append(f"the gradient of {bad[0]}{more} is not finite")
        elif norm is not None and not math.isfinite(float(norm)):
            reasons.append(f"the gradient norm is {float(norm)}")
        return "; ".join(reasons)

    def _undo(self, update: UpdateState) -> None:
        """Drop the gradients and the measurements of an update's passes."""
        for parameter in update.model.parameters():
            parameter.grad = None
        for name, value in update.entropy_before.items():
            setattr(self, name, value)
        self.region.measured.clear()

    @property
    def _steps_in_backward(self) -> bool:
        """Whether DeepSpeed accumulates gradients and steps in its backward pass: an update cannot be undone."""
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as TRL; the loss is the mean over the updates that were not skipped, NaN if all were."""
        guards = self.guards
        if "loss" in logs:
            completed = guards.updates_since_log - guards.skipped_since_log
            if guards.skipped_since_log:
                logs["loss"] = logs["loss"] * guards.updates_since_log / completed if completed else math.nan
            guards.updates_since_log = guards.skipped_since_log = 0
            if guards.skipped_updates:
                self._metrics["train"]["troll/skipped_updates"] = [float(guards.skipped_updates)]
        super().log(logs, *args, **kwargs)


# ---------------------------------------------------------------------- batches of skipped updates


def skipped_folder(output_dir: str, update: int) -> Path:
    """Folder with the batches of a skipped update."""
    return Path(output_dir) / "skipped" / f"update-{update:06d}"


def save_skipped(
    folder: Path,
    process: int,
    batches: list[dict[str, Any]],
    about: dict[str, Any],
    decode: Callable[[list[int]], str],
) -> None:
    """Write the batches of one process, as safetensors and as JSON with decoded completions and ``about``."""
    completions = [
        {"batch": number, "row": row, **_completion(batch, row, decode)}
        for number, batch in enumerate(batches)
        for row in range(len(batch["completion_ids"]))
    ]
    save_rollout(folder / f"batch_{process:05d}.safetensors", batches, {})
    text = json.dumps(_plain({**about, "completions": completions}), indent=1, ensure_ascii=False)
    (folder / f"batch_{process:05d}.json").write_bytes(text.encode(errors="backslashreplace"))


def _completion(batch: dict[str, Any], row: int, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """A completion as text, its reward and advantage, and the names of its non-finite tensors."""
    prompt, counted = batch["prompt_mask"][row].bool(), batch["completion_mask"][row].bool()
    advantage = batch["advantages"][row]
    described: dict[str, Any] = {
        "prompt": decode(batch["prompt_ids"][row][prompt].tolist()),
        "completion": decode(batch["completion_ids"][row][counted].tolist()),
        "advantage": (advantage if advantage.dim() == 0 else advantage[counted]).tolist(),
    }
    if REWARDS in batch:
        described["reward"] = float(batch[REWARDS][row])
    per_row = {name: x for name, x in batch.items() if _is_per_token_or_row(x, batch)}
    not_finite = [name for name, x in per_row.items() if not bool(_counted(x[row], counted).isfinite().all())]
    return {**described, "not_finite": not_finite}


def _is_per_token_or_row(x: Any, batch: dict[str, Any]) -> bool:
    shape = batch["completion_ids"].shape
    return isinstance(x, Tensor) and x.is_floating_point() and x.shape in (shape, shape[:1])


def _counted(x: Tensor, counted: Tensor) -> Tensor:
    return x if x.dim() == 0 else x[counted]


def _plain(value: Any) -> Any:
    """The value for JSON, which has no NaN: non-finite numbers become strings."""
    if isinstance(value, dict):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
