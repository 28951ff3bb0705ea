"""``troll_loss`` against a slow reference, its limits, its two terms, and what each of them may move."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import (
    by_hand,
    central_differences,
    evaluate,
    kl,
    make_case,
    policies,
    project_one,
    reference_troll,
    softmax,
)

from troll import aggregate, project, regression_loss, troll_loss, unconstrained_loss
from troll.policy import align, token_kl

INF = math.inf
# A projection in fp64 is exact to 1e-14; the losses here are sums of a dozen terms of size one.
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def token_gradient(probs, upstream):
    """Gradient on the logits of Σ_j upstream_j log p_j: g − p Σ g."""
    return upstream - probs * upstream.sum(-1, keepdim=True)


# --- the whole chain against the reference ---------------------------------------------------------------------------

DENSE, SPARSE, GREEDY = {}, {"K": 3}, {"K": 4, "delta": 0.15}
CHAINS = [
    # tail, support, arguments of the loss
    ("floor", DENSE, {}),
    ("bucket", DENSE, {}),
    ("floor", SPARSE, {}),
    ("bucket", SPARSE, {}),
    ("floor", GREEDY, {"rule": "sequence_mean"}),
    ("bucket", GREEDY, {"rule": "sequence_mean"}),
    ("floor", DENSE, {"level": "sequence", "rule": "sequence_mean"}),
    ("bucket", SPARSE, {"level": "sequence", "rule": "sequence_sum"}),
    ("floor", SPARSE, {"rule": "constant", "max_length": 16, "alpha": 0.3}),
    ("floor", DENSE, {"alpha": 0.0, "bound": 0.08}),
    ("floor", DENSE, {"temperature": 0.7, "bound": 0.3}),
    ("bucket", SPARSE, {"temperature": 1.6, "bound": 0.01}),
    ("floor", DENSE, {"weights": True, "level": "sequence"}),
    ("bucket", GREEDY, {"weights": True, "alpha": 2.0}),
]


@pytest.mark.parametrize(("tail", "support", "arguments"), CHAINS)
def test_value_and_gradient_of_the_whole_chain(tail, support, arguments):
    case = make_case(seed=3, B=2, T=3, V=5)
    arguments = {"bound": 0.1, **arguments}
    weights = torch.tensor([[0.5, 2.0, 1.5], [0.1, 3.0, 0.7]], dtype=torch.float64)
    weights = weights if arguments.pop("weights", False) else None
    temperature = arguments.get("temperature", 1.0)

    names = {
        "bound": "kl_bound",
        "alpha": "regression_coef",
        "level": "importance_sampling_level",
        "rule": "aggregation",
    }
    options = {names.get(name, name): value for name, value in arguments.items() if name != "temperature"}
    loss, grad, metrics = evaluate(
        troll_loss, case, tail=tail, temperature=temperature, importance_weights=weights, **support, **options
    )
    # Tokens on both sides of the bound, and none so near the kink that a step of 1e-5 could cross it.
    assert 0 < metrics["projected_fraction"] < 1
    proposal, old = policies(case, tail=tail, temperature=temperature, **support)
    distance = (token_kl(*align(proposal, old, tail)) - arguments["bound"])[case.mask]
    assert distance.abs().min() > 1e-3

    def reference(logits):
        return reference_troll(logits, case.logits.tolist(), case, tail=tail, weights=weights, **support, **arguments)

    torch.testing.assert_close(loss, torch.tensor(reference(case.logits.tolist()), dtype=torch.float64), **EXACT)
    # A central difference with step 1e-5 errs by 1e-10 times a third derivative of size ten, plus 1e-16 / 1e-5.
    torch.testing.assert_close(grad, central_differences(reference, case.logits), rtol=1e-6, atol=1e-8)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    distance=st.floats(0.05, 4),
    bound=st.sampled_from([1e-4, 0.05, 0.5]),
    tail=st.sampled_from(["floor", "bucket"]),
    K=st.integers(1, 6),
    delta=st.sampled_from([0.0, 1e-2, 0.3]),
)
def test_value_of_random_batches(seed, distance, bound, tail, K, delta):
    case = make_case(seed=seed, distance=distance)
    proposal, old = policies(case, tail=tail, K=K, delta=delta)
    loss, metrics = troll_loss(proposal, old, case.advantages, case.mask, tail=tail, kl_bound=bound)
    logits = case.logits.tolist()
    expected = reference_troll(logits, logits, case, bound=bound, tail=tail, K=K, delta=delta)
    # Losses up to 1e2; where K = 1 leaves one floor of 1e-12 against the rest, KLs are cancellations of 1e-4.
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert metrics["unconverged_tokens"] == 0


# --- by hand ---------------------------------------------------------------------------------------------------------


def two_token_case(dtype=torch.float64):
    """Old (½, ½), proposal (0.9, 0.1): KL 0.368; the sampled token is the first."""
    logits = torch.tensor([[[math.log(9.0), 0.0]]], dtype=dtype)
    return make_case(B=1, T=1, V=2).with_(
        logits=logits,
        old_logits=torch.zeros_like(logits),
        sampled=torch.zeros(1, 1, dtype=torch.long),
        advantages=torch.full((1, 1), 2.0, dtype=dtype),
    )


@pytest.mark.parametrize("tail", ["floor", "bucket"])
@pytest.mark.parametrize("solver", ["newton", "bracketing"])
def test_two_tokens_by_hand(tail, solver):
    # x log 2x + (1 − x) log 2(1 − x) = 0.05 has the root x = 0.65678159836496682 (thirty digits by bisection).
    loss, grad, metrics = evaluate(troll_loss, two_token_case(), tail=tail, solver=solver)
    pull = 0.160219220615260978  # KL((0.9, 0.1) ‖ (x, 1 − x))
    assert loss.item() == pytest.approx(pull - 2 * 1.313563196729933642, rel=1e-12)
    assert metrics["mix"].item() == pytest.approx(0.295365600467061814, rel=1e-12)
    # The boundary is a single point: the ratio does not move, and the regression alone acts.
    # 0.9 · 0.1 · (logit 0.9 − logit x) = 0.09 · 1.548238834…
    step = 0.09 * (math.log(9) - math.log(0.656781598364966821 / 0.343218401635033179))
    torch.testing.assert_close(grad.flatten(), torch.tensor([step, -step], dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("tail", ["floor", "bucket"])
@pytest.mark.parametrize("advantage", [-5.0, 0.0, 5.0])
def test_the_ratio_of_an_active_token_with_two_outcomes_has_no_gradient(tail, advantage):
    case = two_token_case()
    _, grad, metrics = evaluate(
        troll_loss, case.with_(advantages=torch.full_like(case.advantages, advantage)), tail=tail, regression_coef=0
    )
    assert metrics["projected_fraction"] == 1
    assert grad.abs().max() < 1e-14 * max(1, abs(advantage))  # (6) is zero up to the rounding of its three terms


def test_the_sampled_token_and_the_bucket_are_two_outcomes_too():
    case = make_case(V=6, distance=1.0)
    active = project(*align(*policies(case, tail="bucket", K=1), "bucket"), 0.05).active & case.mask
    assert 0 < active.sum() < case.mask.sum()
    _, bare, _ = evaluate(troll_loss, case, tail="bucket", K=1, regression_coef=0)
    _, full, _ = evaluate(troll_loss, case, tail="bucket", K=1)
    assert bare[active].abs().max() < 1e-14  # (6) is zero up to the rounding of its three terms
    assert full[active].abs().amax(-1).min() > 1e-4
    assert bare[case.mask & ~active].abs().amax(-1).min() > 1e-4


def test_one_token_inside_and_one_outside_by_hand():
    """Old ¼, ¾ against ¾, ¼ (KL ½ log 3, outside), and old ½, ½ against 0.55, 0.45 (KL 0.005, inside)."""
    proposal, old = by_hand([[[0.75, 0.25], [0.55, 0.45]]], [[[0.25, 0.75], [0.5, 0.5]]], [[[0, 1], [2, 3]]])
    advantages = torch.tensor([2.0], dtype=torch.float64)
    loss, _ = troll_loss(proposal, old, advantages, torch.ones(1, 2), kl_bound=0.05, regression_coef=0.5)
    outside = 0.5 * 0.26150741852969001 - 2 * 1.57581098341138975  # thirty-digit root y = 0.39395… of KL(y ‖ ¼) = 0.05
    assert loss.item() == pytest.approx((outside - 2 * 1.1) / 2, rel=1e-12)


def test_defaults_are_those_of_the_preset():
    defaults = {k: p.default for k, p in inspect.signature(troll_loss).parameters.items() if p.default is not p.empty}
    assert defaults == {
        "preset": "default",
        "kl_bound": None,
        "regression_coef": None,
        "tail": None,
        "solver": "newton",
        "max_lost_mass": 0.1,
        "importance_sampling_level": "token",
        "aggregation": "token_mean",
        "max_length": None,
        "total": None,
        "importance_weights": None,
        "on_invalid": "raise",
        "impl": "auto",
    }


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rule", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(("tail", "K"), [("floor", None), ("bucket", None), ("bucket", 3)])
def test_on_policy_it_is_reinforce(tail, K, rule, level):
    case = make_case(distance=0.0)
    loss, grad, metrics = evaluate(troll_loss, case, tail=tail, K=K, aggregation=rule, importance_sampling_level=level)
    torch.testing.assert_close(loss, -aggregate(case.advantages, case.mask, rule), **EXACT)
    logits = case.leaf()
    log_pi = logits.log_softmax(-1).gather(-1, case.sampled[..., None])[..., 0]
    (expected,) = torch.autograd.grad(-aggregate(log_pi * case.advantages, case.mask, rule), logits)
    torch.testing.assert_close(grad, expected, **EXACT)
    assert expected.abs().max() > 0.01
    assert metrics["projected_fraction"] == metrics["regression"] == metrics["solver_steps/max"] == 0
    assert metrics["ratio/min"] == metrics["ratio/max"] == metrics["mix"] == 1


def test_on_policy_with_floors_the_support_is_the_whole_world():
    """Of three kept tokens: log π is renormalised over them, and so is the gradient."""
    case = make_case(distance=0.0)
    proposal, _ = policies(case, K=3)
    loss, grad, metrics = evaluate(troll_loss, case, K=3)
    assert loss.item() == pytest.approx(-aggregate(case.advantages, case.mask).item(), rel=1e-12)
    keep = torch.zeros_like(case.logits, dtype=torch.bool)
    keep = keep.scatter(-1, proposal.token_ids.clamp(min=0), True)
    logits = case.leaf()
    log_pi = logits.masked_fill(~keep, -INF).log_softmax(-1).gather(-1, case.sampled[..., None])[..., 0]
    (expected,) = torch.autograd.grad(-aggregate(log_pi * case.advantages, case.mask), logits)
    torch.testing.assert_close(grad, expected, **EXACT)
    assert metrics["projected_fraction"] == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("tail", "K"), [("floor", None), ("bucket", None), ("bucket", 2)])
def test_without_a_bound_it_is_the_unconstrained_loss(tail, K, level):
    case = make_case(distance=2.0)
    common = {"tail": tail, "K": K, "importance_sampling_level": level, "aggregation": "sequence_mean"}
    loss, grad, metrics = evaluate(troll_loss, case, kl_bound=INF, regression_coef=0.0, **common)
    expected, expected_grad, _ = evaluate(unconstrained_loss, case, **common)
    torch.testing.assert_close(loss, expected, **EXACT)
    torch.testing.assert_close(grad, expected_grad, **EXACT)
    assert metrics["projected_fraction"] == 0
    # No token is active, so that the regression adds nothing, whatever its weight.
    again, again_grad, _ = evaluate(troll_loss, case, kl_bound=INF, regression_coef=7.0, **common)
    assert torch.equal(again, loss)
    assert torch.equal(again_grad, grad)


@pytest.mark.parametrize(("tail", "K"), [("floor", None), ("floor", 3), ("bucket", 3)])
def test_a_bound_of_zero_leaves_the_regression_alone(tail, K):
    case = make_case()
    loss, grad, metrics = evaluate(troll_loss, case, tail=tail, K=K, kl_bound=0.0)
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1
    assert metrics["projected_fraction"] == 1
    assert metrics["kl_after/max"] == 0
    assert loss.item() == pytest.approx(
        metrics["kl_before/mean"].item() - aggregate(case.advantages, case.mask).item(), rel=1e-12
    )
    # Its gradient is that of KL(π̃ ‖ π_old), for any advantages.
    logits = case.leaf()
    proposal, old = policies(case, logits, tail=tail, K=K)
    expected_loss = aggregate(token_kl(*align(proposal, old, tail)), case.mask)
    torch.testing.assert_close(grad, torch.autograd.grad(expected_loss, logits)[0], **EXACT)
    _, bare, _ = evaluate(troll_loss, case, tail=tail, K=K, kl_bound=0.0, regression_coef=0.0)
    assert torch.equal(bare, torch.zeros_like(bare))


# --- the regression --------------------------------------------------------------------------------------------------


def without_advantages(case):
    return case.with_(advantages=torch.zeros_like(case.advantages))


@pytest.mark.parametrize(("tail", "K"), [("floor", None), ("floor", 3), ("bucket", 3)])
@pytest.mark.parametrize("rule", ["token_mean", "sequence_mean"])
def test_the_regression_is_a_penalty_aggregated_like_the_ratio(tail, K, rule):
    case = make_case()
    losses = [
        evaluate(troll_loss, case, tail=tail, K=K, regression_coef=alpha, aggregation=rule)[0] for alpha in (0, 1, 3)
    ]
    per_token = regression_loss(project(*align(*policies(case, tail=tail, K=K), tail), 0.05))
    penalty = aggregate(per_token, case.mask, rule)
    assert penalty > 0.01
    torch.testing.assert_close(losses[1] - losses[0], penalty, **EXACT)
    torch.testing.assert_close(losses[2] - losses[0], 3 * penalty, **EXACT)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), distance=st.floats(0.1, 3))
def test_a_step_against_its_gradient_brings_active_tokens_back(seed, distance):
    case = without_advantages(make_case(seed=seed, distance=distance))
    proposal, old = policies(case)
    before = project(*align(proposal, old), 0.05)
    _, grad, _ = evaluate(troll_loss, case)
    active = before.active & case.mask
    # A hundredth of a logit at most: the first order decides. (The mean over tokens is undone by the scaling.)
    step = 0.01 / grad.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    moved, _ = policies(case, case.logits - torch.where(active[..., None], step, 0.0) * grad)
    after = token_kl(*align(moved, old))
    assert bool((after < before.kl_before)[active].all())
    assert torch.equal(grad[~active], torch.zeros_like(grad[~active]))


@settings(derandomize=True, deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), distance=st.floats(0.1, 3), bound=st.sampled_from([0.0, 1e-3, 0.05, 0.5]))
def test_its_gradient_in_closed_form(seed, distance, bound):
    """π̃ (log π̃/π − KL(π̃ ‖ π)) on the logits: π is a constant.

    On the path log π̃/π = (1 − t) d + const, so this is also 1 − t times the gradient of KL(π̃ ‖ π_old).
    """
    case = without_advantages(make_case(seed=seed, distance=distance))
    _, grad, _ = evaluate(troll_loss, case, kl_bound=bound, aggregation="constant", max_length=1, total=1)
    for i, t in case.mask.nonzero().tolist():
        p, q = softmax(case.logits[i, t].tolist()), softmax(case.old_logits[i, t].tolist())
        pi, eta = project_one(p, q, bound)
        pull = [x * (math.log(x / y) - kl(p, pi)) for x, y in zip(p, pi, strict=True)]
        mix = 0.0 if eta == INF else 1 / (1 + eta)
        home = [(1 - mix) * x * (math.log(x / y) - kl(p, q)) for x, y in zip(p, q, strict=True)]
        # Sums of six fp64 terms of size at most ten.
        assert grad[i, t].tolist() == pytest.approx(pull, rel=1e-9, abs=1e-11)
        assert grad[i, t].tolist() == pytest.approx(home, rel=1e-9, abs=1e-11)


def test_the_projected_side_is_a_constant():
    case = without_advantages(make_case())
    _, ours, _ = evaluate(troll_loss, case)
    gradients = {}
    for stop in (True, False):
        logits = case.leaf()
        projection = project(logits.log_softmax(-1), case.old_logits.log_softmax(-1), 0.05)
        target = projection.log_probs.detach() if stop else projection.log_probs
        kl_to_target = (projection.proposal.exp() * (projection.proposal - target)).sum(-1)
        (gradients[stop],) = torch.autograd.grad(aggregate(kl_to_target, case.mask), logits)
    torch.testing.assert_close(ours, gradients[True], **EXACT)
    assert (ours - gradients[False]).abs().max() > 1e-3


def test_regression_on_its_own():
    """The public function, on a projection: by hand, exactly zero where inactive, gradient to the proposal only."""
    proposal = torch.tensor([[0.9, 0.1], [0.55, 0.45]], dtype=torch.float64).log().requires_grad_()
    projection = project(proposal, torch.tensor([[0.5, 0.5]] * 2, dtype=torch.float64).log(), 0.05)
    pull = regression_loss(projection)
    assert pull[0].item() == pytest.approx(0.160219220615260978, rel=1e-12)
    assert pull[1].item() == 0.0
    (grad,) = torch.autograd.grad(pull.sum(), proposal)
    x = 0.656781598364966821
    # ∂/∂log p̃_j of Σ p̃ (log p̃ − log π) − Σ (p̃ − π): p̃_j log p̃_j/π_j.
    expected = torch.tensor([0.9 * math.log(0.9 / x), 0.1 * math.log(0.1 / (1 - x))], dtype=torch.float64)
    torch.testing.assert_close(grad[0], expected, **EXACT)
    assert torch.equal(grad[1], torch.zeros(2, dtype=torch.float64))
    # It goes by what the projection says is active, not by whether the numbers differ.
    idle = regression_loss(replace(projection, active=torch.zeros(2, dtype=torch.bool)))
    assert torch.equal(idle, torch.zeros(2, dtype=torch.float64))


def test_inactive_tokens_do_not_feel_the_regression():
    case = make_case(distance=0.5)
    per_token = regression_loss(project(*align(*policies(case)), 0.05))
    active = per_token > 0
    assert 0 < (active & case.mask).sum() < case.mask.sum()
    _, without, _ = evaluate(troll_loss, case, regression_coef=0)
    _, heavy, _ = evaluate(troll_loss, case, regression_coef=100)
    assert torch.equal(without[~active], heavy[~active])
    assert bool(((without - heavy).abs().amax(-1) > 1e-3)[active & case.mask].all())


# --- the ratio term --------------------------------------------------------------------------------------------------


def test_the_ratio_is_not_clipped():
    """An unlikely token may grow twentyfold inside the region: KL((0.02, 0.98) ‖ (0.001, 0.999)) = 0.041 < 0.05."""
    proposal, old = by_hand([[[0.02, 0.98]]], [[[0.001, 0.999]]], [[[0, 1]]])
    loss, metrics = troll_loss(proposal, old, torch.ones(1, dtype=torch.float64), torch.ones(1, 1), kl_bound=0.05)
    assert metrics["projected_fraction"] == 0
    assert loss.item() == pytest.approx(-20, rel=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_multiply_the_ratio_and_not_the_regression(level):
    case = make_case()
    w = torch.rand(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    weighted = evaluate(troll_loss, case, importance_weights=w, importance_sampling_level=level)
    scaled = evaluate(troll_loss, case.with_(advantages=case.advantages * w), importance_sampling_level=level)
    pull = evaluate(troll_loss, without_advantages(case), importance_weights=w, importance_sampling_level=level)
    plain_pull = evaluate(troll_loss, without_advantages(case), importance_sampling_level=level)
    for i in (0, 1):  # loss and gradient
        torch.testing.assert_close(weighted[i], scaled[i], **EXACT)
        assert torch.equal(pull[i], plain_pull[i])
    # They do not touch what is reported.
    for name, value in evaluate(troll_loss, case, importance_sampling_level=level)[2].items():
        assert torch.equal(weighted[2][name], value), name


@pytest.mark.parametrize("argument", ["advantages", "importance_weights"])
def test_one_number_per_sequence_is_that_number_for_each_token(argument):
    case = make_case()
    each = torch.tensor([0.5, -1.5, 2.0], dtype=torch.float64)
    if argument == "advantages":
        runs = [evaluate(troll_loss, case.with_(advantages=x)) for x in (each, each[:, None].expand(3, 4))]
    else:
        runs = [evaluate(troll_loss, case, importance_weights=x) for x in (each, each[:, None].expand(3, 4))]
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    per_sequence = each if argument == "advantages" else each[:, None] * case.advantages
    expected = reference_troll(
        *[case.logits.tolist()] * 2, case.with_(advantages=per_sequence.reshape(3, -1).expand(3, 4))
    )
    assert runs[0][0].item() == pytest.approx(expected, rel=1e-11)


def test_one_bound_per_token():
    case = make_case(B=2, T=3, distance=1.0)
    bounds = torch.tensor([[0.0, 1e-3, 0.05], [0.3, INF, INF]], dtype=torch.float64)
    loss, grad, metrics = evaluate(troll_loss, case, kl_bound=bounds)
    expected = reference_troll(*[case.logits.tolist()] * 2, case, bound=bounds.tolist())
    assert loss.item() == pytest.approx(expected, rel=1e-11)
    for bound in (0.0, 1e-3, 0.05, 0.3, INF):  # token by token, as if the bound were one number
        _, alone, _ = evaluate(troll_loss, case, kl_bound=bound)
        torch.testing.assert_close(grad[bounds == bound], alone[bounds == bound], **EXACT)
    assert metrics["kl_after/max"] <= 0.3 * (1 + 1e-5)


@settings(derandomize=True, deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), distance=st.floats(0.1, 5), tail=st.sampled_from(["floor", "bucket"]))
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_both_solvers_agree(level, seed, distance, tail):
    case = make_case(seed=seed, distance=distance)
    (loss, grad, _), (other, other_grad, _) = (
        evaluate(troll_loss, case, tail=tail, K=4, solver=solver, importance_sampling_level=level)
        for solver in ("newton", "bracketing")
    )
    # Both reach 1e-12 relative on t, or better; ratios and KLs have condition numbers of about a hundred.
    torch.testing.assert_close(loss, other, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(grad, other_grad, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("loss_function", [troll_loss, unconstrained_loss])
def test_both_tails_agree_as_nothing_is_dropped(loss_function):
    case = make_case()
    floor, bucket = (evaluate(loss_function, case, tail=tail) for tail in ("floor", "bucket"))
    torch.testing.assert_close(floor[0], bucket[0], **EXACT)
    torch.testing.assert_close(floor[1], bucket[1], **EXACT)


def test_the_bucket_feels_mass_that_leaves_the_support():
    """Inside the support nothing changes but the sum; the floor renormalises it away, the bucket does not."""
    case = make_case(B=1, T=1, V=4).with_(
        old_logits=torch.tensor([[[0.6, 0.38, 0.01, 0.01]]], dtype=torch.float64).log(),
        logits=torch.tensor([[[0.3, 0.19, 0.255, 0.255]]], dtype=torch.float64).log(),
        sampled=torch.zeros(1, 1, dtype=torch.long),
    )
    _, _, metrics = evaluate(troll_loss, case, tail="bucket", K=2)
    expected = 0.3 * math.log(0.5) + 0.19 * math.log(0.5) + 0.51 * math.log(0.51 / 0.02)
    assert metrics["kl_before/mean"].item() == pytest.approx(expected, rel=1e-12)
    assert metrics["projected_fraction"] == 1
    # Under the floor the proposal keeps its own two best, {0, 2}, and token 2 has 1e-12 under the old policy.
    _, _, metrics = evaluate(troll_loss, case, tail="floor", K=2)
    p, q = [0.3 / 0.555, 1e-12 / 0.555, 0.255 / 0.555], [0.6 / 0.98, 0.38 / 0.98, 1e-12 / 0.98]
    assert metrics["kl_before/mean"].item() == pytest.approx(kl(p, q), rel=1e-9)  # 1e-12 against 1 − 1e-12


def test_the_gradient_of_the_ratio_term_is_equation_6():
    """−A r t [1{j=a} − π_j − π_j (d_j − μ)(d_a − μ)/Var] on d, then through the log-softmax."""
    case = make_case(B=1, T=1, V=5, distance=1.5)
    _, grad, metrics = evaluate(troll_loss, case, regression_coef=0)
    assert metrics["projected_fraction"] == 1
    p, q = (torch.tensor(softmax(x[0, 0].tolist()), dtype=torch.float64) for x in (case.logits, case.old_logits))
    pi, eta = project_one(p.tolist(), q.tolist(), 0.05)
    pi, t, a = torch.tensor(pi, dtype=torch.float64), 1 / (1 + eta), int(case.sampled)
    d = p.log() - q.log()
    centred = d - (pi * d).sum()
    variance = (pi * centred**2).sum()
    one_hot = torch.eye(5, dtype=torch.float64)[a]
    on_d = t * (one_hot - pi - pi * centred * centred[a] / variance)
    on_d *= -case.advantages.item() * pi[a] / q[a]
    torch.testing.assert_close(grad[0, 0], token_gradient(p, on_d), rtol=1e-10, atol=1e-12)
