"""How far does the network itself move between two rollouts, and how well does the projection's solver converge?

The trust region bounds the projected policy; the network is only pulled towards it. After all updates on a rollout,
this measures the token KL between the network and the one that made the rollout over the whole vocabulary, for TROLL,
PPO's clip and no trust region. On every update it measures the convergence of the solver on the projected tokens.

    python experiments/network/run.py --model DIR_OR_HUB_NAME --task sorting --arm troll --seed 0

A plain training loop in fp32 on the tasks of ``experiments/studies``. A run is a line in its
``results/network.jsonl``, from which ``experiments/studies/analyse.py`` writes tables.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import runpy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import troll
from troll.diagnostics import Conditioning, solver_conditioning

HERE = Path(__file__).parent
STUDIES = HERE.parent / "studies"
SUPPORTS = (16, 64, 256)
LOSSES = {"troll": troll.troll_loss, "clip": troll.clip_loss, "none": troll.unconstrained_loss}


class Rollout:
    """Sampled completions and their rewards."""

    def __init__(self, model: Any, tokenizer: Any, task: dict[str, Any], rows: list[Any], samples: int) -> None:
        rows = [row for row in rows for _ in range(samples)]
        prompts = [row["prompt"] for row in rows]
        chat = not isinstance(prompts[0], str)
        if chat:
            prompts = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
        batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
        stops = [tokenizer.eos_token_id, *(tokenizer.encode(task["stop"])[-1:] if task.get("stop") else ())]
        start, length = batch["input_ids"].shape[1], task["settings"]["max_completion_length"]
        with torch.no_grad():
            self.ids = model.generate(
                **batch, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=length, eos_token_id=stops,
                pad_token_id=tokenizer.eos_token_id,
            )  # fmt: skip
        self.sampled = self.ids[:, start:]
        ends = torch.isin(self.sampled, torch.tensor(stops, device=model.device))
        self.counted = ends.cumsum(-1) - ends.long() == 0
        self.attention = torch.cat([batch["attention_mask"], self.counted.long()], dim=1)
        texts = [
            tokenizer.decode(ids[kept], skip_special_tokens=True)
            for ids, kept in zip(self.sampled, self.counted, strict=True)
        ]
        answers = [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        self.rewards = torch.tensor(task["reward"](answers, **columns), device=model.device)
        self.advantages = troll.advantages.grpo(self.rewards, group_size=samples)

    def logits(self, model: Any, rows: Tensor) -> Tensor:
        """Logits of the completions' tokens, [B, T, V]."""
        out = model(
            input_ids=self.ids[rows], attention_mask=self.attention[rows], logits_to_keep=self.sampled.shape[1] + 1
        )
        return out.logits[:, :-1].float()

    def parts(self, size: int) -> Iterator[Tensor]:
        """All rows in order, in chunks."""
        yield from torch.arange(len(self.ids), device=self.ids.device).split(size)


def solved(updates: list[Conditioning]) -> dict[str, float]:
    """Convergence of the solver on the projected tokens, over the updates on a rollout."""

    def all_of(name: str) -> Tensor:
        return torch.cat([getattr(update, name) for update in updates]).double()

    row = {
        "projected": all_of("active").mean().item(),
        "near the kink": (all_of("kink_distance") < 0.1).double().mean().item(),
    }
    for name, field in (("steps", "iterations"), ("mix", "mix"), ("variance", "variance")):
        row |= quantiles(all_of(field), name)
    return row


def reached(model: Any, rollout: Rollout, before: Tensor, size: int, kl_bound: float) -> dict[str, float]:
    """Token and sequence KL between the network now and before, over the whole vocabulary."""
    forward, backward = [], []
    for part in rollout.parts(size):
        with torch.no_grad():
            new, old = rollout.logits(model, part).log_softmax(-1), before[part].log_softmax(-1)
        forward.append(troll.token_kl(new, old))
        backward.append(troll.token_kl(old, new))
    counted = rollout.counted
    kl, reverse = torch.cat(forward), torch.cat(backward)
    by_sequence = (reverse * counted).sum(-1)
    return {
        **quantiles(kl[counted], "token KL"),
        "tokens outside the bound": (kl[counted] > kl_bound).double().mean().item(),
        "token KL(old, new) mean": reverse[counted].mean().item(),
        "sequence KL(old, new) mean": by_sequence.mean().item(),
        "sequence KL(old, new) error": (by_sequence.std() / len(by_sequence) ** 0.5).item(),
        "sequence KL(old, new) max": by_sequence.max().item(),
    }


def quantiles(x: Tensor, name: str) -> dict[str, float]:
    """Mean, percentiles and extremes."""
    if not x.numel():
        return {}
    points = torch.quantile(x.double(), torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64, device=x.device)).tolist()
    named = dict(zip((f"{name} p1", f"{name} median", f"{name} p99"), points, strict=True))
    return {f"{name} mean": x.mean().item(), **named, f"{name} max": x.max().item(), f"{name} min": x.min().item()}


def kept(before: Tensor, rollout: Rollout) -> dict[str, float]:
    """Probability of the most probable tokens, and how often the sampled one is among them."""
    found = {}
    ordered = before[rollout.counted].softmax(-1).sort(-1, descending=True)
    sampled = rollout.sampled[rollout.counted].unsqueeze(-1)
    for size in SUPPORTS:
        mass = ordered.values[:, :size].double().sum(-1)
        found[f"kept mass, {size}"] = mass.mean().item()
        found[f"positions with 1 - 1e-5, {size}"] = (mass >= 1 - 1e-5).double().mean().item()
        inside = (ordered.indices[:, :size] == sampled).any(-1)
        found[f"sampled tokens outside, {size}"] = 1 - inside.double().mean().item()
    return found


def train(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train one arm and return the measurements of each rollout."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    rng = random.Random(args.seed)
    task = runpy.run_path(str(STUDIES / "tasks" / f"{args.task}.py"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    rows = []
    for _ in range(args.rollouts):
        rollout = Rollout(model, tokenizer, task, rng.sample(task["train_dataset"], args.prompts), args.samples)
        with torch.no_grad():
            before = torch.cat([rollout.logits(model, part) for part in rollout.parts(args.mini_batch)])
        old = troll.sparsify(before, rollout.sampled, loss_mask=rollout.counted)
        row = {"reward": rollout.rewards.mean().item(), **kept(before, rollout)}
        seen: list[Conditioning] = []
        for part in torch.randperm(len(before)).to(args.device).split(args.mini_batch):
            proposal = troll.restrict(rollout.logits(model, part), old[part])
            counted = rollout.counted[part]
            extra = {"kl_bound": args.kl_bound, "regression_coef": args.regression_coef} if args.arm == "troll" else {}
            loss, metrics = LOSSES[args.arm](
                proposal, old[part], rollout.advantages[part], counted, **extra, tail="bucket"
            )
            seen.append(solver_conditioning(proposal, old[part], counted, kl_bound=args.kl_bound, tail="bucket"))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        row |= solved(seen)
        if "sequence_kl_after" in metrics:
            row["sequence KL after projection, last update"] = metrics["sequence_kl_after"].item()
        row |= reached(model, rollout, before, args.mini_batch, args.kl_bound)
        rows.append({name: float(f"{value:.4g}") for name, value in row.items()})
        print(json.dumps({"arm": args.arm, "seed": args.seed, **rows[-1]}), flush=True)
    return rows


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", default="sorting", help="a file in experiments/studies/tasks")
    parser.add_argument("--arm", choices=list(LOSSES), default="troll")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--mini-batch", type=int, default=64, help="completions per update")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--kl-bound", type=float, default=0.05)
    parser.add_argument("--regression-coef", type=float, default=1.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=STUDIES / "results" / "network.jsonl")
    args = parser.parse_args()
    began = time.perf_counter()
    settings = {name: value for name, value in vars(args).items() if name not in ("model", "output")}
    machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    found = {**settings, "machine": machine, "torch": torch.__version__, "rollouts": train(args)}
    found["seconds"] = round(time.perf_counter() - began, 1)
    with args.output.open("a") as file:
        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
