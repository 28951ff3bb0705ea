"""Two processes train as one: DDP and FSDP2 on CPU over gloo, in fp32, with the bound active.

``distributed_worker`` says how the completions are the same on one process and on two. All cases of a strategy run in
one launch, since starting two processes takes longer than training.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed_worker
import pytest
import torch
from trl_cases import furthest

pytestmark = pytest.mark.slow

Outcome = dict[str, Any]
ESTIMATORS = ["dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]
BF16 = ["bf16", "bf16 measured clip"]
CONTROLLED = {  # what moves, and where it starts
    "network bound": {"troll/kl_bound": 0.05, "troll/regression_coef": 1.0},
    "projected bound": {"troll/kl_bound": 0.05},
}
SUMS = {  # of at most eight tokens: the mean over completions, or the largest
    "entropy bound": ("troll/sequence_kl_after", 8 * 0.05),
    "sequence bound": ("troll/sequence_kl_after/max", 0.1),
}
BOUNDS = [*CONTROLLED, *SUMS]
CASES = {
    "ddp": [
        *("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "floor"),
        *("accumulated", "checkpointed", "clipped gradient", "measured clip"),
        *(f"estimator {estimator}" for estimator in ESTIMATORS),
        *("cut dapo", "cut grpo", "cut reinforce_pp"),
    ],
    "fsdp": ["dapo", "grpo", "floor", "accumulated", "checkpointed", "clipped gradient", "cut dapo"],
}
ALL = [(strategy, case) for strategy, cases in CASES.items() for case in cases]
UPDATES = 6
FIRST_OF_A_ROLLOUT = [0, 4]


class Launch:
    """Two processes that train the cases of a strategy one after another."""

    def __init__(self, folder: Path, strategy: str, cases: list[str]) -> None:
        self.folder = folder
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", distributed_worker.__file__]
        done = subprocess.run(
            [sys.executable, *command, str(folder), strategy, *cases],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.said = done.stdout

    def __call__(self, case: str) -> list[Outcome]:
        """What the case came to on each process."""
        files = [self.folder / f"{case}.{rank}.pt" for rank in range(2)]
        if not all(file.exists() for file in files):
            pytest.fail(f"two processes did not get to the end of {case!r}:\n{self.said[-8000:]}", pytrace=False)
        return [torch.load(file, weights_only=True) for file in files]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[Outcome]]:
    """Strategy and case → what they come to on two processes."""
    extra = {"ddp": ["resumed", "scaled pull"], "fsdp": [*BF16, "bf16, outputs rounded", "resumed"]}

    @functools.cache
    def launch(strategy: str) -> Launch:
        return Launch(tmp_path_factory.mktemp(strategy), strategy, CASES[strategy] + BOUNDS + extra[strategy])

    return lambda strategy, case: launch(strategy)(case)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """Case → what it comes to on one process."""
    return functools.cache(lambda case: distributed_worker.train(tmp_path_factory.mktemp("one"), case))


def updates(outcome: Outcome) -> list[dict[str, float]]:
    """What was logged at each update, without times."""
    kept = [entry for entry in outcome["log"] if "grad_norm" in entry]
    return [{name: x for name, x in entry.items() if not name.endswith("time")} for entry in kept]


def of(outcome: Outcome, name: str) -> list[float]:
    return [entry[name] for entry in updates(outcome)]


@pytest.mark.parametrize(("strategy", "case"), ALL)
def test_two_processes_come_to_the_weights_of_one(two: Any, one: Any, strategy: str, case: str) -> None:
    alone, (first, second) = one(case), two(strategy, case)
    assert first["sharded"] == (list(first["weights"]) if strategy == "fsdp" else [])
    assert furthest(first["weights"], second["weights"]) == 0
    # Sums in another order: a few units of rounding of weights of order 1, 1.2e-7 each, and up to 5e-7 have been seen.
    # Six updates move them a thousand times further than the tolerance: a per cent of a gradient would be seen.
    assert furthest(alone["weights"], first["weights"]) < 1e-5
    assert furthest(first["weights"], first["start"]) > (4e-3 if case == "floor" else 2e-2)
    assert len(updates(first)) == len(updates(alone)) == UPDATES
    assert of(first, "loss") == pytest.approx(of(alone, "loss"), rel=1e-4, abs=1e-6)
    assert of(first, "grad_norm") == pytest.approx(of(alone, "grad_norm"), rel=1e-4)
    if case != "measured clip":
        projected = of(first, "troll/projected_fraction")
        assert min(projected[1:4]) > 0.1
        assert any(0.1 < share < 0.9 for share in projected)
        assert max(of(first, "troll/kl_after/max")) <= 0.05 * (1 + 1e-5)


@pytest.mark.parametrize("case", BOUNDS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_have_the_bounds_of_one(two: Any, one: Any, strategy: str, case: str) -> None:
    alone, (first, second) = one(case), two(strategy, case)
    assert first["sharded"] == (list(first["weights"]) if strategy == "fsdp" else [])
    assert updates(first) == updates(second)
    assert furthest(first["weights"], second["weights"]) == 0
    assert furthest(alone["weights"], first["weights"]) < 1e-5  # as above
    assert of(first, "troll/kl_bound") == pytest.approx(of(alone, "troll/kl_bound"), rel=1e-4)
    assert max(of(first, "troll/projected_fraction")) > 0.1
    for name, start in CONTROLLED.get(case, {}).items():
        assert of(first, name)[:4] == [start] * 4
        assert of(first, name)[4] == of(first, name)[5]
        assert 1 / 1.4 < of(first, name)[5] / start < 1.4  # within a step, or any measurement would do
        assert abs(of(first, name)[5] / start - 1) > 0.1
        assert of(first, name) == pytest.approx(of(alone, name), rel=1e-4)
    if case in SUMS:
        name, most = SUMS[case]
        assert max(of(first, name)) <= most * (1 + 1e-5)


def test_two_processes_scale_the_pull_by_the_advantages_of_both(two: Any, one: Any) -> None:
    alone, (first, second) = one("scaled pull"), two("ddp", "scaled pull")
    assert furthest(first["weights"], second["weights"]) == 0
    assert furthest(alone["weights"], first["weights"]) < 1e-5
    pull = of(first, "troll/regression_coef")
    assert pull == of(second, "troll/regression_coef") == pytest.approx(of(alone, "troll/regression_coef"), rel=1e-5)
    sizes = [abs(x) for outcome in (first, second) for x in outcome["rollouts"][0]["advantages"].tolist()]
    assert len(set(pull[:4])) == 1
    assert min(sizes) < pull[0] < max(sizes)


@pytest.mark.parametrize("case", ["accumulated", "checkpointed"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_saving_memory_does_not_change_the_weights(two: Any, one: Any, strategy: str, case: str) -> None:
    """The same completions in two batches per update, or with activations that are computed again."""
    assert furthest(one("dapo")["weights"], two(strategy, case)[0]["weights"]) < 1e-5  # as above


@pytest.mark.parametrize(("strategy", "case"), [pair for pair in ALL if pair[1] != "accumulated"])
def test_metrics_are_over_the_tokens_of_both_processes(two: Any, one: Any, strategy: str, case: str) -> None:
    """Left out is accumulation: its metrics are averages over batches, which each process draws for itself."""
    alone, (first, second) = updates(one(case)), map(updates, two(strategy, case))
    assert first == second
    for ours, theirs in zip(first, alone, strict=True):
        assert ours.keys() == theirs.keys()
        names = [name for name in ours if name.startswith("troll/")]
        assert {"troll/kl_before/p99", "troll/sequence_kl_before", "troll/ratio/min"} < set(names)
        for name in names:
            # With weights that agree to 5e-7, a KL agrees to about 1e-5 of itself. A metric of one process alone or the
            # mean of two means is off by per cents; and in a share, one token of at most 84 would be too many.
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(("strategy", "case"), [("ddp", "dapo"), ("fsdp", "grpo")])
def test_extremes_are_those_of_the_process_that_has_them(two: Any, strategy: str, case: str) -> None:
    """The ratios TRL takes, on one process or the other, reach just as far as is reported."""
    outcomes = two(strategy, case)
    pairs = list(zip(*(outcome["ratios"] for outcome in outcomes), strict=True))
    for outcome in outcomes:
        assert of(outcome, "troll/ratio/min") == pytest.approx([min(a + b) for a, b in pairs], rel=1e-6)
        assert of(outcome, "troll/ratio/max") == pytest.approx([max(a + b) for a, b in pairs], rel=1e-6)
    assert any(min(a) < min(b) or max(a) > max(b) for a, b in pairs)
    assert any(min(b) < min(a) or max(b) > max(a) for a, b in pairs)


@pytest.mark.parametrize("estimator", [*ESTIMATORS, "grpo"])
def test_advantages_are_those_of_one_process(two: Any, one: Any, estimator: str) -> None:
    case = "dapo" if estimator == "grpo" else f"estimator {estimator}"
    alone, outcomes = one(case), two("ddp", case)
    widths = [{rollout["completion_mask"].shape[1] for rollout in outcome["rollouts"]} for outcome in outcomes]
    assert min(widths[0]) > max(widths[1])  # each process pads its completions to a width of its own
    for number, whole in enumerate(alone["rollouts"]):
        expected, mask = whole["advantages"], whole["completion_mask"].bool()
        assert expected.dim() == (2 if "reinforce" in estimator else 1)
        assert expected.std() > 0.1
        parts = [outcome["rollouts"][number]["advantages"] for outcome in outcomes]
        if expected.dim() == 2:
            expected = expected * mask
            parts = [torch.nn.functional.pad(part, (0, mask.shape[1] - part.shape[1])) for part in parts]
        # The same rewards, gathered, then the same operations: only the padding of what is summed may differ.
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-6, atol=1e-6)
    for outcome in outcomes:
        assert outcome["logged_advantages"] == pytest.approx(alone["logged_advantages"], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("strategy", "case"), [pair for pair in ALL if pair[1].startswith("cut")])
def test_a_process_may_have_nothing_to_learn_from(two: Any, strategy: str, case: str) -> None:
    """That the weights are right is tested above; here, that the second process had not a single token."""
    first, second = two(strategy, case)
    assert all(rollout["completion_mask"].any(-1).all() for rollout in first["rollouts"])
    assert not any(rollout["completion_mask"].any() for rollout in second["rollouts"])
    assert len(second["rollouts"]) == 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_resumed_inside_a_rollout_is_the_same_run(two: Any, strategy: str) -> None:
    """On both processes: the completions of a rollout that is generated again would be others, the step being so."""
    for resumed in two(strategy, "resumed"):
        straight = resumed["straight"]
        assert {f"troll_rollout_0000{rank}.safetensors" for rank in range(2)} < set(resumed["files"])
        assert (len(straight["rollouts"]), len(resumed["rollouts"])) == (2, 1)
        assert of(straight, "troll/projected_fraction")[2] > 0.1
        assert updates(resumed)[2:] == updates(straight)[2:]
        assert furthest(resumed["weights"], straight["weights"]) == 0


@pytest.mark.parametrize("case", BF16)
def test_with_bf16_under_FSDP2_the_first_update_is_made_by_the_old_policy(two: Any, case: str) -> None:
    outcomes = two("fsdp", case)
    for update in FIRST_OF_A_ROLLOUT:
        for outcome in outcomes:
            assert outcome["ratios"][update] == pytest.approx([1, 1], abs=1e-6)
            assert of(outcome, "troll/ratio/min")[update] == pytest.approx(1, abs=1e-6)
            assert of(outcome, "troll/ratio/max")[update] == pytest.approx(1, abs=1e-6)
            assert of(outcome, "troll/kl_before/max")[update] < 1e-9
    assert min(of(outcomes[0], "troll/kl_before/max")[1:4]) > 0.05


def _rounding(outcomes: list[Outcome]) -> float:
    """Largest relative difference of the extreme ratios TRL takes to those that were reported."""
    apart = []
    for update in range(UPDATES):
        taken = [x for outcome in outcomes for x in outcome["ratios"][update]]
        for extreme, name in ((min(taken), "min"), (max(taken), "max")):
            apart.append(abs(extreme / of(outcomes[0], f"troll/ratio/{name}")[update] - 1))
    return max(apart)


def test_with_bf16_under_FSDP2_the_loss_takes_the_ratios_of_the_projection(two: Any) -> None:
    """FSDP2 rounds what a forward returns to bf16: log-probabilities around -5 to steps of 3 %."""
    assert _rounding(two("fsdp", "bf16")) < 1e-6
    assert _rounding(two("fsdp", "bf16, outputs rounded")) > 5e-3  # what it would be if they were left so
    bound = [of(outcome, "troll/kl_after/max") for outcome in two("fsdp", "bf16")]
    assert max(map(max, bound)) <= 0.05 * (1 + 1e-5)
