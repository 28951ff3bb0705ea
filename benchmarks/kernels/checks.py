"""Correctness, before anything is timed.

Truth is fp64. The budget is the error of plain PyTorch on the same inputs in the type that is timed: a way of ours may
be no further from the truth. Norms over many numbers are compared with 10 % of room, which is what independent rounding
of the same products can differ by; single numbers are given the rounding of one number. Peers are shown beside and
decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ours
import peers
import torch
from measure import reason
from problem import KL_BOUND, TAIL_MASS, Problem
from torch import Tensor

import troll
from troll.objective import constrain

ROOM = 1.1
ROWS = {"cuda": 1024, "cpu": 256}
GROSS = 0.15  # at the timed size: an address that overflowed, a chunk of a fortieth of the tokens left out


class Checks:
    """What was compared, with verdicts."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.part = ""

    def add(self, size: Any, way: str, what: str, error: float, allowed: float, ours: bool = True) -> None:
        """``error`` ≤ ``allowed``, or the run is red; NaN is red."""
        ok = error <= allowed
        about = {"part": self.part, "size": str(size), "way": way, "what": what}
        self.lines.append({**about, "error": error, "allowed": allowed, "ok": ok, "ours": ours})
        verdict = "ok" if ok else ("RED" if ours else "further from the truth")
        print(f"    {way}: {what} {error:.3g}, allowed {allowed:.3g}: {verdict}", flush=True)

    def failed(self, size: Any, way: str, error: Exception) -> None:
        """A way that could not be checked: its times are not reported."""
        print(f"    {way}: not checked, {reason(error)}", flush=True)
        about = {"part": self.part, "size": str(size), "way": way, "what": "not checked"}
        self.lines.append({**about, "failed": reason(error), "ok": True, "ours": "troll, " in way})

    def unchecked(self, part: str, size: Any, way: str) -> str | None:
        """Why there is no check of this way, if it is one that needs it."""
        key = (part, str(size), way)
        found = (x["failed"] for x in self.lines if "failed" in x and (x["part"], x["size"], x["way"]) == key)
        return next(found, None)

    @property
    def red(self) -> list[str]:
        """What is wrong."""
        return [f"{x['size']} {x['way']}: {x['what']}" for x in self.lines if not x["ok"] and x["ours"]]


def _norm(x: Tensor, truth: Tensor) -> float:
    """‖x − truth‖ / ‖truth‖ over what is finite in the truth."""
    at = truth.isfinite()
    return ((x.double() - truth.double())[at].norm() / truth.double()[at].norm().clamp(min=1e-300)).item()


def _furthest(x: Tensor, truth: Tensor) -> float:
    """The largest difference; inf where one is finite and the other not, NaN where one is NaN."""
    x, truth = x.double(), truth.double()
    difference = torch.where(x == truth, 0.0, (x - truth).abs())
    return float("nan") if bool(difference.isnan().any()) else difference.max().item()


def _ulp(truth: Tensor) -> float:
    """Spacing of fp32 at the largest finite number."""
    return torch.finfo(torch.float32).eps * truth[truth.isfinite()].abs().max().item()


def _gathered(log_p: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities at the kept ids and log of the mass outside them."""
    used = ids >= 0
    at = torch.where(used, log_p.gather(-1, ids.clamp(min=0)), -torch.inf)
    kept = torch.zeros_like(log_p).scatter_add_(1, ids.clamp(min=0), used.to(log_p.dtype)) > 0
    return at, log_p.masked_fill(kept, -torch.inf).logsumexp(-1)


def selection(checks: Checks, problem: Problem, impls: tuple[str, ...]) -> None:
    """Ids equal to the reference's on all rows and on rows made to be difficult; numbers against fp64 on some."""
    size = problem.size
    logits = problem.logits()
    hard = _difficult(logits[:64])
    for impl in impls:
        way = f"troll, {impl}"
        try:
            mine = ours.select(problem, logits, impl)
            reference = ours.select(problem, logits, "reference")
            wrong = (mine.token_ids != reference.token_ids).any(-1).sum().item()
            checks.add(size, way, "rows with other ids than the reference", wrong, 0)
            few = replace(problem, sampled=hard.argmax(-1))
            mine_hard, reference_hard = (ours.select(few, hard, x) for x in (impl, "reference"))
            wrong = (mine_hard.token_ids != reference_hard.token_ids).any(-1).sum().item()
            checks.add(size, way, "difficult rows (ties, −inf, one token) with other ids", wrong, 0)
            rows = slice(0, ROWS[logits.device.type] // 4)
            truth = logits[rows].double().log_softmax(-1)
            plain = logits[rows].float().log_softmax(-1)
            ids = mine.token_ids[rows]
            exact, tail = _gathered(truth, ids)
            near, near_tail = _gathered(plain, ids)
            for what, x, t, p in (
                ("log-probabilities", mine.log_probs[rows], exact, near),
                ("log of the tail", mine.log_tail[rows], tail, near_tail),
            ):
                checks.add(size, way, what, _furthest(x, t), _furthest(p, t) + _ulp(t))
        except Exception as error:
            checks.failed(size, way, error)


def _difficult(logits: Tensor) -> Tensor:
    """Rows with ties, with excluded tokens, with one token, with all tokens alike."""
    z = logits.clone()
    z[0] = 0.0
    z[1] = -torch.inf
    z[1, 7] = 1.0
    z[2:16] = z[2:16].round()
    z[16:48] = z[16:48].masked_fill(torch.rand_like(z[16:48], dtype=torch.float32) < 0.3, -torch.inf)
    z[48:] = z[48:] * 1e-3
    return z


@torch.no_grad()
def scoring(checks: Checks, problem: Problem, impls: tuple[str, ...]) -> None:
    """Log-probabilities, tail and entropy from hidden states against fp64 products, and that the largest were kept."""
    part = problem.head(min(problem.size.N, ROWS[problem.hidden.device.type]))
    z = part.hidden.double() @ part.weight.double().t()
    truth, plain = z.log_softmax(-1), part.logits().float().log_softmax(-1)

    def entropies(log_p: Tensor) -> Tensor:
        return -(log_p.exp() * log_p).sum(-1)

    ways: dict[str, Callable[[], tuple[Any, Tensor]]] = {
        f"troll, {impl}": lambda impl=impl: ours.score(part, impl)  # type: ignore[misc]
        for impl in impls
    }
    for way, run in ways.items():
        try:
            policy, entropy = run()
            exact, tail = _gathered(truth, policy.token_ids)
            near, near_tail = _gathered(plain, policy.token_ids)
            for what, x, t, p in (
                ("log-probabilities", policy.log_probs, exact, near),
                ("log of the tail", policy.log_tail, tail, near_tail),
                ("entropy", entropy, entropies(truth), entropies(plain)),
            ):
                checks.add(problem.size, way, what, _norm(x, t), ROOM * _norm(p, t))
            # Two logits, each rounded to the type: a dropped one may be larger than a kept one by one spacing.
            ids = torch.where(policy.token_ids >= 0, policy.token_ids, policy.token_ids[:, :1])
            dropped = z.scatter(1, ids, -torch.inf).amax(-1)
            others = z.gather(-1, ids).masked_fill(policy.token_ids < 0, torch.inf)[:, 1:]
            excess = (dropped - others.amin(-1)).max().item()  # slot 0 is kept whatever its logit
            spacing = (torch.finfo(part.hidden.dtype).eps + 1e-5) * z.abs().max().item()
            checks.add(problem.size, way, "largest dropped logit above the smallest kept", excess, spacing)
        except Exception as error:
            checks.failed(problem.size, way, error)
    try:
        log_probs, entropy = peers.trl_scores(part)
        exact, near = (x.gather(-1, part.sampled[:, None])[:, 0] for x in (truth, plain))
        checks.add(
            problem.size, "TRL", "log-probabilities", _norm(log_probs, exact), ROOM * _norm(near, exact), ours=False
        )
        limit = ROOM * _norm(entropies(plain), entropies(truth))
        checks.add(problem.size, "TRL", "entropy", _norm(entropy, entropies(truth)), limit, ours=False)
    except Exception as error:
        checks.failed(problem.size, "TRL", error)


def loss(checks: Checks, problem: Problem, ways: dict[str, tuple[str, Callable[[Problem], Tensor]]]) -> None:
    """Loss and gradients of hidden states and weight, for ways that are (objective, function).

    Not counted are tokens whose KL is within a fifth of the bound, where the gradient jumps, and for the floor those
    where rounding changes which tokens are kept: there, two right answers differ by more than rounding.
    """
    whole = problem.head(min(problem.size.N, ROWS[problem.hidden.device.type]))
    for objective in ("clip", "bucket", "floor"):
        mine = {name: f for name, (kind, f) in ways.items() if kind == objective}
        part = _steady(whole, objective) if objective != "clip" else whole
        share = part.loss_mask.float().mean().item()
        if share == 0.0:
            checks.failed(problem.size, objective, RuntimeError("no token is clear of the kink"))
            continue
        truth = _gradients(_as(part, torch.float64), objective)
        plain = _gradients(part, objective)
        count = part.loss_mask.sum().item()
        per_token = (plain["tokens"].double() - truth["tokens"])[part.loss_mask]
        spread = 4 * (per_token.square().mean() / count).sqrt().item() + 4 * _ulp(truth["tokens"])
        for name, function in mine.items():
            try:
                part.forget()
                value = function(part)
                value.backward()
                yours = name.startswith("troll")
                checks.add(problem.size, name, "loss", abs(value.item() - truth["loss"].item()), spread, yours)
                for what in ("hidden", "weight"):
                    error = _norm(getattr(part, what).grad, truth[what])
                    limit = ROOM * _norm(plain[what], truth[what])
                    checks.add(problem.size, name, f"gradient of {what}", error, limit, yours)
            except Exception as error:
                checks.failed(problem.size, name, error)
        part.forget()


def _as(part: Problem, dtype: torch.dtype) -> Problem:
    old = part.old
    return replace(
        part,
        hidden=part.hidden.detach().to(dtype).requires_grad_(),
        weight=part.weight.detach().to(dtype).requires_grad_(),
        old=troll.SparsePolicy.trusted(
            old.token_ids, old.log_probs.to(dtype), old.log_tail.to(dtype), old.vocab_size, 1.0
        ),
        advantages=part.advantages.to(dtype),
    )


def _gradients(part: Problem, objective: str) -> dict[str, Tensor]:
    """The plain computation, in the type of the problem."""
    part.forget()
    logits = part.hidden @ part.weight.t()
    if objective == "clip":
        tokens = peers.clip_losses(peers.plain_log_probs(logits, part.sampled), part)
    else:
        tokens = ours.materialised(part, logits, objective)
    value = ours.mean(tokens, part)
    value.backward()
    assert part.hidden.grad is not None
    assert part.weight.grad is not None
    result = {"tokens": tokens.detach(), "loss": value.detach(), "hidden": part.hidden.grad, "weight": part.weight.grad}
    part.forget()
    return result


@torch.no_grad()
def _steady(part: Problem, tail: str, policy: troll.SparsePolicy | None = None) -> Problem:
    """The problem with a mask that leaves out tokens where two right answers differ; of this policy, if given."""
    exact = _as(part, torch.float64)
    same = torch.ones_like(part.loss_mask)
    if policy is not None:
        proposal = troll.SparsePolicy.trusted(
            policy.token_ids, policy.log_probs.double(), policy.log_tail.double(), policy.vocab_size, 1.0
        )
    elif tail == "bucket":
        proposal = troll.restrict(exact.logits(), exact.old, **ours.with_impl(troll.restrict, "reference"))
    else:
        proposal = ours.reference_sparsify(exact.logits(), part.sampled, part.size.K, TAIL_MASS)
        rounded = ours.reference_sparsify(part.logits(), part.sampled, part.size.K, TAIL_MASS)
        same = (proposal.token_ids.sort(-1).values == rounded.token_ids.sort(-1).values).all(-1)
    step = constrain(proposal, exact.old, KL_BOUND, tail=tail, **ours.with_impl(constrain, "reference"))
    clear = (step.projection.kl_before / KL_BOUND - 1).abs() > 0.2
    return replace(part, loss_mask=part.loss_mask & clear & same)


def projection(checks: Checks, size: Any, proposal: Tensor, old: Tensor, impls: tuple[str, ...]) -> None:
    """The projected policy and its gradient against fp64, and the bound on what is stored."""
    rows = slice(0, 512)

    def run(p: Tensor, q: Tensor, **named: Any) -> tuple[troll.Projection, Tensor]:
        x = p[rows].detach().clone().requires_grad_()
        y = troll.project(x.log_softmax(-1), q[rows].log_softmax(-1), KL_BOUND, **named)
        g = torch.linspace(-1, 1, y.log_probs.numel(), device=x.device, dtype=torch.float64).sin()
        (y.log_probs * g.view_as(y.log_probs).to(x.dtype)).sum().backward()
        assert x.grad is not None
        return y, x.grad

    named = ours.with_impl(troll.project, "reference")
    truth, exact_gradient = run(proposal.double(), old.double(), **named)
    plain, plain_gradient = run(proposal, old, **named)
    clear = (truth.kl_before / KL_BOUND - 1).abs() > 1e-3
    for impl in impls:
        way = f"project, troll, {impl}"
        try:
            mine, gradient = run(proposal, old, **ours.with_impl(troll.project, impl))
            for what, x, t, p in (
                ("probabilities", mine.log_probs.exp(), truth.log_probs.exp(), plain.log_probs.exp()),
                ("gradient", gradient, exact_gradient, plain_gradient),
            ):
                checks.add(size, way, what, _norm(x[clear], t[clear]), ROOM * _norm(p[clear], t[clear]))
            checks.add(size, way, "largest KL after / bound − 1", mine.kl_after.max().item() / KL_BOUND - 1, 1e-6)
        except Exception as error:
            checks.failed(size, way, error)


def constrained(checks: Checks, problem: Problem, impls: tuple[str, ...]) -> None:
    """Losses per token and their gradients on the policy's numbers, by ``constrain``, against fp64."""
    part = problem.head(min(problem.size.N, ROWS[problem.hidden.device.type]))
    exact = _as(part, torch.float64)

    def run(p: Problem, policy: troll.SparsePolicy, tail: str, impl: str, counted: Tensor) -> list[Tensor]:
        dtype = p.old.log_probs.dtype
        leaves = [x.detach().to(dtype).requires_grad_() for x in (policy.log_probs, policy.log_tail)]
        proposal = troll.SparsePolicy.trusted(policy.token_ids, *leaves, policy.vocab_size, 1.0)
        values = ours.token_losses(proposal, p, tail, impl)
        torch.where(counted, values, 0.0).sum().backward()
        used = policy.token_ids >= 0
        g, g_tail = (torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)
        return [values.detach()[counted], torch.where(used, g, 0.0)[counted], g_tail[counted]]

    for tail in ("bucket", "floor"):
        policy, _ = ours.leaf_policy(part, tail)
        counted = _steady(part, tail, policy).loss_mask
        truth = run(exact, policy, tail, "reference", counted)
        plain = run(part, policy, tail, "reference", counted)
        for impl in impls:
            way = f"constrain, {tail}, troll, {impl}"
            try:
                mine = run(part, policy, tail, impl, counted)
                for what, x, t, p in zip(
                    ("losses", "gradient", "gradient of the tail"), mine, truth, plain, strict=True
                ):
                    checks.add(problem.size, way, what, _norm(x, t), ROOM * _norm(p, t))
            except Exception as error:
                checks.failed(problem.size, way, error)


def gross(checks: Checks, size: Any, results: dict[str, dict[str, Tensor]], kinds: dict[str, str]) -> None:
    """At the timed size: loss and gradients of each way against the plain ones of the same objective."""
    for name, found in results.items():
        base = results.get(f"plain {kinds[name]}")
        if base is None or found is base:
            continue
        errors = [_norm(found[what], base[what]) for what in ("hidden", "weight")]
        yours = name.startswith("troll")
        checks.add(size, name, "gradients at the timed size, away from plain", max(errors), GROSS, yours)
