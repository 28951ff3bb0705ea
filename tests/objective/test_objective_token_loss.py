"""Token and sequence ratios: values, gradients in closed form, and the caps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troll import InputError, aggregate
from troll.objective.token_loss import ratios, token_loss

NAN, INF = math.nan, math.inf
LOG_RATIO = [[0.1, 0.3, NAN], [-0.2, INF, -INF], [NAN, NAN, NAN]]
COUNTED = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)


def run(log_ratio, counted, level, upstream=None):
    """The ratios, and the gradient for an upstream gradient (ones)."""
    leaf = log_ratio.detach().clone().requires_grad_()
    r = ratios(leaf, counted, level)
    (grad,) = torch.autograd.grad(r, leaf, torch.ones_like(r) if upstream is None else upstream)
    return r.detach(), grad


def test_tokens_by_hand():
    r, grad = run(torch.tensor(LOG_RATIO, dtype=torch.float64), COUNTED, "token")
    e = math.exp
    expected = torch.tensor([[e(0.1), e(0.3), 1], [e(-0.2), 1, 1], [1, 1, 1]], dtype=torch.float64)
    torch.testing.assert_close(r, expected, rtol=1e-15, atol=0)  # one exp
    torch.testing.assert_close(grad, expected * COUNTED, rtol=1e-15, atol=0)  # ∂r/∂log r = r; exact zeros outside
    assert torch.equal(grad[~COUNTED], torch.zeros(6, dtype=torch.float64))


def test_sequences_by_hand():
    r, grad = run(torch.tensor(LOG_RATIO, dtype=torch.float64), COUNTED, "sequence")
    s = torch.tensor([[math.exp(0.2)], [math.exp(-0.2)], [1.0]], dtype=torch.float64)
    torch.testing.assert_close(r, s.expand(3, 3), rtol=1e-15, atol=0)
    torch.testing.assert_close(grad, s * COUNTED, rtol=1e-15, atol=0)
    assert torch.equal(grad[~COUNTED], torch.zeros(6, dtype=torch.float64))


def test_the_token_level_is_the_default():
    log_ratio = torch.tensor([[0.5, -0.5]])
    assert torch.equal(ratios(log_ratio, torch.ones(1, 2, dtype=torch.bool)), log_ratio.exp())


def test_every_token_of_a_sequence_has_the_same_ratio_to_the_last_bit():
    # In fp32, (mean + 90) − 90 would be off by 1e-6 and differ from token to token.
    log_ratio = torch.tensor([[90.1, -89.7, 0.013, 1e-4]])
    counted = torch.ones(1, 4, dtype=torch.bool)
    r = ratios(log_ratio, counted, "sequence")
    assert torch.equal(r, log_ratio.mean(-1, keepdim=True).exp().expand(1, 4))


def batch(seed, B=3, T=4, scale=0.5):
    g = torch.Generator().manual_seed(seed)
    log_ratio = scale * torch.randn(B, T, generator=g, dtype=torch.float64)
    counted = torch.rand(B, T, generator=g) < 0.7
    return log_ratio, counted, torch.randn(B, T, generator=g, dtype=torch.float64)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_the_gradient_of_a_token_is_s_times_that_of_its_own_log_ratio(seed):
    log_ratio, counted, upstream = batch(seed)
    _, grad = run(log_ratio, counted, "sequence", upstream)
    for i in range(3):
        own = [t for t in range(4) if counted[i, t]]
        s = math.exp(math.fsum(log_ratio[i, t].item() for t in own) / max(1, len(own)))
        for t in range(4):
            expected = s * upstream[i, t].item() if t in own else 0.0
            assert grad[i, t].item() == pytest.approx(expected, rel=1e-14)  # one mean, one exp, one product in fp64


@settings(derandomize=True, deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_constant_advantages_give_the_gradient_of_plain_gspo(seed):
    """Σ_i s_i A_i / B, s_i = exp(mean_t log r_t), differentiated as it stands."""
    log_ratio, counted, A = batch(seed)
    counted[:, 0] = True
    A = A[:, :1]
    ours, plain = log_ratio.clone().requires_grad_(), log_ratio.clone().requires_grad_()
    loss = aggregate(ratios(ours, counted, "sequence") * A, counted, "sequence_mean")
    s = ((plain * counted).sum(-1) / counted.sum(-1)).exp()
    gspo = (s * A[:, 0]).mean()
    torch.testing.assert_close(loss, gspo, rtol=1e-14, atol=1e-15)
    gradients = (torch.autograd.grad(x, leaf)[0] for x, leaf in ((loss, ours), (gspo, plain)))
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-16)


def test_advantages_of_its_own_move_each_token_by_its_own():
    """Where plain GSPO would spread the mean advantage over the sequence, each token keeps its own (GSPO-token)."""
    log_ratio, A = torch.tensor([[0.1, 0.3]], dtype=torch.float64), torch.tensor([[1.0, -3.0]], dtype=torch.float64)
    _, grad = run(log_ratio, torch.ones(1, 2, dtype=torch.bool), "sequence", A / 2)
    torch.testing.assert_close(grad, math.exp(0.2) * A / 2, rtol=1e-15, atol=0)


@pytest.mark.parametrize(("level", "cap"), [("token", 20.0), ("sequence", 10.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_cap(level, cap, dtype):
    over = torch.tensor([[cap], [cap + 1e-5], [200.0], [1e30]], dtype=dtype)
    r, grad = run(over, torch.ones(4, 1, dtype=torch.bool), level)
    limit = torch.tensor(cap, dtype=dtype).exp()
    assert torch.equal(r, limit.expand(4, 1))
    assert torch.equal(grad, torch.stack([limit, *torch.zeros(3, dtype=dtype)])[:, None])  # at the cap itself, still s


def test_the_sequence_cap_is_on_the_mean_not_on_the_tokens():
    log_ratio = torch.tensor([[30.0, -20.0, 5.0], [30.0, 5.0, -4.0]], dtype=torch.float64)  # means 5 and 10.33
    r, grad = run(log_ratio, torch.ones(2, 3, dtype=torch.bool), "sequence")
    expected = torch.tensor([[math.exp(5)], [math.exp(10)]], dtype=torch.float64).expand(2, 3)
    torch.testing.assert_close(r, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(grad[0], expected[0], rtol=1e-14, atol=0)
    assert torch.equal(grad[1], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_vanishing_ratios_are_not_capped(level):
    r, grad = run(torch.tensor([[-200.0]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool), level)
    assert r.item() == grad.item() == pytest.approx(math.exp(-200), rel=1e-14)
    r, grad = run(torch.tensor([[-1e30]]), torch.ones(1, 1, dtype=torch.bool), level)
    assert r.item() == grad.item() == 0.0


def test_an_unknown_level():
    with pytest.raises(InputError) as error:
        ratios(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), "tokens")
    assert error.value.problem == "importance_sampling_level must be 'token' or 'sequence', got 'tokens'"
    assert error.value.fix == "Did you mean 'token'?"


def test_the_loss_of_a_token_by_hand():
    """−w r A + α pull; outside the counted tokens the ratio is 1 and nothing else changes."""
    log_ratio = torch.tensor([[0.5, -0.25, 9.0]], dtype=torch.float64)
    advantages, weights, pull = torch.tensor([[[2.0, -1, 4]], [[0.5, 3, 1]], [[0.1, 0.2, 0]]], dtype=torch.float64)
    counted = torch.tensor([[True, True, False]])
    options = {"regression": pull, "regression_coef": 10.0, "importance_weights": weights}
    losses, ratio = token_loss(log_ratio, advantages, counted, **options)
    r = [math.exp(0.5), math.exp(-0.25), 1.0]
    assert ratio[0].tolist() == pytest.approx(r, rel=1e-15)
    assert losses[0].tolist() == pytest.approx([1.0 - r[0], 2.0 + 3 * r[1], -4.0], rel=1e-14)
    s = math.exp(0.125)
    of_sequence, ratio = token_loss(log_ratio, advantages, counted, **options, importance_sampling_level="sequence")
    assert ratio[0].tolist() == pytest.approx([s, s, s], rel=1e-15)
    assert of_sequence[0].tolist() == pytest.approx([1.0 - s, 2.0 + 3 * s, -4.0 * s], rel=1e-14)
    plain, _ = token_loss(log_ratio[:, :2], advantages[:, :2])  # all count, no weights, no trust region
    assert plain[0].tolist() == pytest.approx([-2 * r[0], r[1]], rel=1e-14)
