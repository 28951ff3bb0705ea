"""Exact resume: which checkpoint, whether its settings agree, and everything in it.

A resumed run continues bit for bit as if it had not been interrupted, also inside a rollout.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from trl import GRPOTrainer

from troll.errors import InputError
from troll.trl.robust import rollout_state
from troll.trl.robust.fingerprint import fingerprint, refuse_changes, stored_fingerprint
from troll.trl.robust.guards import GuardState
from troll.trl.robust.lock import locked
from troll.trl.robust.state import load_state, restore_logging, restore_random_state
from troll.trl.robust.store import MANIFEST, STAGING, last_good, recover, verify
from troll.trl.trust_region import TrustRegionState

logger = get_logger(__name__)

ABOUT, OPTIMIZER, REFERENCE = "troll.json", "optimizer.safetensors", "reference.safetensors"


def process_file(process: int) -> str:
    """Name of the file in a checkpoint with the random generators and metrics of a process."""
    return f"troll_process_{process:05d}.safetensors"


class ExactResume(GRPOTrainer):
    """Resumes from the last complete checkpoint; only one process at a time may write the folder."""

    guards: GuardState
    region: TrustRegionState
    _fingerprint: dict[str, Any]
    _changed: bool = False
    _makes_optimizer: bool = False
    _sampler: rollout_state.Sampler | None = None
    _resumed: str | None = None
    """The checkpoint whose random generators are not restored yet."""
    _renamed: bool = False

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL; ``True`` resumes from the last complete checkpoint. The folder is locked meanwhile."""
        root = Path(self.args.output_dir)
        evaluates = self.args.eval_on_start
        self._fingerprint, self._changed = fingerprint(self), False
        self._makes_optimizer = self._makes_optimizer or self.optimizer is None
        with locked(root) if self.accelerator.is_main_process else nullcontext():
            self._resumed = self._choose(root, resume_from_checkpoint)
            if self._resumed is not None:
                self._restore_about(Path(self._resumed) / ABOUT)
                self.args.eval_on_start = False  # done when the run began
            try:
                return super().train(self._resumed, *args, **kwargs)
            finally:
                self.args.eval_on_start = evaluates

    def _choose(self, root: Path, resume_from: str | bool | None) -> str | None:
        """The checkpoint to resume from, chosen by the main process for all."""
        if not resume_from:
            return None
        choice: list[str | None] = [None]
        if self.accelerator.is_main_process:
            choice = [_last_good(root) if resume_from is True else _checked(root, Path(resume_from))]
        broadcast_object_list(choice)
        return choice[0]

    def _restore_about(self, path: Path) -> None:
        if path.exists():
            about = json.loads(path.read_text(encoding="utf-8"))
            changes = refuse_changes(
                stored_fingerprint(about, self._fingerprint), self._fingerprint, self.args.allow_changes
            )
            for change in changes:
                logger.warning(f"Resuming with a change: {change}")
                self._changed = True
            self.guards = GuardState(**{k: v for k, v in about["guards"].items() if k in vars(self.guards)})
            self.region.restore(about.get("region", {}))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load as transformers, and also parameters that are saved under other names than the model's."""
        self._renamed = False
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._renamed:
            target = self.accelerator.unwrap_model(self.model if model is None else model)
            widest = max((x.dtype for x in target.parameters()), key=lambda dtype: dtype.itemsize)
            target.load_state_dict(type(target).from_pretrained(resume_from_checkpoint, dtype=widest).state_dict())

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        self._renamed = bool(load_result.unexpected_keys)
        if not self._renamed:
            super()._issue_warnings_after_load(load_result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # finds nothing unless TRL wrote the checkpoint
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / OPTIMIZER).exists():
            state = load_state(folder / OPTIMIZER)
            self.optimizer.load_state_dict(state["optimizer"])
            self.lr_scheduler.load_state_dict(state["scheduler"])
            if state["scaler"] is not None and self._scaler is not None:
                self._scaler.load_state_dict(state["scaler"])
            if self._changed and self._makes_optimizer:
                override_optimizer(self)
        if (folder / REFERENCE).exists() and self.ref_model is not None:
            self.accelerator.unwrap_model(self.ref_model).load_state_dict(load_state(folder / REFERENCE))
        self._load_rollout(folder / rollout_state.file_name(self.accelerator.process_index))

    def _load_rollout(self, path: Path) -> None:
        if not path.exists():
            logger.warning(f"{path} is missing. If the checkpoint is inside a rollout, a new rollout is generated.")
            return
        saved = rollout_state.schedule(path)
        state = rollout_state.sampler(path)
        if state is not None and self._sampler is not None:
            self._sampler.resume(state)
        if {**saved, "step": 0} != {**self._schedule, "step": 0}:
            logger.warning(f"The rollout in {path} belongs to another schedule ({saved}) and is generated again.")
            return
        self._step = int(saved["step"])
        self._buffered_inputs = rollout_state.load(path, self.accelerator.device)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore random generators and metrics of this process, right before its first update."""
        self._resumed = None
        path = Path(checkpoint or "") / process_file(self.args.process_index)
        if not path.exists():
            super()._load_rng_state(checkpoint)
            return
        state = load_state(path)
        restore_random_state(state["random"])
        restore_logging(self, state["logging"])

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run as transformers, but make no further update if the resumed run had made all of them."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._resumed is not None:  # there was nothing left to do
            self._load_rng_state(self._resumed)
        return super()._finalize_training(*args, **kwargs)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._sampler = rollout_state.Sampler(super()._get_train_sampler(dataset))
        return self._sampler

    @property
    def _scaler(self) -> Any:
        return getattr(self.accelerator, "scaler", None)

    @property
    def _schedule(self) -> dict[str, float]:
        """Position of this process in its schedule, and the settings that the batches of a rollout depend on."""
        return {
            "step": self._step,
            "steps_per_generation": self.args.steps_per_generation,
            "num_iterations": self.num_iterations,
            "gradient_accumulation_steps": self.args.gradient_accumulation_steps,
            "batch": self.args.per_device_train_batch_size,
            "processes": self.accelerator.num_processes,
            "temperature": self.temperature,
            "old_policy": int(self._needs_old_policy),
            "reference": int(self.beta != 0),
            "correction": int(self.use_vllm and self.vllm_importance_sampling_correction),
        }


def override_optimizer(trainer: Any) -> None:
    """Apply the present learning rate and optimizer settings to the optimizer and schedule of a checkpoint.

    Their state stays: moments, and the position in the schedule. For an optimizer that the trainer created itself.
    """
    args, groups, schedule = trainer.args, trainer.optimizer.param_groups, trainer.lr_scheduler
    _, settings = trainer.get_optimizer_cls_and_kwargs(args, trainer.model)
    factors = [factor(schedule.last_epoch) for factor in getattr(schedule, "lr_lambdas", [])] or [1.0] * len(groups)
    for group, factor in zip(groups, factors, strict=True):
        group.update({name: value for name, value in settings.items() if name in group})
        group["initial_lr"] = args.learning_rate
        group["lr"] = args.learning_rate * factor
    if len(groups) == 2:  # transformers' groups: with and without weight decay
        groups[0]["weight_decay"] = args.weight_decay
    if hasattr(schedule, "base_lrs"):
        schedule.base_lrs = [args.learning_rate] * len(groups)
        schedule._last_lr = [group["lr"] for group in groups]


def _last_good(root: Path) -> str:
    found = recover(root)
    for sentence in found.rejected:
        logger.warning(sentence)
    if found.path is None:
        raise InputError(
            f"resume_from_checkpoint=True, but {root} has no complete checkpoint",
            "Call train() without it to start from the beginning",
        )
    return str(found.path)


def _checked(root: Path, checkpoint: Path) -> str:
    """A checkpoint given by path, if it is complete or was not written by troll."""
    if (root / STAGING).exists():
        recover(root)
    wrong = verify(checkpoint)
    if wrong is not None and (checkpoint / MANIFEST).exists():
        good = last_good(root).path
        fix = f"Use {good}, which is complete" if good else f"{root} has no complete checkpoint: train from the start"
        raise InputError(f"the checkpoint {checkpoint} is damaged: {wrong}", fix)
    if wrong is not None:
        logger.warning(f"{checkpoint} is used unchecked: {wrong}.")
    return str(checkpoint)
