"""A run of ``troll train`` that is killed, fails or meets a full disk is, in the end, the run nothing happened to.

A short version of ``tests/torture/survive.py``, which has the long one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_disk
import system_calls
import tortured

SCRIPT = Path(tortured.__file__).with_name("survive.py")
KILLS, EVERY, KIB = 10, 45, 256
NO_STRACE, NO_MOUNT = system_calls.missing(), small_disk.missing()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("torture")
    command = [sys.executable, str(SCRIPT), "--kills", str(KILLS), "--seed", "8", "--scratch", str(folder)]
    command += [] if NO_STRACE else ["--calls", str(EVERY)]
    command += [] if NO_MOUNT else ["--disk", str(KIB)]
    command += ["--results", str(folder / "results.json")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert (folder / "results.json").exists(), done.stderr
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def wrong(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [trial for trial in trials if trial["wrong"]]


@pytest.mark.slow
def test_killed_at_any_time_a_run_goes_on_and_loses_at_most_the_updates_since_its_last_save(
    results: dict[str, Any],
) -> None:
    assert wrong(results["killed"]) == []
    kills = [kill for trial in results["killed"] for kill in trial["kills"]]
    assert len(kills) >= KILLS
    lost = [kill["seen"] - kill["went on from"] for kill in kills if "went on from" in kill]
    assert max(lost) <= tortured.SAVE
    assert max(kill["seen"] for kill in kills) > tortured.SAVE  # some of them had come far enough to lose more


@pytest.mark.slow
@pytest.mark.skipif(NO_STRACE is not None, reason=str(NO_STRACE))
def test_whichever_call_fails_or_is_the_last_the_run_goes_on(results: dict[str, Any]) -> None:
    assert wrong(results["synced"]) == []
    assert wrong(results["failed calls"]) == []
    met = [trial for trial in results["failed calls"] if trial["met"]]
    assert len(met) >= len(results["failed calls"]) / 2  # threads take turns: the n-th call may be another one, or none
    assert {trial["exit code"] for trial in met if trial["error"] is None} == {-9}
    assert {trial["exit code"] for trial in met if trial["error"]} <= {0, 2}


@pytest.mark.slow
@pytest.mark.skipif(NO_MOUNT is not None, reason=str(NO_MOUNT))
def test_on_a_full_disk_a_run_stops_with_a_sentence_and_goes_on_when_there_is_room(results: dict[str, Any]) -> None:
    assert wrong(results["full disk"]) == []
    *full, enough = results["full disk"]
    assert enough["exit code"] == 0
    assert len(full) >= 2
    assert all(trial["exit code"] == 2 for trial in full)
    assert all("checkpoint-21" in trial["said"] for trial in full[1:])


@pytest.mark.slow
@pytest.mark.skipif(NO_MOUNT is not None, reason=str(NO_MOUNT))
def test_in_a_read_only_folder_a_run_stops_with_a_sentence_and_goes_on_when_it_can_be_written(
    results: dict[str, Any],
) -> None:
    (trial,) = results["read-only disk"]
    assert trial["wrong"] == []
    assert trial["exit code"] == 2
    assert "ead-only" in trial["said"]
