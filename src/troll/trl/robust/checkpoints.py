"""Checkpoints: written atomically, and resumed bit for bit.

TRL writes a checkpoint in place, drops the rollout in progress, and pickles the optimizer and the random generators.
``SafeCheckpoints`` stages TRL's files, checksums and renames them (``store``), and saves the rest of the run's state
with them as safetensors and JSON (``state``). ``ExactResume`` chooses a checkpoint, refuses it if the settings differ
(``fingerprint``), and restores everything in it: a resumed run continues as if it had not been interrupted, also inside
a rollout. TRL writes and reads the model and the trainer state itself.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, is_peft_model
from trl import GRPOTrainer

from troll.errors import InputError, TrainingError
from troll.files import is_file_error, write_atomic
from troll.trl.robust.fingerprint import fingerprint, refuse_changes, stored_fingerprint
from troll.trl.robust.guards import GuardState
from troll.trl.robust.state import (
    Sampler,
    load_rollout,
    load_state,
    logging_state,
    random_state,
    restore_logging,
    restore_random_state,
    rollout_file,
    rollout_schedule,
    sampler_state,
    save_rollout,
    save_state,
    state_bytes,
)
from troll.trl.robust.store import MANIFEST, STAGING, Seals, commit, last_good, locked, recover, rotate, stage, verify
from troll.trl.trust_region import TrustRegionState

logger = get_logger(__name__)

_MIB = 2**20
ABOUT, OPTIMIZER, REFERENCE = "troll.json", "optimizer.safetensors", "reference.safetensors"


def process_file(process: int) -> str:
    """Name of the file in a checkpoint with the random generators and metrics of a process."""
    return f"troll_process_{process:05d}.safetensors"


class SafeCheckpoints(GRPOTrainer):
    """Writes checkpoints that are complete or absent."""

    guards: GuardState
    region: TrustRegionState
    _staged: Path | None = None
    _seals: Seals | None = None
    _to_push: bool = False

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write as TRL into a staging folder, rename it, and only then delete older checkpoints."""
        root = Path(self._get_output_dir(trial=trial))
        place = root / f"checkpoint-{self.state.global_step}"
        self._on_all_processes(root, lambda: self._begin(root))
        self._staged, self._to_push = root / STAGING / place.name, False
        try:
            self._on_all_processes(root, lambda: self._write(model, trial, place))
        finally:
            self._staged = None
        self._on_all_processes(root, lambda: self._publish(root, place))
        if self._to_push:
            self._push_from_checkpoint(str(place))

    def _begin(self, root: Path) -> None:
        if self.args.should_save:
            self._seals = Seals(stage(root, self.state.global_step))
            free, needed = shutil.disk_usage(root).free, self._checkpoint_bytes()
            if free < needed:
                raise OSError(errno.ENOSPC, f"{needed // _MIB + 1} MiB needed, {free // _MIB} MiB free")

    def _write(self, model: Any, trial: Any, place: Path) -> None:
        assert self._staged is not None
        super()._save_checkpoint(model, trial)
        if not self.args.should_save:
            return
        if self.state.best_model_checkpoint == str(self._staged):
            self.state.best_model_checkpoint = str(place)
            self.state.save_to_json(str(self._staged / "trainer_state.json"))
        about = {"fingerprint": self._fingerprint, "guards": asdict(self.guards), **self._region_state}
        write_atomic(self._staged / ABOUT, json.dumps(about, indent=1).encode())

    @property
    def _region_state(self) -> dict[str, Any]:
        state = self.region.state()
        return {"region": state} if state else {}

    def _publish(self, root: Path, place: Path) -> None:
        if not self.args.should_save:
            return
        commit(root / STAGING / place.name, self._seals)
        best = self.state.best_model_checkpoint
        for left in rotate(root, place, self.args.save_total_limit, None if best is None else Path(best)):
            logger.warning(f"The older checkpoint {left} could not be deleted.")

    def _on_all_processes(self, root: Path, action: Callable[[], None]) -> None:
        """Run the action on every process; if it fails on one, all raise and name the last complete checkpoint."""
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            if not is_file_error(error):
                raise
            failure = error
        failed = torch.tensor(float(failure is not None), device=self.accelerator.device)
        if self.accelerator.num_processes > 1:
            torch.distributed.all_reduce(failed)
        if failed > 0:
            if self._seals is not None:
                self._seals.cancel()
            if self.args.should_save:
                shutil.rmtree(root / STAGING, ignore_errors=True)
            raise self._not_saved(root, failure) from failure

    def _not_saved(self, root: Path, failure: Exception | None) -> TrainingError:
        reason = getattr(failure, "strerror", None) or failure or "another process failed"
        good = last_good(root).path
        then = f"resume from {good}, the last complete checkpoint" if good else "start again: there is no earlier one"
        return TrainingError(
            f"The checkpoint of update {self.state.global_step} cannot be written to {root} ({reason})",
            f"Fix the error, then {then}",
        )

    def _checkpoint_bytes(self) -> int:
        """Estimated size of a checkpoint: parameters, optimizer, rollout."""
        adapter = is_peft_model(self.accelerator.unwrap_model(self.model))
        parameters: int = sum(x.nbytes for x in self.model.parameters() if x.requires_grad or not adapter)
        if self.args.save_only_model:
            return parameters
        state = state_bytes(self.optimizer.state_dict()) if self._own_format else 0
        buffered: int = sum(
            x.nbytes for batch in self._buffered_inputs or [] for x in batch.values() if isinstance(x, torch.Tensor)
        )
        return parameters + state + buffered

    def _get_output_dir(self, trial: Any = None, **kwargs: Any) -> str:
        return super()._get_output_dir(trial, **kwargs) if self._staged is None else str(self._staged.parent)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staged is None:
            super()._push_from_checkpoint(checkpoint_folder)
        else:
            self._to_push = True  # after it is renamed

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)  # another process may not have created it yet
        if self._seals is not None:
            self._seals.begin()  # the parameters are synced while the optimizer is written
        if not self._own_format:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            scaler = None if self._scaler is None else self._scaler.state_dict()
            state = {"optimizer": self.optimizer.state_dict(), "scheduler": self.lr_scheduler.state_dict()}
            save_state(folder / OPTIMIZER, {**state, "scaler": scaler})
        if self.args.sync_ref_model and self.args.should_save:
            save_state(folder / REFERENCE, dict(self.accelerator.unwrap_model(self.ref_model).state_dict()))
        if self._buffered_inputs is None:
            return
        sampler = None
        if self._sampler is not None:  # at the end of an epoch the next order is drawn, inside one it is drawn again
            sampler = self._sampler.state if float(self.state.epoch).is_integer() else self._sampler.before
        path = folder / rollout_file(self.accelerator.process_index)
        save_rollout(path, self._buffered_inputs, self._schedule, sampler)

    def _save_scaler(self, output_dir: str) -> None:
        if not self._own_format:
            super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        path = Path(output_dir) / process_file(self.args.process_index)
        save_state(path, {"random": random_state(), "logging": logging_state(self)})

    @property
    def _own_format(self) -> bool:
        """Whether we write the optimizer; sharded ones are written by FSDP and DeepSpeed."""
        return not (self.is_fsdp_enabled or self.is_deepspeed_enabled)


class ExactResume(GRPOTrainer):
    """Resumes from the last complete checkpoint; only one process at a time may write the folder."""

    guards: GuardState
    region: TrustRegionState
    _fingerprint: dict[str, Any]
    _changed: bool = False
    _makes_optimizer: bool = False
    _sampler: Sampler | None = None
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
        self._load_rollout(folder / rollout_file(self.accelerator.process_index))

    def _load_rollout(self, path: Path) -> None:
        if not path.exists():
            logger.warning(f"{path} is missing. If the checkpoint is inside a rollout, a new rollout is generated.")
            return
        saved = rollout_schedule(path)
        state = sampler_state(path)
        if state is not None and self._sampler is not None:
            self._sampler.resume(state)
        if {**saved, "step": 0} != {**self._schedule, "step": 0}:
            logger.warning(f"The rollout in {path} belongs to another schedule ({saved}) and is generated again.")
            return
        self._step = int(saved["step"])
        self._buffered_inputs = load_rollout(path, self.accelerator.device)

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
        self._sampler = Sampler(super()._get_train_sampler(dataset))
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
