"""Cost of the trust region in verl's engine: scoring a rollout and updating on it, against verl's clip.

    python benchmarks/verl/engine.py --out engine.json                      a model of Qwen2.5-1.5B's shape, on a GPU
    python benchmarks/verl/engine.py --model PATH --sequences 8 --out …     another model
    python benchmarks/verl/engine.py --table engine.json

Runs are added to what is in the file. ``--learning_rate`` is that of one update between scoring and measuring: with
1e-6 no token leaves the trust region, with 1e-4 nearly all do.

Both engines are verl's FSDP engine on one process, with the same parameters, batch, precision (bf16) and micro-batches.
They take turns. First it is checked that the two agree where they must: without a bound, the loss and the norm of its
gradient are those of verl's loss without a clip, up to bf16.

verl takes log-probabilities from flash-attn, and without it from a loop over rows that takes longer than the model.
Where flash-attn is missing, torch's cross-entropy in fp32 stands in for it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}

import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import is_flash_attn_2_available
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig, HFModelConfig, PolicyLossConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils.losses import ppo_loss

from troll.verl import TrollFSDPEngineConfig, TrollPolicyLossConfig
from troll.verl.transport import OLD_POLICY

SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def make(folder: Path) -> None:
    """A model of that shape with random parameters; its last norm is scaled such that logits have a deviation of 4."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE), dtype=torch.bfloat16)
    model.model.norm.weight.data.fill_(4 / (0.02 * SHAPE["hidden_size"] ** 0.5))  # type: ignore[operator]
    model.save_pretrained(folder)


def log_probs(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> torch.Tensor:
    """What verl takes from flash-attn."""
    return -torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")


def engine(path: Path, model_type: str, strategy: str, learning_rate: float) -> Any:
    """One of verl's, with the trust region (``troll_lm``) or without."""
    model = HFModelConfig(
        path=str(path),
        load_tokenizer=False,
        use_remove_padding=True,
        enable_gradient_checkpointing=True,
        override_config={"attn_implementation": "sdpa"},
    )
    made = EngineRegistry.new(
        model_type=model_type,
        backend=strategy,
        model_config=model,
        engine_config=TrollFSDPEngineConfig(strategy=strategy, model_dtype="bf16", use_torch_compile=False),
        optimizer_config=FSDPOptimizerConfig(lr=learning_rate, total_training_steps=1000),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def batch(sequences: int, prompt: int, response: int, micro: int, vocab: int) -> TensorDict:
    """Random tokens and advantages, as verl's V1 trainer lays them out."""
    generator = torch.Generator().manual_seed(1)

    def rows(n: int, length: int) -> Any:
        ids = torch.randint(0, vocab, (n, length), generator=generator)
        return torch.nested.as_nested_tensor(list(ids), layout=torch.jagged)

    def nested(make_row: Any) -> Any:
        return torch.nested.as_nested_tensor([make_row() for _ in range(sequences)], layout=torch.jagged)

    prompts, responses = rows(sequences, prompt), rows(sequences, response)
    both = [torch.cat(pair) for pair in zip(prompts.unbind(), responses.unbind(), strict=True)]
    data = TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.nested.as_nested_tensor(both, layout=torch.jagged),
            "position_ids": nested(lambda: torch.arange(prompt + response)),
            "loss_mask": nested(lambda: torch.ones(response, dtype=torch.int64)),
            "response_mask": nested(lambda: torch.ones(response, dtype=torch.int64)),
            "advantages": nested(lambda: torch.randn(response, generator=generator)),
        },
        batch_size=sequences,
    )
    tu.assign_non_tensor(
        data,
        use_remove_padding=True,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=micro,
        temperature=1.0,
        calculate_entropy=False,
        global_batch_size=sequences,
        use_fused_kernels=False,
    )
    return data


def config(kind: str, **options: Any) -> Any:
    """verl's loss function: ``clip``, ``unclipped`` or ``troll``."""
    clip = {"unclipped": 1e6}.get(kind, 0.2)
    troll = kind == "troll"
    return partial(
        ppo_loss,
        config=FSDPActorConfig(
            strategy="fsdp2",
            ppo_micro_batch_size_per_gpu=1,
            rollout_n=1,
            policy_loss=TrollPolicyLossConfig(**options) if troll else PolicyLossConfig(),
            clip_ratio_low=clip,
            clip_ratio_high=clip,
            clip_ratio_c=1e6 if kind == "unclipped" else 3.0,
        ),
    )


class Arm:
    """One of verl's engines, what it scored, and what it took."""

    def __init__(self, path: Path, model_type: str, strategy: str, learning_rate: float, data: TensorDict) -> None:
        self.engine, self.data = engine(path, model_type, strategy, learning_rate), data
        self.seconds: dict[str, list[float]] = {"scoring": [], "update": []}
        self.peak: dict[str, int] = {"scoring": 0, "update": 0}

    def timed(self, what: str, work: Any) -> Any:
        """Its result; the time and memory it took are kept."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        result = work()
        torch.cuda.synchronize()
        self.seconds[what].append(time.perf_counter() - start)
        self.peak[what] = max(self.peak[what], torch.cuda.max_memory_allocated())
        return result

    def score(self) -> dict[str, Any]:
        """What the scoring pass returns to verl."""
        with self.engine.eval_mode():
            output: dict[str, Any] = self.engine.infer_batch(self.data.clone(recurse=False))["model_output"]
        return output

    def update(self, scored: dict[str, Any], loss: Any, step: bool = False) -> tuple[float, float, dict[str, Any]]:
        """Loss, norm of its gradient, metrics."""
        data = self.data.clone(recurse=False)
        rows = zip(scored["log_probs"].unbind(), data["prompts"].unbind(), strict=True)
        responses = [row[len(prompt) - 1 : -1] for row, prompt in rows]
        data["old_log_probs"] = torch.nested.as_nested_tensor(responses, layout=torch.jagged).cpu()
        if OLD_POLICY in scored:
            data[OLD_POLICY] = scored[OLD_POLICY]
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            output = self.engine.forward_backward_batch(data, loss)
            gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm([getattr(g, "_local_tensor", g).float() for g in gradients])
            if step:
                self.engine.optimizer_step()
        return sum(output["loss"]), float(norm), output["metrics"]


def measure(path: Path, strategy: str, args: argparse.Namespace) -> dict[str, Any]:
    """Both arms in turns."""
    vocab = json.loads((path / "config.json").read_text())["vocab_size"]
    data = batch(args.sequences, args.prompt, args.response, args.micro, vocab)
    clip, troll = (Arm(path, kind, strategy, args.learning_rate, data) for kind in ("language_model", "troll_lm"))
    scored, recorded = clip.score(), troll.score()
    unclipped = clip.update(scored, config("unclipped"))
    unbounded = troll.update(recorded, config("troll", kl_bound=float("inf")))
    for ours, theirs in zip(unbounded[:2], unclipped[:2], strict=True):
        assert abs(ours - theirs) <= 0.01 * abs(theirs) + 1e-4, (unbounded[:2], unclipped[:2])
    losses = {"clip": config("clip"), "troll": config("troll")}
    for arm, scores, name in ((clip, scored, "clip"), (troll, recorded, "troll")):
        arm.update(scores, losses[name], step=True)  # away from the old policy, and everything is compiled
        arm.seconds = {"scoring": [], "update": []}
    metrics: dict[str, Any] = {}
    for _ in range(args.repeats):
        for arm, scores, name in ((clip, scored, "clip"), (troll, recorded, "troll")):
            arm.timed("scoring", arm.score)
            *_, metrics[name] = arm.timed("update", lambda a=arm, s=scores, n=name: a.update(s, losses[n]))
    tokens = args.sequences * args.response
    field = recorded[OLD_POLICY].values()
    report = {
        "strategy": strategy,
        "sequences": f"{args.sequences} of {args.prompt} + {args.response}, {args.micro} per micro-batch",
        "learning rate": args.learning_rate,
        "tokens": tokens,
        "checked": {"unclipped": unclipped[:2], "unbounded": unbounded[:2]},
        "bytes per token": len(field) / tokens,
        "projected_fraction": metrics["troll"]["actor/troll/projected_fraction"].aggregate(),
        "support_size": metrics["troll"]["actor/troll/support_size/old"].aggregate(),
    }
    for what in ("scoring", "update"):
        seconds = {name: statistics.median(arm.seconds[what]) for name, arm in (("clip", clip), ("troll", troll))}
        report[what] = {
            "seconds": seconds,
            "ratio": seconds["troll"] / seconds["clip"],
            "microseconds more per token": 1e6 * (seconds["troll"] - seconds["clip"]) / tokens,
            "peak MiB": {name: arm.peak[what] >> 20 for name, arm in (("clip", clip), ("troll", troll))},
        }
    return report


def table(measured: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| engine | sequences | projected | scoring | more per token | update | more per token | peak of the update |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in measured["runs"]:
        scoring, update = run["scoring"], run["update"]
        lines.append(
            f"| {run['strategy']} | {run['sequences']} | {run['projected_fraction']:.0%} | {scoring['ratio']:.3f} | "
            f"{scoring['microseconds more per token']:.2f} µs | {update['ratio']:.3f} | "
            f"{update['microseconds more per token']:.2f} µs | {update['peak MiB']['troll']:,} MiB, "
            f"clip {update['peak MiB']['clip']:,} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=1792)
    parser.add_argument("--micro", type=int, default=4, help="sequences per micro-batch")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--strategies", nargs="+", default=["fsdp2", "fsdp"])
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    parser.add_argument("--out", type=Path, default=Path("engine.json"))
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table is not None:
        print(table(json.loads(args.table.read_text())))
        return
    if not is_flash_attn_2_available():
        transformer_impl.logprobs_from_logits = log_probs
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            make(Path(folder))
        reports = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
        for strategy in args.strategies:
            reports.append(measure(args.model or Path(folder), strategy, args))
            torch.cuda.empty_cache()
            print(json.dumps(reports[-1], indent=1), flush=True)
            facts = {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "log-probabilities of the clip": "flash-attn"
                if is_flash_attn_2_available()
                else "torch's cross-entropy",
                "model": "Qwen2.5-1.5B's shape, random weights" if args.model is None else args.model.name,
            }
            args.out.write_text(json.dumps({**facts, "runs": reports}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
