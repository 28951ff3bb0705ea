"""An update that is not finite is not made, and one that does not fit is made in parts."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import guards_worker
import pytest
import tiny_models
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl_cases import furthest, logged, lower_case, trainer, weights

from troll.errors import InputError, TrainingError
from troll.trl import TROLLTrainer
from troll.trl.passes import OLD_POLICY
from troll.trl.robust import state
from troll.trl.robust.guards import GuardState, SkipInvalidUpdates, UpdateState
from troll.trl.robust.oom_retry import OOMRetry, Part, is_out_of_memory, largest_part, parts
from troll.trl.robust.reward_validation import RewardValidation

SHORT = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}  # a gradient is what was computed
NAN = math.nan


class Follow(TrainerCallback):
    """Keeps what a run looks like before and after every update, and its gradients before the optimizer sees them."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.before: list[Any] = []
        self.after: list[Any] = []
        self.gradients: list[dict[str, Any]] = []
        self.metrics: list[dict[str, list[float]]] = []
        run.add_callback(self)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.before.append(self._state())

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        named = self.run.model.named_parameters()
        self.gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in named})

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.after.append(self._state())
        self.metrics.append({name: list(x) for name, x in self.run._metrics["train"].items()})

    def _state(self) -> Any:
        return copy.deepcopy((weights(self.run), self.run.optimizer.state_dict()["state"]))


def same(a: Any, b: Any) -> bool:
    """Bit for bit, whatever is inside of what."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def poison_gradient(run: Any, name: str, updates: set[int], value: float = NAN) -> None:
    """One entry of the gradient of one parameter, in these updates (from 1)."""
    parameter = dict(run.model.named_parameters())[name]

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        if run.state.global_step + 1 not in updates:
            return gradient
        spoilt = gradient.clone()
        spoilt.view(-1)[3] = value
        return spoilt

    parameter.register_hook(spoil)


def poison_loss(run: Any, updates: set[int], value: float = NAN, at: int = 0) -> None:
    """The value of the loss of one batch, and not its gradient."""
    own = run._compute_loss

    def spoilt(model: Any, inputs: Any) -> torch.Tensor:
        loss = own(model, inputs)
        if run.state.global_step + 1 in updates and len(run._update.done) == at:
            loss = loss + (torch.full_like(loss, value) - loss).detach()
        return loss

    run._compute_loss = spoilt


def poison_policy(run: Any, updates: set[int]) -> None:
    """The hidden states of one token of one completion."""

    def spoil(module: Any, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and run.state.global_step + 1 in updates:
            output.last_hidden_state[5, -3] = NAN

    run.model.model.register_forward_hook(spoil)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, "troll")
    troll = lambda: [x for x in caplog.records if x.name.startswith("troll")]  # noqa: E731
    return lambda: [record.message.removeprefix("[RANK 0] ") for record in troll()]


# ---------------------------------------------------------------------- updates that are not finite


@pytest.mark.parametrize(
    ("optim", "clip"), [("adamw_torch", 1.0), ("adamw_torch_fused", 0.0), ("sgd", 1.0), ("adafactor", 0.0)]
)
def test_neither_weights_nor_moments_move_in_an_update_whose_gradient_is_not_finite(
    tmp_path: Path, optim: str, clip: float, said: Any
) -> None:
    momentum = "momentum=0.9" if optim == "sgd" else None
    run = trainer(tmp_path, optim=optim, optim_args=momentum, max_grad_norm=clip, weight_decay=0.1)
    name = "model.layers.1.mlp.up_proj.weight"
    poison_gradient(run, name, {2})
    seen = Follow(run)
    run.train()
    assert same(seen.before[1], seen.after[1])
    assert set(seen.gradients[1].values()) == {None}
    for update in (0, 2, 3):
        assert not same(seen.before[update], seen.after[update])
    assert logged(run, "troll/skipped_updates") == [1, 1, 1]  # from the second log on
    assert "troll/skipped_updates" not in run.state.log_history[0]
    [sentence] = said()
    assert sentence.startswith(f"Update 2 was skipped: the gradient of {name} is not finite.")
    assert all(bool(p.isfinite().all()) for p in weights(run).values())


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_enough_and_what_is_logged_is_the_mean_of_the_others(
    tmp_path: Path, value: float, said: Any
) -> None:
    run = trainer(tmp_path, gradient_accumulation_steps=2, logging_steps=4)
    poison_loss(run, {2}, value, at=1)
    seen = Follow(run)
    losses: list[float] = []
    step = run.training_step
    run.training_step = lambda *args: (loss := step(*args), losses.append(float(loss)))[0]
    run.train()
    assert same(seen.before[1], seen.after[1])
    assert said()[0].startswith(f"Update 2 was skipped: the loss of batch 1 is {value}.")
    assert [math.isfinite(x) for x in losses] == [True] * 3 + [False] + [True] * 4
    made = losses[:2] + losses[4:]
    # Sums of six numbers in fp32
    assert logged(run, "loss") == [pytest.approx(sum(made) / 3, rel=1e-5, abs=1e-6)]
    assert abs(sum(made)) > 1e-2
    assert logged(run, "troll/skipped_updates") == [1]
    # One entry per pass of the updates that were made: what the skipped one measured is dropped, its time is not
    assert [len(x["troll/kl_before/mean"]) for x in seen.metrics] == [2, 2, 4, 6]
    assert [len(x["entropy"]) for x in seen.metrics] == [2, 2, 4, 6]
    assert [len(x["step_time"]) for x in seen.metrics] == [1, 2, 3, 4]


def test_without_a_single_update_to_log_the_loss_is_not_made_up(tmp_path: Path) -> None:
    run = trainer(tmp_path, logging_steps=2)
    poison_loss(run, {1, 2})
    run.train()
    first, second = logged(run, "loss")
    assert math.isnan(first)
    assert math.isfinite(second)
    assert second != 0


@pytest.mark.parametrize("changes", [{}, {"tail": "floor"}, {"trust_region": "clip"}, {"trust_region": "none"}])
def test_a_policy_that_is_no_distribution_is_skipped_and_its_place_is_said(
    tmp_path: Path, changes: dict[str, Any], said: Any
) -> None:
    run = trainer(tmp_path, **changes)
    poison_policy(run, {3})
    seen = Follow(run)
    observed: list[int] = []
    run.observe_tokens = lambda stats, counted, inputs: observed.append(int(counted.sum()))
    run.train()
    if run._needs_old_policy:
        assert observed == [64, 64, 0, 64]
    assert same(seen.before[2], seen.after[2])
    assert not same(seen.before[3], seen.after[3])
    sentence = said()[-1]
    assert sentence.startswith("Update 3 was skipped: ")
    if not changes or "tail" in changes:  # the projection leaves the token out: loss and gradient are finite
        assert "logit nan of token 0" in sentence
        # The states of the third position from the end predict the second one
        assert "first in completion 5, token 6 of batch 0" in sentence
        assert "the loss of" not in sentence
    else:
        assert "the loss of batch 0 is nan; the gradient of model.embed_tokens.weight" in sentence
    assert all(bool(p.isfinite().all()) for p in weights(run).values())


def test_outside_of_an_update_such_a_policy_is_an_error(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.model.train()
    run.current_gradient_accumulation_steps = 1
    batch = run._prepare_inputs(next(iter(run.get_train_dataloader())))
    poison_policy(run, {1})
    with pytest.raises(InputError, match="logit nan of token 0"):
        run._compute_loss(run.model, batch)


@pytest.mark.parametrize(("most", "stops_at"), [(0, 2), (2, 4)])
def test_a_run_stops_when_too_many_were_skipped_and_says_what_and_where(
    tmp_path: Path, most: int, stops_at: int
) -> None:
    run = trainer(tmp_path, max_skipped_updates=most, max_steps=8)
    poison_gradient(run, "model.norm.weight", {2, 3, 4, 5})
    with pytest.raises(TrainingError) as stop:
        run.train()
    assert run.state.global_step == stops_at - 1
    sentence = str(stop.value)
    assert f"Update {stops_at} is not finite: the gradient of model.norm.weight is not finite" in sentence
    assert f"skipped updates: {most + 1}, max_skipped_updates={most}" in sentence
    folder = tmp_path / "skipped"
    assert f"Its batches are in {folder / f'update-{stops_at:06d}'}" in sentence
    assert sorted(x.name for x in folder.iterdir()) == [f"update-{i:06d}" for i in range(2, stops_at + 1)]
    assert run.guards.skipped_updates == most + 1
    assert isinstance(stop.value, InputError)  # one line on a terminal


def test_those_before_a_resume_count(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_skipped_updates=2)
    saved = json.loads(json.dumps(asdict(GuardState(skipped_updates=2, halvings=1))))
    run.guards = GuardState(**saved)
    poison_gradient(run, "model.norm.weight", {3})
    with pytest.raises(TrainingError, match="Update 3 is not finite"):
        run.train()
    assert logged(run, "troll/skipped_updates") == [2, 2]


def test_a_gradient_whose_norm_leaves_float32_is_skipped(tmp_path: Path, said: Any) -> None:
    """Clipping by it would make an update of nothing."""
    run = trainer(tmp_path, max_steps=2)
    poison_gradient(run, "model.norm.weight", {1}, 3e38)
    poison_gradient(run, "model.embed_tokens.weight", {1}, 3e38)
    seen = Follow(run)
    run.train()
    assert same(seen.before[0], seen.after[0])
    assert "is not finite" in said()[0]


def test_the_batches_are_written_down_as_they_are_and_as_text(tmp_path: Path) -> None:
    run = trainer(tmp_path, gradient_accumulation_steps=2)
    poison_loss(run, {2}, math.inf, at=1)
    used: list[dict[str, Any]] = []
    own = run._compute_loss
    run._compute_loss = lambda model, inputs: (used.append(inputs), own(model, inputs))[1]
    run.train()
    folder = tmp_path / "skipped" / "update-000002"
    assert sorted(x.name for x in folder.iterdir()) == ["batch_00000.json", "batch_00000.safetensors"]
    loaded = state.load_rollout(folder / "batch_00000.safetensors", torch.device("cpu"))
    assert len(loaded) == 2
    for batch, original in zip(loaded, used[2:4], strict=True):
        assert batch.keys() == original.keys()
        assert same({k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}, _tensors(original))
        assert same([vars(x) for x in batch[OLD_POLICY]], [vars(x) for x in original[OLD_POLICY]])

    def no_constant(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    about = json.loads((folder / "batch_00000.json").read_text(), parse_constant=no_constant)
    assert about["update"] == 2
    assert about["why"] == "the loss of batch 1 is inf"
    assert about["losses"][1] == "inf"
    assert math.isfinite(about["losses"][0])
    assert [(x["batch"], x["row"]) for x in about["completions"]] == [(i, j) for i in range(2) for j in range(8)]
    for entry in about["completions"]:
        batch, row = used[2 + entry["batch"]], entry["row"]
        assert entry["prompt"].startswith("say ")
        counted = batch["completion_mask"][row].bool()
        assert entry["completion"] == run._tokenizer.decode(batch["completion_ids"][row][counted])
        assert entry["advantage"] == batch["advantages"][row].item()
        assert entry["reward"] == lower_case([entry["completion"]])[0] or "\ufffd" in entry["completion"]
        assert entry["not_finite"] == []


def _tensors(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}


def test_numbers_of_a_batch_that_are_not_finite_are_named(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=1)
    own = run._generate_and_score_completions

    def spoilt(inputs: Any) -> Any:
        output = own(inputs)
        output["advantages"][3] = math.inf
        output["old_per_token_logps"][:, -1] = NAN
        output["completion_mask"][:, -1] = 0  # where it does not count
        return output

    run._generate_and_score_completions = spoilt
    run.train()
    about = json.loads((tmp_path / "skipped" / "update-000001" / "batch_00000.json").read_text())
    found = [x for x in about["completions"] if x["not_finite"]]
    assert len(found) <= 1  # one of 32 completions, of which the update takes 8
    assert all(x["not_finite"] == ["advantages"] and x["advantage"] == "inf" for x in found)
    batches = [i for i, x in enumerate(run._buffered_inputs) if not x["advantages"].isfinite().all()]
    assert (batches == [0]) == bool(found)


def test_a_run_goes_on_where_the_batches_cannot_be_written(tmp_path: Path, said: Any) -> None:
    (tmp_path / "skipped").write_text("in the way")
    run = trainer(tmp_path)
    poison_gradient(run, "model.norm.weight", {2})
    run.train()
    assert run.state.global_step == 4
    assert "Its batches could not be written to" in said()[0]


def test_what_TRL_adapts_to_the_entropy_is_taken_back(tmp_path: Path) -> None:
    adaptive = {"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef": 0.01, "entropy_coef_delta": 0.01}
    run = trainer(tmp_path, **adaptive)
    poison_loss(run, {2})
    seen: list[float] = []
    own = run._get_grad_norm
    run._get_grad_norm = lambda *a, **k: (own(*a, **k), seen.append(run.entropy_coef))[0]
    run.train()
    assert seen == pytest.approx([0.02, 0.02, 0.03, 0.04])
    parted = trainer(tmp_path, **ends_often(**adaptive))
    OutOfMemory(parted, 2, [1], "backward")
    coefficients: list[float] = []
    after = parted._get_grad_norm
    parted._get_grad_norm = lambda *a, **k: (after(*a, **k), coefficients.append(parted.entropy_coef))[0]
    parted.train()
    assert coefficients == pytest.approx([0.02, 0.03, 0.04, 0.05])  # once per update, in how many parts it may be made


def test_it_is_asked_once_per_update_whether_all_is_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(tmp_path, gradient_accumulation_steps=4, updates_per_generation=2, max_steps=2)
    asked: list[int] = []
    own = run._is_finite
    run._is_finite = lambda update, norm: (asked.append(len(update.losses)), own(update, norm))[1]
    run.train()
    assert asked == [4, 4]


# ---------------------------------------------------------------------- memory


class OutOfMemory:
    """Memory that runs out at the given passes of an update, in the forward or in the middle of the backward."""

    def __init__(self, run: Any, update: int, passes: list[int], where: str) -> None:
        self.run, self.update, self.where = run, update, where
        self.left = list(passes)
        self.made = 0
        """Passes of the update, with those that failed."""
        run.model.model.layers[0].register_forward_hook(self._look)

    def _look(self, module: Any, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or self.run.state.global_step + 1 != self.update:
            return
        self.made += 1
        if self.made in self.left:
            if self.where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nMore of it")
            hidden = output[0] if isinstance(output, tuple) else output
            hidden.register_hook(self._fail)  # the head and all other layers have their gradients by then

    def _fail(self, gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nMore of it")


def ends_often(**changes: Any) -> dict[str, Any]:
    """A model of which every sixteenth byte ends a completion: parts differ in their number of tokens."""
    model, tokens = tiny_models.build("dense")
    model.generation_config.eos_token_id = [2, *range(7, 263, 16)]
    return {"model": model, "processing_class": tokens, **SHORT, **changes}


def run_of(folder: Path, passes: list[int], where: str = "backward", **changes: Any) -> tuple[Any, Follow, OutOfMemory]:
    """Two updates of two batches each; memory runs out in the second, where the trust region acts."""
    run = trainer(folder, **ends_often(**{"gradient_accumulation_steps": 2, "max_steps": 2, **changes}))
    seen, memory = Follow(run), OutOfMemory(run, 2, passes, where)
    run.train()
    return run, seen, memory


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same run with enough memory."""
    return functools.cache(lambda **changes: run_of(tmp_path_factory.mktemp("whole"), [], **changes)[1])


def assert_same_gradient(whole: Follow, parted: Follow, update: int = 1) -> None:
    assert same(whole.gradients[0], parted.gradients[0])
    flat = [torch.cat([g.flatten() for g in seen.gradients[update].values()]) for seen in (whole, parted)]
    assert flat[0].abs().max() > 1e-3
    # The same numbers added in another order, 60 tokens in two to eight sums: a few roundings (6e-8) of the largest
    # entries. A part with a wrong weight, or counted twice, would be off by a third of them or more.
    torch.testing.assert_close(flat[1], flat[0], rtol=1e-5, atol=1e-5 * float(flat[0].abs().max()))


LOSSES: list[dict[str, Any]] = [
    {"loss_type": "dapo"},
    {"loss_type": "grpo"},
    {"loss_type": "bnpo"},
    {"loss_type": "dr_grpo"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "dapo", "tail": "floor", "advantage_estimator": "reinforce_pp"},
    {"loss_type": "cispo", "trust_region": "clip"},
    {"loss_type": "sapo", "trust_region": "clip"},
    {"loss_type": "bnpo", "entropy_coef": 0.1},
    {"loss_type": "dapo", "entropy_coef": 0.1},
]


@pytest.mark.parametrize("changes", LOSSES, ids=lambda x: " ".join(map(str, x.values())))
def test_an_update_in_parts_has_the_gradient_of_the_whole(
    tmp_path: Path, whole_run: Any, changes: dict[str, Any], said: Any
) -> None:
    """Memory runs out in the backward of the second batch, when the first one has left its gradient."""
    whole = whole_run(**changes)
    run, parted, memory = run_of(tmp_path, [2], **changes)
    assert memory.made == 2 + 4  # the second failed; then both batches in two parts
    assert_same_gradient(whole, parted)
    assert logged(run, "loss") == pytest.approx(logged(whole.run, "loss"), rel=1e-4, abs=1e-6)
    counts = [int(x["completion_mask"][:4].sum()) for x in run._buffered_inputs[2:4]]
    assert counts[0] != counts[1]
    assert run.guards.halvings == 1
    assert run._step == 4
    [sentence] = [x for x in said() if x.startswith("Out of memory")]
    assert sentence.startswith("Out of memory (CUDA out of memory. Tried to allocate 20.00 MiB.): ")
    assert "the micro-batch size is reduced from 8 to 4 completions" in sentence
    assert "per_device_train_batch_size=4, gradient_accumulation_steps=4" in sentence


@pytest.mark.parametrize(("passes", "where", "made", "halvings"), [
    ([1], "forward", 1 + 4, 1),
    ([1], "backward", 1 + 4, 1),
    ([2], "forward", 2 + 4, 1),
    # Once more in the third of four parts: the first one of the batch after the repeated one
    ([2, 5], "backward", 2 + 3 + 8, 2),
    ([1, 2, 3], "backward", 1 + 1 + 1 + 16, 3),
])  # fmt: skip
def test_wherever_and_however_often_it_runs_out(
    tmp_path: Path, whole_run: Any, passes: list[int], where: str, made: int, halvings: int
) -> None:
    run, parted, memory = run_of(tmp_path, passes, where)
    assert_same_gradient(whole_run(loss_type="dapo"), parted)
    assert (memory.made, run.guards.halvings) == (made, halvings)
    # Of the passes that were made in the end, each has measured once, those that failed nothing
    assert [len(x["troll/kl_before/mean"]) for x in parted.metrics] == [2, 2 << halvings]


def test_once_halved_it_stays_so_and_nothing_is_generated_twice(tmp_path: Path) -> None:
    calls: list[int] = []

    def counted(completions: list[Any], **_: Any) -> list[float]:
        calls.append(len(completions))
        return lower_case(completions)

    straight = trainer(tmp_path / "a", **ends_often(max_steps=6, reward_funcs=counted))
    straight.train()
    assert calls == [32, 32]
    run = trainer(tmp_path / "b", **ends_often(max_steps=6, reward_funcs=counted))
    first = OutOfMemory(run, 1, [1], "forward")
    later = [OutOfMemory(run, update, [], "forward") for update in (2, 5)]
    run.train()
    assert calls == [32] * 4
    assert first.made == 3
    assert [x.made for x in later] == [2, 2]
    # fp32, and six updates of up to 1e-1 each; the second rollout is drawn from nearly the same policy
    assert furthest(weights(straight), weights(run)) < 1e-4
    resumed = trainer(tmp_path / "c", **ends_often(max_steps=1))
    resumed.guards = GuardState(**asdict(run.guards))
    again = OutOfMemory(resumed, 1, [], "forward")
    resumed.train()
    assert again.made == 2


def test_an_update_that_is_made_again_says_so_to_who_keeps_its_numbers(tmp_path: Path) -> None:
    run = trainer(tmp_path, **ends_often(gradient_accumulation_steps=2, max_steps=1))
    told: list[int] = []
    run.update_again = lambda: told.append(run._update is not None and len(run._update.done))
    OutOfMemory(run, 1, [2], "backward")
    run.train()
    assert told == [1]


def test_one_completion_that_does_not_fit_ends_the_run(tmp_path: Path) -> None:
    run = trainer(tmp_path, **ends_often(per_device_train_batch_size=4, max_steps=1))
    OutOfMemory(run, 1, [1, 2, 3], "backward")
    with pytest.raises(TrainingError, match=r"Out of memory at micro-batch size 1.*gradient_checkpointing=True"):
        run.train()
    assert run.guards.halvings == 2


def test_what_the_machine_itself_cannot_allocate_is_known() -> None:
    with pytest.raises(RuntimeError) as refusal:
        torch.empty(2**62, dtype=torch.uint8)
    assert is_out_of_memory(refusal.value)
    assert is_out_of_memory(torch.OutOfMemoryError("anything"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_on_several_processes_nothing_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(tmp_path)
    batch = {"completion_ids": torch.zeros(8, 2)}
    update = UpdateState(run.model, torch.zeros(()), {}, current=batch)
    monkeypatch.setattr(type(run.accelerator), "num_processes", 2)
    with pytest.raises(TrainingError, match=r"on one of several processes.*per_device_train_batch_size=4"):
        run._halve(update, "out of memory")
    assert run.guards.halvings == 0


@pytest.mark.parametrize(("rows", "halvings", "sizes"), [(8, 1, [4, 4]), (5, 1, [3, 2]), (5, 2, [2, 1, 1, 1])])
def test_parts_are_rows_in_order_and_their_weights_add_up(rows: int, halvings: int, sizes: list[int]) -> None:
    mask = (torch.arange(7) < torch.arange(1, rows + 1)[:, None]).long()
    batch = {
        "completion_ids": torch.arange(rows * 7).reshape(rows, 7),
        "completion_mask": mask,
        "num_items_in_batch": torch.tensor(100),
        "advantages": torch.arange(rows) / 3,
        "kept": [f"row {i}" for i in range(rows)],
    }
    for loss_type, shares in (
        ("grpo", [size / rows for size in sizes]),
        ("bnpo", [float(x.sum()) / float(mask.sum()) for x in mask.split(sizes)]),
    ):
        found = parts(batch, halvings, loss_type)
        assert all(isinstance(part, Part) for part in found)
        assert [len(part["kept"]) for part in found] == sizes
        assert [float(part.weight) for part in found] == pytest.approx(shares)  # type: ignore[attr-defined]
        for name in ("completion_ids", "completion_mask", "advantages"):
            assert torch.equal(torch.cat([part[name] for part in found]), batch[name])
        assert [row for part in found for row in part["kept"]] == batch["kept"]
        assert {int(part["num_items_in_batch"]) for part in found} == {100}
    assert max(sizes) == largest_part(rows, halvings)
    assert parts(batch, 0, "grpo")[0] is batch


def test_without_a_token_that_counts_a_part_has_no_weight() -> None:
    mask = torch.zeros(4, 3).long()
    mask[:2, 0] = 1
    batch = {"completion_ids": mask, "completion_mask": mask, "num_items_in_batch": torch.tensor(9)}
    assert [float(x.weight) for x in parts(batch, 1, "dapo")] == [1.0, 0.0]  # type: ignore[attr-defined]
    nothing = {**batch, "completion_mask": torch.zeros_like(mask)}
    assert [float(x.weight) for x in parts(nothing, 1, "dapo")] == [0.0, 0.0]  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- memory outside of an update


class ScoringOutOfMemory:
    """Runs out in the forwards that score a rollout, which are the ones with labels and without gradient."""

    def __init__(self, run: Any, passes: list[int]) -> None:
        self.run, self.passes = run, passes
        self.sizes: list[int] = []
        run.model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module: Any, args: Any, inputs: dict[str, Any]) -> None:
        if "labels" in inputs and not torch.is_grad_enabled():
            self.sizes.append(len(inputs["input_ids"]))
            if len(self.sizes) in self.passes:
                raise torch.OutOfMemoryError("CUDA out of memory.")


class Keep(TrainerCallback):
    """The batches of the first rollout."""

    def __init__(self, run: Any, kept: list[dict[str, Any]]) -> None:
        self.run, self.kept = run, kept

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.kept.extend(self.run._buffered_inputs)


def test_a_rollout_is_scored_in_smaller_batches_and_from_its_beginning(tmp_path: Path, said: Any) -> None:
    whole = trainer(tmp_path / "a", max_steps=1)
    whole.train()
    run = trainer(tmp_path / "b", max_steps=5)
    scoring = ScoringOutOfMemory(run, [3])
    kept: list[dict[str, Any]] = []
    own = run._generate_and_score_completions
    run._generate_and_score_completions = lambda inputs: (kept.append(own(inputs)), kept[-1])[1]
    first: list[dict[str, Any]] = []
    run.add_callback(Keep(run, first))
    run.train()
    assert scoring.sizes == [8, 8, 8] + [4] * 8 + [4] * 8
    assert run.guards.scoring_halvings == 1
    assert run.guards.halvings == 0
    assert len(kept[0][OLD_POLICY]) == 32
    for batch, original in zip(first, whole._buffered_inputs, strict=True):
        assert torch.equal(batch["completion_ids"], original["completion_ids"])
        # Log-probabilities of about −5 in fp32, from products of other sizes
        torch.testing.assert_close(batch["old_per_token_logps"], original["old_per_token_logps"], rtol=0, atol=1e-5)
    assert logged(run, "troll/kl_before/max")[0] < 1e-9  # the policies are those of their own sequences
    assert logged(run, "troll/kl_before/max")[4] < 1e-9
    assert logged(run, "loss")[0] == pytest.approx(logged(whole, "loss")[0], abs=1e-6)
    assert any("scoring rollouts is reduced from 8 to 4 completions" in x for x in said())


def test_scoring_that_does_not_fit_ends_the_run(tmp_path: Path) -> None:
    run = trainer(tmp_path, per_device_train_batch_size=4)
    ScoringOutOfMemory(run, [1, 2, 3])
    with pytest.raises(TrainingError, match="while scoring a rollout, 1 completions at a time"):
        run.train()


def test_generation_that_does_not_fit_says_what_to_do(tmp_path: Path) -> None:
    run = trainer(tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    run._generate_single_turn = fail
    with pytest.raises(TrainingError, match=r"while generating a rollout.*\(CUDA out of memory.\).*updates_per_gen"):
        run.train()
    assert run.guards == GuardState()


# ---------------------------------------------------------------------- what is relied on in TRL and transformers

WRAPPED = {
    "train": ["self", "resume_from_checkpoint"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "_prepare_inputs": ["self", "generation_batch"],
    "compute_loss": ["self", "model", "inputs"],
    "_get_per_token_logps_and_entropies": ["self", "model"],
    "_generate": ["self", "prompts"],
    "_clip_grad_norm": ["self", "model"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "log": ["self", "logs"],
}


def test_every_method_that_is_wrapped_is_one_of_TRLs_and_no_other_has_such_a_name() -> None:
    ours = {
        name
        for part in (SkipInvalidUpdates, OOMRetry, RewardValidation)
        for name in vars(part)
        if not name.startswith("__")
    }
    assert {name for name in ours if hasattr(GRPOTrainer, name)} == WRAPPED.keys()
    for name, known in WRAPPED.items():
        theirs = list(inspect.signature(getattr(GRPOTrainer, name)).parameters)
        assert theirs[: len(known)] == known
        inspect.signature(getattr(TROLLTrainer, name)).bind(**dict.fromkeys(theirs))


def test_the_loss_types_that_are_weighed_by_tokens_are_those_that_TRL_divides_by_them() -> None:
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert 'elif self.loss_type in ["cispo", "dapo", "vespo"]:' in source
    assert source.count('inputs["num_items_in_batch"]') == 1
    assert source.count("/ mask.sum().clamp(min=1.0)") == 1  # bnpo


# ---------------------------------------------------------------------- two processes


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Case → what it comes to on each of two processes, one of which goes wrong."""
    folder = tmp_path_factory.mktemp("two")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", guards_worker.__file__]
    done = subprocess.run(
        [sys.executable, *command, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    def outcomes(case: str) -> list[dict[str, Any]]:
        files = [folder / case for case in (f"{case}.0.json", f"{case}.1.json")]
        if not all(file.exists() for file in files):
            pytest.fail(f"two processes did not get to the end of {case!r}:\n{done.stdout[-8000:]}", pytrace=False)
        return [json.loads(file.read_text()) for file in files]

    outcomes.folder = folder  # type: ignore[attr-defined]
    return outcomes


@pytest.mark.slow
def test_what_is_not_finite_on_one_process_is_skipped_on_all(two: Any) -> None:
    for case, update in (("skips", 2), ("policy", 3)):
        first, second = two(case)
        assert first["error"] is None
        assert second["error"] is None
        assert (first["updates"], first["skipped"], second["skipped"]) == (4, 1, 1)
        assert first["weights"] == second["weights"]
        assert first["moved"] > 1e-2
        assert [math.isnan(x) for x in first["losses"]] == [i == update - 1 for i in range(4)]
        dumped = two.folder / case / "skipped" / f"update-{update:06d}"
        names = ["batch_00000.json", "batch_00000.safetensors", "batch_00001.json", "batch_00001.safetensors"]
        assert sorted(x.name for x in dumped.iterdir()) == names


@pytest.mark.slow
def test_all_processes_stop_together_and_say_which_one_went_wrong(two: Any) -> None:
    for outcome in two("stops"):
        assert outcome["updates"] == 2
        assert "Update 3 is not finite: process 1: the loss of batch 0 is inf" in outcome["error"]
    for outcome in two("reward"):
        assert outcome["updates"] == 0
        assert "the reward function 'fails' raised ConnectionError: no answer" in outcome["error"]
