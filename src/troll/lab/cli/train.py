"""``troll train``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from troll.errors import InputError
from troll.lab.cli.flags import Flags
from troll.lab.cli.main import as_words, existing_folder
from troll.lab.runs import Run, check_run_name, free_run_name
from troll.lab.runs.comparison import arm_of
from troll.lab.runs.folder import CONFIG
from troll.lab.runs.listing import resumable_from
from troll.lab.runs.writer import run_name_of
from troll.lab.training.settings import DEFAULT_MODEL, ONLY_VERL, RunSettings, defaults
from troll.trl.robust.fingerprint import differences, refuse_changes
from troll.trl.robust.store import locked

DESCRIPTION = """\
Fine-tune a language model on a task with verifiable rewards, with a trust region in place of PPO's clip.

  troll train                                              SmolLM2-135M on short sums, on a CPU, in minutes
  troll train --trust_region clip                          the same with PPO's clip
  troll train --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k
  troll train --task gym:gcd --task_options max_value=20   any task of reasoning-gym
  troll train --task my_task.py                            your own prompts and reward
  troll train --config my.yaml --kl_bound 0.02             flags from a file; flags on the command line override it
  troll train --dry_run                                    print the settings, memory and time, and stop
  troll train --resume arithmetic-troll                    resume a run that was interrupted or killed
  troll train --resume x --kl_bound 0.1 --allow_changes    resume it with other settings
  accelerate launch -m troll train …                       on several GPUs
  troll train --engine verl --nodes 8 --gpus_per_node 8    on a Ray cluster, with verl

A run is a folder below --runs_dir with metrics.jsonl, config.yaml, the model and report.html. Ctrl-C saves a checkpoint
and ends the run; `troll runs` lists all runs. A trust region needs several updates per rollout to have an effect.
"""

_MEASURED_PROMPTS = 64  # to estimate the mean length of a prompt


def run(argv: Sequence[str]) -> int:
    """Train, or print the plan with --dry_run."""
    flags = Flags(argv, description=DESCRIPTION)
    if flags.wants_help:
        print(flags.help(), end="")
        return 0
    settings, folder = flags.run(), None
    changes: Sequence[str] = ()
    if settings.resume is not None:
        folder, flags, changes = _resumed(flags, settings)
        settings = flags.run()
    _check_engine(flags, settings)
    quiet()
    command = f"troll train {shlex.join(argv)}".strip()
    if settings.engine == "verl":
        from troll.lab.cli import verl

        return verl.run(flags, settings, folder, command, changes)
    from troll.lab.training.progress import say
    from troll.lab.training.run import execute

    plan = plan_of(flags, settings, folder, command, changes)
    main = plan.args.process_index == 0
    if settings.dry_run:
        if main:
            _dry_run(plan)
        return 0
    console = Console()
    if main:
        say(console, f"{plan.task.name}: {plan.task.description}")
        say(console, f"{plan.model} → {plan.folder}")
    try:
        finished = execute(plan, console)
    except KeyboardInterrupt:
        if main:
            say(console, stopped(plan.folder))
        raise
    if main:
        for line in conclusion(finished, settings):
            say(console, line)
    return 0


def check(argv: Sequence[str]) -> None:
    """Raise if these flags are invalid."""
    flags = Flags(argv)
    if flags.wants_help:
        return
    settings = flags.run()
    options_of(settings.task_options)
    _check_engine(flags, settings)
    args, model = flags.configs(
        defaults(settings.model, {}, has_gpu(), settings.engine, "preset" in flags.given), "unused"
    )
    if settings.engine == "verl":
        from troll.lab.cli import verl

        verl.check(flags, settings, args, model)


def _check_engine(flags: Flags, settings: RunSettings) -> None:
    """Raise for flags that only the other engine has."""
    for name in ONLY_VERL if settings.engine == "trl" else ():
        if name in flags.given:
            instead = {"nodes": "--num_machines", "gpus_per_node": "--num_processes"}
            fix = f"With TRL use accelerate launch {instead[name]}" if name in instead else "Leave it out"
            raise InputError(f"--{name} needs --engine verl", fix)


def has_gpu() -> bool:
    """Whether an accelerator is available."""
    import torch

    return torch.accelerator.is_available()


def quiet() -> None:
    """Silence the progress bars and log messages of transformers and datasets."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def options_of(pairs: Sequence[str]) -> Mapping[str, Any]:
    """The options of ``key=value`` pairs, with values parsed as YAML.

    >>> options_of(["digits=2", "operations=+-"])
    {'digits': 2, 'operations': '+-'}
    """
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InputError(
                f"The task option {pair!r} is not of the form key=value", "For example: --task_options digits=2"
            )
        try:
            read = yaml.safe_load(value)
        except yaml.YAMLError:
            read = None
        options[key] = read if isinstance(read, (int, float, str)) else value
    return options


def _resumed(flags: Flags, settings: RunSettings) -> tuple[Path, Flags, list[str]]:
    """The folder of a run to resume, its flags with the given ones on top, and the differences."""
    for name in ("run_name", "dry_run"):
        if name in flags.given:
            raise InputError(f"--resume cannot be combined with --{name}", "A resumed run keeps its name and settings")
    folder = existing_folder(str(settings.resume), settings.runs_dir, "run")
    if Run.open(folder).about["status"] == "finished":
        raise InputError(f"The run {folder} is finished and cannot be resumed", "Start a new run")
    if os.environ.get("RANK", "0") == "0":
        with locked(folder):  # raise before anything is loaded if another process holds it
            pass
    both = flags.over(folder / CONFIG)
    before, after = Flags(["--config", str(folder / CONFIG)]).values(), both.values()
    after["runs_dir"] = before["runs_dir"]  # where it was looked for
    if before["engine"] != after["engine"]:
        raise InputError(
            f"--engine {after['engine']}, but the run was started with {before['engine']}",
            "Start a new run to change it",
        )
    refuse_changes(before, after, flags.value("allow_changes", False))
    return folder, both, differences(before, after, everything=True)


def plan_of(flags: Flags, settings: RunSettings, folder: Path | None, command: str, changes: Sequence[str] = ()) -> Any:
    """The ``troll.lab.training.run.RunPlan`` of these flags, in a new folder or in that of a resumed run."""
    from troll.lab.models import load_config, resolve_model
    from troll.lab.tasks import load_task
    from troll.lab.training.run import RunPlan
    from troll.rewards.sandbox import allow_unsandboxed

    allow_unsandboxed(settings.allow_unsandboxed_code)
    seed = flags.value("seed", defaults(settings.model, {}, has_gpu())["seed"])
    task = load_task(
        settings.task,
        data=settings.data,
        eval_data=settings.eval_data,
        options=options_of(settings.task_options),
        reward=settings.reward,
        train_size=settings.train_size,
        eval_size=settings.eval_size,
        seed=seed,
    )
    usual = defaults(settings.model, dict(task.settings), has_gpu(), settings.engine, "preset" in flags.given)
    args, model_config = flags.configs(usual, settings.runs_dir)
    resumes = folder is not None
    if folder is None:
        name = flags.value("run_name", None)
        folder = _agreed(args, lambda: new_folder(Path(settings.runs_dir), name, settings.task, args.trust_region))
    args.output_dir, args.run_name = str(folder), folder.name
    before_training = not (resumes and settings.engine == "verl") and args.eval_strategy != "no"
    args.eval_on_start = args.eval_on_start and before_training
    path = resolve_model(settings.model)
    plan = RunPlan(
        folder=folder,
        model=settings.model,
        model_path=path,
        task=task,
        args=args,
        model_config=model_config,
        config=flags.resolved(),
        command=command,
        save_model=settings.save_model,
        keep_checkpoints=flags.value("keep_checkpoints", settings.model != DEFAULT_MODEL),
        resumes=resumes,
        changes=changes,
    )
    load_config(path, **plan.origin)
    return plan


def _agreed(args: Any, choose: Callable[[], Path]) -> Path:
    """The choice of the first process, for all processes: a later one might see the folder already created."""
    from accelerate.utils import broadcast_object_list

    chosen = [choose() if args.process_index == 0 else None]
    return broadcast_object_list(chosen)[0]  # type: ignore[no-any-return]


def new_folder(root: Path, name: str | None, task: str, trust_region: str) -> Path:
    """The folder of a new run. A given name must be unused; a generated one gets a number if necessary."""
    if name is None:
        plain = Path(task).stem if task.endswith(".py") else task
        return root / free_run_name(root, run_name_of(f"{plain}-{trust_region}"))
    folder = root / check_run_name(name)
    if folder.exists():
        raise InputError(f"The run folder {folder} exists already", f"Use another --run_name, or --resume {name}")
    return folder


def _dry_run(plan: Any) -> None:
    """Print a valid file for --config: the settings, and as comments the trust region and the memory and time.

    Warnings about settings without effect are logged to stderr, as in training.
    """
    plan.args.warn_about_settings()
    print(yaml.safe_dump(plan.config, sort_keys=True, allow_unicode=True), end="")
    troll = plan.args.trust_region == "troll"
    region = preset_values(plan.args) if troll else [arm_of(plan.args.to_dict())[1]]
    comments = ["", "Trust region", *(f"  {line}" for line in region), "", *str(needs(plan)).splitlines()]
    print("\n".join(f"# {line}".rstrip() for line in comments))


def preset_values(args: Any) -> list[str]:
    """The preset and the resolved value of each setting that it sets."""
    names = ("preset", "kl_bound", "regression_coef", "tail", "max_support", "tail_mass")
    return [f"{name:17}{as_words(getattr(args, name))}" for name in names]


def needs(plan: Any) -> Any:
    """Memory and time of a run: ``troll.lab.training.estimate.ResourceEstimate``."""
    from trl import get_peft_config

    from troll.lab.models import load_tokenizer
    from troll.lab.training.estimate import estimate

    args, task = plan.args, plan.task
    args.model_init_kwargs = {"dtype": plan.model_config.dtype, **(args.model_init_kwargs or {})}
    return estimate(
        args,
        plan.model_path,
        _prompt_tokens(
            task.train_dataset["prompt"][:_MEASURED_PROMPTS], load_tokenizer(plan.model_path, **plan.origin)
        ),
        args.device,
        prompts=len(task.train_dataset),
        eval_size=len(task.eval_dataset),
        peft_config=get_peft_config(plan.model_config),
    )


def _prompt_tokens(prompts: Sequence[Any], tokenizer: Any) -> float:
    """The mean length of some prompts, plain or chat, in tokens."""

    def tokens(prompt: Any) -> int:
        if isinstance(prompt, str):
            return len(tokenizer(prompt)["input_ids"])
        return len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])

    return sum(map(tokens, prompts)) / len(prompts)


def conclusion(run: Run, settings: RunSettings) -> Iterator[str]:
    """The result of a run, and the next command."""
    if run.about["status"] == "interrupted":
        yield f"Interrupted; a checkpoint was saved. Resume with: {_resume(run.path)}"
        return
    from troll.lab.report import narrator

    yield from narrator.conclusion(run)
    if settings.write_report:
        from troll.lab.report import write_report

        try:
            yield f"Report: {write_report(run.path)}"
        except KeyboardInterrupt:
            yield f"The run is finished, but not its report. Write it with: troll report {_quoted(run.path)}"
            raise


def stopped(folder: Path) -> str:
    """The message after a second Ctrl-C."""
    if not folder.exists():
        return "Stopped before the first update. Nothing was saved."
    step = resumable_from(folder)
    if not step:
        return f"Stopped immediately, without a checkpoint. Restart from update 0 with: {_resume(folder)}"
    return f"Stopped immediately. The last valid checkpoint is checkpoint-{step}. Resume with: {_resume(folder)}"


def _resume(folder: Path) -> str:
    return f"troll train --resume {_quoted(folder)}"


def _quoted(folder: Path) -> str:
    return shlex.quote(str(folder))
