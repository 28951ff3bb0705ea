"""``--resume``: from the last good checkpoint, as the same run or not at all, and whatever ended it before."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_cases import MAX_STEPS, flags, same_weights, shared, timeless, train

from troll.lab.cli import main
from troll.lab.runs import Run, write_json
from troll.trl.robust.store import LOCK

HOLDS = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"


def resume(run: Run, *more: str) -> int:
    return main(["train", "--resume", str(run.path), *more])


def files(run: Run) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("runs"), "--eval_steps", "2", reward="fails_later")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that failed after four updates, with a checkpoint of the second and the third."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAIL_AT", "4")  # in the evaluation at step 4
        assert main(flags(folder, "--save_steps", "1", "--eval_steps", "2", reward="fails_later")) == 2
    (path,) = folder.iterdir()
    assert sorted(x.name for x in path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    return Run.open(path)


@pytest.fixture
def early(failed: Run, tmp_path: Path) -> Run:
    """The same, to do something to."""
    return Run(Path(shutil.copytree(failed.path, tmp_path / "runs" / failed.path.name)))


def assert_same(run: Run, straight: Run) -> None:
    assert run.about["status"] == "finished"
    assert [timeless(line) for line in run.metrics()] == [timeless(line) for line in straight.metrics()]
    assert [timeless(line) for line in run.evaluations()] == [timeless(line) for line in straight.evaluations()]
    assert same_weights(run, straight)


# ------------------------------------------------------------------ where it goes on from


@pytest.mark.parametrize("damaged", [[], [3], [2, 3]])
def test_the_last_good_checkpoint(
    damaged: list[int], early: Run, straight: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in damaged:
        file = early.path / f"checkpoint-{step}" / "model.safetensors"
        *most, last = file.read_bytes()
        file.write_bytes(bytes([*most, last ^ 1]))
    assert resume(early) == 0
    said = [x for x in capsys.readouterr().out.splitlines() if x.startswith(("checkpoint", "Resuming", "There is no"))]
    passed = [f"checkpoint-{step} is skipped: model.safetensors is damaged" for step in sorted(damaged)[::-1]]
    assert [line.partition(":")[0] for line in said[: len(passed)]] == [x.partition(":")[0] for x in passed]
    good = [step for step in (2, 3) if step not in damaged]
    none = "There is no checkpoint: the run restarts from update 0."
    assert said[len(passed) :] == [f"Resuming from checkpoint-{good[-1]}." if good else none]
    assert_same(early, straight)
    assert "error" not in early.about


def test_a_run_that_keeps_no_checkpoints_begins_again(
    tmp_path: Path, straight: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL_AT", "4")
    assert main(flags(tmp_path, "--save_strategy", "no", "--eval_steps", "2", reward="fails_later")) == 2
    (path,) = tmp_path.iterdir()
    monkeypatch.delenv("FAIL_AT")
    assert resume(Run(path)) == 0
    out = capsys.readouterr().out
    assert "the run restarts from update 0." in out
    assert "save_strategy is no. --save_strategy steps --save_steps 32 saves a checkpoint every 32 updates." in out
    assert_same(Run(path), straight)


def test_a_run_that_was_killed_after_its_last_update_is_finished(
    straight: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(Path(shutil.copytree(straight.path, tmp_path / "a")))
    write_json(run.path / "run.json", {**run.about, "status": "running", "finished": None})
    shutil.rmtree(run.path / "model")
    lines = (run.path / "metrics.jsonl").read_bytes()
    assert resume(run) == 0
    assert_same(run, straight)
    assert (run.path / "metrics.jsonl").read_bytes() == lines
    assert run.about["seconds"] >= straight.about["seconds"]


def test_another_learning_rate_keeps_the_schedule_and_the_moments(early: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from troll.lab.training.recorder import RecordedTrainer

    built: list[Any] = []
    real = RecordedTrainer.__init__

    def watched(self: Any, *args: Any, **named: Any) -> None:
        real(self, *args, **named)
        built.append(self)

    monkeypatch.setattr(RecordedTrainer, "__init__", watched)
    changes = (
        "--learning_rate",
        "0.1",
        "--weight_decay",
        "0.5",
        "--adam_beta2",
        "0.9",
        "--lr_scheduler_type",
        "linear",
    )
    assert resume(early, *changes, "--allow_changes") == 0
    rates = [line["learning_rate"] for line in early.metrics()]
    assert rates[:3] == [0.01] * 3
    # the rate that is logged is the one after the update; eight updates, from 0.1 to 0
    assert rates[3:] == pytest.approx([0.1 * (MAX_STEPS - step) / MAX_STEPS for step in range(3, 8)])
    (trainer,) = built
    groups = trainer.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    assert {group["betas"] for group in groups} == {(0.9, 0.9)}
    steps = {int(state["step"]) for state in trainer.optimizer.state.values()}
    assert steps == {MAX_STEPS}


def test_it_may_be_longer_and_keep_other_checkpoints(early: Run) -> None:
    """With a constant learning rate a longer run is the same one as far as that goes."""
    assert resume(early, "--max_steps", "9", "--save_steps", "4") == 0
    assert (early.about["status"], early.about["max_steps"], len(early.metrics())) == ("finished", 9, 9)
    config = yaml.safe_load((early.path / "config.yaml").read_text())
    assert (config["max_steps"], config["save_steps"], early.about["settings"]["save_steps"]) == (9, 4, 4)
    (change,) = early.about["changes"]
    assert (change["step"], sorted(change["differences"])) == (3, ["max_steps: 8 → 9", "save_steps: 1.0 → 4.0"])


# ------------------------------------------------------------------ as the same run


def test_other_settings_are_refused_at_once(
    early: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("troll.lab.cli.train.plan_of", lambda *_: pytest.fail("it was loaded"))
    before = files(early)
    (tmp_path / "c.yaml").write_text("kl_bound: 0.5\nsave_steps: 7\n")
    for more, said in [
        (["--learning_rate", "1e-4"], "(learning_rate: 0.01 → 0.0001)"),
        (["--config", str(tmp_path / "c.yaml")], "(kl_bound: 0.05 → 0.5)"),
        (["--seed", "3", "--eval_steps", "2"], "(seed: 0 → 3)"),
        (["--task", "gym:gcd"], "(task: arithmetic → gym:gcd)"),
        (["--lr_scheduler_type", "linear", "--max_steps", "9"], "(max_steps: 8 → 9; lr_scheduler_type: "),
        (["--engine", "verl", "--allow_changes"], "--engine verl, but the run was started with trl"),
        (["--run_name", "x"], "--resume cannot be combined with --run_name"),
        (["--dry_run"], "--resume cannot be combined with --dry_run"),
    ]:
        assert resume(early, *more) == 2
        assert said in capsys.readouterr().err
    assert files(early) == before


def test_other_settings_that_are_allowed_hold_from_then_on(
    early: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the run is killed before a checkpoint has seen them. Others are refused as before."""
    monkeypatch.setenv("FAIL_AT", "1")  # in the evaluation at step 4
    assert resume(early, "--learning_rate", "1e-4", "--save_steps", "9", "--allow_changes") == 2
    assert (early.about["status"], len(early.metrics())) == ("failed", 4)
    (change,) = early.about["changes"]
    assert change["step"] == 3
    assert sorted(change["differences"]) == ["learning_rate: 0.01 → 0.0001", "save_steps: 1.0 → 9.0"]
    config = yaml.safe_load((early.path / "config.yaml").read_text())
    assert config["learning_rate"] == early.about["settings"]["learning_rate"] == 1e-4
    assert "allow_changes" not in config
    monkeypatch.delenv("FAIL_AT")
    real = sys.modules["troll.trl.robust.fingerprint"].versions()  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("troll.trl.robust.fingerprint.versions", lambda *_: {**real, "torch": "0.1"})
        capsys.readouterr()
        assert resume(early) == 2
    err = capsys.readouterr().err
    assert f"(versions.torch: {real['torch']} → 0.1)" in err
    assert resume(early) == 0
    assert [line["learning_rate"] for line in early.metrics()] == [1e-2] * 3 + [1e-4] * 5
    assert early.about["changes"] == [change]


@pytest.mark.parametrize("what", ["code", "reward", "data"])
def test_other_code_and_data_are_refused_and_leave_the_run_as_it_was(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, rewards = tmp_path / "d.jsonl", tmp_path / "rewards.py"
    rows = [{"prompt": f"{i} ="} for i in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy(shared() / "rewards.py", rewards)
    own = ("--task", "data", "--data", str(data), "--reward", f"{rewards}:interrupts", "--save_strategy", "no")
    monkeypatch.setenv("SIGNAL", str(int(signal.SIGTERM)))
    monkeypatch.setenv("SIGNAL_AT", "2")
    run = train(tmp_path / "runs", *own, reward=None)
    monkeypatch.delenv("SIGNAL_AT")
    with pytest.MonkeyPatch.context() as patch:
        if what == "code":
            patch.setattr("troll.__version__", "0.0.1")
        elif what == "reward":
            rewards.write_text(rewards.read_text() + "\n# other\n")
        else:
            rows[0]["prompt"] = "0 + 0 ="
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        before = files(run)
        assert resume(run) == 2
        expected = {
            "code": r"versions\.troll: [\w.+]+ → 0\.0\.1\)",
            "reward": r"rewards\.interrupts: \w{16} → \w{16}\)",
        }
        err = capsys.readouterr().err
        assert re.search(expected.get(what, r"data\.\w+\.first_rows: \w{16} → \w{16}"), err), err
        assert files(run) == before
        assert resume(run, "--allow_changes") == 0
    assert run.about["status"] == "finished"
    assert run.about["changes"][0]["step"] == 1


@pytest.mark.usefixtures("hangups")
def test_nothing_has_changed_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Begun with relative paths, gone on with in another working directory, with other threads, under another name."""
    shutil.copytree(shared(), tmp_path / "here")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("SIGNAL", str(int(signal.SIGHUP)))
    monkeypatch.setenv("SIGNAL_AT", "2")
    short = ("--max_steps", "2", "--updates_per_generation", "2", "--eval_steps", "2")
    argv = flags(Path("runs"), "--model", "model", "--reward", "rewards.py:interrupts", *short, reward=None)
    assert main(argv) == 0
    run = Run(tmp_path / "here" / "runs" / "arithmetic-troll")
    assert run.about["status"] == "interrupted"
    monkeypatch.delenv("SIGNAL_AT")
    monkeypatch.chdir(tmp_path / "there")
    torch.set_num_threads(2)
    try:
        assert main(["train", "--resume", "arithmetic-troll", "--runs_dir", "../here/runs"]) == 0
    finally:
        torch.set_num_threads(1)
    assert run.about["status"] == "finished"
    assert "changes" not in run.about
    assert os.listdir() == []


# ------------------------------------------------------------------ one process at a time


@pytest.fixture
def held(early: Run) -> Iterator[None]:
    """Another process writes the run."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(early.path / LOCK)], **pipes)
    assert process.stdout is not None
    process.stdout.readline()
    yield
    process.communicate(b"\n")


@pytest.mark.usefixtures("held")
def test_a_run_that_another_process_writes_is_refused(
    early: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("troll.lab.cli.train.plan_of", lambda *_: pytest.fail("it was loaded"))
    before = files(early)
    assert resume(early) == 2
    assert f"the run {early.path} is in use: another process is writing" in (capsys.readouterr().err)
    assert files(early) == before


def test_a_run_is_locked_while_it_trains_and_not_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from troll.lab.training.recorder import RecordedTrainer
    from troll.trl.robust.store import holder, is_locked

    seen: list[Any] = []
    real = RecordedTrainer.save_model

    def watched(self: Any, *args: Any, **named: Any) -> None:
        seen.append((is_locked(self._folder), holder(self._folder).get("pid")))
        real(self, *args, **named)

    monkeypatch.setattr(RecordedTrainer, "save_model", watched)
    run = train(tmp_path, "--max_steps", "4", "--keep_checkpoints", "false")
    assert seen == [(True, os.getpid())]  # once: there is no checkpoint after the last update that nobody will need
    assert not is_locked(run.path)
    assert not list(run.path.glob("checkpoint-*"))  # they are of no use any more
    assert (run.path / "model").is_dir()
    assert not [x.name for x in run.path.iterdir() if x.name.startswith(".") and x.name != LOCK]


# ------------------------------------------------------------------ signals where nothing is being trained


def test_a_signal_while_the_model_is_loaded(
    early: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new run leaves nothing, one that is gone on with stays as it was."""
    monkeypatch.setattr("troll.lab.training.run.create_model_from_path", lambda *_, **__: signal.raise_signal(15))
    assert main(flags(tmp_path / "new")) == 130
    out, err = capsys.readouterr()
    assert (out.splitlines()[-1], err) == ("Stopped before the first update. Nothing was saved.", "troll: stopped\n")
    assert not list((tmp_path / "new").iterdir())
    before = files(early)
    assert resume(early) == 130
    command = f"troll train --resume {early.path}"
    said = f"Stopped immediately. The last valid checkpoint is checkpoint-3. Resume with: {command}"
    assert capsys.readouterr().out.splitlines()[-1] == said
    assert files(early) == before


SECOND = {"a checkpoint": ("troll.trl.robust.checkpoints.commit", 3), "the model": ("put_in_place", MAX_STEPS)}


@pytest.mark.parametrize("place", SECOND)
def test_a_second_signal_while_something_is_saved(
    place: str, early: Run, straight: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stops at once, and what is said to go on with is good."""
    name, step = SECOND[place]
    name = name if "." in name else f"troll.lab.training.run.{name}"

    def twice(*_: object) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name, twice)
        more = () if place == "a checkpoint" else ("--save_steps", "8")
        assert resume(early, *more) == 130
    out, err = capsys.readouterr()
    assert err.endswith("troll: stopped\n")
    assert f"The last valid checkpoint is checkpoint-{step}. Resume with: troll train" in out.splitlines()[-1]
    assert early.about["status"] == "interrupted"
    assert not (early.path / "model").exists()
    assert resume(early) == 0
    assert f"Resuming from checkpoint-{step}" in capsys.readouterr().out or place == "a checkpoint"
    assert_same(early, straight)
    assert not [x.name for x in early.path.iterdir() if x.name.startswith((".staging", ".model"))]


def test_a_signal_while_the_report_is_written(
    early: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("troll.lab.report.write_report", interrupted)
    assert resume(early, "--write_report", "true") == 130
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"Write it with: troll report {early.path}")
    assert early.about["status"] == "finished"


# ------------------------------------------------------------------ begun whole or not at all


@pytest.mark.parametrize("name", ["run.json", "config.yaml"])
def test_a_start_that_fails_halfway_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import troll.files

    real: Callable[..., None] = troll.files.write_atomic

    def fails(path: Path, data: bytes) -> None:
        if path.name == name:
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr("troll.lab.runs.writer.write_atomic", fails)
    assert main(flags(tmp_path / "runs")) == 2
    assert "(No space left on device)" in capsys.readouterr().err
    assert os.listdir(tmp_path / "runs") == []


# ------------------------------------------------------------------ runs of earlier versions


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of troll 0.1.0, with the former names of settings, and with the versions of packages that it recorded.

    Its last checkpoint is of update 6 of 8, in the middle of a rollout; its metrics are of all 8.
    """
    with tarfile.open(Path(__file__).resolve().parents[2] / "stored" / "run-0.1.0.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    run = Run(tmp_path / "runs" / "arithmetic-troll")
    config = run.path / "config.yaml"
    config.write_text(config.read_text().replace("@HERE@", str(tmp_path)))
    identity = json.loads((run.path / "checkpoint-6" / "troll.json").read_text())["identity"]
    assert {"bound", "reward_errors"} <= identity["settings"].keys()
    assert "held_out_size" in config.read_text()
    monkeypatch.setattr("troll.trl.robust.fingerprint.versions", lambda *_: identity["versions"])
    monkeypatch.chdir(tmp_path)
    return run


def test_a_run_of_version_0_1_0_is_resumed(stored: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Updates 7 and 8, on the rollout in the checkpoint, measure what they measured in 0.1.0."""
    before = stored.metrics()
    assert resume(stored) == 0
    assert "Resuming from checkpoint-6." in capsys.readouterr().out
    assert (stored.about["status"], "changes" in stored.about) == ("finished", False)
    metrics = stored.metrics()
    assert [line["step"] for line in metrics] == list(range(1, 9))
    assert metrics[:6] == before[:6]
    for again, first in zip(metrics[6:], before[6:], strict=True):
        assert again["seconds"] != first["seconds"]  # it did train
        assert timeless(again) == pytest.approx(timeless(first), rel=1e-3, abs=1e-5)
    settings = json.loads((stored.path / "run.json").read_text())["settings"]
    assert settings["on_invalid_reward"] == "raise"
    assert not {"bound", "reward_errors"} & settings.keys()
    assert (stored.path / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("what", ["setting", "version", "reward"])
def test_a_changed_run_of_version_0_1_0_is_refused_with_what_changed(
    what: str, stored: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: list[str] = []
    if what == "setting":
        flags, changed = ["--on_invalid_reward", "mask"], r"\(on_invalid_reward: raise → mask\)"
    elif what == "version":
        versions = sys.modules["troll.trl.robust.fingerprint"].versions()  # type: ignore[attr-defined]
        monkeypatch.setattr("troll.trl.robust.fingerprint.versions", lambda *_: {**versions, "torch": "0.1"})
        changed = rf"\(versions\.torch: {re.escape(versions['torch'])} → 0\.1\)"
    else:
        reward = tmp_path / "old_reward.py"
        reward.write_text(reward.read_text() + "# changed\n")
        changed = r"\(rewards\.spread: \w{16} → \w{16}\)"
    before = files(stored)
    assert resume(stored, *flags) == 2
    err = capsys.readouterr().err
    assert re.search(f"resume refused: the run has changed since the checkpoint {changed}", err), err
    assert "pass --allow_changes" in err
    assert files(stored) == before
    assert resume(stored, *flags, "--allow_changes") == 0
    assert stored.about["status"] == "finished"
