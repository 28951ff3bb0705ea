"""Data moved, stored and computed in a step of verl with the trust region, for large runs.

    python benchmarks/verl/sizes.py --out sizes.json      measure the bytes of a token, and the queue if --queue
    python benchmarks/verl/sizes.py --table sizes.json    the table of docs/verl.md

Bytes of a token are measured by writing policies as verl's engine writes them. Time of a token comes from
``engine.json``, measured on a GPU. A step of a large run is both times its tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from troll.policy import SparsePolicy

HERE = Path(__file__).parent
VOCABULARY = 151_936
SPEED = 4e14  # floating-point operations per second and GPU, assumed


@dataclass(frozen=True)
class Run:
    """A large run."""

    name: str
    sequences: int
    tokens: int
    """Of a response."""
    gpus: int
    shards: int
    """Processes that share one copy of a token's logits: tensor × pipeline × sequence parallelism."""
    active: float
    """Active parameters per token, in billions."""
    passes: int
    """Passes of verl that read all fields of a sequence after it was scored: the update, and reference or critic."""


RUNS = (
    Run("8 B on 64 GPUs", 256 * 8, 16_384, 64, 1, 8.2, 1),
    Run("8 B on 64 GPUs, reference KL", 256 * 8, 16_384, 64, 1, 8.2, 2),
    Run("235 B mixture of experts on 1,024 GPUs", 512 * 16, 16_384, 1024, 32, 22.0, 1),
)


def policy(positions: int, kept: int) -> SparsePolicy:
    """Random distributions of which ``kept`` tokens were kept."""
    ids = torch.rand(positions, 4 * kept).topk(kept).indices * 31
    log_probs = torch.randn(positions, kept + 1).log_softmax(-1)
    return SparsePolicy(ids, log_probs[:, :-1].contiguous(), log_probs[:, -1].contiguous(), VOCABULARY)


def bytes_per_token(kept: int, length: int = 2048) -> float:
    """Measured: a sequence as verl's engine writes it."""
    from troll.verl.transport import Positions, write

    everything = Positions(torch.ones(length, dtype=torch.bool), torch.zeros(length, dtype=torch.int64), [length])
    return len(write(policy(length, kept), everything).values()) / length


def queue(kept: int = 8, sequences: int = 256, length: int = 2048) -> dict[str, float]:
    """Measured: that field through verl's TransferQueue, on this machine alone."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from tensordict import TensorDict

    from troll.verl.transport import OLD_POLICY, Positions, write

    everything = Positions(torch.ones(length, dtype=torch.bool), torch.zeros(length, dtype=torch.int64), [length])
    row = write(policy(length, kept), everything).values()
    field = torch.nested.as_nested_tensor([row.clone() for _ in range(sequences)], layout=torch.jagged)
    ray.init(num_cpus=4, include_dashboard=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    keys = [str(i) for i in range(sequences)]
    start = time.perf_counter()
    tq.kv_batch_put(keys=keys, partition_id="p", fields=TensorDict({OLD_POLICY: field}, batch_size=sequences))
    middle = time.perf_counter()
    got = tq.kv_batch_get(keys=keys, partition_id="p", select_fields=[OLD_POLICY])
    end = time.perf_counter()
    assert torch.equal(got[OLD_POLICY].values(), field.values())
    size = field.values().numel()
    tq.close()
    ray.shutdown()
    return {"MB": size / 1e6, "put MB/s": size / 1e6 / (middle - start), "get MB/s": size / 1e6 / (end - middle)}


def table(measured: dict[str, Any], engine: dict[str, Any]) -> str:
    """Markdown."""
    scoring = max(run["scoring"]["microseconds more per token"] for run in engine["runs"])
    update = max(0.0, *(run["update"]["microseconds more per token"] for run in engine["runs"]))
    lines = [
        "| run | tokens of a step | kept | stored | travels per GPU | computed more per GPU | the model itself |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in RUNS:
        tokens = run.sequences * run.tokens
        for kept, each in measured["bytes per token"].items():
            own = tokens / (run.gpus / run.shards)  # of one copy of the model
            travels = (
                tokens * each / run.gpus + own * each * run.passes
            )  # written once, read by every process of a copy
            seconds = own * (scoring + update) / 1e6
            model = 8e9 * run.active * tokens / run.gpus / SPEED  # 2 to score, 2 forward and 4 backward per parameter
            lines.append(
                f"| {run.name} | {tokens / 1e6:.0f} M | {kept} | {tokens * each / 1e9:.1f} GB | "
                f"{travels / 1e6:.0f} MB | {seconds:.1f} s | {model:.0f} s |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--queue", action="store_true")
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.out is not None:
        torch.manual_seed(0)
        measured: dict[str, Any] = {"bytes per token": {str(kept): bytes_per_token(kept) for kept in (8, 64)}}
        if args.queue:
            measured["queue"] = queue()
        args.out.write_text(json.dumps(measured, indent=1) + "\n")
        print(json.dumps(measured, indent=1))
    if args.table is not None:
        print(table(json.loads(args.table.read_text()), json.loads((HERE / "engine.json").read_text())))


if __name__ == "__main__":
    main()
