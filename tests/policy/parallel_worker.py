"""Cases of ``troll.policy.parallel``, and a process that runs them: ``python parallel_worker.py FOLDER RANK WORLD``.

Every process makes the whole inputs of a case from its seed, takes its columns, and writes what it found; the tests
make the same inputs and compare with ``troll.sparsify`` and ``troll.restrict`` of all columns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from policy_cases import F32, F64, INF, ids, normal
from torch import Tensor

import troll
from troll.errors import InputError
from troll.policy import Scored, SparsePolicy
from troll.policy.parallel import restrict_parallel, sparsify_parallel

BF16 = torch.bfloat16
COLLECTIVES = ["all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "reduce", "gather", "all_to_all"]


@dataclass(frozen=True)
class Case:
    """Whole logits [N, V], and how they are scored."""

    seed: int
    V: int = 36
    N: int = 6
    K: int = 5
    tail_mass: float = 1e-3
    dtype: torch.dtype = F64
    temperature: float = 1.0
    widths: tuple[int, ...] | None = None
    """Of three processes or two; the same for all by default."""
    kind: str = "normal"
    scale: float = 2.0
    sampled: str = "any"
    masked: bool = False
    readable: bool = False
    """Whether the logits that do not count are distributions all the same, and have an old policy."""
    impl: str = "auto"
    on_invalid: str = "raise"

    def logits(self) -> Tensor:
        """[N, V]."""
        z = normal(self.N, self.V, seed=self.seed, scale=self.scale, dtype=F64)
        rows = torch.arange(self.N)
        match self.kind:
            case "ties":
                z = z.round()
            case "equal":
                z = torch.zeros_like(z)
            case "descending":
                z = z - torch.arange(self.V)
            case "ascending":
                z = z + torch.arange(self.V)
            case "excluded":
                z[normal(self.N, self.V, seed=self.seed + 1) > -0.3] = -INF
            case "one":
                z = torch.where(torch.arange(self.V) == ids(self.N, 1, below=self.V, seed=self.seed), z, -INF)
            case "empty shards":  # row by row: the first half, the last half, the middle third
                share = torch.arange(self.V) * 6 // self.V
                none = torch.stack([share < 3, share >= 3, (share == 2) | (share == 3)])[rows % 3]
                z[none] = -INF
            case "spread":
                z = z * 30
            case "high":
                z = z + 4096
        if self.kind in ("excluded", "one"):  # the sampled token can be sampled
            at = (rows, self.tokens().clamp(min=0))
            z[at] = z[at].clamp(min=-1.0)
        if self.kind.startswith("bad "):
            z[self.N // 2, int(self.kind.split()[2])] = float(self.kind.split()[1])
        if self.kind == "impossible":
            z[self.N // 2] = -INF
        if self.masked and not self.readable:
            z[~self.loss_mask()] = torch.nan
        return z.to(self.dtype)

    def tokens(self) -> Tensor:
        """[N] sampled tokens; −100 where they do not count."""
        z = normal(self.N, self.V, seed=self.seed, scale=self.scale, dtype=F64)
        match self.sampled:
            case "first":
                chosen = torch.zeros(self.N, dtype=torch.int64)
            case "last":
                chosen = torch.full((self.N,), self.V - 1)
            case "least":
                chosen = z.argmin(-1)
            case "possible":
                chosen = torch.tensor([self.V - 1, 0, 0])[torch.arange(self.N) % 3]
            case "unknown":
                chosen = torch.full((self.N,), self.V)
            case _:
                chosen = ids(self.N, below=self.V, seed=self.seed + 7)
        return torch.where(self.loss_mask(), chosen, -100) if self.masked and not self.readable else chosen

    def loss_mask(self) -> Tensor:
        """[N] bool."""
        return normal(self.N, seed=self.seed + 3) > -0.2

    def options(self) -> dict[str, Any]:
        """Arguments of ``sparsify`` and ``restrict``, alone and in parallel."""
        return {
            "loss_mask": self.loss_mask() if self.masked else None,
            "on_invalid": self.on_invalid,
            "impl": self.impl,
        }

    def old(self) -> SparsePolicy:
        """A policy to restrict to: that of other logits, which exclude nothing."""
        other = normal(self.N, self.V, seed=self.seed + 11, scale=self.scale, dtype=F64).to(self.dtype)
        mask = self.loss_mask() if self.masked and not self.readable else None
        return troll.sparsify(
            other, self.tokens(), self.K, self.tail_mass, temperature=self.temperature, loss_mask=mask, impl="reference"
        )

    def columns(self, world: int) -> list[slice]:
        """Those of each process."""
        widths = self.widths or (self.V // world,) * world
        ends = [sum(widths[: i + 1]) for i in range(world)]
        return [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]

    def upstream(self, scored: Scored) -> Tensor:
        """A sum of everything that carries gradient, with weights that depend on the seed alone."""
        policy, weights = scored.policy, normal(self.N, self.K + 2, seed=self.seed + 5, dtype=scored.entropy.dtype)
        kept = torch.where(policy.token_ids >= 0, policy.log_probs, 0.0)
        tail = torch.where(policy.log_tail > -INF, policy.log_tail, 0.0)
        slots = kept.shape[-1]
        return (
            (kept * weights[:, :slots]).sum() + (tail * weights[:, -2]).sum() + (scored.entropy * weights[:, -1]).sum()
        )


def _cases() -> dict[str, Case]:
    cases = {
        "plain": Case(1),
        "all are kept": Case(2, K=36, tail_mass=0.0),
        "more slots than tokens": Case(3, K=50, tail_mass=0.0),
        "one slot": Case(4, K=1),
        "no pruning": Case(5, tail_mass=0.0),
        "much pruning": Case(6, tail_mass=0.3, K=12),
        "the least probable is sampled": Case(7, sampled="least"),
        "the least probable is sampled, one slot": Case(8, sampled="least", K=1),
        "the first rank has the most probable": Case(9, kind="descending", sampled="last"),
        "the last rank has the most probable": Case(10, kind="ascending", sampled="first"),
        "the last rank has all": Case(11, kind="ascending", sampled="last"),
        "ties": Case(12, kind="ties", scale=0.7, N=12),
        "ties, pruned": Case(13, kind="ties", K=12, tail_mass=0.2, N=12),
        "equal": Case(14, kind="equal", K=17, tail_mass=0.0),
        "equal, the last is sampled": Case(15, kind="equal", K=17, tail_mass=0.0, sampled="last"),
        "equal, pruned, the last is sampled": Case(29, kind="equal", K=30, tail_mass=0.4, sampled="last"),
        "excluded": Case(16, kind="excluded", N=12),
        "excluded, all are kept": Case(17, kind="excluded", K=36, tail_mass=0.0),
        "only one possible token": Case(18, kind="one"),
        "empty shards": Case(19, kind="empty shards", sampled="possible", N=9),
        "empty shards, all are kept": Case(20, kind="empty shards", sampled="possible", K=36, tail_mass=0.0, N=9),
        "masked": Case(21, masked=True, N=12),
        "masked, readable": Case(30, masked=True, readable=True, N=12),
        "cool": Case(22, temperature=0.6),
        "hot": Case(23, temperature=1.7, masked=True),
        "spread": Case(24, kind="spread", tail_mass=0.0),
        "no rows": Case(25, N=0),
    }
    cases |= {f"{name}, {word}": replace(cases[name], dtype=dtype) for name in cases for dtype, word in _SINGLE}
    cases |= {f"{name}, reference": replace(cases[name], impl="reference") for name in ("plain", "ties", "masked")}
    for name in ("ties", "empty shards", "masked", "the least probable is sampled"):
        cases[f"{name}, kernels"] = replace(cases[name], dtype=F32, impl="triton", N=3)  # interpreted, and slow
    cases["high, fp32"] = Case(26, kind="high", dtype=F32)
    cases["large, fp32"] = Case(27, V=6000, K=64, N=4, tail_mass=1e-5, scale=3.0, dtype=F32)
    cases["large, bf16"] = Case(28, V=6000, K=64, N=4, tail_mass=1e-5, scale=3.0, dtype=BF16)
    return cases


_SINGLE = [(F32, "fp32"), (BF16, "bf16")]
CASES = _cases()
UNEQUAL = {2: [(1, 35), (30, 6), (12, 24)], 3: [(1, 1, 34), (20, 3, 13), (5, 30, 1)]}
SWEEP = 60


def cases(world: int) -> dict[str, Case]:
    """Those for so many processes: the named ones, unequal shares, and a sweep of settings drawn at random."""
    found = dict(CASES)
    for widths in UNEQUAL[world]:
        for name in ("plain", "ties", "excluded", "much pruning", "more slots than tokens", "masked", "plain, fp32"):
            found[f"{name}, {widths}"] = replace(CASES[name], widths=widths)
    gen = torch.Generator().manual_seed(world)

    def draw(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (1,), generator=gen))]

    for i in range(SWEEP):
        found[f"sweep {i}"] = Case(
            seed=1000 + i,
            V=draw(12, 36, 90),
            N=8,
            K=draw(1, 2, 7, 20),
            tail_mass=draw(0.0, 1e-6, 0.01, 0.4),
            dtype=draw(F64, F32, BF16),
            temperature=draw(1.0, 1.0, 0.8),
            kind=draw("normal", "ties", "ties", "excluded", "descending", "ascending"),
            scale=draw(0.5, 2.0, 6.0),
            sampled=draw("any", "least", "last", "first"),
            masked=draw(False, False, True),
            impl=draw("auto", "auto", "reference"),
        )
    return found


REFUSED = {
    "NaN": Case(40, kind="bad nan 20"),
    "NaN in the first column": Case(41, kind="bad nan 0"),
    "+inf": Case(42, kind="bad inf 35"),
    "the sampled token is excluded": Case(43, kind="bad -inf 35", sampled="last"),
    "all are excluded": Case(44, kind="impossible"),
    "an unknown token": Case(45, sampled="unknown"),
    "unequal without widths": Case(46),
    "wrong widths": Case(47),
}


@contextmanager
def counted_collectives() -> Iterator[list[tuple[str, int]]]:
    """Names and bytes sent of the collectives that are called."""
    calls: list[tuple[str, int]] = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            sent = args[1] if name.startswith("all_gather") else args[0]
            calls.append((name, sent.nbytes if isinstance(sent, Tensor) else -1))
            return originals[name](*args, **named)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name in COLLECTIVES:
            setattr(dist, name, originals[name])


def run(case: Case, how: str, rank: int, world: int) -> dict[str, Any]:
    """What this process finds in its columns."""
    shard = case.logits()[:, case.columns(world)[rank]].clone().requires_grad_()
    with counted_collectives() as calls:
        if how == "sparsify":
            scored = sparsify_parallel(
                shard,
                case.tokens(),
                case.K,
                case.tail_mass,
                group=None,
                widths=case.widths,
                temperature=case.temperature,
                **case.options(),
            )
        else:
            scored = restrict_parallel(shard, case.old(), group=None, widths=case.widths, **case.options())
        case.upstream(scored).backward()
    policy = scored.policy
    return {
        "ids": policy.token_ids,
        "log_probs": policy.log_probs.detach(),
        "log_tail": policy.log_tail.detach(),
        "entropy": scored.entropy.detach(),
        "grad": shard.grad,
        "calls": calls,
        "vocab_size": policy.vocab_size,
        "temperature": policy.temperature,
    }


def unmoved(case: Case, rank: int, world: int) -> list[Tensor]:
    """Log-probabilities of a policy, and of the same logits on its support."""
    shard = case.logits()[:, case.columns(world)[rank]]
    options = case.options()
    old, _ = sparsify_parallel(shard, case.tokens(), case.K, case.tail_mass, group=None, **options)
    new, _ = restrict_parallel(shard, old, group=None, **options)
    return [old.log_probs, new.log_probs]


def refusal(name: str, case: Case, rank: int, world: int) -> str:
    """What this process says of inputs that are wrong."""
    columns = case.columns(world)
    if name == "unequal without widths":
        columns = [slice(0, 6 + 4 * i) for i in range(world)]
    widths = [11] * world if name == "wrong widths" else None
    shard = case.logits()[:, columns[rank]]
    try:
        sparsify_parallel(shard, case.tokens(), case.K, case.tail_mass, group=None, widths=widths)
    except InputError as error:
        return str(error)
    return ""


def objective(case: Case, tail: str, rank: int, world: int) -> dict[str, Tensor]:
    """The loss and its gradient, with the log-probabilities in parallel."""
    shard = case.logits()[:, case.columns(world)[rank]].clone().requires_grad_()
    old = sparsify_parallel(
        (shard + old_shift(case)[:, case.columns(world)[rank]]).detach(),
        case.tokens(),
        case.K,
        case.tail_mass,
        group=None,
    ).policy
    if tail == "bucket":
        proposal = restrict_parallel(shard, old, group=None).policy
    else:
        proposal = sparsify_parallel(shard, case.tokens(), case.K, case.tail_mass, group=None).policy
    loss = loss_of(proposal, old, case, tail)
    loss.backward()
    assert shard.grad is not None
    return {"loss": loss.detach(), "grad": shard.grad}


def old_shift(case: Case) -> Tensor:
    """By how much the logits of the old policy differ, [N, V]."""
    return normal(case.N, case.V, seed=case.seed + 13, scale=0.7, dtype=case.dtype)


def loss_of(proposal: SparsePolicy, old: SparsePolicy, case: Case, tail: Any) -> Tensor:
    """The whole objective, as a user has it, over sequences of three tokens."""
    grid = (case.N // 3, 3)
    advantages = normal(*grid, seed=case.seed + 17, dtype=case.dtype)

    def sequences(policy: SparsePolicy) -> SparsePolicy:
        return policy._map(lambda x: x.reshape(*grid, *x.shape[1:]))

    mask = torch.ones(grid, dtype=torch.bool)
    return troll.troll_loss(sequences(proposal), sequences(old), advantages, mask, kl_bound=0.05, tail=tail)[0]


OBJECTIVES = {"fp64": Case(60, N=12, tail_mass=0.0), "fp32": Case(61, N=12, dtype=F32), "large": Case(62, V=900, N=12)}


def main(folder: Path, rank: int, world: int) -> None:
    """Run everything and write it down."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    found: dict[str, Any] = {}
    for name, case in cases(world).items():
        for how in ("sparsify", "restrict"):
            found[f"{how}: {name}"] = run(case, how, rank, world)
    for name, case in REFUSED.items():
        found[f"refused: {name}"] = refusal(name, case, rank, world)
    for name in ("NaN", "+inf", "the sampled token is excluded", "all are excluded"):
        found[f"sparsify: {name}"] = run(replace(REFUSED[name], on_invalid="mask"), "sparsify", rank, world)
    for name in ("plain, fp32", "masked, fp32", "large, fp32"):
        found[f"unmoved: {name}"] = unmoved(CASES[name], rank, world)
    for name, case in OBJECTIVES.items():
        for tail in ("bucket", "floor"):
            found[f"{tail}: {name}"] = objective(case, tail, rank, world)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
