"""``align``: two policies on one support, by hand, against a dictionary, and against the dense KL."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import F32, F64, INF, by_hand, close, ids, normal, refuses, same_bits, ulp
from torch import Tensor

from troll.errors import InputError
from troll.policy import LOG_FLOOR, SparsePolicy, Tail, align, proposal_tail, restrict, sparsify, token_kl

TAILS: list[Tail] = ["floor", "bucket"]


def dense_kl(logits: Tensor, old_logits: Tensor) -> Tensor:
    """Σ p (log p − log q) over the whole vocabulary in float64, plain and differentiable."""
    log_p, log_q = torch.log_softmax(logits.double(), -1), torch.log_softmax(old_logits.double(), -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def proposal_for(logits: Tensor, old: SparsePolicy, tail: Tail, K: int, tail_mass: float) -> SparsePolicy:
    return sparsify(logits, old.sampled, K, tail_mass) if tail == "floor" else restrict(logits, old)


# ---- by hand -------------------------------------------------------------------------------------------------------


def test_floor_by_hand() -> None:
    """Old keeps 4, 1 of {¼, ½}, the proposal 4, 2 of {½, ⅜}: joined 4, 1, then the proposal's own 2."""
    old = by_hand([[4, 1, -1]], [[0.25, 0.5, 0.0]], 6)
    proposal = by_hand([[4, 2]], [[0.5, 0.375]], 6)
    p, q = align(proposal, old, "floor")
    P, Q = 0.5 + 1e-12 + 0.375, 0.25 + 0.5 + 1e-12
    assert p[0].exp().tolist() == close([0.5 / P, 1e-12 / P, 0.0, 0.0, 0.375 / P], rel=1e-13)
    assert q[0].exp().tolist() == close([0.25 / Q, 0.5 / Q, 0.0, 0.0, 1e-12 / Q], rel=1e-13)


def test_bucket_by_hand() -> None:
    old = by_hand([[4, 1, -1]], [[0.25, 0.5, 0.0]], 6)
    proposal = by_hand([[4, 1, -1]], [[0.5, 0.125, 0.0]], 6)
    p, q = align(proposal, old, "bucket")
    assert p[0].exp().tolist() == close([0.5, 0.125, 0.0, 0.375], rel=1e-15)
    assert q[0].exp().tolist() == close([0.25, 0.5, 0.0, 0.25], rel=1e-15)
    # ½ log 2 + ⅛ log ¼ + ⅜ log 1.5
    assert token_kl(p, q).item() == close(0.25 * math.log(2) + 0.375 * math.log(1.5), rel=1e-14)


def test_the_floor_is_log_1e12() -> None:
    assert math.exp(LOG_FLOOR) == close(1e-12, rel=1e-14)
    for dtype, rel in ((F32, 2e-7), (F64, 1e-15)):  # some ulp of the type: also of its floor
        old, proposal = by_hand([[0, 1]], [[0.5, 0.25]], 4, dtype), by_hand([[0, 2]], [[0.5, 0.25]], 4, dtype)
        p, q = align(proposal, old, "floor")
        total = 0.75 + 1e-12
        expected = [math.log(0.5 / total), math.log(1e-12 / total), -INF, math.log(0.25 / total)]
        assert p[0].tolist() == close(expected, rel=rel)
        assert q[0].tolist() == close([expected[0], expected[3], -INF, expected[1]], rel=rel)


def test_a_side_that_dropped_nothing_gives_missing_tokens_nothing() -> None:
    """The old policy excludes token 2 (all its mass is on 0 and 1); the proposal dropped token 1."""
    old = by_hand([[0, 1]], [[0.5, 0.5]], 4)
    proposal = by_hand([[0, 2]], [[0.5, 0.25]], 4)
    p, q = align(proposal, old, "floor")
    assert q[0].tolist() == close([math.log(0.5), math.log(0.5), -INF, -INF], rel=1e-15)
    assert p[0, 1].exp().item() == close(1e-12 / (0.75 + 1e-12), rel=1e-13)
    assert token_kl(p, q).item() == INF  # mass that the old policy excludes, for the projection to count
    p, q = align(old, proposal, "floor")
    assert p[0].tolist() == close([math.log(0.5), -INF, -INF, math.log(0.5)], rel=1e-15)
    assert token_kl(p, q).isfinite().item()


def test_bucket_of_a_side_that_dropped_nothing_is_empty() -> None:
    old = by_hand([[0, 1]], [[0.5, 0.5]], 4)
    p, q = align(by_hand([[0, 1]], [[0.5, 0.25]], 4), old, "bucket")
    assert q[0, 2].item() == -INF
    assert p[0, 2].exp().item() == close(0.25, rel=1e-15)
    assert token_kl(p, q).item() == INF


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_the_same_policy_on_both_sides_is_the_same_bit_for_bit(tail: Tail, dtype: torch.dtype) -> None:
    old = sparsify(normal(4, 40, seed=100, scale=3.0, dtype=dtype), ids(4, below=40, seed=101), 8, 1e-2)
    p, q = align(old, old, tail)
    assert same_bits(p, q)
    assert token_kl(p, q).tolist() == [0.0] * 4


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_both_sides_are_normalised_and_slot_0_is_the_sampled_token(tail: Tail, dtype: torch.dtype) -> None:
    old_logits, sampled = normal(3, 4, 30, seed=102, scale=3.0, dtype=dtype), ids(3, 4, below=30, seed=103)
    logits = old_logits + normal(3, 4, 30, seed=104, dtype=dtype)
    old = sparsify(old_logits, sampled, 6, 1e-2)
    proposal = proposal_for(logits, old, tail, 9, 1e-2)
    p, q = align(proposal, old, tail)
    assert p.shape == q.shape == (3, 4, 15 if tail == "floor" else 7)
    # 15 terms and the log-softmax: some 15 eps
    eps = 16 * torch.finfo(dtype).eps
    for x in (p, q):
        assert (x.logsumexp(-1)).abs().max().item() <= eps
    if tail == "bucket":  # nothing was renormalised but rounding
        torch.testing.assert_close(p[..., 0], proposal.sampled_log_probs, rtol=eps, atol=eps)
        torch.testing.assert_close(q[..., 0], old.sampled_log_probs, rtol=eps, atol=eps)
        torch.testing.assert_close(q[..., -1], old.log_tail, rtol=eps, atol=eps)
    else:  # kept mass scaled up to 1; the floors, at most 9e-12 together, do not count
        scaled = proposal.sampled_log_probs - proposal.kept_mass.log()
        torch.testing.assert_close(p[..., 0], scaled, rtol=4 * eps, atol=4 * eps + 1e-11)
        scaled = old.sampled_log_probs - old.kept_mass.log()
        torch.testing.assert_close(q[..., 0], scaled, rtol=4 * eps, atol=4 * eps + 1e-11)


# ---- against a dictionary ------------------------------------------------------------------------------------------


@st.composite
def policies(draw: st.DrawFn, sampled: int) -> SparsePolicy:
    """One position over 9 tokens, any support, any gaps among the slots, with or without a tail."""
    others = draw(st.lists(st.sampled_from([i for i in range(9) if i != sampled]), unique=True, max_size=6))
    slots = [sampled, *draw(st.permutations(others + [-1] * draw(st.integers(0, 3))))]
    weight = [draw(st.integers(1, 1000)) if i >= 0 else 0 for i in slots]
    total = sum(weight) + draw(st.sampled_from([0, 1, 300]))
    return by_hand([slots], [[w / total for w in weight]], 9)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.data(), st.integers(0, 8))
def test_the_union_equals_a_dictionary(data: st.DataObject, sampled: int) -> None:
    proposal, old = data.draw(policies(sampled)), data.draw(policies(sampled))
    sides = []
    for policy in (proposal, old):
        pairs = zip(policy.token_ids[0].tolist(), policy.log_probs[0].exp().tolist(), strict=True)
        sides.append({i: x for i, x in pairs if i >= 0})
    floors = [1e-12 if policy.log_tail.item() > -INF else 0.0 for policy in (proposal, old)]
    new = [i if i not in sides[1] else -1 for i in proposal.token_ids[0].tolist()]  # slots whose token is the old's: −1
    slots = old.token_ids[0].tolist() + new
    assert {i for i in slots if i >= 0} == {*sides[0], *sides[1]}
    assert slots[0] == sampled
    for aligned, side, floor in zip(align(proposal, old, "floor"), sides, floors, strict=True):
        expected = [side.get(i, floor) if i >= 0 else 0.0 for i in slots]
        total = math.fsum(expected)
        # 16 slots: a log-softmax of numbers down to −28, exponentiated: some 30 eps
        assert aligned[0].exp().tolist() == close([x / total for x in expected], rel=1e-13)


def test_rows_do_not_mix() -> None:
    old_logits, logits = normal(2, 5, 20, seed=105, scale=3.0), normal(2, 5, 20, seed=106, scale=3.0)
    sampled = ids(2, 5, below=20, seed=107)
    old, proposal = sparsify(old_logits, sampled, 6, 0.05), sparsify(logits, sampled, 4, 0.05)
    whole = align(proposal, old)
    for i in range(2):
        for j in range(5):
            row = align(proposal[i, j], old[i, j])
            assert same_bits(row.proposal, whole.proposal[i, j])
            assert same_bits(row.old, whole.old[i, j])


# ---- against the dense KL ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("shape", [(5,), (2, 3), ()])
def test_with_everything_kept_it_is_the_dense_kl_and_its_gradient(tail: Tail, shape: tuple[int, ...]) -> None:
    old_logits = normal(*shape, 25, seed=108, scale=2.0, dtype=F64)
    logits = old_logits + normal(*shape, 25, seed=109, scale=0.5, dtype=F64)
    leaf, truth = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    old = sparsify(old_logits, ids(*shape, below=25, seed=110), 25, 0.0)
    kl = token_kl(*align(proposal_for(leaf, old, tail, 25, 0.0), old, tail))
    expected = dense_kl(truth, old_logits)
    # KL ≈ 0.1 from 25 terms: each exact to some eps, the dense form to eps · Σ p |d|
    torch.testing.assert_close(kl, expected, rtol=1e-13, atol=1e-15)
    kl.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(leaf.grad, truth.grad, rtol=1e-12, atol=1e-15)
    assert truth.grad.abs().max().item() > 1e-3


@pytest.mark.parametrize("tail", TAILS)
def test_both_tails_approach_the_dense_kl_and_its_gradient_as_the_tail_vanishes(tail: Tail) -> None:
    old_logits = normal(20, 200, seed=111, scale=4.0, dtype=F64)
    logits = old_logits + normal(20, 200, seed=112, scale=0.3, dtype=F64)
    sampled = old_logits.argmax(-1)
    truth = logits.clone().requires_grad_()
    expected = dense_kl(truth, old_logits)
    expected.sum().backward()
    for tail_mass in (1e-2, 1e-4, 1e-6, 1e-8):
        leaf = logits.clone().requires_grad_()
        old = sparsify(old_logits, sampled, 200, tail_mass)
        kl = token_kl(*align(proposal_for(leaf, old, tail, 200, tail_mass), old, tail))
        kl.sum().backward()
        # Each side drops δ. A dropped token with p ≤ δ contributes at most p (|d| + 1), |d| < 2 here; renormalising the
        # rest changes it by δ · KL. A token that only one side dropped sits at the floor: at most δ · log(δ / 1e-12)
        # where the old side dropped it (δ ≥ p > 1e-12). Twice for the two sides.
        worst = 2 * tail_mass * (3 + max(0.0, math.log(tail_mass / 1e-12)) * (tail == "floor")) + 40 * 1e-12
        assert (kl - expected).abs().max().item() <= worst
        assert (leaf.grad - truth.grad).abs().max().item() <= worst
        assert old.support_size.max().item() < 200 or tail_mass < 1e-7
    assert expected.min().item() > 1e-3  # so that the bounds say something


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.integers(2, 12), st.sampled_from([0.01, 0.5, 4.0]), st.sampled_from([F32, F64]))
def test_bucket_kl_grows_with_the_support_up_to_the_dense_kl(
    seed: int, V: int, noise: float, dtype: torch.dtype
) -> None:
    """The data-processing inequality, along a chain of supports each finer than the one before."""
    old_logits = normal(3, V, seed=seed, scale=2.0, dtype=dtype)
    logits = old_logits + normal(3, V, seed=seed + 1, scale=noise, dtype=dtype)
    sampled = ids(3, below=V, seed=seed)
    truth = dense_kl(logits, old_logits)
    # Log-probabilities (above −16) that are off by e = 2 ulp move KL by at most e (Σ p |d| + Σ |q − p|) ≤ e (KL + 4 TV)
    # ≤ e (KL + 3 √KL), by Pinsker; token_kl adds 3 e KL of its own. The naive truth is good to 4e-15.
    e = 2 * ulp(15, dtype)
    slack = e * (4 * truth + 3 * truth.clamp(min=0).sqrt()) + 4e-15
    before = torch.zeros(3, dtype=F64)
    for K in range(1, V + 1):
        old = sparsify(old_logits, sampled, K, 0.0)
        kl = token_kl(*align(restrict(logits, old), old, "bucket")).double()
        assert (kl <= truth + slack).all()
        assert (kl >= before - 2 * slack).all()
        before = kl
    assert (before - truth).abs().le(slack).all()


def test_bucket_gradient_is_that_of_the_coarse_distributions() -> None:
    """Sum the dense probabilities outside the support into one, then take the KL: plain autograd in float64."""
    old_logits = normal(4, 12, seed=113, scale=2.0, dtype=F64)
    logits = old_logits + normal(4, 12, seed=114, dtype=F64)
    old = sparsify(old_logits, ids(4, below=12, seed=115), 4, 0.0)
    leaf, truth = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    kl = token_kl(*align(restrict(leaf, old), old, "bucket"))
    kl.sum().backward()
    expected = []
    for row in range(4):
        chosen = old.token_ids[row].tolist()
        rest = [i for i in range(12) if i not in chosen]
        p, q = (torch.softmax(x[row], -1) for x in (truth, old_logits))
        p, q = (torch.cat([x[chosen], x[rest].sum()[None]]) for x in (p, q))
        expected.append((p * (p / q).log()).sum())
    expected = torch.stack(expected)
    torch.testing.assert_close(kl, expected, rtol=1e-13, atol=0)
    expected.sum().backward()
    torch.testing.assert_close(leaf.grad, truth.grad, rtol=1e-11, atol=1e-15)
    assert truth.grad[0, [i for i in range(12) if i not in old.token_ids[0].tolist()]].abs().max().item() > 1e-3


def test_floor_gradient_is_that_of_the_joined_distributions() -> None:
    """Write 1e-12 where a side has no token, renormalise, take the KL: plain autograd in float64."""
    old_logits, logits = (normal(4, 12, seed=seed, scale=2.0, dtype=F64) for seed in (116, 117))
    sampled = ids(4, below=12, seed=118)
    old = sparsify(old_logits, sampled, 4, 0.0)
    leaf, truth = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    proposal = sparsify(leaf, sampled, 5, 0.0)
    kl = token_kl(*align(proposal, old, "floor"))
    kl.sum().backward()
    expected = []
    for row in range(4):
        p_ids, q_ids = proposal.token_ids[row].tolist(), old.token_ids[row].tolist()
        p, q = (torch.softmax(x[row], -1) for x in (truth, old_logits))
        union = sorted({*p_ids, *q_ids})
        assert len(union) > 5  # something is missing on each side
        p = torch.stack([p[i] if i in p_ids else p.new_tensor(1e-12) for i in union])
        q = torch.stack([q[i] if i in q_ids else q.new_tensor(1e-12) for i in union])
        p, q = p / p.sum(), q / q.sum()
        expected.append((p * (p / q).log()).sum())
    expected = torch.stack(expected)
    torch.testing.assert_close(kl, expected, rtol=1e-13, atol=0)
    expected.sum().backward()
    torch.testing.assert_close(leaf.grad, truth.grad, rtol=1e-11, atol=1e-14)


# ---- hard inputs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", TAILS)
def test_tokens_excluded_on_both_sides_have_zero_gradient(tail: Tail) -> None:
    old_logits = normal(2, 8, seed=119, dtype=F32)
    logits = old_logits + normal(2, 8, seed=120, dtype=F32)
    for x in (old_logits, logits):
        x[:, [2, 5]] = -INF
    for K in (3, 8):  # with and without a tail
        leaf = logits.clone().requires_grad_()
        old = sparsify(old_logits, torch.tensor([0, 1]), K, 0.0)
        kl = token_kl(*align(proposal_for(leaf, old, tail, K, 0.0), old, tail))
        kl.sum().backward()
        assert leaf.grad.isfinite().all()
        assert leaf.grad[:, [2, 5]].abs().max().item() == 0.0
        assert leaf.grad.abs().max().item() > 1e-3
        if K == 8:  # dense on what is possible
            rest = [0, 1, 3, 4, 6, 7]
            torch.testing.assert_close(kl.double(), dense_kl(logits[:, rest], old_logits[:, rest]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("gap", [80.0, 1e4])
def test_one_hot_and_nearly_disjoint_policies_are_finite(tail: Tail, gap: float) -> None:
    """The sampled token 0 has next to nothing on both sides; the proposal is all on 1, the old policy all on 2."""
    old = sparsify(torch.tensor([[0.0, 0.0, gap]]), torch.tensor([0]))
    leaf = torch.tensor([[0.0, gap, 0.0]], requires_grad=True)
    p, q = align(proposal_for(leaf, old, tail, 64, 1e-5), old, tail)
    kl = token_kl(p, q)
    # floor: the missing token costs log 1e12; bucket: log of the old tail, −gap
    assert kl.item() == close(-LOG_FLOOR if tail == "floor" else gap, rel=1e-6)
    kl.sum().backward()
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("tail", TAILS)
def test_positions_masked_on_either_side_are_the_same_one_hot_on_both(tail: Tail) -> None:
    old_logits, sampled = normal(4, 10, seed=121), ids(4, below=10, seed=122)
    old = sparsify(old_logits, sampled, 4, loss_mask=torch.tensor([1, 1, 0, 1]))
    leaf = (old_logits + normal(4, 10, seed=123)).clone()
    leaf[1] = math.nan
    leaf.requires_grad_()
    mask = torch.tensor([1, 0, 1, 1])
    proposal = sparsify(leaf, sampled, 4, loss_mask=mask) if tail == "floor" else restrict(leaf, old, loss_mask=mask)
    p, q = align(proposal, old, tail)
    one_hot = [0.0] + [-INF] * (p.shape[-1] - 1)
    for row in (1, 2):
        assert p[row].tolist() == q[row].tolist() == one_hot
    kl = token_kl(p, q)
    assert kl[[1, 2]].tolist() == [0.0, 0.0]
    assert kl[[0, 3]].min().item() > 1e-3
    kl.sum().backward()
    assert same_bits(leaf.grad[[1, 2]].abs(), torch.zeros(2, 10))
    assert leaf.grad[[0, 3]].abs().amax(-1).min().item() > 1e-3


@pytest.mark.parametrize("tail", TAILS)
def test_empty_batches_align(tail: Tail) -> None:
    empty = sparsify(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 3)
    p, q = align(empty, empty, tail)
    assert p.shape == q.shape == (0, 6 if tail == "floor" else 4)
    assert token_kl(p, q).sum().item() == 0.0


def test_the_policies_are_not_changed() -> None:
    old = sparsify(normal(3, 9, seed=124), torch.tensor([0, 1, 2]), 4, loss_mask=torch.tensor([1, 0, 1]))
    before = [x.clone() for x in (old.token_ids, old.log_probs, old.log_tail)]
    for tail in TAILS:
        align(old, old, tail)
    assert all(same_bits(a, b) for a, b in zip(before, (old.token_ids, old.log_probs, old.log_tail), strict=True))


# ---- refused -------------------------------------------------------------------------------------------------------


def one(dtype: torch.dtype = F64) -> SparsePolicy:
    return by_hand([[0, 1], [2, 3]], [[0.5, 0.25], [0.5, 0.25]], 6, dtype)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    ("proposal", "given", "hint"),
    [
        (one()[:1], "the same shape, got [1] and [2]", "same completions"),
        (dataclasses.replace(one(), vocab_size=7), "the same vocab_size, got 7 and 6", "same model"),
        (
            dataclasses.replace(one(), temperature=0.7),
            "the same temperature, got 0.7 and 1.0",
            "the temperature of the rollout",
        ),
        (one(F32), "the same dtype, got torch.float32 and torch.float64", "the same precision"),
        (
            by_hand([[0, 1], [4, 3]], [[0.5, 0.25], [0.5, 0.25]], 6),
            "different sampled tokens",
            "same sampled ids",
        ),
    ],
)
def test_mismatches_are_refused(tail: Tail, proposal: SparsePolicy, given: str, hint: str) -> None:
    align(one(), one(), tail)
    with refuses(given, "the same", hint):
        align(proposal, one(), tail)


def test_sampled_tokens_may_differ_where_either_side_is_masked() -> None:
    logits, a, b = normal(3, 6, seed=125), torch.tensor([0, 1, 2]), torch.tensor([0, 5, 2])
    mask = torch.tensor([1, 0, 1])
    full, masked = sparsify(logits, b, 3), sparsify(logits, a, 3, loss_mask=mask)
    for proposal, old in ((full, masked), (masked, full)):
        assert token_kl(*align(proposal, old)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("tail", TAILS)
def test_an_old_policy_with_gradient_is_refused(tail: Tail) -> None:
    live = sparsify(normal(2, 5, seed=126).requires_grad_(), torch.tensor([0, 1]), 2)
    for old in (live, dataclasses.replace(live, log_probs=live.log_probs.detach())):
        with refuses("requires gradient", "a constant", "old.detach()"):
            align(live, old, tail)
    assert align(live, live.detach(), tail).proposal.requires_grad
    assert not align(live, live.detach(), tail).old.requires_grad


def test_the_tail_fits_how_the_proposal_was_made() -> None:
    """``floor`` after ``restrict`` would run and train on other numbers; ``bucket`` after ``sparsify`` as well."""
    logits, sampled = normal(3, 9, seed=125), torch.tensor([0, 1, 2])
    old = sparsify(normal(3, 9, seed=126), sampled, 4)
    own, given = sparsify(logits, sampled, 4), restrict(logits, old)
    for policy, fits, other in ((own, "floor", "bucket"), (given, "bucket", "floor")):
        for part in (policy, policy[1:], policy.flatten(), policy.detach()):
            before = old[1:] if len(part.token_ids) == 2 else old
            assert all(same_bits(a, b) for a, b in zip(align(part, before), align(part, before, fits), strict=True))
            with pytest.raises(InputError, match=f"tail='{other}' needs a proposal"):
                align(part, before, other)  # type: ignore[arg-type]
    assert proposal_tail(own.pack().unpack(), old, None) == "bucket"  # not known: the default


def test_bucket_needs_the_old_support() -> None:
    old = by_hand([[0, 1]], [[0.5, 0.25]], 6)
    for proposal in (
        by_hand([[0, 2]], [[0.5, 0.25]], 6),
        by_hand([[0, 1, 2]], [[0.5, 0.25, 0.1]], 6),
        by_hand([[0]], [[0.5]], 6),
    ):
        with refuses("got other tokens", "on the tokens of the old policy", "troll.restrict(logits, old)"):
            align(proposal, old, "bucket")
        align(proposal, old, "floor")
    gone = by_hand([[0, -1]], [[0.5, 0.0]], 6)  # token 1 became impossible
    p, _ = align(gone, old, "bucket")
    assert p[0].exp().tolist() == close([0.5, 0.0, 0.5], rel=1e-15)


def test_unknown_tails_are_refused() -> None:
    with refuses("got 'drop'", "'bucket' or 'floor'", "The default is 'bucket'"):
        align(one(), one(), "drop")  # type: ignore[arg-type]
