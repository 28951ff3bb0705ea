"""``SparsePolicy``: its invariants, one violation at a time, and its small methods."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from policy_cases import F32, F64, INF, by_hand, close, ids, normal, refuses, same_bits, same_policy

from troll.policy import SparsePolicy, sparsify


def parts(**change: object) -> dict[str, object]:
    """A good policy of two positions over five tokens, ¾ and all of the mass kept, with changes."""
    good: dict[str, object] = {
        "token_ids": torch.tensor([[3, 0, -1], [1, 2, 4]]),
        "log_probs": torch.tensor([[0.25, 0.5, 0.0], [0.5, 0.25, 0.25]]).log(),
        "log_tail": torch.tensor([0.25, 0.0]).log(),
        "vocab_size": 5,
        "temperature": 0.8,
    }
    return good | change


def policy(**change: object) -> SparsePolicy:
    return SparsePolicy(**parts(**change))  # type: ignore[arg-type]


def at(row: int, slot: int, value: float, name: str = "token_ids") -> dict[str, object]:
    """A change of one entry."""
    x = parts()[name].clone()  # type: ignore[attr-defined]
    x[(row, slot) if name != "log_tail" else row] = value
    return {name: x}


# ---- what it says about itself -------------------------------------------------------------------------------------


def test_properties_by_hand() -> None:
    masked = SparsePolicy(
        torch.tensor([[3, 0, -1], [1, 2, 4], [-1, -1, -1]]),
        torch.tensor([[0.25, 0.5, 0.0], [0.5, 0.25, 0.25], [0.0, 0.0, 0.0]], dtype=F64).log(),
        torch.tensor([0.25, 0.0, 1.0], dtype=F64).log(),
        5,
    )
    assert masked.shape == (3,)
    assert masked.valid.tolist() == [True, True, False]
    assert masked.sampled.tolist() == [3, 1, -1]
    assert masked.sampled_log_probs.tolist() == [math.log(0.25), math.log(0.5), -INF]
    assert masked.support_size.tolist() == [2, 3, 0]
    assert masked.kept_mass.tolist() == close([0.75, 1.0, 0.0], rel=1e-15)
    assert masked.temperature == 1.0


def test_kept_mass_of_a_tiny_support_has_all_its_digits() -> None:
    """Kept 1e-9, dropped the rest: 1 − e^tail would have three digits in fp64 log space, −expm1 has all of them."""
    tiny = SparsePolicy(
        torch.tensor([0]), torch.tensor([1e-9], dtype=F64).log(), torch.log1p(torch.tensor(-1e-9, dtype=F64)), 9
    )
    assert tiny.kept_mass.item() == close(1e-9, rel=1e-14)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy().temperature = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    "index", [0, slice(1, 3), [2, 0], torch.tensor([True, False, True, False]), (slice(None), 1), -1]
)
def test_indexing_chooses_positions(index: object) -> None:
    whole = sparsify(normal(4, 2, 9, seed=70), ids(4, 2, below=9, seed=71), 3, temperature=0.7)
    part = whole[index]
    assert torch.equal(part.token_ids, whole.token_ids[index])
    assert torch.equal(part.log_probs, whole.log_probs[index])
    assert torch.equal(part.log_tail, whole.log_tail[index])
    assert part.shape == whole.log_tail[index].shape
    assert (part.vocab_size, part.temperature) == (9, 0.7)


def test_indexing_carries_gradient() -> None:
    leaf = normal(3, 6, seed=72).requires_grad_()
    sparsify(leaf, torch.tensor([0, 1, 2]), 2)[1].sampled_log_probs.backward()
    assert leaf.grad[[0, 2]].abs().max().item() == 0.0
    assert leaf.grad[1].abs().max().item() > 0.1


def test_detach_keeps_the_numbers_and_drops_the_gradient() -> None:
    live = sparsify(normal(3, 6, seed=73).requires_grad_(), torch.tensor([0, 1, 2]), 2, temperature=1.5)
    assert live.log_probs.requires_grad
    assert live.log_tail.requires_grad
    constant = live.detach()
    assert not constant.log_probs.requires_grad
    assert not constant.log_tail.requires_grad
    assert same_policy(live, constant)


def test_to_moves_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert same_policy(policy().to("cpu"), policy())
    # The meta device stands in for an accelerator: it holds shapes only, so the contents cannot be checked there.
    here = policy()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    moved = here.to("meta")
    assert [x.device.type for x in (moved.token_ids, moved.log_probs, moved.log_tail)] == ["meta"] * 3
    assert (moved.vocab_size, moved.temperature) == (5, 0.8)


def test_pack_is_the_packed_policy() -> None:
    assert same_bits(policy().pack().log_probs, torch.tensor([0.25, 0.5, 0.5, 0.25, 0.25]).log())


def test_no_positions_is_a_policy_too() -> None:
    empty = SparsePolicy(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3), torch.zeros(0), 5)
    assert empty.shape == (0,)
    assert empty.support_size.tolist() == []


# ---- the form ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "given", "expected"),
    [
        ({"token_ids": torch.tensor([[3, 0], [1, 2]])}, "got [2, 2], [2, 3] and [2]", "[..., K]"),
        ({"log_probs": torch.zeros(3, 2)}, "got [2, 3], [3, 2] and [2]", "[..., K]"),
        ({"log_tail": torch.zeros(2, 1)}, "got [2, 3], [2, 3] and [2, 1]", "[...]"),
        ({"log_tail": torch.zeros(())}, "got [2, 3], [2, 3] and []", "[...]"),
        (
            {"token_ids": torch.tensor(0), "log_probs": torch.tensor(0.0), "log_tail": torch.tensor(-INF)},
            "got [], [] and []",
            "K ≥ 1",
        ),
        (
            {
                "token_ids": torch.zeros(2, 0, dtype=torch.int64),
                "log_probs": torch.zeros(2, 0),
                "log_tail": torch.zeros(2),
            },
            "got [2, 0], [2, 0] and [2]",
            "K ≥ 1",
        ),
        ({"token_ids": torch.tensor([[3, 0, -1], [1, 2, 4]], dtype=torch.int32)}, "torch.int32", "int64"),
        (
            {"token_ids": torch.tensor([[3.0, 0, -1], [1, 2, 4]])},
            "token_ids must have an integer dtype, got float32",
            "",
        ),
        (
            {"log_probs": parts()["log_probs"].bfloat16(), "log_tail": parts()["log_tail"].bfloat16()},
            "bfloat16",
            "2e-5",
        ),  # type: ignore[attr-defined]
        ({"log_probs": parts()["log_probs"].half(), "log_tail": parts()["log_tail"].half()}, "float16", "float32"),  # type: ignore[attr-defined]
        ({"log_tail": parts()["log_tail"].double()}, "torch.float32 and torch.float64", "both float64"),  # type: ignore[attr-defined]
        ({"temperature": 0.0}, "temperature must be a finite number > 0, got 0.0", "> 0"),
        ({"temperature": -0.5}, "temperature must be a finite number > 0, got -0.5", "> 0"),
        ({"temperature": math.nan}, "temperature must be a finite number > 0, got nan", "> 0"),
        ({"temperature": INF}, "temperature must be a finite number > 0, got inf", "> 0"),
    ],
)
def test_bad_forms_are_refused(change: dict[str, object], given: str, expected: str) -> None:
    policy()
    with refuses(given, expected):
        policy(**change)


# ---- the content ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "given", "expected", "hint"),
    [
        (at(1, 2, 2), "token_ids [1, 2, 2], log_probs", "at most once", "Merge"),
        (at(1, 2, 1), "token_ids [1, 2, 1], log_probs", "at most once", "Merge"),
        (at(1, 1, 5), "token_ids [1, 5, 4]", "from 0 to vocab_size − 1 = 4", "vocabulary size"),
        (at(0, 2, -2), "token_ids [3, 0, -2]", "from 0 to vocab_size − 1 = 4", "vocabulary size"),
        ({"vocab_size": 4}, "position [1]", "from 0 to vocab_size − 1 = 3", "vocabulary size"),
        ({"vocab_size": 0}, "vocab_size must be an integer ≥ 1, got 0", "", "vocabulary size"),
        (at(0, 0, -1), "token_ids [-1, 0, -1]", "have the sampled token in slot 0", "always keeps it"),
        (at(0, 2, 4), "token_ids [3, 0, 4]", "must be −inf in the unused slots", "sparsify"),
        (at(1, 1, -1), "token_ids [1, -1, 4]", "must be −inf in the unused slots", "sparsify"),
        (at(1, 1, math.nan, "log_probs"), "position [1]", "must be −inf in the unused slots", "sparsify"),
        (at(0, 1, -0.6, "log_probs"), "log_probs [-1.386, -0.6, -inf], log_tail -1.386", "sum to 1", "full softmax"),
        (at(1, 1, INF, "log_probs"), "position [1]", "sum to 1", "log_tail"),
        (at(0, 0, math.nan, "log_tail"), "log_tail nan", "sum to 1", "log_tail"),
        (at(1, 0, math.log(0.01), "log_tail"), "log_tail -4.605", "sum to 1", "log_tail = log(1 − Σ exp(log_probs))"),
    ],
)
def test_bad_contents_are_refused(change: dict[str, object], given: str, expected: str, hint: str) -> None:
    with refuses(given, expected, hint):
        policy(**change)


def test_a_masked_position_drops_everything() -> None:
    with refuses("token_ids [-1], log_probs [-inf], log_tail -1 at position [0]", "sum to 1"):
        SparsePolicy(torch.tensor([[-1]]), torch.tensor([[-INF]]), torch.tensor([-1.0]), 5)


def test_the_mass_may_be_off_by_rounding_but_not_by_more() -> None:
    log_tail = torch.tensor([0.25, 0.0]).log()
    for off, good in ((9e-4, True), (-9e-4, True), (1.2e-3, False), (-1.2e-3, False)):
        log_probs = torch.tensor([[0.25, 0.5 + off, 0.0], [0.5, 0.25, 0.25]]).log()
        if good:
            assert policy(log_probs=log_probs, log_tail=log_tail).sampled.tolist() == [3, 1]
        else:
            with refuses("position [0]", "sum to 1"):
                policy(log_probs=log_probs, log_tail=log_tail)


def test_the_first_bad_position_is_named_and_long_rows_are_cut() -> None:
    token_ids = torch.arange(16).reshape(2, 1, 8)
    token_ids[1, 0, 7] = 99
    with refuses("token_ids [8, 9, 10, 11, 12, 13, …], log_probs", "from 0 to vocab_size − 1 = 19"):
        SparsePolicy(token_ids, torch.full((2, 1, 8), math.log(1 / 8)), torch.full((2, 1), -INF), 20)


def test_unused_slots_may_lie_between_used_ones() -> None:
    gap = by_hand([[2, -1, 0]], [[0.5, 0.0, 0.25]], 4, dtype=F32)
    assert gap.support_size.tolist() == [2]
    assert gap.kept_mass.item() == close(0.75, rel=1e-6)
