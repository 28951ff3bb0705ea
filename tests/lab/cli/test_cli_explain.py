"""``troll explain``: real runs of a tiny model, runs that failed, comparisons, and what is printed."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
import report_cases
from cli_cases import MAX_STEPS, flags, train

from troll.errors import InputError
from troll.lab.cli import check_command, main
from troll.lab.runs import Run
from troll.lab.runs.formatting import score


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def explained(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(["explain", *argv]) == 0
    return capsys.readouterr().out


def test_a_real_run_that_no_trust_region_can_act_in(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Warned of while it runs, written down, in the report, and explained with a command that can be given."""
    run = train(runs, "--updates_per_generation", "1", "--write_report", "true")
    shown = capsys.readouterr().out
    assert (
        shown.count("Warning (since update 1): each rollout is used for one update.") == 2
    )  # when it is found, and at the end
    assert "Try --updates_per_generation 8" in shown
    (line,) = [x for x in run.warnings() if x["name"] == "one_update"]
    assert (line["since"], line["said"], line["level"]) == (1, 1, "warning")
    page = (run.path / "report.html").read_text()
    assert '<section id="findings">' in page
    assert "Each rollout is used for one update." in page
    out = explained(capsys, run.path.name)
    assert out.startswith(f"{run.path.name}: finished\n")
    assert f"Finished: {MAX_STEPS} of {MAX_STEPS} updates, {MAX_STEPS} rollouts" in " ".join(out.split())
    assert "The trust region could not act: each rollout is used for one update." in " ".join(out.split())
    assert "  1. --updates_per_generation 8\n" in out
    (command,) = [x.strip() for x in out.splitlines() if x.strip().startswith("troll train --config")]
    check_command(shlex.split(command)[1:])
    assert command == f"troll train --config runs/{run.path.name}/config.yaml --updates_per_generation 8"


def test_a_real_run_that_is_projected(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers are those of metrics.jsonl."""
    run = train(runs, "--max_steps", "16")
    out = " ".join(explained(capsys, str(run.path)).split())
    largest = max(line["troll/kl_before/max"] for line in run.metrics())
    assert f"largest {largest:.3g}" in out
    rewards = [line["reward"] for line in run.metrics() if "reward" in line]
    assert f"Sampled reward {score(rewards[0])} in the first rollout;" in out
    assert f"{score(sum(rewards[-3:]) / 3)} at the end" in out
    assert f"Held-out reward {score(run.evaluations()[0]['eval_reward'])} (update 0)" in out


def test_a_run_that_failed(runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_AT", "4")  # before training, rollout, held-out, rollout
    assert main(flags(runs, "--run_name", "sad", reward="fails_later")) == 2
    out = explained(capsys, "sad")
    assert out.startswith("sad: failed\n")
    assert "Failed after 4 of 8 updates" in " ".join(out.split())
    assert "enough" in out
    assert out.splitlines()[-1] == f"  troll train --resume {Path('runs') / 'sad'}"
    assert "\x1b" not in out


def test_several_in_turn_and_for_scripts(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, arm in (("a", "troll"), ("b", "clip"), ("c", "none")):
        report_cases.write_run(runs / name, arm)
    out = explained(capsys, "b", "a", str(runs / "c"))
    assert [line for line in out.splitlines() if line.endswith(": finished")] == [f"{x}: finished" for x in "bac"]
    assert "The clip removed the gradient of" in out
    assert "Nothing constrained the updates." in out
    told = json.loads(explained(capsys, "a", "c", "--json"))
    assert [one["name"] for one in told] == ["a", "c"]
    assert all(one["reward"] and one["region"] and one["what"] for one in told)


def test_a_comparison_is_its_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_cases.write_comparison(runs / "both", ("troll", "clip"), updates=12)
    told = json.loads(explained(capsys, "both", "--json"))
    assert [one["name"] for one in told] == [f"{arm}-{seed}" for arm in ("troll", "clip") for seed in range(3)]


def test_an_empty_run_and_one_that_is_none(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = report_cases.write_run(runs / "x")
    for name in os.listdir(folder):
        if name != "run.json":
            (folder / name).unlink()
    out = explained(capsys, "x")
    assert "No update was logged." in out
    assert "No rule could be checked." in out
    assert "All rules: no update was logged." in out
    assert main(["explain", "nowhere"]) == 2
    assert "It has: x." in capsys.readouterr().err
    (folder / "run.json").write_text('{"format": 1, "name": "x"}')
    assert explained(capsys, "x").splitlines()[1].startswith("  x: it cannot be read")


def test_what_a_run_is_called_cannot_do_anything_to_a_terminal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = report_cases.write_run(runs / "x")
    about = Run(folder).about
    about |= {"status": "failed", "error": "bad\x1b[2J\nnews", "arm_label": "\x1b[31mred"}
    (folder / "run.json").write_text(json.dumps(about))
    out = explained(capsys, "x")
    assert "\x1b" not in out
    assert "The error: bad [2J news." in " ".join(out.split())


def test_help_teaches_and_flags_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    shown = capsys.readouterr().out
    for part in ("troll explain runs/a runs/b", "--json", "A warning asks for a change", "--runs_dir"):
        assert part in shown
    check_command(["explain", "a", "b", "--json"])
    check_command(["explain", "--help"])
    with pytest.raises(InputError, match="RUN"):
        check_command(["explain"])
