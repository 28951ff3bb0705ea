"""Everything TRL gives still works with the trust region in place, and the trust region with everything TRL gives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import tiny_models
import torch
import trl.trainer.utils as trl_utils
from datasets import Dataset
from huggingface_hub import HfApi, ModelCard
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import TrainerCallback
from trl.chat_template_utils import qwen3_chat_template
from trl_cases import config, furthest, logged, lower_case, prompts, stock_trainer, text_of, trainer, weights

from troll import restrict, sparsify, troll_loss
from troll.errors import InputError
from troll.objective import constrain
from troll.policy import PackedPolicy
from troll.trl import TROLLTrainer

# ---------------------------------------------------------------------- what every run must show


def assert_held(run: Any, bound: float = 0.05, least: float = 0.5) -> None:
    """The first update was made by the old policy itself; later ones went beyond the bound and were brought back."""
    kl = logged(run, "troll/kl_before/max")
    assert len(kl) >= 4
    assert kl[0] < 1e-9
    assert min(kl[1:4]) > 2 * bound
    assert min(logged(run, "troll/projected_fraction")[1:4]) > least
    assert max(logged(run, "troll/kl_after/max")) <= bound * (1 + 1e-5)
    assert sum(logged(run, "troll/unconverged_tokens")) == 0
    assert all(math.isfinite(x) for x in logged(run, "loss"))


def trained(folder: Path, **changes: Any) -> Any:
    """A run of four updates on one rollout, unless changed. Its random numbers are those of its seed alone."""
    run = trainer(folder, **changes)
    run.train()
    return run


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if bool((before[name] != after[name]).any())}


def one_batch(run: Any) -> dict[str, Any]:
    """The first batch of a rollout, as an update on it would find it."""
    run.model.train()
    run.current_gradient_accumulation_steps = 1
    return run._prepare_inputs(next(iter(run.get_train_dataloader())))


def go_astray(run: Any, scale: float = 0.05) -> None:
    """Move the policy out of the trust region, as updates would."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in run.model.parameters():
            p.add_(scale * torch.randn_like(p))


def full_softmax(run: Any, batch: dict[str, Any]) -> torch.Tensor:
    """[B, T, V] log-probabilities of the policy as it is now, by the model's own forward, without any fused head."""
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    T = batch["completion_ids"].shape[1]
    logits = run.model(input_ids=ids, attention_mask=mask).logits[:, -T - 1 : -1]
    return (logits.float() / run.temperature).log_softmax(-1)


def of_sampled(log_probs: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    return log_probs.gather(-1, batch["completion_ids"][..., None])[..., 0]


def loss_mask(batch: dict[str, Any]) -> torch.Tensor:
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    return mask.bool()


def loss_and_gradient(run: Any, batch: dict[str, Any]) -> tuple[float, torch.Tensor]:
    loss = run._compute_loss(run.model, batch)
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, parameters)
    return loss.item(), torch.cat([g.flatten() for g in grads])


def reported(run: Any, name: str) -> float:
    """The newest value of a metric that is not logged yet."""
    return run._metrics["train"][name][-1]


def lora(**changes: Any) -> LoraConfig:
    modules = ["q_proj", "v_proj", "up_proj", "down_proj"]
    return LoraConfig(**{"r": 8, "lora_alpha": 32, "target_modules": modules, **changes})


# ---------------------------------------------------------------------- adapters and references


@pytest.mark.parametrize("tail", ["bucket", "floor"])
@pytest.mark.parametrize("changes", [{}, {"use_dora": True}, {"lora_dropout": 0.5}])
def test_of_a_lora_model_only_the_adapter_moves(tmp_path: Path, changes: dict[str, Any], tail: str) -> None:
    run = trainer(tmp_path, peft_config=lora(**changes), tail=tail)
    before = weights(run)
    run.train()
    assert moved(before, weights(run)) == {name for name in before if "lora_" in name}
    assert_held(run)


@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning")  # peft's own
def test_of_prompt_tuning_only_the_prompt_moves(tmp_path: Path) -> None:
    """Virtual tokens stand in front of every sequence: completions are found from its end."""
    tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    run = trainer(tmp_path, peft_config=tuning, learning_rate=1.0)
    before = weights(run)
    run.train()
    assert moved(before, weights(run)) == {name for name in before if "prompt_encoder" in name}
    assert_held(run)
    batch = run._buffered_inputs[3]  # by the policy before the updates, whose prompt is known
    with torch.no_grad():
        run.model.prompt_encoder["default"].embedding.weight.copy_(before["prompt_encoder.default.embedding.weight"])
        now = of_sampled(full_softmax(run, batch), batch)
    mask = loss_mask(batch)
    # Two ways to the same log-softmax in fp32 of logits below 10: a few eps of 1e-7.
    torch.testing.assert_close(batch["old_per_token_logps"][mask], now[mask], rtol=0, atol=1e-5)


def reference_kl(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> float:
    """TRL's estimate from the sampled tokens."""
    difference = reference - policy
    return (difference.exp() - difference - 1)[mask].mean().item()


@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_the_old_policy_of_lora_is_the_adapters_and_not_the_references(tmp_path: Path, tail: str) -> None:
    """Both are the same model, with its adapter on and off. Here they differ from the start."""
    run = trained(tmp_path, peft_config=lora(init_lora_weights=False), beta=0.1, tail=tail)
    assert_held(run)
    assert min(logged(run, "kl")) > 0.3
    first = run._buffered_inputs[0]
    kl = reference_kl(first["old_per_token_logps"], first["ref_per_token_logps"], loss_mask(first))
    assert logged(run, "kl")[0] == pytest.approx(kl, rel=1e-5)  # summed in fp32 in another order
    with torch.no_grad(), run.model.disable_adapter():
        reference = of_sampled(full_softmax(run, first), first)
    mask = loss_mask(first)
    torch.testing.assert_close(first["ref_per_token_logps"][mask], reference[mask], rtol=0, atol=1e-5)


def test_a_new_adapter_starts_at_its_reference_and_leaves_it(tmp_path: Path) -> None:
    run = trained(tmp_path, peft_config=lora(), beta=0.1)
    assert_held(run)
    assert abs(logged(run, "kl")[0]) < 1e-9
    assert min(logged(run, "kl")[1:]) > 1e-2


def test_an_adapter_that_was_trained_before_is_its_own_reference(tmp_path: Path) -> None:
    model = get_peft_model(tiny_models.build("dense")[0], lora(init_lora_weights=False))
    run = trainer(tmp_path, model=model, beta=0.1)
    before = weights(run)
    run.train()
    assert moved(before, weights(run)) == {name for name in before if "lora_" in name and ".default." in name}
    assert_held(run)
    assert abs(logged(run, "kl")[0]) < 1e-9
    assert min(logged(run, "kl")[1:]) > 1e-2


def test_a_reference_model_stays_where_it_was(tmp_path: Path) -> None:
    run = trainer(tmp_path / "out", model=tiny_models.save("dense", tmp_path / "model"), beta=0.1, max_steps=8)
    before = weights(run)
    run.train()
    assert_held(run)
    reference = {name: p.detach() for name, p in run.ref_model.named_parameters()}
    assert furthest(before, reference) == 0
    assert furthest(before, weights(run)) > 1e-2
    assert abs(logged(run, "kl")[0]) < 1e-9
    # The second rollout is scored by another policy than its reference.
    assert logged(run, "troll/kl_before/max")[4] < 1e-9
    assert logged(run, "kl")[4] > 1e-2


def test_a_reference_model_may_follow(tmp_path: Path) -> None:
    folder = tiny_models.save("dense", tmp_path / "model")
    follow = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}
    run = trained(tmp_path / "out", model=folder, beta=0.1, **follow)
    assert_held(run)
    reference = {name: p.detach() for name, p in run.ref_model.named_parameters()}
    assert furthest(weights(run), reference) == 0


# ---------------------------------------------------------------------- precision and memory


def in_half(**changes: Any) -> torch.nn.Module:
    return tiny_models.build("dense", **changes)[0].to(torch.bfloat16)


@pytest.mark.parametrize("tail", ["bucket", "floor"])
@pytest.mark.parametrize("cast_lm_head_to_fp32", [False, True])
def test_a_model_in_half_precision_trains(tmp_path: Path, tail: str, cast_lm_head_to_fp32: bool) -> None:
    run = trainer(tmp_path, model=in_half(), tail=tail, cast_lm_head_to_fp32=cast_lm_head_to_fp32)
    before = weights(run)
    run.train()
    assert moved(before, weights(run)) == set(before)
    assert_held(run)
    head = run.model.get_output_embeddings().weight
    assert head.dtype == (torch.float32 if cast_lm_head_to_fp32 else torch.bfloat16)
    for batch in run._buffered_inputs:  # what the trust region is made of is never rounded to half precision
        assert batch["old_per_token_logps"].dtype == torch.float32
        assert {old.log_probs.dtype for old in batch["troll_old_policy"]} == {torch.float32}


@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_autocast_computes_in_half_precision_and_keeps_weights_and_policies_in_full(tmp_path: Path, tail: str) -> None:
    run = trained(tmp_path / "half", bf16=True, tail=tail)
    assert_held(run)
    full = trained(tmp_path / "full", tail=tail)
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert run._buffered_inputs[0]["old_per_token_logps"].dtype == torch.float32
    # Generation runs outside of autocast, so both have the same first rollout and score it in other precisions: apart
    # by more than fp32 could be, by less than the eight bits of bf16, 1 in 256, make of a log-probability of 10.
    assert torch.equal(run._buffered_inputs[0]["completion_ids"], full._buffered_inputs[0]["completion_ids"])
    mine, exact = (x._buffered_inputs[0]["old_per_token_logps"] for x in (run, full))
    assert 1e-4 < (mine - exact).abs().max() < 10 / 256
    assert logged(run, "loss")[0] == pytest.approx(logged(full, "loss")[0], abs=1e-3)


@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
def test_a_small_base_with_an_adapter_in_other_precision_trains(tmp_path: Path, adapter: torch.dtype) -> None:
    """What is left of QLoRA without bitsandbytes, which needs a GPU: the types, and what TRL does about them.

    A model that says it is quantised gets its adapter in bf16, any other one in fp32.
    """
    model = in_half()
    if adapter == torch.bfloat16:
        model.is_loaded_in_4bit = True
    run = trainer(tmp_path, model=model, peft_config=lora(), bf16=True)
    before = weights(run)
    run.train()
    kinds = {name: p.dtype for name, p in run.model.named_parameters()}
    assert {kinds[name] for name in kinds if "lora_" in name} == {adapter}
    assert {kinds[name] for name in kinds if "lora_" not in name} == {torch.bfloat16}
    assert moved(before, weights(run)) == {name for name in before if "lora_" in name}
    assert_held(run)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("adapter", [None, "lora"])
def test_gradient_checkpointing_changes_no_weight(tmp_path: Path, use_reentrant: bool, adapter: str | None) -> None:
    changes = {} if adapter is None else {"peft_config": lora()}
    plain = trained(tmp_path / "plain", **changes)
    how = {"use_reentrant": use_reentrant}
    run = trained(tmp_path / "saved", gradient_checkpointing=True, gradient_checkpointing_kwargs=how, **changes)
    assert_held(run)
    assert run.model.is_gradient_checkpointing
    # Layers are computed twice, by the same kernels on the same numbers.
    assert furthest(weights(plain), weights(run)) == 0
    assert logged(run, "loss") == logged(plain, "loss")


# ---------------------------------------------------------------------- evaluation, callbacks, logging


@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_evaluation_reports_the_same_metrics_and_disturbs_nothing(tmp_path: Path, tail: str) -> None:
    """Evaluation draws random numbers, but the one rollout of this run is made before: training must not notice."""
    plain = trained(tmp_path / "plain", tail=tail)
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    run = trained(tmp_path / "out", tail=tail, eval_dataset=prompts(4), **evaluation)
    assert_held(run)
    assert furthest(weights(plain), weights(run)) == 0
    clock = {"step_time"}
    for a, b in zip(plain.state.log_history[:4], [x for x in run.state.log_history if "loss" in x], strict=True):
        assert {k: v for k, v in a.items() if k not in clock} == {k: v for k, v in b.items() if k not in clock}
    evaluations = [x for x in run.state.log_history if "eval_loss" in x]
    assert [x["step"] for x in evaluations] == [1, 2, 3, 4]
    for entry in evaluations:
        names = {name for name in entry if "troll/" in name}
        assert {f"eval_{name}" for name in run.state.log_history[0] if name.startswith("troll/")} == names
        # What is evaluated was generated by the same policy: however far training went, there is no distance.
        assert entry["eval_troll/kl_before/max"] < 1e-9
        assert entry["eval_troll/projected_fraction"] == 0
        assert entry["eval_troll/ratio/max"] == pytest.approx(1, abs=1e-6)
        assert not any(name.startswith("eval_clip_ratio") for name in entry)


def test_evaluation_alone_works_before_and_after_training(tmp_path: Path) -> None:
    run = trainer(tmp_path, eval_dataset=prompts(8))
    before = weights(run)
    assert run.evaluate()["eval_troll/kl_before/max"] < 1e-9
    assert furthest(before, weights(run)) == 0
    run.train()
    assert_held(run)
    metrics = run.evaluate()
    assert metrics["eval_troll/kl_before/max"] < 1e-9
    assert metrics["eval_troll/support_size/old"] > 1


@pytest.mark.parametrize("estimator", ["dr_grpo", "reinforce_pp_baseline"])
def test_in_evaluation_a_group_has_its_own_size(tmp_path: Path, estimator: str) -> None:
    """Two completions per prompt instead of four, eight in a batch instead of 32; and all of them are logged."""

    def height(completions: list[str], **_: Any) -> list[float]:
        return [sum(map(ord, completion)) / 1000 for completion in completions]

    evaluation = {"per_device_eval_batch_size": 8, "num_generations_eval": 2, "log_completions": True}
    changes = {"advantage_estimator": estimator, "reward_funcs": height}
    run = trainer(tmp_path, eval_dataset=prompts(4), **changes, **evaluation)
    run.evaluate()
    table = pandas.read_parquet(tmp_path / "completions" / "completions_00000.parquet")
    assert len(table) == 8
    shown = torch.tensor(table["advantage"].tolist()).reshape(4, 2)
    rewards = torch.tensor(table["height"].tolist()).reshape(4, 2)
    centred = rewards - rewards.mean(1, keepdim=True)
    assert centred.abs().max() > 0.05
    if estimator == "dr_grpo":
        torch.testing.assert_close(shown, centred)
    else:  # whitened over the tokens, which keeps the order
        assert torch.equal(shown.flatten().argsort(stable=True), centred.flatten().argsort(stable=True))


class Diary(TrainerCallback):
    """Writes down what it is called for, and stops after so many updates."""

    def __init__(self, stop: int) -> None:
        self.stop, self.events, self.norms = stop, [], []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.events.append("begin")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.norms.append(sum(p.grad.square().sum().item() for p in model.parameters()))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        self.events.append("troll/kl_after/max" in (logs or {}))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.stop

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.events.append("end")


def test_callbacks_see_gradients_and_metrics_and_may_stop_the_training(tmp_path: Path) -> None:
    diary = Diary(stop=3)
    run = trained(tmp_path, max_steps=8, callbacks=[diary])
    assert run.state.global_step == 3
    assert diary.events == ["begin", True, True, True, False, "end"]  # the last log is the summary of the run
    assert len(diary.norms) == 3
    assert min(diary.norms) > 1e-4


@pytest.mark.parametrize("gradient_accumulation_steps", [1, 2])
def test_over_several_updates_means_are_averaged_and_extremes_are_extremes(
    tmp_path: Path, gradient_accumulation_steps: int
) -> None:
    changes = {"gradient_accumulation_steps": gradient_accumulation_steps, "max_steps": 8}
    every = trained(tmp_path / "every", **changes)
    together = trained(tmp_path / "together", logging_steps=4, **changes)
    names = [name for name in every.state.log_history[0] if name.startswith("troll/")]
    for name in names:
        values = logged(every, name)
        assert len(values) == 8
        parts = values[:4], values[4:]
        rule = max if name.endswith("/max") else min if name.endswith("/min") else lambda part: sum(part) / len(part)
        assert logged(together, name) == pytest.approx([rule(part) for part in parts], rel=1e-6, abs=1e-9), name
    assert {"troll/ratio/min", "troll/ratio/max", "troll/kl_before/max", "troll/solver_steps/max"} <= set(names)
    assert {"troll/sequence_kl_before/max", "troll/sequence_kl_after/max"} <= set(names)
    largest = logged(every, "troll/kl_before/max")[:4]
    assert max(largest) > 1.1 * sum(largest) / 4  # so that the mean in its place would be seen


@pytest.mark.parametrize("training", [True, False])
def test_what_is_logged_of_several_values_depends_on_what_they_are(tmp_path: Path, training: bool) -> None:
    run = trainer(tmp_path)
    run.model.train(training)
    values = {
        "troll/kl_before/max": 4,
        "troll/ratio/min": 1,
        "troll/mix": 7 / 3,
        "troll/unconverged_tokens": 7,
        "x/max": 7 / 3,
    }
    for name in values:
        run._metrics["train" if training else "eval"][name] = [1.0, 2.0, 4.0]
    run.log({})
    prefix = "" if training else "eval_"
    logged_now = run.state.log_history[-1]
    assert {name: logged_now[prefix + name] for name in values} == pytest.approx(values)


@pytest.mark.parametrize(("trust_region", "clips"), [("troll", False), ("none", False), ("clip", True)])
def test_the_share_of_clipped_tokens_is_reported_where_there_is_a_clip(
    tmp_path: Path, trust_region: str, clips: bool
) -> None:
    run = trained(tmp_path, trust_region=trust_region, measure_kl=True, eval_dataset=prompts(4), eval_strategy="steps")
    names = {name for entry in run.state.log_history for name in entry}
    assert any(name.startswith("clip_ratio/") for name in names) == clips
    assert any(name.startswith("eval_clip_ratio/") for name in names) == clips
    if clips:
        assert max(logged(run, "clip_ratio/region_mean")) > 0.1
    # What happened to the policy is reported either way, what a projection did only where there is one.
    assert max(logged(run, "troll/kl_before/max")) > 0.1
    assert bool(logged(run, "troll/projected_fraction")) == (trust_region == "troll")


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "reinforce_pp"])
def test_completions_are_printed_and_written_with_their_advantages(
    tmp_path: Path, estimator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"log_completions": True, "num_completions_to_print": 2, "advantage_estimator": estimator}
    run = trainer(tmp_path, max_steps=8, **changes)
    run.train()
    assert_held(run)
    printed = capsys.readouterr().out
    for word in ("Prompt", "Completion", "lower_case", "Advantage", "say "):
        assert word in printed
    files = sorted((tmp_path / "completions").glob("*.parquet"))
    assert [file.name for file in files] == [f"completions_{i:05d}.parquet" for i in range(1, 9)]
    table = pandas.read_parquet(files[-1])
    assert len(table) == 32
    assert table["step"].unique().tolist() == [8]
    assert table["lower_case"].tolist() == pytest.approx(lower_case(table["completion"].tolist()))
    # In the order of the rollout, four of a prompt after another; training has them shuffled.
    shown = torch.tensor(table["advantage"].tolist())
    used = torch.cat([batch["advantages"] for batch in run._buffered_inputs])
    used = used if used.dim() == 1 else used[:, 0]
    torch.testing.assert_close(shown.sort().values, used.sort().values.to(shown.dtype), rtol=1e-6, atol=1e-7)
    rewards = torch.tensor(table["lower_case"].tolist()).reshape(8, 4)
    centred = rewards - rewards.mean(1, keepdim=True)
    if estimator == "dr_grpo":
        torch.testing.assert_close(shown.reshape(8, 4), centred.to(shown.dtype), rtol=1e-5, atol=1e-6)
    if estimator == "grpo":
        torch.testing.assert_close(
            shown.reshape(8, 4), (centred / (rewards.std(1, keepdim=True) + 1e-4)).to(shown.dtype)
        )


# ---------------------------------------------------------------------- rewards


async def vowels(completions: list[Any], **_: Any) -> list[float]:
    return [sum(c in "aeiou" for c in text_of(completion)) / 4 for completion in completions]


def capitals_if_any(completions: list[Any], log_metric: Any = None, **_: Any) -> list[float | None]:
    """Cannot score what has no capital."""
    shares = [sum(c.isupper() for c in text_of(completion)) / 8 for completion in completions]
    log_metric("scored", sum(x > 0 for x in shares) / len(shares))
    return [x if x > 0 else None for x in shares]


def rollout_of(run: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """A whole rollout before it is shuffled, and its weighted rewards, groups of four, NaN where nothing scored."""
    run.model.train()
    output = run._generate_and_score_completions(next(iter(run.get_train_dataloader())))
    values = torch.tensor([list(x) for x in run._logs["rewards"].values()])  # [functions, B]
    total = (values * run.reward_weights[:, None]).nansum(0)
    return output, total.masked_fill(values.isnan().all(0), math.nan).reshape(-1, 4)


REWARDS = [lower_case, vowels, capitals_if_any]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_rewards_are_weighed_whether_they_come_at_once_later_or_not_at_all(tmp_path: Path, estimator: str) -> None:
    changes = {"reward_funcs": REWARDS, "reward_weights": [1.0, 0.5, 2.0], "advantage_estimator": estimator}
    output, rewards = rollout_of(trainer(tmp_path / "a", **changes))
    mean = rewards.mean(1, keepdim=True)
    expected = {
        "grpo": (rewards - mean) / (rewards.std(1, keepdim=True) + 1e-4),
        "dr_grpo": rewards - mean,
        "rloo": (rewards - mean) * 4 / 3,
    }[estimator]
    torch.testing.assert_close(output["advantages"].reshape(-1, 4), expected, rtol=1e-5, atol=1e-6)
    run = trained(tmp_path / "b", **changes)
    assert_held(run)
    means = {name: logged(run, f"rewards/{name}/mean")[0] for name in ("lower_case", "vowels", "capitals_if_any")}
    assert len(set(means.values())) == 3
    assert 0 < logged(run, "scored")[0] < 1
    assert logged(run, "reward")[0] < means["lower_case"] + 0.5 * means["vowels"] + 2 * means["capitals_if_any"]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
def test_a_completion_that_nothing_can_score_teaches_nothing(tmp_path: Path, estimator: str) -> None:
    run = trainer(tmp_path, reward_funcs=capitals_if_any, advantage_estimator=estimator)
    output, rewards = rollout_of(run)
    unscored = rewards.flatten().isnan()
    assert 0 < unscored.sum() < 32
    advantages = output["advantages"]
    assert bool(advantages.isfinite().all())
    assert bool((advantages[unscored] == 0).all())
    assert advantages[~unscored].abs().max() > 0.01
    run.train()
    assert all(bool(p.isfinite().all()) for p in weights(run).values())
    assert max(logged(run, "troll/kl_after/max")) <= 0.05 * (1 + 1e-5)
    assert max(logged(run, "troll/kl_before/max")) > 0.1


def test_a_rollout_that_nothing_can_score_changes_nothing(tmp_path: Path) -> None:
    def none(completions: list[Any], **_: Any) -> list[None]:
        return [None] * len(completions)

    run = trainer(tmp_path, reward_funcs=none, on_invalid_reward="mask")  # 'raise' ends the run
    before = weights(run)
    run.train()
    assert furthest(before, weights(run)) == 0
    assert logged(run, "loss") == [0] * 4
    assert max(logged(run, "troll/kl_before/max")) < 1e-9


@pytest.mark.parametrize("as_path", [True, False])
def test_a_model_gives_the_rewards(tmp_path: Path, as_path: bool) -> None:
    folder = tiny_models.save("reward", tmp_path / "judge")
    model, tokens = tiny_models.build("reward")
    judge = {"reward_funcs": folder if as_path else model, "reward_processing_classes": None if as_path else tokens}
    run = trainer(tmp_path / "out", **judge)
    before = {name: p.detach().clone() for name, p in run.reward_funcs[0].named_parameters()}
    _, rewards = rollout_of(run)
    texts = [a + b for a, b in zip(run._logs["prompt"], run._logs["completion"], strict=True)]
    for text, reward in zip(texts[:4], rewards.flatten()[:4].tolist(), strict=True):
        with torch.no_grad():  # one at a time, without padding
            alone = model(**tokens(text, return_tensors="pt")).logits.item()
        assert reward == pytest.approx(alone, rel=1e-4, abs=1e-5)
    run.train()
    assert_held(run)
    assert furthest(before, {name: p.detach() for name, p in run.reward_funcs[0].named_parameters()}) == 0


class Trouble:
    """A reward that fails once, at its n-th rollout."""

    __name__ = "trouble"

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        self.left -= 1
        if self.left == 0:
            raise ConnectionError("the judge does not answer")
        return lower_case(completions)


@pytest.mark.parametrize("at", [1, 2])
def test_after_an_error_in_a_reward_training_goes_on(tmp_path: Path, at: int) -> None:
    head = trl_utils._ChunkedLogProbFunction
    run = trainer(tmp_path, reward_funcs=Trouble(at), max_steps=8)
    with pytest.raises(InputError, match="'trouble' raised ConnectionError: the judge does not answer"):
        run.train()
    assert trl_utils._ChunkedLogProbFunction is head
    # Outside of a rollout and an update, the trainer scores as TRL does, also after this.
    batch = {"input_ids": torch.tensor([[10, 20, 30, 40]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    with torch.no_grad():
        scored, _, _ = run._get_per_token_logps_and_entropies(run.model, **batch, logits_to_keep=2)
        exact = run.model(**batch).logits[:, 1:3].log_softmax(-1).gather(-1, torch.tensor([[[30], [40]]]))[..., 0]
    torch.testing.assert_close(scored, exact, rtol=0, atol=1e-5)
    run.train()
    assert run.state.global_step == 8
    assert_held(run, least=0.1)


def test_after_an_error_in_the_model_training_goes_on(tmp_path: Path) -> None:
    """It fails inside of a forward, where TRL's head is exchanged for ours."""
    head = trl_utils._ChunkedLogProbFunction
    run = trainer(tmp_path, max_steps=8)

    def fail(*_: Any) -> None:
        if run.model.training and torch.is_grad_enabled() and run.state.global_step == 1:
            raise MemoryError("out of memory")

    hook = run.model.model.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        run.train()
    assert run.state.global_step == 1
    assert trl_utils._ChunkedLogProbFunction is head
    assert run._pass is None
    hook.remove()
    run._step = 0  # TRL counts on; begin with a new rollout
    run.train()
    assert run.state.global_step == 8
    assert_held(run)


def test_a_reward_that_is_not_a_number_stops_the_training_before_it_does_harm(tmp_path: Path) -> None:
    def infinite(completions: list[Any], **_: Any) -> list[float]:
        return [math.inf if i == 5 else 0.0 for i in range(len(completions))]

    run = trainer(tmp_path, reward_funcs=[lower_case, infinite])
    before = weights(run)
    with pytest.raises(InputError, match=r"'infinite' returned inf for completion 5"):
        run.train()
    assert furthest(before, weights(run)) == 0


# ---------------------------------------------------------------------- the loss: options of TRL


@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_the_entropy_bonus_is_that_of_the_whole_distribution(tmp_path: Path, tail: str) -> None:
    run = trainer(tmp_path / "a", tail=tail, entropy_coef=0.3)
    batch = one_batch(run)
    go_astray(run)
    with_bonus, gradient = loss_and_gradient(run, batch)
    assert reported(run, "troll/projected_fraction") > 0.9
    run.entropy_coef = 0.0
    without, plain = loss_and_gradient(run, batch)
    log_probs = full_softmax(run, batch)
    entropy = -(log_probs.exp() * log_probs).sum(-1)[loss_mask(batch)].mean()
    assert reported(run, "entropy") == pytest.approx(entropy.item(), rel=1e-5)
    assert reported(run, "troll/entropy") == pytest.approx(entropy.item(), rel=1e-5)
    assert with_bonus - without == pytest.approx(-0.3 * entropy.item(), rel=1e-5)
    slope = torch.cat([g.flatten() for g in torch.autograd.grad(entropy, list(run.model.parameters()))])
    # Differences of gradients of up to 10 in fp32, eps 1e-7, summed over 64 tokens
    torch.testing.assert_close(gradient - plain, -0.3 * slope, rtol=1e-3, atol=3e-5)
    assert slope.abs().max() > 1e-2
    run = trained(tmp_path / "b", tail=tail, entropy_coef=0.3)
    assert_held(run)
    assert logged(run, "entropy_coef") == [0.3] * 4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_the_loss_of_an_update_is_the_one_of_the_library(tmp_path: Path, tail: str, temperature: float) -> None:
    """Of the full logits, which TRL never makes; far from the old policy, with ratios that a clip would cut."""
    run = trainer(tmp_path, tail=tail, temperature=temperature, loss_type="bnpo")
    batch = one_batch(run)
    with torch.no_grad():
        old = sparsify(full_softmax(run, batch), batch["completion_ids"], loss_mask=loss_mask(batch))
    go_astray(run)
    loss, gradient = loss_and_gradient(run, batch)
    mask, logits = loss_mask(batch), full_softmax(run, batch)
    proposal = (
        restrict(logits, old, loss_mask=mask)
        if tail == "bucket"
        else sparsify(logits, batch["completion_ids"], loss_mask=mask)
    )
    expected, metrics = troll_loss(proposal, old, batch["advantages"], mask, kl_bound=run.args.kl_bound, tail=tail)
    grads = torch.autograd.grad(expected, list(run.model.parameters()))
    assert metrics["ratio/max"] > 1.2
    assert metrics["projected_fraction"] > 0.5
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    # fp32, over 64 tokens and 263 logits each, in another order
    torch.testing.assert_close(gradient, torch.cat([g.flatten() for g in grads]), rtol=1e-3, atol=1e-5)
    assert gradient.abs().max() > 0.05
    for name, value in metrics.items():
        if name not in ("entropy", "skipped_tokens"):  # one is exact here and a bound there, the other is the library's
            assert reported(run, f"troll/{name}") == pytest.approx(value.item(), rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "luspo"])
@pytest.mark.parametrize("training", [True, False])
def test_the_regression_is_weighed_as_trl_weighs_its_own_loss(tmp_path: Path, loss_type: str, training: bool) -> None:
    """An advantage of −x/ratio makes x the loss of a token: so TRL itself says what the regression adds up to.

    Some of these sequences are truncated and left out: they have no token, and a place in a mean over sequences.
    """
    run = trainer(tmp_path, model=ends_often(), loss_type=loss_type, mask_truncated_completions=True)
    batch = one_batch(run)
    go_astray(run)
    run.current_gradient_accumulation_steps = 3
    run.model.train(training)
    mask = loss_mask(batch)
    assert 0 < (~mask.any(1)).sum() < 8
    nothing = {**batch, "advantages": torch.zeros(8)}
    pull, gradient = loss_and_gradient(run, nothing)
    # Token by token, from the full softmax, by the functions that the library offers
    old = PackedPolicy.stack(batch["troll_old_policy"]).unpack()
    with torch.no_grad():
        step = constrain(restrict(full_softmax(run, batch), old, loss_mask=mask), old, 0.05, mask, tail="bucket")
    assert step.regression[mask].mean() > 1e-2
    run.args.regression_coef = 0.0
    assert loss_and_gradient(run, nothing)[0] == 0
    as_advantages = {**batch, "advantages": -step.regression / step.log_ratio.exp()}
    assert pull == pytest.approx(loss_and_gradient(run, as_advantages)[0], rel=1e-4)
    run.args.regression_coef = 2.5
    more, gradient_of_more = loss_and_gradient(run, nothing)
    assert more == pytest.approx(2.5 * pull, rel=1e-6)
    torch.testing.assert_close(gradient_of_more, 2.5 * gradient, rtol=1e-4, atol=1e-7)
    # And it pulls: a small step against its gradient makes it smaller.
    run.args.regression_coef = 1.0
    with torch.no_grad():
        parts = gradient.split([p.numel() for p in run.model.parameters()])
        for p, g in zip(run.model.parameters(), parts, strict=True):
            p.sub_(1e-3 / gradient.norm() * g.view_as(p))
    assert loss_and_gradient(run, nothing)[0] < pull


@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_without_a_trust_region_the_entropy_bonus_has_the_gradient_of_trl(tmp_path: Path, tail: str) -> None:
    results = []
    mine = {"trust_region": "none", "measure_kl": True, "tail": tail}
    for make, changes in ((stock_trainer, {}), (trainer, mine)):
        run = make(tmp_path, entropy_coef=0.3, **changes)
        run.epsilon_low = run.epsilon_high = math.inf
        batch = one_batch(run)
        go_astray(run)
        results.append(loss_and_gradient(run, batch))
    (loss, gradient), (my_loss, my_gradient) = results
    assert my_loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(my_gradient, gradient, rtol=1e-3, atol=1e-5)  # another order of the same fp32 sums
    assert gradient.abs().max() > 0.1


def test_the_coefficient_of_the_entropy_bonus_adapts(tmp_path: Path) -> None:
    adapt = {"use_adaptive_entropy": True, "entropy_target": 100.0, "entropy_coef_delta": 0.01, "entropy_coef": 0.1}
    run = trained(tmp_path, **adapt)
    assert_held(run)
    assert logged(run, "entropy_coef") == pytest.approx([0.11, 0.12, 0.13, 0.14])  # always below its target


@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_only_tokens_of_high_entropy_get_their_advantage(tmp_path: Path, tail: str) -> None:
    run = trainer(tmp_path / "a", tail=tail, top_entropy_quantile=0.25)
    batch = one_batch(run)
    go_astray(run)
    loss, gradient = loss_and_gradient(run, batch)
    run.top_entropy_quantile = 1.0
    everywhere, _ = loss_and_gradient(run, batch)
    with torch.no_grad():
        log_probs = full_softmax(run, batch)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    mask = loss_mask(batch)
    high = mask & (entropy >= entropy[mask].quantile(0.75))
    assert high.sum() == math.ceil(mask.sum() / 4)
    # The same as no advantage for the others. The pull of the regression is not a matter of rewards and stays for all.
    chosen = {**batch, "advantages": batch["advantages"][:, None] * high}
    expected, expected_gradient = loss_and_gradient(run, chosen)
    assert loss == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    assert abs(loss - everywhere) > 1e-2
    assert_held(trained(tmp_path / "b", tail=tail, top_entropy_quantile=0.25))


def test_sequences_far_off_policy_lose_a_negative_advantage(tmp_path: Path) -> None:
    run = trainer(tmp_path / "a", off_policy_mask_threshold=0.0)
    batch = one_batch(run)
    go_astray(run)
    loss, gradient = loss_and_gradient(run, batch)
    run.off_policy_mask_threshold = None
    all_of_them, _ = loss_and_gradient(run, batch)
    # How far a sequence is: the mean of log π_old(o) − log π(o), of the projected policy, since that is what is updated
    scored = []
    score = run._get_per_token_logps_and_entropies
    run._get_per_token_logps_and_entropies = lambda *a, **k: scored.append(score(*a, **k)) or scored[0]
    run._compute_loss(run.model, batch)
    run._get_per_token_logps_and_entropies = score
    mask, projected = loss_mask(batch), scored[0][0].detach()
    far = ((batch["old_per_token_logps"] - projected) * mask).sum(1) / mask.sum(1) > 0
    dropped = far & (batch["advantages"] < 0)
    assert 0 < dropped.sum() < (batch["advantages"] < 0).sum()
    kept = {**batch, "advantages": batch["advantages"].masked_fill(dropped, 0.0)}
    expected, expected_gradient = loss_and_gradient(run, kept)
    assert loss == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    assert abs(loss - all_of_them) > 1e-3
    assert_held(trained(tmp_path / "b", off_policy_mask_threshold=0.0))


def ends_often() -> torch.nn.Module:
    """A model of which every sixteenth byte ends a completion."""
    model = tiny_models.build("dense")[0]
    model.generation_config.eos_token_id = [2, *range(7, 263, 16)]
    return model


@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_truncated_completions_are_left_out(tmp_path: Path, tail: str) -> None:
    run = trainer(tmp_path / "a", model=ends_often(), tail=tail, mask_truncated_completions=True)
    batch = one_batch(run)
    go_astray(run)
    mask = loss_mask(batch)
    whole, cut = mask.any(1), ~mask.any(1)
    assert whole.any()
    assert cut.any()
    loss, gradient = loss_and_gradient(run, batch)
    with torch.no_grad():
        log_probs = full_softmax(run, batch)
    entropy = -(log_probs.exp() * log_probs).sum(-1)[mask].mean().item()
    assert reported(run, "troll/entropy") == pytest.approx(entropy, rel=1e-5)  # of the tokens that count
    # Their advantages, and the old policy they have, do not matter.
    other = {**batch, "advantages": batch["advantages"].masked_fill(cut, 100.0)}
    other["old_per_token_logps"] = batch["old_per_token_logps"].masked_fill(~mask, -30.0)
    expected, expected_gradient = loss_and_gradient(run, other)
    assert loss == expected
    assert torch.equal(gradient, expected_gradient)
    assert_held(trained(tmp_path / "b", model=ends_often(), tail=tail, mask_truncated_completions=True))


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "luspo"])
@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_where_every_completion_is_truncated_nothing_happens(tmp_path: Path, tail: str, loss_type: str) -> None:
    changes = {"tail": tail, "loss_type": loss_type, "mask_truncated_completions": True, "max_completion_length": 2}
    no_end = {"suppress_tokens": [tiny_models.tokenizer().eos_token_id, tiny_models.tokenizer().pad_token_id]}
    run = trainer(tmp_path, generation_kwargs=no_end, max_steps=5, **changes)
    before = weights(run)
    run.train()
    assert logged(run, "completions/clipped_ratio") == [1, 1]
    assert furthest(before, weights(run)) == 0
    assert logged(run, "loss") == [0] * 5
    for name in run.state.log_history[0]:
        if name.startswith("troll/"):
            assert logged(run, name) == [0] * 5, name


def test_the_policies_are_those_of_the_temperature(tmp_path: Path) -> None:
    run = trainer(tmp_path / "a", temperature=0.7)
    batch = one_batch(run)
    with torch.no_grad():
        log_probs = full_softmax(run, batch)  # at the temperature
    mask = loss_mask(batch)
    torch.testing.assert_close(
        batch["old_per_token_logps"][mask], of_sampled(log_probs, batch)[mask], rtol=0, atol=2e-5
    )
    run._compute_loss(run.model, batch)
    entropy = -(log_probs.exp() * log_probs).sum(-1)[mask].mean().item()
    assert reported(run, "troll/entropy") == pytest.approx(entropy, rel=1e-5)
    kept = log_probs.exp().topk(64).values.sum(-1)[mask].mean().item()
    assert reported(run, "troll/kept_mass/old") == pytest.approx(
        kept, abs=0.02
    )  # the sampled token may stand in for one
    for tail in ("bucket", "floor"):
        assert_held(trained(tmp_path / tail, temperature=0.7, tail=tail))
    assert_held(trained(tmp_path / "hot", temperature=1.5))


# ---------------------------------------------------------------------- schedules and data


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "luspo"])
@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_two_small_batches_make_the_update_of_a_large_one(tmp_path: Path, tail: str, loss_type: str) -> None:
    """Completions end anywhere, so that a batch weighed by its own number of tokens would not add up."""
    results = []
    for size, accumulation in ((16, 1), (8, 2)):
        run = trainer(
            tmp_path,
            model=ends_often(),
            tail=tail,
            loss_type=loss_type,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            optim="sgd",  # so that a difference in the gradient is one in the weights, and no larger
            learning_rate=0.1,
            max_grad_norm=0.0,
        )
        run.train()
        assert min(logged(run, "troll/projected_fraction")[1:]) > 0.05
        assert max(logged(run, "troll/kl_after/max")) <= 0.05 * (1 + 1e-5)
        results.append(run)
    large, small = results
    assert logged(small, "loss") == pytest.approx(logged(large, "loss"), rel=1e-4, abs=1e-5)
    # fp32, in four updates of up to 1e-1 each
    assert furthest(weights(large), weights(small)) < 1e-5
    assert max(logged(large, "troll/regression")) > 1e-3


def test_the_average_over_tokens_of_each_batch_is_averaged_over_an_update(tmp_path: Path) -> None:
    """'bnpo' divides by the tokens of a batch, so two batches are not one: their gradients are averaged."""
    run = trainer(tmp_path, model=ends_often(), loss_type="bnpo", gradient_accumulation_steps=2)
    one_batch(run)
    go_astray(run)
    parts = []
    for accumulation in (1, 2):
        run.current_gradient_accumulation_steps = accumulation
        parts.append(loss_and_gradient(run, run._buffered_inputs[0]))
    assert reported(run, "troll/regression") > 1e-3
    assert parts[1][0] == pytest.approx(parts[0][0] / 2, rel=1e-6)
    torch.testing.assert_close(parts[1][1], parts[0][1] / 2, rtol=1e-5, atol=1e-8)


def test_a_data_set_may_be_a_stream(tmp_path: Path) -> None:
    listed = trained(tmp_path / "a", shuffle_dataset=False, max_steps=8)
    run = trained(
        tmp_path / "b", shuffle_dataset=False, max_steps=8, train_dataset=prompts().to_iterable_dataset(num_shards=1)
    )
    assert_held(run)
    assert furthest(weights(listed), weights(run)) == 0


@pytest.mark.parametrize(("n", "epochs"), [(8, 3), (9, 3)])
def test_a_few_prompts_are_enough_for_a_run(tmp_path: Path, n: int, epochs: int) -> None:
    """Eight make a rollout; what is left over is not used in that epoch."""
    run = trained(tmp_path, train_dataset=prompts(n), max_steps=-1, num_train_epochs=epochs)
    assert run.state.global_step == 4 * epochs
    assert_held(run)
    assert [i for i, x in enumerate(logged(run, "troll/kl_before/max")) if x < 1e-9] == [0, 4, 8]


def test_too_few_prompts_for_a_rollout_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="train_dataset has 7 prompts, fewer than the 8 of one rollout"):
        trainer(tmp_path, train_dataset=prompts(7))


def test_completions_may_be_padded_further(tmp_path: Path) -> None:
    plain = trained(tmp_path / "a", max_completion_length=6)
    run = trained(tmp_path / "b", max_completion_length=6, pad_to_multiple_of=16)
    assert run._buffered_inputs[0]["completion_ids"].shape[1] == 16
    assert_held(run)
    # Longer rows of attention, summed in another order, and Adam's steps of 1e-2 in between
    assert logged(run, "loss") == pytest.approx(logged(plain, "loss"), abs=1e-3)


# ---------------------------------------------------------------------- tools


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: Another number.

    Returns:
        Their sum.
    """
    return a + b


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'


class WithTools(TROLLTrainer):
    """An untrained model calls no tools: its first turn is written for it, in every second completion."""

    def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **named: Any) -> Any:
        ids, logprobs = super()._generate_single_turn(prompt_ids, *rest, **named)
        if not self._tokenizer.decode(prompt_ids[0]).endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n"):
            call = self._tokenizer(CALL)["input_ids"]
            ids = [call if i % 2 else x for i, x in enumerate(ids)]
        return ids, logprobs


def with_tools(folder: Path, **changes: Any) -> Any:
    model, tokens = tiny_models.build("dense", max_position_embeddings=2048)
    tokens.chat_template = qwen3_chat_template
    chats = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"1 + 2, {i}"}] for i in range(16)]})
    args = config(
        folder, **{"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 256, **changes}
    )
    run = WithTools(model, lower_case, args, chats, processing_class=tokens, tools=[add])
    run.generation_config.max_new_tokens = 6  # of one turn
    return run


def gradient_of_hidden_states(run: Any, batch: dict[str, Any]) -> torch.Tensor:
    """[B, T, H] gradient of the loss on the states that predict the completion's tokens."""
    states: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        output.last_hidden_state.retain_grad()
        states.append(output.last_hidden_state)

    hook = run.model.model.register_forward_hook(keep)
    run._compute_loss(run.model, batch).backward()
    hook.remove()
    run.model.zero_grad()
    T = batch["completion_ids"].shape[1]
    return states[-1].grad[:, -T - 1 : -1]


@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_what_a_tool_says_is_neither_projected_nor_counted(tmp_path: Path, tail: str) -> None:
    run = with_tools(tmp_path / "a", tail=tail)
    one_batch(run)
    batch = next(x for x in run._buffered_inputs if (x["tool_mask"] == 0).any())
    said = (batch["completion_mask"] == 1) & (batch["tool_mask"] == 0)
    text = run._tokenizer.decode(
        batch["completion_ids"][0][said[0]] if said[0].any() else batch["completion_ids"][said]
    )
    assert "<tool_response>\n3\n</tool_response>" in text  # the tool was called, and this is what it said
    go_astray(run)
    mask = loss_mask(batch)
    assert not (mask & said).any()
    gradient = gradient_of_hidden_states(run, batch)
    norms = gradient.norm(dim=-1)
    assert norms[mask].min() > 0
    assert norms[~mask].max() == 0
    assert reported(run, "troll/projected_fraction") > 0.5
    # Metrics are means over the tokens that count: their entropy, and not that of what the tool said.
    with torch.no_grad():
        log_probs = full_softmax(run, batch)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    assert reported(run, "troll/entropy") == pytest.approx(entropy[mask].mean().item(), rel=1e-5)
    assert abs(entropy[mask].mean() - entropy[mask | said].mean()) > 1e-3
    # With the tool's words taken for the model's, all of them are projected, and get a gradient.
    wrong = {**batch, "tool_mask": torch.ones_like(batch["tool_mask"])}
    assert gradient_of_hidden_states(run, wrong).norm(dim=-1)[said].min() > 0


def test_a_model_with_tools_trains(tmp_path: Path) -> None:
    run = with_tools(tmp_path, max_steps=5)  # the last one on a second rollout
    run.train()
    assert_held(run)
    assert logged(run, "tools/call_frequency") == [0.5, 0.5]
    assert logged(run, "tools/failure_frequency") == [0, 0]
    assert logged(run, "troll/kl_before/max")[4] < 1e-9


def play(texts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout of one's own, in which the environment says three tokens of eight."""
    return {
        "prompt_ids": [trainer._tokenizer(text)["input_ids"] for text in texts],
        "completion_ids": torch.randint(7, 263, (len(texts), 8)).tolist(),
        "logprobs": [[-5.0] * 8 for _ in texts],
        "env_mask": [[1, 1, 0, 0, 0, 1, 1, 1] for _ in texts],
    }


def player(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    model, tokens = tiny_models.build("dense")
    args = config(folder, **changes)
    return TROLLTrainer(model, lower_case, args, prompts(), processing_class=tokens, rollout_func=play)


def test_a_rollout_of_ones_own_may_have_words_of_others_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = player(tmp_path, monkeypatch)
    batch = one_batch(run)
    assert loss_mask(batch).sum(1).tolist() == [5] * 8
    go_astray(run)
    norms = gradient_of_hidden_states(run, batch).norm(dim=-1)
    assert norms[loss_mask(batch)].min() > 0
    assert norms[~loss_mask(batch)].max() == 0
    run = player(tmp_path, monkeypatch)
    run.train()
    assert_held(run)


def test_the_ratio_of_a_sequence_is_that_of_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = player(tmp_path, monkeypatch, importance_sampling_level="sequence", loss_type="grpo", kl_bound=math.inf)
    batch = one_batch(run)
    go_astray(run)
    run._compute_loss(run.model, batch)
    with torch.no_grad():
        log_ratio = of_sampled(full_softmax(run, batch), batch) - batch["old_per_token_logps"]
    mask = loss_mask(batch)
    ratios = ((log_ratio * mask).sum(1) / mask.sum(1)).exp()
    assert reported(run, "troll/ratio/max") == pytest.approx(ratios.max().item(), rel=1e-4)
    assert reported(run, "troll/ratio/min") == pytest.approx(ratios.min().item(), rel=1e-4)
    assert ratios.max() > 1.1


# ---------------------------------------------------------------------- several trainers in one process


def test_two_trainers_share_a_process(tmp_path: Path) -> None:
    """One trains inside of the other: in its reward, between generation and scoring, and between its updates."""
    alone = trained(tmp_path / "alone", tail="floor")
    inner = []

    def train_another(completions: list[Any], **_: Any) -> list[float]:
        state = torch.get_rng_state()  # both draw from one stream
        inner.append(trained(tmp_path / "inner", kind="moe"))
        torch.set_rng_state(state)
        return lower_case(completions)

    train_another.__name__ = "lower_case"

    class Between(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            inner.append(trained(tmp_path / "inner"))

    outer = trained(tmp_path / "outer", tail="floor", reward_funcs=train_another, callbacks=[Between()])
    assert len(inner) == 5
    for run in (outer, *inner):
        assert_held(run)
    assert furthest(weights(alone), weights(outer)) == 0
    assert furthest(weights(inner[1]), weights(inner[-1])) == 0


def test_trls_own_trainer_is_left_as_it_is(tmp_path: Path) -> None:
    before = stock_trainer(tmp_path / "a")
    before.train()
    trained(tmp_path / "b")
    after = stock_trainer(tmp_path / "c")
    after.train()
    assert furthest(weights(before), weights(after)) == 0
    assert not any(name.startswith("troll/") for entry in after.state.log_history for name in entry)


# ---------------------------------------------------------------------- what is published


def test_the_model_card_names_the_method_and_its_paper(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.create_model_card(model_name="small", dataset_name="bytes", tags=["mine"])
    card = ModelCard.load(tmp_path / "README.md")
    assert {"trl", "troll", "mine"} <= set(card.data.tags)
    assert "grpo" not in card.data.tags
    assert card.data.model_name == "small"
    assert "trained with TROLL" in card.text
    assert "GRPO" not in card.text
    assert "https://huggingface.co/papers/2510.03817" in card.text
    assert "TROLL: Trust Regions improve Reinforcement Learning for Large Language Models" in card.text
    assert "becker2025troll" in card.text
    assert set(run.model.model_tags) >= {"trl", "troll"}


def test_a_trained_model_is_pushed_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, Any] = {}

    def create(self: Any, repo_id: str, **_: Any) -> Any:
        sent["created"] = repo_id
        return SimpleNamespace(repo_id=f"someone/{repo_id.split('/')[-1]}")

    def upload(self: Any, *, repo_id: str, folder_path: str, **named: Any) -> str:
        files = {str(p.relative_to(folder_path)) for p in Path(folder_path).rglob("*") if p.is_file()}
        sent.update(repo_id=repo_id, files=files, **named)
        return "done"

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    run = trained(tmp_path, hub_model_id="someone/small-troll")
    assert run.push_to_hub(dataset_name="bytes", commit_message="trained") == "done"
    assert sent["created"] == sent["repo_id"] == "someone/small-troll"
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= sent["files"]
    assert sent["commit_message"] == "trained"
    card = ModelCard.load(tmp_path / "README.md")
    assert "troll" in card.data.tags
    assert "2510.03817" in card.text
    # What was sent is what was trained.
    loaded = type(run.model).from_pretrained(tmp_path)
    assert furthest(weights(run), {name: p.detach() for name, p in loaded.named_parameters()}) == 0


def test_the_arguments_of_a_run_are_written_and_read(tmp_path: Path) -> None:
    run = trained(tmp_path, kl_bound=0.02, save_strategy="steps", save_steps=4)
    assert max(logged(run, "troll/kl_after/max")) <= 0.02 * (1 + 1e-5)
    saved = torch.load(tmp_path / "checkpoint-4" / "training_args.bin", weights_only=False)
    assert saved.kl_bound == 0.02
    assert saved.updates_per_generation == 4
    assert json.loads(run.args.to_json_string())["kl_bound"] == 0.02
