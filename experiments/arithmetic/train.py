"""TROLL with either tail, clipping and no trust region on one-digit arithmetic: one arm of the comparison.

    python experiments/arithmetic/train.py --model DIR --gguf FILE --arm bucket --seed 0 --output bucket-0.json

A plain training loop. Every rollout is used for 32 updates (4 passes over 8 mini-batches), a stress test of
the trust region. Arms: ``floor`` and ``bucket`` (TROLL with either tail), ``clip`` (±0.2), ``none`` (no trust region).
Needs transformers, and for GGUF files gguf and accelerate.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor

import troll

PROMPTS, SAMPLES, ANSWER_TOKENS = 64, 8, 6
PASSES, MINI_BATCHES = 4, 8
KL_BOUND = 0.05


def problem(rng: random.Random) -> tuple[str, str]:
    """A prompt with four worked sums, and the answer that is asked for."""
    lines = []
    for _ in range(5):
        b, a = sorted((rng.randint(0, 9), rng.randint(0, 9)))
        sign = rng.choice("+-")
        lines.append((f"{a} {sign} {b} =", str(a + b if sign == "+" else a - b)))
    return "".join(f"{q} {a}\n" for q, a in lines[:-1]) + lines[-1][0], lines[-1][1]


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer; the digits of GGUF tokenizers are split one by one, as the original does."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, gguf_file=args.gguf, padding_side="left")
    pre = tokenizers.pre_tokenizers
    tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, gguf_file=args.gguf, dtype=torch.float32)
    return model.requires_grad_(True).to(args.device).eval(), tokenizer


class Rollout:
    """Sampled answers, their rewards, and the logits of the policy that sampled them."""

    def __init__(self, model: Any, tokenizer: Any, rng: random.Random, device: str) -> None:
        problems = [p for p in (problem(rng) for _ in range(PROMPTS)) for _ in range(SAMPLES)]
        batch = tokenizer([q for q, _ in problems], return_tensors="pt", padding=True).to(device)
        self.start = batch["input_ids"].shape[1]
        with torch.no_grad():
            self.ids = model.generate(
                **batch, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=ANSWER_TOKENS,
                min_new_tokens=ANSWER_TOKENS,
            )  # fmt: skip
        self.sampled = self.ids[:, self.start :]
        newline = tokenizer("\n")["input_ids"][-1]
        self.counted = (self.sampled == newline).cumsum(-1) - (self.sampled == newline).long() == 0
        texts = tokenizer.batch_decode(self.sampled)
        right = [
            text.split("\n")[0].strip() == a and "\n" in text for text, (_, a) in zip(texts, problems, strict=True)
        ]
        self.rewards = torch.tensor(right, dtype=torch.float32, device=device)
        self.advantages = troll.advantages.grpo(self.rewards, group_size=SAMPLES)
        self.attention = torch.cat([batch["attention_mask"], torch.ones_like(self.sampled)], dim=1)

    def logits(self, model: Any, rows: Tensor) -> Tensor:
        """Logits of the answer tokens."""
        out = model(
            input_ids=self.ids[rows], attention_mask=self.attention[rows], logits_to_keep=self.sampled.shape[1] + 1
        )
        return out.logits[:, :-1]


def step(arm: str, logits: Tensor, rollout: Rollout, old: troll.SparsePolicy, rows: Tensor) -> tuple[Tensor, Any]:
    """Loss and metrics of one mini-batch."""
    sampled, mask, advantages = rollout.sampled[rows], rollout.counted[rows], rollout.advantages[rows]
    if arm == "bucket":
        proposal = troll.restrict(logits, old)
        return troll.troll_loss(proposal, old, advantages, mask, kl_bound=KL_BOUND, tail="bucket")
    proposal = troll.sparsify(logits, sampled, loss_mask=mask)
    if arm == "floor":
        return troll.troll_loss(proposal, old, advantages, mask, kl_bound=KL_BOUND, tail="floor")
    loss = {"clip": troll.clip_loss, "none": troll.unconstrained_loss}[arm]
    return loss(proposal, old, advantages, mask, tail="floor")


def main() -> None:
    """Train one arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf")
    parser.add_argument("--arm", choices=["floor", "bucket", "clip", "none"], required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    rng = random.Random(args.seed)
    settings = {k: v for k, v in vars(args).items() if k not in ("model", "output")} | {"machine": device_name()}
    model, tokenizer = load(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    rows = []
    for number in range(args.rollouts):
        began = time.perf_counter()
        rollout = Rollout(model, tokenizer, rng, args.device)
        everything = torch.arange(len(rollout.ids), device=args.device)
        with torch.no_grad():
            old = troll.sparsify(rollout.logits(model, everything), rollout.sampled, loss_mask=rollout.counted)
        seen = []
        for _ in range(PASSES):
            for part in torch.randperm(len(everything)).to(args.device).chunk(MINI_BATCHES):
                loss, metrics = step(args.arm, rollout.logits(model, part), rollout, old[part], part)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                seen.append({name: float(value) for name, value in metrics.items()})
        means = {name: sum(m[name] for m in seen) / len(seen) for name in seen[0]}
        rows.append({"rollout": number, "reward": rollout.rewards.mean().item(), **means})
        print(f"{args.arm} seed {args.seed} rollout {number}: reward {rows[-1]['reward']:.3f} "
              f"KL {means['kl_before/mean']:.4f} projected {means.get('projected_fraction', 0):.3f} "
              f"kept {means['kept_mass/old']:.4f} {time.perf_counter() - began:.1f} s", flush=True)  # fmt: skip
        args.output.write_text(json.dumps({**settings, "rows": rows}) + "\n")


def device_name() -> str:
    """What it ran on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    main()
