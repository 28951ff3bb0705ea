"""A run that is interrupted in the middle of a rollout and resumed is the run that never stopped, bit for bit."""

from __future__ import annotations

import itertools
import json
import logging
import math
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from huggingface_hub import HfApi
from peft import LoraConfig
from PIL import Image
from safetensors import safe_open
from transformers import TrainerCallback
from trl_cases import furthest, logged, prompts, trainer, weights

from troll.policy import PackedPolicy, SparsePolicy
from troll.trl.passes import OLD_POLICY
from troll.trl.robust import state
from troll.trl.robust.store import MANIFEST

# peft warns when it saves an adapter of a model that has no name on the hub; ours is made on the spot.
pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning")


class StopAfter(TrainerCallback):
    """Ends the training after so many updates, as a lost machine would, with a checkpoint in hand."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.updates:
            control.should_save = True
            control.should_training_stop = True


class CountRollouts:
    """A reward that knows after which updates it was called: once per rollout."""

    __name__ = "lower_case"

    def __init__(self) -> None:
        self.at: list[int] = []

    def __call__(self, completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        self.at.append(trainer_state.global_step)
        return [sum(c.islower() for c in completion) / 8 for completion in completions]


def pictures(n: int = 64) -> Dataset:
    """Conversations with one image or two, of any size, so that every sample has its own number of them."""
    sizes = [(28, 28), (56, 28), (28, 56), (56, 56)]
    images = [
        [Image.new("RGB", sizes[(i + j) % 4], (37 * i % 256, 90, 5 * j)) for j in range(1 + i % 2)] for i in range(n)
    ]
    return Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": f"say {i}"}] for i in range(n)], "images": images}
    )


def start(folder: Path, **changes: Any) -> Any:
    """Eight updates, four on each rollout."""
    kind = changes.pop("kind", "dense")
    if kind == "vision":
        changes["train_dataset"] = pictures()
    if changes.pop("stream", False):
        changes["train_dataset"] = prompts().to_iterable_dataset(num_shards=1)
    if changes.pop("lora", False):
        # B is not zero at the start, so that the adapter's policy and the reference are two from the first update on.
        changes["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return trainer(folder, kind, **{"max_steps": 8, "save_strategy": "steps", "save_steps": 100, **changes})


def interrupt(folder: Path, after: int, **changes: Any) -> Path:
    """Train up to a checkpoint and stop."""
    run = start(folder, callbacks=[StopAfter(after)], **changes)
    run.train()
    assert run.state.global_step == after
    return folder / f"checkpoint-{after}"


def resume(folder: Path, checkpoint: Path, **changes: Any) -> Any:
    run = start(folder, **changes)
    run.train(resume_from_checkpoint=str(checkpoint))
    assert run.state.global_step == 8
    return run


def lose_rollout(checkpoint: Path) -> None:
    """As TRL would have saved it; with its manifest it would be a damaged one, and refused."""
    (checkpoint / state.rollout_file(0)).unlink()
    (checkpoint / MANIFEST).unlink()


def without_clock(run: Any) -> list[dict[str, Any]]:
    """What was logged at each update, less what depends on the clock and the summary at the end."""
    return [
        {name: x for name, x in entry.items() if name != "step_time"}
        for entry in run.state.log_history
        if "loss" in entry
    ]


Result = tuple[dict[str, torch.Tensor], list[dict[str, Any]]]


def result(run: Any) -> Result:
    return weights(run), without_clock(run)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """The result of a run that is never interrupted; made once for all tests with the same settings."""
    results: dict[str, Result] = {}

    def run(**changes: Any) -> Result:
        if str(changes) not in results:
            run = start(tmp_path_factory.mktemp("whole"), **changes)
            run.train()
            assert [entry["step"] for entry in without_clock(run)] == [1, 2, 3, 4, 5, 6, 7, 8]
            results[str(changes)] = result(run)
        return results[str(changes)]

    return run


def assert_same(a: Result, b: Result) -> None:
    assert furthest(a[0], b[0]) == 0
    assert a[1] == b[1]


SCHEDULES: list[Any] = [
    pytest.param({}, 2, id="in the first rollout"),
    pytest.param({}, 6, id="in the second rollout"),
    pytest.param({}, 4, id="between two rollouts"),
    pytest.param({"tail": "floor"}, 1, id="floor"),
    pytest.param({"gradient_accumulation_steps": 2}, 2, id="two batches per update"),
    pytest.param({"num_iterations": 2}, 1, id="in the first of two passes"),
    pytest.param({"num_iterations": 2}, 3, id="in the second of two passes"),
    pytest.param({"trust_region": "clip"}, 2, id="clip, no old policy"),
    pytest.param({"trust_region": "none", "measure_kl": True}, 2, id="no trust region, measured"),
    pytest.param({"advantage_estimator": "reinforce_pp"}, 2, id="advantages per token"),
    pytest.param({"lora": True, "beta": 0.1}, 2, id="lora with a reference"),
    pytest.param({"stream": True}, 2, id="a stream of prompts"),
    pytest.param({"max_completion_length": 4, "mask_truncated_completions": True}, 2, id="hardly any token counts"),
]


@pytest.mark.parametrize(("changes", "after"), SCHEDULES)
def test_a_resumed_run_is_the_run_that_never_stopped(
    tmp_path: Path, whole: Callable[..., Result], changes: dict[str, Any], after: int
) -> None:
    second = resume(tmp_path, interrupt(tmp_path, after, **changes), **changes)
    assert_same(whole(**changes), result(second))
    if changes.get("trust_region", "troll") == "troll":
        assert max(logged(second, "troll/kl_after/max")) <= 0.05 * (1 + 1e-5)


@pytest.mark.parametrize("kind", ["moe", "vision"])
def test_other_kinds_of_models_are_resumed_too(tmp_path: Path, whole: Callable[..., Result], kind: str) -> None:
    """transformers saves experts and vision towers under other names, and by itself goes on without them."""
    second = resume(tmp_path, interrupt(tmp_path, 2, kind=kind), kind=kind)
    assert_same(whole(kind=kind), result(second))


def test_a_run_resumed_twice_is_the_run_that_never_stopped(tmp_path: Path, whole: Callable[..., Result]) -> None:
    middle = start(tmp_path, callbacks=[StopAfter(6)])
    middle.train(resume_from_checkpoint=str(interrupt(tmp_path, 3)))
    assert_same(whole(), result(resume(tmp_path, tmp_path / "checkpoint-6")))


def test_the_rollout_is_not_generated_again(tmp_path: Path) -> None:
    counts = CountRollouts()
    checkpoint = interrupt(tmp_path, 2, reward_funcs=counts)
    assert counts.at == [0]
    resume(tmp_path, checkpoint, reward_funcs=counts)
    assert counts.at == [0, 4]  # the second rollout alone, at its time


def test_without_its_rollout_a_resumed_run_is_another_one(tmp_path: Path, whole: Callable[..., Result]) -> None:
    """What TRL does. That this differs is what makes the equality above mean something."""
    counts = CountRollouts()
    checkpoint = interrupt(tmp_path, 2)
    lose_rollout(checkpoint)
    second = resume(tmp_path, checkpoint, reward_funcs=counts, allow_changes=True)
    assert counts.at[0] == 2  # generated at once
    assert furthest(whole()[0], weights(second)) > 1e-3
    kl = logged(second, "troll/kl_before/max")
    assert kl[2] < 1e-9  # by the policy of the checkpoint, which is the old one of what it generates
    assert min(kl[3:6]) > 1e-2
    assert max(logged(second, "troll/kl_after/max")) <= 0.05 * (1 + 1e-5)


def test_the_old_policy_of_a_resumed_rollout_is_the_one_that_generated_it(tmp_path: Path) -> None:
    second = resume(tmp_path, interrupt(tmp_path, 2))
    kl = logged(second, "troll/kl_before/max")
    assert kl[0] < 1e-9
    assert kl[2] > 0.1  # the first update after the checkpoint; 0 if the checkpoint's policy were taken for the old one
    assert kl[4] < 1e-9


@pytest.mark.parametrize(
    "other",
    [
        {"updates_per_generation": 2},
        {"updates_per_generation": 2, "gradient_accumulation_steps": 2},
        {"num_iterations": 2},
        {"num_iterations": 2, "updates_per_generation": 8},  # as many batches, each of them twice
        {"per_device_train_batch_size": 4},
    ],
)
def test_a_rollout_of_another_schedule_is_generated_again(
    tmp_path: Path, other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    counts = CountRollouts()
    checkpoint = interrupt(tmp_path, 2)
    with caplog.at_level(logging.WARNING):
        second = resume(tmp_path, checkpoint, reward_funcs=counts, allow_changes=True, **other)
    *changes, said = [r.getMessage() for r in caplog.records if r.name.startswith("troll")]
    assert {name for name in other if any(f"with a change: {name}: " in change for change in changes)} == other.keys()
    assert state.rollout_file(0) in said
    assert "another schedule" in said
    assert "generated again" in said
    assert counts.at[0] == 2
    assert logged(second, "troll/kl_before/max")[2] < 1e-9
    assert max(logged(second, "troll/kl_after/max")) <= 0.05 * (1 + 1e-5)


def test_a_rollout_without_an_old_policy_is_generated_again_where_one_is_needed(tmp_path: Path) -> None:
    second = resume(tmp_path, interrupt(tmp_path, 2, trust_region="clip"), allow_changes=True)
    assert len(logged(second, "troll/kl_after/max")) == 6  # every update after the checkpoint is bounded


def test_a_rollout_of_another_temperature_is_generated_again(tmp_path: Path) -> None:
    second = resume(tmp_path, interrupt(tmp_path, 2, tail="floor"), tail="floor", temperature=0.5, allow_changes=True)
    assert logged(second, "troll/kl_before/max")[2] < 1e-9


def test_a_rollout_without_a_reference_is_generated_again_where_one_is_needed(tmp_path: Path) -> None:
    second = resume(tmp_path, interrupt(tmp_path, 2, lora=True), lora=True, beta=0.1, allow_changes=True)
    assert len(logged(second, "kl")) == 6  # every update after the checkpoint


def test_a_run_that_shuffled_may_go_on_in_order(tmp_path: Path) -> None:
    second = resume(tmp_path, interrupt(tmp_path, 2), shuffle_dataset=False, allow_changes=True)
    assert max(logged(second, "troll/kl_after/max")) <= 0.05 * (1 + 1e-5)


def test_a_missing_rollout_is_not_passed_over_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = interrupt(tmp_path, 2)
    lose_rollout(checkpoint)
    with caplog.at_level(logging.WARNING):
        resume(tmp_path, checkpoint)
    unchecked, missing = [r.getMessage() for r in caplog.records if r.name.startswith("troll")]
    assert "is used unchecked: it has no manifest.json" in unchecked
    assert "is missing. If the checkpoint is inside a rollout, a new rollout is generated." in missing


@pytest.mark.parametrize("after", [2, 4, 6, 8, 10])
def test_in_any_epoch_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path, after: int) -> None:
    """Three epochs, each of one rollout on the same prompts in an order of its own; in the middle, and between two."""
    changes = {"train_dataset": prompts(8), "max_steps": 12}
    run = start(tmp_path / "whole", **changes)
    run.train()
    again = start(tmp_path / "again", **changes)
    again.train(resume_from_checkpoint=str(interrupt(tmp_path / "again", after, **changes)))
    assert_same(result(run), result(again))


def test_with_other_prompts_in_other_epochs_a_run_resumed_twice_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    """An epoch leaves two of ten prompts out, others each time."""
    changes = {"train_dataset": prompts(10), "max_steps": 12, "gradient_accumulation_steps": 2}
    changes["per_device_train_batch_size"] = 4
    run = start(tmp_path / "whole", **changes)
    run.train()
    middle = start(tmp_path / "again", callbacks=[StopAfter(9)], **changes)
    middle.train(resume_from_checkpoint=str(interrupt(tmp_path / "again", 5, **changes)))
    last = start(tmp_path / "again", **changes)
    last.train(resume_from_checkpoint=str(tmp_path / "again" / "checkpoint-9"))
    assert_same(result(run), result(last))


def test_a_checkpoint_is_pushed_with_its_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: dict[str, set[str]] = {}

    def upload(self: Any, *, folder_path: str, path_in_repo: str = ".", **_: Any) -> Any:
        pushed[path_in_repo] = {file.name for file in Path(folder_path).iterdir()}
        return SimpleNamespace(done=lambda: True)

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **_: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    changes = {"push_to_hub": True, "hub_model_id": "someone/small", "hub_strategy": "all_checkpoints"}
    checkpoint = interrupt(tmp_path, 2, **changes)
    assert (checkpoint / state.rollout_file(0)).exists()
    assert {"optimizer.safetensors", MANIFEST} <= pushed["checkpoint-2"]
    assert state.rollout_file(0) in pushed["checkpoint-2"]


def test_the_same_schedule_is_taken_over_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = interrupt(tmp_path, 2)
    with caplog.at_level(logging.WARNING):
        resume(tmp_path, checkpoint)
    assert [r.getMessage() for r in caplog.records if r.name.startswith("troll")] == []


def test_a_checkpoint_of_the_model_alone_has_no_rollout(tmp_path: Path) -> None:
    checkpoint = interrupt(tmp_path, 2, save_only_model=True)
    assert (checkpoint / "model.safetensors").exists()
    assert not (checkpoint / state.rollout_file(0)).exists()


def test_every_checkpoint_has_the_rollout_of_its_time(tmp_path: Path) -> None:
    start(tmp_path, save_steps=2).train()
    ids = {}
    for update in (2, 4, 6, 8):
        path = tmp_path / f"checkpoint-{update}" / state.rollout_file(0)
        assert state.rollout_schedule(path)["step"] == update
        ids[update] = torch.cat([batch["completion_ids"] for batch in state.load_rollout(path, torch.device("cpu"))])
    assert torch.equal(ids[2], ids[4])
    assert not torch.equal(ids[4], ids[6])
    assert torch.equal(ids[6], ids[8])


# ---------------------------------------------------------------------- the file


def same(a: Any, b: Any) -> bool:
    """Bit for bit, also where it is NaN; same type, same shape."""
    if isinstance(a, torch.Tensor):
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        floats = a.is_floating_point()
        view = bits[a.element_size()] if floats else a.dtype
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(view), b.view(view))
    return type(a) is type(b) and a == b


def same_policies(a: list[PackedPolicy], b: list[PackedPolicy]) -> bool:
    pairs = zip(a, b, strict=True)
    names = ("counts", "token_ids", "log_probs", "log_tail", "vocab_size", "temperature")
    return all(same(getattr(x, name), getattr(y, name)) for x, y in pairs for name in names)


def packed(B: int, T: int, dtype: torch.dtype = torch.float32) -> list[PackedPolicy]:
    """Policies of sequences, some of whose positions are empty, with ids beyond two bytes."""
    g = torch.Generator().manual_seed(0)
    K, V = 5, 200_000
    used = torch.arange(K) < torch.randint(0, K + 1, (B, T, 1), generator=g)
    ids = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(B * T)]).reshape(B, T, K)
    every = torch.randn(B, T, K + 1, generator=g, dtype=dtype)
    every[..., :K] = every[..., :K].where(used, -math.inf)
    every = every.log_softmax(-1)
    policy = SparsePolicy(ids.where(used, -1), every[..., :K], every[..., K], V, temperature=0.7)
    return policy.pack().sequences()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_read_is_what_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    batches = []
    for number in range(3):
        g = torch.Generator().manual_seed(number)
        x = torch.randn(4, 6, generator=g)
        x[0, 0], x[1, 1], x[2, 2] = math.nan, -math.inf, -0.0
        batches.append(
            {
                "completion_ids": torch.randint(0, 1 << 40, (4, 6), generator=g),
                "old_per_token_logps": x,
                "transposed": x.t(),  # not contiguous
                "halves": x.bfloat16(),
                "mask": x > 0,
                "num_items_in_batch": torch.tensor(24 + number),  # no dimension
                "nothing": x[:0],
                "num_images": [1, 0, 2, number],
                "absent": None,
                OLD_POLICY: packed(4, 6, dtype),
            }
        )
    path = tmp_path / "rollout"
    state.save_rollout(path, batches, {"step": 5, "steps_per_generation": 3})
    assert state.rollout_schedule(path) == {"step": 5, "steps_per_generation": 3}
    read = state.load_rollout(path, torch.device("cpu"))
    assert len(read) == 3
    for was, now in zip(batches, read, strict=True):
        assert was.keys() == now.keys()
        assert same_policies(was.pop(OLD_POLICY), now.pop(OLD_POLICY))
        for name in was:
            assert same(was[name], now[name]), name


def test_a_rollout_in_which_nothing_counts_is_written_and_read(tmp_path: Path) -> None:
    empty = SparsePolicy(torch.full((2, 3, 4), -1), torch.full((2, 3, 4), -math.inf), torch.zeros(2, 3), 100)
    state.save_rollout(tmp_path / "rollout", [{OLD_POLICY: empty.pack().sequences()}] * 2, {})
    for batch in state.load_rollout(tmp_path / "rollout", torch.device("cpu")):
        assert same_policies(batch[OLD_POLICY], empty.pack().sequences())


@pytest.mark.parametrize("changes", [{}, {"kind": "vision"}, {"tail": "floor", "max_support": 7}])
def test_the_buffer_of_a_trainer_is_read_as_it_was(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = start(tmp_path, callbacks=[StopAfter(2)], **changes)
    run.train()
    read = state.load_rollout(tmp_path / "checkpoint-2" / state.rollout_file(0), torch.device("cpu"))
    assert len(read) == len(run._buffered_inputs) == 4
    for was, now in zip(run._buffered_inputs, read, strict=True):
        assert was.keys() == now.keys()
        assert same_policies(was[OLD_POLICY], now[OLD_POLICY])
        assert all(same(was[name], now[name]) for name in was if name != OLD_POLICY)
        # What is used of them, padded to the widest support that occurs in the batch
        old, again = (PackedPolicy.stack(x[OLD_POLICY]).unpack() for x in (was, now))
        assert same(old.token_ids, again.token_ids)
        assert same(old.log_probs, again.log_probs)


def test_the_file_holds_tensors_and_text_and_nothing_that_runs_when_read(tmp_path: Path) -> None:
    path = interrupt(tmp_path, 2) / state.rollout_file(0)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    about = json.loads(header.pop("__metadata__")["troll"])
    assert about["batches"] == 4
    # Every byte after the header belongs to a tensor, end to end: there is no room for anything else.
    ends = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    assert ends[0][0] == 0
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ends))
    assert ends[-1][1] == len(data) - 8 - length
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(header)
