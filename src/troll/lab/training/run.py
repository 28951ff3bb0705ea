"""One training run: build the trainer, train, record, say what came of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from rich.console import Console
from safetensors import SafetensorError
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import ModelConfig, get_peft_config, get_quantization_config
from trl.trainer.utils import create_model_from_path

from troll.errors import InputError
from troll.files import is_file_error
from troll.lab.models import load_tokenizer
from troll.lab.report.rules import Watch
from troll.lab.runs import Run
from troll.lab.runs.folder import MODEL, Line
from troll.lab.runs.formatting import one_line
from troll.lab.runs.writer import create_run, put_in_place, resume_run, staged_beside, timestamp, update_run
from troll.lab.tasks import Task
from troll.lab.training import provenance as facts
from troll.lab.training.evaluate import stop_token
from troll.lab.training.progress import ShowProgress, say
from troll.lab.training.recorder import RecordedTrainer
from troll.trl import TROLLConfig
from troll.trl.robust.fingerprint import differences, fingerprint, refuse, stored_fingerprint
from troll.trl.robust.interrupt import StopOnSignal
from troll.trl.robust.lock import locked
from troll.trl.robust.resume import ABOUT as STATE
from troll.trl.robust.store import Found, checkpoints, recover


@dataclass(frozen=True)
class RunPlan:
    """Everything that decides a run."""

    folder: Path
    model: str
    """As it was asked for."""
    model_path: str
    """As transformers loads it."""
    task: Task
    args: TROLLConfig
    model_config: ModelConfig
    config: dict[str, Any]
    """The flags that make the same run again."""
    command: str
    save_model: bool = True
    keep_checkpoints: bool = True
    """Whether they stay when the run has finished."""
    resumes: bool = False
    changes: Sequence[str] = ()
    """What was said for a resumed run that differs from what it had."""

    @property
    def origin(self) -> dict[str, Any]:
        """Where on the hub the model comes from, and whether code that comes with it may run."""
        return {"revision": self.model_config.model_revision, "trust_remote_code": self.args.trust_remote_code}


def execute(plan: RunPlan, console: Console) -> Run:
    """Train as planned. An interrupted run ends with a checkpoint; one that fails before an update leaves nothing."""
    main = plan.args.process_index == 0
    with run_folder(plan) if main else nullcontext(), _status(plan, main) as goes_on, StopOnSignal() as stop:
        found = _found(plan, main)
        if main and plan.resumes:
            for sentence in _where(plan, found):
                say(console, sentence)
        plan.args.eval_on_start = plan.args.eval_on_start and found.path is None
        goes_on.found, goes_on.accepted = found, _accepted(plan, found)
        plan.args.allow_changes = plan.args.allow_changes or bool(goes_on.accepted)
        trainer, own_stops = _build(plan)
        shown = ShowProgress(console, Watch(plan.folder) if main else None)
        goes_on.trainer = trainer
        for callback in (goes_on, shown, stop):
            trainer.add_callback(callback)
        for stock in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(stock)
        try:
            trainer.train(resume_from_checkpoint=None if found.path is None else str(found.path))
            if trainer.eval_dataset is not None and not stop.stopped:
                _evaluate_last(trainer)
        finally:
            shown.close()
        if plan.save_model and not stop.stopped:
            _save_model(plan.folder / MODEL, trainer, own_stops)
        if main:
            status = "interrupted" if stop.stopped else "finished"
            update_run(plan.folder, status=status, finished=timestamp(), seconds=trainer.seconds)
            if not stop.stopped and not plan.keep_checkpoints:
                for checkpoint in checkpoints(plan.folder).values():
                    shutil.rmtree(checkpoint, ignore_errors=True)
    return Run(plan.folder)


def _found(plan: RunPlan, main: bool) -> Found:
    """Where to go on from; the first process looks, all take the same."""
    if not plan.resumes:
        return Found()
    found: Found = broadcast_object_list([recover(plan.folder) if main else None])[0]
    return found


def _where(plan: RunPlan, found: Found) -> Iterator[str]:
    """From where a run goes on, and why not from later on."""
    yield from (f"{sentence}." for sentence in found.rejected)
    if found.path is not None:
        yield f"Going on from {found.path.name}."
        return
    yield "There is no checkpoint to go on from: the run begins again, from update 0."
    if plan.args.save_strategy == "no":
        yield "It keeps none (save_strategy: no): --save_strategy steps --save_steps 32 keeps one every 32 updates."


def _accepted(plan: RunPlan, found: Found) -> set[str]:
    """Changes that an earlier resume went on with and that no checkpoint has seen yet: it was killed before."""
    changes = Run(plan.folder).about.get("changes", []) if plan.resumes and not plan.args.allow_changes else []
    return {line for change in changes if change["step"] >= found.step for line in change["differences"]}


def _save_model(place: Path, trainer: RecordedTrainer, own_stops: Any) -> None:
    """The trained model, whole or not at all; an older one makes room."""
    trainer.model.generation_config.eos_token_id = own_stops  # it ends where it did before this task
    main = trainer.accelerator.is_main_process
    try:
        staged = staged_beside(place) if main else place.with_name(f".{place.name}.new")
        trainer.accelerator.wait_for_everyone()
        trainer.save_model(str(staged))
        trainer.accelerator.wait_for_everyone()
        if main:
            put_in_place(staged, place)
    except Exception as error:
        if not is_file_error(error):
            raise
        raise InputError(
            f"the trained model, which cannot be written to {place} ({getattr(error, 'strerror', None) or error})",
            "a folder that can be written, with room for it",
            f"mending that, then --resume {place.parent}: nothing is trained again",
        ) from error


def _evaluate_last(trainer: RecordedTrainer) -> None:
    """On the held-out set, if the last update was not followed by it."""
    done = [line["step"] for line in trainer.state.log_history if "eval_loss" in line]
    if trainer.state.global_step not in done:
        trainer.evaluate()


def _build(plan: RunPlan) -> tuple[RecordedTrainer, Any]:
    args, config = plan.args, plan.model_config
    options = {
        "revision": config.model_revision,
        "dtype": config.dtype,
        "attn_implementation": config.attn_implementation,
        "trust_remote_code": args.trust_remote_code,
        "quantization_config": get_quantization_config(config),
        **(args.model_init_kwargs or {}),
    }
    args.model_init_kwargs = None  # they are for the model, which is made here
    try:
        model = create_model_from_path(plan.model_path, **{k: v for k, v in options.items() if v is not None})
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"the model {plan.model}, which cannot be loaded ({one_line(str(error))})",
            "a causal language model as save_pretrained writes it",
            "changing what is named; or another model",
        ) from error
    tokenizer = load_tokenizer(plan.model_path, padding_side="left", **plan.origin)
    own_stops = model.generation_config.eos_token_id
    if plan.task.stop is not None:
        _end_at(plan.task.stop, model, tokenizer, args)
    try:
        trainer = RecordedTrainer(
            model=model,
            reward_funcs=plan.task.reward_funcs,
            args=args,
            train_dataset=plan.task.train_dataset,
            eval_dataset=plan.task.eval_dataset if args.eval_strategy != "no" else None,
            processing_class=tokenizer,
            peft_config=get_peft_config(config),
            folder=plan.folder,
            seconds_before=_seconds(plan.folder) if plan.resumes else 0.0,
        )
    except InputError:
        raise
    except (ValueError, ImportError) as error:  # TRL's own checks
        sentence = one_line(str(error))
        raise InputError(f"settings that TRL refuses ({sentence})", "others", "changing what it names") from error
    return trainer, own_stops


def _seconds(folder: Path) -> float:
    """What a run took up to now; run.json does not know it of one that was killed."""
    lines = Run(folder).metrics()
    return float(max(Run(folder).about["seconds"], lines[-1]["seconds"] if lines else 0.0))


def _end_at(stop: str, model: Any, tokenizer: Any, args: TROLLConfig) -> None:
    """Let a completion end at a string, which must be one token."""
    token = stop_token(stop, tokenizer)
    own = model.generation_config.eos_token_id
    own = [] if own is None else own if isinstance(own, list) else [own]
    model.generation_config.eos_token_id = [*own, token]
    if args.use_vllm:
        args.generation_kwargs = {**(args.generation_kwargs or {}), "stop_token_ids": [token]}


@contextmanager
def run_folder(plan: RunPlan) -> Iterator[None]:
    """Create the folder of a new run, and hold the lock of the folder."""
    if not plan.resumes:
        create(plan)
    with locked(plan.folder):
        yield


def create(plan: RunPlan) -> None:
    """Create the folder of a new run, atomically."""
    create_run(
        plan.folder,
        plan.config,
        _settings(plan),
        command=plan.command,
        seed=plan.args.seed,
        task={"name": plan.task.name, "description": plan.task.description},
        model={"name": plan.model},
        versions=facts.versions(),
        git=facts.git_state(),
        machine=facts.machine(),
    )


def resume(plan: RunPlan, step: int, changes: Sequence[str] = ()) -> None:
    """Record that a run continues, from which update, and which settings changed."""
    resume_run(plan.folder, step, changes, plan.config, _settings(plan), seed=plan.args.seed, versions=facts.versions())


def _settings(plan: RunPlan) -> Line:
    """Every setting of the trainer except those of the model hub."""
    return {name: value for name, value in plan.args.to_dict().items() if not name.startswith(("push_", "hub_"))}


class _GoesOn(TrainerCallback):
    """Writes down that a run goes on once nothing has refused it, and how many updates it will have."""

    def __init__(self, plan: RunPlan, main: bool) -> None:
        self.plan, self.main = plan, main
        self.began = False
        self.trainer: Any = None
        self.found = Found()
        self.accepted: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        changes = self._changes()
        if self.accepted:
            refuse([change for change in changes if change not in self.accepted])
        self.began = True
        if not self.main:
            return
        plan = self.plan
        if plan.resumes:
            resume(plan, state.global_step, [x for x in changes if x not in self.accepted])
        parameters = self.trainer.model.num_parameters()
        update_run(plan.folder, max_steps=state.max_steps, model={"name": plan.model, "parameters": parameters})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the last update there is none left to lose but those since the last checkpoint."""
        if state.global_step >= state.max_steps and not self.plan.keep_checkpoints:
            control.should_save = False

    def _changes(self) -> list[str]:
        """What was said, and what the trainer has let pass."""
        if self.found.path is None:
            return list(self.plan.changes)
        now = fingerprint(self.trainer)
        before = stored_fingerprint(json.loads((self.found.path / STATE).read_bytes()), now)
        passed = differences(before, now)
        return [*self.plan.changes, *(x for x in passed if x not in self.plan.changes)]


@contextmanager
def _status(plan: RunPlan, main: bool) -> Iterator[_GoesOn]:
    """Write down how it ended if it did not end well; a run that could not be gone on with stays as it was."""
    goes_on = _GoesOn(plan, main)
    try:
        yield goes_on
    except BaseException as error:
        if main and not plan.resumes and not Run(plan.folder).metrics():
            shutil.rmtree(plan.folder)
        elif main and (goes_on.began or not plan.resumes):
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            with suppress(OSError):  # a full disk, and then it is the error that counts
                seconds = _seconds(plan.folder)
                update_run(plan.folder, status=status, finished=timestamp(), seconds=seconds, error=str(error))
        raise
