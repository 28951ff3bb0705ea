"""What may change when a run goes on, what may not, and how it is said."""

from __future__ import annotations

from typing import Any

import pytest

from troll.errors import InputError
from troll.trl.robust.fingerprint import affects_training, differences, refuse_changes

BEFORE: dict[str, Any] = {
    "settings": {
        "learning_rate": 5e-6,
        "lr_scheduler_type": "constant",
        "max_steps": 80,
        "warmup_steps": 8,
        "reward_weights": None,
        "generation_kwargs": {"top_k": 5},
    },
    "versions": {"torch": "2.13.0", "trl": "1.16.0"},
    "data": {"train": {"rows": 100}},
}


def changed(**settings: Any) -> dict[str, Any]:
    return {**BEFORE, "settings": {**BEFORE["settings"], **settings}}


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (BEFORE, []),
        (changed(learning_rate=1e-4), ["learning_rate: 5e-06 → 0.0001"]),
        (changed(generation_kwargs={"top_k": 6}), ["generation_kwargs.top_k: 5 → 6"]),
        (changed(generation_kwargs=None), ["generation_kwargs.top_k: 5 → absent"]),
        (changed(reward_weights=[1.0, 2.0]), ["reward_weights: absent → [1.0, 2.0]"]),
        (changed(kl_bound=0.0), ["kl_bound: absent → 0.0"]),
        ({**BEFORE, "versions": {"torch": "2.12.0", "trl": "1.16.0"}}, ["versions.torch: 2.13.0 → 2.12.0"]),
        ({**BEFORE, "data": {"train": {"rows": 99}}}, ["data.train.rows: 100 → 99"]),
        ({**BEFORE, "processes": 2}, ["processes: absent → 2"]),
    ],
)
def test_what_differs_is_said(after: dict[str, Any], said: list[str]) -> None:
    assert differences(BEFORE, after) == said


def test_lists_are_the_same_as_tuples_and_nothing_as_none() -> None:
    assert differences({"a": [1, (2,)], "b": None}, {"a": (1, [2])}) == []


@pytest.mark.parametrize(
    "name",
    [
        *("logging_steps", "save_steps", "save_strategy", "save_total_limit", "report_to", "run_name", "output_dir"),
        *("hub_model_id", "push_to_hub", "dataloader_num_workers", "disable_tqdm", "eval_on_start", "allow_changes"),
        *("log_completions", "ddp_timeout", "vllm_server_port"),
    ],
)
def test_what_cannot_change_the_course_is_free(name: str) -> None:
    assert not affects_training(name)
    assert differences({"settings": {name: 1}}, {"settings": {name: 2}}) == []
    assert differences({name: 1}, {name: 2}, everything=True) == [f"{name}: 1 → 2"]


@pytest.mark.parametrize(
    "name",
    [
        *("learning_rate", "seed", "eval_steps", "eval_strategy", "per_device_eval_batch_size", "temperature"),
        *("kl_bound", "trust_region", "updates_per_generation", "bf16", "use_cpu", "optim", "shuffle_dataset"),
    ],
)
def test_what_can_is_not(name: str) -> None:
    """An evaluation draws random numbers."""
    assert differences({"settings": {name: 1}}, {"settings": {name: 2}}) == [f"{name}: 1 → 2"]


@pytest.mark.parametrize(
    ("schedule", "free"),
    [
        ({}, True),
        ({"lr_scheduler_type": "constant_with_warmup"}, True),
        ({"lr_scheduler_type": "linear"}, False),
        ({"lr_scheduler_type": "cosine"}, False),
        ({"warmup_steps": 0.1}, False),
        ({"warmup_ratio": 0.1}, False),
    ],
)
@pytest.mark.parametrize("name", ["max_steps", "num_train_epochs"])
def test_a_longer_run_is_the_same_as_far_as_it_goes_unless_the_rate_depends_on_it(
    schedule: dict[str, Any], free: bool, name: str
) -> None:
    before, after = changed(**schedule, **{name: 80}), changed(**schedule, **{name: 160})
    assert differences(before, after) == ([] if free else [f"{name}: 80 → 160"])


def test_changes_are_refused_unless_they_are_allowed() -> None:
    after = changed(learning_rate=1e-4, save_steps=3)
    with pytest.raises(InputError, match=r"\(learning_rate: 5e-06 → 0.0001\).*--allow_changes"):
        refuse_changes(BEFORE, after)
    assert refuse_changes(BEFORE, after, allow=True) == ["learning_rate: 5e-06 → 0.0001"]
    assert refuse_changes(BEFORE, BEFORE) == []


def test_many_changes_are_shown_in_part() -> None:
    before, after = ({"code": {f"{i:02d}.py": version for i in range(40)}} for version in ("a", "b"))
    with pytest.raises(InputError, match=r"code\.00\.py: a → b; .*; code\.11\.py: a → b; and 28 more\)"):
        refuse_changes(before, after)
    (long,) = differences({"a": "x" * 1000}, {"a": "y"})
    assert len(long) < 100
