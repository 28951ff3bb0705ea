"""Two processes never write the same run, and one that dies takes its lock with it."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from troll.errors import InputError
from troll.trl.robust import store
from troll.trl.robust.store import holder, is_locked, locked

HOLDS = """\
import fcntl, os, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
{then}
"""
"""Another process that has the lock, without the seconds that it takes to import troll."""


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(then: str = "time.sleep(600)") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDS.format(then=then), str(tmp_path / store.LOCK)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_run_that_another_process_writes_is_refused(tmp_path: Path, another: Callable[..., Any]) -> None:
    another()
    assert is_locked(tmp_path)
    with (
        pytest.raises(InputError, match=rf"the run {tmp_path} is in use: another process is writing"),
        locked(tmp_path),
    ):
        pytest.fail("it was entered")
    signed = {"pid": 1234, "host": "a", "since": "2026-11-15T09:30:00+00:00"}
    (tmp_path / store.HOLDER).write_text(json.dumps(signed))
    said = rf"the comparison {tmp_path} is in use: process 1234 on a has been writing since 2026-11-15T09:30:00\+00:00"
    with pytest.raises(InputError, match=said), locked(tmp_path, "the comparison"):
        pytest.fail("it was entered")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_dies_takes_its_lock_with_it(number: int, tmp_path: Path, another: Callable[..., Any]) -> None:
    process = another()
    process.send_signal(number)
    process.wait()
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert is_locked(tmp_path)


def test_one_process_may_take_it_twice_by_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a trainer does inside a command; the inner one does not release what the outer one holds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with locked(tmp_path / "a"):
        for name in ("a", "./a", "b"):
            with locked(name):
                assert holder(tmp_path / "a")["pid"] == os.getpid()
            assert is_locked("a")
            assert holder(tmp_path / "a")["pid"] == os.getpid()
    assert not is_locked("a")
    assert sorted(os.listdir("a")) == [store.LOCK]


def test_it_is_released_after_an_error_and_when_the_folder_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    with pytest.raises(RuntimeError), locked(folder):
        raise RuntimeError
    assert not is_locked(folder)
    with locked(folder):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    folder.mkdir()
    with locked(folder):
        assert is_locked(folder)


def test_asking_leaves_nothing_behind_and_does_not_lock(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    assert not is_locked(tmp_path / "nowhere")
    assert os.listdir(tmp_path) == []
    with locked(tmp_path):
        pass
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        pass


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_does_not_keep_the_lock_of_its_parent(tmp_path: Path) -> None:
    """As workers that read data are forked, and live on for a while when the run is killed."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        with locked(tmp_path):
            worker = os.fork()
            if worker == 0:
                signal.pause()
                os._exit(0)
            os.write(write, f"{worker}\n".encode())
            signal.pause()
        os._exit(0)
    with os.fdopen(read) as lines:
        worker = int(lines.readline())
    os.close(write)
    try:
        assert is_locked(tmp_path)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert not is_locked(tmp_path)
    finally:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_where_nothing_can_be_written(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", fails)
    sentence = rf"the run {tmp_path} cannot be written \({re.escape(os.strerror(number))}\)"
    with pytest.raises(InputError, match=sentence), locked(tmp_path):
        pytest.fail("it was entered")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_where_files_cannot_be_locked(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with locked(tmp_path):
        pass
    monkeypatch.setattr("fcntl.flock", fails)
    reason = re.escape(os.strerror(number))
    sentence = rf"the run {tmp_path} is on a file system without file locks \({reason}\).*TROLL_NO_LOCKS=1"
    with pytest.raises(InputError, match=sentence), locked(tmp_path):
        pytest.fail("it was entered")
    assert not is_locked(tmp_path)
    monkeypatch.setenv(store.WITHOUT, "1")
    entered = False
    with locked(tmp_path):
        entered = True
    assert entered


def test_where_it_cannot_be_tried_the_signature_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / store.LOCK).touch()
    monkeypatch.setattr(FileLock, "acquire", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "no")))
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    host = store.socket.gethostname()
    for signed, expected in [
        ({"pid": os.getpid(), "host": host}, True),
        ({"pid": done.pid, "host": host}, False),
        ({"pid": os.getpid(), "host": f"not-{host}"}, False),
        ({"pid": "x", "host": host}, False),
        ([], False),
    ]:
        (tmp_path / store.HOLDER).write_text(json.dumps(signed))
        assert is_locked(tmp_path) == expected, signed
    (tmp_path / store.HOLDER).write_text("{")
    assert not is_locked(tmp_path)
