"""Shared by the tests of the row kernels: rows, their exact numbers, and what an error may be.

Kernels run where there is a GPU on it, compiled, and elsewhere interpreted, on the same cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from troll.implementation import Choice
from troll.policy.scoring import LogitTransform, MostProbable, Scores, Upstream, gradient, score

INF, NAN = math.inf, math.nan
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [BF16, F16, F32]
PLAIN, SCALED, CAPPED = (
    LogitTransform(),
    LogitTransform(scale=0.5, temperature=0.7),
    LogitTransform(scale=2.0, softcap=5.0, temperature=1.7),
)
LOGITS = [PLAIN, SCALED, CAPPED]
REFERENCE, TRITON = Choice("reference", "the definition"), Choice("triton", "under test")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMPILED = DEVICE.type == "cuda"

# What numpy says, in the interpreter, to −inf − −inf, 0 · inf, log 0, e^200 and e^200 in fp16.
quiet = [
    pytest.mark.filterwarnings(f"ignore:{said}:RuntimeWarning")
    for said in (
        "overflow encountered in multiply",
        "overflow encountered in exp2",
        "overflow encountered in cast",
        "overflow encountered in add",
        "overflow encountered in divide",
        "invalid value encountered in multiply",
        "invalid value encountered in subtract",
        "invalid value encountered in add",
        "invalid value encountered in divide",
        "invalid value encountered in log2",
        "invalid value encountered in cast",
        "divide by zero encountered in log",
        "divide by zero encountered in divide",
        "All-NaN slice encountered",
    )
]


def on_device() -> Any:
    """A fixture: tensors of its module are made where the kernels run."""

    def device() -> Iterator[None]:
        with DEVICE if COMPILED else nullcontext():
            yield

    return pytest.fixture(device, scope="module", autouse=True)


def normal(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = F32) -> Tensor:
    """Normal numbers that depend on the seed alone."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=F64, device="cpu") * scale).to(DEVICE, dtype)


def integers(*shape: int, below: int, seed: int) -> Tensor:
    """Uniform integers from 0 on that depend on the seed alone."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(below, shape, generator=generator, device="cpu").to(DEVICE)


def ulp(x: float, dtype: torch.dtype = F32) -> float:
    """The spacing of the numbers of this type at |x|."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(x), 2.0**-100)))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, also NaN, −inf and the sign of zero."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


def all_same_bits(a: Any, b: Any) -> bool:
    """Two tuples of tensors that agree in every bit."""
    return all(same_bits(x.detach(), y.detach()) for x, y in zip(a, b, strict=True))


# ---- exact numbers -------------------------------------------------------------------------------------------------


def exact_logits(x: Tensor, logit: LogitTransform) -> Tensor:
    """z = c tanh(s x / c) / T in fp64, by plain, differentiable torch."""
    z = x.double() * logit.scale
    if logit.softcap is not None:
        z = torch.tanh(z / logit.softcap) * logit.softcap
    return z / logit.temperature


def exactly(x: Tensor, logit: LogitTransform, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities at the ids (0 where unused), log tail and entropy, in fp64 by plain, differentiable torch."""
    log_p = exact_logits(x, logit).log_softmax(-1)
    used = token_ids >= 0
    kept = log_p.gather(-1, token_ids.clamp(min=0)).masked_fill(~used, 0.0)
    outside = torch.ones_like(log_p).scatter(-1, torch.where(used, token_ids, token_ids[:, :1]), 0.0) > 0
    some = (outside & (log_p > -INF)).any(-1)
    log_tail = torch.where(outside | ~some[:, None], log_p, -INF).logsumexp(-1).masked_fill(~some, -INF)
    possible = log_p.masked_fill(log_p == -INF, 0.0)
    return kept, log_tail, -(log_p.exp() * possible).sum(-1)


def narrowest(z: Tensor, max_support: int, tail_mass: float) -> float:
    """How close the mass that is left after so many tokens comes to ``tail_mass``, for rows of exact logits."""
    p = z.softmax(-1).sort(-1, descending=True).values
    left = p.flip(-1).cumsum(-1).flip(-1)[:, :max_support]
    return (left - tail_mass).abs().min().item()


# ---- the comparison ------------------------------------------------------------------------------------------------


def run(
    x: Tensor,
    sampled: Tensor,
    support: MostProbable | Tensor,
    logit: LogitTransform = PLAIN,
    counted: Tensor | None = None,
    choice: Choice = TRITON,
    **options: Any,
) -> Scores:
    """``score`` by the kernels."""
    return score(x, logit, sampled, support, counted, choice, **options)


def assert_no_further_from_the_truth(ours: Tensor, theirs: Tensor, truth: Tensor, size: float) -> None:
    """The largest error is at most twice the definition's in fp32, and four roundings of numbers of this size.

    Both round z, z − max z and log p once each, and the logarithm of a sum of some hundred numbers. Which of those
    roundings cancel is chance, which the factor is for; the definition may have been lucky on few rows.
    """
    same = (ours == truth) & (theirs == truth)  # also where all are −inf
    off, allowed = ((torch.where(same, 0.0, a.double() - truth)).abs().max().item() for a in (ours, theirs))
    assert off <= 2 * allowed + 2 * ulp(size), (off, allowed, ulp(size))


def compare(
    x: Tensor,
    sampled: Tensor,
    support: MostProbable | Tensor,
    logit: LogitTransform = PLAIN,
    counted: Tensor | None = None,
    entropy: bool = True,
) -> Scores:
    """The same tokens as the definition's, bit for bit, and numbers no further from the truth."""
    ours, theirs = (run(x, sampled, support, logit, counted, c, entropy=entropy) for c in (TRITON, REFERENCE))
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    there = theirs.token_ids[:, 0] >= 0
    assert_empty(ours, ~there)
    if not there.any():
        return ours
    a, b = (Scores(*(number[there] for number in s)) for s in (ours, theirs))
    rows = x[there]
    kept, log_tail, information = exactly(rows, logit, b.token_ids)
    used = b.token_ids >= 0
    assert ((a.log_probs == -INF) == ~used).all()
    z = exact_logits(rows, logit)
    size = max(kept.abs().max().item(), z[z > -1e30].abs().max().item() if logit != PLAIN else 0.0)
    assert_no_further_from_the_truth(a.log_probs[used], b.log_probs[used], kept[used], size)
    assert torch.equal(a.log_tail == -INF, log_tail == -INF)
    finite = log_tail > -INF
    if finite.any():
        deepest = log_tail[finite].abs().max().item()
        assert_no_further_from_the_truth(a.log_tail[finite], b.log_tail[finite], log_tail[finite], max(size, deepest))
    if entropy:
        # Σ p |log p|, each term rounded at the size of its own log p
        assert_no_further_from_the_truth(a.entropy, b.entropy, information, max(size, information.max().item()))
    else:
        assert a.entropy.tolist() == [0.0] * len(rows)
    norms = [s.log_norm.double().sum(-1) for s in (a, b)]
    assert_no_further_from_the_truth(*norms, z.logsumexp(-1), z[z > -1e30].abs().max().item())
    return ours


def assert_empty(scores: Scores, where: Tensor) -> None:
    """No support, all mass in the tail, no entropy."""
    count, K = int(where.sum()), scores.token_ids.shape[-1]
    assert scores.token_ids[where].tolist() == [[-1] * K] * count
    assert scores.log_probs[where].tolist() == [[-INF] * K] * count
    assert scores.log_tail[where].tolist() == [0.0] * count
    assert scores.entropy[where].tolist() == [0.0] * count


def spectrum(N: int, V: int, dtype: torch.dtype, logit: LogitTransform = PLAIN, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows from flat to sharp, a seventh of the second excluded, three tokens have nearly all of the last; and
    possible tokens, the most probable one in every other row.

    Under a soft cap logits stay below three times the cap: beyond, tanh is 1 up to some last places, and which of two
    tokens is then the larger is decided by rounding.
    """
    x = normal(N, V, seed=seed) * torch.linspace(0.1, 6.0, N, device=DEVICE)[:, None]
    if logit.softcap is not None:
        x = x.clamp(-7.0, 7.0)
    elif N > 2:
        x[-1, 5:8] += 60.0
    sampled = integers(N, below=V, seed=seed + 1)
    sampled[::2] = x[::2].argmax(-1)
    if N > 1 and V > 1:
        x[1, ::7] = -INF
        x[1, sampled[1]] = 0.25
    return x.to(dtype), sampled


# ---- gradients -----------------------------------------------------------------------------------------------------


def upstream(scores: Scores, parts: tuple[bool, bool, bool] = (True, True, True), seed: int = 20) -> Upstream:
    """Normal gradients for log-probabilities, tail and entropy, as far as wanted."""
    numbers = scores.log_probs, scores.log_tail, scores.entropy
    return Upstream(
        *(normal(*x.shape, seed=seed + i) if p else None for i, (x, p) in enumerate(zip(numbers, parts, strict=True)))
    )


def exact_gradient(x: Tensor, logit: LogitTransform, scores: Scores, arriving: Upstream) -> Tensor:
    """By autograd in fp64, zero where a row has no support."""
    there = scores.token_ids[:, 0] >= 0
    truth = torch.zeros(x.shape, dtype=F64, device=x.device)
    rows = x[there].double()
    rows = rows.masked_fill(rows == -INF, -1e300).requires_grad_()  # −inf − −inf has no derivative in autograd
    numbers = exactly(rows, logit, scores.token_ids[there])
    total = rows.sum() * 0
    for number, g in zip(numbers, arriving, strict=True):
        if g is not None:
            total = total + torch.where(number > -1e200, number * g[there].double(), 0.0).sum()
    truth[there] = torch.autograd.grad(total, rows)[0]
    return truth


def assert_gradient(
    x: Tensor, logit: LogitTransform, scores: Scores, arriving: Upstream, found: Tensor, truth: Tensor | None = None
) -> None:
    """No further from the truth than the definition in fp32, then rounded to the type of ``found``."""
    truth = exact_gradient(x, logit, scores, arriving) if truth is None else truth
    plain = torch.empty(x.shape, dtype=F32, device=x.device)
    gradient(x, logit, scores, arriving, plain, REFERENCE)
    allowed = (plain.double() - truth).abs().max().item()
    slack = torch.full_like(truth, 2 * allowed + 2 * ulp(truth.abs().max().item()))
    if found.dtype != F32:
        # The interpreter cuts off what bf16 has no bits for, where a GPU rounds.
        ulps = 1.0 if found.dtype == BF16 and not COMPILED else 0.5
        slack += ulps * torch.finfo(found.dtype).eps * (truth.abs() + slack)
        slack += torch.finfo(found.dtype).smallest_normal * torch.finfo(found.dtype).eps
    off = (found.double() - truth).abs()
    assert (off <= slack).all(), (off.max().item(), allowed, slack.min().item())


@contextmanager
def poisoned() -> Iterator[list[int]]:
    """Memory that nobody has written to holds NaN and large numbers; yields how many tensors were made so."""
    count = [0]

    def spoiled(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            out = make(*args, **options)
            count[0] += 1
            return out.fill_(NAN if out.is_floating_point() else torch.iinfo(out.dtype).max // 3)

        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", spoiled(torch.empty))
        patch.setattr(torch, "empty_like", spoiled(torch.empty_like))
        patch.setattr(Tensor, "new_empty", spoiled(Tensor.new_empty))
        yield count
