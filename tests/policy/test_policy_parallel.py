"""A vocabulary divided among 2 and 3 processes gives the policy of the whole: choice, numbers, gradients, refusals."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import parallel_worker
import pytest
import torch
from parallel_worker import CASES, OBJECTIVES, REFUSED, SWEEP, UNEQUAL, Case, cases
from policy_cases import F32, F64, INF, same_bits, ulp
from torch import Tensor

import troll
from troll.policy import Scored, SparsePolicy

WORLDS = [2, pytest.param(3, marks=pytest.mark.slow)]
Found = list[dict[str, Any]]
"""By process, what was found in each case."""


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Found]:
    """How many processes → what they find. They run all cases one after another: starting them takes longer."""

    @functools.cache
    def of(world: int) -> Found | str:
        folder = tmp_path_factory.mktemp(f"world{world}")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, parallel_worker.__file__, str(folder)]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(world)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        said = [process.communicate(timeout=300)[0] for process in processes]
        files = [folder / f"{rank}.pt" for rank in range(world)]
        if not all(file.exists() for file in files):
            return "\n\n".join(text[-4000:] for text in said)
        return [torch.load(file, weights_only=True) for file in files]

    def found(world: int) -> Found:
        outcome = of(world)
        if isinstance(outcome, str):
            pytest.fail(outcome, pytrace=False)
        return outcome

    return found


def alone(case: Case, how: str, dtype: torch.dtype | None = None) -> tuple[Scored, Tensor]:
    """The same from all columns in one process, by definition; and its gradient. The logits may be of another type."""
    logits = case.logits().to(dtype or case.dtype).requires_grad_()
    options = {**case.options(), "impl": "reference"}
    if how == "sparsify":
        policy = troll.sparsify(logits, case.tokens(), case.K, case.tail_mass, temperature=case.temperature, **options)
    else:
        policy = troll.restrict(logits, case.old(), **options)
    # Masked rows are NaN, and 0 · −inf is: neither may reach the gradient.
    readable = torch.where(policy.valid[:, None], logits, 0.0).to(policy.log_probs.dtype)
    log_p = torch.log_softmax(torch.where(readable > -INF, readable, -1e30) / case.temperature, -1)
    entropy = torch.where(policy.valid, -(log_p.exp() * log_p).sum(-1), 0.0)
    scored = Scored(policy, entropy)
    case.upstream(scored).backward()
    assert logits.grad is not None
    return scored, logits.grad


def furthest(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinities must be the same."""
    assert a.shape == b.shape
    assert torch.equal(a == -INF, b == -INF)
    return float(torch.where(a == b, 0.0, a.double() - b.double()).abs().max()) if a.numel() else 0.0


def numbers(scored: Scored) -> dict[str, Tensor]:
    """What is compared, besides the gradient."""
    policy = scored.policy
    return {
        "log_probs": policy.log_probs.detach(),
        "log_tail": policy.log_tail.detach(),
        "entropy": scored.entropy.detach(),
    }


def compare(found: Found, case: Case, how: str, name: str) -> None:
    """Ids are those of the whole, numbers and gradients too, within what the rounding of a log Σ e^z can do.

    In fp64 that is 1e-11: there are numbers up to 300, whose spacing is 6e-14. In fp32 the truth is the same logits in
    fp64, and the plain version is some way from it. The parallel one may be as far, and as much further as it rounds
    more often: log Σ e^z is rounded in each process, in its share and in their sum, three times, by at most half of the
    spacing at log V + 1; and a log-probability or the logarithm of a tail once more at its own size. The entropy sums
    these errors with weights p. A gradient is a probability times upstream numbers, the largest of them below 30, and
    the relative error of a probability is the absolute one of its logarithm.
    """
    parts = [process[f"{how}: {name}"] for process in found]
    for part in parts[1:]:
        for key in ("ids", "log_probs", "log_tail", "entropy"):
            assert same_bits(part[key], parts[0][key]), key
    whole, gradient = alone(case, how)
    truth, true_gradient = alone(case, how, F64)
    assert torch.equal(parts[0]["ids"], whole.policy.token_ids)
    assert (parts[0]["vocab_size"], parts[0]["temperature"]) == (case.V, case.temperature)
    divided = torch.cat([part["grad"] for part in parts], dim=-1)
    assert divided.dtype == case.dtype
    if case.dtype == F64:
        for key, expected in numbers(whole).items():
            assert furthest(parts[0][key], expected) < 1e-11, key
        assert furthest(divided, gradient) < 1e-11
        return
    for key, expected in numbers(whole).items():
        true = numbers(truth)[key]
        size = max(math.log(case.V) + 1.0, float(true[true > -INF].abs().max()) if (true > -INF).any() else 0.0)
        budget = furthest(expected, true) + 2 * ulp(size, F32)
        assert furthest(parts[0][key], true) <= budget, key
    size = max(float(true_gradient.abs().max()), 1.0) if true_gradient.numel() else 1.0
    budget = furthest(gradient, true_gradient) + 30 * 2 * ulp(math.log(case.V) + 1.0, F32)
    if case.dtype == parallel_worker.BF16:  # the gradient itself is rounded to bf16, up to half a spacing either way
        budget += ulp(size, torch.bfloat16)
    assert furthest(divided, true_gradient) <= budget


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("how", ["sparsify", "restrict"])
@pytest.mark.parametrize("name", CASES)
def test_a_divided_vocabulary_is_the_whole_one(launch: Callable[[int], Found], world: int, how: str, name: str) -> None:
    compare(launch(world), CASES[name], how, name)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("how", ["sparsify", "restrict"])
def test_shares_may_be_unequal_and_smaller_than_the_support(
    launch: Callable[[int], Found], world: int, how: str
) -> None:
    unequal = {name: case for name, case in cases(world).items() if case.widths}
    assert {case.widths for case in unequal.values()} == set(UNEQUAL[world])
    for name, case in unequal.items():
        compare(launch(world), case, how, name)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("how", ["sparsify", "restrict"])
def test_settings_drawn_at_random(launch: Callable[[int], Found], world: int, how: str) -> None:
    for i in range(SWEEP):
        name = f"sweep {i}"
        compare(launch(world), cases(world)[name], how, name)


@pytest.mark.parametrize("world", WORLDS)
def test_cases_are_what_their_names_say(world: int) -> None:
    ties, empty = CASES["ties"].logits(), CASES["empty shards"]
    assert all(len(row.unique()) < 12 for row in ties)
    assert all(bool((empty.logits()[:, at] == -INF).all(-1).any()) for at in empty.columns(world))
    outside = CASES["the least probable is sampled"]
    ranked = outside.logits().argsort(-1, descending=True)[:, : outside.K]
    assert not (ranked == outside.tokens()[:, None]).any()
    masked = CASES["masked"]
    assert 0 < int(masked.loss_mask().sum()) < masked.N
    assert bool(masked.logits()[~masked.loss_mask()].isnan().all())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_one_collective_of_the_documented_size(launch: Callable[[int], Found], world: int, dtype: str) -> None:
    """4 numbers per position, and K ids and logits or K logits; the vocabulary size once; nothing on the way back."""
    name, size = ("plain", 8) if dtype == "fp64" else ("plain, fp32", 4)
    case = CASES[name]
    for process in launch(world):
        for how, per_position in (("sparsify", 2 * case.K + 4), ("restrict", case.K + 4)):
            expected = [("all_gather", size * (1 + case.N * per_position))]
            assert process[f"{how}: {name}"]["calls"] == expected
        few = CASES["more slots than tokens"]  # no more candidates than there are columns
        assert process["sparsify: more slots than tokens"]["calls"][0][1] == 8 * (1 + few.N * (2 * few.V // world + 4))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NaN", ["logit nan of token 20", "position [3]"]),
        ("NaN in the first column", ["logit nan of token 0", "position [3]"]),
        ("+inf", ["logit inf of token 35", "position [3]"]),
        ("the sampled token is excluded", ["got token 35 with logit −inf", "position [3]"]),
        ("all are excluded", ["only −inf logits", "position [3]"]),
        ("an unknown token", ["got token 36 at position [0]", "ids from 0 to 35"]),
        ("unequal without widths", ["another process a different number", "Pass widths"]),
        ("wrong widths", ["got [11, 11", "columns of each of the"]),
    ],
)
def test_every_process_refuses_and_says_why(
    launch: Callable[[int], Found], world: int, name: str, words: list[str]
) -> None:
    assert name in REFUSED
    for rank, process in enumerate(launch(world)):
        said = process[f"refused: {name}"]
        assert all(word in said for word in words), (rank, said)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["NaN", "+inf", "the sampled token is excluded", "all are excluded"])
def test_invalid_rows_can_be_masked(launch: Callable[[int], Found], world: int, name: str) -> None:
    for process in launch(world):
        found = process[f"sparsify: {name}"]
        valid = found["ids"][:, 0] >= 0
        assert valid.tolist() == [i != 3 for i in range(6)]
        assert (found["log_tail"][3], found["entropy"][3]) == (0.0, 0.0)
        assert bool((found["log_probs"][3] == -INF).all())
        assert bool((found["grad"][3] == 0).all())
        assert bool(found["grad"].isfinite().all())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["plain, fp32", "masked, fp32", "large, fp32"])
def test_a_policy_that_did_not_move_has_ratio_one(launch: Callable[[int], Found], world: int, name: str) -> None:
    """In every bit: otherwise the first update on a rollout would be projected for its rounding."""
    for process in launch(world):
        old, new = process[f"unmoved: {name}"]
        assert same_bits(old, new)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("tail", ["bucket", "floor"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_whole_objective(launch: Callable[[int], Found], world: int, tail: str, name: str) -> None:
    """Loss and gradient through a divided vocabulary and through the whole one; every process has ONE copy of it."""
    case = OBJECTIVES[name]
    logits = case.logits().requires_grad_()
    old = troll.sparsify((logits + parallel_worker.old_shift(case)).detach(), case.tokens(), case.K, case.tail_mass)
    proposal: SparsePolicy
    if tail == "bucket":
        proposal = troll.restrict(logits, old)
    else:
        proposal = troll.sparsify(logits, case.tokens(), case.K, case.tail_mass)
    loss = parallel_worker.loss_of(proposal, old, case, tail)
    loss.backward()
    assert logits.grad is not None
    # The projection's derivative divides by a variance: in fp32 its condition may cost a hundred roundings.
    tolerance = 1e-10 if case.dtype == F64 else 1e-5
    found = [process[f"{tail}: {name}"] for process in launch(world)]
    assert all(same_bits(part["loss"], found[0]["loss"]) for part in found)
    assert float(found[0]["loss"]) == pytest.approx(float(loss.detach()), abs=tolerance)
    divided = torch.cat([part["grad"] for part in found], dim=-1)
    assert float(logits.grad.abs().max()) > 1e-3
    assert furthest(divided, logits.grad) < tolerance
