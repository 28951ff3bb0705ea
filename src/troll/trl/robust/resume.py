"""Going on from a checkpoint as if nothing had happened: which one, whether it may be, and everything that is in it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from trl import GRPOTrainer

from troll.errors import InputError
from troll.trl.region_state import Region
from troll.trl.robust import rollout_state as rollout
from troll.trl.robust.changes import refuse_changes
from troll.trl.robust.fingerprint import identity
from troll.trl.robust.lock import locked
from troll.trl.robust.optimizer_overrides import renew
from troll.trl.robust.process_state import restore_logging, restore_random_state
from troll.trl.robust.store import MANIFEST, STAGING, last_good, recover, verify
from troll.trl.robust.tensor_state import load_state
from troll.trl.robust.update_state import GuardState

logger = get_logger(__name__)

ABOUT, OPTIMIZER, REFERENCE = "troll.json", "optimizer.safetensors", "reference.safetensors"


def process_file(process: int) -> str:
    """Name of the file with what one process knows."""
    return f"troll_process_{process:05d}.safetensors"


class Resumed(GRPOTrainer):
    """Goes on from the last good checkpoint exactly; one process at a time writes the folder."""

    guards: GuardState
    region: Region
    _identity: dict[str, Any]
    _changed: bool = False
    _makes_optimizer: bool = False
    _sampler: rollout.Sampler | None = None
    _resumed: str | None = None
    """The checkpoint whose random generators are still to be restored."""
    _renamed: bool = False

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
            self.guards = GuardState(**{k: v for k, v in about["guards"].items() if k in vars(self.guards)})
            self.region.restore(about.get("region", {}))

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
