"""The KL of groups of tokens against loops over them."""

from __future__ import annotations

import math

import pytest
import torch
from diagnostics_cases import dense, random_pair
from hypothesis import given, settings
from hypothesis import strategies as st

from troll import InputError, troll_loss
from troll.diagnostics import by_advantage, by_class, by_position, kl_per_token

NUMBERS = ("count", "mean", "p50", "p99", "max", "outside", "share")


def by_loops(groups, bound):
    """{name: [KL, ...]} → the rows of a spectrum, with sorting and division by hand; the bound one for all."""
    total = math.fsum(math.fsum(values) for values in groups.values())
    rows = []
    for name, values in groups.items():
        n, ordered = len(values), sorted(values)
        some = max(1, n)
        rows.append(
            {
                "group": name,
                "count": n,
                "mean": math.fsum(values) / some,
                "p50": ordered[(n - 1) // 2] if n else 0.0,
                "p99": ordered[(n - 1) * 99 // 100] if n else 0.0,
                "max": ordered[-1] if n else 0.0,
                "outside": sum(x > bound for x in values) / some,
                "share": math.fsum(values) / total if total else 0.0,
            }
        )
    return rows


def same(found, expected):
    """Equal but for the order of summation: 400 numbers ≤ 1 in double precision, at most 400 · 1.1e-16 · 400."""
    assert [row["group"] for row in found] == [row["group"] for row in expected]
    for a, b in zip(found, expected, strict=True):
        for name in NUMBERS:
            assert a[name] == pytest.approx(b[name], rel=1e-11, abs=1e-14), (a["group"], name)


@st.composite
def batches(draw):
    B, T = draw(st.integers(1, 4)), draw(st.integers(1, 100))
    seed = draw(st.integers(0, 10**6))
    g = torch.Generator().manual_seed(seed)
    kl = torch.rand(B, T, generator=g, dtype=torch.float64) ** draw(st.sampled_from([1, 6]))
    kl = kl * (torch.rand(B, T, generator=g) < draw(st.sampled_from([0.5, 1.0])))  # with ties at 0
    mask = torch.rand(B, T, generator=g) < draw(st.sampled_from([0.0, 0.2, 0.9, 1.1]))
    return kl.masked_fill(~mask, math.nan), mask, g


def tokens(mask):
    """(sequence, position, place among the counted tokens, how many there are) of every counted token."""
    for i, row in enumerate(mask.tolist()):
        places = [t for t, counts in enumerate(row) if counts]
        for place, t in enumerate(places):
            yield i, t, place, len(places)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(batches(), st.integers(1, 7), st.sampled_from([0.0, 0.05, 0.5]))
def test_by_relative_position(batch, bins, bound):
    kl, mask, _ = batch
    found = by_position(kl, mask, bins=bins, kl_bound=bound)
    groups = {name: [] for name in found.names}
    for i, t, place, n in tokens(mask):
        inside = [b for b in range(bins) if b * n <= place * bins < (b + 1) * n]
        groups[found.names[inside[0]]].append(float(kl[i, t]))
    same(found.rows(), by_loops(groups, bound))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(batches(), st.sets(st.integers(1, 120), max_size=4), st.sampled_from([0.0, 0.05, 0.5]))
def test_by_absolute_position(batch, more, bound):
    kl, mask, _ = batch
    starts = [0, *sorted(more)]
    found = by_position(kl, mask, starts=starts, kl_bound=bound)
    groups = {name: [] for name in found.names}
    for i, t, place, _ in tokens(mask):
        groups[found.names[sum(start <= place for start in starts) - 1]].append(float(kl[i, t]))
    same(found.rows(), by_loops(groups, bound))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(batches(), st.integers(1, 5), st.sampled_from([0.0, 0.05, 0.5]))
def test_by_class_and_by_advantage(batch, G, bound):
    kl, mask, g = batch
    classes = torch.randint(G, mask.shape, generator=g).masked_fill(~mask, -1)
    names = [f"class {i}" for i in range(G)]
    groups, signs = {name: [] for name in names}, {"negative": [], "zero": [], "positive": []}
    advantages = torch.randint(-1, 2, mask.shape[:1], generator=g) * 0.7
    for i, t, _, _ in tokens(mask):
        groups[names[int(classes[i, t])]].append(float(kl[i, t]))
        a = float(advantages[i])
        signs["zero" if a == 0 else "negative" if a < 0 else "positive"].append(float(kl[i, t]))
    same(by_class(kl, mask, classes, names, kl_bound=bound).rows(), by_loops(groups, bound))
    same(by_advantage(kl, mask, advantages, kl_bound=bound).rows(), by_loops(signs, bound))


def test_numbers_by_hand():
    kl = torch.tensor([[0.1, 0.3, 0.0, 9.0], [0.2, 0.4, 7.0, 7.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    found = by_advantage(kl, mask, torch.tensor([1.0, -2.0]), kl_bound=0.2).rows()
    assert [row["group"] for row in found] == ["negative", "zero", "positive"]
    assert [row["count"] for row in found] == [2, 0, 3]
    assert [row["outside"] for row in found] == pytest.approx([0.5, 0, 1 / 3])  # 0.2 as fp32 is not outside 0.2
    assert [row["share"] for row in found] == pytest.approx([0.6, 0, 0.4])
    assert [row["p50"] for row in found] == pytest.approx([0.2, 0, 0.1])
    assert by_position(kl, mask, bins=4).names == ("0–25 %", "25–50 %", "50–75 %", "75–100 %")
    assert by_position(kl, mask, starts=(0, 1, 3)).names == ("0", "1–2", "3–")
    assert by_position(kl, mask, starts=(0, 1, 3)).count.tolist() == [2, 3, 0]
    assert by_position(kl, mask, bins=2).count.tolist() == [3, 2]  # places 0, 1 of 3 and 0 of 2


def test_a_bound_for_every_token():
    kl, mask = torch.tensor([[0.1, 0.1, 0.1]]).double(), torch.ones(1, 3)
    found = by_position(kl, mask, bins=1, kl_bound=torch.tensor([[0.05, 0.2, 0.01]]))
    assert found.outside.tolist() == pytest.approx([2 / 3])
    assert by_position(kl, mask, bins=1, kl_bound=torch.tensor(0.2)).outside.tolist() == [0]


def test_an_infinite_kl_has_no_share():
    found = by_position(torch.tensor([[1.0, math.inf]]), torch.ones(1, 2), bins=2)
    assert found.max.tolist() == [1, math.inf]
    assert math.isnan(found.share[1])


def test_kl_per_token_is_its_definition_and_the_metric():
    _, proposal, old, advantages, mask = random_pair()
    kl = kl_per_token(proposal, old, mask)
    p, q = dense(proposal), dense(old)
    for i in range(len(mask)):
        for t in range(mask.shape[1]):
            expected = sum(float(a * (a / b).log()) for a, b in zip(p[i, t], q[i, t], strict=True)) if mask[i, t] else 0
            assert float(kl[i, t]) == pytest.approx(expected, rel=1e-10)
    assert not kl.requires_grad
    _, metrics = troll_loss(proposal, old, advantages, mask, kl_bound=0.05, tail="floor")
    found = by_position(kl, mask, bins=1, kl_bound=0.05)
    assert found.mean.item() == pytest.approx(metrics["kl_before/mean"].item(), rel=1e-10)
    assert found.p99.item() == pytest.approx(metrics["kl_before/p99"].item(), rel=1e-10)
    assert found.max.item() == pytest.approx(metrics["kl_before/max"].item(), rel=1e-10)
    assert found.outside.item() == pytest.approx(metrics["projected_fraction"].item())


def test_the_bucket_is_smaller():
    whole = random_pair(V=6)
    coarse = random_pair(V=6, K=2, tail="bucket")
    less = kl_per_token(*coarse[1:3], coarse[4], tail="bucket")
    more = kl_per_token(*whole[1:3], whole[4])
    assert bool((less <= more + 1e-12).all())
    assert float(less.sum()) < 0.9 * float(more.sum())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda kl, mask: by_position(kl[0], mask), r"kl must be one number .*\[2, 3\], got \[3\]"),
        (lambda kl, mask: by_position(kl, mask[0]), r"loss_mask must have .*got \[3\]"),
        (lambda kl, mask: by_position(kl.log() * math.nan, mask), "NaN at position"),
        (lambda kl, mask: by_position(kl, mask, bins=0), "bins must be an integer ≥ 1, got 0"),
        (lambda kl, mask: by_position(kl, mask, starts=(1, 2)), "ascending integers from 0"),
        (lambda kl, mask: by_position(kl, mask, starts=()), "ascending integers from 0"),
        (lambda kl, mask: by_position(kl, mask, starts=(0, 4, 4)), "ascending integers from 0"),
        (lambda kl, mask: by_position(kl, mask, kl_bound=-1.0), "kl_bound must be a number ≥ 0, got -1"),
        (lambda kl, mask: by_position(kl, mask, kl_bound=torch.ones(3, 3)), r"kl_bound must be .*got \[3, 3\]"),
        (lambda kl, mask: by_class(kl, mask, mask.double(), ["a", "b"]), "classes must have an integer dtype"),
        (lambda kl, mask: by_class(kl, mask, mask[:1].long(), ["a", "b"]), "one integer per token"),
        (lambda kl, mask: by_class(kl, mask, mask.long(), ["a"]), "as there are 1 names, got classes from 1 to 1"),
        (lambda kl, mask: by_class(kl, mask, -mask.long(), ["a"]), "as there are 1 names, got classes from -1 to -1"),
        (lambda kl, mask: by_advantage(kl, mask, torch.ones(3)), r"advantages must be .*got \[3\]"),
    ],
)
def test_what_is_refused(call, said):
    with pytest.raises(InputError, match=said):
        call(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool))
