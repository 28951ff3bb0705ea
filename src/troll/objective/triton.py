"""Two sparse policies → what the objective needs of a token, one kernel forward and one backward, a row per program.

The definition is ``constrain`` in ``troll.objective``: ``align``, ``project_normalised``, then the log-ratio of the
sampled token and the regression. Nothing of the size of the joined support is written to memory, and nothing in between
is rounded: fp32 policies give what the definition gives for them in fp64, rounded once. No projected policy is stored,
so none is moved inside the region for its rounding to fp32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from troll.implementation import on_device
from troll.projection.triton import _INF, kl_terms, normalised, path, point, search, warps

WRONG_SAMPLED, WRONG_SUPPORT, WRONG_BOUND, LOST_MASS = 1, 2, 4, 8
"""What ``Constrained.faults`` is made of."""


_UNIT = tl.constexpr(2.0**-53)

Rows = tuple[Tensor, Tensor, Tensor]
"""A sparse policy: token ids [N, K], log-probabilities [N, K], log of the dropped mass [N]."""


class Constrained(NamedTuple):
    """Numbers of each row [N]; the first two carry gradient."""

    log_ratio: Tensor
    regression: Tensor
    mix: Tensor
    eta: Tensor
    kl_before: Tensor
    kl_after: Tensor
    lost_mass: Tensor
    active: Tensor
    converged: Tensor
    iterations: Tensor
    faults: Tensor
    """[1] int32, the sum of the faults that were seen in any row."""


def constrain(proposal: Rows, old: Rows, kl_bound: Tensor, bucket: bool, log_floor: float) -> Constrained:
    """``kl_bound`` is [N], expanded where it is one number; ``bucket`` is the tail, else floor."""
    rows = (x.contiguous() for x in (*proposal, *old))
    log_ratio, pull, numbers, flags, iterations, faults = _Constrain.apply(*rows, kl_bound, bucket, log_floor)
    mix, eta, kl_before, kl_after, lost_mass = numbers.unbind()
    active, converged = flags.unbind()
    return Constrained(log_ratio, pull, mix, eta, kl_before, kl_after, lost_mass, active, converged, iterations, faults)


class _Constrain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        *rows, kl_bound, bucket, log_floor = inputs
        ids, log_probs, log_tail, old_ids, _, _ = rows
        N, device = len(ids), ids.device
        log_ratio, pull = torch.empty_like(log_tail), torch.empty_like(log_tail)
        numbers = torch.empty(5, N, dtype=log_probs.dtype, device=device)
        flags = torch.empty(2, N, dtype=torch.bool, device=device)
        iterations = torch.empty(N, dtype=torch.int64, device=device)
        mix = torch.empty(N, dtype=torch.float64, device=device)
        faults = torch.zeros(1, dtype=torch.int32, device=device)
        ctx.settings = _settings(ids, old_ids, bucket, log_floor)
        outputs = log_ratio, pull, numbers, flags, iterations, mix, faults
        if N > 0:
            with on_device(device):
                _constrain[(N,)](*rows, kl_bound, *outputs, N, kl_bound.stride(0), **ctx.settings)
        ctx.save_for_backward(*rows, mix)
        ctx.mark_non_differentiable(numbers, flags, iterations, faults)
        ctx.set_materialize_grads(False)
        return log_ratio, pull, numbers, flags, iterations, faults

    @staticmethod
    def backward(ctx: Any, on_ratio: Tensor | None, on_pull: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if on_ratio is None and on_pull is None:
            return (None,) * 9
        grad, grad_tail = _Gradient.apply(*ctx.saved_tensors, on_ratio, on_pull, ctx.settings)
        return None, grad, grad_tail, *(None,) * 6


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        *rows, mix, on_ratio, on_pull, settings = inputs
        grad, grad_tail = torch.empty_like(rows[1]), torch.empty_like(rows[2]) if settings["BUCKET"] else None
        strides = (0 if x is None else x.stride(0) for x in (on_ratio, on_pull))
        if len(mix) > 0:
            with on_device(mix.device):
                _constrain_backward[(len(mix),)](*rows, mix, on_ratio, on_pull, grad, grad_tail, *strides, **settings)
        return grad, grad_tail

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(
            "the projection has no second derivative: it was differentiated twice (create_graph=True, a Hessian, a "
            "gradient penalty). Differentiate once, or detach what the second one begins with."
        )


def _settings(token_ids: Tensor, old_ids: Tensor, bucket: bool, log_floor: float) -> dict[str, Any]:
    K, old_K = token_ids.shape[1], old_ids.shape[1]
    slots = triton.next_power_of_2(K + 1) if bucket else 2 * triton.next_power_of_2(max(K, old_K))
    return {
        "K": K,
        "OLD_K": old_K,  # not compiled for, as they change from batch to batch
        "BUCKET": bucket,
        "LOG_FLOOR": log_floor,
        "S": slots,
        "num_warps": warps(slots),
    }


@triton.jit
def _join(
    ids,
    log_probs,
    log_tail,
    old_ids,
    old_log_probs,
    old_log_tail,
    row,
    slot,
    K,
    OLD_K,
    LOG_FLOOR: tl.constexpr,
    S: tl.constexpr,
):
    """The joined support: slots of the old policy, then those of the proposal that it has not.

    Returns log-probabilities of both, and for every slot which slot of the proposal it stands for (−1: none) and
    whether that holds a token.
    """
    half: tl.constexpr = S // 2
    ids, log_probs = ids + row * K, log_probs + row * K
    old_ids, old_log_probs = old_ids + row * OLD_K, old_log_probs + row * OLD_K
    of_old = slot < half
    own = tl.where(of_old, slot, slot - half)
    at_old, at_new = of_old & (own < OLD_K), (slot >= half) & (own < K)
    token = tl.load(old_ids + own, mask=at_old, other=-1) + tl.load(ids + own, mask=at_new, other=-1) + 1
    token = tl.where(token < 0, -2, token).to(tl.int32)  # unlike the −1 of an unused slot on the other side
    log_q = tl.load(old_log_probs + own, mask=at_old, other=-_INF).to(tl.float64)
    partner = tl.full((S,), -1, tl.int32)  # the slot that has the same token on the other side
    last = tl.max(tl.where(token >= 0, own, -1), 0)
    for other in range(0, last + 1):
        new_token = tl.load(ids + other, mask=other < K, other=-1).to(tl.int32)
        old_token = tl.load(old_ids + other, mask=other < OLD_K, other=-1).to(tl.int32)
        partner = tl.where(token == tl.where(of_old, new_token, old_token), other, partner)
    alone = (token >= 0) & (partner < 0)
    p_floor = tl.where(tl.load(log_tail + row) == -_INF, -_INF, tl.full((), LOG_FLOOR, tl.float64))
    q_floor = tl.where(tl.load(old_log_tail + row) == -_INF, -_INF, tl.full((), LOG_FLOOR, tl.float64))
    source = tl.where(of_old, partner, tl.where(at_new & (partner < 0), own, -1))
    taken = (source >= 0) & (token >= 0)
    log_p = tl.load(log_probs + source, mask=taken, other=-_INF).to(tl.float64)
    log_p = tl.where(alone & of_old, p_floor, log_p)
    log_q = tl.where(alone & (slot >= half), q_floor, log_q)
    return log_p, log_q, source, taken


@triton.jit
def _policies(
    ids,
    log_probs,
    log_tail,
    old_ids,
    old_log_probs,
    old_log_tail,
    row,
    slot,
    K,
    OLD_K,
    BUCKET: tl.constexpr,
    LOG_FLOOR: tl.constexpr,
    S: tl.constexpr,
):
    """``align``, before it is normalised: log-probabilities of both, and where a gradient goes, as ``_join`` has it.

    A row that is masked out on either side is one-hot on both, which has no gradient.
    """
    if BUCKET:
        log_p = tl.load(log_probs + row * K + slot, mask=slot < K, other=-_INF).to(tl.float64)
        log_q = tl.load(old_log_probs + row * K + slot, mask=slot < K, other=-_INF).to(tl.float64)
        log_p = tl.where(slot == K, tl.load(log_tail + row).to(tl.float64), log_p)
        log_q = tl.where(slot == K, tl.load(old_log_tail + row).to(tl.float64), log_q)
        source = tl.where(slot <= K, slot, -1)
        taken = source >= 0
    else:
        log_p, log_q, source, taken = _join(
            ids, log_probs, log_tail, old_ids, old_log_probs, old_log_tail, row, slot, K, OLD_K, LOG_FLOOR, S
        )
    valid = (tl.load(ids + row * K) >= 0) & (tl.load(old_ids + row * OLD_K) >= 0)
    one_hot = tl.where(slot == 0, 0.0, -_INF)
    return tl.where(valid, log_p, one_hot), tl.where(valid, log_q, one_hot), source, taken


@triton.jit
def _first(x, slot):
    """The number in slot 0."""
    return tl.sum(tl.where(slot == 0, x, 0.0), 0)


@triton.jit
def _constrain(
    ids,
    log_probs,
    log_tail,
    old_ids,
    old_log_probs,
    old_log_tail,
    kl_bound,
    log_ratio,
    pull,
    numbers,
    flags,
    iterations,
    mix,
    faults,
    N,
    bound_stride,
    K,
    OLD_K,
    BUCKET: tl.constexpr,
    LOG_FLOOR: tl.constexpr,
    S: tl.constexpr,
):
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, S)
    bound = tl.load(kl_bound + row * bound_stride).to(tl.float64)
    log_p, log_q, _source, _taken = _policies(
        ids, log_probs, log_tail, old_ids, old_log_probs, old_log_tail, row, slot, K, OLD_K, BUCKET, LOG_FLOOR, S
    )
    outside = (log_q == -_INF) & (log_p > -_INF)
    lost = tl.full((), 0.0, tl.float64)
    if tl.max(outside.to(tl.int32), 0) > 0:
        lost = tl.sum(tl.where(outside, tl.exp(normalised(log_p)), 0.0), 0)
    log_p = normalised(tl.where(outside, -_INF, log_p))
    log_old, q, d = path(log_p, log_q, slot, LOG_FLOOR)
    kl, t, steps, found = search(log_p, log_q, log_old, q, d, bound, _UNIT)
    ratio = _first(log_p, slot) - _first(log_old, slot)
    regression, after = tl.full((), 0.0, tl.float64), kl
    if t < 1:
        pi, delta, _centred, after, _variance = point(log_old, q, d, t)
        ratio, after = tl.where(t > 0, _first(delta, slot), 0.0), tl.where(t > 0, after, 0.0)
        inside = (log_p > -_INF) & (log_old > -_INF)
        away = tl.where(inside, log_p, 0.0) - tl.where(inside, log_old + delta, 1.0)
        regression = tl.sum(kl_terms(tl.exp(log_p), pi, away), 0)
    tl.store(log_ratio + row, ratio)
    tl.store(pull + row, regression)
    tl.store(numbers + row, t)
    tl.store(numbers + N + row, tl.where(t > 0, (1.0 - t) / tl.where(t > 0, t, 1.0), _INF))
    tl.store(numbers + 2 * N + row, kl)
    tl.store(numbers + 3 * N + row, after)
    tl.store(numbers + 4 * N + row, lost)
    tl.store(flags + row, t < 1)
    tl.store(flags + N + row, found)
    tl.store(iterations + row, steps)
    tl.store(mix + row, t)
    sampled, old_sampled = tl.load(ids + row * K), tl.load(old_ids + row * OLD_K)
    wrong = ((sampled != old_sampled) & (sampled >= 0) & (old_sampled >= 0)).to(tl.int32)
    if BUCKET:
        new_id = tl.load(ids + row * K + slot, mask=slot < K, other=-1)
        old_id = tl.load(old_ids + row * K + slot, mask=slot < K, other=-1)
        wrong += 2 * tl.max(((new_id != old_id) & (new_id >= 0)).to(tl.int32), 0)
    wrong += 4 * (1 - (bound >= 0).to(tl.int32)) + 8 * (lost > 0).to(tl.int32)
    if wrong > 0:
        tl.atomic_or(faults, wrong)


@triton.jit
def _constrain_backward(
    ids,
    log_probs,
    log_tail,
    old_ids,
    old_log_probs,
    old_log_tail,
    mix,
    on_ratio,
    on_pull,
    grad,
    grad_tail,
    ratio_stride,
    pull_stride,
    K,
    OLD_K,
    BUCKET: tl.constexpr,
    LOG_FLOOR: tl.constexpr,
    S: tl.constexpr,
):
    """The gradient on log π̃ by (7) and by the regression, ∂KL(π̃ ‖ ⌊π⌋)/∂ log π̃ = π̃ (log π̃ − log π); then that of the
    normalisation, g − π̃ Σg."""
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, S)
    log_p, log_q, source, taken = _policies(
        ids, log_probs, log_tail, old_ids, old_log_probs, old_log_tail, row, slot, K, OLD_K, BUCKET, LOG_FLOOR, S
    )
    log_p = normalised(tl.where(log_q == -_INF, -_INF, log_p))
    kept = log_p > -_INF
    t = tl.load(mix + row)
    upstream = tl.full((), 0.0, tl.float64)
    if on_ratio is not None:
        upstream = tl.load(on_ratio + row * ratio_stride).to(tl.float64)
    g = tl.where(slot == 0, upstream, 0.0)
    if t < 1:
        log_old, q, d = path(log_p, log_q, slot, LOG_FLOOR)
        pi, delta, centred, _kl, variance = point(log_old, q, d, t)
        along = upstream * _first(centred, slot) / tl.where(variance > 0, variance, _INF)
        g = t * (g - pi * (upstream + centred * along))
        if on_pull is not None:
            inside = kept & (log_old > -_INF)
            away = tl.where(inside, log_p, 0.0) - tl.where(inside, log_old + delta, 0.0)
            g += tl.load(on_pull + row * pull_stride).to(tl.float64) * tl.exp(log_p) * away
    g = tl.where(kept, g, 0.0)
    g = tl.where(taken & kept, g - tl.exp(log_p) * tl.sum(g, 0), 0.0)
    tl.store(grad + row * K + source, g, mask=(source >= 0) & (source < K))
    if BUCKET:
        tl.store(grad_tail + row + slot * 0, g, mask=slot == K)
