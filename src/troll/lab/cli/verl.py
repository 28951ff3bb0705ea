"""``troll train --engine verl``: the same flags, tasks and run folders, trained by verl."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from troll.errors import InputError
from troll.lab.cli.flags import Flags
from troll.lab.training.settings import RunSettings

PLATFORM, CLUSTER = "VERL_PLATFORM", "RAY_ADDRESS"


def run(flags: Flags, settings: RunSettings, folder: Path | None, command: str, changes: Sequence[str] = ()) -> int:
    """Train with verl, or print the command with --dry_run."""
    from troll.lab.cli.train import conclusion, plan_of
    from troll.lab.training.progress import say
    from troll.lab.verl.launch import execute, script
    from troll.lab.verl.setup import config_of

    _check_machine(settings)
    plan = plan_of(flags, settings, folder, command, changes)
    setup, request = setup_of(flags, settings, plan)
    plan = replace(plan, config=config_of(plan.config, setup))
    if settings.dry_run:
        print(script(setup), end="")
        return 0
    console = Console()
    say(console, f"{plan.task.name}: {plan.task.description}")
    say(console, f"{plan.model} → {plan.folder}, with verl, nodes: {settings.nodes}, GPUs per node: {setup.gpus}")
    try:
        finished = execute(plan, setup, request, console)
    except KeyboardInterrupt:
        say(console, _how_to_resume(plan.folder))
        return 130
    for line in conclusion(finished, settings):
        say(console, line)
    return 0


def check(flags: Flags, settings: RunSettings, args: Any, model: Any) -> None:
    """Raise if these flags are invalid for every task."""
    from troll.lab.verl.keys import overrides
    from troll.lab.verl.setup import Setup, refuse

    unknown: dict[str, Any] = {"folder": Path("unused"), "model_path": "", "prompts": sys.maxsize, "prompt_tokens": 1}
    explicit = frozenset(flags.given)
    setup = Setup(
        run=settings, args=args, model=model, explicit=explicit, gpus=settings.gpus_per_node or _gpus(), **unknown
    )
    refuse(setup)
    overrides(setup)


def setup_of(flags: Flags, settings: RunSettings, plan: Any) -> tuple[Any, dict[str, Any]]:
    """``troll.lab.verl.setup.Setup``, and the request from which verl's reward loads the task."""
    from troll.lab.cli.train import options_of
    from troll.lab.models import load_tokenizer
    from troll.lab.training.evaluate import stop_token
    from troll.lab.verl.data import longest_prompt, plain_template, request_of
    from troll.lab.verl.launch import FILE_LOGGER, next_log
    from troll.lab.verl.setup import Setup, refuse
    from troll.rewards.sandbox import UNSANDBOXED_VARIABLE

    tokenizer = load_tokenizer(plan.model_path, **plan.origin)
    template = plain_template(plan.task, tokenizer)
    environment = {FILE_LOGGER: str(next_log(plan.folder))}
    if settings.allow_unsandboxed_code:
        environment[UNSANDBOXED_VARIABLE] = "1"
    setup = Setup(
        run=settings,
        args=plan.args,
        model=plan.model_config,
        explicit=frozenset(flags.given),
        folder=plan.folder,
        model_path=plan.model_path,
        prompts=len(plan.task.train_dataset),
        prompt_tokens=longest_prompt(plan.task, tokenizer, template, plan.args.chat_template_kwargs or {}),
        gpus=settings.gpus_per_node or _gpus(),
        chat_template=template,
        stop=None if plan.task.stop is None else stop_token(plan.task.stop, tokenizer),
        environment=environment,
        resumes=plan.resumes,
    )
    refuse(setup)
    options = options_of(settings.task_options)
    return setup, request_of(settings, options, plan.args.seed, plan.args.reward_weights)


def _check_machine(settings: RunSettings) -> None:
    """Raise if verl is not installed, if there is no GPU, or if another launcher started this process."""
    if importlib.util.find_spec("verl") is None:
        raise InputError("--engine verl needs the package verl", "pip install 'troll-rl[train,verl]'")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "--engine verl cannot be used with accelerate or torchrun: verl starts its processes itself",
            "Run troll train --engine verl",
        )
    if not (settings.dry_run or os.environ.get(PLATFORM) or os.environ.get(CLUSTER) or _gpus(least=0)):
        raise InputError(
            f"--engine verl needs a GPU, or a Ray cluster with GPUs ({CLUSTER}); this machine has none",
            "Use --engine trl, which trains on a CPU, or --dry_run to print the command",
        )


def _gpus(least: int = 1) -> int:
    import torch

    return max(least, torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def _how_to_resume(folder: Path) -> str:
    from troll.lab.verl.launch import checkpoint_of

    where = "from the last checkpoint" if checkpoint_of(folder) else "from update 0 (there is no checkpoint)"
    return f"Interrupted. Resume {where} with: troll train --resume {shlex.quote(str(folder))}"
