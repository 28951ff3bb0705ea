"""A folder of runs in every state, and what cannot be read."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from troll.errors import InputError
from troll.lab.runs import append_line, write_json
from troll.lab.runs.listing import details, entries, entry_of, resumable_from
from troll.trl.robust.store import commit, locked, stage


def make(root: Path, name: str, status: str = "finished", steps: int = 4, **about: Any) -> Path:
    """A run as ``troll train`` leaves it, with updates and a reward every second one."""
    folder = root / name
    folder.mkdir(parents=True)
    known = {"format": 1, "name": name, "status": status, "started": "2026-11-15T09:30:00+00:00"}
    settings = {"max_steps": 8, "updates_per_generation": 2}
    more = {"task": {"name": "t"}, "model": {"name": "m"}, "arm_label": "clip", "settings": settings}
    write_json(folder / "run.json", {**known, **more, **about})
    for step in range(1, steps + 1):
        append_line(folder / "metrics.jsonl", {"step": step, **({"reward": step / 10} if step % 2 else {})})
    return folder


def checkpoint(folder: Path, step: int) -> Path:
    staged = stage(folder, step)
    (staged / "weights").write_bytes(b"x" * 1000)
    return commit(staged)


def compared(root: Path, name: str, *runs: str) -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    about = {"format": 1, "name": name, "task": {"name": "t"}, "model": {"name": "m"}, "seeds": [0], "measures": []}
    write_json(folder / "comparison.json", {**about, "arms": [{"arm": x, "label": x, "runs": [x]} for x in runs]})
    return folder


@pytest.mark.parametrize("status", ["finished", "interrupted", "failed"])
def test_a_run_that_ended_is_as_it_says(status: str, tmp_path: Path) -> None:
    entry = entry_of(make(tmp_path, "a", status))
    assert entry is not None
    assert (entry.name, entry.kind, entry.state) == ("a", "run", status)
    assert (entry.step, entry.max_steps, entry.reward) == (4, 8, 0.3)
    assert entry.resumable_from == (None if status == "finished" else 0)
    assert entry.size == sum(x.stat().st_size for x in (tmp_path / "a").iterdir())


def test_whoever_holds_the_lock_is_running_and_who_only_says_so_was_killed(tmp_path: Path) -> None:
    for status in ("running", "interrupted"):
        folder = make(tmp_path, status, status)
        with locked(folder):
            entry = entry_of(folder)
            assert entry is not None
            assert (entry.state, entry.resumable_from) == ("running", None)
    killed = entry_of(tmp_path / "running")
    assert killed is not None
    assert (killed.state, killed.resumable_from) == ("killed", 0)


def test_it_goes_on_from_the_newest_checkpoint_that_was_written_to_the_end(tmp_path: Path) -> None:
    folder = make(tmp_path, "a", "running")
    for step in (2, 10):
        checkpoint(folder, step)
    (folder / "checkpoint-12").mkdir()  # not by troll
    assert resumable_from(folder) == 10
    entry = entry_of(folder)
    assert entry is not None
    assert entry.resumable_from == 10


def test_verl_counts_rollouts(tmp_path: Path) -> None:
    folder = make(tmp_path, "a", "interrupted", max_steps=16)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3")
    entry = entry_of(folder)
    assert entry is not None
    assert (entry.resumable_from, entry.max_steps) == (6, 16)


def test_only_the_end_of_long_metrics_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troll.lab.runs.listing._TAIL", 200)
    folder = make(tmp_path, "a", steps=100)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("[1]\nnot JSON\n" + '{"step": 101, "rew')
    entry = entry_of(folder)
    assert entry is not None
    assert (entry.step, entry.reward) == (100, 9.9)


BROKEN = {
    "{": "cannot be read",
    "[]": "contains a list",
    '{"format": 99}': "has format 99",
    '{"format": 1}': "KeyError: 'status'",
    '{"format": 1, "status": "running", "settings": 3}': "AttributeError",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_run_is_listed_with_the_reason(text: str, tmp_path: Path) -> None:
    make(tmp_path, "good")
    make(tmp_path, "bad")
    (tmp_path / "bad" / "run.json").write_text(text)
    by_name = {entry.name: entry for entry in entries(tmp_path)}
    assert (by_name["good"].state, by_name["bad"].state) == ("finished", "broken")
    assert BROKEN[text] in str(by_name["bad"].why)
    assert details(tmp_path / "bad").entry == by_name["bad"]
    json.dumps(details(tmp_path / "bad").as_json())


def test_what_is_no_run_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").touch()
    make(tmp_path, ".a.new")  # one that is being begun
    assert entries(tmp_path) == []
    assert entries(tmp_path / "nowhere") == []
    with pytest.raises(InputError, match="troll runs"):
        details(tmp_path / "notes")


def test_the_newest_is_first_and_its_age_is_known(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    for name, hours in (("b", 2), ("c", 1), ("a", 2)):
        make(tmp_path, name, started=(now - timedelta(hours=hours)).isoformat())
    found = entries(tmp_path)
    assert [entry.name for entry in found] == ["c", "a", "b"]
    assert found[0].age == pytest.approx(3600, abs=600)  # a busy machine
    unknown = entry_of(make(tmp_path, "d", started=None))
    assert unknown is not None
    assert unknown.age is None


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["finished", "finished"], ("finished", 2, None)),
        (["finished", "interrupted"], ("interrupted", 1, 0)),
        (["finished", None], ("interrupted", 1, 0)),
        (["interrupted", "failed"], ("failed", 0, 0)),
        (["finished", "running"], ("killed", 1, 0)),
    ],
)
def test_a_comparison_is_as_its_runs_are(states: list[str | None], expected: tuple[Any, ...], tmp_path: Path) -> None:
    folder = compared(tmp_path, "c", "troll", "clip")
    for name, status in zip(("troll", "clip"), states, strict=True):
        if status is not None:
            make(folder, name, status)
    entry = entry_of(folder)
    assert entry is not None
    assert (entry.state, entry.step, entry.resumable_from) == expected
    assert (entry.kind, entry.max_steps) == ("comparison", 2)
    assert [x.name for x in entries(tmp_path)] == ["c"]
    assert [x.name for x in details(folder).runs] == [
        name for name, status in zip(("troll", "clip"), states, strict=True) if status
    ]
    with locked(folder):
        running = entry_of(folder)
        assert running is not None
        assert running.state == "running"


def test_every_checkpoint_is_read_and_checked(tmp_path: Path) -> None:
    folder = make(tmp_path, "a", "failed", error="enough")
    for step in (2, 10, 4):
        checkpoint(folder, step)
    (folder / "checkpoint-10" / "weights").write_bytes(b"y" * 1000)
    found = details(folder)
    assert [(x.name, x.step) for x in found.checkpoints] == [(f"checkpoint-{n}", n) for n in (2, 4, 10)]
    assert [x.wrong is None for x in found.checkpoints] == [True, True, False]
    assert "weights is damaged" in str(found.checkpoints[2].wrong)
    assert found.checkpoints[0].size > 1000
    assert found.entry.why == "enough"
    shown = json.loads(json.dumps(found.as_json()))
    assert (shown["state"], shown["about"]["error"], len(shown["checkpoints"])) == ("failed", "enough", 3)


def test_a_file_that_goes_while_sizes_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path, "a")
    real = os.lstat

    def gone(path: str, *more: Any, **named: Any) -> os.stat_result:
        if str(path).endswith("metrics.jsonl"):
            raise FileNotFoundError
        return real(path, *more, **named)

    monkeypatch.setattr("troll.lab.runs.listing.os.lstat", gone)
    entry = entry_of(folder)
    assert entry is not None
    assert entry.size == (folder / "run.json").stat().st_size
