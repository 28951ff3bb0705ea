"""Shared by the tests of ``troll.policy``: slow oracles, written differently from the source, and small builders."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from troll.errors import InputError
from troll.implementation import VARIABLE
from troll.policy import SparsePolicy, restrict

INF = math.inf
F32, F64 = torch.float32, torch.float64


def each_impl() -> Any:
    """A fixture: the tests of its module run with either way to compute as ``auto``."""

    def impl(request: pytest.FixtureRequest) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, request.param)
            yield

    return pytest.fixture(impl, params=["torch", "reference"], scope="module", autouse=True)


@contextmanager
def refuses(given: str, expected: str = "", hint: str = "") -> Iterator[None]:
    """Expect an ``InputError`` whose problem has the first two of these words in it, and whose fix the third."""
    with pytest.raises(InputError) as caught:
        yield
    error = caught.value
    assert given in error.problem, error.problem
    assert expected in error.problem, error.problem
    assert hint in error.fix, error.fix


def close(expected: Any, rel: float, abs: float = 0.0) -> Any:
    """Equal up to a relative error. (``pytest.approx`` alone also allows an absolute one of 1e-12.)"""
    return pytest.approx(expected, rel=rel, abs=abs)


def normal(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = F32) -> Tensor:
    """Normal numbers that depend on the seed alone."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64) * scale).to(dtype)


def ids(*shape: int, below: int, seed: int) -> Tensor:
    """Uniform token ids that depend on the seed alone."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def ulp(x: float, dtype: torch.dtype) -> float:
    """The spacing of the numbers of this type at |x|."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(x), 1e-30)))


def greedy(z: list[float], sampled: int, max_support: int, tail_mass: float) -> tuple[list[int], float]:
    """The kept ids of one row of scaled logits, by sorting and counting; and how narrowly the mass decided it.

    Sorted by falling logit, then rising id; taken until at most ``tail_mass`` is left or ``max_support`` are taken; the
    sampled token goes to the front and, where it was not taken, costs the last one its place if there is no other.
    """
    possible = sorted((i for i, x in enumerate(z) if x > -INF), key=lambda i: (-z[i], i))
    top = z[possible[0]]
    weight = [math.exp(z[i] - top) for i in possible]
    total, room, narrowest = math.fsum(weight), min(max_support, len(z)), INF
    taken: list[int] = []
    while len(taken) < min(room, len(possible)):
        left = math.fsum(weight[len(taken) :]) / total
        if tail_mass > 0:
            narrowest = min(narrowest, abs(left - tail_mass))
            if left <= tail_mass:
                break
        taken.append(possible[len(taken)])
    return [sampled, *(i for i in taken if i != sampled)][:room], narrowest


def kept(policy: SparsePolicy) -> list[list[int]]:
    """The used ids of every position, in the order of their slots."""
    return [[i for i in row if i >= 0] for row in policy.token_ids.reshape(-1, policy.token_ids.shape[-1]).tolist()]


def dense(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities at the ids and the log of the rest, in float64 by plain, differentiable torch; [N, V], [N, K].

    Unused slots (−1) get 0, so that nothing infinite reaches a loss. Not for rows without a tail.
    """
    log_p = torch.log_softmax(logits.to(F64) / temperature, -1)
    rows, tails = [], []
    for row, chosen in zip(log_p, token_ids.tolist(), strict=True):
        used = [i for i in chosen if i >= 0]
        rows.append(torch.stack([row[i] if i >= 0 else row.new_zeros(()) for i in chosen]))
        rest = [i for i in range(len(row)) if i not in used]
        tails.append(row[rest].exp().sum().log())
    return torch.stack(rows), torch.stack(tails)


def at_ids(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities at given ids [N, K] (−1: unused, slot 0 used) and the log of the rest, differentiable."""
    nothing = torch.zeros(token_ids.shape, dtype=F64)
    policy = restrict(logits, SparsePolicy.trusted(token_ids, nothing, nothing[:, 0], logits.shape[-1], temperature))
    assert torch.equal(policy.token_ids, token_ids)
    return policy.log_probs, policy.log_tail


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, also NaN, −inf and the sign of zero."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def same_policy(a: SparsePolicy, b: SparsePolicy) -> bool:
    """Two policies that agree in every bit."""
    tensors = ((a.token_ids, b.token_ids), (a.log_probs, b.log_probs), (a.log_tail, b.log_tail))
    rest = (a.vocab_size, a.temperature) == (b.vocab_size, b.temperature)
    return rest and all(same_bits(x.detach(), y.detach()) for x, y in tensors)


def by_hand(
    token_ids: list[list[int]], probs: list[list[float]], vocab_size: int, dtype: torch.dtype = F64
) -> SparsePolicy:
    """A policy from ids and probabilities [N, K]; the tail is what is missing to 1 (exactly nothing below 1e-12)."""
    p = torch.tensor(probs, dtype=F64)
    left = 1 - p.sum(-1)
    left = torch.where(left < 1e-12, 0.0, left)
    return SparsePolicy(torch.tensor(token_ids), p.log().to(dtype), left.log().to(dtype), vocab_size)
