"""Rollouts by vLLM: what its generation hands over reaches the loss as in TRL, and the old policy is the trainer's.

vLLM is not installed here. In place of its engine stands a sampler that knows how wrong it is: the log-probabilities it
reports are off by known numbers, as those of one in lower precision are by unknown ones. Everything between it and the
loss is TRL's own.
"""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from trl.generation.vllm_generation import VLLMGeneration
from trl_cases import furthest, logged, stock_trainer, trainer, weights

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class KnownError(VLLMGeneration):
    """Draws any bytes, and says of each how probable it is to the model, off by an error of its own.

    ``errors`` are those of the last rollout: log π(o) of the model minus what was reported, NaN where nothing was.
    """

    scale = 0.5
    silent: tuple[int, ...] = ()
    """Positions at which no log-probability is reported."""
    length = 8

    def _init_vllm(self) -> None:
        self.calls: list[str] = []
        self.errors: list[list[float]] = []

    def sync_weights(self) -> None:
        self.calls.append("sync_weights")

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list | None] | None,
        num_generations: int,
        profiler: Any = None,
    ) -> tuple:
        self.calls.append("generate")
        g = torch.Generator().manual_seed(len(self.calls))
        ids, log_probs, self.errors = [], [], []
        for prompt in prompts:
            length = int(torch.randint(3, self.length + 1, (), generator=g))
            completion = torch.randint(7, 263, (length,), generator=g)
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([[*prompt, *completion.tolist()]])).logits[0]
            exact = (logits / self.temperature).log_softmax(-1)[-length - 1 : -1].gather(1, completion[:, None])[:, 0]
            errors = self.scale * torch.randn(length, generator=g)
            reported = [None if t in self.silent else x for t, x in enumerate((exact - errors).tolist())]
            ids.append(completion.tolist())
            log_probs.append([[x] for x in reported])
            self.errors.append([math.nan if t in self.silent else x for t, x in enumerate(errors.tolist())])
        return prompts, ids, log_probs, [[[token] for token in row] for row in ids]


@pytest.fixture(autouse=True)
def sampler(monkeypatch: pytest.MonkeyPatch) -> type[KnownError]:
    """The class that stands in for TRL's; its settings are those of one test."""
    here = type("KnownError", (KnownError,), {})
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", here)
    return here


def start(folder: Path, **changes: Any) -> Any:
    return trainer(folder, use_vllm=True, **changes)


def rollout_of(run: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """A whole rollout before it is shuffled, and the errors of its sampler, [B, T] with 0 after the end."""
    run.model.train()
    run.current_gradient_accumulation_steps = 1
    output = run._generate_and_score_completions(next(iter(run.get_train_dataloader())))
    T = output["completion_ids"].shape[1]
    rows = [[*row, *[0.0] * (T - len(row))] for row in run.vllm_generation.errors]
    return output, torch.tensor(rows)


def loss_and_gradient(run: Any, batch: dict[str, Any]) -> tuple[float, torch.Tensor]:
    loss = run._compute_loss(run.model, batch)
    return loss.item(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(run.model.parameters()))])


def go_astray(run: Any) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for p in run.model.parameters():
            p.add_(0.05 * torch.randn_like(p))


def assert_held(run: Any) -> None:
    kl = logged(run, "troll/kl_before/max")
    assert kl[0] < 1e-9
    assert min(kl[1:4]) > 0.1
    assert min(logged(run, "troll/projected_fraction")[1:4]) > 0.5
    assert max(logged(run, "troll/kl_after/max")) <= 0.05 * (1 + 1e-5)
    assert all(math.isfinite(x) for x in logged(run, "loss"))


@pytest.mark.parametrize("name", ["__init__", "generate", "sync_weights", "_init_vllm"])
def test_the_sampler_has_the_interface_of_trls(name: str, sampler: type[KnownError]) -> None:
    def parameters(of: type) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(getattr(of, name)).parameters.values()]

    assert parameters(sampler) == parameters(VLLMGeneration)


def test_weights_are_handed_over_before_every_rollout(tmp_path: Path) -> None:
    run = start(tmp_path, max_steps=8)
    run.train()
    assert run.vllm_generation.calls == ["sync_weights", "generate"] * 2
    assert_held(run)
    assert logged(run, "troll/kl_before/max")[4] < 1e-9


@pytest.mark.parametrize("tail", ["bucket", "floor"])
@pytest.mark.parametrize("mode", MODES)
def test_the_bound_acts_and_holds_with_every_correction(tmp_path: Path, mode: str, tail: str) -> None:
    run = start(tmp_path, vllm_importance_sampling_mode=mode, tail=tail)
    before = weights(run)
    run.train()
    assert_held(run)
    assert furthest(before, weights(run)) > 1e-2
    # The old policy is the trainer's, which does not depend on what the sampler reports.
    assert logged(run, "sampling/sampling_logp_difference/mean")[0] > 0.3


def expected_ratio(errors: torch.Tensor, mode: str, smallest: float, largest: float) -> torch.Tensor:
    log_ratio = errors.nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(1, keepdim=True)
    ratio = log_ratio.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(smallest, largest)
    return torch.where((ratio < smallest) | (ratio > largest), 0.0, ratio)


@pytest.mark.parametrize("silent", [(), (1, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_the_correction_is_the_ratio_of_trainer_and_sampler(
    tmp_path: Path, mode: str, silent: tuple[int, ...], sampler: type[KnownError]
) -> None:
    """And 1 for a token about which the sampler says nothing."""
    sampler.silent = silent
    limits = {"vllm_importance_sampling_clip_min": 0.6, "vllm_importance_sampling_clip_max": 1.8}
    run = start(tmp_path, vllm_importance_sampling_mode=mode, **limits)
    output, errors = rollout_of(run)
    ratio = expected_ratio(errors, mode, 0.6, 1.8)
    assert 0.1 < ((ratio == 0) | (ratio == 0.6) | (ratio == 1.8)).float().mean() < 0.9  # the limits act, not everywhere
    mask = output["completion_mask"].bool() if mode.startswith("token") else torch.ones_like(ratio, dtype=torch.bool)
    # Two ways to a log-softmax in fp32, summed over up to 8 tokens
    torch.testing.assert_close(output["importance_sampling_ratio"][mask], ratio[mask], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tail", ["bucket", "floor"])
@pytest.mark.parametrize("mode", MODES)
def test_without_bound_and_regression_it_is_trls_training(
    tmp_path: Path, mode: str, tail: str, sampler: type[KnownError]
) -> None:
    sampler.silent = (2,)
    changes = {"use_vllm": True, "vllm_importance_sampling_mode": mode, "optim": "sgd", "learning_rate": 0.1}
    stock = stock_trainer(tmp_path / "stock", **changes)
    stock.epsilon_low = stock.epsilon_high = math.inf
    stock.train()
    # 'floor' renormalises what it keeps; it is TRL's ratio where it keeps everything.
    support = {"max_support": 263, "tail_mass": 0.0} if tail == "floor" else {}
    run = trainer(tmp_path / "out", kl_bound=math.inf, regression_coef=0.0, tail=tail, **support, **changes)
    before = weights(run)
    run.train()
    assert logged(run, "troll/kl_before/max")[3] > 1e-2  # a policy that has moved
    assert logged(run, "loss") == pytest.approx(logged(stock, "loss"), rel=1e-4, abs=1e-5)
    names = [name for name in stock.state.log_history[0] if name.startswith("sampling/")]
    assert len(names) == 5
    for name in names:
        assert logged(run, name) == pytest.approx(logged(stock, name), rel=1e-4, abs=1e-5), name
    # Gradients in fp32 by two implementations of one head, in four updates
    assert furthest(weights(stock), weights(run)) < 1e-5
    assert furthest(before, weights(run)) > 1e-2


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_the_correction_weighs_the_ratio_and_not_the_regression(tmp_path: Path, mode: str) -> None:
    run = start(tmp_path, vllm_importance_sampling_mode=mode)
    batch, _ = rollout_of(run)
    go_astray(run)
    loss, gradient = loss_and_gradient(run, batch)
    assert run._metrics["train"]["troll/projected_fraction"][-1] > 0.5
    correction = batch["importance_sampling_ratio"]
    weighed = {
        **batch,
        "importance_sampling_ratio": torch.ones_like(correction),
        "advantages": batch["advantages"][:, None] * correction.expand_as(batch["completion_mask"]),
    }
    expected, expected_gradient = loss_and_gradient(run, weighed)
    assert loss == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    # With every weight 0, what is left is the regression.
    nothing = {**batch, "importance_sampling_ratio": torch.zeros_like(correction)}
    left, _ = loss_and_gradient(run, nothing)
    assert left == pytest.approx(run._metrics["train"]["troll/regression"][-1] * 4, rel=1e-5)  # of 4 batches in one
    assert left > 1e-2


@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_the_old_policy_is_recorded_also_for_a_single_update(tmp_path: Path, tail: str) -> None:
    """TRL scores such a rollout for the correction alone. Its policy is the old one, at no distance, all the same."""
    run = start(tmp_path, updates_per_generation=1, max_steps=4, tail=tail)
    before = weights(run)
    run.train()
    assert "troll_old_policy" in run._buffered_inputs[0]
    assert len(logged(run, "troll/kl_before/max")) == 4
    assert max(logged(run, "troll/kl_before/max")) < 1e-9
    assert logged(run, "troll/projected_fraction") == [0] * 4
    assert min(logged(run, "sampling/sampling_logp_difference/mean")) > 0.3
    assert furthest(before, weights(run)) > 1e-2


def test_a_single_update_without_correction_needs_no_old_policy(tmp_path: Path) -> None:
    changes = {"vllm_importance_sampling_correction": False, "optim": "sgd", "learning_rate": 0.1}
    run = start(tmp_path / "out", updates_per_generation=1, max_steps=3, **changes)
    run.train()
    assert "old_per_token_logps" not in run._buffered_inputs[0]
    assert "troll_old_policy" not in run._buffered_inputs[0]
    assert logged(run, "troll/kl_before/max") == []
    stock = stock_trainer(tmp_path / "stock", use_vllm=True, steps_per_generation=1, max_steps=3, **changes)
    stock.train()
    assert furthest(weights(stock), weights(run)) == 0  # neither clip nor bound acts: the very same computation


def test_several_updates_without_correction_have_a_bound(tmp_path: Path) -> None:
    run = start(tmp_path, vllm_importance_sampling_correction=False)
    run.train()
    assert_held(run)
    assert logged(run, "sampling/importance_sampling_ratio/max") == []


@pytest.mark.parametrize("mode", MODES)
def test_a_sampler_that_says_nothing_at_all_is_tolerated(tmp_path: Path, mode: str, sampler: type[KnownError]) -> None:
    sampler.silent = tuple(range(8))
    run = start(tmp_path, vllm_importance_sampling_mode=mode)
    run.train()
    assert_held(run)
    assert logged(run, "sampling/importance_sampling_ratio/mean") == [pytest.approx(1)]
    assert all(bool(p.isfinite().all()) for p in weights(run).values())


def test_sequences_far_from_the_sampler_lose_a_negative_advantage(tmp_path: Path, sampler: type[KnownError]) -> None:
    """Far from the sampler, not from the old policy: at the first update the two differ."""
    sampler.silent = (0,)
    run = start(tmp_path, off_policy_mask_threshold=0.0)
    batch, errors = rollout_of(run)
    loss, gradient = loss_and_gradient(run, batch)
    run.off_policy_mask_threshold = None
    far = -errors.nan_to_num(nan=0.0).sum(1) > 0  # of log-probabilities, sampler minus trainer
    dropped = far & (batch["advantages"] < 0)
    assert 0 < dropped.sum() < (batch["advantages"] < 0).sum()
    kept = {**batch, "advantages": batch["advantages"].masked_fill(dropped, 0.0)}
    expected, expected_gradient = loss_and_gradient(run, kept)
    assert loss == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


def test_the_temperature_of_the_sampler_is_that_of_the_policies(tmp_path: Path) -> None:
    run = start(tmp_path, temperature=0.7)
    assert run.vllm_generation.temperature == 0.7
    output, errors = rollout_of(run)
    mask = output["completion_mask"].bool()
    difference = (output["old_per_token_logps"] - output["sampling_per_token_logps"])[mask]
    torch.testing.assert_close(difference, errors[mask], rtol=0, atol=2e-5)
    assert {old.temperature for old in output["troll_old_policy"]} == {0.7}


def test_a_rollout_without_a_correction_is_generated_again_where_one_is_needed(tmp_path: Path) -> None:
    """A run that began with generation by transformers and goes on with vLLM, in the middle of a rollout."""
    saves = {"save_strategy": "steps", "save_steps": 2}
    trainer(tmp_path, **saves).train()
    run = start(tmp_path, **saves, allow_changes=True)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert run.vllm_generation.calls[:2] == ["sync_weights", "generate"]
    assert run.state.global_step == 4


def test_a_run_with_a_correction_is_resumed_in_the_middle_of_a_rollout(
    tmp_path: Path, sampler: type[KnownError]
) -> None:
    """The correction, and what the sampler said, NaN where it said nothing, are part of the rollout."""
    sampler.silent = (1,)
    saves = {"save_strategy": "steps", "save_steps": 2}
    whole = start(tmp_path, **saves)
    whole.train()
    again = start(tmp_path, **saves)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.vllm_generation.calls == []
    assert furthest(weights(whole), weights(again)) == 0
    assert logged(whole, "loss") == logged(again, "loss")
