"""The fingerprint of a run does not depend on place or time, and changes with the run."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from PIL import Image
from trl_cases import lower_case, prompts, text_of, trainer

from troll.errors import InputError
from troll.lab.tasks import find_reward
from troll.trl.robust import fingerprint as module
from troll.trl.robust.fingerprint import (
    _data,
    _hash,
    code_hash,
    differences,
    fingerprint,
    stored_fingerprint,
    translate_settings,
)
from troll.trl.trust_region import canonical_schedule

REWARD = "def reward(completions, **columns):\n    return [0.0] * len(completions)\n"


def of(folder: Path, **changes: Any) -> dict[str, Any]:
    return fingerprint(trainer(folder, **changes))


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return of(tmp_path_factory.mktemp("a"))


def test_the_same_run_is_the_same_elsewhere(
    usual: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another folder, in another working directory, with other threads, after it was written down and read."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        again = of(Path("b"), logging_steps=3, save_strategy="steps", save_steps=7, dataloader_num_workers=0)
    finally:
        torch.set_num_threads(threads)
    assert again == usual
    assert differences(json.loads(json.dumps(usual)), again) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learning_rate": 3e-2}, ["learning_rate: 0.01 → 0.03"]),
        ({"kl_bound": float("inf")}, ["kl_bound: 0.05 → inf"]),
        ({"train_dataset": prompts(63)}, ["data.train.rows: 64 → 63"]),
        ({"eval_dataset": prompts(4)}, ["data.held_out.rows", "data.held_out.columns", "data.held_out.first_rows"]),
        ({"train_dataset": Dataset.from_dict({"prompt": ["x"] + ["say"] * 63})}, ["data.train.first_rows"]),
        ({"reward_funcs": [lower_case, lambda completions, **_: [0.0] * len(completions)]}, ["rewards.<lambda>"]),
        ({"max_steps": 9}, []),
    ],
)
def test_another_run_is_another(
    changes: dict[str, Any], said: list[str], usual: dict[str, Any], tmp_path: Path
) -> None:
    found = differences(usual, of(tmp_path, **changes))
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True)), found


def test_training_does_not_change_it(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=1, eval_dataset=prompts(8))
    before = fingerprint(run)
    run.train()
    assert fingerprint(run) == before


def test_what_decides_is_in_it(usual: dict[str, Any]) -> None:
    assert usual["versions"].keys() >= {"python", "torch", "transformers", "trl", "troll"}
    assert "code" not in usual
    assert usual["model"]["parameters"] == usual["model"]["trained"] > 0
    assert list(usual["rewards"]) == ["lower_case"]
    assert usual["processes"] == 1
    assert not {"output_dir", "hub_token", "push_to_hub_token", "save_steps"} & usual["settings"].keys()


def test_a_reward_of_this_package_is_known_by_its_name_not_by_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an edit of troll does not block a resume."""
    file = tmp_path / "troll" / "rewards.py"
    file.parent.mkdir()
    file.write_text(REWARD)
    reward = find_reward(f"{file}:reward")
    elsewhere = code_hash(reward)
    monkeypatch.setattr(module.troll, "__file__", str(file.parent / "__init__.py"))
    assert code_hash(reward) == "troll:reward" != elsewhere


def test_settings_of_0_1_0_are_translated() -> None:
    old = {"bound": "fixed", "bound_curve": "geometric", "regression_tolerance": None, "reward_errors": "mask"}
    assert translate_settings(old) == {
        "kl_bound_schedule": None,
        "regression_coef_schedule": None,
        "on_invalid_reward": "mask",
    }
    kinds = {
        "geometric end=0.01 rollouts=50": {"bound": "schedule", "bound_end": 0.01, "bound_rollouts": 50},
        "linear end=0.01 rollouts=5": {
            "bound": "schedule",
            "bound_end": 0.01,
            "bound_rollouts": 5,
            "bound_curve": "linear",
        },
        "network target=0.1": {"bound": "network", "bound_target": 0.1},
        "entropy": {"bound": "entropy", "bound_highest": None},
        "entropy max=0.5": {"bound": "entropy", "bound_highest": 0.5},
        "sequence limit=2.0": {"bound": "sequence", "sequence_kl_bound": 2.0, "sequence_by_prefix": False},
        "sequence limit=2.0 by_prefix=true": {
            "bound": "sequence",
            "sequence_kl_bound": 2.0,
            "sequence_by_prefix": True,
        },
    }
    for line, fields in kinds.items():
        assert translate_settings(fields) == {"kl_bound_schedule": line}
        assert canonical_schedule("kl_bound_schedule", line) == line
    assert translate_settings({"held_out_size": 8, "seed": 1}) == {"eval_size": 8, "seed": 1}
    present = {"kl_bound_schedule": "network target=0.1", "kl_bound": 0.1}
    assert translate_settings(present) == present


def test_a_checkpoint_of_0_1_0_is_compared_without_its_source_files(usual: dict[str, Any]) -> None:
    identity = {**usual, "code": {"trainer.py": "1234"}}
    assert differences(stored_fingerprint({"identity": identity}, usual), usual) == []
    other = {**identity, "processes": 2}
    assert differences(stored_fingerprint({"identity": other}, usual), usual) == ["processes: 2 → 1"]
    assert stored_fingerprint({"fingerprint": usual}, {}) == usual
    for about in ({}, {"identity": None}, {"identity": {"settings": None}}):
        with pytest.raises(InputError, match="no fingerprint that this version of troll can read"):
            stored_fingerprint(about, usual)


def test_a_reward_is_known_by_its_file(tmp_path: Path) -> None:
    """What it calls may stand beside it."""
    hashes = []
    for folder, text in (("a", REWARD), ("b", REWARD), ("c", REWARD + "OTHER = 1\n")):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "rewards.py"
        file.write_text(text)
        hashes.append(code_hash(find_reward(f"{file}:reward")))
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_reward_in_the_script_that_trains_is_known_by_itself(tmp_path: Path) -> None:
    """The script may change around it."""
    for name, more in (("a", ""), ("b", "learning_rate = 1\n"), ("c", "")):
        reward = REWARD if name != "c" else REWARD.replace("0.0", "1.0")
        code = f"{more}{reward}\nfrom troll.trl.robust.fingerprint import code_hash\nprint(code_hash(reward))\n"
        (tmp_path / f"{name}.py").write_text(code)
    code = "import runpy, sys; [runpy.run_path(x, run_name='__main__') for x in sys.argv[1:]]"
    files = [str(tmp_path / f"{name}.py") for name in "abc"]
    done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, check=True)
    hashes = done.stdout.split()
    assert hashes[0] == hashes[1] != hashes[2]


class Judge:
    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        return [float(len(text_of(x))) for x in completions]


def test_any_callable_has_something_to_be_known_by() -> None:
    here = _hash(Path(__file__).read_bytes())
    assert code_hash(Judge()) == here
    assert code_hash(functools.partial(lower_case, weight=1)) == code_hash(lower_case) != here
    assert code_hash(len) == "len"


def test_data_of_every_kind() -> None:
    """Images are not hashed: what they print depends on where they lie in memory; a stream is not read."""
    image = Dataset.from_dict({"prompt": ["a"], "image": [Image.new("RGB", (2, 2))]})
    assert _data(image) == _data(image)
    assert _data(image)["columns"] == ["prompt", "image"]

    def rows() -> Any:
        raise AssertionError("it was read")
        yield

    assert _data(IterableDataset.from_generator(rows)) == {"columns": None}
    assert _data({"a": prompts(2), "b": prompts(3)})["b"]["rows"] == 3
    assert _data(None) is None
    calls = iter(range(100))
    noisy = prompts(4).with_transform(lambda batch: {"prompt": [str(next(calls)) for _ in batch["prompt"]]})
    assert _data(noisy) == _data(prompts(4))
