"""The parts of the benchmark: which ways each compares, how they are checked (``CHECKS``) and timed (``TIMES``)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import checks
import ours
import peers
import torch
from measure import AbsentError, Row, Way, in_turns, profiled, reason, synchronise, wall_and_device
from problem import KL_BOUND, TAIL_MASS, Problem, Size, make
from torch import Tensor
from work import work

import troll
from troll.objective import constrain

MIB = 1 << 20
BUDGET = 2700 * MIB
Loss = Callable[[Problem], Tensor]


class Run:
    """Where and how; the clock of the whole run; what was found so far."""

    def __init__(self, device: torch.device, dtype: torch.dtype, impl: str, seconds: float, limit: float) -> None:
        self.device, self.dtype, self.fast = device, dtype, impl
        self.seconds, self.limit = seconds, limit
        self.start = time.perf_counter()
        self.checks = checks.Checks()
        self.results: dict[str, Any] = {}

    @property
    def spent(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.start

    def make(self, size: Size) -> Problem:
        """The data, after what is left of earlier data is gone."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return make(size, self.device, self.dtype)

    def rows(self, part: str, size: Size, rows: dict[str, Row]) -> dict[str, Row]:
        """Put bytes and flops beside the times, and take away the times of what was not checked."""
        element = torch.finfo(self.dtype).bits // 8
        for way, row in rows.items():
            if "ms" in row and (why := self.checks.unchecked(part, size, way)):
                rows[way] = {"failed": f"not checked: {why}"}
            elif "ms" in row:
                row |= work(part, way, size.N, size.V, size.H, size.K, element)
        return rows


# -- selection


@torch.no_grad()
def selection_ways(run: Run, problem: Problem, logits: Tensor, everything: bool = True) -> dict[str, Way]:
    """Logits → the most probable tokens."""
    K, sampled = problem.size.K, problem.sampled
    ways: dict[str, Way] = {"one read, torch.sum": lambda: logits.sum(-1, dtype=torch.float32)}
    if run.device.type == "cuda":
        from read import read_once

        ways["one read, Triton"] = lambda: read_once(logits)
    ways["torch.topk alone"] = lambda: logits.topk(K)
    if everything:
        ways["plain torch"] = lambda: peers.plain_selection(logits, K, TAIL_MASS)
        ways["paper-style"] = torch.no_grad()(lambda: peers.paper_policy(logits, sampled, K, TAIL_MASS))
        ways["troll, reference"] = lambda: ours.select(problem, logits, "reference")
    ways[f"troll, {run.fast}"] = lambda: ours.select(problem, logits, run.fast)
    return ways


def selection(run: Run, problem: Problem) -> dict[str, Row]:
    """Time the selection."""
    logits = problem.logits()
    return in_turns(selection_ways(run, problem, logits), run.device, run.seconds)


# -- scoring


def scoring_ways(run: Run, problem: Problem, everything: bool = True) -> dict[str, Way]:
    """Hidden states → what a rollout's old policy needs, without gradient."""
    quiet = torch.no_grad()
    ways: dict[str, Way] = {
        "matrix product alone": quiet(lambda: problem.hidden @ problem.weight.t()),
        "TRL": quiet(lambda: peers.trl_scores(problem)),
    }
    if everything:
        ways["troll, reference"] = lambda: ours.score(problem, "reference")
    ways[f"troll, {run.fast}"] = lambda: ours.score(problem, run.fast)
    return ways


def scoring(run: Run, problem: Problem) -> dict[str, Row]:
    """Time the scoring pass."""
    return in_turns(scoring_ways(run, problem), run.device, run.seconds)


# -- loss


def loss_ways(run: Run, everything: bool = True) -> dict[str, tuple[str, Loss]]:
    """(objective, loss) of each way; the objective says what its gradients are compared with."""
    fast = run.fast
    ways: dict[str, tuple[str, Loss]] = {"TRL, clip": ("clip", peers.trl_clip)}
    if everything:
        ways = {
            "plain torch, clip": ("clip", peers.plain_clip),
            **ways,
            "Liger, clip, a sequence at a time": ("clip", lambda p: peers.liger_clip(p, 1)),
            "Liger, clip, all at once": ("clip", lambda p: peers.liger_clip(p, 8)),
            "paper-style TROLL": ("floor", peers.paper_troll),
            "troll, composed, bucket": ("bucket", lambda p: ours.composed(p, "bucket", fast)),
            "troll, composed, floor": ("floor", lambda p: ours.composed(p, "floor", fast)),
        }
    for tail in ("bucket", "floor"):
        for name, budget in (("", None), (", 2,700 MiB", BUDGET)):
            ways[f"troll, single pass{name}, {tail}"] = (
                tail,
                lambda p, tail=tail, budget=budget: ours.single_pass(p, tail, fast, budget),  # type: ignore[misc]
            )
    return ways


def _runner(problem: Problem, loss: Loss) -> Way:
    def forward_and_backward() -> Tensor:
        value = loss(problem)
        value.backward()
        return value

    return forward_and_backward


def loss(run: Run, problem: Problem) -> dict[str, Row]:
    """Time forward and backward of the losses."""
    ways = loss_ways(run)
    kinds = {name: kind for name, (kind, _) in ways.items()}
    found: dict[str, dict[str, Tensor]] = {}

    def keep(name: str, value: Any) -> None:
        if problem.hidden.grad is not None and problem.weight.grad is not None:
            found[name] = {"hidden": problem.hidden.grad.clone(), "weight": problem.weight.grad[::16].clone()}

    for kind in ("bucket", "floor"):  # what ours are compared with at this size; not timed
        logits = problem.hidden @ problem.weight.t()
        ours.mean(ours.materialised(problem, logits, kind), problem).backward()
        keep(f"plain {kind}", None)
        kinds[f"plain {kind}"] = kind
        problem.forget()
        del logits
    peers.plain_clip(problem).backward()
    keep("plain clip", None)
    kinds["plain clip"] = "clip"
    problem.forget()
    runners: dict[str, Way] = {"three matrix products alone": lambda: peers.three_products(problem)}
    runners |= {name: _runner(problem, f) for name, (_, f) in ways.items()}
    rows = in_turns(runners, run.device, run.seconds, before=problem.forget, seen=keep)
    problem.forget()
    checks.gross(run.checks, problem.size, found, kinds)
    return rows


# -- projection


def rows_to_project(problem: Problem) -> tuple[Tensor, Tensor]:
    """Proposals and old policies [N, K] over full supports; a third or so of the rows is outside the region."""
    torch.manual_seed(1)
    shape, device = (problem.size.N, problem.size.K), problem.hidden.device
    old = (2.5 * torch.randn(shape, device=device)).log_softmax(-1)
    noise = torch.randn(shape, device=device) * (0.25 * torch.randn(shape[0], 1, device=device).exp())
    return (old + noise).log_softmax(-1), old


def projection(run: Run, problem: Problem) -> dict[str, Row]:
    """Time forward and backward of the projection on [N, K] rows, and of ``constrain`` for both tails."""
    proposal, old = rows_to_project(problem)
    leaf = proposal.requires_grad_()
    weights = torch.randn_like(leaf)

    def forget() -> None:
        leaf.grad = None

    def way(**named: str) -> Way:
        return lambda: troll.project(leaf, old, KL_BOUND, **named).log_probs.backward(weights)

    ways: dict[str, Callable[[], Way]] = {
        "project, paper's bracketing": lambda: (
            lambda: peers.PaperProjection.apply(leaf, old, KL_BOUND)[0].backward(weights)
        ),
        "project, troll, bracketing": lambda: way(solver="bracketing", **ours.with_impl(troll.project, "reference")),
        "project, troll, reference": lambda: way(**ours.with_impl(troll.project, "reference")),
        f"project, troll, {run.fast}": lambda: way(**ours.with_impl(troll.project, run.fast)),
    }
    inputs = {tail: ours.leaf_policy(problem, tail) for tail in ("bucket", "floor")}

    def constrained(tail: str, impl: str) -> Callable[[], Way]:
        def get() -> Way:
            named = ours.with_impl(constrain, impl)
            proposal, leaves = inputs[tail]

            def call() -> None:
                for x in leaves:
                    x.grad = None
                step = constrain(proposal, problem.old, KL_BOUND, tail=tail, **named)
                (step.regression - step.log_ratio.exp() * problem.token_advantages).mean().backward()

            return call

        return get

    for tail in ("bucket", "floor"):
        for impl in ("reference", run.fast):
            ways[f"constrain, {tail}, troll, {impl}"] = constrained(tail, impl)
    ready = {name: _or_absent(get) for name, get in ways.items()}
    rows = in_turns(ready, run.device, run.seconds / 2, before=forget)
    for name, row in rows.items():
        if "ms" in row:
            forget()
            row |= wall_and_device(ready[name], run.device, 20 if row["ms"] < 20 else 3)
    return rows


def _or_absent(get: Callable[[], Way]) -> Way:
    try:
        return get()
    except AbsentError as error:
        why = error

        def fail() -> None:
            raise why

        return fail


def check_projection(run: Run, problem: Problem) -> None:
    """``project`` and ``constrain``."""
    checks.projection(run.checks, problem.size, *rows_to_project(problem), (run.fast,))
    checks.constrained(run.checks, problem, (run.fast,))


CHECKS: dict[str, Callable[[Run, Problem], None]] = {
    "projection": check_projection,
    "selection": lambda run, p: checks.selection(run.checks, p, (run.fast,)),
    "scoring": lambda run, p: checks.scoring(run.checks, p, (run.fast,)),
    "loss": lambda run, p: checks.loss(run.checks, p, loss_ways(run)),
}
TIMES = {"projection": projection, "selection": selection, "scoring": scoring, "loss": loss}


# -- where the time goes


def profiles(run: Run, size: Size) -> str:
    """Kernels of troll's fast ways and of TRL's, for the log of what missed its target."""
    problem = run.make(size)
    logits = problem.logits()
    ways: dict[str, Way] = {f"selection, {k}": f for k, f in selection_ways(run, problem, logits, False).items()}
    ways |= {f"scoring, {k}": f for k, f in scoring_ways(run, problem, False).items()}
    ways |= {f"loss, {k}": _runner(problem, f) for k, (_, f) in loss_ways(run).items()}
    texts = []
    for name in [x for x in ways if "troll, " in x or "TRL" in x]:
        problem.forget()
        try:
            texts.append(f"== {name}\n{profiled(ways[name], run.device)}")
        except Exception as error:
            texts.append(f"== {name}\n{reason(error)}\n")
    return "\n".join(texts)


# -- growth

SWEEPS = {
    "cuda": {
        "N": (512, 1024, 2048, 4096, 8192, 16384),
        "V": (8192, 16384, 32768, 65536, 131072, 262144),
        "K": (8, 16, 32, 64, 128, 256),
    },
    "cpu": {"N": (64, 128), "V": (512, 1024), "K": (8, 16)},
}


def growth(
    run: Run, base: Size, sweeps: dict[str, tuple[int, ...]], write: Callable[[], None]
) -> dict[str, list[dict[str, Any]]]:
    """Selection, scoring and loss along N, V and K around ``base``, few repeats each."""
    found: dict[str, list[dict[str, Any]]] = {}
    run.results["growth"] = found
    for letter, values in sweeps.items():
        found[letter] = []
        for value in values:
            if run.spent > run.limit:
                run.results.setdefault("skipped", []).append(f"growth, {letter}={value}: out of time")
                continue
            size = Size(**{**vars(base), letter: value})
            try:
                point = _point(run, size)
            except Exception as error:
                point = {"failed": f"{type(error).__name__}: {error}"[:300]}
            found[letter].append({letter: value, "size": vars(size), **point})
            write()
    return found


def _point(run: Run, size: Size) -> dict[str, Any]:
    problem = run.make(size)
    few: dict[str, Any] = {"seconds": 0.1, "least": 3, "most": 5}
    point: dict[str, Any] = {}
    logits = problem.logits()
    _last_rows(run, problem, logits)
    point["selection"] = in_turns(selection_ways(run, problem, logits, False), run.device, **few)
    del logits
    point["scoring"] = in_turns(scoring_ways(run, problem, False), run.device, **few)
    runners: dict[str, Way] = {"three matrix products alone": lambda: peers.three_products(problem)}
    runners |= {name: _runner(problem, f) for name, (_, f) in loss_ways(run, False).items()}
    point["loss"] = in_turns(runners, run.device, before=problem.forget, **few)
    problem.forget()
    synchronise(run.device)
    for part in ("selection", "scoring", "loss"):
        run.rows(part, size, point[part])
    return point


def _last_rows(run: Run, problem: Problem, logits: Tensor) -> None:
    """The last 64 rows alone have the same ids as among all: addresses beyond 2³¹ are right."""
    try:
        whole = ours.select(problem, logits, run.fast).token_ids[-64:]
        with torch.no_grad():
            named = ours.with_impl(troll.sparsify, run.fast)
            alone = troll.sparsify(logits[-64:].clone(), problem.sampled[-64:], problem.size.K, **named)
        wrong = (whole != alone.token_ids).any(-1).sum().item()
        run.checks.add(problem.size, f"troll, {run.fast}", "last rows with other ids than alone", wrong, 0)
    except Exception as error:
        run.checks.failed(problem.size, f"troll, {run.fast}", error)
