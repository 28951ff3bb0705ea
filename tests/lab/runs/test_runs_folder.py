"""The folder of a run: what is written is read, whatever a crash or a model has done to it."""

from __future__ import annotations

import json
import math
import tarfile
from pathlib import Path
from typing import Any

import pytest

from troll.errors import InputError
from troll.lab.cli import main
from troll.lab.runs import Comparison, Run, append_line, write_json

HOSTILE = ["</script>\u2028\u2029\x00\x1b[31m", "\ud83d", "é漢🙂", '"\\\n\r\t', "\udc80 NaN"]


def run_in(path: Path, **about: Any) -> Run:
    write_json(path / "run.json", {"format": 1, "name": "x", **about})
    return Run.open(path)


@pytest.mark.parametrize("text", HOSTILE)
def test_any_text_comes_back(text: str, tmp_path: Path) -> None:
    run = run_in(tmp_path, command=text)
    assert run.about["command"] == text
    for step in (1, 2):
        append_line(tmp_path / "samples.jsonl", {"step": step, "prompt": text, "tokens": [text, text]})
    assert [sample["tokens"] for sample in run.samples()] == [[text, text]] * 2
    assert (tmp_path / "samples.jsonl").read_bytes().count(b"\n") == 2
    (tmp_path / "samples.jsonl").read_bytes().decode()  # is UTF-8


def test_what_is_not_a_number_becomes_null(tmp_path: Path) -> None:
    append_line(tmp_path / "m.jsonl", {"a": math.nan, "b": [math.inf, 1.5, (-math.inf,)], "c": {1: math.nan}})
    text = (tmp_path / "m.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5, [None]], "c": {"1": None}}


def test_a_line_that_was_cut_short_is_skipped_and_the_next_one_is_not(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    append_line(metrics, {"step": 1, "loss": 0.1})
    with metrics.open("a") as file:
        file.write('{"step": 2, "lo')
    assert [line["step"] for line in run.metrics()] == [1]
    append_line(metrics, {"step": 2, "loss": 0.2})
    append_line(metrics, {"step": 3, "loss": 0.3})
    assert [line["loss"] for line in run.metrics()] == [0.1, 0.2, 0.3]
    with metrics.open("ab") as file:
        file.write(b'{"step": 4, "text": "\xf0\x9f')  # inside a character
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]


def test_lines_that_are_no_objects_are_skipped(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('[]\n3\nnull\n\n{"loss": 1}\n{"step": 1, "loss": 2}\n')
    (tmp_path / "samples.jsonl").write_text('[]\n{"tokens": []}\n{"step": 1, "tokens": ["a"]}\n')
    assert run.metrics() == [{"step": 1, "loss": 2}]
    assert run.samples() == [{"step": 1, "tokens": ["a"]}]


def test_of_a_step_that_was_made_again_the_last_line_counts(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    for step, loss in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.9), (10, 1.0)):
        append_line(tmp_path / "metrics.jsonl", {"step": step, "loss": loss})
        append_line(tmp_path / "metrics.jsonl", {"step": step, "eval_reward": loss})
        append_line(tmp_path / "tokens.jsonl", {"format": 1, "kl_edges": [0, 1], "log_ratio_edges": [0, 1]})
        append_line(tmp_path / "tokens.jsonl", {"step": step, "kl": [loss]})
        for place in (1, 0):
            append_line(tmp_path / "samples.jsonl", {"step": step, "place": place, "reward": loss})
    expected = [(1, 0.1), (2, 0.9), (3, 0.3), (10, 1.0)]
    assert [(line["step"], line["loss"]) for line in run.metrics()] == expected
    assert [(line["step"], line["eval_reward"]) for line in run.evaluations()] == expected
    history = run.tokens()
    assert history is not None
    assert history.kl_edges == [0, 1]
    assert [(line["step"], line["kl"][0]) for line in history.updates] == expected
    shown = [(x["step"], x["place"], x["reward"]) for x in run.samples()]
    assert shown == [(step, place, value) for step, value in expected for place in (0, 1)]


def test_an_empty_run(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    assert (run.metrics(), run.evaluations(), run.samples(), run.tokens(), run.evaluation()) == ([], [], [], None, None)
    (tmp_path / "tokens.jsonl").write_text('{"format": 1, "kl_ed')
    assert run.tokens() is None
    write_json(tmp_path / "eval.json", {"task": "x"})
    assert run.evaluation() == {"task": "x"}


def test_a_run_is_read_anew_on_every_call(tmp_path: Path) -> None:
    run = run_in(tmp_path, status="running")
    run_in(tmp_path, status="finished")
    assert run.about["status"] == "finished"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"format": 1})
    with pytest.raises(TypeError):
        write_json(path, {"format": 2, "what": object()})
    assert json.loads(path.read_text()) == {"format": 1}
    assert [x.name for x in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "it has no run.json"),
        ("{", "cannot be read"),
        ("[]", "contains a list"),
        ("{}", "has format None, this version of troll reads format 1"),
        ('{"format": 2}', "has format 2,"),
        (b"\xff", "cannot be read"),
    ],
)
@pytest.mark.parametrize(("kind", "name"), [(Run, "run.json"), (Comparison, "comparison.json")])
def test_a_folder_that_is_none(text: str | bytes | None, says: str, kind: Any, name: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InputError, match=says.replace("run.json", name)):
        kind.open(tmp_path)


def test_the_runs_of_a_comparison_that_exist(tmp_path: Path) -> None:
    arms = [{"arm": "troll", "runs": ["troll-0", "troll-1"]}, {"arm": "clip", "runs": ["clip-0"]}]
    write_json(tmp_path / "comparison.json", {"format": 1, "arms": arms})
    for name in ("troll-1", "clip-0"):
        (tmp_path / name).mkdir()
        run_in(tmp_path / name)
    comparison = Comparison.open(tmp_path)
    assert [run.path.name for run in comparison.runs("troll")] == ["troll-1"]
    assert [run.path.name for run in comparison.runs("clip")] == ["clip-0"]


def test_a_run_of_version_0_1_0_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`troll runs`, `explain` and `report` on a folder written before settings were renamed."""
    stored = Path(__file__).resolve().parents[2] / "stored" / "run-0.1.0.tar.gz"
    with tarfile.open(stored) as archive:
        archive.extractall(tmp_path, filter="data")
    raw = json.loads((tmp_path / "runs" / "arithmetic-troll" / "run.json").read_text())["settings"]
    settings = Run.open(tmp_path / "runs" / "arithmetic-troll").about["settings"]
    assert {"bound", "reward_errors"} <= raw.keys()
    assert not {"bound", "reward_errors"} & settings.keys()
    assert {"kl_bound_schedule", "on_invalid_reward"} <= settings.keys()
    for command, shown in (("runs", "arithmetic-troll"), ("explain", "Trust region"), ("report", "Report: ")):
        name = [] if command == "runs" else ["arithmetic-troll"]
        assert main([command, *name, "--runs_dir", str(tmp_path / "runs")]) == 0
        assert shown in capsys.readouterr().out
