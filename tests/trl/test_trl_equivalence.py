"""Where the trust region does not act, training is TRL's; where it does, the loss is ``troll_loss`` of the logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl_cases import DEFAULTS, furthest, logged, lower_case, pairs, prompts, trainer, weights

import troll
from troll.policy import PackedPolicy
from troll.trl import TROLLTrainer
from troll.trl.passes import OLD_POLICY

# Plain gradient steps without clipping of the gradient: Adam would hide a factor in the loss.
STEPS: dict[str, Any] = {
    "optim": "sgd",
    "learning_rate": 0.05,
    "max_grad_norm": 0.0,
    "max_steps": 8,
    "per_device_train_batch_size": 4,
}
UNCLIPPED: dict[str, Any] = {"epsilon": math.inf}
SEQUENCE: dict[str, Any] = {"importance_sampling_level": "sequence"}


def talkative() -> tuple[torch.nn.Module, Any]:
    """A model that ends one completion in a dozen at each token, so that lengths differ. Its head has a bias, too."""
    model, tokens = tiny_models.build("dense")
    bias = torch.zeros(len(tokens))
    bias[tokens.eos_token_id] = 4.0
    model.lm_head.bias = torch.nn.Parameter(bias)
    return model, tokens


def ours(folder: Path, **changes: Any) -> TROLLTrainer:
    model, tokens = talkative()
    return trainer(folder, model=model, processing_class=tokens, **{**STEPS, **changes})


def stock(folder: Path, **changes: Any) -> GRPOTrainer:
    model, tokens = talkative()
    args = GRPOConfig(str(folder), **{**DEFAULTS, "steps_per_generation": 4, **STEPS, **changes})
    return GRPOTrainer(model, lower_case, args, prompts(), processing_class=tokens)


def trained(run: Any) -> Any:
    run.train()
    assert run.state.global_step == 8
    return run


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., GRPOTrainer]:
    """TRL's own trainer after its run; each run is made once."""
    runs: dict[str, GRPOTrainer] = {}

    def of(**changes: Any) -> GRPOTrainer:
        key = repr(sorted(changes.items()))
        if key not in runs:
            runs[key] = trained(stock(tmp_path_factory.mktemp("stock"), **changes))
        return runs[key]

    return of


def rollouts(run: Any) -> int:
    return len(logged(run, "completions/mean_length"))


def assert_trained_alike(run: Any, reference: Any, atol: float) -> None:
    """Weights to ``atol`` after eight updates, and losses and gradients on the way."""
    assert rollouts(run) == rollouts(reference) == 2
    for name in ("completions/mean_length", "reward"):
        assert logged(run, name) == logged(reference, name)  # the same completions
    assert min(logged(run, "completions/min_length")) < 4
    assert max(logged(run, "completions/max_length")) == 8
    start = {name: p.detach() for name, p in talkative()[0].named_parameters()}
    assert furthest(start, weights(run)) > 1e-2
    assert furthest(weights(run), weights(reference)) <= atol
    for name in ("loss", "grad_norm"):
        torch.testing.assert_close(
            torch.tensor(logged(run, name)), torch.tensor(logged(reference, name)), rtol=1e-4, atol=1e-6
        )


# ------------------------------------------------------------------ whole runs

# loss_type, other changes for both trainers, passes over a rollout for TRL (4 updates either way)
RUNS: dict[str, tuple[str, dict[str, Any], int]] = {
    "dapo": ("dapo", {}, 4),
    "grpo": ("grpo", {}, 4),
    "bnpo": ("bnpo", {}, 4),
    "dr_grpo": ("dr_grpo", {}, 4),
    "luspo by sequence": ("luspo", SEQUENCE, 4),
    "luspo by token": ("luspo", {}, 4),
    "grpo by sequence": ("grpo", SEQUENCE, 4),
    "dapo, accumulated": ("dapo", {"gradient_accumulation_steps": 2}, 8),
    "grpo, accumulated": ("grpo", {"gradient_accumulation_steps": 2}, 8),
    "dr_grpo by sequence, accumulated": ("dr_grpo", {**SEQUENCE, "gradient_accumulation_steps": 2}, 8),
    "bnpo, two iterations": ("bnpo", {"num_iterations": 2}, 2),
    "dapo, accumulated, two iterations": ("dapo", {"gradient_accumulation_steps": 2, "num_iterations": 2}, 4),
    "dapo at temperature 0.7": ("dapo", {"temperature": 0.7}, 4),
    "dapo without truncated completions": ("dapo", {"mask_truncated_completions": True}, 4),
    "dapo with checkpointed gradients": ("dapo", {"gradient_checkpointing": True}, 4),
}


def learning_rate(loss_type: str) -> float:
    """luspo sums over the tokens of a sequence where the others average."""
    return 0.02 if loss_type == "luspo" else 0.05


@pytest.mark.parametrize("kind", RUNS)
def test_without_a_bound_training_is_TRLs_without_clipping(tmp_path: Path, reference: Any, kind: str) -> None:
    """An infinite bound without regression to rounding, ``trust_region="none"`` bit for bit."""
    loss_type, changes, passes = RUNS[kind]
    changes = {**changes, "loss_type": loss_type, "learning_rate": learning_rate(loss_type)}
    expected = reference(**changes, **UNCLIPPED, steps_per_generation=passes)
    run = trained(ours(tmp_path, **changes, kl_bound=math.inf, regression_coef=0.0))
    assert max(logged(run, "troll/kl_before/max")) > 0.05  # the policy does leave the old one
    # fp32 sums in another order, 1e-7 per gradient, carried through eight updates; measured: at most 5e-7.
    assert_trained_alike(run, expected, 1e-5)
    run = trained(ours(tmp_path, **changes, trust_region="none"))
    assert_trained_alike(run, expected, 0.0)
    assert not [name for entry in run.state.log_history for name in entry if name.startswith("troll/")]


@pytest.mark.parametrize(
    "changes",
    [{"max_support": 4}, {"max_support": 1}, {"tail": "floor", "max_support": 263}, {"regression_coef": 3.0}],
    ids=["bucket of 4", "bucket of 1", "floor over the vocabulary", "regression"],
)
def test_an_infinite_bound_trains_as_TRL_for_any_support_and_regression(
    tmp_path: Path, reference: Any, changes: dict[str, Any]
) -> None:
    """The ratio of a bucket is exact; 'floor' needs the vocabulary. A token inside the bound is not pulled."""
    run = trained(ours(tmp_path, **{"kl_bound": math.inf, "regression_coef": 0.0, **changes}))
    assert_trained_alike(run, reference(loss_type="dapo", **UNCLIPPED), 1e-5)


def test_adam_and_clipped_gradients_agree_as_well(tmp_path: Path, reference: Any) -> None:
    changes = {"optim": "adamw_torch", "learning_rate": 5e-3, "max_grad_norm": 1.0}
    run = trained(ours(tmp_path, **changes, kl_bound=math.inf, regression_coef=0.0))
    assert_trained_alike(run, reference(**changes, **UNCLIPPED), 1e-5)


def test_under_autocast_the_first_updates_are_TRLs(tmp_path: Path) -> None:
    """Two of them: afterwards a weight that differs by 1e-7 may round to another bf16, and the runs part."""
    changes = {"bf16": True, "max_steps": 2}
    expected = stock(tmp_path, **changes, **UNCLIPPED)
    expected.train()
    run = ours(tmp_path, **changes, kl_bound=math.inf)
    run.train()
    # bf16 products on both sides, rounded alike: the values agree as in fp32, gradients to a rounding in some entries.
    assert logged(run, "loss") == pytest.approx(logged(expected, "loss"), rel=1e-5)
    assert logged(run, "grad_norm") == pytest.approx(logged(expected, "grad_norm"), rel=1e-3)
    start = {name: p.detach() for name, p in talkative()[0].named_parameters()}
    moved = furthest(start, weights(run))
    assert moved > 1e-2
    assert furthest(weights(run), weights(expected)) <= 2**-7 * moved  # 2⁻⁸ of the largest per update


@pytest.mark.parametrize("kind", ["dapo", "grpo by sequence", "grpo, accumulated"])
def test_clip_is_TRLs_own_loss_bit_for_bit(tmp_path: Path, reference: Any, kind: str) -> None:
    loss_type, changes, passes = RUNS[kind]
    changes = {**changes, "loss_type": loss_type, "epsilon": 0.01, "epsilon_high": 0.02}
    expected = reference(**changes, steps_per_generation=passes)
    assert max(logged(expected, "clip_ratio/region_mean")) > 0.1
    run = trained(ours(tmp_path, **changes, trust_region="clip"))
    assert_trained_alike(run, expected, 0.0)
    assert logged(run, "clip_ratio/region_mean") == logged(expected, "clip_ratio/region_mean")


@pytest.mark.parametrize(("trust_region", "tail"), pairs(["clip", "none"], ["bucket", "floor"]))
def test_measuring_the_KL_reports_it_and_changes_nothing(
    tmp_path: Path, reference: Any, trust_region: str, tail: str
) -> None:
    expected = reference(loss_type="dapo", epsilon=0.02 if trust_region == "clip" else math.inf)
    run = trained(ours(tmp_path, trust_region=trust_region, epsilon=0.02, measure_kl=True, tail=tail, kl_bound=1e-3))
    # TRL's loss on log-probabilities from our head, which add up in another order; measured: at most 2e-7.
    assert_trained_alike(run, expected, 1e-6)
    kl = logged(run, "troll/kl_before/max")
    assert len(kl) == 8
    assert max(kl[0], kl[4]) < 1e-9  # by the old policy itself, once per rollout
    assert min(kl[1:4] + kl[5:]) > 1e-4
    assert logged(run, "troll/kl_after/max") == []  # nothing was projected


def test_a_rollout_used_once_trains_as_TRL_bit_for_bit_and_records_no_old_policy(tmp_path: Path) -> None:
    run = trained(ours(tmp_path, updates_per_generation=1))
    assert rollouts(run) == 8
    assert furthest(weights(run), weights(trained(stock(tmp_path, steps_per_generation=1)))) == 0.0
    assert OLD_POLICY not in run._buffered_inputs[0]


def test_an_active_bound_and_its_regression_do_change_the_training(tmp_path: Path) -> None:
    """What the comparisons above could not tell apart if they compared TRL with itself."""
    free = weights(trained(ours(tmp_path, kl_bound=math.inf)))
    bound = weights(trained(ours(tmp_path, kl_bound=1e-3, regression_coef=0.0)))
    pulled = weights(trained(ours(tmp_path, kl_bound=1e-3, regression_coef=1.0)))
    assert furthest(free, bound) > 1e-3
    assert furthest(bound, pulled) > 1e-3


@pytest.mark.parametrize("trust_region", ["troll", "clip", "none"])
def test_the_share_of_clipped_tokens_is_reported_where_there_is_a_clip(tmp_path: Path, trust_region: str) -> None:
    run = trained(ours(tmp_path, trust_region=trust_region))
    assert len(logged(run, "clip_ratio/region_mean")) == (8 if trust_region == "clip" else 0)
    assert len(logged(run, "entropy")) == 8  # TRL's other metrics stay


def test_logged_over_several_updates_an_extreme_is_the_extreme_and_all_else_the_mean(tmp_path: Path) -> None:
    single, together = trained(ours(tmp_path)), trained(ours(tmp_path, logging_steps=4))
    names = [name for name in together.state.log_history[0] if name.startswith("troll/")]
    assert {"troll/ratio/max", "troll/ratio/min", "troll/kl_before/max", "troll/kl_after/mean"} <= set(names)
    for name in names:
        each, result = logged(single, name), logged(together, name)
        for four, one in ((each[:4], result[0]), (each[4:], result[1])):
            reduce = max if name.endswith("/max") else min if name.endswith("/min") else None
            mean = sum(four) / 4
            assert one == pytest.approx(mean if reduce is None else reduce(four), rel=1e-6), name
            assert not name.startswith("troll/ratio/m") or len(set(four)) > 1


def test_logged_over_several_updates_tokens_without_a_solution_are_added_up(tmp_path: Path) -> None:
    run = ours(tmp_path)
    run.model.train()
    run._metrics["train"]["troll/unconverged_tokens"] += [1.0, 0.0, 3.0]
    run._metrics["train"]["unconverged_tokens"] += [1.0, 0.0, 2.0]  # not ours
    run.log({})
    assert logged(run, "troll/unconverged_tokens") == [4.0]
    assert logged(run, "unconverged_tokens") == [1.0]


# ------------------------------------------------------------------ one rollout, looked at


def with_rollout(run: Any) -> Any:
    """Generate and score the first rollout, as the first step of training does."""
    run.model.train()
    run.current_gradient_accumulation_steps = run.args.gradient_accumulation_steps
    run._prepare_inputs(next(iter(run.get_train_dataloader())))
    return run


def drift(model: torch.nn.Module) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn_like(p)


def sequences_of(policies: list[PackedPolicy]) -> troll.SparsePolicy:
    return PackedPolicy.stack(policies).unpack()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_old_policies_stay_with_their_sequences_through_TRLs_shuffle_and_split(
    tmp_path: Path, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated: list[dict[str, Any]] = []
    plain = TROLLTrainer._generate_and_score_completions

    def keep(self: Any, inputs: Any) -> Any:
        generated.append(plain(self, inputs))
        return generated[-1]

    monkeypatch.setattr(TROLLTrainer, "_generate_and_score_completions", keep)
    run = with_rollout(ours(tmp_path, gradient_accumulation_steps=accumulation))
    batches = run._buffered_inputs
    assert len(batches) == 4 * accumulation
    shuffled = torch.cat([batch["completion_ids"] for batch in batches])
    assert not torch.equal(shuffled, generated[0]["completion_ids"])  # it was a shuffle
    assert len({tuple(row) for row in shuffled.tolist()}) > len(shuffled) // 2  # of sequences that differ
    lengths = torch.cat([batch["completion_mask"].sum(1) for batch in batches])
    assert lengths.min() < 4
    assert lengths.max() == 8
    for batch in batches:
        old, counted = sequences_of(batch[OLD_POLICY]), batch["completion_mask"].bool()
        assert torch.equal(old.valid, counted)
        assert torch.equal(old.sampled[counted], batch["completion_ids"][counted])
        assert torch.equal(old.sampled_log_probs[counted], batch["old_per_token_logps"][counted])


def test_the_first_pass_gives_the_log_probabilities_that_TRL_would_have_as_old(tmp_path: Path) -> None:
    run, reference = with_rollout(ours(tmp_path)), with_rollout(stock(tmp_path))
    for mine, theirs in zip(run._buffered_inputs, reference._buffered_inputs, strict=True):
        assert torch.equal(mine["completion_ids"], theirs["completion_ids"])
        # Log-probabilities of up to 9 from fp32 sums over 263 tokens in another order.
        torch.testing.assert_close(mine["old_per_token_logps"], theirs["old_per_token_logps"], rtol=0, atol=3e-6)
        assert mine.keys() - theirs.keys() == {OLD_POLICY, "troll_rewards"}


def test_the_first_update_on_a_rollout_has_a_ratio_of_one(tmp_path: Path) -> None:
    run = with_rollout(ours(tmp_path))
    run._compute_loss(run.model, run._buffered_inputs[0])
    metrics = run._metrics["train"]
    assert metrics["troll/ratio/max"] == metrics["troll/ratio/min"] == [1.0]
    assert metrics["troll/kl_before/max"][0] < 1e-9
    assert metrics["troll/projected_fraction"] == [0.0]


def test_old_log_probabilities_that_are_not_those_of_the_recorded_policies_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = GRPOTrainer._generate_and_score_completions

    def other(self: Any, inputs: Any) -> Any:
        output = plain(self, inputs)
        output["old_per_token_logps"] = output["old_per_token_logps"] + 0.0
        return output

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", other)
    with pytest.raises(RuntimeError, match="do not come from the first scoring pass of its policy"):
        with_rollout(ours(tmp_path))


# ------------------------------------------------------------------ the rule by which tokens are added up

LOSS_TYPES = ["dapo", "grpo", "bnpo", "dr_grpo", "luspo"]


def on_policy(run: TROLLTrainer, training: bool) -> tuple[dict[str, Any], Tensor, Tensor]:
    """A batch with an advantage of its own for each token, and the loss TRL makes of it: all ratios are one."""
    with_rollout(run)
    batch = {k: v for k, v in run._buffered_inputs[1].items() if k not in ("old_per_token_logps", OLD_POLICY)}
    mask = batch["completion_mask"].clone()
    assert 0 < mask.sum() < mask.numel()
    batch["tool_mask"] = torch.ones_like(mask)
    batch["tool_mask"][:, 1] = 0  # a token that does not count between two that do
    batch["tool_mask"][2] = 0  # and a sequence without one that does, which TRL's means count all the same
    torch.manual_seed(4)
    batch["advantages"] = torch.randn(mask.shape)
    run.model.train(training)
    return batch, mask.bool() & batch["tool_mask"].bool(), GRPOTrainer._compute_loss(run, run.model, batch).detach()


@pytest.mark.parametrize(("loss_type", "accumulation", "training"), pairs(LOSS_TYPES, [1, 2], [True, False]))
def test_values_per_token_are_added_up_as_TRL_adds_up_its_loss(
    tmp_path: Path, loss_type: str, accumulation: int, training: bool
) -> None:
    run = ours(tmp_path, loss_type=loss_type, gradient_accumulation_steps=accumulation)
    batch, counted, expected = on_policy(run, training)
    result = run._aggregate(-batch["advantages"], counted, batch)
    assert expected.abs() > 1e-3
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-7)  # a sum of 30 fp32 numbers of size one


@pytest.mark.parametrize(("accumulation", "training"), pairs([1, 2], [True, False]))
def test_a_wrong_rule_would_be_seen(tmp_path: Path, accumulation: int, training: bool) -> None:
    run = ours(tmp_path, gradient_accumulation_steps=accumulation)
    batch, counted, expected = on_policy(run, training)
    for wrong in LOSS_TYPES[1:]:
        run.loss_type = wrong
        result = run._aggregate(-batch["advantages"], counted, batch)
        assert not expected.isclose(result, rtol=1e-3), wrong  # a hundred times the tolerance above


# ------------------------------------------------------------------ with the bound active: the loss of the library


def scored(run: Any, batch: dict[str, Any]) -> Tensor:
    """The logits of the completion tokens, whole."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    T = batch["completion_ids"].shape[1]
    return run.model(input_ids=ids, attention_mask=mask).logits[:, -T - 1 : -1]


def rule(loss_type: str, batch: dict[str, Any], passes: int, accumulation: int) -> tuple[dict[str, Any], float]:
    """TRL's weights, written down once more: options of ``troll_loss``, and what its result is divided by."""
    B = len(batch["completion_ids"])
    return {
        "dapo": ({"total": batch["num_items_in_batch"] * accumulation / passes}, 1),
        "bnpo": ({}, accumulation),
        "grpo": ({"aggregation": "sequence_mean", "total": B}, accumulation),
        "dr_grpo": ({"aggregation": "constant", "max_length": 8, "total": B}, accumulation),
        "luspo": ({"aggregation": "sequence_sum", "total": B}, accumulation),
    }[loss_type]


CONSTRAINED: dict[str, dict[str, Any]] = {
    "dapo, bucket": {"loss_type": "dapo", "max_support": 16},
    "dapo, bucket of few": {"loss_type": "dapo", "tail_mass": 0.5},
    "dapo, floor": {"loss_type": "dapo", "tail": "floor", "max_support": 128},
    "dapo, floor of few": {"loss_type": "dapo", "tail": "floor", "max_support": 200, "tail_mass": 0.1},
    "grpo by sequence": {"loss_type": "grpo", **SEQUENCE},
    "bnpo, accumulated": {"loss_type": "bnpo", "gradient_accumulation_steps": 2},
    "dr_grpo, accumulated, floor by sequence at temperature 0.7": {
        "loss_type": "dr_grpo",
        "gradient_accumulation_steps": 2,
        "tail": "floor",
        "max_support": 128,
        "temperature": 0.7,
        **SEQUENCE,
    },
    "luspo by sequence": {"loss_type": "luspo", **SEQUENCE},
    "dapo, accumulated, at temperature 0.7": {
        "loss_type": "dapo",
        "gradient_accumulation_steps": 2,
        "temperature": 0.7,
    },
}


@pytest.mark.parametrize("kind", CONSTRAINED)
def test_loss_gradient_and_metrics_are_those_of_troll_loss_on_the_logits(tmp_path: Path, kind: str) -> None:
    changes = CONSTRAINED[kind]
    run = with_rollout(ours(tmp_path, kl_bound=0.01, regression_coef=0.7, **changes))
    args = run.args
    kept = (args.max_support, args.tail_mass)
    batch = dict(run._buffered_inputs[2])
    batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
    batch["tool_mask"][0, 1] = 0
    counted = (batch["completion_mask"] * batch["tool_mask"]).bool()
    options = {"temperature": args.temperature, "loss_mask": counted}
    with torch.no_grad():
        old = troll.sparsify(scored(run, batch), batch["completion_ids"], *kept, **options)
    drift(run.model)

    run.model.zero_grad()
    loss = run._compute_loss(run.model, batch)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in run.model.named_parameters()}

    run.model.zero_grad()
    logits = scored(run, batch)
    if args.tail == "bucket":
        proposal = troll.restrict(logits, old, loss_mask=counted)
    else:
        proposal = troll.sparsify(logits, batch["completion_ids"], *kept, **options)
    options, divisor = rule(args.loss_type, batch, args.steps_per_generation, args.gradient_accumulation_steps)
    expected, metrics = troll.troll_loss(
        proposal,
        old,
        batch["advantages"],
        counted,
        kl_bound=0.01,
        regression_coef=0.7,
        tail=args.tail,
        importance_sampling_level=args.importance_sampling_level,
        **options,
    )
    (expected / divisor).backward()
    assert metrics["projected_fraction"] > 0.5
    assert metrics["regression"] > 1e-3
    assert (metrics["support_size/old"] < args.max_support) == ("few" in kind)
    # The ratio is exp(old + log ratio − old): at log-probabilities of 9, fp32 leaves it 1e-6.
    torch.testing.assert_close(loss, expected / divisor, rtol=1e-5, atol=1e-6)
    for name, p in run.model.named_parameters():
        assert p.grad is not None
        largest = p.grad.abs().max()
        assert largest > 1e-4, name
        assert (grads[name] - p.grad).abs().max() <= 1e-4 * largest, name
    reported = run._metrics["train"]
    for name, value in metrics.items():
        if name not in ("entropy", "skipped_tokens", "solver_steps/mean", "solver_steps/max"):
            torch.testing.assert_close(
                torch.tensor(reported[f"troll/{name}"][0]), value.float(), rtol=1e-4, atol=1e-6, msg=name
            )
    # Of the whole distribution, which TRL reports as well; that of troll_loss knows the kept tokens alone.
    torch.testing.assert_close(reported["troll/entropy"], reported["entropy"], rtol=1e-5, atol=0)


def test_evaluation_reports_the_loss_TRL_would_and_the_divergence(tmp_path: Path) -> None:
    """Scored on the policy that generated: every ratio is one, and the loss is that of the advantages."""
    losses = []
    for make, changes in ((stock, {"steps_per_generation": 4}), (ours, {})):
        run = make(tmp_path, **changes, loss_type="bnpo")
        run.eval_dataset = prompts(8)
        torch.manual_seed(5)
        metrics = run.evaluate()
        losses.append(metrics["eval_loss"])
        assert run.model.training is False
    # The logged metrics of an evaluation carry TRL's prefix.
    entry = run.state.log_history[-1]
    assert entry["eval_troll/kl_before/max"] < 1e-9
    assert entry["eval_troll/ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    assert losses[0] != 0
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-6)
