"""``fused_troll_loss``: loss, gradients and metrics of ``troll_loss`` on the policies of the same head."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from troll import Head, InputError, SparsePolicy, aggregate, fused_troll_loss, troll_loss
from troll.objective.aggregation import token_weights
from troll.policy import head as head_module
from troll.policy.head_gradients import Plan
from troll.policy.matmul import TiledMatmul

B, T, V, H, K = 3, 4, 40, 5, 8
F32, F64 = torch.float32, torch.float64
NAN, INF = math.nan, math.inf
TAILS = ["floor", "bucket"]
WAYS = ["whole", "chunks", "recompute"]
RULES = ["token_mean", "sequence_mean", "sequence_sum", "constant"]
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
BOUND = 0.05
GIVEN = {"max_support": K, "tail_mass": 1e-3, "kl_bound": BOUND, "tail": "floor"}


def interpreted(test: Any) -> Any:
    """A test that gives the kernels tensors on a CPU. Its warnings are numpy's, of −inf − −inf, e^200 and log 0."""
    for said in ("overflow", "invalid value", "divide by zero"):
        test = pytest.mark.filterwarnings(f"ignore:{said} encountered:RuntimeWarning")(test)
    return pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")(test)


def normal(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = F64) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)).to(dtype)


class Case(NamedTuple):
    """A batch, and the old policy of hidden states some way off."""

    leaves: list[Tensor]
    old: SparsePolicy
    advantages: Tensor

    def head(self, impl: str = "torch") -> Head:
        return Head(*self.leaves[1:], impl=impl)  # type: ignore[arg-type]


def make(dtype: torch.dtype = F64, temperature: float = 1.0, mask: Tensor | None = None, distance: float = 0.2) -> Case:
    leaves = [normal(*shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate([(B, T, H), (V, H), (V,)])]
    sampled = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        before = leaves[0] + normal(B, T, H, seed=6, scale=distance, dtype=dtype)
        old, _ = Head(*leaves[1:], impl="reference").sparsify(  # type: ignore[arg-type]
            before, sampled, K, 1e-3, temperature=temperature, loss_mask=mask
        )
    return Case(leaves, old, normal(B, seed=7, dtype=dtype))


class Outcome(NamedTuple):
    """Loss, gradients of hidden states, weight and bias, metrics."""

    loss: Tensor
    gradients: tuple[Tensor, ...]
    metrics: dict[str, Tensor]


def composed(
    case: Case, mask: Tensor = MASK, tail: str = "floor", advantages: Tensor | None = None, **options: Any
) -> Outcome:
    """Scores of all positions, then ``troll_loss``, then autograd."""
    head, hidden = case.head("reference"), case.leaves[0]
    if tail == "bucket":
        scored = head.restrict(hidden, case.old, loss_mask=mask)
    else:
        scored = head.sparsify(
            hidden, case.old.sampled.clamp(min=0), K, 1e-3, temperature=case.old.temperature, loss_mask=mask
        )
    advantages = case.advantages if advantages is None else advantages
    options = {"kl_bound": BOUND, "tail": tail, "impl": "reference", **options}
    loss, metrics = troll_loss(scored.policy, case.old, advantages, mask, **options)
    exact = torch.where(mask.bool(), scored.entropy, 0.0).sum() / mask.sum().clamp(min=1)
    return Outcome(loss.detach(), torch.autograd.grad(loss, case.leaves), {**metrics, "entropy": exact.detach()})


def fused(
    case: Case,
    mask: Tensor = MASK,
    tail: str = "floor",
    advantages: Tensor | None = None,
    impl: str = "torch",
    way: str | None = None,
    **options: Any,
) -> Outcome:
    """The way under test, at will in chunks of two rows or with the logits made twice."""

    def planned(products: TiledMatmul, *_: Any) -> Plan:
        rows = {"whole": len(products.hidden), "chunks": 2, "recompute": 0}[way or "whole"]
        return Plan(way, rows * V * products.dtype.itemsize)  # type: ignore[arg-type]

    advantages = case.advantages if advantages is None else advantages
    with pytest.MonkeyPatch.context() as patch:
        if way is not None:
            patch.setattr(head_module, "plan", planned)
        loss, metrics = fused_troll_loss(
            case.leaves[0], case.head(impl), case.old, advantages, mask, **{**GIVEN, "tail": tail, **options}
        )
    return Outcome(loss.detach(), torch.autograd.grad(loss, case.leaves), metrics)


def assert_same(ours: Outcome, theirs: Outcome, tol: float = 1e-11, but: tuple[str, ...] = ()) -> None:
    """In fp64: sums of some hundred products of numbers below 100, and a solver that is exact to 1e-13."""
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=tol, atol=tol)
    for a, b in zip(ours.gradients, theirs.gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)
    assert set(ours.metrics) == set(theirs.metrics)
    for name in set(ours.metrics) - set(but):
        a, b = ours.metrics[name], theirs.metrics[name]
        assert a.shape == ()
        assert not a.requires_grad
        torch.testing.assert_close(a, b, rtol=tol, atol=tol, msg=lambda m, name=name: f"{name}: {m}")


# ---- the same ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_gradients_and_every_metric(tail: str, way: str, impl: str, temperature: float) -> None:
    case = make(temperature=temperature, mask=MASK)
    ours, theirs = fused(case, tail=tail, way=way, impl=impl), composed(case, tail=tail)
    assert_same(ours, theirs)
    assert 0.1 < theirs.metrics["projected_fraction"] < 0.95
    assert theirs.metrics["regression"] > 1e-3
    assert min(g.abs().max().item() for g in theirs.gradients) > 0.01


@pytest.mark.parametrize("tail", TAILS)
def test_the_entropy_is_exact_where_troll_loss_has_a_lower_bound(tail: str) -> None:
    case = make()
    head, hidden = case.head("reference"), case.leaves[0]
    scored = head.restrict(hidden, case.old) if tail == "bucket" else head.sparsify(hidden, case.old.sampled, K, 1e-3)
    _, bound = troll_loss(scored.policy, case.old, case.advantages, MASK, kl_bound=BOUND, tail=tail)
    log_p = (hidden @ case.leaves[1].T + case.leaves[2]).log_softmax(-1)
    exact = -(log_p.exp() * log_p).sum(-1)[MASK].mean()
    found = fused(case, tail=tail).metrics["entropy"]
    torch.testing.assert_close(found, exact.detach(), rtol=1e-12, atol=0)
    assert bound["entropy"] < found - 0.01


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("total", [None, 17.0, torch.tensor(5), 0])
def test_every_aggregation(tail: str, rule: str, total: Any) -> None:
    case = make()
    options = {"aggregation": rule, "total": total, "max_length": 6 if rule == "constant" else None}
    # 1 / count is a number in fp32
    assert_same(fused(case, tail=tail, way="chunks", **options), composed(case, tail=tail, **options), 2.0**-23)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("weights", [None, "sequence", "token"])
def test_advantages_and_importance_weights_of_sequences_and_tokens(
    tail: str, per_token: bool, weights: str | None
) -> None:
    case = make()
    advantages = normal(B, T, seed=8) if per_token else case.advantages
    shapes = {"sequence": (B,), "token": (B, T)}
    w = None if weights is None else normal(*shapes[weights], seed=9).exp()
    options: dict[str, Any] = {"tail": tail, "advantages": advantages, "importance_weights": w}
    assert_same(fused(case, **options), composed(case, **options))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("way", WAYS)
def test_a_bound_per_token_and_other_settings(tail: str, way: str) -> None:
    case = make()
    bound = normal(B, T, seed=10).exp() * 0.05
    bound[0, 0], bound[1, 0] = 0.0, INF
    for name, value in (("kl_bound", bound), *(("kl_bound", x) for x in (0.0, 1e9)), ("regression_coef", 7.5)):
        options = {name: value}
        assert_same(fused(case, tail=tail, way=way, **options), composed(case, tail=tail, **options))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    "mask", [torch.ones(B, T), torch.zeros(B, T), torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]])]
)
def test_masks(tail: str, mask: Tensor) -> None:
    """All tokens, none, a sequence without any; what is under the mask may be NaN."""
    case = make()
    theirs = composed(case, mask, tail)
    with torch.no_grad():
        case.leaves[0][mask == 0] = NAN
    advantages = torch.where(mask > 0, case.advantages[:, None], NAN)
    for way in WAYS if mask.any() else ("whole", "recompute"):
        ours = fused(case, mask, tail, advantages, way=way)
        assert_same(ours, theirs, 2.0**-23)  # 1 / count is a number in fp32
        assert (ours.gradients[0][mask == 0] == 0).all()


def test_a_support_of_the_proposal_of_another_size() -> None:
    case = make()
    policy, _ = case.head("reference").sparsify(case.leaves[0], case.old.sampled, 5, 0.1)
    loss, metrics = troll_loss(policy, case.old, case.advantages, MASK, kl_bound=BOUND, tail="floor", impl="reference")
    ours = fused(case, max_support=5, tail_mass=0.1)
    torch.testing.assert_close(ours.loss, loss.detach(), rtol=1e-11, atol=1e-11)
    assert ours.metrics["support_size/proposal"] == metrics["support_size/proposal"] < 6
    assert ours.metrics["support_size/old"] == metrics["support_size/old"] > 6


@pytest.mark.parametrize("tail", TAILS)
def test_ratios_are_cut_off_where_troll_loss_cuts_them_off(tail: str) -> None:
    """A proposal that all but excluded a token it now has: log-ratios of 60 and more, without a bound."""
    case = make(distance=12.0)
    options = {"kl_bound": 1e9, "max_lost_mass": 1.0}
    ours, theirs = fused(case, tail=tail, **options), composed(case, tail=tail, **options)
    assert theirs.metrics["ratio/max"] == math.exp(20)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-11, atol=0)
    assert ours.metrics["ratio/max"] == theirs.metrics["ratio/max"]


@pytest.mark.parametrize("factor", [3.0, 0.0])
def test_a_factor_of_the_loss(factor: float) -> None:
    case = make()
    plain = fused(case)
    loss, _ = fused_troll_loss(case.leaves[0], case.head(), case.old, case.advantages, MASK, **GIVEN)
    for a, b in zip(torch.autograd.grad(loss * factor, case.leaves), plain.gradients, strict=True):
        torch.testing.assert_close(a, factor * b, rtol=1e-12, atol=1e-15)


def test_micro_batches_add_up_with_the_total_of_the_batch() -> None:
    case = make()
    whole = fused(case)
    parts = []
    for i in range(B):
        loss, _ = fused_troll_loss(
            case.leaves[0][i : i + 1],
            case.head(),
            case.old[i : i + 1],
            case.advantages[i : i + 1],
            MASK[i : i + 1],
            total=MASK.sum(),
            **GIVEN,
        )
        parts.append(loss)
    total = torch.stack(parts).sum()
    torch.testing.assert_close(total.detach(), whole.loss, rtol=1e-12, atol=0)
    for a, b in zip(torch.autograd.grad(total, case.leaves), whole.gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_without_gradients() -> None:
    case = make()
    with torch.no_grad():
        loss, metrics = fused_troll_loss(case.leaves[0], case.head(), case.old, case.advantages, MASK, **GIVEN)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, fused(case).loss, rtol=1e-13, atol=0)
    assert metrics["projected_fraction"] == fused(case).metrics["projected_fraction"]


def test_bf16_hidden_states() -> None:
    """From the same products, in bf16: the same numbers, and gradients with one rounding to bf16 more or less."""
    case = make(torch.bfloat16)
    for tail in TAILS:
        ours, theirs = fused(case, tail=tail), composed(case, tail=tail)
        torch.testing.assert_close(ours.loss, theirs.loss, rtol=2e-5, atol=1e-6)
        for a, b in zip(ours.gradients, theirs.gradients, strict=True):
            assert a.dtype == torch.bfloat16
            torch.testing.assert_close(a, b, rtol=2 * 2.0**-7, atol=2.0**-7 * b.abs().max().item())
        assert ours.metrics["projected_fraction"] == theirs.metrics["projected_fraction"]


@pytest.mark.parametrize(("tail", "way"), [("floor", "whole"), ("bucket", "chunks"), ("bucket", "recompute")])
@interpreted
def test_the_kernels_give_the_same(tail: str, way: str) -> None:
    """fp32: no kernel is further from fp64 than a few roundings; the solver may take other steps."""
    case = make(F32, temperature=0.8, mask=MASK)
    ours, theirs = fused(case, tail=tail, way=way, impl="triton"), composed(case, tail=tail)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)
    for a, b in zip(ours.gradients, theirs.gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * b.abs().max().item())
    for name in set(theirs.metrics) - {"solver_steps/mean", "solver_steps/max"}:
        torch.testing.assert_close(
            ours.metrics[name].double(), theirs.metrics[name].double(), rtol=2e-5, atol=2e-6, msg=name
        )
    assert 0 < ours.metrics["solver_steps/max"] <= 12


# ---- weights of tokens ---------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.integers(0, 2**31),
    st.integers(1, 4),
    st.integers(0, 5),
    st.sampled_from(RULES),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    st.sampled_from([None, 0, 0.0, 3, 17.5, "tensor"]),
)
def test_weights_of_tokens_are_the_aggregation(
    seed: int, rows: int, length: int, rule: str, share: float, total: Any
) -> None:
    """Also for sequences without a counted token, without any, and a total of zero."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, length, generator=g, dtype=F64)
    mask = torch.rand(rows, length, generator=g) < share
    options: dict[str, Any] = {"max_length": 9 if rule == "constant" else None}
    options["total"] = torch.tensor(4.0, dtype=F64) if total == "tensor" else total
    weights = token_weights(mask, rule, **options)  # type: ignore[arg-type]
    assert weights.shape == mask.shape
    assert (weights[~mask] == 0).all()
    assert (weights[mask] > 0).all()
    # the weights of counts are quotients of integers, in fp32
    torch.testing.assert_close(
        (weights * values).sum(),
        aggregate(values, mask, rule, **options),
        rtol=3e-7,
        atol=3e-7,  # type: ignore[arg-type]
    )


def test_weights_of_tokens_refuse_what_aggregate_refuses() -> None:
    for options in ({"rule": "mean"}, {"rule": "constant"}, {"max_length": 3}, {"rule": "constant", "max_length": 0}):
        with pytest.raises(InputError) as ours:
            token_weights(MASK, **options)
        with pytest.raises(InputError) as theirs:
            aggregate(MASK.double(), MASK, **options)
        assert str(ours.value) == str(theirs.value)


# ---- errors --------------------------------------------------------------------------------------------------------


def call(case: Case, impl: str = "torch", **changes: Any) -> None:
    given: dict[str, Any] = {
        "hidden": case.leaves[0],
        "head": case.head(impl),
        "old": case.old,
        "advantages": case.advantages,
        "loss_mask": MASK,
        **GIVEN,
    }
    fused_troll_loss(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"hidden": torch.zeros(B, T - 1, H)}, "where old has shape [B, T], got [3, 3, 5] and [3, 4]"),
        ({"hidden": torch.zeros(B * T, H)}, "where old has shape [B, T], got [12, 5] and [3, 4]"),
        ({"hidden": torch.zeros(B, T, H + 1, dtype=F64)}, "got [3, 4, 6], [3, 4] and [40, 5]"),
        ({"loss_mask": torch.ones(B, T + 1)}, "one entry per token of the policies, shape [3, 4], got [3, 5]"),
        (
            {"advantages": torch.zeros(T)},
            "advantages must be one per sequence, shape [3], or one per token, shape [3, 4], got [4]",
        ),
        ({"advantages": torch.tensor([0.0, NAN, 1.0])}, "advantages must be finite, got nan at position [1, 0]"),
        ({"advantages": torch.zeros(B, requires_grad=True)}, "advantages must be constants"),
        (
            {"importance_weights": torch.tensor([1.0, 1.0, INF])},
            "importance_weights must be finite, got inf at position [2, 0]",
        ),
        (
            {"importance_weights": torch.ones(B, T, 1)},
            "importance_weights must be one per sequence, shape [3], or one per token, shape [3, 4], got [3, 4, 1]",
        ),
        ({"kl_bound": -0.1}, "got -0.1"),
        ({"kl_bound": NAN}, "kl_bound must be a number ≥ 0, got nan"),
        ({"kl_bound": torch.tensor([[-1.0] * T] * B)}, "kl_bound"),
        ({"kl_bound": torch.ones(T + 1)}, "kl_bound"),
        ({"regression_coef": -1.0}, "regression_coef must be a number ≥ 0, got -1.0"),
        ({"tail": "bin"}, "got 'bin'"),
        ({"aggregation": "mean"}, "got 'mean'"),
        ({"aggregation": "constant"}, "aggregation='constant' needs max_length"),
        ({"max_length": 5}, "max_length=5 has no effect with aggregation='token_mean'"),
        ({"max_support": 0}, "max_support must be an integer ≥ 1, got 0"),
        ({"tail_mass": 1.0}, "tail_mass must be a number ≥ 0 and < 1, got 1.0"),
        ({"memory_budget": 0}, "memory_budget must be an integer ≥ 1, got 0"),
        ({"memory_budget": -5}, "memory_budget must be an integer ≥ 1, got -5"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], given: str) -> None:
    with pytest.raises(InputError) as caught:
        call(make(), **changes)
    assert given in caught.value.problem


@pytest.mark.parametrize("tail", TAILS)
def test_a_counted_nan_is_refused_with_its_position(tail: str) -> None:
    case = make()
    with torch.no_grad():
        case.leaves[0][1, 2, 0] = NAN
        case.leaves[0][0, 3] = NAN  # not counted
    with pytest.raises(InputError, match=r"logit nan of token 0 at position \[1, 2\] \(1 such positions\)"):
        call(case, tail=tail)


def test_a_counted_position_that_the_old_policy_masks_is_refused() -> None:
    case = make(mask=MASK)
    with pytest.raises(InputError, match=r"has no distribution at position \[0, 3\], which loss_mask counts"):
        call(case, loss_mask=torch.ones(B, T))


def test_another_vocabulary_is_refused() -> None:
    case = make()
    for tail in TAILS:
        with pytest.raises(InputError, match=r"the same vocabulary|vocab_size"):
            call(case, head=Head(torch.zeros(V + 1, H, dtype=F64), impl="torch"), tail=tail)


@pytest.mark.parametrize("tail", TAILS)
def test_an_old_policy_that_requires_gradient_is_refused(tail: str) -> None:
    case = make()
    old, _ = case.head().sparsify(case.leaves[0], case.old.sampled, K, 1e-3)
    with pytest.raises(InputError, match="old must be a constant"):
        call(case, old=old, tail=tail)


def truncated(lost: float, counted: float) -> tuple[Case, Tensor]:
    """The old policy has ½ on two tokens of three; the proposal has ``lost`` on the third, at the first position."""
    hidden = torch.eye(2, dtype=F64)[torch.tensor([[0, 1, 1]])]
    inside = (1 - lost) / 2
    weight = torch.tensor([[inside, inside, lost], [0.5, 0.5, 1e-300]], dtype=F64).log().T.contiguous()
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), torch.zeros(3, dtype=F64, requires_grad=True)]
    old = SparsePolicy(
        torch.tensor([[[0, 1]] * 3]),
        torch.full((1, 3, 2), math.log(0.5), dtype=F64),
        torch.full((1, 3), -INF, dtype=F64),
        3,
    )
    return Case(leaves, old, torch.ones(1, dtype=F64)), torch.tensor([[1.0, counted, counted]])


@pytest.mark.parametrize(
    ("lost", "counted", "refused"), [(0.15, 0.0, True), (0.15, 1.0, False), (0.09, 0.0, False), (0.5, 1.0, True)]
)
def test_more_lost_mass_than_the_limit(lost: float, counted: float, refused: bool) -> None:
    """Judged over the counted tokens, as ``troll_loss`` does, with its words."""
    case, mask = truncated(lost, counted)
    options = {"tail": "floor", "max_support": 3, "tail_mass": 0.0}
    policy, _ = case.head("reference").sparsify(case.leaves[0], case.old.sampled, 3, 0.0, loss_mask=mask)
    if refused:
        with pytest.raises(InputError) as theirs:
            troll_loss(policy, case.old, case.advantages, mask, tail="floor")
        with pytest.raises(InputError) as ours:
            call(case, loss_mask=mask, **options)
        assert str(ours.value) == str(theirs.value)
        assert "max_lost_mass=0.1" in ours.value.problem
        call(case, loss_mask=mask, max_lost_mass=0.6, **options)
    else:
        _, metrics = troll_loss(policy, case.old, case.advantages, mask, tail="floor")
        found = fused_troll_loss(case.leaves[0], case.head(), case.old, case.advantages, mask, **options)[1]
        torch.testing.assert_close(found["lost_mass"], metrics["lost_mass"], rtol=1e-12, atol=0)
        assert found["lost_mass"] > 0.04
