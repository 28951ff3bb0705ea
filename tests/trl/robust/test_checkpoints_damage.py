"""What disks, copies and people do to checkpoints: the previous good one is taken, and one sentence says why.

A bit that flipped, a file cut short or gone, a manifest that is garbage, folders that are none: whichever file it is.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints_cases import cli_cases, contents, go_on, start

from troll.errors import InputError
from troll.lab.cli import main
from troll.lab.runs import Run
from troll.trl.robust.store import last_good, recover, verify

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("made") / "run"
    start(folder, max_steps=4, save_steps=2).train()
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def flip(path: Path) -> None:
    """One random bit."""
    data = bytearray(path.read_bytes())
    place = random.Random(path.name).randrange(8 * len(data))
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


def cut(share: float) -> Damage:
    """All but the first so many of its bytes are gone, at least one of them."""

    def damage(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: min(len(data) - 1, int(share * len(data)))])

    return damage


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def zeros(path: Path) -> None:
    """As some file systems leave a file that was not synced."""
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES: dict[str, Damage] = {
    "flipped bit": flip,
    "nothing left": cut(0),
    "half of it": cut(0.5),
    "all but the last byte": cut(1),
    "a byte more": lengthen,
    "zeros": zeros,
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_happens_to_whichever_file_the_checkpoint_before_is_taken(folder: Path, damage: str) -> None:
    newest = folder / "checkpoint-4"
    names = sorted(path.name for path in newest.iterdir())
    assert {"model.safetensors", "optimizer.safetensors", "trainer_state.json", "manifest.json"} <= set(names)
    for name in names:
        kept = (newest / name).read_bytes()
        DAMAGES[damage](newest / name)
        found = last_good(folder)
        assert (found.path, found.step) == (folder / "checkpoint-2", 2), name
        (sentence,) = found.rejected
        assert "checkpoint-4" in sentence
        assert name in sentence
        assert "\n" not in sentence
        assert "checkpoint-2" not in sentence
        (newest / name).write_bytes(kept)
    assert last_good(folder).step == 4  # all mended


GARBAGE = {
    "no JSON": b"\x00\xff garbage",
    "not an object": b"[1, 2]",
    "empty object": b"{}",
    "files of another kind": b'{"format": 1, "step": 4, "files": 3, "digest": ""}',
    "too deep": b"[" * 100_000,
    "not text": b'\xff\xfe{"format": 1}',
    "null": b"null",
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_manifest_that_is_garbage_is_no_manifest(folder: Path, garbage: str) -> None:
    (folder / "checkpoint-4" / "manifest.json").write_bytes(GARBAGE[garbage])
    found = last_good(folder)
    assert found.step == 2
    assert len(found.rejected) == 1
    assert "manifest.json" in found.rejected[0]


def test_a_manifest_of_another_checkpoint_does_not_fit(folder: Path) -> None:
    shutil.copy(folder / "checkpoint-2" / "manifest.json", folder / "checkpoint-4" / "manifest.json")
    assert last_good(folder).step == 2
    (folder / "checkpoint-2").rename(folder / "checkpoint-7")  # all of it is whole, and it is not of this step
    found = last_good(folder)
    assert found.path is None
    assert len(found.rejected) == 2


def test_a_manifest_that_was_edited_does_not_count(folder: Path) -> None:
    """A file and its checksum changed together: not by a disk."""
    path = folder / "checkpoint-4" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"]["optimizer.safetensors"]
    path.write_text(json.dumps(manifest))
    assert last_good(folder).step == 2


def test_what_is_no_checkpoint_is_passed_over(folder: Path) -> None:
    (folder / "checkpoint-99").mkdir()
    (folder / "checkpoint-100").write_text("a file")
    (folder / "checkpoint-").mkdir()
    (folder / "checkpoint-12-old").mkdir()
    (folder / "checkpoint-98").symlink_to(folder / "nowhere")
    found = last_good(folder)
    assert found.path == folder / "checkpoint-4"
    assert len(found.rejected) == 1
    assert "checkpoint-99" in found.rejected[0]
    assert "manifest.json" in found.rejected[0]


def test_what_a_crash_left_in_staging_is_no_checkpoint_unless_it_is_whole(folder: Path) -> None:
    staged = folder / ".staging" / "checkpoint-6"
    shutil.copytree(folder / "checkpoint-4", staged)
    (staged / "manifest.json").unlink()
    assert last_good(folder).step == 4
    assert recover(folder).path == folder / "checkpoint-4"
    newest = folder / "checkpoint-4"
    newest.rename(folder / ".staging" / "checkpoint-4")  # killed between the manifest and the rename
    found = recover(folder)
    assert found.path == newest
    assert verify(newest) is None


def test_a_checkpoint_whose_files_cannot_be_read_is_passed_over(folder: Path) -> None:
    path = folder / "checkpoint-4" / "model.safetensors"
    path.unlink()
    path.mkdir()  # root may read everything, and nobody reads a folder
    found = last_good(folder)
    assert found.step == 2
    assert "model.safetensors" in found.rejected[0]


def test_with_no_good_one_left_there_is_none_and_each_is_named(folder: Path) -> None:
    flip(folder / "checkpoint-4" / "optimizer.safetensors")
    cut(0.5)(folder / "checkpoint-2" / "model.safetensors")
    found = last_good(folder)
    assert found.path is None
    assert ["checkpoint-4" in found.rejected[0], "checkpoint-2" in found.rejected[1]] == [True, True]
    with pytest.raises(InputError, match="has no complete checkpoint"):
        go_on(folder, True, max_steps=4, save_steps=2)


def test_the_trainer_goes_on_from_the_last_good_one(folder: Path, made: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(folder / "checkpoint-4" / "optimizer.safetensors")
    run = go_on(folder, True, max_steps=4, save_steps=2)
    assert run.state.global_step == 4
    assert contents(folder / "checkpoint-4") == contents(made / "checkpoint-4")
    assert verify(folder / "checkpoint-4") is None
    assert [r for r in caplog.messages if "checkpoint-4" in r and "optimizer.safetensors" in r]


def test_a_damaged_one_that_is_asked_for_is_refused(folder: Path) -> None:
    flip(folder / "checkpoint-4" / "troll_rollout_00000.safetensors")
    with pytest.raises(InputError, match=r"troll_rollout_00000.*checkpoint-2"):
        go_on(folder, folder / "checkpoint-4", max_steps=4, save_steps=2)


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ``troll train`` that failed at update 7 of 8, with checkpoints 3 and 6."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAIL_AT", "4")
        flags = cli_cases.flags(
            root, "--save_steps", "3", "--eval_steps", "7", "--run_name", "run", reward="fails_later"
        )
        assert main(flags) == 2
    assert (root / "run" / "checkpoint-6").exists()
    return root


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    more = ("--save_steps", "3", "--eval_steps", "7")
    return cli_cases.train(tmp_path_factory.mktemp("straight"), *more, reward="fails_later")


@pytest.mark.parametrize(
    ("name", "damage"),
    [("optimizer.safetensors", "flipped bit"), ("model.safetensors", "half of it"), ("trainer_state.json", "missing")],
)
def test_troll_train_resumes_from_the_last_good_one_and_says_so(
    broken_off: Path, straight: Run, name: str, damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(broken_off, tmp_path, dirs_exist_ok=True)
    DAMAGES[damage](tmp_path / "run" / "checkpoint-6" / name)
    assert main(["train", "--resume", "run", "--runs_dir", str(tmp_path)]) == 0
    out, err = capfd.readouterr()
    said = [line for line in (out + err).splitlines() if "checkpoint-6" in line]
    assert len(said) == 1
    assert name in said[0]
    run = Run.open(tmp_path / "run")
    assert cli_cases.same_weights(run, straight)
    assert [cli_cases.timeless(x) for x in run.metrics()] == [cli_cases.timeless(x) for x in straight.metrics()]
