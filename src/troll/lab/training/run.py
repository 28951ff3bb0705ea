"""One training run: build the trainer, train, and keep the run folder up to date."""

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
from troll.lab.hub import fail_fast
from troll.lab.models import load_tokenizer
from troll.lab.report.rules import RuleMonitor
from troll.lab.runs import Run
from troll.lab.runs.folder import MODEL, Line
from troll.lab.runs.formatting import one_line
from troll.lab.runs.writer import create_run, put_in_place, resume_run, staged_beside, timestamp, update_run
from troll.lab.tasks import Task
from troll.lab.training.evaluate import stop_token
from troll.lab.training.progress import ShowProgress, say
from troll.lab.training.recorder import RecordedTrainer
from troll.lab.training.settings import git_state, machine, versions
from troll.trl import TROLLConfig
from troll.trl.robust.checkpoints import ABOUT as STATE
from troll.trl.robust.fingerprint import differences, fingerprint, refuse, stored_fingerprint
from troll.trl.robust.interrupt import StopOnSignal
from troll.trl.robust.store import Found, checkpoints, locked, recover

_LOGGERS = ("wandb", "trackio", "mlflow", "swanlab", "comet_ml", "clearml")


@dataclass(frozen=True)
class RunPlan:
    """Everything that determines a run."""

    folder: Path
    model: str
    """The name given by the user."""
    model_path: str
    """What transformers loads."""
    task: Task
    args: TROLLConfig
    model_config: ModelConfig
    config: dict[str, Any]
    """The flags that reproduce the run."""
    command: str
    save_model: bool = True
    keep_checkpoints: bool = True
    """Whether checkpoints are kept after the run has finished."""
    resumes: bool = False
    changes: Sequence[str] = ()
    """The settings of a resumed run that differ from those before."""

    @property
    def origin(self) -> dict[str, Any]:
        """The revision of the model on the hub, and whether its code may run."""
        return {"revision": self.model_config.model_revision, "trust_remote_code": self.args.trust_remote_code}


def execute(plan: RunPlan, console: Console) -> Run:
    """Train as planned. An interrupted run ends with a checkpoint; one that fails before an update is removed."""
    main = plan.args.process_index == 0
    with run_folder(plan) if main else nullcontext(), _status(plan, main) as tracker, StopOnSignal() as stop:
        checkpoint = _checkpoint(plan, main)
        if main and plan.resumes:
            for sentence in _resume_messages(plan, checkpoint):
                say(console, sentence)
        plan.args.eval_on_start = plan.args.eval_on_start and checkpoint.path is None
        tracker.checkpoint, tracker.accepted = checkpoint, _accepted(plan, checkpoint)
        plan.args.allow_changes = plan.args.allow_changes or bool(tracker.accepted)
        trainer, eos_token_id = _build(plan)
        shown = ShowProgress(console, RuleMonitor(plan.folder) if main else None)
        tracker.trainer = trainer
        for callback in (tracker, shown, stop):
            trainer.add_callback(callback)
        for stock in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(stock)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint.path is None else str(checkpoint.path))
            if trainer.eval_dataset is not None and not stop.stopped:
                _evaluate_last(trainer)
        except Exception as error:
            logger = type(error).__module__.partition(".")[0]
            if logger not in _LOGGERS:
                raise
            raise InputError(
                f"--report_to {logger} failed: {one_line(str(error))}", "Fix it or leave it out"
            ) from error
        finally:
            shown.close()
        if plan.save_model and not stop.stopped:
            _save_model(plan.folder / MODEL, trainer, eos_token_id)
        if main:
            status = "interrupted" if stop.stopped else "finished"
            update_run(plan.folder, status=status, finished=timestamp(), seconds=trainer.seconds)
            if not stop.stopped and not plan.keep_checkpoints:
                for path in checkpoints(plan.folder).values():
                    shutil.rmtree(path, ignore_errors=True)
    return Run(plan.folder)


def _checkpoint(plan: RunPlan, main: bool) -> Found:
    """The checkpoint to resume from. The first process searches, all use its result."""
    if not plan.resumes:
        return Found()
    checkpoint: Found = broadcast_object_list([recover(plan.folder) if main else None])[0]
    return checkpoint


def _resume_messages(plan: RunPlan, checkpoint: Found) -> Iterator[str]:
    """From which checkpoint a run resumes, and why later ones were rejected."""
    yield from (f"{sentence}." for sentence in checkpoint.rejected)
    if checkpoint.path is not None:
        yield f"Resuming from {checkpoint.path.name}."
        return
    yield "There is no checkpoint: the run restarts from update 0."
    if plan.args.save_strategy == "no":
        yield "save_strategy is no. --save_strategy steps --save_steps 32 saves a checkpoint every 32 updates."


def _accepted(plan: RunPlan, checkpoint: Found) -> set[str]:
    """Changes that an earlier resume accepted but that no checkpoint contains yet, because it was killed."""
    changes = Run(plan.folder).about.get("changes", []) if plan.resumes and not plan.args.allow_changes else []
    return {line for change in changes if change["step"] >= checkpoint.step for line in change["differences"]}


def _save_model(place: Path, trainer: RecordedTrainer, eos_token_id: Any) -> None:
    """Write the trained model atomically, in place of an older one."""
    trainer.model.generation_config.eos_token_id = eos_token_id  # without the stop token of the task
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
            f"Cannot write the trained model to {place}: {getattr(error, 'strerror', None) or error}",
            f"Fix this, then --resume {place.parent} writes it without training again",
        ) from error


def _evaluate_last(trainer: RecordedTrainer) -> None:
    """Evaluate after the last update unless that was done."""
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
    args.model_init_kwargs = None  # used here
    try:
        with nullcontext() if Path(plan.model_path).exists() else fail_fast():
            model = create_model_from_path(plan.model_path, **{k: v for k, v in options.items() if v is not None})
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"Cannot load the model {plan.model}: {one_line(str(error))}",
            "It must be a causal language model as save_pretrained writes it",
        ) from error
    tokenizer = load_tokenizer(plan.model_path, padding_side="left", **plan.origin)
    eos_token_id = model.generation_config.eos_token_id
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
    except (ValueError, ImportError) as error:  # raised by TRL
        raise InputError(
            f"TRL rejected the configuration: {one_line(str(error))}", "Correct the setting it names"
        ) from error
    return trainer, eos_token_id


def _seconds(folder: Path) -> float:
    """Seconds of a run until now, from its metrics if it was killed."""
    lines = Run(folder).metrics()
    return float(max(Run(folder).about["seconds"], lines[-1]["seconds"] if lines else 0.0))


def _end_at(stop: str, model: Any, tokenizer: Any, args: TROLLConfig) -> None:
    """Let completions also end at a string, which must be one token."""
    token = stop_token(stop, tokenizer)
    eos = model.generation_config.eos_token_id
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    model.generation_config.eos_token_id = [*eos, token]
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
        versions=versions(),
        git=git_state(),
        machine=machine(),
    )


def resume(plan: RunPlan, step: int, changes: Sequence[str] = ()) -> None:
    """Record that a run continues, from which update, and which settings changed."""
    resume_run(plan.folder, step, changes, plan.config, _settings(plan), seed=plan.args.seed, versions=versions())


def _settings(plan: RunPlan) -> Line:
    """Every setting of the trainer except those of the model hub."""
    return {name: value for name, value in plan.args.to_dict().items() if not name.startswith(("push_", "hub_"))}


class _StatusTracker(TrainerCallback):
    """Records in run.json that a run has started or resumed, and its number of updates."""

    def __init__(self, plan: RunPlan, main: bool) -> None:
        self.plan, self.main = plan, main
        self.began = False
        self.trainer: Any = None
        self.checkpoint = Found()
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
        """Skip the checkpoint after the last update if it would be deleted."""
        if state.global_step >= state.max_steps and not self.plan.keep_checkpoints:
            control.should_save = False

    def _changes(self) -> list[str]:
        """The changed flags, and the differences from the checkpoint that the trainer accepted."""
        if self.checkpoint.path is None:
            return list(self.plan.changes)
        now = fingerprint(self.trainer)
        before = stored_fingerprint(json.loads((self.checkpoint.path / STATE).read_bytes()), now)
        passed = differences(before, now)
        return [*self.plan.changes, *(x for x in passed if x not in self.plan.changes)]


@contextmanager
def _status(plan: RunPlan, main: bool) -> Iterator[_StatusTracker]:
    """Record how a run failed. A run that could not be resumed stays unchanged."""
    tracker = _StatusTracker(plan, main)
    try:
        yield tracker
    except BaseException as error:
        if main and not plan.resumes and not Run(plan.folder).metrics():
            shutil.rmtree(plan.folder)
        elif main and (tracker.began or not plan.resumes):
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            with suppress(OSError):  # on a full disk the original error matters
                seconds = _seconds(plan.folder)
                update_run(plan.folder, status=status, finished=timestamp(), seconds=seconds, error=str(error))
        raise
