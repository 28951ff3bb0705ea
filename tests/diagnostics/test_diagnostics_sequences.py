"""Sequence KL against the sum over all completions, its interval against the sum over all samples of them."""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import combinations_with_replacement

import pytest
import torch
from diagnostics_cases import Enumerated, random_pair
from hypothesis import given, settings
from hypothesis import strategies as st

from troll import InputError, SparsePolicy
from troll.diagnostics import estimate_mean, estimate_sequence_kl, sequence_terms

ROUNDING = 1e-12  # double precision, sums of at most a hundred terms of size 1

MODELS = [{}, {"V": 4, "T": 3, "seed": 1}, {"V": 3, "T": 4, "seed": 2, "ends": True}, {"distance": 2.0, "seed": 3}]


def expectation(model, values):
    return float((model.probabilities() * values).sum())


@pytest.mark.parametrize("options", MODELS)
def test_the_expectation_of_every_estimator_is_the_kl_of_completions(options):
    model = Enumerated(**options)
    assert float(model.probabilities().sum()) == pytest.approx(1, abs=ROUNDING)
    terms = sequence_terms(*model.batch())
    there, back = model.kl(0, 1), model.kl(1, 0)
    assert abs(there - back) > 0.01  # so that the directions can be told apart
    for name, exact in (("old_to_proposal", there), ("proposal_to_old", back)):
        for estimator in (name, f"{name}_by_ratio"):
            assert expectation(model, getattr(terms, estimator)) == pytest.approx(exact, abs=10 * ROUNDING), estimator
    assert expectation(model, terms.log_weight.exp()) == pytest.approx(1, abs=ROUNDING)


def test_the_terms_of_every_completion():
    """A token's KL has the weight of the tokens before it, without its own; its log-ratio with its own."""
    model = Enumerated(V=3, T=4, seed=2, ends=True)
    terms = sequence_terms(*model.batch())
    for i, o in enumerate(model.completions):
        there = back = by_ratio = 0.0
        weight = 1.0
        for t, token in enumerate(o):
            q, p = (table[o[:t]].softmax(-1).tolist() for table in model.tables)
            there += sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
            back += weight * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            weight *= p[token] / q[token]
            by_ratio += weight * math.log(p[token] / q[token])
        expected = (there, -math.log(weight), back, by_ratio, math.log(weight))
        found = [float(getattr(terms, field.name)[i]) for field in fields(terms)]
        assert found == pytest.approx(expected, abs=10 * ROUNDING)


def test_tokens_that_do_not_count_add_nothing():
    """Both policies have a distribution there, as at the tokens of a tool."""
    model = Enumerated(T=4)
    proposal, old, mask = model.batch()
    mask = mask.clone()
    mask[:, 1] = False
    terms = sequence_terms(proposal, old, mask)
    keep = torch.tensor([0, 2, 3])
    expected = sequence_terms(proposal[:, keep], old[:, keep], torch.ones(len(mask), 3))
    for field in fields(terms):
        torch.testing.assert_close(getattr(terms, field.name), getattr(expected, field.name), atol=ROUNDING, rtol=0)


def test_without_weights_the_kl_to_old_is_biased():
    model = Enumerated(distance=2.0, seed=3)
    proposal, old, mask = model.batch()
    unweighted = torch.tensor(
        [
            sum(
                float((proposal.log_probs[i, t].exp() * (proposal.log_probs[i, t] - _of(old, proposal, i, t))).sum())
                for t in range(model.T)
            )
            for i in range(len(mask))
        ],
        dtype=torch.float64,
    )
    assert abs(expectation(model, unweighted) - model.kl(1, 0)) > 0.05


def _of(old, proposal, i, t):
    """log π_old in the order in which the proposal keeps its tokens."""
    by_id = dict(zip(old.token_ids[i, t].tolist(), old.log_probs[i, t].tolist(), strict=True))
    return torch.tensor([by_id[token] for token in proposal.token_ids[i, t].tolist()], dtype=torch.float64)


@pytest.mark.parametrize("options", MODELS)
def test_token_kls_vary_less_than_log_ratios(options):
    model = Enumerated(**options)
    terms = sequence_terms(*model.batch())

    def variance(x):
        return expectation(model, x.square()) - expectation(model, x) ** 2

    for name in ("old_to_proposal", "proposal_to_old"):
        assert variance(getattr(terms, name)) < variance(getattr(terms, f"{name}_by_ratio"))


def test_dropped_tokens_lower_the_token_kls_and_not_the_log_ratios():
    model = Enumerated(V=4, T=3, seed=1)
    whole, coarse = sequence_terms(*model.batch()), sequence_terms(*model.batch(K=2, tail="bucket"), tail="bucket")
    assert expectation(model, coarse.old_to_proposal) < 0.95 * model.kl(0, 1)
    assert bool((coarse.old_to_proposal <= whole.old_to_proposal + ROUNDING).all())
    for name in ("old_to_proposal_by_ratio", "proposal_to_old_by_ratio", "log_weight"):
        torch.testing.assert_close(getattr(coarse, name), getattr(whole, name), atol=ROUNDING, rtol=0)


def test_the_estimates_are_means_of_the_terms():
    model = Enumerated(V=3, T=4, seed=2, ends=True)
    rows = torch.multinomial(model.probabilities(), 40, replacement=True, generator=torch.Generator().manual_seed(0))
    batch = model.batch(rows.tolist())
    terms, found = sequence_terms(*batch), estimate_sequence_kl(*batch)
    for field in fields(found):
        if field.name != "effective_share":
            values = getattr(terms, field.name)
            estimate = getattr(found, field.name)
            error = float(values.std()) / math.sqrt(40)
            assert estimate.value == pytest.approx(float(values.mean()), rel=ROUNDING)
            assert estimate.standard_error == pytest.approx(error, rel=1e-9)
            assert estimate.high - estimate.value == pytest.approx(1.959964 * error, rel=1e-6)
            assert estimate.value - estimate.low == pytest.approx(1.959964 * error, rel=1e-6)
    w = [math.exp(model.log_prob(1, o) - model.log_prob(0, o)) for o in (model.completions[i] for i in rows.tolist())]
    assert found.effective_share == pytest.approx(sum(w) ** 2 / (40 * sum(x * x for x in w)), rel=1e-9)


def test_a_sequence_without_a_counted_token_changes_nothing():
    model = Enumerated()
    proposal, old, mask = model.batch(range(10))
    found = estimate_sequence_kl(proposal, old, mask)
    proposal, old, more = model.batch(range(12))
    more = more.clone()
    more[10:] = False
    assert estimate_sequence_kl(proposal, old, more) == found


def coverage(model, n, term, confidence):
    """Probability that the interval of n completions covers the KL, over all samples of n there are."""
    probabilities, values = model.probabilities().tolist(), getattr(sequence_terms(*model.batch()), term)
    exact, covered, total = model.kl(0, 1), 0.0, 0.0
    for drawn in combinations_with_replacement(range(len(values)), n):
        chance = math.factorial(n)
        for i in set(drawn):
            chance *= probabilities[i] ** drawn.count(i) / math.factorial(drawn.count(i))
        found = estimate_mean(values[list(drawn)], confidence=confidence)
        total += chance
        covered += chance * (found.low <= exact <= found.high)
    assert total == pytest.approx(1, abs=1e-9)
    return covered


@pytest.mark.parametrize("term", ["old_to_proposal", "old_to_proposal_by_ratio"])
@pytest.mark.parametrize(("confidence", "least", "most"), [(0.5, 0.44, 0.56), (0.95, 0.9, 0.965)])
def test_the_interval_covers_as_often_as_it_says(term, confidence, least, most):
    """Exact coverage with four completions and samples of 24. It is not the nominal one: the values are few and skewed,
    which the normal quantile does not know; 0.06 allows for that and not for s without the root of n, or a one-sided z.
    """
    assert least < coverage(Enumerated(V=2, T=2, distance=1.0, seed=6), 24, term, confidence) < most


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    st.lists(st.floats(-10, 10), min_size=2, max_size=20).filter(lambda x: max(x) - min(x) > 1e-3),
    st.integers(2, 5),
)
def test_copies_in_a_group_say_no_more_than_one(values, copies):
    once = estimate_mean(torch.tensor(values, dtype=torch.float64))
    repeated = torch.tensor(values, dtype=torch.float64).repeat(copies)
    groups = torch.arange(len(values)).repeat(copies)
    grouped, naive = estimate_mean(repeated, groups), estimate_mean(repeated)
    assert grouped.value == pytest.approx(once.value, abs=1e-12)
    assert grouped.standard_error == pytest.approx(once.standard_error, rel=1e-9)
    assert naive.standard_error < 0.9 * once.standard_error


def test_groups_by_hand():
    """Deviations from 3: −2 − 1 in one group, 3 in the other; s² = 2/1 · (9 + 9) / 9."""
    found = estimate_mean(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([7, 7, 4]))
    assert (found.value, found.standard_error) == (3.0, pytest.approx(2.0))


def test_groups_reach_the_estimates():
    model = Enumerated()
    batch = model.batch(range(12))
    groups = torch.arange(12) // 4
    expected = estimate_mean(sequence_terms(*batch).proposal_to_old, groups, confidence=0.8)
    assert estimate_sequence_kl(*batch, groups=groups, confidence=0.8).proposal_to_old == expected


def test_one_value_has_no_interval():
    found = estimate_mean(torch.tensor([2.0]))
    assert found.value == 2
    assert math.isnan(found.standard_error)
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_what_is_refused():
    model = Enumerated()
    proposal, old, mask = model.batch()
    with pytest.raises(InputError, match="loss_mask counts no token"):
        estimate_sequence_kl(proposal, old, torch.zeros_like(mask))
    with pytest.raises(InputError, match=r"loss_mask must have .*got \[26, 3\]"):
        estimate_sequence_kl(proposal, old, mask[1:])
    with pytest.raises(InputError, match="different sampled tokens"):
        estimate_sequence_kl(proposal, old[torch.arange(26, -1, -1)], mask)
    for groups in (torch.zeros(3, dtype=torch.long), torch.zeros(27)):
        with pytest.raises(InputError, match=r"groups must (be one integer|have an integer)"):
            estimate_sequence_kl(proposal, old, mask, groups=groups)
    for confidence in (0.0, 1.0, math.nan):
        with pytest.raises(InputError, match="confidence must be"):
            estimate_sequence_kl(proposal, old, mask, confidence=confidence)
    for values in (torch.ones(2, 2), torch.ones(0)):
        with pytest.raises(InputError, match="one number per sequence"):
            estimate_mean(values)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.integers(0, 10**6))
def test_single_precision_says_the_same(seed):
    """Log-probabilities of size 10 rounded to fp32 are off by 5e-7, and so are ratios relative to their size; sums of
    five such terms by a few times as much: 1e-5 leaves room."""
    _, proposal, old, _, mask = random_pair(seed, distance=0.8)
    narrow = [
        SparsePolicy(
            x.token_ids, x.log_probs.detach().float(), x.log_tail.detach().float(), x.vocab_size, made_by=x.made_by
        )
        for x in (proposal, old)
    ]
    terms, single = sequence_terms(proposal, old, mask), sequence_terms(*narrow, mask)
    for field in fields(terms):
        found = getattr(single, field.name)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, getattr(terms, field.name), rtol=1e-5, atol=1e-5)
