"""What a run is known by: the same for the same run, wherever and whenever it is made; another for another."""

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

from troll.trl.robust import fingerprint as module
from troll.trl.robust.changes import differences
from troll.trl.robust.fingerprint import _code, _data, _hash, identity, sources

REWARD = "def reward(completions, **columns):\n    return [0.0] * len(completions)\n"


def of(folder: Path, **changes: Any) -> dict[str, Any]:
    return identity(trainer(folder, **changes))


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
    before = identity(run)
    run.train()
    assert identity(run) == before


def test_what_decides_is_in_it(usual: dict[str, Any]) -> None:
    assert usual["versions"].keys() >= {"python", "torch", "transformers", "trl", "troll"}
    assert {"trainer.py", "identity.py"} <= {Path(name).name for name in usual["code"]}
    assert not [name for name in usual["code"] if name.startswith(("cli/", "report/", "attacks/", "adapters/verl/"))]
    assert usual["model"]["parameters"] == usual["model"]["trained"] > 0
    assert list(usual["rewards"]) == ["lower_case"]
    assert usual["processes"] == 1
    assert not {"output_dir", "hub_token", "push_to_hub_token", "save_steps"} & usual["settings"].keys()


def test_the_code_is_known_by_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hashes(root: Path) -> dict[str, str]:
        sources.cache_clear()
        monkeypatch.setattr(module.troll, "__file__", str(root / "__init__.py"))
        return dict(sources())

    for name in ("a", "b"):
        (tmp_path / name / "policy").mkdir(parents=True)
        (tmp_path / name / "cli").mkdir()
        for file in ("__init__.py", "policy/head.py", "cli/main.py", "policy/notes.txt"):
            (tmp_path / name / file).write_text(file)
    first = hashes(tmp_path / "a")
    assert first.keys() == {"__init__.py", "policy/head.py"}
    assert hashes(tmp_path / "b") == first  # the same sources in another place
    (tmp_path / "b" / "policy" / "head.py").write_text("other")
    assert [x.partition(":")[0] for x in differences(first, hashes(tmp_path / "b"))] == ["policy/head.py"]
    monkeypatch.undo()
    sources.cache_clear()


def test_a_reward_is_known_by_its_file(tmp_path: Path) -> None:
    """What it calls may stand beside it."""
    from troll.lab.tasks.load import find_reward
    from troll.lab.tasks.rewards import watched

    hashes = []
    for folder, text in (("a", REWARD), ("b", REWARD), ("c", REWARD + "OTHER = 1\n")):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "rewards.py"
        file.write_text(text)
        hashes.append(_code(watched(find_reward(f"{file}:reward"))))
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_reward_in_the_script_that_trains_is_known_by_itself(tmp_path: Path) -> None:
    """The script may change around it."""
    for name, more in (("a", ""), ("b", "learning_rate = 1\n"), ("c", "")):
        reward = REWARD if name != "c" else REWARD.replace("0.0", "1.0")
        code = f"{more}{reward}\nfrom troll.trl.robust.fingerprint import _code\nprint(_code(reward))\n"
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
    assert _code(Judge()) == here
    assert _code(functools.partial(lower_case, weight=1)) == _code(lower_case) != here
    assert _code(len) == "len"


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
