"""The parts of a run that the command line does not reach, or not alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models

from troll.errors import InputError
from troll.lab.runs import Run, append_line, write_json
from troll.lab.training import run


def plan(folder: Path, **changes: Any) -> Any:
    return SimpleNamespace(**{"folder": folder, "resumes": False, **changes})


def begun(folder: Path, metrics: int = 0, seconds: float = 0.0) -> Path:
    folder.mkdir()
    write_json(folder / "run.json", {"format": 1, "status": "running", "seconds": seconds})
    for step in range(1, metrics + 1):
        append_line(folder / "metrics.jsonl", {"step": step, "seconds": 2.0 * step, "loss": 0.0})
    return folder


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
    assert Run(folder).about["status"] == "running"  # as it was: nothing has begun


def test_a_full_disk_does_not_hide_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    folder = begun(tmp_path / "a", metrics=1)
    monkeypatch.setattr("troll.lab.runs.writer.write_json", full)
    with pytest.raises(RuntimeError, match="why"), run._status(plan(folder), main=True):
        raise RuntimeError("why")


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
    folder = begun(tmp_path / "a")
    before = (folder / "run.json").read_bytes()
    args = SimpleNamespace(seed=0, to_dict=lambda: {"trust_region": "none"})
    named = {"task": SimpleNamespace(name="t", description="d"), "model": "m", "command": "", "config": {}}
    with pytest.raises(InputError, match="was created concurrently"):
        run.create(plan(folder, args=args, **named))
    assert (folder / "run.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(("own", "expected"), [(2, [2, 17]), ([2, 3], [2, 3, 17]), (None, [17])])
def test_a_completion_ends_at_a_token_besides_its_own(own: Any, expected: list[int]) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=own))
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [17])
    args: Any = SimpleNamespace(use_vllm=True, generation_kwargs={"top_p": 0.5})
    run._end_at("\n", model, tokenizer, args)
    assert model.generation_config.eos_token_id == expected
    assert args.generation_kwargs == {"top_p": 0.5, "stop_token_ids": [17]}


def test_a_stop_of_several_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="must be one token of the model but is 2"):
        run._end_at("\n\n", None, tiny_models.tokenizer(), None)  # type: ignore[arg-type]
