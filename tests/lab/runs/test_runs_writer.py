"""Names of runs, and folders that are created atomically."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troll.errors import InputError
from troll.lab.runs import check_run_name, free_run_name, writer
from troll.lab.runs.writer import new_folder, put_in_place, run_name_of, staged_beside
from troll.trl.robust.store import is_locked


@pytest.mark.parametrize("name", ["a", "arithmetic-troll-2", "lr=1e-3_seed+1.b", "9", "x" * 100])
def test_plain_names(name: str) -> None:
    assert check_run_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "a\\b", "/x", ".hidden", "-flag", "a..b", "a b", "a\n", "é", "x" * 101, "a\0", "~"],
)  # fmt: skip
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="the run name"):
        check_run_name(name)


def test_the_first_free_name(tmp_path: Path) -> None:
    assert free_run_name(tmp_path / "none", "a") == "a"
    for expected in ("a", "a-2", "a-3"):
        name = free_run_name(tmp_path, "a")
        assert name == expected
        (tmp_path / name).mkdir()
    (tmp_path / "b").write_text("a file is in the way as well")
    assert free_run_name(tmp_path, "b") == "b-2"
    with pytest.raises(InputError):
        free_run_name(tmp_path, "../a")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gym:gcd-troll", "gym-gcd-troll"),
        ("my task-clip", "my-task-clip"),
        ("../up-troll", "up-troll"),
        ("_private", "private"),
        ("a...b", "a-b"),
        ("漢", "run"),
        ("x" * 200, "x" * 80),
    ],
)
def test_the_name_of_a_run_that_was_given_none(text: str, name: str) -> None:
    assert run_name_of(text) == name


@given(st.text())
def test_any_text_makes_a_name(text: str) -> None:
    assert check_run_name(run_name_of(text))


# ---------------------------------------------------------------------- folders


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
