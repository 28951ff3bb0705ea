"""Interrupted = uninterrupted, bit for bit: after every update of a run with eight updates on each rollout.

One run saves after every update. From each of its checkpoints another one goes on, in a new trainer, and must end with
the same checkpoint: weights, optimiser, schedule, random numbers, rollout, log.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints_cases import ROLLOUT, UPDATES, SaveOnlyLast, StopAfter, contents, go_on, prompts, start

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all at once": {  # metrics that wait for the next log, two batches per update, evaluations, an epoch per rollout
        "logging_steps": 3,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "train_dataset": prompts(18),  # of which a rollout takes 16, others in each epoch
        "eval_dataset": prompts(4),
    },
}


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_is_new() -> Iterator[None]:
    """Training begins with a collection of garbage, most of whose time goes into the modules that are imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run that was never interrupted, with a checkpoint of every update."""

    @cache
    def made(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        start(folder, **RUNS[kind], save_steps=1).train()
        assert len(list(folder.glob("checkpoint-*"))) == UPDATES
        return folder

    return made


def last(folder: Path) -> dict[str, str]:
    return contents(folder / f"checkpoint-{UPDATES}")


@pytest.mark.parametrize("after", range(1, UPDATES))
@pytest.mark.parametrize("kind", RUNS)
def test_after_any_update_a_resumed_run_ends_as_the_run_that_never_stopped(
    kind: str, after: int, tmp_path: Path, whole: Callable[[str], Path]
) -> None:
    folder = whole(kind)
    go_on(tmp_path, folder / f"checkpoint-{after}", **RUNS[kind], callbacks=[SaveOnlyLast()])
    assert last(tmp_path) == last(folder)


@pytest.mark.parametrize(("first", "second"), [(2, 5), (5, 12), (ROLLOUT, ROLLOUT + 1)])
def test_a_run_that_is_interrupted_twice_ends_as_the_run_that_never_stopped(
    first: int, second: int, tmp_path: Path, whole: Callable[[str], Path]
) -> None:
    kind = "all at once"
    folder = whole(kind)
    middle = go_on(
        tmp_path, folder / f"checkpoint-{first}", **RUNS[kind], callbacks=[SaveOnlyLast(), StopAfter(second)]
    )
    assert middle.state.global_step == second
    go_on(tmp_path, tmp_path / f"checkpoint-{second}", **RUNS[kind], callbacks=[SaveOnlyLast()])
    assert last(tmp_path) == last(folder)


def test_what_is_compared_can_differ(tmp_path: Path, whole: Callable[[str], Path]) -> None:
    """Every file that training changes differs between one update and the next."""
    before, after = (contents(whole("plain") / f"checkpoint-{update}") for update in (3, 4))
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        *("model.safetensors", "optimizer.safetensors", "trainer_state.json"),
        *("troll_process_00000.safetensors", "troll_rollout_00000.safetensors"),
    }
