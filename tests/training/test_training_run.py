"""The parts of a run that the command line does not reach, or not alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models

from troll.errors import InputError
from troll.runs import Run, append_line, write_json
from troll.training import run


def plan(folder: Path, **changes: Any) -> Any:
    return SimpleNamespace(**{"folder": folder, "resumes": False, **changes})


def begun(folder: Path, metrics: int = 0, seconds: float = 0.0) -> Path:
    folder.mkdir()
    write_json(folder / "run.json", {"format": 1, "status": "running", "seconds": seconds})
    for step in range(1, metrics + 1):
        append_line(folder / "metrics.jsonl", {"step": step, "seconds": 2.0 * step, "loss": 0.0})
    return folder


def test_the_newest_checkpoint(tmp_path: Path) -> None:
    folder = begun(tmp_path / "a")
    for number in (2, 10, 9):
        (folder / f"checkpoint-{number}").mkdir()
        (folder / f"checkpoint-{number}" / "trainer_state.json").touch()
    assert Path(run.checkpoint_of(folder)).name == "checkpoint-10"
    (folder / "checkpoint-11").mkdir()  # the run was killed while it wrote this one
    (folder / "checkpoint-11" / "model.safetensors").touch()
    assert Path(run.checkpoint_of(folder)).name == "checkpoint-10"
    unfinished = begun(tmp_path / "d")
    (unfinished / "checkpoint-1").mkdir()
    for nothing in (begun(tmp_path / "b"), tmp_path / "c", unfinished):
        with pytest.raises(InputError, match="a run with a checkpoint"):
            run.checkpoint_of(nothing)


@pytest.mark.parametrize(("error", "status"), [(RuntimeError("why"), "failed"), (KeyboardInterrupt(), "interrupted")])
def test_how_a_run_ended_badly_is_written_down(error: BaseException, status: str, tmp_path: Path) -> None:
    folder = begun(tmp_path / "a", metrics=3)
    with pytest.raises(type(error)), run._status(plan(folder), main=True):
        raise error
    about = Run(folder).about
    assert (about["status"], about["error"], about["seconds"]) == (status, str(error), 6.0)
    assert about["finished"].endswith("+00:00")


def test_a_run_that_fails_before_an_update_leaves_nothing_unless_it_was_resumed(tmp_path: Path) -> None:
    for resumes, left in ((False, False), (True, True)):
        folder = begun(tmp_path / f"{resumes}")
        append_line(folder / "metrics.jsonl", {"step": 0, "seconds": 1.0, "eval_reward": 0.5})
        with pytest.raises(RuntimeError), run._status(plan(folder, resumes=resumes), main=True):
            raise RuntimeError
        assert folder.exists() == left


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    folder = begun(tmp_path / "a", metrics=1)
    with pytest.raises(RuntimeError), run._status(plan(folder), main=False):
        raise RuntimeError
    assert Run(folder).about["status"] == "running"


def test_the_seconds_of_a_run_that_was_killed(tmp_path: Path) -> None:
    assert run._seconds(begun(tmp_path / "a", metrics=4)) == 8.0
    assert run._seconds(begun(tmp_path / "b", metrics=4, seconds=11.0)) == 11.0
    assert run._seconds(begun(tmp_path / "c")) == 0.0


def test_a_folder_that_appears_in_the_meantime(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="which another one has just begun"):
        run.begin(plan(begun(tmp_path / "a")))


@pytest.mark.parametrize(("own", "expected"), [(2, [2, 17]), ([2, 3], [2, 3, 17]), (None, [17])])
def test_a_completion_ends_at_a_token_besides_its_own(own: Any, expected: list[int]) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=own))
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [17])
    args: Any = SimpleNamespace(use_vllm=True, generation_kwargs={"top_p": 0.5})
    run._end_at("\n", model, tokenizer, args)
    assert model.generation_config.eos_token_id == expected
    assert args.generation_kwargs == {"top_p": 0.5, "stop_token_ids": [17]}


def test_a_stop_of_several_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="which is 2 tokens of this model"):
        run._end_at("\n\n", None, tiny_models.tokenizer(), None)  # type: ignore[arg-type]
