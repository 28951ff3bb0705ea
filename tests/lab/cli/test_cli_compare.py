"""``troll compare``: real runs, interrupted, failed and gone on with; and everything it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from cli_cases import shared, start

from troll.errors import InputError
from troll.lab.cli import check_command, main
from troll.lab.cli.compare import sentences
from troll.lab.runs import Run
from troll.lab.runs.comparison import conclude


def flags(runs: Path, *more: str, reward: str = "spread") -> list[str]:
    """A comparison of short runs."""
    return [
        *("compare", "--model", str(shared() / "model"), "--runs_dir", str(runs)),
        *("--reward", f"{shared() / 'rewards.py'}:{reward}", "--max_steps", "4", "--updates_per_generation", "2"),
        *("--num_generations", "4", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1"),
        *("--eval_size", "8", "--max_completion_length", "4", "--learning_rate", "1e-2", *more),
    ]


def until(true: Callable[[], bool], process) -> None:
    """Wait for something that a process does, but not forever."""
    end = time.monotonic() + 120
    while not true():
        if time.monotonic() > end:
            os.killpg(process.pid, signal.SIGKILL)
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.slow
def test_a_comparison_interrupted_continued_broken_and_mended(tmp_path, capsys):
    runs, gate = tmp_path / "runs", tmp_path / "gate"
    names = ["troll-0", "none-0"]
    folder = runs / "first"
    said = flags(runs, "--arms", "troll", "none", "--seeds", "0", "--jobs", "2", "--run_name", "first", reward="waits")
    # the second call of the reward is in the first rollout: both runs stop there until the signal has come
    process = start(said, env={"WAIT_AT": "2", "WAIT_FOR": str(gate)}, start_new_session=True)
    metrics = [folder / name / "metrics.jsonl" for name in names]
    until(lambda: all(file.exists() and "eval_reward" in file.read_text() for file in metrics), process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    logs = [folder / f"{name}.log" for name in names]
    until(lambda: all("Press Ctrl-C again to stop at once" in log.read_text() for log in logs), process)
    gate.touch()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert err.count("Saving checkpoints and stopping.") == 1
    assert re.findall(r"^(.*): (started|interrupted)$", out, re.MULTILINE)[:2] == [(name, "started") for name in names]
    assert f"Interrupted. Resume with: troll compare --resume {folder}" in out
    for name in names:
        assert Run.open(folder / name).about["status"] == "interrupted"
        assert (folder / name / "checkpoint-1").is_dir()
        (folder / name / "mark").touch()
    assert json.loads((folder / "comparison.json").read_text())["measures"] == []

    assert main(["compare", "--continue", "first", "--runs_dir", str(runs)]) == 0  # as --resume
    out = capsys.readouterr().out
    finished = re.findall(r"^(.*): finished, held-out reward \d+\.\d{3}, \d+ (?:s|min)$", out, re.MULTILINE)
    assert set(finished) == set(names)
    found = json.loads((folder / "comparison.json").read_text())
    assert found == json.loads(json.dumps(conclude(folder)))
    assert (found["missing"], found["jobs"]) == ([], 2)
    assert [arm["label"] for arm in found["arms"]] == ["TROLL, KL ≤ 0.2", "no trust region"]
    assert "TROLL against no trust region\n  held-out reward, end: no verdict (" in out
    assert f"Report: {folder / 'report.html'}" in out
    assert "TROLL, KL ≤ 0.2" in (folder / "report.html").read_text()
    for name, region in zip(names, ("troll", "none"), strict=True):
        run = Run.open(folder / name)
        assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]
        assert (run.path / "mark").exists()  # gone on with, not begun anew
        assert (run.about["status"], run.about["settings"]["trust_region"]) == ("finished", region)
        assert all("troll/kl_before/mean" in line for line in run.metrics())  # measured in every arm
        assert not [x.name for x in run.path.iterdir() if x.name.startswith(("checkpoint", "model", "report"))]
    starts = [Run(folder / name).evaluations()[0]["eval_reward"] for name in names]
    assert starts[0] == starts[1]  # the same model, problems and samples

    kept = (folder / "troll-0" / "metrics.jsonl").read_bytes()
    (folder / "none-0").rename(tmp_path / "aside")
    (folder / "none-0").write_text("in the way")
    assert main(["compare", "--resume", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "troll-0: already finished, held-out reward" in out
    assert f"none-0: failed; the other runs continue. Last lines of {folder / 'none-0.log'}:" in out
    assert re.search(r"^  troll: The run folder .*none-0 exists already", out, re.MULTILINE)
    assert f"Missing: none-0. Retry with: troll compare --resume {folder}" in out
    assert "No verdict: no two arms have finished runs with the same seed." in out
    assert conclude(folder)["missing"] == ["none-0"]
    (folder / "none-0").unlink()
    (tmp_path / "aside").rename(folder / "none-0")
    assert main(["compare", "--resume", str(folder)]) == 0
    assert "started" not in capsys.readouterr().out  # all are there
    assert (folder / "troll-0" / "metrics.jsonl").read_bytes() == kept


def test_a_dry_run_lists_the_runs_and_runs_none(tmp_path, capsys):
    more = ("--arms", "gspo", "clip-higher", "--seeds", "3", "5", "--kl_bound", "0.02", "--dry_run")
    assert main(flags(tmp_path / "runs", *more)) == 0
    out = capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    listed = [line.rpartition("/")[2] for line in out.splitlines() if line.startswith("# ") and "--seed=" in line]
    gspo = "--trust_region=clip --importance_sampling_level=sequence --epsilon=0.0003 --epsilon_high=0.0004"
    assert listed == [
        f"gspo-3: {gspo} --seed=3",
        f"gspo-5: {gspo} --seed=5",
        "clip-higher-3: --trust_region=clip --epsilon=0.2 --epsilon_high=0.28 --seed=3",
        "clip-higher-5: --trust_region=clip --epsilon=0.2 --epsilon_high=0.28 --seed=5",
    ]
    assert re.search(rf"^# 4 runs, between {DURATION} and {DURATION} in total\.$", out, re.MULTILINE)
    assert "# Trust region" not in out
    settings = yaml.safe_load(out)
    assert (settings["arms"], settings["seeds"], settings["kl_bound"]) == (["gspo", "clip-higher"], [3, 5], 0.02)
    file = tmp_path / "again.yaml"
    file.write_text(out)
    assert main(["compare", "--config", str(file), "--dry_run", "--runs_dir", str(tmp_path / "runs")]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == settings  # what is printed is a file that means the same


def test_a_dry_run_shows_the_trust_region_of_troll(tmp_path, capsys):
    more = ("--arms", "clip", "troll", "--seeds", "3", "--preset", "paper", "--dry_run")
    assert main(flags(tmp_path / "runs", *more)) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in ("# preset paper", "# kl_bound 0.05", "# regression_coef 1", "# tail floor"):
        assert line.split() in shown


DURATION = r"(?:\d+ s|\d+ min|\d+ h \d\d min)"
REFUSED = {
    "--arms troll": "names one arm, but a comparison needs two",
    "--arms troll ppo": "--arms has the unknown arm 'ppo'. Choose from troll, clip, ",
    "--arms clip clip": "--arms contains clip 2 times",
    "--seeds 1 1": "--seeds contains the seed 1 2 times",
    "--seeds -1": "a seed must be an integer from 0 to 4294967295, got -1",
    "--seeds x": "--seeds",
    "--jobs 0": "--jobs must be at least 1, got 0",
    "--seed 3": "Use --seeds 3",
    "--trust_region clip": "--trust_region cannot be set for all runs",
    "--epsilon_high 0.3": "--epsilon_high cannot be set for all runs",
    "--save_model true": "Use --keep_models true",
    "--keep_checkpoints true": "Use --keep_models true",
    "--write_report true": "--write_report cannot be set for all runs",
    "--measure_kl false": "--measure_kl cannot be set for all runs",
    "--no_such_flag 1": "Unknown flag --no_such_flag",
    "--kl_bound -1": "kl_bound must be a number ≥ 0, got -1",
    "--num_generations 7": "divisible by num_generations",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_cannot_be_compared_is_one_sentence(given, tmp_path, capsys):
    command = flags(tmp_path / "runs", *given.split())
    capsys.readouterr()  # of making the model
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.fullmatch(r"troll: .+\. .+\.\n", err)  # what is wrong, and what to do
    assert REFUSED[given] in err
    assert not (tmp_path / "runs").exists()
    with pytest.raises(InputError, match=re.escape(REFUSED[given])):
        check_command(command)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--task", "nowhere.py"], "The file nowhere.py does not exist"),
        (["--model", "./nowhere"], "There is no model folder './nowhere'"),
        (["--run_name", "../up"], "the run name '../up'"),
        (["--resume", "nowhere"], "There is no comparison 'nowhere' in "),
        (["--reward", "nowhere.py:f"], "The file nowhere.py does not exist"),
    ],
)
def test_what_is_not_there_is_said_before_any_run(more, said, tmp_path, capsys):
    command = ["compare", "--runs_dir", str(tmp_path / "runs"), *more] if "--resume" in more else flags(tmp_path, *more)
    assert main(command) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("*"))


def test_a_comparison_that_is_running_or_no_comparison(tmp_path, capsys):
    from filelock import FileLock

    folder = tmp_path / "runs" / "busy"
    folder.mkdir(parents=True)
    about = {"format": 1, "name": "busy", "task": {"name": "t"}, "model": {"name": "m"}, "seeds": [0], "arms": []}
    (folder / "comparison.json").write_text(json.dumps({**about, "jobs": 1, "keep_models": False, "measures": []}))
    resume = ["compare", "--resume", "busy", "--runs_dir", str(tmp_path / "runs")]
    with FileLock(folder / ".lock"):
        assert main(resume) == 2
    assert f"the comparison {folder} is in use: another process is writing" in capsys.readouterr().err
    assert main([*resume, "--max_steps", "3"]) == 2
    assert "--resume cannot be combined with --max_steps" in capsys.readouterr().err
    run = tmp_path / "runs" / "run"
    run.mkdir()
    (run / "run.json").write_text('{"format": 1}')
    assert main(["compare", "--resume", str(run)]) == 2
    assert "comparison.json" in capsys.readouterr().err
    assert main(flags(tmp_path / "runs", "--run_name", "busy")) == 2
    assert "--resume busy" in capsys.readouterr().err


def test_verdicts_in_words_say_how_far_they_go():
    def verdict(b: str, says: str, low: float | None, high: float | None) -> dict[str, object]:
        return {"a": "troll", "b": b, "difference": -0.01, "low": low, "high": high, "says": says, "because": "…"}

    verdicts = [verdict("clip", "inconclusive", -0.05, 0.03), verdict("none", "TROLL is worse", -0.02, -0.005)]
    found = {
        "arms": [{"arm": "troll", "label": "T"}, {"arm": "clip", "label": "C"}, {"arm": "none", "label": "N"}],
        "seeds": [0, 1, 2],
        "missing": [],
        "comparisons": 3,
        "measures": [
            {"label": "reward", "verdicts": verdicts},
            {"label": "seconds", "verdicts": [verdict("clip", "no verdict", None, None)]},
        ],
    }
    assert sentences(found) == [
        "TROLL against C",
        "  reward: inconclusive (−0.010, −0.050 to +0.030)",
        "  seconds: no verdict (−0.010)",
        "TROLL against N",
        "  reward: TROLL is worse (−0.010, −0.020 to −0.005)",
        "95 % intervals of the difference, paired by seed, 3 seeds; 3 comparisons, not corrected: about one in twenty "
        "between equal arms says better or worse.",
        "Inconclusive means that so few seeds show no difference, not that the arms are equal.",
    ]
    assert "3 seeds, without those missing in an arm; 3" in sentences({**found, "missing": ["none-1"]})[-2]


def test_help_has_examples_and_check_takes_them(capsys):
    assert main(["compare", "--help"]) == 0
    out = capsys.readouterr().out
    examples = re.findall(r"^  troll (compare.*?)(?:  .*)?$", out, re.MULTILINE)
    assert len(examples) >= 5
    for example in examples:
        check_command(example.split())
    assert os.linesep.join(["", "  --arms      troll"]) in out
