"""Ctrl-C, SIGTERM, a closed terminal: a checkpoint, and a resumed run that is, bit for bit, the one never interrupted.

A reward sends the signal, or waits until the test has sent it: which update is interrupted depends on no clock. It is
called in evaluations too: first at step 0, then in the rollout of steps 1 to 4, and so on.
"""

from __future__ import annotations

import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from cli_cases import MAX_STEPS, flags, lines, same_weights, start, timeless, train

from troll.lab.cli import main
from troll.lab.runs import Run

OWN_TERMINAL = """
import fcntl, runpy, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv[0] = "troll"
runpy.run_module("troll", run_name="__main__")
"""
"""A process whose terminal sends it a signal when it is closed."""

Straight = Callable[[str, str], Run]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Reward and evaluation steps → a run never interrupted."""
    return functools.cache(
        lambda reward, evaluated: train(tmp_path_factory.mktemp("runs"), "--eval_steps", evaluated, reward=reward)
    )


def assert_same(run: Run, straight: Run) -> None:
    """Metrics, evaluations, histograms, completions and weights."""
    assert run.about["status"] == straight.about["status"] == "finished"
    assert [timeless(line) for line in run.metrics()] == [timeless(line) for line in straight.metrics()]
    assert [timeless(line) for line in run.evaluations()] == [timeless(line) for line in straight.evaluations()]
    assert run.tokens() == straight.tokens()
    assert run.samples() == straight.samples()
    assert same_weights(run, straight)
    assert len({line["troll/projected_fraction"] for line in run.metrics()}) > 1


PLACES = {  # evaluation steps, call → the step after which the run stops
    "in the first rollout": ("4", 2, 1),
    "in the second": ("4", 4, 5),
    "while it evaluates": ("4", 3, 5),
    "where it evaluates": ("5", 3, 5),
    "before the first update": ("4", 1, 1),
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(
    number: int, place: str, tmp_path: Path, straight: Straight, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    evaluated, call, step = PLACES[place]
    monkeypatch.setenv("SIGNAL", str(int(number)))
    monkeypatch.setenv("SIGNAL_AT", str(call))
    handlers = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
    run = train(tmp_path, "--eval_steps", evaluated, "--save_strategy", "no", reward="interrupts")
    assert [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert run.about["status"] == "interrupted"
    assert [line["step"] for line in run.metrics()] == list(range(1, step + 1))
    assert [path.name for path in run.path.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    assert not (run.path / "model").exists()
    out, err = capfd.readouterr()
    assert "Stopping after this update, with a checkpoint. Press Ctrl-C again to stop at once." in err
    assert out.splitlines()[-1].endswith(f"Resume with: troll train --resume {shlex.quote(str(run.path))}")
    took = run.about["seconds"]

    monkeypatch.delenv("SIGNAL_AT")
    assert main(["train", "--resume", run.path.name, "--runs_dir", str(tmp_path)]) == 0
    assert_same(run, straight("interrupts", evaluated))
    assert len(lines(run.path / "tokens.jsonl")) == 1 + MAX_STEPS
    seconds = [line["seconds"] for line in run.metrics()]
    assert seconds == sorted(seconds)
    assert seconds[step - 1] <= took <= seconds[step]
    assert run.about["seconds"] > took


def test_a_run_may_be_interrupted_more_than_once(
    tmp_path: Path, straight: Straight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGNAL", str(int(signal.SIGINT)))
    monkeypatch.setenv("SIGNAL_AT", "2")
    run = train(tmp_path, reward="interrupts")
    assert main(["train", "--resume", str(run.path)]) == 0  # evaluates at 4, and makes a rollout: its second call
    assert (run.about["status"], len(run.metrics())) == ("interrupted", 5)
    monkeypatch.delenv("SIGNAL_AT")
    assert main(["train", "--resume", str(run.path)]) == 0
    assert_same(run, straight("interrupts", "4"))


@pytest.mark.parametrize(
    "more",
    [
        ["--use_peft", "--lora_target_modules", "q_proj", "v_proj"],
        ["--gradient_accumulation_steps", "2", "--advantage_estimator", "reinforce_pp"],
        ["--trust_region", "clip"],
    ],
)
def test_other_kinds_of_runs_go_on_as_well(more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(tmp_path, *more, reward="interrupts")
    monkeypatch.setenv("SIGNAL", str(int(signal.SIGINT)))
    monkeypatch.setenv("SIGNAL_AT", "2")
    run = train(tmp_path, *more, reward="interrupts")
    monkeypatch.delenv("SIGNAL_AT")
    assert main(["train", "--resume", str(run.path)]) == 0
    assert [timeless(line) for line in run.metrics()] == [timeless(line) for line in whole.metrics()]
    assert (run.tokens(), run.samples()) == (whole.tokens(), whole.samples())
    assert same_weights(run, whole)


def test_a_signal_after_the_last_update_changes_nothing(
    tmp_path: Path, straight: Straight, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIGNAL", str(int(signal.SIGINT)))
    monkeypatch.setenv("SIGNAL_AT", "4")  # step 0, two rollouts, step 8
    run = train(tmp_path, "--eval_steps", "9", reward="interrupts")
    assert "The last update is done. Press Ctrl-C again to stop at once." in capfd.readouterr().err
    assert run.about["status"] == "finished"
    assert_same(run, straight("interrupts", "9"))
    assert [line["step"] for line in run.evaluations()] == [0, MAX_STEPS]


def test_a_run_that_failed_goes_on_from_its_last_checkpoint(
    tmp_path: Path, straight: Straight, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It makes an update again that it had made already; of this the last line counts. A line that was cut does not."""
    monkeypatch.setenv("FAIL_AT", "4")  # in the evaluation at step 4
    assert main(flags(tmp_path, "--save_steps", "3", "--eval_steps", "2", reward="fails_later")) == 2
    (path,) = tmp_path.iterdir()
    run = Run.open(path)
    assert (run.about["status"], len(run.metrics())) == ("failed", 4)
    with (path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 5, "loss": 0.1')
    monkeypatch.delenv("FAIL_AT")
    assert main(["train", "--resume", str(path)]) == 0
    assert [line["step"] for line in lines(path / "tokens.jsonl")[1:]] == [1, 2, 3, 4, 4, 5, 6, 7, 8]
    assert_same(run, straight("fails_later", "2"))
    seconds = [line["seconds"] for line in run.metrics()]
    assert seconds == sorted(seconds)


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for something to be so, as long as the process goes on."""
    while not condition():
        assert process.poll() is None, process.communicate(timeout=300)
        time.sleep(0.02)


def waiting(tmp_path: Path) -> tuple[subprocess.Popen[str], Run]:
    """A run in a process of its own, that waits for a file in the rollout of step 5."""
    environment = {"WAIT_AT": "4", "WAIT_FOR": str(tmp_path / "go")}
    process = start(flags(tmp_path / "runs", "--save_strategy", "no", reward="waits"), env=environment)
    run = Run(tmp_path / "runs" / "arithmetic-troll")
    until(lambda: len(run.metrics()) >= 4 and len(run.evaluations()) >= 2, process)
    return process, run


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_from_outside(number: int, tmp_path: Path, straight: Straight) -> None:
    process, run = waiting(tmp_path)
    process.send_signal(number)
    assert process.stderr is not None
    said = process.stderr.readline() + process.stderr.readline()
    assert said == "\nStopping after this update, with a checkpoint. Press Ctrl-C again to stop at once.\n"
    (tmp_path / "go").touch()
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-1].startswith("Interrupted; a checkpoint was saved. Resume with: troll train --resume ")
    assert run.about["status"] == "interrupted"
    command = shlex.split(out.splitlines()[-1].partition("Resume with: troll ")[2])
    assert main(command) == 0
    assert_same(run, straight("waits", "4"))


@pytest.mark.slow
def test_a_second_signal_stops_at_once(tmp_path: Path, straight: Straight, capsys: pytest.CaptureFixture[str]) -> None:
    process, run = waiting(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "Stopping" in process.stderr.readline() + process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "troll: stopped\n")
    go_on = f"from update 0 with: troll train --resume {shlex.quote(str(run.path))}"
    assert out.splitlines()[-1] == f"Stopped immediately, without a checkpoint. Restart {go_on}"
    assert run.about["status"] == "interrupted"
    assert run.about["seconds"] > 0
    assert len(run.metrics()) == 4
    assert not list(run.path.glob("checkpoint-*"))
    assert main(["train", "--resume", str(run.path)]) == 0
    assert "the run restarts from update 0" in capsys.readouterr().out
    assert_same(run, straight("waits", "4"))


@pytest.mark.usefixtures("hangups")
@pytest.mark.slow
def test_a_terminal_that_is_closed(tmp_path: Path, straight: Straight) -> None:
    """The run finishes its update and saves, although nothing can be printed any more."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WAIT_AT": "4", "WAIT_FOR": str(tmp_path / "go")}
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_TERMINAL, *flags(tmp_path / "runs", reward="waits")],
        env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    run = Run(tmp_path / "runs" / "arithmetic-troll")
    until(lambda: len(run.metrics()) >= 4 and len(run.evaluations()) >= 2, process)
    os.close(ours)  # the kernel sends SIGHUP
    (tmp_path / "go").touch()
    assert process.wait(timeout=300) == 0
    assert (run.about["status"], len(run.metrics())) == ("interrupted", 5)
    assert main(["train", "--resume", str(run.path)]) == 0
    assert_same(run, straight("waits", "4"))


def test_the_flags_of_an_interrupted_run_are_all_in_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag that happens to be TRL's default, but not this command's, is one of them."""
    monkeypatch.setenv("SIGNAL", str(int(signal.SIGINT)))
    monkeypatch.setenv("SIGNAL_AT", "2")
    run = train(tmp_path, reward="interrupts")
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    assert config["gradient_accumulation_steps"] == 1
    assert not {"resume", "run_name", "output_dir", "config", "dry_run"} & config.keys()
