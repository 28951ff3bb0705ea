"""How well do the two tail treatments measure the KL of a real model? Floor and bucket against the whole vocabulary.

A model samples completions and is updated on them without any trust region. After every update the token KL between the
old policy and the proposal is measured over the whole vocabulary and, for several supports, with both tails.

    python experiments/tails/run.py --model DIR_OR_HUB_NAME [--gguf FILE]

needs transformers (for GGUF files also gguf and accelerate) and matplotlib, and writes results.json and figure.svg
beside this file.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from matplotlib import pyplot as plt
from torch import Tensor

import troll
from troll.policy import Tail, align

HERE = Path(__file__).parent
PROMPTS = [
    "The history of the bicycle began",
    "To cook rice without a lid, you should",
    "Q: A train travels 60 km in 45 minutes. What is its speed in km/h?\nA:",
    "def fibonacci(n):\n",
    "Dear neighbour, I am writing to",
    "The main difference between a virus and a bacterium is",
    "6 + 6 = 12\n8 - 4 = 4\n7 + 5 =",
    "Once upon a time there was a troll who",
]
SUPPORTS = (16, 64, 256)
TAILS: tuple[Tail, ...] = ("floor", "bucket")
KL_BOUND = 0.05


def measure(logits: Tensor, old_logits: Tensor, sampled: Tensor) -> dict[str, Any]:
    """Mean KL and the fraction of tokens outside the trust region, with all tokens and per support and tail."""
    dense = troll.token_kl(logits.log_softmax(-1), old_logits.log_softmax(-1))
    row: dict[str, Any] = {"dense": summary(dense, dense)}
    for support in SUPPORTS:
        old = troll.sparsify(old_logits, sampled, support)
        row[f"kept mass, {support}"] = old.kept_mass.mean().item()
        for tail in TAILS:
            proposal = troll.sparsify(logits, sampled, support) if tail == "floor" else troll.restrict(logits, old)
            row[f"{tail}, {support}"] = summary(troll.token_kl(*align(proposal, old, tail)), dense)
    return row


def summary(kl: Tensor, dense: Tensor) -> dict[str, float]:
    """What a trust region would see with this KL."""
    active, truth = kl > KL_BOUND, dense > KL_BOUND
    return {
        "mean": kl.mean().item(),
        "projected": active.double().mean().item(),
        "projected by mistake": (active & ~truth).double().mean().item(),
        "missed": (~active & truth).double().mean().item(),
    }


def main() -> None:
    """Sample, update, measure, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf", help="file name of the weights inside the model folder")
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()

    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, gguf_file=args.gguf, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, gguf_file=args.gguf, dtype=torch.float32)
    model.requires_grad_(True).eval()  # no dropout: the old policy and the proposal must agree before the first update
    batch = tokenizer(PROMPTS * 2, return_tensors="pt", padding=True)
    start = batch["input_ids"].shape[1]
    ids = model.generate(**batch, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=args.tokens)
    sampled = ids[:, start:]
    counted = (sampled == tokenizer.eos_token_id).cumsum(-1) <= 1  # up to and with the end of the text
    attention = torch.cat([batch["attention_mask"], counted.long()], dim=1)
    texts = [tokenizer.decode(row[keep]) for row, keep in zip(sampled, counted, strict=True)]
    rewards = torch.tensor([sum(c.islower() for c in text) / max(1, len(text)) for text in texts])
    advantages = troll.advantages.grpo(rewards, groups=torch.arange(len(PROMPTS)).repeat(2))

    def score() -> Tensor:
        out = model(input_ids=ids, attention_mask=attention).logits
        return out[:, start - 1 : -1]

    with torch.no_grad():
        old_logits = score()
    old = troll.sparsify(old_logits, sampled, loss_mask=counted)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    rows = []
    for update in range(1, args.updates + 1):
        began = time.perf_counter()
        loss, _ = troll.unconstrained_loss(
            troll.sparsify(score(), sampled, loss_mask=counted), old, advantages, counted, tail="floor"
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            rows.append({"update": update, **measure(score()[counted], old_logits[counted], sampled[counted])})
        print(
            f"update {update}/{args.updates} in {time.perf_counter() - began:.0f} s: {json.dumps(rows[-1])}", flush=True
        )

    result = {
        "model": Path(args.model).name,
        "weights": args.gguf,
        "tokens": int(counted.sum()),
        "learning_rate": args.learning_rate,
        "kl_bound": KL_BOUND,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "troll": troll.__version__},
        "machine": f"{platform.machine()}, CPU, {torch.get_num_threads()} threads",
        "rows": rows,
    }
    (HERE / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result)


def draw(result: dict[str, Any]) -> None:
    """Mean KL and share of projected tokens over the updates."""
    rows = result["rows"]
    updates = [row["update"] for row in rows]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    styles = {16: ":", 64: "-", 256: "--"}
    for panel, quantity, title in zip(
        panels, ("mean", "projected"), ("mean token KL", "share of tokens with KL > ε"), strict=True
    ):
        panel.plot(updates, [row["dense"][quantity] for row in rows], color="black", lw=2.5, label="whole vocabulary")
        for support in SUPPORTS:
            for tail, colour in zip(TAILS, ("#c44536", "#197278"), strict=True):
                values = [row[f"{tail}, {support}"][quantity] for row in rows]
                panel.plot(updates, values, color=colour, ls=styles[support], label=f"{tail}, {support} tokens")
        panel.set(xlabel="update on the same rollout", title=title)
        panel.grid(alpha=0.3)
    panels[0].set_yscale("log")
    panels[0].axhline(result["kl_bound"], color="grey", lw=0.8)
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.suptitle(f"{result['model']}, temperature 1, {result['tokens']} tokens")
    figure.savefig(HERE / "figure.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
