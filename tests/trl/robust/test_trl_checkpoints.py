"""What the trainer adds to a checkpoint, how it goes on from one, and what it says when it cannot."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import tiny_models
import torch
from safetensors import SafetensorError
from transformers import TrainerCallback
from trl_cases import furthest, lower_case, prompts, stock_trainer, trainer, weights

from troll.errors import InputError
from troll.trl.robust import checkpoints as module
from troll.trl.robust.store import MANIFEST, STAGING, checkpoints, last_good, verify


def run(folder: Path, steps: int = 4, saved: int = 2, **changes: Any) -> Any:
    """Four updates on one rollout, saved after the second and the last."""
    return trainer(folder, **{"max_steps": steps, "save_strategy": "steps", "save_steps": saved, **changes})


def logs(trained: Any) -> list[dict[str, Any]]:
    """What was logged, less what depends on the clock."""
    clock = ("step_time", "runtime", "per_second")
    return [{k: v for k, v in x.items() if not any(c in k for c in clock)} for x in trained.state.log_history]


def pieces(checkpoint: Path) -> set[str]:
    return {x.name for x in checkpoint.iterdir()}


def test_no_file_of_a_checkpoint_that_is_read_again_is_a_pickle(tmp_path: Path) -> None:
    run(tmp_path).train()
    names = pieces(tmp_path / "checkpoint-2")
    assert {x for x in names if not x.endswith((".json", ".safetensors", ".md", ".jinja"))} == {"training_args.bin"}
    assert {"optimizer.safetensors", "troll_process_00000.safetensors", "troll_rollout_00000.safetensors"} < names
    (tmp_path / "checkpoint-2" / "training_args.bin").write_bytes(b"never read")  # transformers writes it for people
    (tmp_path / "checkpoint-2" / MANIFEST).unlink()
    run(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize(
    "changes",
    [
        {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5, "beta": 0.5},
        {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.05, "entropy_target": 10.0},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"optim": "adafactor"},
        {"logging_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True},
    ],
    ids=["a reference that follows", "an entropy bonus that adapts", "a schedule", "another optimizer", "rare logs"],
)
def test_whatever_moves_during_a_run_goes_on_moving(tmp_path: Path, changes: dict[str, Any]) -> None:
    if "eval_steps" in changes:
        changes = {**changes, "eval_dataset": prompts(8)}
    if "sync_ref_model" in changes:  # TRL reads the reference from where the model comes from
        tiny_models.save("dense", tmp_path / "model")
        changes = {**changes, "model": str(tmp_path / "model")}
    straight = run(tmp_path / "a", steps=6, **changes)
    straight.train()
    run(tmp_path / "b", steps=6, callbacks=[StopAfter(2)], **changes).train()
    resumed = run(tmp_path / "b", steps=6, **changes)
    resumed.train(resume_from_checkpoint=True)
    assert furthest(weights(straight), weights(resumed)) == 0
    assert logs(straight) == logs(resumed)


class StopAfter(TrainerCallback):
    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.updates


def test_the_table_of_completions_is_the_same(tmp_path: Path) -> None:
    changes = {"log_completions": True, "num_completions_to_print": 0}
    run(tmp_path / "a", **changes).train()
    run(tmp_path / "b", callbacks=[StopAfter(2)], **changes).train()
    run(tmp_path / "b", **changes).train(resume_from_checkpoint=True)
    a, b = (pd.read_parquet(tmp_path / x / "completions" / "completions_00003.parquet") for x in "ab")
    assert len(a) == 32
    pd.testing.assert_frame_equal(a, b)


def test_a_run_that_has_made_all_its_updates_makes_no_more(tmp_path: Path) -> None:
    """transformers alone makes a fifth one."""
    first = run(tmp_path)
    first.train()
    random = torch.get_rng_state()
    again = run(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
    assert furthest(weights(first), weights(again)) == 0
    assert logs(first) == logs(again)[: len(logs(first))]
    assert torch.equal(torch.get_rng_state(), random)  # an evaluation that comes now draws what it would have drawn
    stock = stock_trainer(tmp_path / "stock", save_strategy="steps")
    stock.train()
    stock.train(resume_from_checkpoint=True)
    assert stock.state.global_step == 5


def test_the_first_evaluation_is_not_made_twice(tmp_path: Path) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 100, "eval_on_start": True, "eval_dataset": prompts(8)}
    run(tmp_path, callbacks=[StopAfter(2)], **changes).train()
    again = run(tmp_path, **changes)
    again.train(resume_from_checkpoint=True)
    assert [x["step"] for x in again.state.log_history if "eval_loss" in x] == [0, 4]
    assert again.args.eval_on_start


def test_the_best_checkpoint_is_named_by_its_place_and_stays(tmp_path: Path) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": prompts(8), "save_total_limit": 2}
    trained = run(tmp_path, saved=1, load_best_model_at_end=True, metric_for_best_model="reward", **changes)
    trained.train()
    best = Path(trained.state.best_model_checkpoint)
    assert best.parent == tmp_path
    assert verify(best) is None
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(best)


def test_old_ones_go_when_a_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.commit
    monkeypatch.setattr(module, "commit", lambda *x: (seen.append(list(checkpoints(tmp_path))), real(*x))[1])
    seen: list[list[int]] = []
    run(tmp_path, saved=1, save_total_limit=1).train()
    assert seen == [[], [1], [2], [3]]
    assert list(checkpoints(tmp_path)) == [4]


def test_what_the_guards_have_seen_goes_on(tmp_path: Path) -> None:
    first = run(tmp_path, callbacks=[StopAfter(2)])
    first.guards.halvings, first.guards.skipped_updates = 1, 2
    first.train()
    again = run(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert (again.guards.halvings, again.guards.skipped_updates) == (1, 2)


# ---------------------------------------------------------------------- which checkpoint


def test_one_that_a_crash_left_staged_and_whole_is_taken(tmp_path: Path) -> None:
    straight = run(tmp_path)
    straight.train()
    (tmp_path / STAGING).mkdir()
    (tmp_path / "checkpoint-4").rename(tmp_path / STAGING / "checkpoint-4")
    again = run(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
    assert furthest(weights(straight), weights(again)) == 0
    assert last_good(tmp_path).path == tmp_path / "checkpoint-4"


def test_the_newest_that_is_whole_is_taken_and_the_others_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straight = run(tmp_path)
    straight.train()
    damage(tmp_path / "checkpoint-4" / "model.safetensors")
    (tmp_path / "checkpoint-99").mkdir()
    again = run(tmp_path)
    with caplog.at_level(logging.WARNING, "troll"):
        again.train(resume_from_checkpoint=True)
    said = [x.getMessage() for x in caplog.records if x.name.startswith("troll")]
    assert "checkpoint-99 is skipped: it has no manifest.json" in said[0]
    assert "checkpoint-4 is skipped: model.safetensors is damaged" in said[1]
    assert len(said) == 2
    assert furthest(weights(straight), weights(again)) == 0
    assert verify(tmp_path / "checkpoint-4") is None  # made again


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_one_that_is_named_is_refused(tmp_path: Path) -> None:
    run(tmp_path).train()
    damage(tmp_path / "checkpoint-4" / "optimizer.safetensors")
    with pytest.raises(InputError, match=r"optimizer\.safetensors is damaged.*Use .*checkpoint-2, which is complete"):
        run(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_without_a_checkpoint_nothing_is_resumed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no complete checkpoint"):
        run(tmp_path).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_trl_is_gone_on_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stock_trainer(tmp_path, save_strategy="steps", save_steps=4).train()
    assert "optimizer.pt" in pieces(tmp_path / "checkpoint-4")
    again = run(tmp_path, steps=6)
    with caplog.at_level(logging.WARNING, "troll"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.state.global_step == 6
    assert again.optimizer.state_dict()["state"][0]["step"] == 6
    assert "used unchecked" in caplog.text


def test_changed_settings_are_refused_with_the_difference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path).train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    with pytest.raises(InputError, match=r"learning_rate: 0.01 → 0.02.*allow_changes"):
        run(tmp_path, learning_rate=0.02).train(resume_from_checkpoint=True)
    with caplog.at_level(logging.WARNING, "troll"):
        again = run(tmp_path, learning_rate=0.02, allow_changes=True)
        again.train(resume_from_checkpoint=True)
    assert "Resuming with a change: learning_rate: 0.01 → 0.02" in caplog.text
    assert [x["learning_rate"] for x in logs(again) if "learning_rate" in x] == [0.01, 0.01, 0.02, 0.02]


def test_a_changed_reward_and_changed_data_are_refused(tmp_path: Path) -> None:
    run(tmp_path).train()

    def other(completions: list[str], **_: Any) -> list[float]:
        return lower_case(completions)

    other.__name__ = "lower_case"
    with pytest.raises(InputError, match=r"rewards\.lower_case"):
        run(tmp_path, reward_funcs=other).train(resume_from_checkpoint=True)
    with pytest.raises(InputError, match=r"data\.train\.rows: 64 → 63"):
        run(tmp_path, train_dataset=prompts(63)).train(resume_from_checkpoint=True)


# ---------------------------------------------------------------------- when it cannot be written


FAILURES: dict[str, Callable[[], Exception]] = {
    "full": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "read-only": lambda: OSError(errno.EROFS, "Read-only file system"),
    "safetensors": lambda: SafetensorError("I/O error: No space left on device (os error 28)"),
    "tokenizers": lambda: Exception("No space left on device (os error 28)"),
    "torch": lambda: RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),
}


@pytest.mark.parametrize(
    ("place", "kind"), [*(("save_state", kind) for kind in FAILURES), ("stage", "read-only"), ("commit", "full")]
)
def test_a_save_that_fails_stops_the_run_and_names_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, place: str
) -> None:
    trained = run(tmp_path)
    real = getattr(module, place)

    def fail(*args: Any) -> Any:
        if trained.state.global_step == 4:
            raise FAILURES[kind]()
        return real(*args)

    monkeypatch.setattr(module, place, fail)
    with pytest.raises(InputError) as caught:
        trained.train()
    assert "The checkpoint of update 4 cannot be written" in caught.value.problem
    assert ("unexpected pos" if kind == "torch" else "Read-only" if kind == "read-only" else "No space") in str(
        caught.value
    )
    assert "checkpoint-2, the last complete checkpoint" in caught.value.fix
    assert last_good(tmp_path).step == 2
    assert not (tmp_path / STAGING).exists()
    monkeypatch.undo()
    run(tmp_path).train(resume_from_checkpoint=True)


def test_other_errors_are_not_taken_for_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a device error")

    monkeypatch.setattr(module, "save_state", fail)
    with pytest.raises(RuntimeError, match="a device error"):
        run(tmp_path).train()


def test_free_space_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = run(tmp_path)
    parameters = sum(x.nbytes for x in trained.model.parameters())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * parameters - 1))
    monkeypatch.setattr(module, "save_state", lambda *_: pytest.fail("written all the same"))
    with pytest.raises(InputError, match=r"\d+ MiB needed, \d+ MiB free.*there is no earlier one"):
        trained.train()


def test_an_older_one_that_cannot_be_deleted_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "rotate", lambda root, *_: [root / "checkpoint-2"])
    with caplog.at_level(logging.WARNING, "troll"):
        run(tmp_path, save_total_limit=1).train()
    assert "checkpoint-2 could not be deleted" in caplog.text
    assert list(checkpoints(tmp_path)) == [2, 4]


def test_two_do_not_write_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is of the process; here the second one finds it taken by another."""
    from filelock import FileLock

    other = FileLock(tmp_path / ".lock")
    with other, pytest.raises(InputError, match="in use"):
        run(tmp_path).train()
    run(tmp_path).train()
