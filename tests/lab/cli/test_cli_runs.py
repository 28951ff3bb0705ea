"""``troll runs``: what it prints on a terminal, in a pipe, and for scripts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from troll.errors import InputError
from troll.lab.cli import check_command, main
from troll.lab.runs import append_line, write_json
from troll.trl.robust.store import commit, stage


def make(root: Path, name: str, status: str, **about: Any) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    known = {"format": 1, "name": name, "status": status, "started": "2026-01-01T00:00:00+00:00", "max_steps": 80}
    more = {"task": {"name": "t"}, "model": {"name": "m"}, "arm_label": "clip ±0.2", "settings": {}}
    write_json(folder / "run.json", {**known, **more, **about})
    append_line(folder / "metrics.jsonl", {"step": 40, "reward": 0.5})
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    make(root, "done", "finished")
    killed = make(root, "killed", "running")
    for step in (16, 32):
        staged = stage(killed, step)
        (staged / "weights").write_bytes(bytes(1000))
        commit(staged)
    change = {"step": 16, "differences": ["learning_rate: 5e-06 → 0.0001"]}
    make(root, "sad", "failed", error="a [/x] [bold]reward\x1b[2J failed", changes=[change])
    (root / "bad").mkdir()
    (root / "bad" / "run.json").write_text("{")
    return root


def test_every_run_is_a_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--runs_dir", str(root)]) == 0
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows.pop("name") == ["state", "updates", "reward", "age", "size", "note"]
    assert rows.keys() == {"done", "killed", "sad", "bad"}
    assert rows["done"][:3] == ["finished", "40/80", "0.500"]
    assert rows["done"][-1] == "–"
    assert rows["killed"][0] == "killed"
    assert rows["killed"][-1] == "resumes from update 32"
    assert rows["sad"][-1] == "resumes from update 0"
    assert rows["bad"][0] == "broken"
    assert "cannot be read" in rows["bad"][-1]
    assert re.fullmatch(r"\d+ days", rows["done"][3])
    assert re.fullmatch(r"\d+ B", rows["done"][4])


def test_on_a_terminal_it_is_a_table(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["runs", "--runs_dir", str(root)]) == 0
    out = capsys.readouterr().out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert "\x1b" in out
    assert plain.splitlines()[0].split() == ["name", "state", "updates", "reward", "age", "size", "note"]
    assert re.search(r"^killed +killed +40/80 +0\.500 .* resumes from update 32 *$", plain, re.MULTILINE)


def test_for_scripts(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--json", "--runs_dir", str(root)]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert {name: entry["state"] for name, entry in found.items()} == {
        **{"done": "finished", "killed": "killed", "sad": "failed", "bad": "broken"}
    }
    assert (found["killed"]["step"], found["killed"]["max_steps"], found["killed"]["resumable_from"]) == (40, 80, 32)
    assert main(["runs", "killed", "--json", "--runs_dir", str(root)]) == 0
    one = json.loads(capsys.readouterr().out)
    assert [(x["step"], x["wrong"]) for x in one["checkpoints"]] == [(16, None), (32, None)]


def test_one_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "killed" / "checkpoint-32" / "weights").write_bytes(bytes(999))
    assert main(["runs", "killed", "--runs_dir", str(root)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "killed: killed"
    assert any(re.search(r"checkpoint-16 .*  good$", line) for line in said)
    assert any(re.search(r"checkpoint-32 .*  weights has 999 of its 1000 bytes$", line) for line in said)
    assert said[-1] == f"Resume from update 16: troll train --resume {root / 'killed'}"
    assert main(["runs", str(root / "done")]) == 0
    out = capsys.readouterr().out
    assert "no checkpoints" in out
    assert "Resume" not in out


def test_one_that_failed_says_why_and_cannot_do_anything_to_a_terminal(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "sad", "--runs_dir", str(root)]) == 0
    out = capsys.readouterr().out
    assert "error    a [/x] [bold]reward [2J failed" in out
    assert "changed  after update 16: learning_rate: 5e-06 → 0.0001" in out
    assert "\x1b" not in out
    assert main(["runs", "bad", "--runs_dir", str(root)]) == 0
    assert "It cannot be read: " in capsys.readouterr().out


def test_a_comparison(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = root / "c"
    make(folder, "troll-0", "finished")
    about = {"format": 1, "name": "c", "task": {"name": "t"}, "model": {"name": "m"}, "seeds": [0], "measures": []}
    write_json(folder / "comparison.json", {**about, "arms": [{"arm": "troll", "runs": ["troll-0", "troll-1"]}]})
    assert main(["runs", "--runs_dir", str(root)]) == 0
    assert re.search(r"^c\tinterrupted\t1/2 runs\t.*\tresume with --resume$", capsys.readouterr().out, re.MULTILINE)
    assert main(["runs", "c", "--runs_dir", str(root)]) == 0
    out = capsys.readouterr().out
    assert "  troll-0  finished  40/80" in out
    assert out.splitlines()[-2] == f"Resume: troll compare --resume {folder}"


def test_where_there_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--runs_dir", str(tmp_path / "runs")]) == 0
    assert "`troll train` starts one" in capsys.readouterr().out
    assert main(["runs", "--json", "--runs_dir", str(tmp_path / "runs")]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["runs", "x", "--runs_dir", str(tmp_path / "runs")]) == 2
    assert "There is no run or comparison 'x'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_help_has_examples_and_check_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["runs", "--help"])
    examples = re.findall(r"^  troll (runs.*?)(?:  .*)?$", capsys.readouterr().out, re.MULTILINE)
    assert len(examples) >= 4
    for example in examples:
        check_command(example.split())
    check_command(["runs", "--help"])
    for wrong in (["--jsn"], ["a", "b"]):
        with pytest.raises(InputError):
            check_command(["runs", *wrong])


def test_no_trainer_is_loaded(root: Path) -> None:
    code = "import sys; from troll.lab.cli import main; main(sys.argv[1:]); print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, "runs", "--runs_dir", str(root)], capture_output=True, text=True, check=True
    )
    modules = set(done.stdout.splitlines()[-1].split())
    assert "troll.lab.runs.listing" in modules
    assert not modules & {
        "trl",
        "transformers",
        "accelerate",
        "datasets",
        "troll.lab.training.run",
        "troll.trl.trainer",
    }
