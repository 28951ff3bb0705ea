"""Start verl in a process of its own, show what it does, and record it in the folder of the run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from rich.console import Console

from troll.errors import InputError
from troll.lab.report.rules import Watch
from troll.lab.runs import Run, append_line
from troll.lab.runs.folder import METRICS, MODEL
from troll.lab.runs.formatting import one_line
from troll.lab.runs.writer import put_in_place, timestamp, update_run
from troll.lab.training.progress import ShowProgress, say
from troll.lab.training.run import RunPlan, resume, run_folder
from troll.lab.verl.data import STOP, write_stop, write_task
from troll.lab.verl.keys import CHECKPOINTS, DATA, keeps_model, overrides
from troll.lab.verl.metrics import Translator, logs, read_new, translate
from troll.lab.verl.setup import Setup
from troll.trl.robust.interrupt import SIGNALS

OVERRIDES, SCRIPT, LOG = "overrides.txt", "launch.sh", "log.txt"
FILE_LOGGER = "VERL_FILE_LOGGER_PATH"
_LATEST = "latest_checkpointed_iteration.txt"
_PAUSE = 0.5  # seconds between looks at verl's log
_PATIENCE = 120.0  # seconds that verl and Ray have to end after a signal


class EngineError(InputError):
    """verl ended, and not well."""


def command(setup: Setup) -> list[str]:
    """What is run."""
    return [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(setup)]


def script(setup: Setup) -> str:
    """The command as a shell script; more overrides can be given to it."""
    program, *rest = command(setup)
    words = " \\\n  ".join(map(shlex.quote, rest[2:]))
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(setup.environment.items()))
    return (
        "#!/bin/sh\n"
        "# Written by troll train --engine verl. On a Ray cluster: run it where `ray status` shows the nodes.\n"
        "set -eu\n"
        f"cd {shlex.quote(os.getcwd())}\n"
        f"{exports}"
        f'exec {shlex.quote(program)} -m verl.trainer.main_ppo \\\n  {words} \\\n  "$@"\n'
    )


def next_log(folder: Path) -> Path:
    """Of the start that comes now: verl overwrites the log it is given."""
    return folder.absolute() / DATA / f"metrics-{len(logs(folder)) + 1}.jsonl"


def checkpoint_of(folder: Path) -> int:
    """The rollout after which verl last saved; 0 if it has not."""
    try:
        return int((folder / CHECKPOINTS / _LATEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


def execute(plan: RunPlan, setup: Setup, request: dict[str, Any], console: Console) -> Run:
    """Train as planned. The files that verl reads are written first; those it writes stay, whatever becomes of it."""
    with run_folder(plan):
        if plan.resumes:
            saved = checkpoint_of(plan.folder)
            resume(plan, saved * setup.updates, plan.changes)
            none = "There is no checkpoint to go on from: the run begins again, from update 0."
            say(console, f"Going on from rollout {saved}." if saved else none)
        return _execute(plan, setup, request, console)


def _execute(plan: RunPlan, setup: Setup, request: dict[str, Any], console: Console) -> Run:
    engine = {name: metadata.version(name) for name in ("verl", "ray")}
    versions = {**Run(plan.folder).about["versions"], **engine}
    update_run(plan.folder, engine="verl", versions=versions, max_steps=setup.rollouts * setup.updates)
    try:
        _write(plan, setup, request)
    except BaseException:
        if not plan.resumes:
            shutil.rmtree(plan.folder)
        raise
    say(console, f"verl's own output: {plan.folder / DATA / LOG}")
    with _status(plan), (plan.folder / DATA / LOG).open("ab") as log:
        child = subprocess.Popen(
            command(setup),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes to this process alone, which passes it on
            preexec_fn=_hear,
            env={**os.environ, **setup.environment},
        )
        with _Stopper(child) as stopper:
            _follow(child, plan, setup, console)
        if stopper.caught:
            raise KeyboardInterrupt
        if child.returncode:
            raise _failure(plan.folder, child.returncode)
    _keep_model(plan, setup, console)
    update_run(plan.folder, status="finished", finished=timestamp(), seconds=_seconds(plan.folder))
    return Run(plan.folder)


def _hear() -> None:
    """What is started in the background ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _write(plan: RunPlan, setup: Setup, request: dict[str, Any]) -> None:
    write_task(plan.task, request, plan.folder / DATA)
    if setup.stop is not None:
        write_stop(plan.folder / DATA / STOP, setup.stop)
    (plan.folder / OVERRIDES).write_text("\n".join(overrides(setup)) + "\n", encoding="utf-8")
    launch = plan.folder / SCRIPT
    launch.write_text(script(setup), encoding="utf-8")
    launch.chmod(0o755)


def _follow(child: subprocess.Popen[bytes], plan: RunPlan, setup: Setup, console: Console) -> None:
    """Until it ends: every line that verl logs becomes one of the run, and is shown."""
    translator = Translator(setup.updates, setup.args.trust_region == "clip", _seconds(plan.folder))
    path, place, shown = Path(setup.environment[FILE_LOGGER]), 0, ShowProgress(console, Watch(plan.folder))
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=setup.rollouts * setup.updates)
    state.global_step = checkpoint_of(plan.folder) * setup.updates
    shown.on_train_begin(setup.args, state, None)
    try:
        while True:
            ended = child.poll() is not None  # what it wrote before it ended is still to be read
            new, place = read_new(path, place)
            for line in translate(new, translator):
                append_line(plan.folder / METRICS, line)
                state.global_step = line["step"]
                shown.on_log(setup.args, state, None, {"loss": None, **line} if "reward" in line else line)
                shown.on_step_end(setup.args, state, None)
            if ended:
                return
            time.sleep(_PAUSE)
    finally:
        shown.close()


class _Stopper:
    """A signal is passed on to verl, which ends; a second one, or no patience left, ends all of its processes."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.child, self.caught = child, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Stopper:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._catch)
        signal.signal(signal.SIGALRM, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        signal.alarm(0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.child.poll() is None:  # this process failed, not that one
            self._end()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.caught:
            self._end()
            return
        self.caught = True
        os.write(2, b"\nStopping verl; it goes on from its last checkpoint. Once more to stop at once.\n")
        self.child.send_signal(signal.SIGINT)
        signal.alarm(round(_PATIENCE))

    def _end(self) -> None:
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.child.wait()


@contextmanager
def _status(plan: RunPlan) -> Iterator[None]:
    """Write down how it ended if it did not end well; the folder stays, for verl's output."""
    try:
        yield
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        seconds, reason = _seconds(plan.folder), one_line(str(error))
        update_run(plan.folder, status=status, finished=timestamp(), seconds=seconds, error=reason)
        raise


def _failure(folder: Path, code: int) -> EngineError:
    """What verl said last that looks like a reason."""
    lines = (folder / DATA / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    reasons = [line for line in lines if re.search(r"(Error|Exception)\b.*: ", line)]
    said = one_line((reasons or lines or ["nothing"])[-1])
    return EngineError(
        f"verl, which ended with code {code} ({said})", "a run that ends", f"reading {folder / DATA / LOG}"
    )


def _seconds(folder: Path) -> float:
    """Up to now, as far as verl's log tells."""
    run = Run(folder)
    lines = [*run.metrics(), *run.evaluations()]
    return max((float(line.get("seconds") or 0.0) for line in lines), default=0.0)


def _keep_model(plan: RunPlan, setup: Setup, console: Console) -> None:
    """The trained model as ``model/``, from verl's last checkpoint."""
    if not plan.save_model or not (plan.folder / CHECKPOINTS / _LATEST).exists():
        return  # not asked for; or not saved, by an override
    actor = plan.folder / CHECKPOINTS / f"global_step_{checkpoint_of(plan.folder)}" / "actor"
    if keeps_model(setup) and any((actor / "huggingface").glob("*.safetensors")):
        put_in_place(actor / "huggingface", plan.folder / MODEL)
        if plan.args.save_strategy == "no" or not plan.keep_checkpoints:
            shutil.rmtree(plan.folder / CHECKPOINTS)
    else:
        merge = f"--backend fsdp --local_dir {actor} --target_dir {plan.folder / MODEL}"
        say(console, f"To have the model as transformers reads it: python -m verl.model_merger merge {merge}")
