"""Which command is run, and what becomes of what it raises."""

from __future__ import annotations

import errno
import importlib
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

import troll
from troll.errors import InputError
from troll.lab.cli import check_command, main
from troll.lab.cli.main import COMMANDS


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    for name, what in COMMANDS.items():
        assert f"  {name:9}{what}\n" in out
    assert max(map(len, out.splitlines())) <= 120


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"troll {troll.__version__}\n"


def test_the_program_and_the_module_are_the_same() -> None:
    """And neither loads a trainer to say what its version is."""
    code = "import sys; sys.argv = ['troll', '--version']; from troll.lab.cli import main; main(); "
    code += "print('trl' in sys.modules)"
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert alone.stdout == f"troll {troll.__version__}\nFalse\n"
    module = subprocess.run([sys.executable, "-m", "troll", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == f"troll {troll.__version__}\n"


@pytest.mark.parametrize("command", ["trian", "", "--kl_bound", "../x"])
def test_an_unknown_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    err = capsys.readouterr().err
    fix = "Did you mean `troll train`?" if command == "trian" else f"The commands are {', '.join(COMMANDS)}."
    assert err == f"troll: There is no command {command!r}. {fix}\n"
    if command != "":
        with pytest.raises(InputError):
            check_command([command])


def raising(error: BaseException) -> Any:
    """A command that raises."""

    def run(argv: Sequence[str]) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("a", "b"), 2, "troll: a. b.\n"),
        (InputError("a\n\x1b]0;t\x07b\r", "\u202eb\x00c"), 2, "troll: a ]0;t b . b c.\n"),
        (
            ModuleNotFoundError("no", name="rich"),
            2,
            "troll: the package rich is missing. Run: pip install 'troll-rl[train]'\n",
        ),
        (KeyboardInterrupt(), 130, "troll: stopped\n"),
        (BrokenPipeError(), 0, ""),
    ],
)  # fmt: skip
def test_what_becomes_of_errors(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("troll.lab.cli.main"), "_function", lambda *_: raising(error))
    assert main(["train"]) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("error", [ModuleNotFoundError("no", name="troll.missing"), RuntimeError("a bug")])
def test_a_bug_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("troll.lab.cli.main"), "_function", lambda *_: raising(error))
    with pytest.raises(type(error)):
        main(["train"])


def test_a_terminal_without_the_characters_gets_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    error, out = io.TextIOWrapper(io.BytesIO(), encoding="ascii"), io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", error)
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["größe"]) == 2
    assert main(["--help"]) == 0
    error.flush()
    assert error.buffer.getvalue().startswith(b"troll: There is no command 'gr??e'")  # type: ignore[attr-defined]


def test_check_command_runs_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_command(["train", "--kl_bound", "0.1", "--task_options", "digits=2"])
    check_command(["--version"])
    check_command(["train", "--help"])
    for wrong in (["--kl_bund"], ["--kl_bound", "-1"], ["--task_options", "digits"]):
        with pytest.raises(InputError):
            check_command(["train", *wrong])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_is_one_sentence(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: object) -> int:
        raise OSError(number, os.strerror(number), "runs/x/metrics.jsonl")

    monkeypatch.setattr("troll.lab.cli.runs.run", fail)
    assert main(["runs"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"troll: cannot read or write runs/x/metrics.jsonl: {os.strerror(number)}. ")
    assert said.count("\n") == 1


def test_other_errors_of_the_system_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: object) -> int:
        raise OSError(errno.ECONNREFUSED, "refused")

    monkeypatch.setattr("troll.lab.cli.runs.run", fail)
    with pytest.raises(OSError, match="refused"):
        main(["runs"])
