"""Small batches, and a slow reference of the three losses that shares nothing with the sources.

The reference works on one token after the other with plain Python floats (fp64): softmax, the kept tokens by sorting,
the common support as dictionaries, η by bisection on equation (2), the KL by its definition. What the losses hold
constant (the choice of the kept tokens, the projected side of the regression, the scale s of the sequence ratio) is
taken from ``anchor``, so that its central differences around the anchor are the gradient the losses promise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from troll import restrict, sparsify, troll_loss
from troll.policy import SparsePolicy

LN_FLOOR = math.log(1e-12)
BOUND = 0.05
"""Of the losses and of the reference here, unless a test gives another: what is by hand is by this one."""


# --- batches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Logits of both policies [B, T, V], sampled ids, advantages and mask [B, T]."""

    logits: torch.Tensor
    old_logits: torch.Tensor
    sampled: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor

    def leaf(self):
        """The logits as a new leaf that asks for its gradient."""
        return self.logits.detach().clone().requires_grad_()

    def rows(self, index):
        return Case(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def with_(self, **changes):
        return replace(self, **changes)


def make_case(seed=0, B=3, T=4, V=6, distance=0.7, dtype=torch.float64, ragged=True):
    """Random policies ``distance`` apart in their logits; ragged lengths, from the full length down to one token."""
    g = torch.Generator().manual_seed(seed)
    old_logits = 1.5 * torch.randn(B, T, V, generator=g, dtype=torch.float64)
    logits = old_logits + distance * torch.randn(B, T, V, generator=g, dtype=torch.float64)
    sampled = torch.randint(V, (B, T), generator=g)
    advantages = torch.randn(B, T, generator=g, dtype=torch.float64)
    lengths = torch.arange(B).remainder(T).mul(-1).add(T) if ragged else torch.full((B,), T)
    mask = torch.arange(T) < lengths[:, None]
    return Case(logits.to(dtype), old_logits.to(dtype), sampled, advantages.to(dtype), mask)


def policies(case, logits=None, *, tail="floor", K=None, delta=0.0, temperature=1.0, on_invalid="raise"):
    """Proposal (of ``logits``, or the case's own) and old policy; dense unless ``K`` or ``delta`` say otherwise."""
    logits = case.logits if logits is None else logits
    K = logits.shape[-1] if K is None else K
    options = {"loss_mask": case.mask, "on_invalid": on_invalid}
    with torch.no_grad():
        old = sparsify(case.old_logits, case.sampled, K, delta, temperature=temperature, **options)
    if tail == "bucket":
        return restrict(logits, old, **options), old
    return sparsify(logits, case.sampled, K, delta, temperature=temperature, **options), old


def bounded(loss_function):
    """The option that ``troll_loss`` alone has."""
    return {"kl_bound": BOUND} if loss_function is troll_loss else {}


def evaluate(loss_function, case, *, tail="floor", K=None, delta=0.0, temperature=1.0, on_invalid="raise", **options):
    """Loss, gradient on the logits, metrics."""
    options = {**bounded(loss_function), **options}
    logits = case.leaf()
    proposal, old = policies(case, logits, tail=tail, K=K, delta=delta, temperature=temperature, on_invalid=on_invalid)
    loss, metrics = loss_function(
        proposal, old, case.advantages, case.mask, tail=tail, on_invalid=on_invalid, **options
    )
    (grad,) = torch.autograd.grad(loss, logits)
    return loss.detach(), grad, metrics


def by_hand(proposal, old, ids, dtype=torch.float64, vocab_size=4):
    """Two policies from probabilities: nested lists [B][T][≤K], None for a position without a distribution."""

    def build(rows):
        K = max(len(ids[i][t]) for i in range(len(ids)) for t in range(len(ids[i])) if ids[i][t] is not None)
        shape = len(rows), len(rows[0])
        token_ids = torch.full((*shape, K), -1)
        log_probs = torch.full((*shape, K), -math.inf, dtype=torch.float64)
        log_tail = torch.zeros(shape, dtype=torch.float64)
        for i, row in enumerate(rows):
            for t, probs in enumerate(row):
                if probs is None:
                    continue
                token_ids[i, t, : len(probs)] = torch.tensor(ids[i][t])
                log_probs[i, t, : len(probs)] = torch.tensor(probs, dtype=torch.float64).log()
                tail = 1 - math.fsum(probs)
                log_tail[i, t] = math.log(tail) if tail > 1e-9 else -math.inf
        return SparsePolicy(token_ids, log_probs.to(dtype), log_tail.to(dtype), vocab_size)

    return build(proposal), build(old)


# --- one token -------------------------------------------------------------------------------------------------------


def softmax(z):
    top = max(z)
    w = [math.exp(x - top) for x in z]
    total = math.fsum(w)
    return [x / total for x in w]


def kl(p, q):
    """Σ p log(p / q)."""
    return math.fsum(x * math.log(x / y) for x, y in zip(p, q, strict=True) if x > 0)


def between(p, q, eta):
    """Equation (2): ∝ exp((η log q + log p) / (η + 1)), for strictly positive p and q."""
    return softmax([(eta * math.log(y) + math.log(x)) / (eta + 1) for x, y in zip(p, q, strict=True)])


def project_one(p, q, bound):
    """The projection of p onto KL(· ‖ q) ≤ bound, by bisection on η; and η."""
    if kl(p, q) <= bound:
        return p, 0.0
    if bound == 0:
        return q, math.inf
    low, high = 0.0, 1.0
    while kl(between(p, q, high), q) > bound:
        low, high = high, 2 * high
    while True:  # to neighbouring doubles
        eta = 0.5 * (low + high)
        if eta in (low, high):
            return between(p, q, high), high
        low, high = (eta, high) if kl(between(p, q, eta), q) > bound else (low, eta)


def kept(z, sampled, K, delta):
    """Ids kept of one position: the most probable ones until at most ``delta`` is left, ``K`` of them at most."""
    p = softmax(z)
    order = sorted(range(len(z)), key=lambda j: (-p[j], j))
    chosen, left = [], 1.0
    for j in order:
        if len(chosen) == K or (delta > 0 and left <= delta):
            break
        chosen.append(j)
        left -= p[j]
    if sampled not in chosen:
        chosen = [sampled, *chosen[: K - 1]]
    return set(chosen)


def common(z, z_old, anchor, sampled, tail, K, delta):
    """Probabilities of proposal and old policy over one support, the sampled token first."""
    p, q = softmax(z), softmax(z_old)
    in_q = kept(z_old, sampled, K, delta)
    if tail == "bucket":
        ids = [sampled, *sorted(in_q - {sampled})]
        p_rest, q_rest = (math.fsum(x[j] for j in range(len(z)) if j not in in_q) for x in (p, q))
        extra = len(in_q) < len(z)
        return [p[j] for j in ids] + [p_rest] * extra, [q[j] for j in ids] + [q_rest] * extra
    in_p = kept(anchor, sampled, K, delta)
    ids = [sampled, *sorted((in_p | in_q) - {sampled})]
    p = [p[j] if j in in_p else 1e-12 for j in ids]
    q = [q[j] if j in in_q else 1e-12 for j in ids]
    return [x / math.fsum(p) for x in p], [x / math.fsum(q) for x in q]


# --- the losses ------------------------------------------------------------------------------------------------------


def aggregate_lists(rows, rule, max_length=None):
    """Lists of the counted values of each sequence → one number."""
    rows = [row for row in rows if row]
    if rule == "token_mean":
        return math.fsum(x for row in rows for x in row) / sum(map(len, rows))
    per_row = {
        "sequence_mean": lambda row: math.fsum(row) / len(row),
        "sequence_sum": math.fsum,
        "constant": lambda row: math.fsum(row) / max_length,
    }[rule]
    return math.fsum(map(per_row, rows)) / len(rows)


def reference_troll(
    logits,
    anchor,
    case,
    *,
    bound=BOUND,
    alpha=1.0,
    tail="floor",
    K=None,
    delta=0.0,
    temperature=1.0,
    level="token",
    rule="token_mean",
    max_length=None,
    weights=None,
):
    """The TROLL loss at ``logits`` (nested lists), stop-gradients at ``anchor``; see the head of this file."""
    V = len(logits[0][0])
    rows = []
    for i, row in enumerate(case.mask.tolist()):
        log_r, log_r_anchor, pulls = [], [], []
        counted = [t for t, yes in enumerate(row) if yes]
        for t in counted:
            z, z0, z_old = (
                [x / temperature for x in zz] for zz in (logits[i][t], anchor[i][t], case.old_logits[i, t].tolist())
            )
            epsilon = bound[i][t] if isinstance(bound, list) else bound
            p, q = common(z, z_old, z0, int(case.sampled[i, t]), tail, K or V, delta)
            p0, _ = common(z0, z_old, z0, int(case.sampled[i, t]), tail, K or V, delta)
            (pi, _), (pi0, eta0) = project_one(p, q, epsilon), project_one(p0, q, epsilon)
            log_r.append(math.log(pi[0] / q[0]))
            log_r_anchor.append(math.log(pi0[0] / q[0]))
            pulls.append(kl(p, pi0) if eta0 > 0 else 0.0)
        if level == "sequence" and counted:
            s = math.exp(math.fsum(log_r_anchor) / len(counted))
            ratios = [s * math.exp(x - x0) for x, x0 in zip(log_r, log_r_anchor, strict=True)]
        else:
            ratios = [math.exp(x) for x in log_r]
        A = [case.advantages[i, t].item() for t in counted]
        w = [1.0 if weights is None else weights[i, t].item() for t in counted]
        rows.append([alpha * pull - ww * r * a for pull, ww, r, a in zip(pulls, w, ratios, A, strict=True)])
    return aggregate_lists(rows, rule, max_length)


def central_differences(f, x, step=1e-5):
    """∂f/∂x of a function of a nested list, from a tensor x [B, T, V]."""
    grad = torch.zeros_like(x)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in x.shape)).tolist():
        values = []
        for sign in (1, -1):
            moved = x.detach().clone()
            moved[tuple(index)] += sign * step
            values.append(f(moved.tolist()))
        grad[tuple(index)] = (values[0] - values[1]) / (2 * step)
    return grad
