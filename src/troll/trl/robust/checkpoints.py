"""Checkpoints that are complete or absent, with everything a run needs to continue exactly (``resume``).

TRL writes a checkpoint in place, drops the rollout in progress, and pickles the optimizer and the random generators.
Here its files are staged, checksummed and renamed (``store``), and the rest of the run's state is saved with them as
safetensors and JSON. TRL writes the model and the trainer state itself.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from trl import GRPOTrainer

from troll.errors import TrainingError
from troll.files import is_file_error, write_atomic
from troll.trl.robust import rollout_state
from troll.trl.robust.guards import GuardState
from troll.trl.robust.resume import ABOUT, OPTIMIZER, REFERENCE, process_file
from troll.trl.robust.state import logging_state, random_state, save_state, state_bytes
from troll.trl.robust.store import STAGING, Seals, commit, last_good, rotate, stage
from troll.trl.trust_region import TrustRegionState

logger = get_logger(__name__)

_MIB = 2**20


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
        path = folder / rollout_state.file_name(self.accelerator.process_index)
        rollout_state.save(path, self._buffered_inputs, self._schedule, sampler)

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
