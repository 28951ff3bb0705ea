"""One training run: build the trainer, train, record, say what came of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from safetensors import SafetensorError
from transformers import PrinterCallback, ProgressCallback
from trl import ModelConfig, get_peft_config, get_quantization_config
from trl.trainer.utils import create_model_from_path

from troll.adapters.trl import TROLLConfig
from troll.errors import InputError
from troll.models import load_tokenizer
from troll.runs import Run, write_json
from troll.runs.arms import arm_of
from troll.runs.folder import ABOUT, CONFIG, FORMAT
from troll.runs.summary import one_line
from troll.tasks import Task
from troll.training import facts
from troll.training.evaluate import stop_token
from troll.training.interrupt import Interrupt
from troll.training.progress import ShowProgress
from troll.training.recorder import RecordedTrainer

MODEL = "model"
_LAST_FILE = "trainer_state.json"


@dataclass(frozen=True)
class Plan:
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
    resumes: bool = False

    @property
    def origin(self) -> dict[str, Any]:
        """Where on the hub the model comes from, and whether code that comes with it may run."""
        return {"revision": self.model_config.model_revision, "trust_remote_code": self.args.trust_remote_code}


def checkpoint_of(folder: Path) -> str:
    """The newest checkpoint of a run; without its last file, the trainer's state, it was not written to the end."""
    found = {int(path.parent.name.partition("-")[2]): path.parent for path in folder.glob(f"checkpoint-*/{_LAST_FILE}")}
    if not found:
        raise InputError(
            f"the run {folder} to go on with", "a run with a checkpoint", "starting it anew without --resume"
        )
    return str(found[max(found)])


def execute(plan: Plan, console: Console) -> Run:
    """Train as planned. An interrupted run ends with a checkpoint; one that fails before an update leaves nothing."""
    main = plan.args.process_index == 0
    if main:
        begin(plan)
    with _status(plan, main), Interrupt() as interrupt:
        trainer, own_stops = _build(plan)
        if main:
            note(plan.folder, model={"name": plan.model, "parameters": trainer.model.num_parameters()})
        shown = ShowProgress(console)
        for callback in (shown, interrupt):
            trainer.add_callback(callback)
        for stock in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(stock)
        try:
            trainer.train(resume_from_checkpoint=checkpoint_of(plan.folder) if plan.resumes else None)
            if trainer.eval_dataset is not None and not interrupt.stopped:
                _evaluate_last(trainer)
        finally:
            shown.close()
        if plan.save_model and not interrupt.stopped:
            trainer.model.generation_config.eos_token_id = own_stops  # it ends where it did before this task
            trainer.save_model(str(plan.folder / MODEL))
    if main:
        status = "interrupted" if interrupt.stopped else "finished"
        note(plan.folder, status=status, finished=now(), seconds=trainer.seconds)
    return Run(plan.folder)


def _evaluate_last(trainer: RecordedTrainer) -> None:
    """On the held-out set, if the last update was not followed by it."""
    done = [line["step"] for line in trainer.state.log_history if "eval_loss" in line]
    if trainer.state.global_step not in done:
        trainer.evaluate()


def _build(plan: Plan) -> tuple[RecordedTrainer, Any]:
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
            train_dataset=plan.task.train,
            eval_dataset=plan.task.held_out if args.eval_strategy != "no" else None,
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


def begin(plan: Plan) -> None:
    """The files that are there from the start."""
    if plan.resumes:
        note(plan.folder, status="running", finished=None)
        return
    try:
        plan.folder.mkdir(parents=True)
    except FileExistsError:
        raise InputError(f"the run {plan.folder}, which another one has just begun", "a new name", "again") from None
    except OSError as error:
        raise InputError(f"{plan.folder}, which cannot be made ({error.strerror})", "a folder", "--runs_dir") from None
    settings = {name: value for name, value in plan.args.to_dict().items() if not name.startswith(("push_", "hub_"))}
    arm, label = arm_of(settings)
    write_json(
        plan.folder / ABOUT,
        {
            "format": FORMAT,
            "name": plan.folder.name,
            "status": "running",
            "started": now(),
            "finished": None,
            "seconds": 0.0,
            "command": plan.command,
            "seed": plan.args.seed,
            "task": {"name": plan.task.name, "description": plan.task.description},
            "model": {"name": plan.model},
            "arm": arm,
            "arm_label": label,
            "settings": settings,
            "versions": facts.versions(),
            "git": facts.git_state(),
            "machine": facts.machine(),
        },
    )
    (plan.folder / CONFIG).write_text(yaml.safe_dump(plan.config, sort_keys=True, allow_unicode=True), encoding="utf-8")


@contextmanager
def _status(plan: Plan, main: bool) -> Iterator[None]:
    """Write down how it ended if it did not end well."""
    try:
        yield
    except BaseException as error:
        if main:
            if not Run(plan.folder).metrics() and not plan.resumes:
                shutil.rmtree(plan.folder)
            else:
                stopped = isinstance(error, KeyboardInterrupt)
                status = "interrupted" if stopped else "failed"
                note(plan.folder, status=status, finished=now(), seconds=_seconds(plan.folder), error=str(error))
        raise


def note(folder: Path, **new: Any) -> None:
    """Change what ``run.json`` says."""
    write_json(folder / ABOUT, {**Run(folder).about, **new})


def now() -> str:
    """The time, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
