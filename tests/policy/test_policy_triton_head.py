"""``Head`` with the kernels, against ``Head`` with the definition: numbers and gradients from the same products."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from rows_cases import (
    BF16,
    COMPILED,
    DEVICE,
    F32,
    F64,
    INF,
    NAN,
    all_same_bits,
    assert_no_further_from_the_truth,
    integers,
    normal,
    on_device,
    poisoned,
    quiet,
    same_bits,
    ulp,
)
from torch import Tensor

from troll import Head, SparsePolicy
from troll.deferred import DeferredChecks, run_checks
from troll.errors import InputError
from troll.policy import Scored
from troll.policy import matmul as products_module

pytestmark = quiet
device = on_device()
HOWS = ["sparsify", "restrict"]
N, V, H, K = 5, 70, 4, 6
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.6, "temperature": 0.8},
    "capped": {"scale": 1.5, "softcap": 3.0, "temperature": 1.3},
}


class Outcome(NamedTuple):
    """The numbers and the gradients of ``functional``."""

    scored: Scored
    gradients: list[Tensor | None]

    def numbers(self) -> list[Tensor]:
        policy = self.scored.policy
        return [policy.token_ids, policy.log_probs, policy.log_tail, self.scored.entropy]


@contextmanager
def tiles(rows: int, columns: int, itemsize: int = 4) -> Iterator[None]:
    """Room for so many rows of logits forward, and backward for as much; slices of so many tokens are converted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products_module, "_TILE_BYTES", dict.fromkeys(("cpu", "other"), (rows * V + 3) * itemsize))
        patch.setattr(products_module, "_VOCABULARY_SLICE", columns)
        yield


def parameters(bias: bool = True, dtype: torch.dtype = F32, V: int = V) -> list[Any]:
    """Hidden states, weight and bias with few bits: their products are the same in whatever order they are summed.

    Multiples of 1/8 up to 2, and sums of 5 products of those: exact in fp32.
    """

    def coarse(*shape: int, seed: int) -> Tensor:
        return ((integers(*shape, below=33, seed=seed) - 16) / 8).to(dtype)

    return [coarse(N, H, seed=1), coarse(V, H, seed=2), coarse(V, seed=3) if bias else None]


def sampled(V: int = V) -> Tensor:
    return integers(N, below=V, seed=4)


def old_policy(V: int = V, temperature: float = 1.0, dtype: torch.dtype = F32) -> SparsePolicy:
    """Over random supports of up to K tokens, the sampled one first."""
    order = torch.stack([integers(V, below=1 << 30, seed=5 + i).argsort() for i in range(N)])
    token = sampled(V)[:, None]
    ids = torch.cat([token, torch.where(order == token, -1, order)[:, : K - 1]], dim=1)
    log_probs = torch.where(ids >= 0, -math.log(2 * K), -INF).to(dtype)
    return SparsePolicy(ids, log_probs, torch.log1p(-log_probs.exp().sum(-1)), V, temperature)


def functional(scored: Scored) -> Tensor:
    """A sum with random factors of kept log-probabilities, tails and entropies, as far as they are finite."""
    policy = scored.policy
    kept = policy.log_probs.masked_fill(policy.token_ids < 0, 0.0)
    tail = policy.log_tail.masked_fill(policy.log_tail == -INF, 0.0)
    numbers = kept, tail, scored.entropy
    return torch.stack([(x * normal(*x.shape, seed=30 + i, dtype=x.dtype)).sum() for i, x in enumerate(numbers)]).sum()


def score(how: str, impl: str, tensors: list[Any], form: str = "plain", **options: Any) -> Scored:
    hidden, weight, bias = tensors
    settings = dict(FORMS[form])
    temperature = settings.pop("temperature", 1.0)
    head = Head(weight, bias, impl=impl, **settings)
    if how == "restrict":
        return head.restrict(hidden, options.pop("old", None) or old_policy(len(weight), temperature), **options)
    token = options.pop("sampled", None)
    return head.sparsify(
        hidden, sampled(len(weight)) if token is None else token, K, 1e-3, temperature=temperature, **options
    )


def outcome(
    how: str,
    impl: str,
    tensors: list[Any],
    form: str = "plain",
    trained: tuple[bool, bool, bool] = (True, True, True),
    **options: Any,
) -> Outcome:
    leaves = [
        None if x is None else x.detach().clone().requires_grad_(t) for x, t in zip(tensors, trained, strict=True)
    ]
    scored = score(how, impl, leaves, form, **options)
    functional(scored).backward()
    return Outcome(scored, [None if x is None else x.grad for x in leaves])


def exactly(tensors: list[Any], form: str, ours: Outcome, **options: Any) -> Outcome:
    """By the definition in fp64, on the tokens that were kept."""
    ids, policy = ours.scored.policy.token_ids, ours.scored.policy
    before = SparsePolicy.trusted(ids, policy.log_probs.detach(), policy.log_tail.detach(), V, policy.temperature)
    double = [None if x is None else x.double() for x in tensors]
    return outcome("restrict", "reference", double, form, old=before, **options)


def assert_alike(ours: Outcome, theirs: Outcome, truth: Outcome) -> None:
    """The same tokens; numbers and gradients no further from the truth than the definition's in fp32."""
    assert torch.equal(ours.scored.policy.token_ids, theirs.scored.policy.token_ids)
    for a, b, exact in zip(ours.numbers()[1:], theirs.numbers()[1:], truth.numbers()[1:], strict=True):
        assert torch.equal(a == -INF, exact == -INF)
        assert_no_further_from_the_truth(a, b, exact, 16.0)
    for a, b, exact in zip(ours.gradients, theirs.gradients, truth.gradients, strict=True):
        assert (a is None) == (exact is None)
        if a is not None:
            # four roundings of a sum of up to 70 numbers, each below 4
            assert_no_further_from_the_truth(a, b, exact, 16.0)
            assert exact.abs().max().item() > 0.1


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("bias", "tiling"), [(True, (2, 17)), (False, (N, V))])
def test_numbers_and_gradients(how: str, form: str, bias: bool, tiling: tuple[int, int]) -> None:
    """In several tiles forward and slabs backward, and in one."""
    tensors = parameters(bias)
    with tiles(*tiling):
        ours, theirs = (outcome(how, impl, tensors, form) for impl in ("triton", "reference"))
    assert_alike(ours, theirs, exactly(tensors, form, ours))


@pytest.mark.parametrize("how", HOWS)
def test_a_vocabulary_of_several_blocks_in_whatever_tiles(how: str) -> None:
    """The products are exact, so the scores have the same bits however they are cut."""
    tensors = parameters(V=1200)
    one = outcome(how, "triton", tensors)
    with tiles(40, 100):  # of 70 tokens: two rows of 1200, and slabs of 560
        many = outcome(how, "triton", tensors)
    theirs = outcome(how, "reference", tensors)
    assert all_same_bits(many.numbers(), one.numbers())
    assert torch.equal(one.numbers()[0], theirs.numbers()[0])
    for a, b, c in zip(one.gradients, many.gradients, theirs.gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=4 * ulp(8.0))  # gᵀ h and g W in other pieces
        torch.testing.assert_close(a, c, rtol=0, atol=16 * ulp(8.0))


@pytest.mark.parametrize("trained", list(itertools.product([True, False], repeat=3))[1:-1])
def test_gradients_of_what_is_trained(trained: tuple[bool, bool, bool]) -> None:
    tensors = parameters()
    with tiles(2, 17):
        some = outcome("restrict", "triton", tensors, "capped", trained)
        everything = outcome("restrict", "triton", tensors, "capped")
    for found, expected, needed in zip(some.gradients, everything.gradients, trained, strict=True):
        assert (found is not None) == needed
        assert found is None or same_bits(found, expected)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("fill", [NAN, INF])
def test_positions_that_do_not_count_leak_nothing(how: str, fill: float) -> None:
    tensors = parameters()
    mask = torch.tensor([True, False, True, True, False])
    broken = [torch.where(mask[:, None], tensors[0], fill), *tensors[1:]]
    with tiles(2, 17):
        clean = outcome(how, "triton", tensors, loss_mask=mask)
        ours = outcome(how, "triton", broken, loss_mask=mask)
        theirs = outcome(how, "reference", tensors, loss_mask=mask)
    assert all_same_bits(ours.numbers(), clean.numbers())
    assert all_same_bits(ours.gradients, clean.gradients)
    assert_alike(ours, theirs, exactly(tensors, "plain", ours, loss_mask=mask))
    assert ours.scored.policy.valid.tolist() == mask.tolist()
    assert (ours.gradients[0][~mask] == 0).all()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("fill", [NAN, INF])
def test_broken_positions_are_masked_where_asked_for(how: str, fill: float) -> None:
    """NaN also with the entropy, which every call computes."""
    tensors = parameters()
    broken = [tensors[0].clone(), *tensors[1:]]
    broken[0][3, 2] = fill
    good = torch.arange(N, device=DEVICE) != 3
    ours = outcome(how, "triton", broken, on_invalid="mask")
    expected = outcome(how, "triton", tensors, loss_mask=good)
    assert ours.scored.policy.valid.tolist() == good.tolist()
    assert all_same_bits(ours.numbers(), expected.numbers())
    for a, b in zip(ours.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=4 * ulp(8.0))  # summed over one row more, of zeros


@pytest.mark.parametrize("how", HOWS)
def test_a_bias_of_minus_infinity_excludes_tokens(how: str) -> None:
    tensors = parameters()
    excluded = sorted(set(old_policy().token_ids[:, 1:4].flatten().tolist()) - set(sampled().tolist()) - {-1})[::2]
    tensors[2][excluded] = -INF
    with tiles(2, 17):
        ours, theirs = (outcome(how, impl, tensors) for impl in ("triton", "reference"))
    assert_alike(ours, theirs, exactly(tensors, "plain", ours))
    assert not torch.isin(ours.scored.policy.token_ids, torch.tensor(excluded)).any()
    assert (ours.gradients[1][excluded] == 0).all()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("mixed", ["bf16", "autocast", "fp32 weight"])
def test_half_precision_products(how: str, mixed: str) -> None:
    """Products in bf16; gradients of each are made in fp32, rounded once to bf16 and summed in fp32."""
    tensors = parameters(dtype=BF16)
    wide = [x.float() for x in tensors]
    given = {"bf16": tensors, "autocast": wide, "fp32 weight": [tensors[0], *wide[1:]]}[mixed]
    autocast = torch.autocast(DEVICE.type, dtype=BF16) if mixed == "autocast" else nullcontext()
    with tiles(2, 17, itemsize=2), autocast:
        ours, theirs = (outcome(how, impl, given) for impl in ("triton", "reference"))
    assert torch.equal(ours.scored.policy.token_ids, theirs.scored.policy.token_ids)
    for a, b in zip(ours.numbers()[1:], theirs.numbers()[1:], strict=True):
        assert a.dtype == F32
        torch.testing.assert_close(a, b, rtol=0, atol=4 * ulp(16.0))
    # The gradient g of the products, and with it the size of the sums g W, gᵀ h and gᵀ 1.
    z = (tensors[0] @ tensors[1].T + tensors[2]).float().requires_grad_()
    same_tokens = SparsePolicy.trusted(*(x.detach() for x in ours.numbers()[:3]), V, 1.0)
    functional(Head(torch.eye(V), impl="reference").restrict(z, same_tokens)).backward()
    g, h, w = z.grad.double().abs(), wide[0].double().abs(), wide[1].double().abs()
    eps = torch.finfo(BF16).eps
    rounded = eps / 2 if COMPILED else 1.5 * eps  # the definition rounds, the interpreter cuts off
    for a, b, x, size in zip(ours.gradients, theirs.gradients, given, (g @ w, g.T @ h, g.sum(0)), strict=True):
        assert a.dtype == b.dtype == x.dtype
        last = eps * b.abs().double() if x.dtype == BF16 else 0.0
        assert ((a.double() - b.double()).abs() <= (rounded + 2.0**-18) * size + 1e-6 + last).all()
        assert b.abs().max().item() > 0.3


def test_checks_wait_where_there_is_a_list_for_them() -> None:
    tensors, checks = parameters(), DeferredChecks()
    tensors[0][3, 1] = NAN
    for how in HOWS:
        assert score(how, "triton", tensors, deferred=checks).policy.valid.tolist() == [True, True, True, False, True]
    token = sampled()
    token[1] = V
    score("sparsify", "triton", parameters(), sampled=token, deferred=checks)
    score("restrict", "triton", parameters(), deferred=checks)
    assert len(checks) == 4
    for check, given in zip(
        checks, ["logit nan of token 0 at position [3]"] * 2 + [f"token {V} at position [1]"], strict=False
    ):
        with pytest.raises(InputError) as caught:
            run_checks([check])
        assert given in caught.value.problem
    run_checks(checks[3:])
    for on_invalid in ("raise", "mask"):
        with pytest.raises(InputError, match=f"token {V} at position"):
            score("sparsify", "triton", parameters(), sampled=token, on_invalid=on_invalid)


@pytest.mark.parametrize("how", HOWS)
def test_no_position_counts(how: str) -> None:
    tensors = parameters()
    found = outcome(how, "triton", [torch.full_like(tensors[0], NAN), *tensors[1:]], loss_mask=torch.zeros(N))
    assert not found.scored.policy.valid.any()
    assert all((g == 0).all() for g in found.gradients)


@pytest.mark.parametrize("how", HOWS)
def test_memory_that_was_not_written_is_not_read(how: str) -> None:
    tensors = parameters()
    with tiles(2, 17):
        clean = outcome(how, "triton", tensors, "capped")
        with poisoned() as made:
            found = outcome(how, "triton", tensors, "capped")
    assert made[0] > 20
    assert all_same_bits(found.numbers(), clean.numbers())
    assert all_same_bits(found.gradients, clean.gradients)


def test_fp64_and_large_supports_are_refused_by_name_and_taken_by_the_definition() -> None:
    hidden, weight, _ = parameters()
    with pytest.raises(InputError, match="fp64"):
        Head(weight.double(), impl="triton").sparsify(hidden.double(), sampled())
    wide = normal(300, H, seed=9)
    with pytest.raises(InputError, match="max_support is 257, above the 256"):
        Head(wide, impl="triton").sparsify(hidden, sampled(), 257)
    with pytest.raises(InputError, match="logit scale is -1"):
        Head(weight, scale=-1.0, impl="triton").sparsify(hidden, sampled())
    assert Head(weight.to(F64)).sparsify(hidden.to(F64), sampled()).entropy.dtype == F64
