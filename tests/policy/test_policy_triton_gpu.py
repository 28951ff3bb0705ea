"""The row kernels compiled, at the sizes they are made for, against the definition there. Runs where there is a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rows_cases import (
    BF16,
    CAPPED,
    DTYPES,
    F32,
    F64,
    INF,
    LOGITS,
    NAN,
    PLAIN,
    REFERENCE,
    SCALED,
    TRITON,
    all_same_bits,
    same_bits,
    ulp,
    upstream,
)
from torch import Tensor

import troll
from troll.policy import head as head_module
from troll.policy.head_gradients import Plan
from troll.policy.scoring import LogitTransform, MostProbable, Scores, Upstream, gradient, score
from troll.policy.scoring import triton as launchers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCABULARIES = [49_152, 151_936, 262_144]  # SmolLM2, Qwen2.5, Gemma 3


def rows(N: int, V: int, dtype: torch.dtype, logit: LogitTransform = PLAIN, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows from flat to as sharp as a model's, in the half precisions with many ties; one excludes tokens."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(N, V, generator=g, device="cuda") * torch.linspace(0.5, 5.0, N, device="cuda")[:, None]
    if logit.softcap is not None:
        x = x.clamp(-7.0, 7.0)
    x[1, ::3] = -INF
    x[-1, 77:80] += 30.0
    sampled = torch.randint(V, (N,), generator=g, device="cuda")
    sampled[1] = 1
    return x.to(dtype), sampled


def by(
    x: Tensor, sampled: Tensor, support: Any, logit: LogitTransform, choice: Any, counted: Tensor | None = None
) -> Scores:
    return score(x, logit, sampled, support, counted, choice)


def exact(x: Tensor, logit: LogitTransform, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities at the ids, log tail, entropy and log Σ e^z in fp64, a few rows at a time."""
    parts = []
    for row, ids in zip(x.split(8), token_ids.split(8), strict=True):
        z = row.double() * logit.scale
        z = z if logit.softcap is None else torch.tanh(z / logit.softcap) * logit.softcap
        z = z / logit.temperature
        norm = z.logsumexp(-1)
        log_p = z - norm[:, None]
        kept = log_p.gather(-1, ids.clamp(min=0))
        tail = log_p.scatter(-1, torch.where(ids >= 0, ids, ids[:, :1]), -INF).logsumexp(-1)
        entropy = -(log_p.exp() * log_p.clamp(min=-1e300)).sum(-1)
        parts.append((kept, tail, entropy, norm))
    return tuple(torch.cat(x) for x in zip(*parts, strict=True))  # type: ignore[return-value]


def assert_within_budget(ours: Tensor, theirs: Tensor, truth: Tensor, size: float) -> None:
    """At most twice as far as the definition, and two last places of a number of this size: see ``rows_cases``."""
    off, allowed = ((x.double() - truth).abs().max().item() for x in (ours, theirs))
    assert off <= 2 * allowed + 2 * ulp(size), (off, allowed, ulp(size))


@pytest.mark.parametrize("V", VOCABULARIES)
@pytest.mark.parametrize("K", [64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logit", LOGITS)
def test_scores(V: int, K: int, dtype: torch.dtype, logit: LogitTransform) -> None:
    x, sampled = rows(64, V, dtype, logit)
    for tail_mass in (0.0, 1e-5):
        ours, theirs = (by(x, sampled, MostProbable(K, tail_mass), logit, c) for c in (TRITON, REFERENCE))
        same = (ours.token_ids == theirs.token_ids).all(-1)
        if tail_mass == 0:
            assert same.all()
        else:  # where the mass left after so many tokens is within rounding of the tail, one more or less may be kept
            assert same.sum() >= 62
    given, theirs_given = (by(x, sampled, theirs.token_ids, logit, c) for c in (TRITON, REFERENCE))
    assert torch.equal(given.token_ids, theirs.token_ids)
    kept, tail, entropy, norm = exact(x, logit, theirs.token_ids)
    used = theirs.token_ids >= 0
    size = max(kept[used].abs().max().item(), 16.0)
    alike = [Scores(*(number[same] for number in x)) for x in (ours, theirs)]
    for found, reference in (alike, (given, theirs_given)):
        at = same if len(found.log_tail) < 64 else torch.ones_like(same)
        assert_within_budget(found.log_probs[used[at]], reference.log_probs[used[at]], kept[at][used[at]], size)
        assert_within_budget(found.log_tail, reference.log_tail, tail[at], size)
        assert_within_budget(found.entropy, reference.entropy, entropy[at], size)
        assert_within_budget(found.log_norm.double().sum(-1), reference.log_norm.double().sum(-1), norm[at], 64.0)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_soft_cap_at_which_many_tokens_are_equal(dtype: torch.dtype) -> None:
    """Scan and choice read a capped logit alike, in whatever code they were compiled to: no token twice, none missing.

    Far above the cap tanh is 1 to the last place, and every such token has the same logit.
    """
    g = torch.Generator("cuda").manual_seed(3)
    x = (30 * torch.randn(256, 49_152, generator=g, device="cuda")).to(dtype)
    sampled = torch.randint(49_152, (256,), generator=g, device="cuda")
    found = by(x, sampled, MostProbable(64, 0.0), LogitTransform(softcap=5.0), TRITON)
    assert (found.token_ids >= 0).all()
    assert (found.token_ids.sort(-1).values.diff(dim=-1) > 0).all()
    others = x.float().gather(-1, found.token_ids[:, 1:])
    assert (others > 5 * 5).all()
    low, high = found.log_probs[:, 1:].min(-1).values, found.log_probs[:, 1:].max(-1).values
    assert (high - low <= 4 * ulp(16.0)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lower_id(dtype: torch.dtype) -> None:
    g = torch.Generator("cuda").manual_seed(1)
    for values in (1, 2, 50):
        x = (torch.randint(values, (64, 151_936), generator=g, device="cuda") / 4).to(dtype)
        sampled = torch.randint(151_936, (64,), generator=g, device="cuda")
        ours, theirs = (by(x, sampled, MostProbable(64, 0.0), PLAIN, c) for c in (TRITON, REFERENCE))
        assert torch.equal(ours.token_ids, theirs.token_ids)


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("how", ["select", "given"])
def test_rows_without_a_distribution(entropy: bool, how: str) -> None:
    """A maximum on the device ignores NaN: it is told by the sums alone."""
    for dtype in DTYPES:
        x, sampled = rows(64, 49_152, dtype)
        sampled[3] = 5
        support: Any = MostProbable(64, 1e-5)
        if how == "given":
            support = by(x, sampled, support, PLAIN, TRITON).token_ids
        for row, at in ((10, 0), (11, 49_151), (12, 25_000), (13, slice(0, 512)), (14, slice(None))):
            x[row, at] = NAN
        x[15, 7], x[16], x[3, 5] = INF, -INF, -INF
        sampled[17], sampled[18], sampled[19] = -1, 49_152, 2**32 + 5
        broken = torch.zeros(64, dtype=torch.bool, device="cuda")
        broken[[3, *range(10, 20)]] = True
        found = score(x, PLAIN, sampled, support, None, TRITON, entropy=entropy)
        assert torch.equal(found.token_ids[:, 0] < 0, broken)
        assert (found.token_ids[broken] == -1).all()
        assert (found.log_tail[broken] == 0).all()
        assert not any(number[~broken].isnan().any() for number in found)


def test_tails_that_underflow() -> None:
    x = torch.full((64, 151_936), -9000.0, device="cuda")
    x[:, 5], x[:, 6] = 0.0, -60.0
    ids = torch.tensor([[5, 6]], device="cuda").expand(64, 2)
    truth = -9000.0 + torch.tensor(151_934.0, dtype=F64).log().item()
    for support in (MostProbable(2, 0.0), ids):
        found = by(x, ids[:, 0], support, PLAIN, TRITON)
        assert torch.equal(found.token_ids, ids)
        assert (found.log_tail.double() - truth).abs().max().item() <= 2 * ulp(9000.0)


@pytest.mark.parametrize("V", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logit", [PLAIN, SCALED, CAPPED])
def test_gradients(V: int, dtype: torch.dtype, logit: LogitTransform) -> None:
    x, sampled = rows(64, V, dtype, logit)
    scores = by(x, sampled, MostProbable(64, 1e-5), logit, REFERENCE)
    arriving = upstream(scores)
    truth = exact_gradient(x, logit, scores, arriving)
    ours, theirs = torch.empty_like(x), torch.empty(x.shape, device="cuda")
    gradient(x, logit, scores, arriving, ours, TRITON)
    gradient(x, logit, scores, arriving, theirs, REFERENCE)
    allowed = (theirs.double() - truth).abs().max().item()
    slack = 2 * allowed + 2 * ulp(truth.abs().max().item())
    rounding = 0.0 if dtype == F32 else torch.finfo(dtype).eps / 2
    smallest = 0.0 if dtype == F32 else torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((ours.double() - truth).abs() <= (1 + rounding) * slack + rounding * truth.abs() + smallest).all()
    out = x.clone()
    gradient(out, logit, scores, arriving, out, TRITON)
    assert same_bits(out, ours)
    pieces = torch.full_like(x, NAN)
    for first in range(0, V, 50_001):
        part = slice(first, min(first + 50_001, V))
        gradient(x[:, part], logit, scores, arriving, pieces[:, part], TRITON, first=first)
    assert same_bits(pieces, ours)


def exact_gradient(x: Tensor, logit: LogitTransform, scores: Scores, arriving: Upstream) -> Tensor:
    """The formula of ``troll.policy.scoring`` in fp64, by the definition, a few rows at a time."""
    truth = torch.empty(x.shape, dtype=F64, device="cuda")
    for start in range(0, len(x), 8):
        at = slice(start, start + 8)
        wide = x[at].double()
        z = logit.read(wide)
        log_norm = torch.stack([z.amax(-1), (z - z.amax(-1, keepdim=True)).exp().sum(-1).log()], dim=-1)
        _, tail, entropy, _ = exact(wide, logit, scores.token_ids[at])
        part = Scores(scores.token_ids[at], scores.log_probs[at].double(), tail, entropy, log_norm)
        up = Upstream(*(None if g is None else g[at].double() for g in arriving))
        gradient(wide, logit, part, up, truth[at], REFERENCE)
    return truth


def test_many_rows_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses beyond 2³¹ elements, and scratch for a part of the rows at a time."""
    N, V = 16_384, 151_936
    x = torch.empty(N, V, dtype=BF16, device="cuda").normal_(generator=torch.Generator("cuda").manual_seed(2)).mul_(4)
    assert x.numel() > 2**31
    sampled = torch.randint(V, (N,), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    whole = by(x, sampled, MostProbable(64, 1e-5), PLAIN, TRITON)
    monkeypatch.setattr(launchers, "_WARPS", 1)
    last = by(x[-16:], sampled[-16:], MostProbable(64, 1e-5), PLAIN, TRITON)
    assert all_same_bits((number[-16:] for number in whole), last)
    theirs = by(x[-16:], sampled[-16:], MostProbable(64, 0.0), PLAIN, REFERENCE)
    ours = by(x[-16:], sampled[-16:], MostProbable(64, 0.0), PLAIN, TRITON)
    assert torch.equal(ours.token_ids, theirs.token_ids)
    arriving = upstream(whole)
    alone = torch.empty_like(x[-16:])
    gradient(x[-16:], PLAIN, last, arriving.at(slice(N - 16, N)), alone, TRITON)
    gradient(x, PLAIN, whole, arriving, x, TRITON)
    assert same_bits(x[-16:], alone)


def test_two_runs_have_the_same_bits() -> None:
    for dtype in DTYPES:
        x, sampled = rows(256, 151_936, dtype)
        runs = []
        for _ in range(2):
            scores = by(x, sampled, MostProbable(64, 1e-5), PLAIN, TRITON)
            out = torch.empty_like(x)
            gradient(x, PLAIN, scores, upstream(scores), out, TRITON)
            runs.append((*scores, out))
        assert all_same_bits(*runs)


# ---- the head and the loss -----------------------------------------------------------------------------------------


def model(N: int, V: int, H: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, the same a little off, a weight whose logits have a spread of 4, sampled tokens."""
    g = torch.Generator("cuda").manual_seed(4)
    hidden = torch.randn(4, N // 4, H, generator=g, device="cuda")
    before = hidden + 0.25 * torch.randn(hidden.shape, generator=g, device="cuda")
    weight = 4 * torch.randn(V, H, generator=g, device="cuda") / H**0.5
    sampled = (before.view(N, H) @ weight.T).softmax(-1).multinomial(1, generator=g).view(4, N // 4)
    return hidden.to(dtype), before.to(dtype), weight.to(dtype), sampled


def assert_gradients_close(a: Tensor, b: Tensor) -> None:
    """Sums of what 256 rows or all tokens contribute, each rounded to the type, and p off by as much as log p is."""
    each = max(torch.finfo(a.dtype).eps, ulp(31.0))
    torch.testing.assert_close(a, b, rtol=0, atol=8 * each * b.abs().max().item())


@pytest.mark.parametrize("how", ["sparsify", "restrict"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_head(how: str, dtype: torch.dtype) -> None:
    """From the same products: the same tokens, numbers within some roundings, gradients within those of the type."""
    hidden, before, weight, sampled = model(256, 151_936, 64, dtype)
    with torch.no_grad():
        old, _ = troll.Head(weight, impl="reference").sparsify(before, sampled, 64, 0.0)
    found = []
    for impl in ("triton", "reference"):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        head = troll.Head(leaves[1], impl=impl)  # type: ignore[arg-type]
        scored = head.restrict(leaves[0], old) if how == "restrict" else head.sparsify(leaves[0], sampled, 64, 0.0)
        policy = scored.policy
        total = policy.log_probs.mean(-1).sum() + 0.5 * policy.log_tail.sum() - scored.entropy.sum()
        total.backward()
        found.append((policy.token_ids, policy.log_probs, policy.log_tail, scored.entropy, *(x.grad for x in leaves)))
    (ids, *ours), (their_ids, *theirs) = found
    assert torch.equal(ids, their_ids)
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=8 * ulp(31.0))
    for a, b in zip(ours[3:], theirs[3:], strict=True):
        assert_gradients_close(a, b)


@pytest.mark.parametrize("tail", ["floor", "bucket"])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("way", ["whole", "chunks", "recompute"])
def test_fused_loss(tail: str, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 100 rows."""
    rows = {"whole": 256, "chunks": 100, "recompute": 0}[way]
    monkeypatch.setattr(head_module, "plan", lambda *_: Plan(way, rows * 151_936 * dtype.itemsize))  # type: ignore[arg-type]
    hidden, before, weight, sampled = model(256, 151_936, 64, dtype)
    mask = torch.rand(4, 64, generator=torch.Generator().manual_seed(5)).cuda() < 0.8
    advantages = torch.linspace(-1, 1, 4, device="cuda")
    with torch.no_grad():
        old, _ = troll.Head(weight, impl="reference").sparsify(before, sampled, 64, 1e-5)
    found = []
    for impl in ("triton", "reference"):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        head = troll.Head(leaves[1], impl=impl)  # type: ignore[arg-type]
        options: dict[str, Any] = {"kl_bound": 0.05, "tail": tail}
        if impl == "triton":
            loss, metrics = troll.fused_troll_loss(leaves[0], head, old, advantages, mask, **options)
        else:
            scored = head.restrict(leaves[0], old) if tail == "bucket" else head.sparsify(leaves[0], sampled)
            loss, metrics = troll.troll_loss(scored.policy, old, advantages, mask, impl=impl, **options)  # type: ignore[arg-type]
        loss.backward()
        found.append((loss.detach(), metrics, [x.grad for x in leaves]))
    (loss, metrics, gradients), (expected, their_metrics, their_gradients) = found
    torch.testing.assert_close(loss, expected, rtol=2e-5, atol=2e-6)
    assert metrics["projected_fraction"] > 0.1
    for name in set(metrics) - {"entropy", "solver_steps/mean", "solver_steps/max"}:
        torch.testing.assert_close(metrics[name].double(), their_metrics[name].double(), rtol=1e-4, atol=1e-5, msg=name)
    for a, b in zip(gradients, their_gradients, strict=True):
        assert_gradients_close(a, b)


def test_the_fused_loss_twice_has_the_same_bits_and_a_factor_of_one_costs_no_bit() -> None:
    hidden, before, weight, sampled = model(256, 49_152, 64, BF16)
    with torch.no_grad():
        old, _ = troll.Head(weight).sparsify(before, sampled)
    mask, advantages = torch.ones(4, 64, device="cuda"), torch.linspace(-1, 1, 4, device="cuda")
    runs = []
    for factor in (None, 1.0):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        loss, _ = troll.fused_troll_loss(leaves[0], troll.Head(leaves[1]), old, advantages, mask, kl_bound=0.05)
        (loss if factor is None else loss * factor).backward()
        runs.append((loss.detach(), *(x.grad for x in leaves)))
    assert all_same_bits(*runs)
