"""Bounds per token: their formulas by hand, and what they promise on policies of any kind, through the projection."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import kl as kl_of
from objective_cases import make_case, policies, project_one, softmax

from troll import restrict, sparsify, troll_loss
from troll.errors import InputError
from troll.objective import constrain, network_kl
from troll.objective.bound_controllers import ProjectedShareBound
from troll.objective.bounds import EntropyBound, FixedBound, SequenceBound
from troll.projection import project

QUICK = settings(derandomize=True, deadline=None, max_examples=50)


def budget(kl, counted, limit, cap=math.inf, max_length=None):
    """The bounds of one sequence, one token after another, in exact fractions."""
    left, count, bounds = Fraction(limit), sum(counted), []
    longest, seen = max_length or count, 0
    for distance, counts in zip(kl, counted, strict=True):
        bound = left / max(longest - seen, 1)
        bound = bound if cap == math.inf else min(bound, Fraction(cap))
        bounds.append(bound)
        if counts:
            left -= min(Fraction(distance), bound)
            seen += 1
    return bounds


def bounds_of(kl, counted, bound):
    """What a bound makes of a KL [B, T]; the policy is one that nobody looks at."""
    case = make_case(B=len(kl), T=len(kl[0]))
    given_kl = torch.tensor(kl, dtype=torch.float64)
    return bound.token_bounds(policies(case)[1], torch.tensor(counted), lambda: given_kl)


# --- the budget of a sequence ----------------------------------------------------------------------------------------


def test_shares_by_hand():
    """What a token leaves, those after it share: 1.2 for four; the first takes 0, so the others have 0.4 each."""
    expected = [[0.3, 0.4, 0.4, 0.4], [0.3, 0.3, 0.3, 0.3], [0.3, 0.3 + 0.2 / 3, 0.5, 0.9]]
    kl = [[0.0, 5.0, 5.0, 5.0], [9.0, math.inf, 9.0, 9.0], [0.1, 0.1, 0.1, 0.1]]
    every = [[True] * 4] * 3
    torch.testing.assert_close(
        bounds_of(kl, every, SequenceBound(1.2)),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-6,
        atol=0,  # a KL is taken for 1.2e-7 larger than it is
    )


@QUICK
@given(data=st.data(), cap=st.sampled_from([math.inf, 0.5, 0.05, 0.0]), longer=st.sampled_from([None, -3, 0, 1, 20]))
def test_the_loop_over_a_batch_is_the_recurrence_of_each_sequence(data, cap, longer):
    B, T = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    numbers = st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 3.0)), min_size=T, max_size=T)
    kl = data.draw(st.lists(numbers, min_size=B, max_size=B))
    masks = st.lists(st.booleans(), min_size=T, max_size=T)
    counted = data.draw(st.lists(masks, min_size=B, max_size=B))
    limit = data.draw(st.sampled_from([1e-9, 0.3, 2.0, 50.0]))
    max_length = None if longer is None else max(1, T + longer)
    found = bounds_of(kl, counted, SequenceBound(limit, cap, max_length))
    for row in range(B):
        expected = [float(x) for x in budget(kl[row], counted[row], limit, cap, max_length)]
        # 1.2e-7 of each KL, and of their sum, of what is left; that is compared where it is not nearly nothing.
        assert found[row].tolist() == pytest.approx(expected, rel=1e-6, abs=2e-7 * limit)
        assert all(0 <= x <= cap for x in found[row].tolist())


def spent(projection, counted):
    """Σ_t KL(π_t ‖ π_old,t) of each sequence as stored, in fp64."""
    return torch.where(counted, projection.kl_after.double(), 0.0).sum(-1)


LIMITS = [1e-12, 1e-4, 0.02, 0.3, 3.0, 1e6]


@QUICK
@given(
    seed=st.integers(0, 10**6),
    distance=st.sampled_from([0.0, 1e-3, 0.3, 1.0, 6.0]),
    tail=st.sampled_from(["floor", "bucket"]),
    limit=st.sampled_from(LIMITS),
    cap=st.sampled_from([math.inf, 0.05]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    K=st.sampled_from([2, 4, 7]),
    longest=st.sampled_from([None, 3, 9, 100]),
    T=st.sampled_from([1, 9]),
)
def test_no_sequence_exceeds_its_budget(seed, distance, tail, limit, cap, dtype, K, longest, T):
    """On any policies, kept tokens, tail and mask: with holes, with single tokens, with none."""
    case = make_case(seed, B=4, T=T, V=8, distance=distance, dtype=dtype, ragged=False)
    mask = torch.rand(4, T, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[0], mask[1] = False, torch.arange(T) == T - 1
    case = case.with_(mask=mask)
    proposal, old = policies(case, tail=tail, K=K)
    bound = SequenceBound(limit, cap, longest)
    bounds = bound.token_bounds(old, mask, lambda: network_kl(proposal, old, tail=tail))
    step = constrain(proposal, old, bounds, mask, tail=tail, max_lost_mass=1.0)
    # Each KL as it is stored may have been rounded by 6e-8 of itself in fp32, or by the same of the projected policy.
    assert bool((spent(step.projection, mask) <= limit * (1 + 1e-6)).all())
    assert bool((step.projection.kl_after[mask].double() <= min(cap, limit) * (1 + 1e-6)).all())
    inside = network_kl(proposal, old, tail=tail).double()
    untouched = torch.where(mask, inside, 0.0).cumsum(-1) <= limit / max(longest or T, T) * (1 - 1e-6)
    if cap == math.inf:  # what has moved less than the first share, all in all, is left alone
        assert not bool((step.projection.active & untouched & mask).any())
    if longest is None and distance >= 1 and limit <= 1e-4 and cap == math.inf:
        # Tokens that all want more leave nothing: only rounding, and the last tokens' own KL, can be below.
        some = mask.any(-1)
        wanted = torch.where(mask, inside, 0.0).sum(-1)
        full = some & torch.where(mask, inside > limit, True).all(-1)
        used = spent(step.projection, mask)
        assert bool((used[full] >= torch.minimum(wanted, torch.tensor(limit))[full] * (1 - 1e-4) - 1e-11).all())


@pytest.mark.parametrize("tail", ["floor", "bucket"])
def test_the_loss_keeps_the_budget_and_its_gradient_is_finite(tail):
    """Through ``troll_loss``: of a batch of one sequence, mean and largest over sequences are those of the sequence."""
    case = make_case(3, B=5, T=12, V=20, distance=1.2, dtype=torch.float32)
    bound = SequenceBound(0.2)
    for row in range(5):
        one = case.rows(slice(row, row + 1))
        logits = one.leaf()
        with torch.no_grad():
            old = sparsify(one.old_logits, one.sampled, 8, loss_mask=one.mask)
        options = {"loss_mask": one.mask}
        proposal = restrict(logits, old, **options) if tail == "bucket" else sparsify(logits, one.sampled, 8, **options)
        bounds = bound.token_bounds(old, one.mask, lambda p=proposal, o=old: network_kl(p, o, tail=tail))
        loss, metrics = troll_loss(proposal, old, one.advantages, one.mask, kl_bound=bounds, tail=tail)
        loss.backward()
        assert bool(logits.grad.isfinite().all())
        assert metrics["sequence_kl_before"] > 1
        assert 0.19 < float(metrics["sequence_kl_after"]) <= 0.2 * (1 + 1e-6)
        assert metrics["sequence_kl_after"] == metrics["sequence_kl_after/max"]


def test_the_KL_of_whole_sequences_is_bounded_where_bounds_depend_on_prefixes_alone():
    """All 27 sequences of three tokens: the KL of the two distributions over them, by enumeration, and the bounds of
    sequences that begin alike."""
    V, L, limit = 3, 3, 0.15
    g = torch.Generator().manual_seed(5)
    tables = {
        prefix: (torch.randn(V, generator=g, dtype=torch.float64), torch.randn(V, generator=g, dtype=torch.float64))
        for n in range(L)
        for prefix in itertools.product(range(V), repeat=n)
    }
    sequences = list(itertools.product(range(V), repeat=L))
    old_logits, logits = (
        torch.stack([torch.stack([tables[s[:t]][i] for t in range(L)]) for s in sequences]) for i in (0, 1)
    )
    sampled, mask = torch.tensor(sequences), torch.ones(len(sequences), L, dtype=torch.bool)
    old, proposal = sparsify(old_logits, sampled, V, 0.0), sparsify(logits, sampled, V, 0.0)
    bound = SequenceBound(limit, max_length=L)
    bounds = bound.token_bounds(old, mask, lambda: network_kl(proposal, old))
    log_old = old_logits.log_softmax(-1)
    projected = project(logits.log_softmax(-1), log_old, bounds)
    by_prefix = {}
    log_p, log_q = [], []
    for i, sequence in enumerate(sequences):
        terms = []
        for t in range(L):
            known = by_prefix.setdefault(sequence[:t], (bounds[i, t].item(), projected.log_probs[i, t]))
            assert known[0] == bounds[i, t].item()
            torch.testing.assert_close(known[1], projected.log_probs[i, t], rtol=0, atol=0)
            p, q = softmax(logits[i, t].tolist()), softmax(old_logits[i, t].tolist())
            terms.append(math.log(project_one(p, q, bounds[i, t].item())[0][sequence[t]]))  # by bisection
        log_p.append(math.fsum(terms))
        log_q.append(math.fsum(log_old[i, t, sequence[t]].item() for t in range(L)))
    p, q = [math.exp(x) for x in log_p], [math.exp(x) for x in log_q]
    assert math.fsum(p) == pytest.approx(1, rel=1e-9)  # a distribution: each conditional depends on its prefix alone
    assert 0.8 * limit < kl_of(p, q) <= limit * (1 + 1e-9)
    unprojected = [
        math.exp(math.fsum(logits[i].log_softmax(-1)[range(L), list(s)].tolist())) for i, s in enumerate(sequences)
    ]
    assert kl_of(unprojected, q) > 2 * limit


def test_with_their_own_length_bounds_depend_on_what_comes_after():
    """Two sequences that begin alike; one is longer. Not so with ``max_length``."""
    kl, counted = [[1.0, 1.0, 1.0]] * 2, [[True, True, True], [True, True, False]]
    own, longest = (bounds_of(kl, counted, SequenceBound(0.6, max_length=n)) for n in (None, 3))
    assert own[:, 0].tolist() == pytest.approx([0.2, 0.3])
    assert longest[:, :2].tolist() == [pytest.approx([0.2, 0.2], rel=1e-6)] * 2


def test_a_KL_that_is_not_a_number_takes_its_share_and_no_more():
    found = bounds_of([[math.nan, 1.0], [0.1, math.nan]], [[True, True], [True, False]], SequenceBound(0.4))
    assert found.tolist() == [pytest.approx([0.2, 0.2]), pytest.approx([0.4, 0.3], rel=1e-6)]


# --- by entropy ------------------------------------------------------------------------------------------------------


def entropies(case, K):
    """H of the old policy over its kept tokens and one outcome for the rest, from the definition."""
    result = []
    for row, ids in zip(case.old_logits.tolist(), case.sampled.tolist(), strict=True):
        result.append([])
        for z, token in zip(row, ids, strict=True):
            p = softmax(z)
            order = sorted(range(len(p)), key=lambda j: (-p[j], j))[:K]
            order = order if token in order else [token, *order[:-1]]
            parts = [p[j] for j in order] + [1 - math.fsum(p[j] for j in order)]
            result[-1].append(-math.fsum(x * math.log(x) for x in parts if x > 1e-15))
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_bounds_follow_the_entropy_of_the_old_policy_and_have_the_mean_asked_for(share):
    case = make_case(1, B=4, T=6, V=9)
    old = sparsify(case.old_logits, case.sampled, 4, 0.0)
    H = entropies(case, 4)
    bounds = EntropyBound(0.05, share).token_bounds(old, case.mask, lambda: pytest.fail("nobody needs the KL"))
    expected = 0.05 * (share + (1 - share) * H / H[case.mask].mean())
    torch.testing.assert_close(bounds[case.mask], expected[case.mask], rtol=1e-10, atol=0)
    assert bounds[case.mask].mean().item() == pytest.approx(0.05, rel=1e-12)
    assert bounds[case.mask].min() >= share * 0.05 * (1 - 1e-12)
    assert (bounds[~case.mask] == 0.05).all()


def test_parts_of_a_rollout_have_the_bounds_of_the_whole_with_its_mean():
    case = make_case(2, B=4, T=6, V=9)
    old, bound = sparsify(case.old_logits, case.sampled, 4, 0.0), EntropyBound(0.05)
    whole = bound.token_bounds(old, case.mask, lambda: None)
    mean = bound.of_token(old)[case.mask].mean()
    parts = [bound.token_bounds(old[rows], case.mask[rows], lambda: None, mean) for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=0)
    alone = bound.token_bounds(old[:1], case.mask[:1], lambda: None)
    assert (alone - whole[:1]).abs().max() > 3e-4


def one_choice(T):
    """A policy that is sure of all T tokens but the first, where it tosses a coin: H_t / H̄ = T."""
    logits = torch.full((1, T, 4), -math.inf, dtype=torch.float64)
    logits[..., 2] = 0.0
    logits[0, 0, 1] = 0.0
    return sparsify(logits, torch.full((1, T), 2), 4), torch.ones(1, T, dtype=torch.bool)


@pytest.mark.parametrize(("highest", "first"), [(None, 3.7625), (4.0, 3.7625), (0.2, 0.2), (0.05, 0.05)])
def test_the_one_token_with_a_choice_gets_what_the_cap_leaves(highest, first):
    """Of a hundred: 0.05 (¼ + ¾ · 100) = 3.7625 if nothing stops it."""
    bounds = EntropyBound(0.05, highest=highest).token_bounds(*one_choice(100), lambda: None)
    assert bounds[0].tolist() == pytest.approx([first] + [0.0125] * 99, rel=1e-12)


def test_a_cap_that_no_token_reaches_changes_no_bit():
    case = make_case(1, B=4, T=6, V=9, dtype=torch.float32)
    old = sparsify(case.old_logits, case.sampled, 4, 0.0)
    free, capped = (EntropyBound(0.05, highest=x).token_bounds(old, case.mask, lambda: None) for x in (None, 0.2))
    assert free.std() > 0.001
    assert free.max() < 0.2
    assert torch.equal(capped, free)


def test_a_policy_that_is_sure_of_everything_has_the_bound_everywhere():
    sure = torch.full((1, 3, 4), -math.inf)
    sure[..., 2] = 0.0
    old = sparsify(sure, torch.full((1, 3), 2), 4)
    every = torch.ones(1, 3, dtype=torch.bool)
    assert EntropyBound(0.05).token_bounds(old, every, lambda: None).tolist() == [pytest.approx([0.05] * 3)]
    assert EntropyBound(0.05).token_bounds(old, ~every, lambda: None).tolist() == [pytest.approx([0.05] * 3)]


def test_one_number_for_all_tokens_asks_for_nothing():
    for bound in (FixedBound(0.05), ProjectedShareBound(0.05, 0.1)):
        assert bound.token_bounds(None, None, lambda: pytest.fail("asked")) == 0.05
        assert bound.of_token(None) is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EntropyBound(0.0), "kl_bound must be a finite number > 0, got 0"),
        (lambda: EntropyBound(0.05, 1.5), "share must be a number from 0 to 1, got 1.5"),
        (lambda: EntropyBound(0.05, highest=0.04), "highest must be at least kl_bound=0.05, .*got 0.04"),
        (lambda: EntropyBound(0.05, highest=math.nan), "highest must be at least kl_bound=0.05, .*got nan"),
        (lambda: SequenceBound(0.0), "limit must be a finite number > 0, got 0"),
        (lambda: SequenceBound(math.inf), "limit must be a finite number > 0, got inf"),
        (lambda: SequenceBound(1.0, -0.1), "kl_bound must be a number ≥ 0, got -0.1"),
        (lambda: SequenceBound(1.0, max_length=0), "max_length must be an integer ≥ 1, got 0"),
    ],
)
def test_what_makes_no_sense_is_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()


@pytest.mark.parametrize("tail", ["floor", "bucket"])
def test_the_KL_of_the_network_is_that_before_the_projection(tail):
    proposal, old = policies(make_case(4, V=12, distance=1.0), tail=tail, K=5)
    found = network_kl(proposal, old, tail=tail)
    for bound in (0.0, 0.05, math.inf):
        before = constrain(proposal, old, bound, tail=tail, max_lost_mass=1.0).projection.kl_before
        torch.testing.assert_close(found, before, rtol=1e-12, atol=1e-15)
    assert not found.requires_grad
