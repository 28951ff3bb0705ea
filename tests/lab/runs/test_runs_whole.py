"""Folders that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from troll.errors import InputError
from troll.lab.runs import writer
from troll.lab.runs.writer import new_folder, put_in_place, staged_beside
from troll.trl.robust.store import is_locked


def fill(folder: Path, text: str = "x") -> None:
    (folder / "run.json").write_text(text)
    (folder / "below").mkdir()
    (folder / "below" / "file").write_text(text)


def test_a_folder_appears_when_everything_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, synced = tmp_path / "runs" / "a", []
    monkeypatch.setattr(writer, "sync_file", lambda path: synced.append(path.name))
    with new_folder(place) as staged:
        fill(staged)
        assert staged.parent == place.parent
        assert staged.name.startswith(".")
        assert not place.exists()
    assert {"run.json", "file"} <= set(synced)
    assert (place / "run.json").read_text() == (place / "below" / "file").read_text() == "x"
    assert os.listdir(tmp_path / "runs") == ["a"]
    assert not is_locked(place)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_a_start_that_fails_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    def begin() -> None:
        with new_folder(tmp_path / "a") as staged:
            fill(staged)
            raise error

    with pytest.raises(InputError if error is OSError else error):
        begin()
    assert os.listdir(tmp_path) == []


def test_a_folder_appears_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If that step fails, there is none."""

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    def begin() -> None:
        with new_folder(tmp_path / "a") as staged:
            fill(staged)
            monkeypatch.setattr(Path, "rename", fails)

    with pytest.raises(InputError, match=r"cannot create .*a \(Input/output error\)"):
        begin()
    assert os.listdir(tmp_path) == []


def test_what_a_killed_start_has_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".a.new").mkdir()
    fill(tmp_path / ".a.new", "old")
    with new_folder(tmp_path / "a") as staged:
        assert not (staged / "run.json").exists()
        (staged / "config.yaml").touch()
    assert sorted(os.listdir(tmp_path / "a")) == [".lock", "config.yaml"]


def test_of_two_that_begin_the_same_run_one_is_refused(tmp_path: Path) -> None:
    def begin() -> None:
        with new_folder(tmp_path / "a") as staged:
            (staged / "run.json").write_text("second")
            (tmp_path / "a").mkdir()
            (tmp_path / "a" / "run.json").write_text("first")

    with pytest.raises(InputError, match="was created concurrently"):
        begin()
    assert (tmp_path / "a" / "run.json").read_text() == "first"
    assert os.listdir(tmp_path) == ["a"]


def test_a_new_version_takes_the_place_of_the_old(tmp_path: Path) -> None:
    place = tmp_path / "model"
    for version in ("first", "second"):
        staged = staged_beside(place)
        fill(staged, version)
        put_in_place(staged, place)
        assert (place / "below" / "file").read_text() == version
        assert os.listdir(tmp_path) == ["model"]
    (place / "only in the old one").touch()
    (tmp_path / ".model.old").mkdir()
    (tmp_path / ".model.new").mkdir()  # of a try that was killed
    fill(tmp_path / ".model.new", "half")
    staged = staged_beside(place)
    assert os.listdir(staged) == []
    put_in_place(staged, place)
    assert os.listdir(place) == []
    assert os.listdir(tmp_path) == ["model"]
