"""``clip_loss`` in every quadrant, ``unconstrained_loss`` by hand, and what all three losses have in common."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import aggregate_lists, by_hand, central_differences, evaluate, make_case, softmax

from troll import SparsePolicy, clip_loss, troll_loss, unconstrained_loss

INF = math.inf
LOSSES = pytest.mark.parametrize("loss_function", [troll_loss, clip_loss, unconstrained_loss])
# One exp, one logarithm and a product in fp64.
EXACT = {"rel": 1e-13, "abs": 1e-14}


def one_token(ratio, old=0.1, dtype=torch.float64):
    """A leaf with the log-probability of the sampled token, and policies with that ratio of two outcomes."""
    leaf = torch.tensor(math.log(ratio * old), dtype=dtype, requires_grad=True)
    rest = torch.tensor(1 - ratio * old, dtype=dtype).log()
    _, constant = by_hand([[[old, 1 - old]]], [[[old, 1 - old]]], [[[0, 1]]], dtype=dtype)
    tail = torch.full((1, 1), -INF, dtype=dtype)
    return leaf, SparsePolicy(constant.token_ids, torch.stack([leaf, rest])[None, None], tail, 4), constant


def clip_at(ratio, advantage, **options):
    """Loss, its derivative by log r, and the metrics, for one token."""
    leaf, proposal, old = one_token(ratio)
    loss, metrics = clip_loss(
        proposal, old, torch.tensor([advantage], dtype=torch.float64), torch.ones(1, 1), **options
    )
    return loss.item(), torch.autograd.grad(loss, leaf)[0].item(), metrics


# --- clipping by hand ------------------------------------------------------------------------------------------------

QUADRANTS = [
    # A, r, objective min(rA, clip(r)A) with low = high = 0.2, whether it still moves
    (+2.0, 1.0, 2.0, True),
    (+2.0, 1.1, 2.2, True),
    (+2.0, 1.5, 2.4, False),  # above, rewarded: held at 1.2
    (+2.0, 0.9, 1.8, True),
    (+2.0, 0.5, 1.0, True),  # below, rewarded: may come back
    (-2.0, 1.0, -2.0, True),
    (-2.0, 1.1, -2.2, True),
    (-2.0, 1.5, -3.0, True),  # above, punished: may come back
    (-2.0, 0.9, -1.8, True),
    (-2.0, 0.5, -1.6, False),  # below, punished: held at 0.8
    (0.0, 1.5, 0.0, True),  # no advantage, no gradient either way
    (0.0, 0.5, 0.0, True),
]


@pytest.mark.parametrize(("advantage", "ratio", "objective", "moves"), QUADRANTS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_symmetric_clip(advantage, ratio, objective, moves, level):
    loss, slope, metrics = clip_at(ratio, advantage, importance_sampling_level=level)
    assert loss == pytest.approx(-objective, **EXACT)
    if moves:
        assert slope == pytest.approx(-ratio * advantage, **EXACT)
    else:
        assert slope == 0.0
    assert metrics["clipped_fraction"].item() == (not moves)
    assert "dual_clipped_fraction" not in metrics


ASYMMETRIC = [
    # low 0.1, high 0.28
    (+1.0, 1.25, 1.25, True),
    (+1.0, 1.3, 1.28, False),
    (+1.0, 0.85, 0.85, True),
    (-1.0, 1.3, -1.3, True),
    (-1.0, 0.95, -0.95, True),
    (-1.0, 0.85, -0.9, False),
]


@pytest.mark.parametrize(("advantage", "ratio", "objective", "moves"), ASYMMETRIC)
def test_asymmetric_clip(advantage, ratio, objective, moves):
    loss, slope, metrics = clip_at(ratio, advantage, clip_low=0.1, clip_high=0.28)
    assert loss == pytest.approx(-objective, **EXACT)
    assert slope == (pytest.approx(-ratio * advantage, **EXACT) if moves else 0.0)
    assert metrics["clipped_fraction"].item() == (not moves)


DUAL = [
    # c = 3: where A < 0 the objective is at least 3 A
    (-2.0, 2.5, -5.0, True, 0, 0),
    (-2.0, 4.0, -6.0, False, 0, 1),
    (-2.0, 0.5, -1.6, False, 1, 0),  # the lower clip stays
    (+2.0, 4.0, 2.4, False, 1, 0),  # not for A > 0
    (+2.0, 0.5, 1.0, True, 0, 0),
    (0.0, 4.0, 0.0, True, 0, 0),
]


@pytest.mark.parametrize(("advantage", "ratio", "objective", "moves", "clipped", "dual"), DUAL)
def test_dual_clip(advantage, ratio, objective, moves, clipped, dual):
    loss, slope, metrics = clip_at(ratio, advantage, dual_clip=3.0)
    assert loss == pytest.approx(-objective, **EXACT)
    assert slope == (pytest.approx(-ratio * advantage, **EXACT) if moves else 0.0)
    assert metrics["clipped_fraction"].item() == clipped
    assert metrics["dual_clipped_fraction"].item() == dual


def test_the_bounds_are_a_fifth_by_default():
    parameters = inspect.signature(clip_loss).parameters
    assert [parameters[name].default for name in ("clip_low", "clip_high", "dual_clip")] == [0.2, 0.2, None]


@pytest.mark.parametrize(("advantage", "ratio"), [(1.0, 1.5), (-1.0, 1.5), (1.0, 0.5), (-1.0, 0.5)])
def test_clip_bounds_at_their_ends(advantage, ratio):
    """clip_low = 1 and clip_high = inf clip nothing; both 0 hold every step in the rewarded direction."""
    assert clip_at(ratio, advantage, clip_low=1.0, clip_high=INF)[:2] == pytest.approx(
        (-ratio * advantage,) * 2, **EXACT
    )
    held = (ratio - 1) * advantage > 0
    loss, slope, _ = clip_at(ratio, advantage, clip_low=0.0, clip_high=0.0)
    assert loss == pytest.approx(-advantage if held else -ratio * advantage, **EXACT)
    assert slope == (0.0 if held else pytest.approx(-ratio * advantage, **EXACT))


# --- against a reference ---------------------------------------------------------------------------------------------


def reference_clip(logits, anchor, case, low, high, dual, level, rule, weights):
    """The clipped loss token by token, the sequence ratio with its stop-gradient at ``anchor``."""
    rows = []
    for i, row in enumerate(case.mask.tolist()):
        counted = [t for t, yes in enumerate(row) if yes]
        a = [int(case.sampled[i, t]) for t in counted]
        old = [math.log(softmax(case.old_logits[i, t].tolist())[j]) for t, j in zip(counted, a, strict=True)]
        now, then = (
            [math.log(softmax(z[i][t])[j]) - o for t, j, o in zip(counted, a, old, strict=True)]
            for z in (logits, anchor)
        )
        if level == "sequence":
            s = math.exp(sum(then) / len(counted))
            ratios = [s * math.exp(x - y) for x, y in zip(now, then, strict=True)]
        else:
            ratios = [math.exp(x) for x in now]
        values = []
        for t, r in zip(counted, ratios, strict=True):
            A = case.advantages[i, t].item()
            objective = min(r * A, min(max(r, 1 - low), 1 + high) * A)
            if dual is not None and A < 0:
                objective = max(objective, dual * A)
            values.append(-weights[i, t].item() * objective)
        rows.append(values)
    return aggregate_lists(rows, rule)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    distance=st.floats(0.05, 2),
    low=st.sampled_from([3e-4, 0.1, 0.2, 0.9]),
    high=st.sampled_from([4e-4, 0.2, 0.28, 2.0]),
    dual=st.sampled_from([None, 1.5, 3.0]),
    level=st.sampled_from(["token", "sequence"]),
    rule=st.sampled_from(["token_mean", "sequence_mean", "sequence_sum"]),
)
def test_clip_of_random_batches(seed, distance, low, high, dual, level, rule):
    case = make_case(seed=seed, distance=distance)
    weights = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    options = {
        "clip_low": low,
        "clip_high": high,
        "dual_clip": dual,
        "importance_sampling_level": level,
        "aggregation": rule,
    }
    loss, _, _ = evaluate(clip_loss, case, importance_weights=weights, K=2, **options)  # K: full softmax all the same
    z = case.logits.tolist()
    assert loss.item() == pytest.approx(reference_clip(z, z, case, low, high, dual, level, rule, weights), rel=1e-11)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("dual", [None, 1.5])
def test_gradient_of_the_whole_chain(level, dual):
    case = make_case(seed=2, B=2, T=3, V=5, distance=1.0)
    weights = torch.tensor([[0.5, 2.0, 1.5], [0.1, 3.0, 0.7]], dtype=torch.float64)
    _, grad, metrics = evaluate(
        clip_loss,
        case,
        dual_clip=dual,
        importance_sampling_level=level,
        importance_weights=weights,
        aggregation="sequence_mean",
    )
    assert 0 < metrics["clipped_fraction"] < 1
    anchor = case.logits.tolist()
    expected = central_differences(
        lambda z: reference_clip(z, anchor, case, 0.2, 0.2, dual, level, "sequence_mean", weights), case.logits
    )
    # A central difference with step 1e-5: 1e-10 times a third derivative of size one, plus 1e-16 / 1e-5.
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-9)


def test_the_sequence_level_is_gspo():
    """mean_i min(s_i A_i, clip(s_i) A_i), s_i = exp(mean_t log r_t), differentiated as it stands."""
    case = make_case(distance=0.02)
    A = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    loss, grad, metrics = evaluate(
        clip_loss,
        case.with_(advantages=A),
        clip_low=3e-4,
        clip_high=4e-4,
        importance_sampling_level="sequence",
        aggregation="sequence_mean",
    )
    logits = case.leaf()
    log_p, log_q = (x.log_softmax(-1).gather(-1, case.sampled[..., None])[..., 0] for x in (logits, case.old_logits))
    s = (((log_p - log_q) * case.mask).sum(-1) / case.mask.sum(-1)).exp()
    gspo = -torch.minimum(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A).mean()
    torch.testing.assert_close(loss, gspo.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(grad, torch.autograd.grad(gspo, logits)[0], rtol=1e-10, atol=1e-14)
    assert 0 < metrics["clipped_fraction"] < 1


@LOSSES
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratios_are_finite(loss_function, level, gap, advantage):
    """The sampled token falls, or rises, by two hundred in its log-probability."""
    low, high = torch.tensor([[[0.0, 200.0]]]), torch.tensor([[[0.0, 0.0]]])
    case = make_case(B=1, T=1, V=2, dtype=torch.float32).with_(
        logits=high if gap > 0 else low,
        old_logits=low if gap > 0 else high,
        sampled=torch.zeros(1, 1, dtype=torch.long),
        advantages=torch.tensor([advantage]),
    )
    loss, grad, metrics = evaluate(loss_function, case, importance_sampling_level=level)
    assert bool(loss.isfinite())
    assert bool(grad.isfinite().all())
    assert all(bool(value.isfinite()) for value in metrics.values())
    if loss_function is not troll_loss:
        log_r = 200 - math.log(2)  # old e⁻²⁰⁰, proposal ½, or the other way round
        cap = 20 if level == "token" else 10
        ratio = math.exp(min(log_r, cap)) if gap > 0 else math.exp(-log_r)
        if loss_function is clip_loss:
            ratio = {(1, 1): 1.2, (-1, -1): 0.8}.get((round(math.copysign(1, gap)), int(advantage)), ratio)
        assert loss.item() == pytest.approx(-ratio * advantage, rel=1e-5, abs=1e-30)  # e²⁰ in fp32
        assert grad.abs().max() < 1e-30  # capped, clipped or vanished


# --- without a trust region ------------------------------------------------------------------------------------------


def test_unconstrained_by_hand():
    """Ratios 0.8, 1 and 3 of two sequences, weights 1, 2 and ½, advantages 1 and −2."""
    proposal, old = by_hand(
        [[[0.4, 0.4], [0.9]], [[0.75, 0.25], None]],
        [[[0.5, 0.3], [0.9]], [[0.25, 0.75], None]],
        [[[0, 1], [1]], [[2, 3], None]],
    )
    mask = torch.tensor([[1, 1], [1, 0]])
    A, w = torch.tensor([1.0, -2.0]).double(), torch.tensor([[1.0, 2.0], [0.5, 9.0]]).double()
    plain, _ = unconstrained_loss(proposal, old, A, mask)
    assert plain.item() == pytest.approx(-(0.8 + 1 - 6) / 3, rel=1e-14)
    weighted, _ = unconstrained_loss(proposal, old, A, mask, importance_weights=w, aggregation="sequence_mean")
    assert weighted.item() == pytest.approx(-((0.8 + 2) / 2 - 3) / 2, rel=1e-14)
    sequence, _ = unconstrained_loss(
        proposal, old, A, mask, importance_sampling_level="sequence", aggregation="sequence_mean"
    )
    assert sequence.item() == pytest.approx(-(math.sqrt(0.8) - 6) / 2, rel=1e-14)


def test_unconstrained_gradient_is_the_ratio_times_reinforce():
    case = make_case(distance=1.0)
    _, grad, _ = evaluate(unconstrained_loss, case, K=2)
    p, q = case.logits.softmax(-1), case.old_logits.softmax(-1)
    one_hot = torch.nn.functional.one_hot(case.sampled, 6).double()
    ratio = ((p / q) * one_hot).sum(-1)
    expected = -(ratio * case.advantages * case.mask)[..., None] * (one_hot - p) / case.mask.sum()
    torch.testing.assert_close(grad, expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_clip_so_wide_that_nothing_is_clipped_is_the_unconstrained_loss(level):
    case = make_case(distance=2.0)
    wide = evaluate(clip_loss, case, clip_low=1.0, clip_high=INF, importance_sampling_level=level)
    plain = evaluate(unconstrained_loss, case, importance_sampling_level=level)
    assert torch.equal(wide[0], plain[0])
    torch.testing.assert_close(wide[1], plain[1], rtol=1e-14, atol=0)  # ½ g + ½ g at the tie of the minimum
    assert wide[2]["clipped_fraction"] == 0


@pytest.mark.parametrize("loss_function", [clip_loss, unconstrained_loss])
def test_the_tail_only_changes_what_is_reported(loss_function):
    case = make_case()
    floor, bucket = (evaluate(loss_function, case, tail=tail, K=2) for tail in ("floor", "bucket"))
    torch.testing.assert_close(floor[0], bucket[0], rtol=1e-13, atol=0)
    torch.testing.assert_close(floor[1], bucket[1], rtol=1e-12, atol=1e-15)
    assert floor[2]["kl_before/mean"] != bucket[2]["kl_before/mean"]


# --- what all three share --------------------------------------------------------------------------------------------


def test_the_three_losses_share_their_arguments():
    troll, clip, plain = (inspect.signature(f).parameters for f in (troll_loss, clip_loss, unconstrained_loss))
    assert set(plain) < set(clip)
    assert set(plain) < set(troll)
    assert set(clip) - set(plain) == {"clip_low", "clip_high", "dual_clip"}
    assert set(troll) - set(plain) == {"preset", "kl_bound", "regression_coef", "solver", "max_lost_mass"}
    for name, parameter in plain.items():
        assert parameter == clip[name] == troll[name]  # name, kind, default and annotation
    assert [p.kind for p in plain.values()][:5] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 4 + [
        inspect.Parameter.KEYWORD_ONLY
    ]


def test_the_three_losses_share_their_metrics():
    case = make_case()
    troll, clip, plain = (evaluate(f, case, K=3)[2] for f in (troll_loss, clip_loss, unconstrained_loss))
    assert plain.keys() < clip.keys()
    assert plain.keys() < troll.keys()
    assert clip.keys() - plain.keys() == {"clipped_fraction"}
    for name, value in plain.items():
        if not name.startswith("ratio"):  # projected there
            torch.testing.assert_close(troll[name], value, rtol=1e-12, atol=1e-14, msg=name)
        assert torch.equal(clip[name], value), name


@settings(derandomize=True, deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), level=st.sampled_from(["token", "sequence"]))
def test_on_policy_all_three_are_the_same(seed, level):
    """Which is why a schedule of one update per rollout compares nothing."""
    case = make_case(seed=seed, distance=0.0)
    results = [evaluate(f, case, importance_sampling_level=level) for f in (troll_loss, clip_loss, unconstrained_loss)]
    for loss, grad, _ in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(grad, results[0][1], rtol=1e-11, atol=1e-14)
