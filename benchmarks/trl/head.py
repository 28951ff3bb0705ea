"""The LM head: log-probabilities of hidden states, forward and backward, against TRL's fused head.

    python benchmarks/trl/head.py                 sizes of a 4B model on a GPU, small ones on a CPU

Ways are timed in turns and reported as medians and ratios to TRL's; peak is what a way allocates beyond its inputs
(on a GPU). The numbers of all ways are compared first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

import troll
from troll.objective import constrain


def main() -> None:
    """Compare, time, print."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192 if cuda else 512)
    parser.add_argument("--vocabulary", type=int, default=151_936 if cuda else 49_152)
    parser.add_argument("--hidden", type=int, default=2560 if cuda else 576)
    parser.add_argument("--repeats", type=int, default=10 if cuda else 5)
    parser.add_argument("--output", type=Path)
    o = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    torch.manual_seed(0)
    weight = torch.randn(o.vocabulary, o.hidden, device=device, dtype=dtype).mul_(0.1).requires_grad_()
    hidden = torch.randn(o.tokens, o.hidden, device=device, dtype=dtype).requires_grad_()
    sampled = torch.randint(o.vocabulary, (o.tokens,), device=device)
    head = troll.Head(weight)
    with torch.no_grad():
        moved = hidden + 0.01 * torch.randn_like(hidden)
        old = head.sparsify(moved, sampled).policy
    advantages = torch.randn(o.tokens, device=device)

    def trl(h: Tensor) -> Tensor:
        log_probs, *_ = ChunkedLogProbFunction.apply(
            h, weight, None, sampled, 1.0, 32768, None, 1.0, ("log_probs", "entropy")
        )
        return log_probs

    def clip() -> Tensor:
        ratio = (trl(hidden) - old.sampled_log_probs).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

    def plain() -> Tensor:
        log_probs = (hidden @ weight.t()).float().log_softmax(-1).gather(-1, sampled[:, None])[:, 0]
        ratio = (log_probs - old.sampled_log_probs).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

    def bucket() -> Tensor:
        step = constrain(head.restrict(hidden, old).policy, old, 0.05, tail="bucket")
        return (step.regression - step.log_ratio.exp() * advantages).mean()

    def floor() -> Tensor:
        step = constrain(head.sparsify(hidden, sampled).policy, old, 0.05, tail="floor")
        return (step.regression - step.log_ratio.exp() * advantages).mean()

    def update(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            hidden.grad = weight.grad = None
            loss().backward()

        return run

    @torch.no_grad()
    def score_trl() -> None:
        trl(moved)

    @torch.no_grad()
    def score_troll() -> None:
        head.sparsify(moved, sampled)

    with torch.no_grad():
        furthest = (trl(moved) - old.sampled_log_probs).abs().max().item()
    assert furthest < (0.02 if cuda else 1e-4), furthest
    print(f"log-probabilities agree with TRL's to {furthest:.1e}")

    ways = {"TRL, clip": clip, "plain, clip": plain, "TROLL, bucket": bucket, "TROLL, floor": floor}
    updates = measure({name: update(way) for name, way in ways.items()}, o.repeats, cuda)
    scoring = measure({"TRL, scoring": score_trl, "TROLL, scoring": score_troll}, o.repeats, cuda)
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"{o.tokens} x {o.vocabulary}, hidden {o.hidden}, {dtype}, {name}, torch {torch.__version__}\n")
    print("| way | ms | ratio | peak MiB | ratio |\n|---|---|---|---|---|")
    for table, base in ((updates, "TRL, clip"), (scoring, "TRL, scoring")):
        for way, (ms, peak) in table.items():
            share = f"{peak:.0f} | {peak / table[base][1]:.2f}" if cuda else "– | –"
            print(f"| {way} | {ms:.1f} | {ms / table[base][0]:.2f} | {share} |")
    if o.output:
        sizes = {"tokens": o.tokens, "vocabulary": o.vocabulary, "hidden": o.hidden, "hardware": name}
        with o.output.open("a") as file:
            file.write(json.dumps({**sizes, "torch": torch.__version__, "ms, MiB": {**updates, **scoring}}) + "\n")


def measure(ways: dict[str, Callable[[], None]], repeats: int, cuda: bool) -> dict[str, tuple[float, float]]:
    """Median milliseconds and peak MiB of each way, in turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, float] = dict.fromkeys(ways, 0.0)
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if cuda else 0
            start = time.perf_counter()
            way()
            if cuda:
                torch.cuda.synchronize()
                peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            if repeat:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: (round(statistics.median(times[name]), 2), round(peaks[name])) for name in ways}


if __name__ == "__main__":
    main()
