"""A save that fails or dies anywhere leaves the last good checkpoint, and says one sentence.

The disk fails at every single call that creates, writes, syncs, renames or deletes while a checkpoint is saved: once
with an error, once with the death of the process.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from checkpoints_cases import contents, start
from faults import Died, Disk, failing

from troll.errors import InputError
from troll.trl.robust.store import checkpoints, last_good, recover, verify

NEW = 6  # 2 and 4 are there, and 2 makes room


@dataclass
class Saving:
    """A trainer that is about to save its third checkpoint, of which two are kept."""

    run: Any
    folder: Path
    before: Path
    """A copy of the folder as it is before."""
    whole: dict[int, dict[str, str]]
    """What each of the three checkpoints holds if nothing happens."""

    def save(self) -> None:
        self.run.state.global_step = NEW
        self.run._save_checkpoint(self.run.model, trial=None)

    def again(self) -> None:
        """As it was before."""
        shutil.rmtree(self.folder)
        shutil.copytree(self.before, self.folder)

    def good(self) -> int:
        """The step of the last good checkpoint, which must hold what it should."""
        found = last_good(self.folder)
        assert found.path is not None
        assert verify(found.path) is None
        assert contents(found.path) == self.whole[found.step]
        return found.step

    def mended(self) -> None:
        """After whatever happened, the run goes on: the next save leaves the two newest and nothing else."""
        recover(self.folder)
        # most of the time goes into the model card, which is no part of a checkpoint
        with patch.object(self.run, "create_model_card"), failing(Disk(self.folder)):
            self.save()
        assert list(checkpoints(self.folder)) == [4, NEW]
        assert self.good() == NEW
        assert not list(self.folder.glob(".staging*")) + list(self.folder.glob(".deleted*"))


@pytest.fixture(scope="module")
def saving(tmp_path_factory: pytest.TempPathFactory) -> Saving:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run = start(folder, max_steps=4, save_steps=2, save_total_limit=2)
    run.train()
    before = folder.with_name("before")
    shutil.copytree(folder, before)
    made = Saving(run, folder, before, {})
    with failing(Disk(folder)):
        made.save()
    for path in (before / "checkpoint-4", folder / f"checkpoint-{NEW}"):
        made.whole[int(path.name.partition("-")[2])] = contents(path)
    made.mended()
    return made


@pytest.fixture(scope="module")
def calls(saving: Saving) -> list[str]:
    """What a save asks of the disk, call by call."""
    saving.again()
    disk = Disk(saving.folder)
    with failing(disk):
        saving.save()
    return disk.calls


def test_every_kind_of_call_is_met(calls: list[str]) -> None:
    assert {call.split()[0] for call in calls} >= {"mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir"}
    written = {call.split()[1] for call in calls if call.startswith("write ")}
    assert {"model.safetensors", "optimizer.safetensors", "trainer_state.json", ".manifest.json"} <= {
        name if not name.startswith(".manifest.json") else ".manifest.json" for name in written
    }
    assert len(calls) > 40


def test_a_save_that_fails_anywhere_leaves_the_last_good_one_and_says_so(saving: Saving, calls: list[str]) -> None:
    harmless = []
    for at in range(1, len(calls) + 1):
        saving.again()
        disk = Disk(saving.folder, at, (errno.ENOSPC, errno.EIO)[at % 2])
        try:
            with failing(disk):
                saving.save()
        except InputError as error:
            sentence = str(error)
            assert f"The checkpoint of update {NEW} cannot be written" in sentence, disk.calls[at - 1 :]
            assert str(saving.folder) in sentence
            assert "\n" not in sentence
            assert f"checkpoint-{saving.good()}" in sentence
        except Exception as error:
            raise AssertionError(f"no clear sentence after {disk.calls[at - 1]}") from error
        else:
            harmless.append(disk.calls[at - 1])
            assert saving.good() == NEW, disk.calls[at - 1]
        saving.mended()
    # what fails when the new one is in its place costs nothing: it is only about old ones
    assert all(call.split()[0] in ("unlink", "rmdir", "mkdir", "rename", "open", "fsync") for call in harmless), (
        harmless
    )


def test_a_process_that_dies_anywhere_leaves_the_last_good_one(saving: Saving, calls: list[str]) -> None:
    steps = []
    for at in range(1, len(calls) + 1):
        saving.again()
        disk = Disk(saving.folder, at, None)
        with failing(disk), suppress(Died):  # it may be a thread that dies
            saving.save()
        assert len(disk.calls) == at
        steps.append(saving.good())
        saving.mended()
    assert steps == sorted(steps)  # the old one, until from one call on it is the new one
    assert set(steps) == {4, NEW}


def test_an_old_one_is_not_deleted_before_the_new_one_was_read_again(saving: Saving, monkeypatch: Any) -> None:
    import troll.trl.robust.store as store

    seen = []
    real: Callable[[Path], str | None] = store.verify

    def verified(checkpoint: Path) -> str | None:
        seen.append(sorted(checkpoints(saving.folder)))
        return real(checkpoint)

    saving.again()
    monkeypatch.setattr(store, "verify", verified)
    with failing(Disk(saving.folder)):
        saving.save()
    assert [2, 4, NEW] in seen
    assert sorted(checkpoints(saving.folder)) == [4, NEW]


def test_what_was_written_and_reads_back_differently_is_not_saved(saving: Saving, monkeypatch: Any) -> None:
    import troll.trl.robust.store as store

    saving.again()
    monkeypatch.setattr(store, "verify", lambda checkpoint: "optimizer.safetensors is damaged")
    with pytest.raises(InputError, match=r"optimizer\.safetensors is damaged"):
        saving.save()
    monkeypatch.undo()
    assert {2, 4} <= checkpoints(saving.folder).keys()
    saving.again()


@pytest.fixture(autouse=True)
def _as_it_was(saving: Saving) -> Iterator[None]:
    yield
    saving.again()
