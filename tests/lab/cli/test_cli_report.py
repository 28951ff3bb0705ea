"""``troll report``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from troll.errors import InputError
from troll.lab.cli import check_command, main


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """One run of two updates."""
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    settings = {"trust_region": "troll", "kl_bound": 0.05}
    about = {"format": 1, "name": "one", "status": "finished", "seconds": 3.0, "arm": "troll", "settings": settings}
    (folder / "run.json").write_text(json.dumps(about))
    lines = [{"step": 1, "reward": 0.25, "loss": 0.1}, {"step": 2, "reward": 0.75, "loss": 0.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "runs"


def test_by_name_and_by_folder_in_a_process_of_its_own(runs):
    for words in (["one", "--runs_dir", "runs"], [str(runs / "one")]):
        command = [sys.executable, "-m", "troll", "report", *words, "--figures", "false"]
        done = subprocess.run(command, cwd=runs.parent, capture_output=True, text=True, encoding="utf-8")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("Report: ")
        page = runs.parent / done.stdout.removeprefix("Report: ").strip()
        assert page.samefile(runs / "one" / "report.html")
        assert "0.750" in page.read_text()
        page.unlink()
    assert not (runs / "one" / "figures").exists()


def test_figures_and_where_they_go(runs, tmp_path, capsys):
    page = tmp_path / "elsewhere" / "my.html"
    assert main(["report", str(runs / "one"), "--output", str(page), "--formats", "pdf"]) == 0
    assert capsys.readouterr().out == f"Report: {page}\nFigures: {page.parent / 'figures'}\n"
    assert {file.suffix for file in (page.parent / "figures").iterdir()} == {".pdf"}
    assert not (runs / "one" / "report.html").exists()
    assert main(["report", str(runs / "one"), "--figures"]) == 0
    assert {file.suffix for file in (runs / "one" / "figures").iterdir()} == {".svg", ".png"}


@pytest.mark.parametrize(
    ("words", "said", "by_flags"),
    [
        (["two"], "It has: one.", False),
        (["nowhere/two"], "no run or comparison 'nowhere/two'", False),
        (["../one"], "no run or comparison '../one'", False),
        (["a b"], "the run name 'a b'", False),
        ([], "troll report needs RUN. See troll report --help.", True),
        (["one", "--formats", "gif"], "--formats must be svg, png or pdf, got 'gif'", True),
        (["one", "--figures", "perhaps"], "must be true or false", True),
        (["one", "--output", "report.pdf"], "does not end in .html", True),
        (["one", "--dpi", "3"], "--dpi", True),
        (["one", "two"], "two", True),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(words, said, by_flags, runs, capsys):
    command = ["report", *words, "--runs_dir", str(runs)]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    if by_flags:
        with pytest.raises(InputError):
            check_command(command)
    else:
        check_command(command)  # runs nothing and looks for nothing


def test_an_output_that_cannot_be_written(runs, capsys):
    assert main(["report", str(runs / "one"), "--output", str(runs / "one" / "run.json" / "x.html")]) == 2
    assert "x.html" in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["report", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "troll report arithmetic-troll --formats pdf" in out
    assert "(default: runs)" in out
