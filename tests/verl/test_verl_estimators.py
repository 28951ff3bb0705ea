"""Every advantage estimator that verl registers, through the policy loss of the trust region."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import compute_advantage

import troll
from troll.verl import TrollPolicyLossConfig
from troll.verl.loss import _Completions, _using, troll_policy_loss

B, R, V, G = 8, 6, 40, 4
ESTIMATORS = sorted(core_algos.ADV_ESTIMATOR_REGISTRY)


def advantages_of(estimator: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What verl makes of random rewards at the last token, with a critic's values and all that an estimator may ask."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, R + 1, (B,), generator=generator)
    mask = (torch.arange(R) < lengths[:, None]).long()
    scores = torch.randn(B, generator=generator)
    rewards = torch.zeros(B, R).scatter(1, lengths[:, None] - 1, scores[:, None])
    data = DataProto.from_dict(
        tensors={
            "token_level_scores": rewards,
            "token_level_rewards": rewards,
            "response_mask": mask,
            "values": torch.randn(B, R, generator=generator),
            **({"reward_baselines": torch.randn(B, generator=generator)} if estimator == "remax" else {}),
            "old_log_probs": -torch.rand(B, R, generator=generator),
            "sum_pi_squared": torch.rand(B, R, generator=generator),
            "prompts": torch.ones(B, 2, dtype=torch.long),
            "responses": torch.ones(B, R, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(B, 2, dtype=torch.long), mask], 1),
        },
        non_tensors={
            "uid": np.repeat([f"prompt {i}" for i in range(B // G)], G).astype(object),
            "correct": scores.numpy(),
            "format": torch.rand(B, generator=generator).numpy(),
        },
    )
    config = AlgoConfig(adv_estimator=estimator, gdpo_reward_keys=["correct", "format"])
    made = compute_advantage(data, estimator, gamma=0.99, lam=0.95, num_repeat=G, config=config)
    return made.batch["advantages"], mask


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_of_verl(estimator: str, level: Any) -> None:
    advantages, mask = advantages_of(estimator)
    assert advantages[mask.bool()].abs().max() > 1e-3
    generator = torch.Generator().manual_seed(6)
    sampled = torch.randint(0, V, (B, R), generator=generator)
    old_logits = torch.randn(B, R, V, generator=generator)
    logits = (old_logits + 0.5 * torch.randn(B, R, V, generator=generator)).requires_grad_()
    old = troll.sparsify(old_logits, sampled, 8, loss_mask=mask)
    proposal = troll.restrict(logits, old)
    options: dict[str, Any] = {"kl_bound": 0.03, "regression_coef": 0.7, "importance_sampling_level": level}
    loss, metrics = troll.troll_loss(proposal, old, advantages, mask, tail="bucket", **options)
    assert 0 < metrics["projected_fraction"] < 1
    (expected,) = torch.autograd.grad(loss, logits)

    step = troll.objective.constrain(troll.restrict(logits, old), old, 0.03, mask.bool(), tail="bucket")
    actor = SimpleNamespace(policy_loss=TrollPolicyLossConfig(**options), global_batch_info={})
    with _using(_Completions(step.log_ratio, step.regression)):
        ours, _ = troll_policy_loss(torch.zeros(B, R), torch.zeros(B, R), advantages, mask.bool(), "token-mean", actor)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.autograd.grad(ours, logits)[0], expected, rtol=1e-5, atol=1e-8)


def test_all_estimators_are_there() -> None:
    assert {"gae", "grpo", "rloo", "reinforce_plus_plus", "remax", "gpg", "opo", "grpo_passk"} <= set(ESTIMATORS)
