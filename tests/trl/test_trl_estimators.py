"""Rewards → advantages: the estimators by hand, and the same numbers where TRL's loss reads them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor
from trl_cases import furthest, logged, lower_case, pairs, text_of, trainer, weights

from troll import advantages
from troll.errors import InputError
from troll.trl import TROLLTrainer
from troll.trl.estimators import estimate

NAN = math.nan
PER_SAMPLE = ["dr_grpo", "rloo"]
PER_TOKEN = ["reinforce_pp", "reinforce_pp_baseline"]
ESTIMATORS = [*PER_SAMPLE, *PER_TOKEN]


def lengths(*counted: int, longest: int = 4) -> Tensor:
    """A mask with this many tokens counted in each row."""
    return torch.arange(longest) < torch.tensor(counted)[:, None]


def assert_equal(result: Tensor, expected: list[Any]) -> None:
    """To 1e-6: the numbers are of size one, and whitening adds 1e-8 to a variance."""
    torch.testing.assert_close(result, torch.tensor(expected), rtol=0, atol=1e-6)


# ------------------------------------------------------------------ by hand


def test_dr_grpo_subtracts_the_mean_of_the_group() -> None:
    rewards = torch.tensor([1.0, 0.0, 2.0, 4.0, 4.0, 1.0])
    assert_equal(estimate("dr_grpo", rewards, 3, lengths(1, 2, 3, 4, 1, 2)), [0.0, -1.0, 1.0, 1.0, 1.0, -2.0])


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    rewards = torch.tensor([1.0, 0.0, 2.0, 4.0, 4.0, 1.0])
    # 1 − (0 + 2)/2, 0 − (1 + 2)/2, ...
    assert_equal(estimate("rloo", rewards, 3, lengths(1, 2, 3, 4, 1, 2)), [0.0, -1.5, 1.5, 1.5, 1.5, -3.0])


def test_reinforce_pp_whitens_the_reward_over_all_tokens() -> None:
    # Tokens 1, 3, 3, 3: mean 2.5, variance (2.25 + 3 · 0.25) / 3 = 1. Groups have no part in it.
    rewards = torch.tensor([1.0, 3.0])
    expected = [[-1.5, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.0]]
    for group_size in (1, 2):
        assert_equal(estimate("reinforce_pp", rewards, group_size, lengths(1, 3)), expected)


def test_reinforce_pp_reaches_the_tokens_before_a_tool_call_and_after_it() -> None:
    # The same four tokens, with holes in front, between, and behind.
    mask = torch.tensor([[False, True, False, False, False], [True, False, True, True, False]])
    expected = [[0.0, -1.5, 0.0, 0.0, 0.0], [0.5, 0.0, 0.5, 0.5, 0.0]]
    assert_equal(estimate("reinforce_pp", torch.tensor([1.0, 3.0]), 2, mask), expected)


def test_reinforce_pp_baseline_whitens_the_deviation_from_the_group_over_all_tokens() -> None:
    # Deviations −1, 1, 0, 0 on 1, 3, 2, 2 tokens: mean 2/8, variance (1.5625 + 3 · 0.5625 + 4 · 0.0625) / 7 = 1/2.
    rewards = torch.tensor([0.0, 2.0, 5.0, 5.0])
    low, high, even = (x * math.sqrt(2) for x in (-1.25, 0.75, -0.25))
    expected = [[low, 0.0, 0.0, 0.0], [high, high, high, 0.0], [even, even, 0.0, 0.0], [even, even, 0.0, 0.0]]
    assert_equal(estimate("reinforce_pp_baseline", rewards, 2, lengths(1, 3, 2, 2)), expected)


# ------------------------------------------------------------------ samples that cannot be scored, or do not count


def test_a_sample_without_a_reward_gets_none_and_is_in_no_baseline() -> None:
    rewards = torch.tensor([1.0, NAN, 3.0, 4.0, 4.0, 1.0])
    mask = lengths(1, 4, 3, 2, 2, 2)
    assert_equal(estimate("dr_grpo", rewards, 3, mask), [-1.0, 0.0, 1.0, 1.0, 1.0, -2.0])
    assert_equal(estimate("rloo", rewards, 3, mask), [-2.0, 0.0, 2.0, 1.5, 1.5, -3.0])
    alone = torch.tensor([1.0, NAN, 3.0])
    expected = [[-1.5, 0.0, 0.0, 0.0], [0.0] * 4, [0.5, 0.5, 0.5, 0.0]]
    assert_equal(estimate("reinforce_pp", alone, 3, lengths(1, 4, 3)), expected)
    # Deviations −1 and 1 on 1 and 3 tokens: mean 0.5, variance (2.25 + 3 · 0.25) / 3 = 1.
    assert_equal(estimate("reinforce_pp_baseline", alone, 3, lengths(1, 4, 3)), expected)


@pytest.mark.parametrize("lonely", [[NAN, 5.0], [5.0, NAN], [NAN, NAN]])
def test_a_group_with_one_reward_or_none_has_no_baseline_and_changes_no_other(lonely: list[float]) -> None:
    rewards, mask = torch.tensor([*lonely, 0.0, 2.0]), lengths(4, 4, 1, 3)
    assert_equal(estimate("dr_grpo", rewards, 2, mask), [0.0, 0.0, -1.0, 1.0])
    assert_equal(estimate("rloo", rewards, 2, mask), [0.0, 0.0, -2.0, 2.0])
    expected = [[0.0] * 4, [0.0] * 4, [-1.5, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.0]]
    assert_equal(estimate("reinforce_pp_baseline", rewards, 2, mask), expected)


def test_reinforce_pp_needs_no_group_and_keeps_a_sample_that_is_alone_in_its_own() -> None:
    rewards = torch.tensor([NAN, 1.0, 3.0, NAN])
    expected = [[0.0] * 4, [-1.5, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.0], [0.0] * 4]
    assert_equal(estimate("reinforce_pp", rewards, 2, lengths(4, 1, 3, 2)), expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_without_a_single_reward_all_advantages_are_zero(estimator: Any) -> None:
    result = estimate(estimator, torch.full((4,), NAN), 2, lengths(4, 4, 1, 3))
    assert torch.equal(result, torch.zeros(4) if estimator in PER_SAMPLE else torch.zeros(4, 4))


@pytest.mark.parametrize("estimator", PER_TOKEN)
def test_a_sample_without_a_counted_token_takes_no_part_in_the_whitening(estimator: Any) -> None:
    rewards = torch.tensor([0.0, 2.0, 100.0, -100.0])
    result = estimate(estimator, rewards, 2, lengths(1, 3, 0, 0))
    # Rewards of 0 and 2 or deviations of −1 and 1: the same but for their mean.
    assert_equal(result, [[-1.5, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.0], [0.0] * 4, [0.0] * 4])


def test_a_sample_without_a_counted_token_is_in_the_baseline_of_its_group() -> None:
    """As in TRL's own estimator: a truncated completion trains nothing, and its reward is one like any other."""
    rewards, mask = torch.tensor([0.0, 3.0, 3.0, 3.0]), lengths(1, 0, 1, 2)
    assert_equal(estimate("dr_grpo", rewards, 2, mask), [-1.5, 1.5, 0.0, 0.0])
    assert_equal(estimate("rloo", rewards, 2, mask), [-3.0, 3.0, 0.0, 0.0])
    # Deviations −1.5 and 0 on 1 and 3 tokens: mean −0.375, variance 0.5625.
    expected = [[-1.5, 0.0, 0.0, 0.0], [0.0] * 4, [0.5, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]]
    assert_equal(estimate("reinforce_pp_baseline", rewards, 2, mask), expected)


@pytest.mark.parametrize("estimator", PER_TOKEN)
@pytest.mark.parametrize("counted", [(0, 0), (1, 0)])
def test_fewer_than_two_counted_tokens_have_no_variance_and_no_advantage(
    estimator: Any, counted: tuple[int, int]
) -> None:
    assert_equal(estimate(estimator, torch.tensor([1.0, 3.0]), 2, lengths(*counted)), [[0.0] * 4, [0.0] * 4])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_give_exactly_zero(estimator: Any) -> None:
    assert not estimate(estimator, torch.full((4,), 0.1), 2, lengths(4, 2, 1, 3)).any()


# ------------------------------------------------------------------ in a trainer


def early(**changes: Any) -> dict[str, Any]:
    """A model whose completions often end early, for the arguments of ``trainer``."""
    model, tokens = tiny_models.build("dense")
    bias = torch.zeros(len(tokens))
    bias[tokens.eos_token_id] = 4.0
    model.lm_head.bias = torch.nn.Parameter(bias)
    return {"model": model, "processing_class": tokens, **changes}


class Rewards:
    """Reward functions that keep what they said, one list per call."""

    def __init__(self, unscorable: bool = False) -> None:
        self.unscorable = unscorable
        self.given: dict[str, list[list[float]]] = {"lower": [], "digits": []}

    def lower(self, completions: list[Any], **_: Any) -> list[float | None]:
        said: list[float | None] = list(lower_case(completions))
        if self.unscorable:
            said[1] = said[4] = said[5] = said[6] = None
        return self._keep("lower", said)

    def digits(self, completions: list[Any], **_: Any) -> list[float | None]:
        said: list[float | None] = [sum(c.isalnum() for c in text_of(completion)) / 4 for completion in completions]
        if self.unscorable:
            said[2] = said[4] = None
        return self._keep("digits", said)

    def _keep(self, name: str, said: list[float | None]) -> list[float | None]:
        self.given[name].append([NAN if x is None else x for x in said])
        return said

    def last(self, name: str) -> Tensor:
        return torch.tensor(self.given[name][-1])


def generated(run: TROLLTrainer, training: bool = True, n: int = 0) -> dict[str, Any]:
    """One rollout as it is before TRL shuffles it."""
    run.model.train(training)
    inputs = next(iter(run.get_train_dataloader())) if training else [{"prompt": f"say {i // 2}"} for i in range(n)]
    return run._generate_and_score_completions(inputs)


def expected(estimator: str, rewards: Tensor, group_size: int, mask: Tensor) -> Tensor:
    """By the functions of ``troll.advantages``, for rewards that are all numbers."""
    if estimator == "reinforce_pp":
        per_token = torch.zeros(mask.shape)
        per_token[torch.arange(len(mask)), mask.sum(1) - 1] = rewards
        return advantages.reinforce_pp(per_token, mask)
    if estimator == "reinforce_pp_baseline":
        return advantages.reinforce_pp_baseline(rewards, mask, group_size=group_size)
    return {"dr_grpo": advantages.dr_grpo, "rloo": advantages.rloo}[estimator](rewards, group_size=group_size)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_trainer_hands_out_the_advantages_of_the_rewards_and_logs_them(tmp_path: Path, estimator: str) -> None:
    rewards = Rewards()
    run = trainer(tmp_path, **early(advantage_estimator=estimator, reward_funcs=rewards.lower))
    output = generated(run)
    mask = output["completion_mask"].bool()
    assert mask.sum(1).min() < 4
    reference = expected(estimator, rewards.last("lower"), 4, mask)
    assert reference.abs().max() > 0.1
    assert torch.equal(output["advantages"], reference)
    first = reference if reference.dim() == 1 else reference[:, 0]
    assert list(run._logs["advantages"]) == first.tolist()
    assert len(run._logs["advantages"]) == len(run._logs["completion"]) == len(mask)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_evaluation_has_groups_of_its_own_size_and_logs_after_the_training(tmp_path: Path, estimator: str) -> None:
    rewards = Rewards()
    run = trainer(tmp_path, **early(advantage_estimator=estimator, reward_funcs=rewards.lower, num_generations_eval=2))
    generated(run)
    before = list(run._logs["advantages"])
    output = generated(run, training=False, n=6)
    reference = expected(estimator, rewards.last("lower"), 2, output["completion_mask"].bool())
    assert reference.abs().max() > 0.1
    assert torch.equal(output["advantages"], reference)
    first = reference if reference.dim() == 1 else reference[:, 0]
    assert list(run._logs["advantages"]) == [*before, *first.tolist()][-len(before) :]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_several_rewards_are_weighed_and_added_and_what_none_could_score_is_left_out(
    tmp_path: Path, estimator: Any
) -> None:
    rewards = Rewards(unscorable=True)
    run = trainer(
        tmp_path,
        **early(
            advantage_estimator=estimator,
            reward_funcs=[rewards.lower, rewards.digits],
            reward_weights=[2.0, -0.5],
        ),
    )
    output = generated(run)
    mask = output["completion_mask"].bool()
    lower, digits = rewards.last("lower"), rewards.last("digits")
    both = 2.0 * lower.nan_to_num(0.0) - 0.5 * digits.nan_to_num(0.0)
    both[4] = NAN  # the only one that neither could score
    assert (lower.isnan() | digits.isnan()).sum() == 5
    assert torch.equal(output["advantages"], estimate(estimator, both, 4, mask))
    assert not output["advantages"][4].any()
    assert output["advantages"][:4].abs().max() > 1e-2


@pytest.mark.parametrize("unscorable", [False, True])
def test_dr_grpo_is_TRLs_own_without_scaling(tmp_path: Path, unscorable: bool) -> None:
    results = []
    for changes in ({"advantage_estimator": "dr_grpo"}, {"scale_rewards": "none"}):
        rewards = Rewards(unscorable)
        run = trainer(tmp_path, **early(reward_funcs=rewards.lower, **changes))
        output = generated(run)
        results.append((output["advantages"], torch.tensor(list(run._logs["advantages"]))))
    (ours, our_log), (theirs, their_log) = results
    assert theirs.abs().max() > 0.05
    # Rewards below one: the mean of four rounds at 6e-8.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-7)
    torch.testing.assert_close(our_log, their_log, rtol=0, atol=2e-7)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_reach_the_loss_with_their_sequences(tmp_path: Path, estimator: str) -> None:
    """By the policy that generated, the loss is minus their mean over the tokens; each goes with its completion."""
    rewards = Rewards()
    run = trainer(tmp_path, **early(advantage_estimator=estimator, reward_funcs=rewards.lower, loss_type="bnpo"))
    kept: list[dict[str, Any]] = []
    plain = run._generate_and_score_completions
    run._generate_and_score_completions = lambda inputs: kept.append(plain(inputs)) or kept[-1]
    run.model.train()
    run.current_gradient_accumulation_steps = 1
    run._prepare_inputs(next(iter(run.get_train_dataloader())))
    of = {
        tuple(ids.tolist()): advantage
        for ids, advantage in zip(kept[0]["completion_ids"], kept[0]["advantages"], strict=True)
    }
    assert len(of) == 32  # no two completions are the same
    for batch in run._buffered_inputs:
        for ids, advantage in zip(batch["completion_ids"], batch["advantages"], strict=True):
            assert torch.equal(advantage, of[tuple(ids.tolist())])
        mask, per_token = batch["completion_mask"].bool(), batch["advantages"]
        if per_token.dim() == 1:
            per_token = per_token[:, None].expand(mask.shape)
        loss = run._compute_loss(run.model, batch)
        assert loss.abs() > 1e-4
        torch.testing.assert_close(loss, -per_token[mask].mean(), rtol=1e-5, atol=1e-6)  # fp32, 50 numbers of size one


@pytest.mark.parametrize(("estimator", "level"), pairs(ESTIMATORS, ["token", "sequence"]))
def test_training_works_with_every_estimator_at_both_levels(tmp_path: Path, estimator: str, level: str) -> None:
    run = trainer(tmp_path, **early(advantage_estimator=estimator, importance_sampling_level=level))
    before = weights(run)
    run.train()
    assert furthest(before, weights(run)) > 1e-2
    assert all(math.isfinite(x) for x in logged(run, "loss") + logged(run, "grad_norm"))
    assert min(logged(run, "troll/projected_fraction")[1:]) > 0.5
    assert max(logged(run, "troll/kl_after/max")) <= 0.05 * (1 + 1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_truncated_completions_that_are_masked_have_no_advantage_per_token(tmp_path: Path, estimator: str) -> None:
    rewards = Rewards()
    run = trainer(
        tmp_path, **early(advantage_estimator=estimator, reward_funcs=rewards.lower, mask_truncated_completions=True)
    )
    output = generated(run)
    mask = output["completion_mask"].bool()
    truncated = ~mask.any(1)
    assert 0 < truncated.sum() < len(mask)
    result = output["advantages"]
    if estimator in PER_SAMPLE:
        assert torch.equal(result, expected(estimator, rewards.last("lower"), 4, mask))
        return
    assert not result[~mask].any()
    # Whitened over the tokens that count; a variance to which 1e-8 was added.
    torch.testing.assert_close(result[mask].mean(), torch.tensor(0.0), rtol=0, atol=1e-5)
    torch.testing.assert_close(result[mask].std(), torch.tensor(1.0), rtol=1e-4, atol=0)
    shown = torch.where(truncated, 0.0, result[:, 0])
    assert list(run._logs["advantages"]) == shown.tolist()


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_an_infinite_reward_stops_the_training_and_says_whose_it_is(tmp_path: Path, estimator: str) -> None:
    def broken_reward(completions: list[Any], **_: Any) -> list[float]:
        return [0.0, 0.0, 0.0, 0.0, 0.0, -math.inf, *[0.0] * (len(completions) - 6)]

    run = trainer(tmp_path, advantage_estimator=estimator, reward_funcs=[lower_case, broken_reward])
    with pytest.raises(InputError, match="'broken_reward' returned -inf for completion 5"):
        run.train()


def test_what_is_logged_of_a_completion_is_the_advantage_of_its_first_token_that_counts(tmp_path: Path) -> None:
    run = trainer(tmp_path, **early(advantage_estimator="reinforce_pp"))
    mask = generated(run)["completion_mask"].bool()
    mask[:, 0] = False  # a tool's, say
    mask[3] = False
    result = run._advantages(mask)
    assert not result[:, 0].any()
    assert list(run._logs["advantages"]) == torch.where(mask[:, 1], result[:, 1], 0.0).tolist()
    assert result[:, 1].abs().max() > 0.1


def test_the_rewards_of_every_rollout_are_its_own(tmp_path: Path) -> None:
    rewards = Rewards()
    run = trainer(tmp_path, **early(advantage_estimator="dr_grpo", reward_funcs=rewards.lower))
    for _ in range(2):
        output = generated(run)
        assert torch.equal(output["advantages"], advantages.dr_grpo(rewards.last("lower"), group_size=4))
    assert rewards.given["lower"][0] != rewards.given["lower"][1]
