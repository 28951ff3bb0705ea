"""Starts verl in a subprocess, shows its progress and records it in the run's folder."""

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
from troll.lab.report.rules import RuleMonitor
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
_PAUSE = 0.5  # seconds between two reads of verl's log
_GRACE = 120.0  # seconds that verl and Ray have to end after a signal


class EngineError(InputError):
    """verl ended with an error."""


def command(setup: Setup) -> list[str]:
    """The command that starts verl."""
    return [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(setup)]


def script(setup: Setup) -> str:
    """The command as a shell script, which takes further overrides as arguments."""
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
    """Path of the log for the next start; verl overwrites an existing log."""
    return folder.absolute() / DATA / f"metrics-{len(logs(folder)) + 1}.jsonl"


def checkpoint_of(folder: Path) -> int:
    """The rollout of verl's last checkpoint; 0 if there is none."""
    try:
        return int((folder / CHECKPOINTS / _LATEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


def execute(plan: RunPlan, setup: Setup, request: dict[str, Any], console: Console) -> Run:
    """Train as planned. verl's files stay in the folder also when the run fails."""
    with run_folder(plan):
        if plan.resumes:
            saved = checkpoint_of(plan.folder)
            resume(plan, saved * setup.updates, plan.changes)
            restart = "There is no checkpoint to resume from: the run starts again from update 0."
            say(console, f"Resuming after rollout {saved}." if saved else restart)
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
    say(console, f"Output of verl: {plan.folder / DATA / LOG}")
    with _status(plan), (plan.folder / DATA / LOG).open("ab") as log:
        child = subprocess.Popen(
            command(setup),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
            preexec_fn=_restore_sigint,
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


def _restore_sigint() -> None:
    """A process in the background ignores SIGINT, and its children inherit that."""
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
    """Convert and show every line that verl logs, until it ends."""
    translator = Translator(setup.updates, setup.args.trust_region == "clip", _seconds(plan.folder))
    path, offset, progress = Path(setup.environment[FILE_LOGGER]), 0, ShowProgress(console, RuleMonitor(plan.folder))
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=setup.rollouts * setup.updates)
    state.global_step = checkpoint_of(plan.folder) * setup.updates
    progress.on_train_begin(setup.args, state, None)
    try:
        while True:
            ended = child.poll() is not None  # its last lines are still to be read
            new, offset = read_new(path, offset)
            for line in translate(new, translator):
                append_line(plan.folder / METRICS, line)
                state.global_step = line["step"]
                progress.on_log(setup.args, state, None, {"loss": None, **line} if "reward" in line else line)
                progress.on_step_end(setup.args, state, None)
            if ended:
                return
            time.sleep(_PAUSE)
    finally:
        progress.close()


class _Stopper:
    """Passes a signal on to verl, which ends. A second signal, or a timeout, kills all of its processes."""

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
        if self.child.poll() is None:  # this process failed, verl did not
            self._end()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.caught:
            self._end()
            return
        self.caught = True
        os.write(
            2, b"\nStopping verl; a resumed run starts from its last checkpoint. Press Ctrl-C again to stop at once.\n"
        )
        self.child.send_signal(signal.SIGINT)
        signal.alarm(round(_GRACE))

    def _end(self) -> None:
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.child.wait()


@contextmanager
def _status(plan: RunPlan) -> Iterator[None]:
    """Record the status of a run that failed or was interrupted."""
    try:
        yield
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        seconds, reason = _seconds(plan.folder), one_line(str(error))
        update_run(plan.folder, status=status, finished=timestamp(), seconds=seconds, error=reason)
        raise


def _failure(folder: Path, code: int) -> EngineError:
    """An error with the last line of verl's output that names an exception."""
    lines = (folder / DATA / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    reasons = [line for line in lines if re.search(r"(Error|Exception)\b.*: ", line)]
    reason = one_line((reasons or lines or ["no output"])[-1])
    return EngineError(f"verl ended with code {code} ({reason})", f"See {folder / DATA / LOG}")


def _seconds(folder: Path) -> float:
    """Duration of the run so far, from verl's log."""
    run = Run(folder)
    lines = [*run.metrics(), *run.evaluations()]
    return max((float(line.get("seconds") or 0.0) for line in lines), default=0.0)


def _keep_model(plan: RunPlan, setup: Setup, console: Console) -> None:
    """Move the trained model from verl's last checkpoint to ``model/``."""
    if not plan.save_model or not (plan.folder / CHECKPOINTS / _LATEST).exists():
        return  # not requested, or disabled by an override
    actor = plan.folder / CHECKPOINTS / f"global_step_{checkpoint_of(plan.folder)}" / "actor"
    if keeps_model(setup) and any((actor / "huggingface").glob("*.safetensors")):
        put_in_place(actor / "huggingface", plan.folder / MODEL)
        if plan.args.save_strategy == "no" or not plan.keep_checkpoints:
            shutil.rmtree(plan.folder / CHECKPOINTS)
    else:
        merge = f"--backend fsdp --local_dir {actor} --target_dir {plan.folder / MODEL}"
        say(console, f"To convert the model for transformers: python -m verl.model_merger merge {merge}")
