"""The losses at work: compiled in one graph, and a few steps of an optimiser that do what they are for."""

from __future__ import annotations

import pytest
import torch
from objective_cases import make_case

from troll import clip_loss, restrict, sparsify, token_kl, troll_loss, unconstrained_loss


def chain(loss_function, tail, **options):
    """Logits → loss and metrics, as one function of tensors."""

    def run(logits, old_logits, sampled, advantages, mask):
        with torch.no_grad():
            old = sparsify(old_logits, sampled, 4, 1e-2, loss_mask=mask)
        if tail == "bucket":
            proposal = restrict(logits, old, loss_mask=mask)
        else:
            proposal = sparsify(logits, sampled, 4, 1e-2, loss_mask=mask)
        return loss_function(proposal, old, advantages, mask, tail=tail, **options)

    return run


# Dynamo instantiates torch.autograd.Function itself, and torch warns of that.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("loss_function", "tail", "options"),
    [
        (troll_loss, "floor", {}),
        (
            troll_loss,
            "bucket",
            {"importance_sampling_level": "sequence", "aggregation": "sequence_mean", "solver": "bracketing"},
        ),
        (clip_loss, "floor", {"dual_clip": 3.0, "importance_sampling_level": "sequence"}),
        (unconstrained_loss, "bucket", {"aggregation": "constant", "max_length": 16}),
    ],
)
def test_compiled_in_one_graph(loss_function, tail, options):
    case = make_case(B=2, T=3, dtype=torch.float32, distance=0.5)
    case = case.with_(logits=case.logits.masked_fill(~case.mask[..., None], torch.nan))
    eager = chain(loss_function, tail, **options)
    torch._dynamo.reset()
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    results = []
    for function in (eager, compiled):
        logits = case.leaf()
        loss, metrics = function(logits, case.old_logits, case.sampled, case.advantages, case.mask)
        results.append((loss.detach(), torch.autograd.grad(loss, logits)[0], metrics))
    (loss, grad, metrics), (compiled_loss, compiled_grad, compiled_metrics) = results
    # The same kernels in the same order; only where the graph is rewritten may a last bit of fp32 differ.
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(compiled_grad, grad, rtol=1e-6, atol=1e-7)
    assert grad.abs().max() > 1e-3
    assert compiled_metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        torch.testing.assert_close(compiled_metrics[name], value, rtol=1e-6, atol=1e-7, msg=name)
        assert not compiled_metrics[name].requires_grad


def rollout(V=8, B=6, T=5):
    """Contexts with their own logits; token 0 is good (+1), token 1 is bad (−1), each sampled where it says so."""
    g = torch.Generator().manual_seed(0)
    old_logits = torch.randn(B, T, V, generator=g)
    sampled = torch.arange(B)[:, None].remainder(2).expand(B, T)  # good and bad sequences in turn
    advantages = 1.0 - 2.0 * torch.arange(B).remainder(2)
    return old_logits, sampled, advantages, torch.ones(B, T, dtype=torch.bool)


def train(loss_function, steps, tail="floor", lr=0.05, **options):
    """Adam on the logits themselves, several updates on one rollout; the logits and the metrics of each step."""
    old_logits, sampled, advantages, mask = rollout()
    old = sparsify(old_logits, sampled, 8, 0.0)
    logits = old_logits.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=lr)
    history = []
    for _ in range(steps):
        proposal = restrict(logits, old) if tail == "bucket" else sparsify(logits, sampled, 8, 0.0)
        loss, metrics = loss_function(proposal, old, advantages, mask, tail=tail, **options)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(metrics)
    return logits.detach(), history


def chance(logits):
    """Probability of the sampled token, of good and of bad sequences."""
    _, sampled, advantages, _ = rollout()
    p = logits.softmax(-1).gather(-1, sampled[..., None])[..., 0]
    return p[advantages > 0], p[advantages < 0]


@pytest.mark.parametrize("tail", ["floor", "bucket"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rewarded_tokens_gain_and_punished_ones_lose(tail, level):
    good, bad = chance(rollout()[0])
    logits, history = train(troll_loss, 8, tail=tail, importance_sampling_level=level, kl_bound=0.05)
    new_good, new_bad = chance(logits)
    assert bool((new_good > good).all())
    assert bool((new_bad < bad).all())
    assert history[0]["projected_fraction"] == 0  # the first update is on-policy
    assert history[-1]["projected_fraction"] > 0  # and the last ones are outside the region
    for metrics in history:
        assert metrics["kl_after/max"] <= 0.05 * (1 + 1e-5)


def test_the_trust_region_holds_where_nothing_else_does():
    """Sixty updates on one rollout. TROLL stays near its bound; without one the policy runs away."""
    old_logits = rollout()[0]
    logits, history = train(troll_loss, 60, kl_bound=0.05)
    held = token_kl(logits.log_softmax(-1), old_logits.log_softmax(-1))
    free, _ = train(unconstrained_loss, 60)
    lost = token_kl(free.log_softmax(-1), old_logits.log_softmax(-1))
    assert all(metrics["kl_after/max"] <= 0.05 * (1 + 1e-5) for metrics in history)
    assert all(metrics["unconverged_tokens"] == 0 for metrics in history)
    # The regression balances the reward a little outside of the region, not far from it.
    assert held.max() < 0.5
    assert lost.max() > 1.0
    assert held.mean() < 0.3 * lost.mean()


def test_without_advantages_a_policy_outside_comes_back_to_the_region():
    old_logits, sampled, advantages, mask = rollout()
    old = sparsify(old_logits, sampled, 8, 0.0)
    logits = (old_logits + torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1))).requires_grad_()
    optimizer = torch.optim.SGD([logits], lr=30.0)  # a mean over thirty tokens: a step of one for each
    before, after = None, None
    for step in range(200):
        loss, metrics = troll_loss(
            sparsify(logits, sampled, 8, 0.0), old, 0 * advantages, mask, kl_bound=0.05, tail="floor"
        )
        before = metrics if step == 0 else before
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after = metrics
    assert before["kl_before/mean"] > 0.2
    assert after["kl_before/max"] < 0.06  # the pull vanishes at the boundary: it is reached from outside
    assert after["kl_before/mean"] > 0.01  # and not left towards the old policy
