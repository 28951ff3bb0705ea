"""What a reward function returns is a finite number or None for every completion, or the run says which one did not."""

from __future__ import annotations

import asyncio
import decimal
import logging
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from trl_cases import config, furthest, logged, lower_case, trainer, weights

from troll.errors import InputError, TrainingError
from troll.trl.robust.reward_validation import RewardChecks

NAN = math.nan


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "troll")
    return lambda: [x.message.split("] ")[-1] for x in caplog.records if x.name.startswith("troll")]


def rollout_of(run: Any) -> dict[str, Any]:
    """A rollout of 32 completions before it is shuffled, four of a prompt after another."""
    run.model.train()
    output: dict[str, Any] = run._generate_and_score_completions(next(iter(run.get_train_dataloader())))
    return output


def instead(value: Any, at: int = 5) -> Callable[..., list[Any]]:
    """A reward function with one value that is none."""

    def broken(completions: list[Any], **_: Any) -> list[Any]:
        said: list[Any] = list(lower_case(completions))
        said[at] = value
        return said

    return broken


def returns(value: Any) -> Callable[..., Any]:
    def broken(**_: Any) -> Any:
        return value

    return broken


def raises(**_: Any) -> list[float]:
    raise ZeroDivisionError("division by \x1b[31mzero")


async def raises_later(**_: Any) -> list[float]:
    await asyncio.sleep(0)
    raise ConnectionError("the judge does not answer")


async def late(completions: list[Any], **_: Any) -> list[Any]:
    await asyncio.sleep(0)
    return instead(NAN)(completions)


BAD_VALUES = [
    (instead(NAN), "'broken' returned nan for completion 5 ("),
    (instead(math.inf), "'broken' returned inf for completion 5 ("),
    (instead(-math.inf), "'broken' returned -inf for completion 5 ("),
    (instead(torch.tensor(NAN)), "'broken' returned tensor(nan) for completion 5 ("),
    (instead("good"), "'broken' returned 'good' for completion 5 ("),
    (instead([1.0]), "'broken' returned [1.0] for completion 5 ("),
    (instead(1e300), "'broken' returned 1e+300 for completion 5 ("),
    (instead(-1e16), "'broken' returned -1e+16 for completion 5 ("),
    (instead(1j), "'broken' returned 1j for completion 5 ("),
    (late, "'late' returned nan for completion 5 ("),
]
BAD_CALLS = [
    (
        raises,
        r"the reward function 'raises' raised ZeroDivisionError: division by .*zero at test_trl_rewards.py:",
    ),
    (raises_later, "'raises_later' raised ConnectionError: the judge does not answer at test_trl_rewards.py:"),
    (returns([1.0]), "'broken' returned 1 rewards for 32 completions"),
    (returns([1.0] * 33), "'broken' returned 33 rewards for 32 completions"),
    (returns([]), "'broken' returned 0 rewards for 32 completions"),
    (returns(None), "'broken' returned None"),
    (returns(1.0), "'broken' returned 1.0"),
    (returns("x" * 32), "'broken' returned 'xxxx"),
    (returns(dict.fromkeys(range(32))), "'broken' returned {0: None"),
    (returns(torch.tensor(1.0)), "'broken' returned tensor(1.)"),
]


# ---------------------------------------------------------------------- "raise", the default


@pytest.mark.parametrize(("function", "sentence"), [*BAD_VALUES, *BAD_CALLS])
@pytest.mark.parametrize("among_others", [False, True])
def test_a_reward_that_is_none_is_refused_with_its_function_and_completion(
    one_rollout: Any, function: Any, sentence: str, among_others: bool
) -> None:
    pattern = sentence if ".*" in sentence else re.escape(sentence)
    with pytest.raises(InputError, match=pattern) as refusal:
        one_rollout([lower_case, function] if among_others else [function])
    assert "None" in refusal.value.fix or "at most 1e+15" in refusal.value.fix
    if "raised" in sentence:
        assert isinstance(refusal.value.__cause__, ZeroDivisionError | ConnectionError)  # its traceback is shown


def test_an_error_of_ours_is_passed_on_as_it_is(one_rollout: Any) -> None:
    def refuses(**_: Any) -> None:
        raise InputError("the answer '1/0' is not a number", "Use another")

    with pytest.raises(InputError, match=r"^the answer '1/0' is not a number. Use another.$"):
        one_rollout([refuses])


@pytest.fixture(scope="module")
def one_rollout(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., torch.Tensor]:
    """The rewards [B, functions] that TRL gets for 32 completions."""
    run = trainer(tmp_path_factory.mktemp("rewards"), reward_funcs=[lower_case, late])
    run.model.train()
    texts = [f"Some text {i}" for i in range(32)]

    def rewards(functions: list[Any]) -> torch.Tensor:
        run.reward_funcs, run.reward_processing_classes = functions, [None] * len(functions)
        run.reward_func_names = [getattr(x, "__name__", "?") for x in functions]
        inputs = [{"prompt": "say", "column": i} for i in range(32)]
        given: torch.Tensor = run._calculate_rewards(inputs, ["say"] * 32, texts, [[1]] * 32)
        assert run.reward_funcs is functions  # as before, for whoever looks at them
        return given

    rewards.run = run  # type: ignore[attr-defined]
    return rewards


@pytest.mark.parametrize(
    "values",
    [
        [1, 2.5, True, Fraction(1, 4), decimal.Decimal("0.5"), np.float32(0.1), np.int64(3), torch.tensor(2.0)],
        np.linspace(0, 1, 8),
        torch.linspace(0, 1, 8, requires_grad=True),
        tuple(range(8)),
    ],
)
def test_whatever_is_a_number_is_taken_as_TRL_takes_it(one_rollout: Any, values: Any) -> None:
    exact = torch.tensor([float(x) for x in getattr(values, "tolist", lambda: values)()] * 4)
    repeated = torch.cat([values] * 4) if isinstance(values, torch.Tensor) else np.tile(values, 4).tolist()
    if isinstance(values, list):
        repeated = values * 4
    assert torch.equal(one_rollout([returns(repeated)])[:, 0], exact)
    assert torch.equal(one_rollout([lambda **_: iter(repeated)])[:, 0], exact)


def test_the_functions_get_all_that_TRL_gives_them(one_rollout: Any) -> None:
    given: dict[str, Any] = {}

    def looks(prompts: Any, completions: Any, completion_ids: Any, column: Any, trainer_state: Any, **rest: Any) -> Any:
        given.update(column=column, prompts=prompts, **rest)
        return [float(x) for x in column]

    assert one_rollout([looks])[:, 0].tolist() == list(range(32))
    assert given.keys() == {"column", "prompts", "log_extra", "log_metric"}


def test_None_leaves_a_completion_out_of_one_function_and_the_others_count(one_rollout: Any) -> None:
    rewards = one_rollout([instead(None), lower_case])
    assert rewards[5].isnan().tolist() == [True, False]
    assert rewards.isnan().sum() == 1


@pytest.mark.parametrize("as_mask", [False, True])
def test_a_rollout_of_which_nothing_can_be_scored_is_an_error(tmp_path: Path, as_mask: bool) -> None:
    """At once; or where rewards are masked, when it has happened as often as an update may be skipped."""
    none = returns([None] * 32)
    changes = {"on_invalid_reward": "mask", "max_skipped_updates": 1} if as_mask else {}
    run = trainer(tmp_path, reward_funcs=none, max_steps=12, **changes)
    before = weights(run)
    with pytest.raises(TrainingError, match="None of the 32 completions of a rollout has a reward; such") as stop:
        run.train()
    assert run.state.global_step == (4 if as_mask else 0)
    assert f"such rollouts: {1 + as_mask}" in str(stop.value)
    assert furthest(before, weights(run)) == 0
    assert logged(run, "troll/unscored_completions") == ([32] if as_mask else [])


def test_an_evaluation_of_which_nothing_can_be_scored_is_none(tmp_path: Path) -> None:
    data = trainer(tmp_path / "a").train_dataset.select(range(4))
    run = trainer(tmp_path / "b", reward_funcs=lambda completions, **_: [None] * len(completions), eval_dataset=data)
    metrics = run.evaluate()
    assert run.state.log_history[-1]["eval_troll/unscored_completions"] == 16
    assert metrics["eval_reward"] is None


# ---------------------------------------------------------------------- "mask"


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_a_masked_completion_is_in_no_baseline_and_has_no_advantage(
    tmp_path: Path, estimator: str, said: Callable[[], list[str]]
) -> None:
    """As if no function could score it: also where another function could, whose reward alone would be another one."""
    changes = {"on_invalid_reward": "mask", "advantage_estimator": estimator}
    run = trainer(tmp_path / "a", reward_funcs=[lower_case, instead(math.inf)], **changes)
    masked = rollout_of(run)["advantages"]
    unscored = trainer(tmp_path / "b", reward_funcs=[instead(None), instead(None)], advantage_estimator=estimator)
    expected = rollout_of(unscored)["advantages"]
    assert torch.equal(masked, expected)
    assert not masked[5].any()
    assert masked.abs().max() > 0.05
    group = lower_case(list(run._logs["completion"]))[4:8]
    others = [2 * x for i, x in enumerate(group) if i != 1]
    if estimator == "dr_grpo":  # by hand: of three, not of four with a zero
        mean = sum(others) / 3
        assert masked[4:8].tolist() == pytest.approx([others[0] - mean, 0.0, others[1] - mean, others[2] - mean])
    assert run._metrics["train"]["troll/unscored_completions"] == [1]
    assert unscored._metrics["train"]["troll/unscored_completions"] == [1]
    [sentence] = [x for x in said() if x.startswith("Masked")]
    assert "'broken' returned inf for completion 5" in sentence
    rollout_of(run)
    assert len([x for x in said() if x.startswith("Masked")]) == 1  # once of each kind
    assert run._metrics["train"]["troll/unscored_completions"] == [1, 1]


@pytest.mark.parametrize(("function", "sentence"), [BAD_VALUES[0], *BAD_VALUES[9:], BAD_CALLS[0], *BAD_CALLS[2:6]])
def test_what_is_masked_is_said(one_masking: Any, said: Any, function: Any, sentence: str) -> None:
    rewards = one_masking([lower_case, function])
    whole = (function, sentence) in BAD_CALLS
    assert rewards.isnan().all(1).sum() == (32 if whole else 1)
    assert torch.equal(rewards.isnan().all(1), rewards.isnan().any(1))
    assert re.search(sentence if ".*" in sentence else re.escape(sentence), said()[-1])


@pytest.fixture
def one_masking(one_rollout: Any) -> Iterator[Callable[..., torch.Tensor]]:
    run = one_rollout.run
    run.args.on_invalid_reward, run.args.max_skipped_updates = "mask", 100
    run._reported_faults.clear()
    yield one_rollout
    run.args.on_invalid_reward, run.args.max_skipped_updates = "raise", 3


def test_a_run_with_masked_rewards_learns_from_the_others_and_counts(tmp_path: Path) -> None:
    run = trainer(tmp_path, reward_funcs=instead(NAN), on_invalid_reward="mask", max_steps=8, logging_steps=8)
    before = weights(run)
    run.train()
    assert logged(run, "troll/unscored_completions") == [2]  # one of each rollout, added up
    assert furthest(before, weights(run)) > 1e-2
    rewards = torch.cat([batch["troll_rewards"] for batch in run._buffered_inputs])
    advantages = torch.cat([batch["advantages"] for batch in run._buffered_inputs])
    assert rewards.isnan().sum() == 1
    assert advantages[rewards.isnan()].tolist() == [0]


def test_rewards_stay_with_their_completions_and_nothing_is_counted_where_all_have_one(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=1)
    run.train()
    assert logged(run, "troll/unscored_completions") == []
    rewards = torch.cat([batch["troll_rewards"] for batch in run._buffered_inputs])
    ids = torch.cat([batch["completion_ids"] for batch in run._buffered_inputs])
    texts = run.processing_class.batch_decode(ids, skip_special_tokens=True)
    assert torch.equal(rewards, torch.tensor(lower_case(texts)))
    assert len(set(rewards.tolist())) > 2


# ---------------------------------------------------------------------- reward models


class Judge(torch.nn.Module):
    """Wraps a reward model, and spoils what it says."""

    def __init__(self, model: Any, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.spoil, self.config = model, spoil, model.config

    def forward(self, **inputs: Any) -> Any:
        output = self.model(**inputs)
        output.logits = self.spoil(output.logits.clone())
        return output


def judged(folder: Path, spoil: Callable[[torch.Tensor], torch.Tensor], **changes: Any) -> Any:
    model, tokens = tiny_models.build("reward")
    model.config._name_or_path = "some/judge"
    return trainer(folder, reward_funcs=Judge(model, spoil), reward_processing_classes=tokens, **changes)


@pytest.mark.parametrize("value", [NAN, math.inf, 1e20])
def test_a_reward_model_is_held_to_the_same(tmp_path: Path, value: float) -> None:
    def spoil(logits: torch.Tensor) -> torch.Tensor:
        logits[7] = value
        return logits

    run = judged(tmp_path, spoil)
    with pytest.raises(InputError, match=re.escape(f"returned {torch.tensor(value).item()!r}"[:12])) as refusal:
        rollout_of(run)
    assert "'judge' returned" in str(refusal.value)
    assert "for completion 7" in str(refusal.value)
    masked = judged(tmp_path, spoil, on_invalid_reward="mask")
    advantages = rollout_of(masked)["advantages"]
    assert advantages[7] == 0
    assert bool(advantages.isfinite().all())
    assert masked._metrics["train"]["troll/unscored_completions"] == [1]


def test_a_reward_model_that_fails_is_named(tmp_path: Path) -> None:
    def spoil(logits: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no answer")

    with pytest.raises(InputError, match="reward function 'judge' raised RuntimeError: no answer at test_trl"):
        rollout_of(judged(tmp_path, spoil))


# ---------------------------------------------------------------------- settings, and the tensor that travels


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"on_invalid_reward": "zero"}, "on_invalid_reward must be 'raise' or 'mask', got 'zero'"),
        ({"max_skipped_updates": -1}, "max_skipped_updates must be ≥ 0, got -1"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        config(tmp_path, **changes)


def test_what_another_process_could_not_use_is_seen_here() -> None:
    """It arrives as an infinite reward: NaN would pass for None."""
    watch = RewardChecks([lower_case, torch.nn.Linear(1, 1)], ["first", "second"])
    rewards = torch.tensor([[1.0, 2.0], [NAN, 1.0], [math.inf, 1.0], [1.0, NAN], [1.0, 1e20]])
    assert watch.invalid(rewards).tolist() == [False, False, True, True, True]
    assert watch.faults == []
    assert "'first' returned inf for completion 2" in str(watch.explain(rewards))
    assert "'second' returned nan for completion 0" in str(watch.explain(rewards[3:]))


def test_the_rewards_of_a_verl_worker_do_not_import_TRL() -> None:
    loaded = "'troll.trl.robust.reward_validation' in sys.modules, 'trl' in sys.modules"
    code = f"import sys, troll.lab.verl.data; print({loaded})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
