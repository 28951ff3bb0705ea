"""A checkpoint is there whole or not at all, and one that is damaged is skipped with a sentence."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from troll.files import checksum, sync_folder, write_atomic
from troll.trl.robust.store import (
    DELETED,
    MANIFEST,
    STAGING,
    Found,
    Seals,
    checkpoints,
    commit,
    last_good,
    recover,
    rotate,
    size,
    stage,
    verify,
)


def write(folder: Path, step: int, text: str = "weights") -> Path:
    """A staged checkpoint of three files, one of them in a folder."""
    staged = stage(folder, step)
    (staged / "model.safetensors").write_text(f"{text} of {step}" * 100)
    (staged / "state.json").write_text("{}")
    (staged / "shards").mkdir()
    (staged / "shards" / "0.bin").write_bytes(bytes(range(256)))
    return staged


def make(folder: Path, *steps: int) -> Path:
    for step in steps:
        commit(write(folder, step))
    return folder


def test_a_committed_checkpoint_is_in_its_place_and_as_it_was_written(tmp_path: Path) -> None:
    path = commit(write(tmp_path, 12))
    assert path == tmp_path / "checkpoint-12"
    assert (path / "model.safetensors").read_text() == "weights of 12" * 100
    assert verify(path) is None
    assert last_good(tmp_path) == Found(path, 12, [])
    assert not (tmp_path / STAGING).exists()
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["step"] == 12
    assert manifest["files"].keys() == {"model.safetensors", "state.json", "shards/0.bin"}
    assert manifest["files"]["shards/0.bin"] == {"bytes": 256, "xxh3_128": checksum(path / "shards" / "0.bin")}
    assert size(path) == 1300 + 2 + 256 + (path / MANIFEST).stat().st_size


def test_checksums_are_xxh3(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    assert checksum(tmp_path / "a") == "99aa06d3014798d86001c324468d497f"  # as xxh128sum says


def test_nothing_is_a_checkpoint_before_it_is_committed(tmp_path: Path) -> None:
    write(tmp_path, 12)
    assert checkpoints(tmp_path) == {}
    assert last_good(tmp_path) == Found(None, 0, [])


FILES = ["model.safetensors", "state.json", "shards/0.bin", MANIFEST]


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    good, bad = make(tmp_path, 8, 12) / "checkpoint-8", tmp_path / "checkpoint-12"
    data = (bad / name).read_bytes()
    places = range(0, len(data) * 8, 9) if name == MANIFEST else (0, 13, len(data) * 8 - 1)  # each byte, another bit
    for bit in places:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (bad / name).write_bytes(flipped)
        found = last_good(tmp_path)
        if name == MANIFEST and found.path == bad:  # white space between words is all that may change
            assert json.loads(flipped) == json.loads(data)
            continue
        assert found.path == good
        (said,) = found.rejected
        assert said.startswith("checkpoint-12 is skipped: ")
        if name == MANIFEST:
            assert MANIFEST in said
        else:
            assert f"{Path(name).name} is damaged" in said


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("length", [0, 1, -1])
def test_a_truncated_file_is_named(tmp_path: Path, name: str, length: int) -> None:
    bad = make(tmp_path, 8, 12) / "checkpoint-12"
    data = (bad / name).read_bytes()
    (bad / name).write_bytes(data[:length])
    found = last_good(tmp_path)
    assert found.path == tmp_path / "checkpoint-8"
    assert found.step == 8
    (said,) = found.rejected
    left = len(data[:length])
    assert f"its {MANIFEST} is damaged" in said if name == MANIFEST else f"has {left} of its {len(data)} bytes" in said


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    bad = make(tmp_path, 8, 12) / "checkpoint-12"
    (bad / name).unlink()
    found = last_good(tmp_path)
    assert found.path == tmp_path / "checkpoint-8"
    assert f"has no {MANIFEST}" in found.rejected[0] if name == MANIFEST else "is missing" in found.rejected[0]


@pytest.mark.parametrize(
    "text", ["[]", "null", "{}", '{"format": 1}', '{"digest": "0", "format": 2}', "\xff", "[" * 9000]
)
def test_a_manifest_of_anything_is_no_manifest(tmp_path: Path, text: str) -> None:
    bad = make(tmp_path, 8, 12) / "checkpoint-12"
    (bad / MANIFEST).write_text(text, encoding="latin-1")
    found = last_good(tmp_path)
    assert found.path == tmp_path / "checkpoint-8"
    assert MANIFEST in found.rejected[0]


def test_a_checkpoint_under_another_name_is_not_that_step(tmp_path: Path) -> None:
    make(tmp_path, 8)
    shutil.copytree(tmp_path / "checkpoint-8", tmp_path / "checkpoint-99")
    found = last_good(tmp_path)
    assert found.step == 8
    assert len(found.rejected) == 1


def test_empty_folders_and_other_names_are_passed_over(tmp_path: Path) -> None:
    make(tmp_path, 8)
    for name in ("checkpoint-99", "checkpoint-", "checkpoint-12.old", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-100").write_text("a file")
    found = last_good(tmp_path)
    assert found.step == 8
    assert found.rejected == [f"checkpoint-99 is skipped: {verify(tmp_path / 'checkpoint-99')}"]


def test_of_a_folder_that_does_not_exist_nothing_is_found(tmp_path: Path) -> None:
    assert last_good(tmp_path / "nowhere") == Found(None, 0, [])


# ---------------------------------------------------------------------- what a crash leaves


def test_a_staged_one_with_its_manifest_is_whole_and_is_brought_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 8)
    staged = write(tmp_path, 12)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="no more"):
            commit(staged)
    assert last_good(tmp_path) == Found(staged, 12, [])
    assert recover(tmp_path) == Found(tmp_path / "checkpoint-12", 12, [])
    assert verify(tmp_path / "checkpoint-12") is None
    assert not (tmp_path / STAGING).exists()


def fail(*_: object) -> None:
    raise OSError(5, "no more")


def test_a_crash_between_the_two_renames_of_a_replacement_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 12)
    staged = write(tmp_path, 12, "newer weights")
    rename, calls = Path.rename, []

    def once(self: Path, target: Path) -> Path:
        calls.append(target)
        return rename(self, target) if len(calls) == 1 else fail()  # type: ignore[return-value]

    monkeypatch.setattr(Path, "rename", once)
    with pytest.raises(OSError, match="no more"):
        commit(staged)
    monkeypatch.undo()
    assert not (tmp_path / "checkpoint-12").exists()
    assert recover(tmp_path).path == tmp_path / "checkpoint-12"
    assert (tmp_path / "checkpoint-12" / "model.safetensors").read_text().startswith("newer")


def test_a_staged_one_without_its_manifest_is_removed_by_the_next(tmp_path: Path) -> None:
    make(tmp_path, 8)
    write(tmp_path, 12)
    assert last_good(tmp_path).step == 8
    assert recover(tmp_path).step == 8
    stage(tmp_path, 16)
    assert [x.name for x in (tmp_path / STAGING).iterdir()] == ["checkpoint-16"]


def test_a_new_one_takes_the_place_of_an_older_one_of_the_same_step(tmp_path: Path) -> None:
    make(tmp_path, 12)
    commit(write(tmp_path, 12, "newer weights"))
    assert (tmp_path / "checkpoint-12" / "model.safetensors").read_text().startswith("newer")
    assert list(checkpoints(tmp_path)) == [12]


def test_what_differs_when_read_back_is_an_error_and_older_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 8)
    staged = write(tmp_path, 12)
    monkeypatch.setattr("troll.trl.robust.store.verify", lambda path: "model.safetensors is damaged")
    with pytest.raises(OSError, match=r"differs when read back: model\.safetensors"):
        commit(staged)
    assert list(checkpoints(tmp_path)) == [8, 12]


def test_every_file_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd))[1])
    monkeypatch.setattr(Path, "rename", lambda a, b: (synced.append(f"rename {a.name}"), rename(a, b))[1])
    commit(write(tmp_path, 12))
    at = synced.index("rename checkpoint-12")
    staged = tmp_path / STAGING / "checkpoint-12"
    for name in ("model.safetensors", "state.json", "shards/0.bin", "shards", ""):
        assert str(staged / name).rstrip("/") in synced[:at], name
    assert any(MANIFEST in name for name in synced[:at])
    assert synced[at + 1 :] == [str(tmp_path)]


def test_a_file_that_is_written_to_after_it_was_sealed_is_sealed_again(tmp_path: Path) -> None:
    staged = write(tmp_path, 12)
    seals = Seals(staged)
    seals.begin()
    first = seals._begun[staged / "state.json"].result()
    (staged / "state.json").write_text('{"best": 12}')
    (staged / "later.json").write_text("[]")
    path = commit(staged, seals)
    entries = json.loads((path / MANIFEST).read_text())["files"]
    assert entries["state.json"] == {"bytes": 12, "xxh3_128": checksum(path / "state.json")} != first.entry
    assert entries["later.json"]["bytes"] == 2
    assert verify(path) is None


def test_a_sync_that_fails_in_the_background_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may report it once only: whoever syncs again is told that all is well."""
    staged = write(tmp_path, 12)
    seals = Seals(staged)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        seals.begin()
        assert all(isinstance(x.exception(), OSError) for x in seals._begun.values())
    with pytest.raises(OSError, match="no more"):
        commit(staged, seals)
    assert last_good(tmp_path).path is None


# ---------------------------------------------------------------------- which are kept


@pytest.mark.parametrize(
    ("there", "newest", "keep", "protected", "left"),
    [
        ([4, 8, 12], 12, None, None, [4, 8, 12]),
        ([4, 8, 12], 12, 0, None, [4, 8, 12]),
        ([4, 8, 12], 12, 2, None, [8, 12]),
        ([4, 8, 12], 12, 1, None, [12]),
        ([4, 8, 12], 12, 5, None, [4, 8, 12]),
        ([4, 8, 12], 12, 1, 4, [4, 12]),
        ([4, 8, 12], 12, 2, 4, [4, 12]),
        ([4, 8, 12], 12, 2, 12, [8, 12]),
        ([4, 8, 12, 16], 14, 2, None, None),
        ([8, 100], 8, 1, None, [8]),
    ],
)
def test_the_oldest_go_and_the_newest_stays(
    tmp_path: Path, there: list[int], newest: int, keep: int | None, protected: int | None, left: list[int] | None
) -> None:
    make(tmp_path, *there)
    if left is None:  # resumed from 12, interrupted at 14, while the 16 of before is still there
        make(tmp_path, newest)
        left = [12, 14]
    best = None if protected is None else tmp_path / f"checkpoint-{protected}"
    assert rotate(tmp_path, tmp_path / f"checkpoint-{newest}", keep, best) == []
    assert list(checkpoints(tmp_path)) == left
    assert all(verify(path) is None for path in checkpoints(tmp_path).values())
    wait_for_the_background()
    assert {x.name for x in tmp_path.iterdir()} == {f"checkpoint-{step}" for step in left}


def wait_for_the_background() -> None:
    for thread in threading.enumerate():
        if thread.name == "delete checkpoints":
            thread.join()


def test_one_that_cannot_be_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 4, 8)
    monkeypatch.setattr(Path, "rename", fail)
    assert rotate(tmp_path, tmp_path / "checkpoint-8", 1) == [tmp_path / "checkpoint-4"]


def test_one_that_is_half_deleted_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a crash that the background did not survive."""
    make(tmp_path, 4, 8)
    monkeypatch.setattr(shutil, "rmtree", lambda *_: None)
    rotate(tmp_path, tmp_path / "checkpoint-8", 1)
    wait_for_the_background()
    monkeypatch.undo()
    (half,) = (tmp_path / DELETED).iterdir()
    (half / "model.safetensors").unlink()
    assert list(checkpoints(tmp_path)) == [8]
    assert last_good(tmp_path) == Found(tmp_path / "checkpoint-8", 8, [])
    stage(tmp_path, 12)
    assert {x.name for x in tmp_path.iterdir()} == {"checkpoint-8", STAGING}


# ---------------------------------------------------------------------- single files


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_atomic(path, b"old")
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, fail)
            if name == "replace":
                patched.setattr(Path, "replace", fail)
            with pytest.raises(OSError, match="no more"):
                write_atomic(path, b"new")
        assert path.read_bytes() == b"old"
        assert [x.name for x in tmp_path.iterdir()] == ["run.json"]
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_folder_that_has_nothing_to_sync_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> None:
        raise OSError(number, "as some network disks do")

    monkeypatch.setattr(os, "fsync", lambda fd: refuse(22))
    sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda fd: refuse(5))
    with pytest.raises(OSError, match="network"):
        sync_folder(tmp_path)
