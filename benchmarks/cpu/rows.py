"""Rows of logits on a CPU: the definition, what computes there, and TRL's clip.

    python benchmarks/cpu/rows.py --output rows.json             one thread, CPU time
    python benchmarks/cpu/rows.py --threads 2 --leave-out reference --output rows2.json

Numbers are compared first: the same tokens, log-probabilities and gradients from every way. Then the ways take turns;
reported are medians, and medians of the ratios within a turn. On one thread the time is the processor's, which others
on the machine do not add to; on several it is the clock's, because waiting threads use the processor too.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

import troll
from troll.implementation import Impl
from troll.objective import constrain

SIZES = [
    (512, 49_152, 576, torch.float32),
    (512, 49_152, 576, torch.bfloat16),
    (128, 151_936, 1024, torch.float32),
]
IMPLS: tuple[Impl, ...] = ("torch", "reference")
Way = Callable[[], Any]


class Problem:
    """Hidden states, a head, sampled tokens, and an old policy of hidden states nearby."""

    def __init__(self, N: int, V: int, H: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.sizes = {"N": N, "V": V, "H": H, "dtype": str(dtype).removeprefix("torch.")}
        self.weight = torch.randn(V, H).mul_(0.1).to(dtype).requires_grad_()
        self.hidden = torch.randn(N, H).to(dtype).requires_grad_()
        self.sampled = torch.randint(V, (N,))
        self.advantages = torch.randn(N)
        with torch.no_grad():
            self.moved = self.hidden + 0.01 * torch.randn(N, H).to(dtype)
            self.logits = (self.hidden @ self.weight.t()).requires_grad_()
            self.old = self.head("torch").sparsify(self.moved, self.sampled).policy

    def head(self, impl: Impl) -> troll.Head:
        """The head, computed this way."""
        return troll.Head(self.weight, impl=impl)

    def plain(self) -> Tensor:
        """Top-64 of the logits as one would write it."""
        log_p = self.logits.float().log_softmax(-1)
        kept = log_p.topk(64).values
        return kept.sum() + (1 - kept.exp().sum(-1)).clamp(min=1e-30).log().sum()

    def sparse(self, impl: Impl) -> Tensor:
        """A number that needs all of ``sparsify``."""
        policy = troll.sparsify(self.logits, self.sampled, impl=impl)
        return policy.log_probs.masked_fill(policy.token_ids < 0, 0.0).sum() + policy.log_tail.sum()

    def trl(self, hidden: Tensor) -> Tensor:
        """TRL's log-probabilities of the sampled tokens."""
        outputs = ("log_probs", "entropy")
        return ChunkedLogProbFunction.apply(hidden, self.weight, None, self.sampled, 1.0, 32768, None, 1.0, outputs)[0]

    def clip(self) -> Tensor:
        """TRL's head under the clip loss."""
        ratio = (self.trl(self.hidden) - self.old.sampled_log_probs).exp()
        return -torch.minimum(ratio * self.advantages, ratio.clamp(0.8, 1.2) * self.advantages).mean()

    def troll(self, impl: Impl, tail: Any) -> Tensor:
        """The TROLL loss, on the old support or on the new policy's own."""
        head = self.head(impl)
        if tail == "bucket":
            policy = head.restrict(self.hidden, self.old).policy
        else:
            policy = head.sparsify(self.hidden, self.sampled).policy
        step = constrain(policy, self.old, 0.05, tail=tail)
        return (step.regression - step.log_ratio.exp() * self.advantages).mean()

    def gradients(self, loss: Callable[[], Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
        """Those of a loss."""
        return torch.autograd.grad(loss(), leaves)

    def check(self) -> dict[str, float]:
        """Compare the numbers of all ways; how far they are apart, gradients as a share of their norm."""
        apart = {}
        with torch.no_grad():
            ours, theirs = (troll.sparsify(self.logits, self.sampled, impl=impl) for impl in IMPLS)
            assert torch.equal(theirs.token_ids, ours.token_ids)
            used = ours.token_ids >= 0
            apart["log p"] = (theirs.log_probs - ours.log_probs)[used].abs().max().item()
            apart["log tail"] = (theirs.log_tail - ours.log_tail).abs().max().item()
            apart["log p, TRL"] = (self.trl(self.moved) - self.old.sampled_log_probs).abs().max().item()
        for name, leaves, loss in (
            ("∂ logits", (self.logits,), self.sparse),
            ("∂ head, bucket", (self.hidden, self.weight), lambda impl: self.troll(impl, "bucket")),
            ("∂ head, floor", (self.hidden, self.weight), lambda impl: self.troll(impl, "floor")),
        ):
            both = [self.gradients(lambda impl=impl, loss=loss: loss(impl), *leaves) for impl in IMPLS]
            pairs = zip(*both, strict=True)
            apart[name] = max(((a - b).float().norm() / a.float().norm()).item() for a, b in pairs)
        half = self.weight.dtype != torch.float32
        assert max(apart["log p"], apart["log tail"]) < 1e-5, apart
        assert apart["log p, TRL"] < (0.1 if half else 1e-4), apart  # TRL rounds to the type of the hidden states
        assert max(x for name, x in apart.items() if "∂" in name) < (1e-2 if half else 1e-4), apart
        return apart

    def groups(self) -> dict[str, dict[str, Way]]:
        """What is compared with what; the first way of a group is the one that the others are divided by."""
        logits, head = (self.logits,), (self.hidden, self.weight)

        def ways(call: Callable[[Impl], Any]) -> dict[str, Way]:
            return {impl: lambda impl=impl: call(impl) for impl in IMPLS}

        def no_grad(call: Callable[[Impl], Any]) -> Callable[[Impl], Any]:
            return torch.no_grad()(call)

        return {
            "sparsify, forward": ways(no_grad(self.sparse)) | {"plain torch": torch.no_grad()(self.plain)},
            "sparsify, forward + backward": ways(lambda impl: self.gradients(lambda: self.sparse(impl), *logits))
            | {"plain torch": lambda: self.gradients(self.plain, *logits)},
            "scoring from hidden states": {"TRL": torch.no_grad()(lambda: self.trl(self.moved))}
            | ways(no_grad(lambda impl: self.head(impl).sparsify(self.moved, self.sampled))),
            "loss from hidden states, forward + backward": {"TRL, clip": lambda: self.gradients(self.clip, *head)}
            | {
                f"TROLL, {tail}, {impl}": lambda impl=impl, tail=tail: self.gradients(
                    lambda: self.troll(impl, tail), *head
                )
                for tail in ("bucket", "floor")
                for impl in IMPLS
            },
        }


def measure(ways: dict[str, Way], repeats: int, clock: Callable[[], float]) -> dict[str, dict[str, float]]:
    """Of each way the median of milliseconds and of the ratio to the first, in turns, after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            start = clock()
            way()
            if repeat:
                times[name].append(1e3 * (clock() - start))
    base = times[next(iter(ways))]
    return {
        name: {
            "ms": round(statistics.median(mine), 1),
            "ratio": round(statistics.median(a / b for a, b in zip(mine, base, strict=True)), 3),
        }
        for name, mine in times.items()
    }


def table(results: list[dict[str, Any]]) -> str:
    """As in README.md: milliseconds, and the ratio to the first way of the group."""
    lines = ["| | " + " | ".join("{N} × {V}, H {H}, {dtype}".format(**x["sizes"]) for x in results) + " |"]
    lines.append("|---|" + "---|" * len(results))
    for group, ways in results[0]["groups"].items():
        lines.append(f"| **{group}** |" + " |" * len(results))
        for way in ways:
            cells = [x["groups"][group][way] for x in results]
            lines.append(f"| {way} | " + " | ".join(f"{c['ms']:.0f} ms, {c['ratio']:.2f}" for c in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Compare, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--leave-out", metavar="WORD", help="ways with this word in their name")
    parser.add_argument("--output", type=Path)
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    clock = time.process_time if o.threads == 1 else time.perf_counter
    results = []
    for sizes in SIZES:
        problem = Problem(*sizes)
        apart = problem.check()
        print(problem.sizes, "apart:", {name: f"{x:.1e}" for name, x in apart.items()}, flush=True)
        groups = {
            group: measure({w: f for w, f in ways.items() if not (o.leave_out and o.leave_out in w)}, o.repeats, clock)
            for group, ways in problem.groups().items()
        }
        results.append({"sizes": problem.sizes, "apart": apart, "groups": groups})
        print(json.dumps(groups, indent=1), flush=True)
    print(table(results))
    if o.output:
        machine = {"processor": processor(), "threads": o.threads, "clock": clock.__name__}
        machine |= {"torch": torch.__version__, "repeats": o.repeats}
        o.output.write_text(json.dumps({**machine, "results": results}, indent=1, ensure_ascii=False) + "\n")


def processor() -> str:
    """Its name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
