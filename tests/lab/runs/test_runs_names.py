"""Names of runs lead nowhere but to a folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troll.errors import InputError
from troll.lab.runs import check_run_name, free_run_name
from troll.lab.runs.writer import run_name_of


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
