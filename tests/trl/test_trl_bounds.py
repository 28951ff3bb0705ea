"""Bounds and α that adapt, in TRL's trainer: what they come to, what they are saved as, and what is refused."""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from transformers import TrainerCallback
from trl_cases import config, furthest, logged, prompts, trainer, weights

from troll.errors import InputError
from troll.objective.bounds import Measured
from troll.policy import PackedPolicy
from troll.trl import TROLLConfig, TROLLTrainer
from troll.trl.passes import OLD_POLICY
from troll.trl.robust.checkpoints import ABOUT
from troll.trl.robust.store import MANIFEST
from troll.trl.trust_region import BOUND_SCHEDULES, canonical_schedule, parse_schedule

NETWORK = {"kl_bound_schedule": "network target=0.05"}
PROJECTED = {"kl_bound_schedule": "projected target=0.6"}
SCHEDULE = {"kl_bound_schedule": "geometric end=0.01 rollouts=2"}
SEQUENCE = {"kl_bound_schedule": "sequence limit=0.12"}
ENTROPY = {"kl_bound_schedule": "entropy"}
PULL = {"regression_coef_schedule": "projected target=0.1"}


class Watched(TROLLTrainer):
    """Keeps what happened to the tokens of every pass."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.seen: list[tuple[dict[str, torch.Tensor], torch.Tensor]] = []
        super().__init__(*args, **named)

    def observe_tokens(self, stats: dict[str, torch.Tensor], counted: torch.Tensor, inputs: dict[str, Any]) -> None:
        self.seen.append((stats, counted))


def watched(folder: Path, **changes: Any) -> Watched:
    """On a model of which every sixteenth byte ends a completion: they differ in length."""
    model, tokens = tiny_models.build("dense")
    model.generation_config.eos_token_id = [2, *range(7, 263, 16)]
    built = trainer(folder, model=model, processing_class=tokens, **{"max_steps": 8, **changes})
    built.__class__ = Watched
    built.seen = []
    return built


def per_update(run: Any, name: str) -> list[float]:
    values = logged(run, name)
    assert len(values) == 8
    return values


# ---------------------------------------------------------------------- what they come to


@pytest.mark.parametrize(
    "constant",
    [
        {"kl_bound_schedule": "linear end=0.05 rollouts=3"},
        {"kl_bound_schedule": {"kind": "sequence", "limit": 1e6}},
        {"kl_bound_schedule": "sequence limit=1e6 by_prefix=true"},
    ],
)
@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_a_bound_that_happens_to_be_constant_trains_as_the_fixed_one_bit_for_bit(
    tmp_path: Path, tail: str, constant: dict[str, Any]
) -> None:
    runs = []
    for given in ({}, constant):
        runs.append(trainer(tmp_path / str(len(given)), tail=tail, **given))  # which draws its own numbers
        runs[-1].train()
    assert furthest(weights(runs[0]), weights(runs[1])) == 0
    assert max(logged(runs[0], "troll/projected_fraction")) > 0.5
    assert logged(runs[0], "troll/kl_bound") == logged(runs[0], "troll/regression_coef") == []
    assert logged(runs[1], "troll/kl_bound") == pytest.approx([0.05] * 4, rel=1e-6)  # a mean in fp32


def test_a_schedule_moves_with_the_rollouts(tmp_path: Path) -> None:
    """Also where evaluations make rollouts of their own, and updates have two batches."""
    run = trainer(
        tmp_path,
        max_steps=8,
        updates_per_generation=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=prompts(2),
        **SCHEDULE,
    )
    run.train()
    middle = math.sqrt(0.05 * 0.01)
    expected = [0.05, 0.05, middle, middle, 0.01, 0.01, 0.01, 0.01]
    assert per_update(run, "troll/kl_bound") == pytest.approx(expected, rel=1e-14)
    reached = per_update(run, "troll/kl_after/max")
    assert all(kl <= bound * (1 + 1e-6) for kl, bound in zip(reached, expected, strict=True))
    assert max(reached[2:]) > 0.5 * middle  # they act


def test_the_projected_share_moves_the_bound_as_the_formula_says(tmp_path: Path) -> None:
    """Two updates a rollout, so that one of them counts; every completion has eight tokens."""
    run = trainer(tmp_path, max_steps=8, updates_per_generation=2, **PROJECTED)
    run.train()
    bounds, shares = per_update(run, "troll/kl_bound"), per_update(run, "troll/projected_fraction")
    expected = [0.05, 0.05]
    for share in shares[1:6:2]:
        factor = min(max(math.sqrt(share / 0.6), 1 / 1.5), 1.5)
        expected += [min(max(expected[-1] * factor, 0.005), 0.5)] * 2
    assert bounds == pytest.approx(expected, rel=1e-6)
    assert len(set(bounds)) == 4
    assert sum(share > 0 for share in shares[1::2]) >= 2


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_KL_of_the_network_at_the_last_update_moves_the_bound_and_the_share_outside_moves_the_pull(
    tmp_path: Path, accumulation: int
) -> None:
    run = trainer(
        tmp_path,
        max_steps=8,
        updates_per_generation=4,
        gradient_accumulation_steps=accumulation,
        learning_rate=3e-3,
        kl_bound_schedule="network target=0.1",
        regression_coef_schedule="projected target=0.6",
    )
    run.train()
    kl, shares = per_update(run, "troll/kl_before/mean"), per_update(run, "troll/projected_fraction")
    bound, pull = 0.05 * math.sqrt(0.1 / kl[3]), math.sqrt(shares[3] / 0.6)
    assert 0.05 / 1.5 < bound < 0.05
    assert 1 < pull < 1.5
    assert per_update(run, "troll/kl_bound") == pytest.approx([0.05] * 4 + [bound] * 4, rel=1e-6)
    assert per_update(run, "troll/regression_coef") == pytest.approx([1.0] * 4 + [pull] * 4, rel=1e-6)


def test_the_loss_has_the_pull_of_now(tmp_path: Path) -> None:
    """loss(α) = loss(0) + α · regression: linear in α, on a batch where the region acts."""
    run = trainer(tmp_path, learning_rate=1e-2, max_steps=2, **PULL)
    run.train()
    assert run.region.regression is not None
    run.model.train()
    batch = run._buffered_inputs[0]
    losses = []
    for alpha in (1.0, 2.0, 4.0):
        run.region.regression.now = alpha
        losses.append(run._compute_loss(run.model, batch).item())
    assert losses[1] - losses[0] > 1e-3
    # Differences of losses of about 0.1 in fp32, eps 1e-7, here of 0.01 and more.
    assert losses[2] - losses[1] == pytest.approx(2 * (losses[1] - losses[0]), rel=1e-3)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_pp"])
def test_a_scaled_pull_is_the_mean_size_of_the_advantages_over_the_tokens_of_the_rollout(
    tmp_path: Path, estimator: str
) -> None:
    class Kept(TROLLTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            output = super()._generate_and_score_completions(inputs)
            A, mask = output["advantages"].double(), output["completion_mask"].bool()
            tokens = [abs(float(A[i] if A.dim() == 1 else A[i, t])) for i, t in mask.nonzero().tolist()]
            self.sizes = [*getattr(self, "sizes", []), sum(tokens) / len(tokens)]
            return output

    run = watched(tmp_path, scale_regression=True, regression_coef=0.5, advantage_estimator=estimator)
    run.__class__ = Kept
    run.train()
    assert len(run.sizes) == 2
    assert min(run.sizes) > 0.05
    expected = [0.5 * size for size in run.sizes for _ in range(4)]
    assert per_update(run, "troll/regression_coef") == pytest.approx(expected, rel=1e-5)


def test_ten_times_the_rewards_are_ten_times_the_loss_and_gradient_if_the_pull_is_scaled(tmp_path: Path) -> None:
    def run(factor: float, scaled: bool) -> list[float]:
        def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
            return [factor * (sum(ids) % 7) for ids in completion_ids]

        given = {"advantage_estimator": "rloo", "max_grad_norm": 1e9, "learning_rate": 1e-3, "kl_bound": 0.002}
        place = tmp_path / f"{factor}-{scaled}"
        built = trainer(place, reward_funcs=reward, max_steps=4, scale_regression=scaled, **given)
        built.train()
        assert max(logged(built, "troll/projected_fraction")) > 0
        return logged(built, "grad_norm")

    small, large = run(0.1, True), run(1.0, True)
    assert large == pytest.approx([10 * x for x in small], rel=1e-3)  # Adam's ε is the only thing that is not scaled
    assert run(1.0, False)[1] != pytest.approx(10 * run(0.1, False)[1], rel=1e-2)


def test_what_is_fixed_is_what_the_arguments_say_now(tmp_path: Path) -> None:
    """As before there were bounds that adapt: a callback may change them."""

    class Widen(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            args.kl_bound = 0.2 if state.global_step >= 2 else 0.05

    run = trainer(tmp_path, callbacks=[Widen()])
    run.train()
    largest = logged(run, "troll/kl_after/max")
    assert largest[1] == pytest.approx(0.05, rel=1e-5)
    assert largest[2:] == pytest.approx([0.2, 0.2], rel=1e-5)


@pytest.mark.parametrize("highest", [None, 0.0501])
def test_by_entropy_the_mean_over_a_rollout_is_the_bound_and_each_token_has_its_share(
    tmp_path: Path, highest: float | None
) -> None:
    """Under a cap that a good part of the tokens reaches, each has its share up to there, and the mean is lower."""
    run = watched(tmp_path, kl_bound_schedule={"kind": "entropy", "max": highest})
    run.train()
    cap = math.inf if highest is None else highest
    for first in (0, 4):  # the four batches of each rollout
        passes = run.seen[first : first + 4]
        tokens = torch.cat([stats["kl_bound"][counted] for stats, counted in passes]).double()
        capped = (tokens >= cap * (1 - 1e-6)).double().mean()
        if highest is None:
            assert tokens.mean().item() == pytest.approx(0.05, rel=1e-6)
        else:
            assert tokens.mean() < 0.05 * (1 - 1e-4)
            assert 0.1 < capped < 0.9
        assert tokens.std() > 1e-4
        assert tokens.min() >= 0.25 * 0.05
    # The last rollout, from the batches the trainer holds: H of the old policy, by its definition.
    H, bounds = [], []
    for batch, (stats, counted) in zip(run._buffered_inputs, run.seen[4:], strict=True):
        old = PackedPolicy.stack(batch[OLD_POLICY]).unpack()
        p = torch.cat([old.log_probs, old.log_tail[..., None]], -1)[counted].double().exp()
        H += (-torch.where(p > 0, p * p.log(), 0.0).sum(-1)).tolist()
        bounds += stats["kl_bound"][counted].tolist()
    mean = sum(H) / len(H)
    assert bounds == pytest.approx([min(0.05 * (0.25 + 0.75 * h / mean), cap) for h in H], rel=1e-5)
    for stats, counted in run.seen:
        assert (stats["kl_after"] <= stats["kl_bound"] * (1 + 1e-6))[counted].all()


@pytest.mark.parametrize("tail", ["bucket", "floor"])
@pytest.mark.parametrize("by_prefix", [False, True])
def test_no_completion_exceeds_its_budget(tmp_path: Path, tail: str, by_prefix: bool) -> None:
    schedule = f"sequence limit=0.12 by_prefix={by_prefix}"
    run = watched(tmp_path, tail=tail, kl_bound_schedule=schedule)
    run.train()
    largest, reported = 0.0, per_update(run, "troll/sequence_kl_after/max")
    for (stats, counted), most in zip(run.seen, reported, strict=True):
        spent = torch.where(counted, stats["kl_after"].double(), 0.0).sum(-1)
        largest = max(largest, spent.max().item())
        assert bool((spent <= 0.12 * (1 + 1e-6)).all())  # as each is stored, in fp32
        assert most == pytest.approx(spent.max().item(), rel=1e-6)
        assert most <= 0.12 * (1 + 1e-6)
        assert bool((stats["kl_after"] <= 0.05 * (1 + 1e-6)).all())
        first = stats["kl_bound"][:, 0].double()
        lengths = torch.full_like(first, 8) if by_prefix else counted.sum(-1)
        some = counted[:, 0]
        assert first[some].tolist() == pytest.approx((0.12 / lengths).clamp(max=0.05)[some].tolist(), rel=1e-6)
    assert largest > 0.119
    assert len({int(n) for _, counted in run.seen for n in counted.sum(-1)}) > 2
    before = [torch.where(c, s["kl_before"], 0.0).sum(-1).max().item() for s, c in run.seen]
    assert max(before) > 0.5
    assert per_update(run, "troll/sequence_kl_before/max") == pytest.approx(before, rel=1e-6)


# ---------------------------------------------------------------------- what is observed


def poison(run: Any, update: int) -> None:
    """The gradient of one update is not finite."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (math.nan if run.state.global_step + 1 == update else 1.0)

    next(run.model.parameters()).register_hook(spoil)


def test_an_update_that_is_not_made_is_not_observed(tmp_path: Path) -> None:
    """The last one of the first rollout: what counts is the one before it."""
    run = trainer(tmp_path, max_steps=8, learning_rate=3e-3, **NETWORK)
    poison(run, 4)
    run.train()
    assert run.guards.skipped_updates == 1
    kl = logged(run, "troll/kl_before/mean")
    expected = 0.05 * min(max(math.sqrt(0.05 / kl[2]), 1 / 1.5), 1.5)
    assert logged(run, "troll/kl_bound")[-1] == pytest.approx(expected, rel=1e-6)
    assert kl[2] > 1e-3


def test_after_a_first_update_that_is_not_made_the_second_is_the_first(tmp_path: Path) -> None:
    """Two updates on a rollout, the first is skipped: the other was made by the old policy, and says nothing."""
    run = trainer(tmp_path, max_steps=4, updates_per_generation=2, **NETWORK)
    poison(run, 1)
    run.train()
    assert logged(run, "troll/kl_bound")[-1] == 0.05


def test_an_update_that_is_made_once_more_is_observed_once(tmp_path: Path) -> None:
    """Memory runs out in the last update of the first rollout, in its second pass; both are made again, in halves."""
    failed: list[int] = []

    def fail(run: Any) -> None:
        def look(module: Any, inputs: Any, output: Any) -> None:
            if torch.is_grad_enabled() and run.state.global_step == 3:
                failed.append(1)
                if len(failed) == 2:
                    raise torch.OutOfMemoryError("CUDA out of memory.")

        run.model.model.layers[0].register_forward_hook(look)

    seen: dict[bool, list[Any]] = {}
    for fails in (False, True):
        run = trainer(
            tmp_path / str(fails), max_steps=5, gradient_accumulation_steps=2, learning_rate=3e-3, **PROJECTED
        )
        observe, seen[fails] = run.region.observe, []
        run.region.observe = lambda passes, to=seen[fails], own=observe: (to.append(passes), own(passes))[1]
        if fails:
            fail(run)
        run.train()
    assert failed
    assert [len(passes) for passes in seen[False]] == [2, 2, 2, 2, 2]
    assert [len(passes) for passes in seen[True]] == [2, 2, 2, 4, 4]
    for once, halves in zip(seen[False][:4], seen[True][:4], strict=True):
        assert sum(part.tokens for part in halves) == sum(part.tokens for part in once) == 128
        assert Measured.of(halves) == pytest.approx(Measured.of(once), rel=1e-5)  # a KL in fp32, in other batches


# ---------------------------------------------------------------------- going on


class StopAfter(TrainerCallback):
    """Ends the training after so many updates, with a checkpoint in hand."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.updates:
            control.should_save = control.should_training_stop = True


def start(folder: Path, **changes: Any) -> Any:
    """Three rollouts of three updates."""
    usual = {"max_steps": 9, "updates_per_generation": 3, "save_strategy": "steps", "save_steps": 9}
    return trainer(folder, **{**usual, "learning_rate": 3e-3, **changes})


def interrupt(folder: Path, after: int, **changes: Any) -> Path:
    start(folder, callbacks=[StopAfter(after)], **changes).train()
    return folder / f"checkpoint-{after}"


def result(run: Any) -> Any:
    log = [{k: x for k, x in e.items() if k != "step_time"} for e in run.state.log_history if "loss" in e]
    return log, run.region.state()


RUNS = {
    "network and pull": {**NETWORK, **PULL},
    "projected": PROJECTED,
    "schedule": SCHEDULE,
    "entropy": ENTROPY,
    "sequence": {**SEQUENCE, "kl_bound": math.inf},  # which JSON does not have
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def run(kind: str) -> Any:
        if kind not in made:
            made[kind] = start(tmp_path_factory.mktemp("whole"), **RUNS[kind])
            made[kind].train()
        return made[kind]

    return run


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        *(("network and pull", n) for n in range(1, 9)),
        ("projected", 2),
        ("projected", 6),
        ("schedule", 4),
        ("entropy", 4),
        ("sequence", 4),
    ],
)
def test_an_interrupted_run_is_the_run_that_never_stopped(
    tmp_path: Path, whole: Callable[[str], Any], kind: str, after: int
) -> None:
    checkpoint = interrupt(tmp_path, after, **RUNS[kind])
    second = start(tmp_path, **RUNS[kind])
    second.train(resume_from_checkpoint=str(checkpoint))
    assert furthest(weights(whole(kind)), weights(second)) == 0
    assert result(whole(kind)) == result(second)
    saved = [
        json.loads((Path(run.args.output_dir) / "checkpoint-9" / ABOUT).read_text()) for run in (whole(kind), second)
    ]
    assert saved[0]["region"] == saved[1]["region"]


def test_without_its_state_a_resumed_run_is_another_one_and_says_so(
    tmp_path: Path, whole: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """What makes the equality above mean something."""
    checkpoint = interrupt(tmp_path, 4, **RUNS["network and pull"])
    about = json.loads((checkpoint / ABOUT).read_text())
    assert set(about.pop("region")) == {"kl_bound", "regression_coef"}
    (checkpoint / ABOUT).write_text(json.dumps(about))
    (checkpoint / MANIFEST).unlink()
    second = start(tmp_path, **RUNS["network and pull"])
    with caplog.at_level(logging.WARNING):
        second.train(resume_from_checkpoint=str(checkpoint))
    assert "kl_bound starts again at 0.05" in caplog.text
    assert logged(second, "troll/kl_bound")[4] == 0.05 != logged(whole("network and pull"), "troll/kl_bound")[4]
    assert furthest(weights(whole("network and pull")), weights(second)) > 0


def test_other_settings_start_anew_and_the_same_ones_go_on(tmp_path: Path) -> None:
    checkpoint = interrupt(tmp_path, 4, **NETWORK)
    second = start(tmp_path, kl_bound_schedule="network target=0.02", allow_changes=True)
    second.train(resume_from_checkpoint=str(checkpoint))
    assert logged(second, "troll/kl_bound")[3] != 0.05
    assert logged(second, "troll/kl_bound")[4] == 0.05


def test_a_run_with_a_fixed_bound_writes_nothing_of_it(tmp_path: Path) -> None:
    about = json.loads((interrupt(tmp_path, 1) / ABOUT).read_text())
    assert about.keys() == {"fingerprint", "guards"}


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kl_bound_schedule": "sometimes"}, "must be of kind geometric or linear .* got 'sometimes'"),
        ({"kl_bound_schedule": "geometrical end=1"}, "Did you mean 'geometric'"),
        ({"kl_bound_schedule": ""}, "got ''"),
        ({"kl_bound_schedule": 0.1}, "kl_bound_schedule must be a .*, got .*0.1"),
        ({"kl_bound_schedule": "{kind: linear"}, "not valid JSON"),
        ({"kl_bound_schedule": {"target": 0.1}}, "must have the key 'kind', got 'target'. For example {'kind': 'geo"),
        ({"kl_bound_schedule": {"type": "linear"}}, "must have the key 'kind', got 'type'"),
        ({"kl_bound_schedule": {}}, "must have the key 'kind', got no keys"),
        ({"kl_bound_schedule": {"kind": ["linear"]}}, "must be of kind .* got .'linear'."),
        ({"kl_bound_schedule": "Geometric end=0.01 rollouts=50"}, "Did you mean 'geometric'"),
        ({"kl_bound_schedule": "geometric End=0.01 rollouts=50"}, "Did you mean 'end'"),
        ({"kl_bound_schedule": "geometric 0.01 50"}, "got '0.01' in .* For example 'geometric end=0.01 rollouts=50'"),
        ({"kl_bound_schedule": "geometric end=0.1 end=0.2 rollouts=5"}, "kl_bound_schedule has end more than once"),
        ({"kl_bound_schedule": '{"kind": "projected", "target": 0.1, "target": 0.2}'}, "has target more than once"),
        (
            {"kl_bound_schedule": "geometric end=nan rollouts=5"},
            "^end of kl_bound_schedule must be a finite number > 0, got 'nan'. "
            "For example 'geometric end=0.01 rollouts=50'.$",
        ),
        ({"kl_bound_schedule": "geometric end=0 rollouts=5"}, "^end of kl_bound_schedule must be .* > 0, got '0'"),
        ({"kl_bound_schedule": "linear end=inf rollouts=5"}, "^end of kl_bound_schedule must be .* ≥ 0, got 'inf'"),
        ({"kl_bound_schedule": {"kind": "network", "target": True}}, "^target of kl_bound_schedule .* got True"),
        ({"kl_bound_schedule": {"kind": "network", "target": [1]}}, "^target of kl_bound_schedule .* got .1."),
        ({"kl_bound_schedule": "projected"}, "'projected' needs target. For example 'projected target=0.03'"),
        ({"kl_bound_schedule": "network"}, "'network' needs target"),
        ({"kl_bound_schedule": "sequence"}, "'sequence' needs limit"),
        ({"kl_bound_schedule": "geometric end=0.1"}, "'geometric' needs rollouts"),
        ({"kl_bound_schedule": "linear"}, "'linear' needs end and rollouts"),
        ({"kl_bound_schedule": "projected 0.1"}, "values as name=value, got '0.1'"),
        ({"kl_bound_schedule": "projected targt=0.1"}, "takes target, got targt=0.1. Did you mean 'target'"),
        ({"kl_bound_schedule": "entropy end=0.1"}, "'entropy' takes max .optional., got end=0.1"),
        (
            {"kl_bound_schedule": "projected target=much"},
            "target of kl_bound_schedule must be a fraction .* got 'much'",
        ),
        (
            {"kl_bound_schedule": "linear end=0.1 rollouts=2.5"},
            "^rollouts of kl_bound_schedule must be an integer ≥ 1, got '2.5'",
        ),
        ({"kl_bound_schedule": "sequence limit=1 by_prefix=perhaps"}, "by_prefix of .* must be true or false"),
        (
            {"kl_bound_schedule": "entropy max=0.01"},
            "^max of kl_bound_schedule must be at least kl_bound=0.05, .* got 0.01. For example 'entropy max=0.25'.$",
        ),
        ({"regression_coef_schedule": "linear end=2 rollouts=3"}, "regression_coef_schedule must be of kind projected"),
        ({"trust_region": "clip", **PROJECTED}, "needs trust_region='troll', got trust_region='clip'"),
        (
            {"trust_region": "none", **PULL},
            "regression_coef_schedule='projected target=0.1' needs trust_region='troll'",
        ),
        ({"trust_region": "none", "scale_regression": True}, "scale_regression=True needs trust_region='troll'"),
        ({"updates_per_generation": 1, **NETWORK}, "at least 2 updates per rollout, got updates_per_generation=1"),
        ({"updates_per_generation": 1, **PULL}, "at least 2 updates per rollout, got updates_per_generation=1"),
        (
            {
                "updates_per_generation": None,
                "steps_per_generation": 3,
                "gradient_accumulation_steps": 2,
                **NETWORK,
            },
            "got updates_per_generation=None",
        ),
        ({**PROJECTED, **PULL}, "both control the projected fraction"),
        ({"regression_coef": 0.0, **PULL}, "^regression_coef must be > 0 with regression_coef_schedule=.* got 0.0"),
        ({"regression_coef_schedule": "projected target=0"}, "^target of regression_coef_schedule must be a fraction"),
        ({"kl_bound": math.inf, **PROJECTED}, "^kl_bound must be a finite number > 0 with kl_bound_sch.* got inf"),
        ({"kl_bound": 0.0, **ENTROPY}, "^kl_bound must be a finite number > 0 with kl_bound_schedule=.* got 0.0"),
        ({"kl_bound_schedule": "projected target=3"}, "^target of kl_bound_schedule must be a fraction .* got '3'"),
        ({"kl_bound_schedule": "geometric end=0.01 rollouts=0"}, "^rollouts of kl_bound_schedule .* got '0'"),
        (
            {"kl_bound_schedule": "sequence limit=-1"},
            "^limit of kl_bound_schedule must be a finite number > 0, got '-1'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        config(tmp_path, **given)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("geometric   rollouts=50 end=0.010", "geometric end=0.01 rollouts=50"),
        ({"kind": "geometric", "end": 0.01, "rollouts": 50}, "geometric end=0.01 rollouts=50"),
        ('{"kind": "geometric", "end": 0.01, "rollouts": 50}', "geometric end=0.01 rollouts=50"),
        ("entropy", "entropy"),
        ({"kind": "entropy", "max": None}, "entropy"),
        ("sequence limit=2 by_prefix=True", "sequence limit=2.0 by_prefix=true"),
        (None, None),
    ],
)
def test_a_schedule_has_one_spelling_and_survives_it(tmp_path: Path, given: Any, line: str | None) -> None:
    assert config(tmp_path, kl_bound_schedule=given).kl_bound_schedule == line
    assert canonical_schedule("kl_bound_schedule", line) == line
    assert canonical_schedule("kl_bound_schedule", parse_schedule("kl_bound_schedule", line)) == line


def test_the_page_has_every_kind_and_every_field_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bounds.md").read_text()
    rows = re.findall(r"^\| `(\w+)[^`|]*` \| (.+?) \| .+ \|$", page, flags=re.MULTILINE)
    kinds = tuple(name for name, _ in rows if name in BOUND_SCHEDULES)
    assert kinds == tuple(BOUND_SCHEDULES)
    defaults = {entry.name: entry.default for entry in dataclasses.fields(TROLLConfig)}
    shown = {name: ast.literal_eval(default.strip("`")) for name, default in rows if name in defaults}
    assert shown == {x: defaults[x] for x in ("kl_bound_schedule", "regression_coef_schedule", "scale_regression")}


@pytest.mark.parametrize("given", [{"updates_per_generation": 1, **SCHEDULE}, {"kl_bound": math.inf, **SEQUENCE}])
def test_what_makes_sense_is_not(tmp_path: Path, given: dict[str, Any]) -> None:
    config(tmp_path, **given)
