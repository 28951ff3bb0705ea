"""The two solvers: t in (0, 1) with KL(π_t ‖ π_old) = ε on the geodesic.

``solve_newton``, the default, is a safeguarded Newton method. With s = t² Var / KL, which is d log KL / d log t by (5):

- near t = 0 the KL is quadratic in t (s = 2), √KL is linear, and Newton on √KL converges at once;
- where a token that the old policy all but excluded takes over, the KL is exponential in t (s ≫ 2), and Newton on
  log KL does.

Each row takes the step that fits its s, inside a bracket that only shrinks; a step that leaves the bracket is replaced
by the geometric mean of its ends. The bracket starts at [√(8ε)/R, 1], R the range of d: by (5) and Var ≤ R²/4 the KL at
its left end is at most ε. Nearly every row is done after three or four steps. The KL of the others has a plateau close
to ε, where tangents say little: after six steps their brackets are cut into 32 parts, three times, and Newton takes
over again.

``solve_bracketing`` is the n-ary bracketing of the dual variable η of the authors of TROLL, as oracle and comparison.
It shares only the definition of the KL with the other one: the candidate is written as in (2), and η is found by
evaluating a fixed number of candidates a step and keeping the interval that holds the root. The authors take 8
candidates, at most 20 steps, η in [1e-7, 100] and a tolerance of 1e-5. An η of 100 is too small for a small ε; here the
ends are moved until the root lies between them, and the steps continue to the last digit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from troll.policy import token_kl
from troll.projection.geodesic import moments, point

_NEWTON_STEPS = 6
_CUTS = 3
_PARTS = 32
_MAX_STEPS = 64
_LAST_STEP_BELOW = 1e-7  # relative error of the KL from which one more quadratic step reaches 1e-12
_EXPONENTIAL_ABOVE = 2.5
CANDIDATES = 8
BRACKET = (1e-7, 100.0)
MAX_BRACKETING_STEPS = 40
_TOLERANCE = 1e-14  # of log η
_WIDEN = math.log(100.0)


class Solution(NamedTuple):
    """What a solver returns, for every row."""

    mix: Tensor
    """[N] t = 1/(1+η)."""
    iterations: Tensor
    """[N] steps taken: points of the path that were looked at one after another."""
    converged: Tensor
    """[N] False where the step limit was reached first."""


class _Search(NamedTuple):
    """Where the search stands, for every row [N]."""

    mix: Tensor
    low: Tensor
    high: Tensor
    done: Tensor
    iterations: Tensor

    def at(self, rows: Tensor) -> _Search:
        return _Search(*(x[rows] for x in self))

    def put(self, rows: Tensor, part: _Search) -> _Search:
        return _Search(*(x.index_copy(0, rows, y) for x, y in zip(self, part, strict=True)))


def solve_newton(log_old: Tensor, d: Tensor, kl_bound: Tensor) -> Solution:
    """t with KL(π_t ‖ π_old) = ``kl_bound`` [N], for rows [N, K] whose KL at t = 1 exceeds it."""
    search = _newton(log_old, d, kl_bound, _start(log_old, d, kl_bound), _NEWTON_STEPS)
    rows = (~search.done).nonzero()[:, 0]
    if rows.numel() > 0:
        hard = log_old[rows], d[rows], kl_bound[rows]
        part = search.at(rows)
        for _ in range(_CUTS):
            part = _cut(*hard, part)
        search = search.put(rows, _newton(*hard, part, _MAX_STEPS))
    # The lower end of the bracket is inside the region, for rows that would never be done.
    return Solution(torch.where(search.done, search.mix, search.low), search.iterations, search.done)


def _start(log_old: Tensor, d: Tensor, kl_bound: Tensor) -> _Search:
    inside = log_old > -torch.inf
    spread = d.masked_fill(~inside, -torch.inf).amax(-1) - d.masked_fill(~inside, torch.inf).amin(-1)
    low, high = (8 * kl_bound).sqrt() / spread, torch.ones_like(kl_bound)
    # First guesses from both ends of the path: KL ≈ t² KL(1) and KL ≈ t² Var_{π_old}[d] / 2; and where the KL is
    # exponential at the end, as for a token that only the proposal kept, a Newton step from there.
    end = point(log_old, d, high)
    mix = torch.minimum((kl_bound / end.kl).sqrt(), (2 * kl_bound / moments(log_old, d)[1]).sqrt())
    slope = end.variance / end.kl
    late = 1 + _relative_step(kl_bound / end.kl, slope)
    mix = torch.where((slope > _EXPONENTIAL_ABOVE) & (late > mix), late, mix)
    mix = torch.minimum(torch.maximum(mix, low), high)
    return _Search(mix, low, high, torch.zeros_like(inside[:, 0]), torch.zeros_like(mix, dtype=torch.int64))


def _newton(log_old: Tensor, d: Tensor, kl_bound: Tensor, search: _Search, steps: int) -> _Search:
    """At most so many safeguarded Newton steps; stops when all rows are done."""
    mix, low, high, done, iterations = search
    for _ in range(steps):
        here = point(log_old, d, mix)
        iterations = iterations + ~done
        low = torch.where(here.kl < kl_bound, mix, low)
        high = torch.where(here.kl < kl_bound, high, mix)
        step = mix * (1 + _relative_step(kl_bound / here.kl, mix.square() * here.variance / here.kl))
        close = (here.kl - kl_bound).abs() <= _LAST_STEP_BELOW * kl_bound
        step = torch.where(close | ((step > low) & (step < high)), step, (low * high).sqrt())
        mix = torch.where(done, mix, step)
        done = done | close
        if bool(done.all()):
            break
    return _Search(mix, low, high, done, iterations)


def _relative_step(ratio: Tensor, s: Tensor) -> Tensor:
    """Newton's Δt / t on √KL or on log KL, for ``ratio`` = ε / KL."""
    return torch.where(s > _EXPONENTIAL_ABOVE, ratio.log(), 2 * (ratio.sqrt() - 1)) / s


def _cut(log_old: Tensor, d: Tensor, kl_bound: Tensor, search: _Search) -> _Search:
    """Cut the brackets into parts of equal ratio and keep, of each, the part that holds the root."""
    ratio = (search.high / search.low) ** (1 / _PARTS)
    below = torch.zeros_like(search.iterations)
    for i in range(1, _PARTS):
        below += point(log_old, d, search.low * ratio**i).kl < kl_bound
    low, high = search.low * ratio**below, search.low * ratio ** (below + 1)
    return search._replace(mix=(low * high).sqrt(), low=low, high=high, iterations=search.iterations + 1)


def solve_bracketing(log_old: Tensor, d: Tensor, kl_bound: Tensor) -> Solution:
    """t = 1/(1+η) with KL = ``kl_bound`` [N], for rows [N, K] whose KL at η = 0 exceeds it."""
    log_proposal = log_old + d
    low, high = (torch.full_like(kl_bound, end).log() for end in BRACKET)
    while bool((outside := _kl(log_old, log_proposal, high) > kl_bound).any()):
        low, high = torch.where(outside, high, low), torch.where(outside, high + _WIDEN, high)
    while bool((inside := _kl(log_old, log_proposal, low) <= kl_bound).any()):
        low, high = torch.where(inside, low - _WIDEN, low), torch.where(inside, low, high)
    iterations = torch.zeros_like(kl_bound, dtype=torch.int64)
    for _ in range(MAX_BRACKETING_STEPS):
        open_ = high - low > _TOLERANCE * torch.maximum(high.abs(), torch.ones_like(high))
        if not bool(open_.any()):
            break
        iterations += open_
        width = high - low
        # The KL falls with η: count the candidates that are still outside the trust region.
        count = torch.zeros_like(iterations)
        for i in range(1, CANDIDATES + 1):
            count += _kl(log_old, log_proposal, low + i * width / (CANDIDATES + 1)) > kl_bound
        low, high = low + count * width / (CANDIDATES + 1), low + (count + 1) * width / (CANDIDATES + 1)
    return Solution(
        1 / (1 + high.exp()), iterations, high - low <= 1e-12 * torch.maximum(high.abs(), torch.ones_like(high))
    )


def _kl(log_old: Tensor, log_proposal: Tensor, log_eta: Tensor) -> Tensor:
    """KL(π ‖ π_old) for π ∝ exp((η log π_old + log π̃)/(η + 1))."""
    eta = log_eta.exp()[:, None]
    return token_kl(((eta * log_old + log_proposal) / (eta + 1)).log_softmax(-1), log_old)
