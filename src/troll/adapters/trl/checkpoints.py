"""Checkpoints that survive, and from which a run goes on as if nothing had happened.

TRL writes a checkpoint in place, forgets the rollout it is in the middle of, and keeps optimizer and random generators
as pickles. Here its files are staged, checksummed and renamed (``troll.checkpoints``), and with them goes everything
else that decides how the run goes on, as safetensors and JSON. Model and trainer's state are written as TRL does it.
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

from troll.adapters.trl import rollout
from troll.adapters.trl.guards import GuardState
from troll.adapters.trl.identity import identity
from troll.adapters.trl.renew import renew
from troll.adapters.trl.snapshot import logging_state, random_state, restore_logging, restore_random_state
from troll.checkpoints import last_good, recover, verify
from troll.checkpoints.changes import refuse_changes
from troll.checkpoints.files import is_of_files, write_whole
from troll.checkpoints.state import load_state, save_state, state_bytes
from troll.checkpoints.store import MANIFEST, STAGING, Seals, commit, rotate, stage
from troll.errors import InputError, TrainingError
from troll.runs.lock import locked

logger = get_logger(__name__)

ABOUT, OPTIMIZER, REFERENCE = "troll.json", "optimizer.safetensors", "reference.safetensors"
_MIB = 2**20


def process_file(process: int) -> str:
    """Name of the file with what one process knows."""
    return f"troll_process_{process:05d}.safetensors"


class Checkpointed(GRPOTrainer):
    """Saves whole checkpoints, and goes on from the last good one exactly."""

    guards: GuardState
    _identity: dict[str, Any]
    _changed: bool = False
    _makes_optimizer: bool = False
    _staged: Path | None = None
    _seals: Seals | None = None
    _to_push: bool = False
    _sampler: rollout.Sampler | None = None
    _resumed: str | None = None
    """The checkpoint whose random generators are still to be restored."""
    _renamed: bool = False

    # ------------------------------------------------------------------ going on

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **named: Any) -> Any:
        """As TRL; ``True`` goes on from the newest checkpoint that is whole. Nobody else may write the folder."""
        root = Path(self.args.output_dir)
        evaluates = self.args.eval_on_start
        self._identity, self._changed = identity(self), False
        self._makes_optimizer = self._makes_optimizer or self.optimizer is None
        with locked(root) if self.accelerator.is_main_process else nullcontext():
            self._resumed = self._choose(root, resume_from_checkpoint)
            if self._resumed is not None:
                self._restore_about(Path(self._resumed) / ABOUT)
                self.args.eval_on_start = False  # it was made when the run began
            try:
                return super().train(self._resumed, *args, **named)
            finally:
                self.args.eval_on_start = evaluates

    def _choose(self, root: Path, asked: str | bool | None) -> str | None:
        """The checkpoint to go on from: the main process looks, all take the same."""
        if not asked:
            return None
        choice: list[str | None] = [None]
        if self.accelerator.is_main_process:
            choice = [_last_good(root) if asked is True else _checked(root, Path(asked))]
        broadcast_object_list(choice)
        return choice[0]

    def _restore_about(self, path: Path) -> None:
        if path.exists():
            about = json.loads(path.read_text(encoding="utf-8"))
            for change in refuse_changes(about["identity"], self._identity, self.args.allow_changes):
                logger.warning(f"The run goes on with a change: {change}")
                self._changed = True
            self.guards = GuardState(**about["guards"])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """As transformers, which leaves out weights that are saved under other names than they have in the model."""
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
                renew(self)
        if (folder / REFERENCE).exists() and self.ref_model is not None:
            self.accelerator.unwrap_model(self.ref_model).load_state_dict(load_state(folder / REFERENCE))
        self._load_rollout(folder / rollout.file_name(self.accelerator.process_index))

    def _load_rollout(self, path: Path) -> None:
        if not path.exists():
            logger.warning(f"{path} is missing: if the checkpoint is inside a rollout, another one is generated.")
            return
        saved = rollout.facts(path)
        state = rollout.sampler(path)
        if state is not None and self._sampler is not None:
            self._sampler.resume(state)
        if {**saved, "step": 0} != {**self._facts, "step": 0}:
            logger.warning(f"The rollout in {path} was made on another schedule ({saved}) and is generated again.")
            return
        self._step = int(saved["step"])
        self._buffered_inputs = rollout.load(path, self.accelerator.device)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """What this process knows, right before its first update."""
        self._resumed = None
        path = Path(checkpoint or "") / process_file(self.args.process_index)
        if not path.exists():
            super()._load_rng_state(checkpoint)
            return
        state = load_state(path)
        restore_random_state(state["random"])
        restore_logging(self, state["logging"])

    def _run_epoch(self, *args: Any, **named: Any) -> None:
        """As transformers, which makes one more update when a run is resumed that has made all."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **named)

    def _finalize_training(self, *args: Any, **named: Any) -> Any:
        if self._resumed is not None:  # there was nothing left to do
            self._load_rng_state(self._resumed)
        return super()._finalize_training(*args, **named)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._sampler = rollout.Sampler(super()._get_train_sampler(dataset))
        return self._sampler

    # ------------------------------------------------------------------ saving

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As TRL, aside; then brought into its place, and only then older ones are deleted."""
        root = Path(self._get_output_dir(trial=trial))
        place = root / f"checkpoint-{self.state.global_step}"
        self._together(root, lambda: self._begin(root))
        self._staged, self._to_push = root / STAGING / place.name, False
        try:
            self._together(root, lambda: self._write(model, trial, place))
        finally:
            self._staged = None
        self._together(root, lambda: self._publish(root, place))
        if self._to_push:
            self._push_from_checkpoint(str(place))

    def _begin(self, root: Path) -> None:
        if self.args.should_save:
            self._seals = Seals(stage(root, self.state.global_step))
            free, needed = shutil.disk_usage(root).free, self._checkpoint_bytes()
            if free < needed:
                raise OSError(errno.ENOSPC, f"{needed // _MIB + 1} MiB are needed, {free // _MIB} MiB are free")

    def _write(self, model: Any, trial: Any, place: Path) -> None:
        assert self._staged is not None
        super()._save_checkpoint(model, trial)
        if not self.args.should_save:
            return
        if self.state.best_model_checkpoint == str(self._staged):
            self.state.best_model_checkpoint = str(place)
            self.state.save_to_json(str(self._staged / "trainer_state.json"))
        about = {"identity": self._identity, "guards": asdict(self.guards)}
        write_whole(self._staged / ABOUT, json.dumps(about, indent=1).encode())

    def _publish(self, root: Path, place: Path) -> None:
        if not self.args.should_save:
            return
        commit(root / STAGING / place.name, self._seals)
        best = self.state.best_model_checkpoint
        for left in rotate(root, place, self.args.save_total_limit, None if best is None else Path(best)):
            logger.warning(f"{left}, an older checkpoint, could not be deleted.")

    def _together(self, root: Path, action: Callable[[], None]) -> None:
        """Do it on every process. If it fails on one, all stop, and the last good checkpoint is named."""
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            if not is_of_files(error):
                raise
            failure = error
        failed = torch.tensor(float(failure is not None), device=self.accelerator.device)
        if self.accelerator.num_processes > 1:
            torch.distributed.all_reduce(failed)
        if failed > 0:
            if self._seals is not None:
                self._seals.give_up()
            if self.args.should_save:
                shutil.rmtree(root / STAGING, ignore_errors=True)
            raise self._not_saved(root, failure) from failure

    def _not_saved(self, root: Path, failure: Exception | None) -> TrainingError:
        why = getattr(failure, "strerror", None) or failure or "another process failed"
        good = last_good(root).path
        after = f"resuming from {good}, the last good checkpoint" if good else "starting anew: there is no earlier one"
        return TrainingError(
            f"the checkpoint of update {self.state.global_step}, which cannot be written to {root} ({why})",
            "a folder that can be written, with room for it",
            f"mending that, then {after}",
        )

    def _checkpoint_bytes(self) -> int:
        """About how many bytes a checkpoint takes: weights, optimizer, rollout."""
        adapter = is_peft_model(self.accelerator.unwrap_model(self.model))
        weights: int = sum(x.nbytes for x in self.model.parameters() if x.requires_grad or not adapter)
        if self.args.save_only_model:
            return weights
        state = state_bytes(self.optimizer.state_dict()) if self._own_format else 0
        buffered: int = sum(
            x.nbytes for batch in self._buffered_inputs or [] for x in batch.values() if isinstance(x, torch.Tensor)
        )
        return weights + state + buffered

    def _get_output_dir(self, trial: Any = None, **named: Any) -> str:
        return super()._get_output_dir(trial, **named) if self._staged is None else str(self._staged.parent)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staged is None:
            super()._push_from_checkpoint(checkpoint_folder)
        else:
            self._to_push = True  # once it is in its place

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)  # another process may not have made it yet
        if self._seals is not None:
            self._seals.begin()  # the disk takes the weights while the optimizer is written
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
        if self._sampler is not None:  # the next epoch draws an order, the one that goes on draws its own again
            sampler = self._sampler.state if float(self.state.epoch).is_integer() else self._sampler.before
        path = folder / rollout.file_name(self.accelerator.process_index)
        rollout.save(path, self._buffered_inputs, self._facts, sampler)

    def _save_scaler(self, output_dir: str) -> None:
        if not self._own_format:
            super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        path = Path(output_dir) / process_file(self.args.process_index)
        save_state(path, {"random": random_state(), "logging": logging_state(self)})

    @property
    def _own_format(self) -> bool:
        """Sharded optimizers are written by FSDP and DeepSpeed, each in its own way."""
        return not (self.is_fsdp_enabled or self.is_deepspeed_enabled)

    @property
    def _scaler(self) -> Any:
        return getattr(self.accelerator, "scaler", None)

    @property
    def _facts(self) -> dict[str, float]:
        """Where in which schedule this process is, and what the batches of a rollout are made for."""
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


def _last_good(root: Path) -> str:
    found = recover(root)
    for sentence in found.rejected:
        logger.warning(sentence)
    if found.path is None:
        raise InputError(
            f"resume_from_checkpoint=True, and no checkpoint in {root} is whole", "one", "train() without it"
        )
    return str(found.path)


def _checked(root: Path, checkpoint: Path) -> str:
    """A checkpoint that was named: as it is if it is whole, or if it is not one of ours."""
    if (root / STAGING).exists():
        recover(root)
    wrong = verify(checkpoint)
    if wrong is not None and (checkpoint / MANIFEST).exists():
        good = last_good(root).path
        hint = f"{good}, which is whole" if good else "another one: none here is whole"
        raise InputError(f"the checkpoint {checkpoint}, which is damaged: {wrong}", "a whole one", hint)
    if wrong is not None:
        logger.warning(f"{checkpoint} is taken unchecked: {wrong}.")
    return str(checkpoint)
