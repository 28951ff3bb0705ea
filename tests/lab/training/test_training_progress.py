"""A bar on a terminal, plain lines elsewhere, and nothing that a text could do to either."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from troll.lab.report.rules import RuleMonitor
from troll.lab.runs import Run, write_json
from troll.lab.runs.formatting import clock
from troll.lab.training.progress import ShowProgress, say, summary

METRICS = {
    "reward": 0.5,
    "troll/kl_before/mean": 0.0123,
    "troll/projected_fraction": 0.256,
    "tokens_per_second": 1234.5,
    "loss": 0.1,
}
ARGS = SimpleNamespace(updates_per_generation=4)


def shown(terminal: bool, updates: int = 8, main: bool = True, stop_at: int = 99) -> tuple[str, ShowProgress]:
    """What a run of some updates shows: rewards with the first update on each rollout."""
    file = io.StringIO()
    progress = ShowProgress(Console(force_terminal=terminal, file=file, width=120))
    state = SimpleNamespace(global_step=0, max_steps=updates, is_world_process_zero=main)
    control: Any = None
    progress.on_train_begin(ARGS, state, control)
    progress.on_log(ARGS, state, control, {"eval_reward": 0.125, "eval_loss": 0.0})
    for step in range(1, updates + 1):
        if step > stop_at:
            break
        state.global_step = step
        progress.on_step_end(ARGS, state, control)
        new = METRICS if step % 4 == 1 else {"loss": 0.1, "troll/kl_before/mean": step / 100, "reward": None}
        progress.on_log(ARGS, state, control, new)
    if stop_at > updates:
        progress.on_train_end(ARGS, state, control)
    return file.getvalue(), progress


def watched(folder: Path, terminal: bool, updates: int, main: bool = True, first: int = 0, stop_at: int = 99) -> str:
    """What a run of four updates on each rollout shows, in which two fifths of the tokens are projected throughout."""
    file = io.StringIO()
    progress = ShowProgress(Console(force_terminal=terminal, file=file, width=400), RuleMonitor(folder))
    state = SimpleNamespace(global_step=first, max_steps=updates, is_world_process_zero=main)
    control: Any = None
    progress.on_train_begin(ARGS, state, control)
    for step in range(first + 1, min(updates, stop_at) + 1):
        state.global_step = step
        logs = {"loss": 0.1, "troll/projected_fraction": 0.4} | ({"reward": step / 100} if step % 4 == 1 else {})
        progress.on_log(ARGS, state, control, logs)
    progress.on_log(ARGS, state, control, {"train_runtime": 3.0})
    progress.on_train_end(ARGS, state, control)
    return file.getvalue()


def folder_of_a_run(path: Path) -> Path:
    path.mkdir()
    settings = {"trust_region": "troll", "kl_bound": 0.05, "learning_rate": 2e-5, "updates_per_generation": 4}
    write_json(path / "run.json", {"format": 1, "name": "x", "status": "running", "settings": settings})
    return path


@pytest.mark.parametrize("terminal", [True, False])
def test_a_warning_is_one_line_when_it_first_applies(tmp_path: Path, terminal: bool) -> None:
    folder = folder_of_a_run(tmp_path / "x")
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", watched(folder, terminal, 24))
    assert said.count("Warning") == 1
    assert "Warning (since update 1): 40\xa0% of the tokens were projected, over 3 rollouts." in said
    assert "Try --kl_bound 0.2 (" in said
    if not terminal:  # it stands after the third rollout
        assert [line.split()[0] for line in said.splitlines()] == ["step"] * 3 + ["Warning"] + ["step"] * 3
    assert [x["said"] for x in Run(folder).warnings()] == [12]


def test_a_resumed_run_does_not_warn_again(tmp_path: Path) -> None:
    folder = folder_of_a_run(tmp_path / "x")
    assert "Warning" in watched(folder, False, 24, stop_at=12)
    assert "Warning" not in watched(folder, False, 24, first=12)
    assert "Warning" in watched(folder, False, 24, first=8)  # from a checkpoint before it was said


def test_no_warning_before_its_time_and_none_from_other_processes(tmp_path: Path) -> None:
    assert "Warning" not in watched(
        folder_of_a_run(tmp_path / "short"), False, 24, stop_at=11
    )  # inside the third rollout
    other = folder_of_a_run(tmp_path / "other")
    assert watched(other, False, 24, main=False) == ""
    assert not (other / "warnings.jsonl").exists()


def test_plain_lines_once_per_rollout() -> None:
    said, _ = shown(terminal=False)
    first, *rest = said.splitlines()
    assert first == "step 0: held-out reward 0.125"
    assert "\x1b" not in said
    assert [re.sub(r"\d+:\d\d left", "… left", line) for line in rest] == [
        "step 4/8  reward 0.500  KL 0.0400  projected 25.6%  1234 tokens/s  … left",
        "step 8/8  reward 0.500  KL 0.0800  projected 25.6%  1234 tokens/s  … left",
    ]


def test_the_last_update_is_shown_even_inside_a_rollout() -> None:
    assert [line.split()[1] for line in shown(terminal=False, updates=6)[0].splitlines()[1:]] == ["4/6", "6/6"]


def test_a_bar_on_a_terminal() -> None:
    said, progress = shown(terminal=True)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)
    for part in ("━", "8/8", "reward 0.500", "KL 0.0800", "projected 25.6%", "1234 tokens/s"):
        assert part in plain
    assert re.search(r"\d:\d\d|--:--", plain)  # the time left
    assert "step 0: held-out reward 0.125" in plain
    assert "step 4/8" not in plain
    assert progress.bar is None


def test_the_cursor_comes_back_when_a_run_fails() -> None:
    said, progress = shown(terminal=True, stop_at=3)
    assert said.count("\x1b[?25l") == 1
    progress.close()
    assert progress.console.file.getvalue().count("\x1b[?25h") == 1  # type: ignore[attr-defined]
    progress.close()  # twice does no harm


@pytest.mark.parametrize("terminal", [True, False])
def test_other_processes_show_nothing(terminal: bool) -> None:
    assert shown(terminal, main=False)[0] == ""


def test_of_what_is_known() -> None:
    assert summary({}) == ""
    assert summary({"reward": None, "loss": 1.0}) == ""
    clip = {"reward": 1.0, "clip_ratio/region_mean": 0.5, "troll/kl_before/mean": 0.1}
    assert summary(clip) == "reward 1.000  KL 0.1000  clipped 50.0%"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (75, "1:15"), (3599.7, "1:00:00"), (90061, "25:01:01")]
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_text_is_printed_as_it_is(terminal: bool) -> None:
    file = io.StringIO()
    console = Console(force_terminal=terminal, file=file, width=20)
    say(console, "[red]a[/] [/nothing] :smile: \x1b[31m\x07b\nc 123 'x' " + "long " * 10)
    assert file.getvalue().rstrip("\n") == "[red]a[/] [/nothing] :smile: [31m b c 123 'x' " + ("long " * 10).strip()
    assert file.getvalue().count("\n") == 1
