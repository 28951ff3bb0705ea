"""What a run was made with and on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

import troll
from troll.lab.training import settings as facts


def git(folder: Path, *command: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", *identity, *command], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_git(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert facts.git_state(tmp_path) is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "one")
    state = facts.git_state(tmp_path)
    assert state == {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "a").write_text("2")
    assert facts.git_state(tmp_path) == {**state, "dirty": True}


def test_outside_of_a_repository_or_without_git(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert facts.git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.git_state() is None


def test_versions() -> None:
    found = facts.versions()
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["troll"] == troll.__version__
    assert {"python", "trl", "transformers"} < found.keys()
    assert all(isinstance(version, str) for version in found.values())


def test_machine() -> None:
    found = facts.machine()
    assert found.keys() == {"platform", "processor", "cores", "memory_gb", "gpu", "gpus"}
    assert found["cores"] >= 1
    assert 0.1 < found["memory_gb"] < 1e5
    assert found["processor"].strip()
    assert (found["gpu"] is None) == (found["gpus"] == 0)
