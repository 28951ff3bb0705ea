"""A tiny model really learns, in a few seconds; and with a mistake in the projection, it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from trl_cases import logged, trainer

from troll.objective import Constrained
from troll.projection import ops
from troll.trl import passes


def run_of(folder: Path, kind: str = "dense", seed: int = 0, **changes: Any) -> Any:
    """Eight rollouts of 128 completions, eight updates on each; the reward is the share of lower-case letters."""
    run = trainer(
        folder,
        kind,
        **{
            "model": tiny_models.build(kind, seed=seed)[0],
            "seed": seed,
            "per_device_train_batch_size": 16,
            "num_generations": 8,
            "updates_per_generation": 8,
            "max_steps": 64,
            **changes,
        },
    )
    run.train()
    return run


def learned(run: Any) -> bool:
    """Whether the reward rose by more than 0.6, and the policy was never far from the trust region.

    The reward starts at 0.1, the share of lower-case letters among bytes, and can reach 1. Over ten seeds it rose by at
    least 0.76, and no update was made at a mean KL above 0.4 ('floor': 0.63).
    """
    rewards = logged(run, "reward")
    assert len(rewards) == 8
    assert rewards[0] < 0.2
    return rewards[-1] - rewards[0] > 0.6 and max(logged(run, "troll/kl_before/mean")) < 1


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="bucket"),
        pytest.param({"tail": "floor", "max_support": 263}, id="floor"),
        pytest.param({"kind": "moe"}, id="experts"),
        pytest.param({"loss_type": "grpo", "importance_sampling_level": "sequence"}, id="sequence ratios"),
        pytest.param({"advantage_estimator": "reinforce_pp"}, id="advantages per token"),
    ],
)
def test_a_model_learns_what_is_rewarded(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = run_of(tmp_path, **changes)
    assert learned(run)
    # It learns through the bound, and not because nothing is ever projected.
    fractions = logged(run, "troll/projected_fraction")
    assert sum(fractions) / len(fractions) > 0.3
    assert max(logged(run, "troll/kl_after/max")) <= 0.05 * (1 + 1e-5)


def always_the_old_policy(step: Constrained) -> Constrained:
    return step._replace(log_ratio=torch.zeros_like(step.log_ratio))


def no_gradient(step: Constrained) -> Constrained:
    return step._replace(log_ratio=step.log_ratio.detach())


def gradient_of_the_wrong_sign(step: Constrained) -> Constrained:
    return step._replace(log_ratio=2 * step.log_ratio.detach() - step.log_ratio)


def of_the_next_token_in_the_support(step: Constrained) -> Constrained:
    other = step.projection.log_probs[..., 1]
    return step._replace(log_ratio=other - other.detach())


def regression_that_pushes_away(step: Constrained) -> Constrained:
    return step._replace(regression=-step.regression)


def regression_a_hundred_times_too_strong(step: Constrained) -> Constrained:
    return step._replace(regression=100 * step.regression)


@pytest.mark.parametrize(
    "mistake",
    [
        always_the_old_policy,
        no_gradient,
        gradient_of_the_wrong_sign,
        of_the_next_token_in_the_support,
        regression_that_pushes_away,
        regression_a_hundred_times_too_strong,
    ],
)
def test_with_a_mistake_it_does_not(
    tmp_path: Path, mistake: Callable[[Constrained], Constrained], monkeypatch: pytest.MonkeyPatch
) -> None:
    constrain = passes.constrain
    monkeypatch.setattr(passes, "constrain", lambda *args, **named: mistake(constrain(*args, **named)))
    assert not learned(run_of(tmp_path))


def test_with_a_derivative_of_the_wrong_sign_at_the_bound_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the bound is not active, the gradient is right: the first update on every rollout still is one."""
    vjp = ops.vjp
    monkeypatch.setattr(ops, "vjp", lambda grad, log_probs, d, mix: vjp(-grad, log_probs, d, mix))
    assert not learned(run_of(tmp_path))
