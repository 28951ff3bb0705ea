"""Which arm a run's settings amount to."""

from __future__ import annotations

from typing import Any

import pytest

from troll.lab.runs.arms import ARMS, arm_of
from troll.trl import TROLLConfig


def settings(**changes: Any) -> dict[str, Any]:
    """As they are written to run.json."""
    return TROLLConfig("unused", use_cpu=True, bf16=False, **changes).to_dict()


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_recognised(arm: str) -> None:
    assert arm_of(settings(**ARMS[arm]))[0] == arm


def test_labels_tell_the_arms_apart() -> None:
    labels = {arm: arm_of(settings(**given))[1] for arm, given in ARMS.items()}
    assert labels == {
        "troll": "TROLL, KL ≤ 0.2",
        "clip": "clip ±0.2",
        "clip-higher": "clip −0.2, +0.28",
        "gspo": "GSPO clip −0.0003, +0.0004",
        "none": "no trust region",
    }


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({"trust_region": "clip", "epsilon": 0.1}, "clip ±0.1"),
        ({"trust_region": "clip", "epsilon": 0.2, "epsilon_high": 0.3}, "clip −0.2, +0.3"),
        ({"trust_region": "clip", "importance_sampling_level": "sequence"}, "GSPO clip ±0.2"),
        ({"trust_region": "troll", "importance_sampling_level": "sequence"}, "TROLL, KL ≤ 0.2, sequence ratio"),
        ({"trust_region": "none", "importance_sampling_level": "sequence"}, "no trust region, sequence ratio"),
        ({"trust_region": "clip", "loss_type": "cispo", "epsilon_high": 5.0}, "TRL's cispo"),
    ],
)
def test_settings_of_ones_own(changes: dict[str, Any], label: str) -> None:
    assert arm_of(settings(**changes)) == ("custom", label)


def test_the_bound_is_part_of_the_name_and_not_of_the_arm() -> None:
    assert arm_of(settings(kl_bound=0.01)) == ("troll", "TROLL, KL ≤ 0.01")
    assert arm_of(settings(kl_bound=float("inf"))) == ("troll", "TROLL, KL ≤ inf")
    assert arm_of(settings()) == ("troll", "TROLL, KL ≤ 0.2")
    assert arm_of({**settings(), "bound": "projected", "bound_target": 0.03}) == (
        "troll",
        "TROLL, projected bound",
    )  # of 0.1.0
    assert arm_of(settings(kl_bound_schedule="projected target=0.03")) == ("troll", "TROLL, projected bound")


def test_an_upper_clip_like_the_lower_one_is_the_plain_clip() -> None:
    assert arm_of(settings(trust_region="clip", epsilon=0.2, epsilon_high=0.2)) == ("clip", "clip ±0.2")
