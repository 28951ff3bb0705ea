"""Every refusal of a loss: what is wrong, with what was given, and what to do."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from objective_cases import by_hand, evaluate, make_case, policies

from troll import InputError, SparsePolicy, clip_loss, sparsify, troll_loss, unconstrained_loss

NAN, INF = math.nan, math.inf
LOSSES = pytest.mark.parametrize("loss_function", [troll_loss, clip_loss, unconstrained_loss])
CASE = make_case()


def refuse(problem, fix, function, *args, **kwargs):
    """Call, and compare both sentences of the refusal; ``fix`` may be a part of it."""
    with pytest.raises(InputError) as error:
        function(*args, **kwargs)
    assert error.value.problem == problem
    assert fix in error.value.fix


def call(loss_function, *, proposal=None, old=None, advantages=None, loss_mask=None, **options):
    """A correct call, with some arguments replaced."""
    default_proposal, default_old = policies(CASE)
    return loss_function(
        default_proposal if proposal is None else proposal,
        default_old if old is None else old,
        CASE.advantages if advantages is None else advantages,
        CASE.mask if loss_mask is None else loss_mask,
        **{"tail": "floor", **options},
    )


@LOSSES
def test_the_call_without_replacements_is_accepted(loss_function):
    assert bool(call(loss_function)[0].isfinite())


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl_bound", "shown"),
    [
        (-0.1, "-0.1"),
        (NAN, "nan"),
        (-INF, "-inf"),
        (torch.tensor(-0.5), "-0.5"),
        (torch.tensor(NAN), "nan"),
        (torch.tensor([[0.1] * 4, [0.1, -2.0, NAN, 0.1], [0.1] * 4]), "-2.0"),
        (torch.tensor([[0.1] * 4, [0.1, NAN, -2.0, 0.1], [0.1] * 4]), "nan"),
    ],
)
def test_a_bound_below_zero_or_nan(kl_bound, shown):
    with pytest.raises(InputError, match=f"^kl_bound must be a number ≥ 0, got {shown}\\. The default is 0.2"):
        call(troll_loss, kl_bound=kl_bound)


@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4), (3, 4, 1), (3, 5)])
def test_bounds_of_a_wrong_shape(shape):
    refuse(
        f"kl_bound must be one number or one per position, shape [3, 4], got {list(shape)}",
        "a float",
        call,
        troll_loss,
        kl_bound=torch.full(shape, 0.05),
    )


@pytest.mark.parametrize("value", [-1.0, -1e-9, NAN, INF, -INF])
def test_a_regression_coefficient_that_is_no_weight(value):
    with pytest.raises(InputError, match=f"^regression_coef must be a number ≥ 0, got {value}\\. The default is 1\\."):
        call(troll_loss, regression_coef=value)


@pytest.mark.parametrize("value", [-0.1, 1.1, NAN, INF])
def test_a_lower_clip_outside_0_to_1(value):
    refuse(f"clip_low must be a number from 0 to 1, got {value}", "The default is 0.2", call, clip_loss, clip_low=value)


@pytest.mark.parametrize("value", [-0.1, NAN, -INF])
def test_an_upper_clip_below_0(value):
    refuse(f"clip_high must be a number ≥ 0, got {value}", "The default is 0.2", call, clip_loss, clip_high=value)


@pytest.mark.parametrize("value", [1.0, 0.5, 0, -3.0, NAN])
def test_a_dual_clip_of_at_most_1(value):
    refuse(f"dual_clip must be a number > 1, or None, got {value}", "3", call, clip_loss, dual_clip=value)


def test_the_limits_themselves_are_accepted():
    for options in ({"clip_low": 0.0}, {"clip_low": 1.0}, {"clip_high": 0.0}, {"clip_high": INF}, {"dual_clip": 1.001}):
        assert bool(call(clip_loss, **options)[0].isfinite()), options
    for options in ({"kl_bound": 0.0}, {"kl_bound": INF}, {"kl_bound": 1}, {"regression_coef": 0}):
        assert bool(call(troll_loss, **options)[0].isfinite()), options


# --- words -----------------------------------------------------------------------------------------------------------


@LOSSES
@pytest.mark.parametrize(
    ("name", "value", "expected", "default"),
    [
        ("tail", "floors", "'bucket' or 'floor'", "bucket"),
        ("importance_sampling_level", "seq", "'token' or 'sequence'", "token"),
        ("aggregation", "mean", "'token_mean' or 'sequence_mean' or 'sequence_sum' or 'constant'", "token_mean"),
        ("on_invalid", "ignore", "'raise' or 'mask'", "raise"),
    ],
)
def test_an_unknown_word(loss_function, name, value, expected, default):
    with pytest.raises(InputError) as error:
        call(loss_function, **{name: value})
    assert error.value.problem == f"{name} must be {expected}, got {value!r}"
    assert error.value.fix in (f"The default is {default!r}", "Did you mean 'floor'?")


def test_an_unknown_solver():
    with pytest.raises(InputError, match=r"^solver must be 'newton' or 'bracketing', got 'brent'"):
        call(troll_loss, solver="brent")


@LOSSES
def test_max_length_without_the_constant_rule(loss_function):
    refuse(
        "max_length=8 has no effect with aggregation='token_mean'",
        "Leave max_length out",
        call,
        loss_function,
        max_length=8,
    )
    refuse(
        "aggregation='constant' needs max_length, the length of the longest completion the run allows",
        "Pass max_length",
        call,
        loss_function,
        aggregation="constant",
    )


# --- advantages and weights ------------------------------------------------------------------------------------------


@LOSSES
@pytest.mark.parametrize("name", ["advantages", "importance_weights"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_number_that_is_none_on_a_counted_token(loss_function, name, bad):
    per_token = torch.ones(3, 4)
    per_token[1, 2] = bad
    assert bool(CASE.mask[1, 2])
    fix = "Check the rewards of that sequence" if name == "advantages" else "Check the sampler's log-probabilities"
    refuse(f"{name} must be finite, got {bad} at position [1, 2]", fix, call, loss_function, **{name: per_token})
    per_sequence = torch.tensor([1.0, 1.0, bad])
    refuse(f"{name} must be finite, got {bad} at position [2, 0]", fix, call, loss_function, **{name: per_sequence})


@LOSSES
@pytest.mark.parametrize("name", ["advantages", "importance_weights"])
def test_advantages_and_weights_are_constants(loss_function, name):
    refuse(
        f"{name} must be constants, got a tensor that requires gradient",
        f"{name}.detach()",
        call,
        loss_function,
        **{name: torch.ones(3, requires_grad=True)},
    )


@LOSSES
@pytest.mark.parametrize("name", ["advantages", "importance_weights"])
@pytest.mark.parametrize("shape", [(), (4,), (3, 1), (1, 4), (4, 3), (3, 4, 1)])
def test_advantages_and_weights_of_a_wrong_shape(loss_function, name, shape):
    refuse(
        f"{name} must be one per sequence, shape [3], or one per token, shape [3, 4], got {list(shape)}",
        "in the order of the sequences",
        call,
        loss_function,
        **{name: torch.ones(shape)},
    )


# --- policies and masks ----------------------------------------------------------------------------------------------


@LOSSES
@pytest.mark.parametrize("shape", [(3,), (4, 3), (3, 4, 1), (1, 4), ()])
def test_a_mask_of_a_wrong_shape(loss_function, shape):
    refuse(
        f"loss_mask must have one entry per token of the policies, shape [3, 4], got {list(shape)}",
        "Cut the mask",
        call,
        loss_function,
        loss_mask=torch.ones(shape),
    )


@LOSSES
def test_policies_that_are_no_batch(loss_function):
    proposal, old = policies(CASE)
    refuse(
        "old must be a policy over [B, T] positions, got [4]",
        "logits[None]",
        loss_function,
        proposal[0],
        old[0],
        torch.ones(4),
        torch.ones(4),
    )


@LOSSES
@pytest.mark.parametrize("index", [slice(0, 1), slice(0, 2), (slice(None), slice(0, 3))])
def test_policies_over_different_positions(loss_function, index):
    _, old = policies(CASE)
    refuse(
        f"proposal and old must have the same positions [B, T], got [3, 4] and {list(old[index].shape)}",
        "Score the same completions with both",
        call,
        loss_function,
        old=old[index],
    )


@LOSSES
def test_different_temperatures(loss_function):
    with torch.no_grad():
        old = sparsify(CASE.old_logits, CASE.sampled, 6, 0.0, temperature=0.7, loss_mask=CASE.mask)
    refuse(
        "proposal and old must have the same temperature, got 1.0 and 0.7",
        "the temperature of the rollout",
        call,
        loss_function,
        old=old,
    )


@LOSSES
def test_an_old_policy_with_gradient(loss_function):
    old = sparsify(CASE.old_logits.clone().requires_grad_(), CASE.sampled, 6, 0.0, loss_mask=CASE.mask)
    refuse("old must be a constant, got a policy that requires gradient", "old.detach()", call, loss_function, old=old)


@LOSSES
def test_different_sampled_tokens(loss_function):
    with torch.no_grad():
        old = sparsify(CASE.old_logits, (CASE.sampled + 1) % 6, 6, 0.0, loss_mask=CASE.mask)
    refuse(
        "proposal and old must be of the same completions, got different sampled tokens",
        "the same sampled ids",
        call,
        loss_function,
        old=old,
    )


@LOSSES
def test_the_tail_must_fit_the_proposal(loss_function):
    for tail, other in (("floor", "bucket"), ("bucket", "floor")):
        proposal, old = policies(CASE, K=2, tail=tail)
        with pytest.raises(InputError, match=f"tail='{other}' needs a proposal"):
            call(loss_function, proposal=proposal, old=old, tail=other)
        assert bool(call(loss_function, proposal=proposal, old=old, tail=tail)[0].isfinite())


def test_the_default_refuses_a_proposal_on_tokens_of_its_own():
    """What an earlier README showed must not train silently with another tail than the preset's."""
    proposal, old = policies(CASE, K=2)
    for preset, fits in (("default", False), ("paper", True)):
        if fits:
            troll_loss(proposal, old, CASE.advantages, CASE.mask, preset=preset)
        else:
            with pytest.raises(InputError, match=r"Make it with troll.restrict\(logits, old\)"):
                troll_loss(proposal, old, CASE.advantages, CASE.mask, preset=preset)


def test_the_preset_that_does_not_fit_is_named():
    proposal, old = policies(CASE, K=2, tail="bucket")
    for loss_function in (troll_loss, clip_loss, unconstrained_loss):
        assert bool(loss_function(proposal, old, CASE.advantages, CASE.mask)[0].isfinite())
    refuse(
        "tail='floor' (from preset='paper') needs a proposal on its own most probable tokens, got one made by "
        "troll.restrict",
        "troll.sparsify(logits, sampled), or pass tail='bucket'",
        troll_loss,
        proposal,
        old,
        CASE.advantages,
        CASE.mask,
        preset="paper",
    )


@LOSSES
def test_all_losses_accept_the_same_proposals(loss_function):
    """The KL that a baseline reports is that of ``troll_loss``, so it needs a proposal that fits the same tail."""
    proposal, old = policies(CASE, K=2)
    origin = "from preset='default'" if loss_function is troll_loss else "the default"
    refuse(
        f"tail='bucket' ({origin}) needs a proposal on the tokens of the old policy, got one made by troll.sparsify",
        "tail='floor'",
        loss_function,
        proposal,
        old,
        CASE.advantages,
        CASE.mask,
    )


@LOSSES
def test_logits_in_the_place_of_a_policy(loss_function):
    with pytest.raises(InputError, match=r"^proposal must be a SparsePolicy, got a tensor \[3, 4, 6\].*troll.restrict"):
        call(loss_function, proposal=CASE.logits)
    with pytest.raises(InputError, match=r"^old must be a SparsePolicy, got a tensor .*troll.sparsify\(old_logits"):
        call(loss_function, old=CASE.old_logits)


@LOSSES
def test_a_bucket_needs_one_support(loss_function):
    proposal, old = policies(CASE, K=2)
    proposal = dataclasses.replace(proposal, made_by=None)
    refuse(
        "tail='bucket' needs a proposal on the tokens of the old policy, got other tokens",
        "troll.restrict(logits, old)",
        call,
        loss_function,
        proposal=proposal,
        old=old,
        tail="bucket",
    )


@LOSSES
@pytest.mark.parametrize(("side", "name"), [("proposal", "proposal"), ("old", "old policy")])
def test_a_counted_position_without_a_distribution(loss_function, side, name):
    """The mask of ``sparsify`` was narrower than that of the loss."""
    narrow = CASE.mask.clone()
    narrow[1, 2] = False
    both = dict(zip(("proposal", "old"), policies(CASE), strict=True))
    both[side] = policies(CASE.with_(mask=narrow))[side == "old"]
    refuse(
        f"the {name} has no distribution at position [1, 2], which loss_mask counts",
        "the same loss_mask for the policies and the loss, or on_invalid='mask'",
        call,
        loss_function,
        **both,
    )
    loss, metrics = call(loss_function, **both, on_invalid="mask")
    assert metrics["skipped_tokens"] == 1
    assert torch.equal(loss, call(loss_function, loss_mask=narrow)[0])


@LOSSES
@pytest.mark.parametrize("side", ["logits", "old_logits"])
@pytest.mark.parametrize(("bad", "shown"), [(NAN, "nan"), (INF, "inf")])
def test_logits_that_are_no_numbers_name_their_token(loss_function, side, bad, shown):
    broken = getattr(CASE, side).clone()
    broken[1, 2, 4] = bad
    case = CASE.with_(**{side: broken})
    refuse(
        "logits must be finite, or −inf for excluded tokens, got "
        f"logit {shown} of token 4 at position [1, 2] (1 such positions)",
        "on_invalid='mask'",
        evaluate,
        loss_function,
        case,
    )
    # Masked for the policies but not for the loss, it is still no silent zero.
    proposal, old = policies(case, on_invalid="mask")
    with pytest.raises(InputError, match=r"has no distribution at position \[1, 2\]"):
        loss_function(proposal, old, CASE.advantages, CASE.mask, tail="floor")
    _, metrics = loss_function(proposal, old, CASE.advantages, CASE.mask, on_invalid="mask", tail="floor")
    assert metrics["skipped_tokens"] == 1


# --- mass that the old policy excludes -------------------------------------------------------------------------------


def truncated(lost):
    """Old ½, ½ and nothing else; the proposal has ``lost`` of its mass on a third token."""
    inside = (1 - lost) / 2
    return make_case(B=1, T=1, V=3).with_(
        logits=torch.tensor([[[inside, inside, lost]]], dtype=torch.float64).log(),
        old_logits=torch.tensor([[[0.5, 0.5, 0.0]]], dtype=torch.float64).log(),
        sampled=torch.zeros(1, 1, dtype=torch.long),
    )


@pytest.mark.parametrize("lost", [0.11, 0.5])
def test_more_lost_mass_than_the_limit(lost):
    refuse(
        f"the proposal has on average {lost} of its probability on tokens that the old policy excludes, more than "
        "max_lost_mass=0.1",
        "without top-k, top-p or min-p truncation",
        evaluate,
        troll_loss,
        truncated(lost),
    )


@pytest.mark.parametrize(("lost", "limit"), [(0.09, 0.1), (0.5, 0.6), (0.9, 1.0)])
def test_less_lost_mass_than_the_limit_is_reported(lost, limit):
    case = truncated(lost)
    loss, grad, metrics = evaluate(troll_loss, case, max_lost_mass=limit)
    assert metrics["lost_mass"].item() == pytest.approx(lost, rel=1e-12)
    # What is left is ½, ½ after renormalisation: the old policy itself, and REINFORCE among the first two tokens.
    A = case.advantages.item()
    assert loss.item() == pytest.approx(-A, rel=1e-12)
    torch.testing.assert_close(grad.flatten(), -A * torch.tensor([0.5, -0.5, 0.0]).double(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("where", ["sparsify and loss", "loss alone"])
def test_lost_mass_is_judged_over_the_counted_tokens(where):
    """One counted token of four; the mask may reach the loss alone."""
    one = truncated(0.3)
    mask = torch.tensor([[True, False, False, False]])
    sampled = one.sampled.expand(1, 4)
    old_logits = torch.cat([one.old_logits, one.logits.expand(1, 3, 3)], dim=1)
    known = mask if where == "sparsify and loss" else None
    old = sparsify(old_logits, sampled, loss_mask=known)
    proposal = sparsify(one.logits.expand(1, 4, 3), sampled, loss_mask=known)
    with pytest.raises(InputError, match=r"the proposal has on average 0.3 of its probability"):
        troll_loss(proposal, old, torch.ones(1), mask, tail="floor")
    # The other way round, what is lost under the mask disturbs nobody.
    rest = ~mask if known is None else torch.zeros_like(mask)
    _, metrics = troll_loss(proposal, old, torch.ones(1), rest, tail="floor")
    assert metrics["lost_mass"] == 0


def test_excluded_on_both_sides():
    """−inf for the same token on both sides: as if it were not there."""
    case = make_case(V=6)
    dead = torch.zeros(6, dtype=torch.bool)
    dead[4:] = True
    case = case.with_(
        logits=case.logits.masked_fill(dead, -INF),
        old_logits=case.old_logits.masked_fill(dead, -INF),
        sampled=case.sampled % 4,
    )
    small = case.with_(logits=case.logits[..., :4], old_logits=case.old_logits[..., :4])
    for tail in ("floor", "bucket"):
        loss, grad, metrics = evaluate(troll_loss, case, tail=tail)
        expected, expected_grad, _ = evaluate(troll_loss, small, tail=tail)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(grad[..., :4], expected_grad, rtol=1e-11, atol=1e-14)
        assert torch.equal(grad[..., 4:], torch.zeros_like(grad[..., 4:]))
        assert metrics["lost_mass"] == 0


# --- policies that were made wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([0, 0], "token_ids must have every token at most once in a position"),
        ([0, 7], "token_ids must be from 0 to vocab_size − 1 = 3, or −1 in unused slots"),
        ([-1, 1], "token_ids must have the sampled token in slot 0"),
    ],
)
def test_a_policy_that_was_made_wrong_never_reaches_a_loss(ids, expected):
    log_probs = torch.tensor([[[0.5, 0.5]]]).log()
    if ids[0] < 0:
        log_probs[..., 0] = -INF
    with pytest.raises(InputError) as error:
        SparsePolicy(torch.tensor([[ids]]), log_probs, torch.full((1, 1), -INF), 4)
    assert error.value.problem.startswith(f"{expected}, got token_ids ")


@LOSSES
def test_integers_are_advantages_too(loss_function):
    proposal, old = by_hand([[[0.55, 0.45]]], [[[0.5, 0.5]]], [[[0, 1]]])
    loss, _ = loss_function(proposal, old, torch.tensor([2]), torch.ones(1, 1))
    assert loss.item() == pytest.approx(-2.2, rel=1e-12)
