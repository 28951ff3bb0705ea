"""``troll train --engine verl``: the same flags, the same task, the same folder; verl trains."""

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
    """Train with verl, or say what would be run."""
    from troll.lab.cli.train import conclusion, plan_of
    from troll.lab.training.progress import say
    from troll.lab.verl.launch import execute, script
    from troll.lab.verl.refusals import config_of

    _check_machine(settings)
    plan = plan_of(flags, settings, folder, command, changes)
    setup, request = setup_of(flags, settings, plan)
    plan = replace(plan, config=config_of(plan.config, setup))
    if settings.dry_run:
        print(script(setup), end="")
        return 0
    console = Console()
    say(console, f"{plan.task.name}: {plan.task.description}")
    say(console, f"{plan.model} → {plan.folder}, with verl, nodes: {settings.nodes}, GPUs of each: {setup.gpus}")
    try:
        finished = execute(plan, setup, request, console)
    except KeyboardInterrupt:
        say(console, _how_to_go_on(plan.folder))
        return 130
    for line in conclusion(finished, settings):
        say(console, line)
    return 0


def check(flags: Flags, settings: RunSettings, args: Any, model: Any) -> None:
    """Raise if these flags cannot be, whatever the task."""
    from troll.lab.verl.keys import overrides
    from troll.lab.verl.refusals import refuse
    from troll.lab.verl.setup import Setup

    unknown: dict[str, Any] = {"folder": Path("unused"), "model_path": "", "prompts": sys.maxsize, "prompt_tokens": 1}
    explicit = frozenset(flags.said)
    setup = Setup(
        run=settings, args=args, model=model, explicit=explicit, gpus=settings.gpus_per_node or _gpus(), **unknown
    )
    refuse(setup)
    overrides(setup)


def setup_of(flags: Flags, settings: RunSettings, plan: Any) -> tuple[Any, dict[str, Any]]:
    """``troll.lab.verl.setup.Setup``, and what the reward is told of the task."""
    from troll.lab.cli.train import options_of
    from troll.lab.models import load_tokenizer
    from troll.lab.training.evaluate import stop_token
    from troll.lab.verl.data import longest_prompt, plain_template, request_of
    from troll.lab.verl.launch import FILE_LOGGER, next_log
    from troll.lab.verl.refusals import refuse
    from troll.lab.verl.setup import Setup
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
        explicit=frozenset(flags.said),
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
    """verl must be there, with a GPU of this machine or of a cluster, and the processes must be its own."""
    if importlib.util.find_spec("verl") is None:
        raise InputError("--engine verl without verl", "the package", "pip install 'troll-rl[train,verl]'")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "--engine verl under accelerate or torchrun",
            "one process: verl starts its own",
            "troll train --engine verl",
        )
    if not (settings.dry_run or os.environ.get(PLATFORM) or os.environ.get(CLUSTER) or _gpus(least=0)):
        raise InputError(
            "--engine verl on a machine without a GPU",
            f"a GPU, or a Ray cluster that has some ({CLUSTER}): verl does not train on a CPU",
            "--engine trl, which does; or --dry_run to see what would be run",
        )


def _gpus(least: int = 1) -> int:
    import torch

    return max(least, torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def _how_to_go_on(folder: Path) -> str:
    from troll.lab.verl.launch import checkpoint_of

    where = "from the last checkpoint" if checkpoint_of(folder) else "from update 0, as there is no checkpoint,"
    return f"Interrupted. Go on {where} with: troll train --resume {shlex.quote(str(folder))}"
