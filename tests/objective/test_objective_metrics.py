"""Every number a loss reports, by hand on one tiny batch; the definition of the percentile; what is always true."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import by_hand, evaluate, kl, make_case, policies, project_one, softmax

import troll.objective.troll
from troll import SparsePolicy, clip_loss, project, troll_loss, unconstrained_loss
from troll.objective.metrics import IMPORTANT, REDUCTIONS, high, mean, reduction
from troll.policy import align
from troll.projection import project_normalised

NAN, INF = math.nan, math.inf


def spread(name: str, x: torch.Tensor, counted: torch.Tensor) -> dict[str, torch.Tensor]:
    p99, top = high(x, counted)
    return {f"{name}/mean": mean(x, counted), f"{name}/p99": p99, f"{name}/max": top}


LOSSES = pytest.mark.parametrize("loss_function", [troll_loss, clip_loss, unconstrained_loss])
log = math.log


def entropy(*p):
    return -sum(x * log(x) for x in p)


# --- by hand ---------------------------------------------------------------------------------------------------------
# Two sequences with two tokens and one token. Old → proposal, the rest is the tail:
#   [0, 0]  0.5, 0.3 | 0.2  →  0.4, 0.4 | 0.2     KL 0.0258, inside
#   [0, 1]  0.9      | 0.1  →  0.9      | 0.1     KL 0
#   [1, 0]  ¼, ¾     | 0    →  ¾, ¼     | 0       KL ½ log 3 = 0.549, outside

PROPOSAL = [[[0.4, 0.4], [0.9], None], [[0.75, 0.25], None, None]]
OLD = [[[0.5, 0.3], [0.9], None], [[0.25, 0.75], None, None]]
IDS = [[[0, 1], [1], None], [[2, 3], None, None]]
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
A = torch.tensor([1.0, -1.0], dtype=torch.float64)

KL_0, KL_1 = 0.4 * log(0.4 / 0.5) + 0.4 * log(0.4 / 0.3), 0.5 * log(3)
COMMON = {
    "kl_before/mean": (KL_0 + 0 + KL_1) / 3,
    "kl_before/p99": KL_0,  # of 0, KL_0, KL_1: rank ⌊0.99 · 2⌋ = 1, counted from zero
    "kl_before/max": KL_1,
    "sequence_kl_before": ((KL_0 + 0) + KL_1) / 2,
    "sequence_kl_before/max": KL_1,
    "entropy": (entropy(0.4, 0.4, 0.2) + entropy(0.9, 0.1) + entropy(0.75, 0.25)) / 3,
    "kept_mass/proposal": (0.8 + 0.9 + 1) / 3,
    "kept_mass/old": (0.8 + 0.9 + 1) / 3,
    "support_size/proposal": 5 / 3,
    "support_size/old": 5 / 3,
    "lost_mass": 0.0,
    "skipped_tokens": 0,
}
RATIO = {"ratio/mean": (0.8 + 1 + 3) / 3, "ratio/p99": 1.0, "ratio/max": 3.0, "ratio/min": 0.8}
ROOT = 0.393952745852847437  # y log 4y + (1 − y) log 4(1 − y)/3 = 0.05, thirty digits by bisection


def run(loss_function, **options):
    proposal, old = by_hand(PROPOSAL, OLD, IDS)
    return {
        name: value.item() for name, value in loss_function(proposal, old, A, MASK, tail="bucket", **options)[1].items()
    }


def test_unconstrained_by_hand():
    assert run(unconstrained_loss) == pytest.approx({**COMMON, **RATIO}, rel=1e-12, abs=1e-14)


def test_unconstrained_sequences_by_hand():
    s = math.sqrt(0.8)
    ratio = {"ratio/mean": (s + s + 3) / 3, "ratio/p99": s, "ratio/max": 3.0, "ratio/min": s}
    found = run(unconstrained_loss, importance_sampling_level="sequence")
    assert found == pytest.approx({**COMMON, **ratio}, rel=1e-12, abs=1e-14)


@LOSSES
def test_padding_is_no_ratio_of_one(loss_function):
    for p, expected in ((0.55, 1.1), (0.45, 0.9)):
        proposal, old = by_hand([[[p, 1 - p], None]], [[[0.5, 0.5], None]], [[[0, 1], None]])
        _, metrics = loss_function(proposal, old, torch.ones(1), torch.tensor([[1, 0]]))
        for name in ("mean", "p99", "max", "min"):
            assert metrics[f"ratio/{name}"].item() == pytest.approx(expected, rel=1e-12), name


def test_clip_by_hand():
    """A > 0: 0.8 and 1 are not held. A < 0 with r = 3 is not held either, but by the dual clip at 2."""
    expected = {**COMMON, **RATIO, "clipped_fraction": 0.0, "dual_clipped_fraction": 1 / 3}
    assert run(clip_loss, dual_clip=2.0) == pytest.approx(expected, rel=1e-12, abs=1e-14)
    # With a narrow clip and the signs turned round, 0.8 (A < 0) and 3 (A > 0) are held.
    proposal, old = by_hand(PROPOSAL, OLD, IDS)
    _, metrics = clip_loss(proposal, old, -A, MASK, tail="bucket", clip_low=0.1, clip_high=0.1)
    assert metrics["clipped_fraction"].item() == pytest.approx(2 / 3, rel=1e-12)


def test_troll_by_hand():
    r = ROOT / 0.25
    mix = (log(ROOT / (1 - ROOT)) + log(3)) / (2 * log(3))  # logits are interpolated: from −log 3 to log 3
    expected = {
        **COMMON,
        "ratio/mean": (0.8 + 1 + r) / 3,
        "ratio/p99": 1.0,
        "ratio/max": r,
        "ratio/min": 0.8,
        "projected_fraction": 1 / 3,
        "kl_after/mean": (KL_0 + 0 + 0.05) / 3,
        "kl_after/p99": KL_0,
        "kl_after/max": 0.05,
        "sequence_kl_after": (KL_0 + 0.05) / 2,
        "sequence_kl_after/max": 0.05,
        "regression": kl([0.75, 0.25], [ROOT, 1 - ROOT]) / 3,
        "mix": (1 + 1 + mix) / 3,
        "unconverged_tokens": 0,
    }
    metrics = run(troll_loss, kl_bound=0.05)
    steps = {name: metrics.pop(name) for name in ("solver_steps/mean", "solver_steps/max")}
    assert metrics == pytest.approx(expected, rel=1e-12, abs=1e-14)
    # One active token: mean and maximum are its own steps, three to five by the derivation of the solver.
    assert steps["solver_steps/mean"] == steps["solver_steps/max"]
    assert 1 <= steps["solver_steps/max"] <= 5


def test_solver_steps_are_of_active_tokens():
    case = make_case(distance=0.6)
    proposal, old = policies(case)
    _, metrics = troll_loss(proposal, old, case.advantages, case.mask, kl_bound=0.05, tail="floor")
    projection = project(*align(proposal, old), 0.05)
    steps = projection.iterations[projection.active & case.mask]
    assert 1 < len(steps) < case.mask.sum()
    assert len(set(steps.tolist())) > 1
    assert metrics["solver_steps/mean"].item() == pytest.approx(steps.double().mean().item(), rel=1e-14)
    assert metrics["solver_steps/max"] == steps.max()
    _, bracketing = troll_loss(
        proposal, old, case.advantages, case.mask, kl_bound=0.05, tail="floor", solver="bracketing"
    )
    assert bracketing["solver_steps/max"] > metrics["solver_steps/max"]  # another solver, other steps


def test_unconverged_tokens_are_counted_where_they_count(monkeypatch):
    case = make_case()
    stuck = torch.zeros_like(case.mask)
    stuck[0, 0] = stuck[1, 1] = stuck[2, 3] = True  # the last one under the mask

    def project_badly(*args, **options):
        return replace(project_normalised(*args, **options), converged=~stuck)

    monkeypatch.setattr(troll.objective.troll, "project_normalised", project_badly)
    assert not case.mask[2, 3]
    assert evaluate(troll_loss, case)[2]["unconverged_tokens"] == 2


def test_the_two_policies_are_not_confused():
    """Supports of one and three tokens; masses 0.7 and 0.9."""
    token_ids = torch.tensor([[[0, -1, -1]]]), torch.tensor([[[0, 1, 2]]])
    probs = torch.tensor([[[0.7, 0.0, 0.0]]]), torch.tensor([[[0.5, 0.3, 0.1]]])
    proposal, old = (SparsePolicy(i, p.log(), (1 - p.sum(-1)).log(), 5) for i, p in zip(token_ids, probs, strict=True))
    for loss_function in (troll_loss, clip_loss, unconstrained_loss):
        _, metrics = loss_function(proposal, old, torch.ones(1), torch.ones(1, 1))
        assert metrics["support_size/proposal"] == 1
        assert metrics["support_size/old"] == 3
        assert metrics["kept_mass/proposal"].item() == pytest.approx(0.7, rel=1e-6)  # fp32
        assert metrics["kept_mass/old"].item() == pytest.approx(0.9, rel=1e-6)
        assert metrics["entropy"].item() == pytest.approx(entropy(0.7, 0.3), rel=1e-6)


@pytest.mark.parametrize("tail", ["floor", "bucket"])
def test_against_the_reference(tail):
    """Dense: every metric of the projection from the slow bisection."""
    case = make_case(distance=0.8)
    _, _, metrics = evaluate(troll_loss, case, tail=tail)
    before, after, mixes, pulls, ratios = [], [], [], [], []
    whole = {"before": [0.0] * 3, "after": [0.0] * 3}
    for i, t in case.mask.nonzero().tolist():
        p, q = softmax(case.logits[i, t].tolist()), softmax(case.old_logits[i, t].tolist())
        pi, eta = project_one(p, q, 0.05)
        before.append(kl(p, q))
        after.append(kl(pi, q))
        whole["before"][i] += before[-1]
        whole["after"][i] += after[-1]
        mixes.append(1 / (1 + eta))
        pulls.append(kl(p, pi))
        ratios.append(pi[int(case.sampled[i, t])] / q[int(case.sampled[i, t])])
    n = len(before)
    expected = {
        "kl_before/mean": sum(before) / n,
        "kl_before/max": max(before),
        "kl_after/mean": sum(after) / n,
        "kl_after/max": max(after),
        "sequence_kl_before": sum(before) / 3,
        "sequence_kl_after": sum(after) / 3,
        "sequence_kl_before/max": max(whole["before"]),
        "sequence_kl_after/max": max(whole["after"]),
        "mix": sum(mixes) / n,
        "regression": sum(pulls) / n,
        "ratio/mean": sum(ratios) / n,
        "ratio/max": max(ratios),
        "ratio/min": min(ratios),
        "projected_fraction": sum(x > 0.05 for x in before) / n,
    }
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-11, abs=1e-13), name


def test_lost_mass_is_reported():
    """The old policy excludes a token on which the proposal has 0.04 of its mass in one of two positions."""
    old_logits = torch.tensor([[[0.5, 0.5, 0.0], [0.5, 0.4, 0.1]]], dtype=torch.float64).log()
    logits = torch.tensor([[[0.48, 0.48, 0.04], [0.5, 0.4, 0.1]]], dtype=torch.float64).log()
    case = make_case(B=1, T=2, V=3, ragged=False).with_(
        logits=logits, old_logits=old_logits, sampled=torch.zeros(1, 2, dtype=torch.long)
    )
    _, grad, metrics = evaluate(troll_loss, case)
    assert metrics["lost_mass"].item() == pytest.approx(0.02, rel=1e-12)
    assert metrics["kl_before/max"].item() == pytest.approx(0.0, abs=1e-15)  # the rest is ½, ½ again
    assert bool(grad.isfinite().all())


# --- skipped tokens --------------------------------------------------------------------------------------------------


@LOSSES
@pytest.mark.parametrize("side", ["logits", "old_logits"])
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_skipped_tokens_are_counted_and_left_out(loss_function, side, bad, level):
    case = make_case()
    broken = getattr(case, side).clone()
    broken[0, 1, 2] = broken[1, 0, 5] = bad
    broken[2, 3, 0] = bad  # under the mask: neither counted nor skipped
    assert not case.mask[2, 3]
    assert bool(case.mask[0, 1] & case.mask[1, 0])
    loss, grad, metrics = evaluate(
        loss_function, case.with_(**{side: broken}), on_invalid="mask", importance_sampling_level=level
    )
    mask = case.mask.clone()
    mask[0, 1] = mask[1, 0] = False
    expected, expected_grad, expected_metrics = evaluate(
        loss_function, case.with_(mask=mask), importance_sampling_level=level
    )
    assert metrics.pop("skipped_tokens") == 2
    assert expected_metrics.pop("skipped_tokens") == 0
    assert torch.equal(loss, expected)
    assert torch.equal(grad, expected_grad)
    for name, value in metrics.items():
        assert torch.equal(value, expected_metrics[name]), name


# --- the percentile --------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=60)
@given(n=st.integers(1, 1500), padding=st.integers(0, 50), seed=st.integers(0, 10**6))
def test_p99_is_the_nearest_rank_from_below(n, padding, seed):
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(n + padding, generator=g)
    values = torch.cat([torch.arange(n, dtype=torch.float64) - 3, torch.full((padding,), NAN)])[order]
    counted = torch.cat([torch.ones(n, dtype=torch.bool), torch.zeros(padding, dtype=torch.bool)])[order]
    result = spread("x", values[None], counted[None])
    assert result["x/p99"].item() == 99 * (n - 1) // 100 - 3
    assert result["x/max"].item() == n - 1 - 3
    assert result["x/mean"].item() == pytest.approx((n - 1) / 2 - 3, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("n", "rank"), [(1, 0), (2, 0), (100, 98), (101, 99), (102, 99), (201, 198)])
def test_p99_by_hand(n, rank):
    values = torch.arange(n, dtype=torch.float32)
    assert spread("x", values, torch.ones(n, dtype=torch.bool))["x/p99"] == rank


def test_negative_values_are_not_hidden_by_the_padding():
    result = spread("x", torch.tensor([[-5.0, NAN, -7.0]]), torch.tensor([[True, False, True]]))
    assert {name: value.item() for name, value in result.items()} == {"x/mean": -6, "x/p99": -7, "x/max": -5}


# --- always ----------------------------------------------------------------------------------------------------------


@LOSSES
@pytest.mark.parametrize("tail", ["floor", "bucket"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_are_detached_scalars(loss_function, tail, level):
    case = make_case()
    options = {"dual_clip": 3.0} if loss_function is clip_loss else {}
    proposal, old = policies(case, case.leaf(), tail=tail, K=3)
    loss, metrics = loss_function(
        proposal, old, case.advantages, case.mask, tail=tail, importance_sampling_level=level, **options
    )
    assert loss.requires_grad
    assert loss.shape == ()
    for name, value in metrics.items():
        assert isinstance(value, torch.Tensor), name
        assert value.shape == (), name
        assert not value.requires_grad, name
        assert bool(value.isfinite()), name


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    distance=st.floats(0, 20),
    bound=st.sampled_from([0.0, 1e-6, 1e-3, 0.05, 0.5, 5.0]),
    tail=st.sampled_from(["floor", "bucket"]),
    K=st.integers(1, 8),
)
def test_relations_between_metrics(seed, distance, bound, tail, K):
    case = make_case(seed=seed, distance=distance, V=8, dtype=torch.float32)
    _, _, metrics = evaluate(troll_loss, case, tail=tail, K=K, kl_bound=bound)
    m = {name: value.item() for name, value in metrics.items()}
    assert m["kl_after/max"] <= bound * (1 + 1e-5)
    for name in ("kl_before", "kl_after", "ratio"):
        assert 0 <= m[f"{name}/p99"] <= m[f"{name}/max"]
        assert m[f"{name}/mean"] <= m[f"{name}/max"] * (1 + 1e-6)
    for name in ("before", "after"):
        assert m[f"kl_{name}/max"] <= m[f"sequence_kl_{name}/max"] * (1 + 1e-6)
        assert m[f"sequence_kl_{name}"] <= m[f"sequence_kl_{name}/max"] * (1 + 1e-6)
    assert m["kl_after/mean"] <= m["kl_before/mean"] * (1 + 1e-6)
    assert m["ratio/min"] <= m["ratio/mean"] * (1 + 1e-6)
    assert 0 <= m["projected_fraction"] <= 1
    assert 0 <= m["mix"] <= 1
    assert (m["regression"] > 0) == (m["projected_fraction"] > 0)
    assert (m["solver_steps/max"] > 0) <= (m["projected_fraction"] > 0)
    assert 0 <= m["entropy"] <= math.log(8) * (1 + 1e-6)
    assert 0 < m["kept_mass/proposal"] <= 1 + 1e-6
    assert 1 <= m["support_size/proposal"] <= K
    assert m["unconverged_tokens"] == m["skipped_tokens"] == m["lost_mass"] == 0


@LOSSES
@pytest.mark.parametrize("tail", ["floor", "bucket"])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_an_empty_batch_is_all_zeros(loss_function, tail, shape):
    leaf = torch.zeros(*shape, 2, requires_grad=True)
    token_ids = torch.zeros(*shape, 2, dtype=torch.long)
    proposal = SparsePolicy(token_ids, leaf, torch.zeros(shape), 5)
    old = proposal.detach()
    loss, metrics = loss_function(proposal, old, torch.zeros(shape[0]), torch.zeros(shape), tail=tail)
    assert loss.item() == 0
    assert torch.autograd.grad(loss, leaf, allow_unused=True)[0] is not None
    assert {name: value.item() for name, value in metrics.items()} == dict.fromkeys(metrics, 0)
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())


def test_every_metric_has_a_reduction_in_the_table():
    """And the table has no other, but for those that trainers add."""
    case = make_case()
    losses = [(troll_loss, {}), (clip_loss, {"dual_clip": 3.0}), (unconstrained_loss, {})]
    names = {name for loss, options in losses for name in evaluate(loss, case, **options)[2]}
    assert set(REDUCTIONS) - names == {"kl_bound", "regression_coef", "unscored_completions"}
    assert names <= set(REDUCTIONS)
    assert set(IMPORTANT) <= names


def test_extremes_and_counts_are_not_averaged():
    for name, how in REDUCTIONS.items():
        last = name.rsplit("/")[-1]
        expected = last if last in ("max", "min") else "sum" if name.endswith(("_tokens", "_completions")) else "mean"
        assert how == reduction(name) == expected, name
