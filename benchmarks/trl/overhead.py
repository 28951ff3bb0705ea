"""Cost of the trust region: TROLL against clipping in the same trainer, model, data and schedule.

    python benchmarks/trl/overhead.py --model tiny
    python benchmarks/trl/overhead.py --model PATH_OR_NAME --repeats 3 --rollouts 2
    python benchmarks/trl/overhead.py --model qwen2.5-1.5b --batch 64 --length 128 --limit 110

A shape (smollm2-135m, qwen2.5-1.5b, qwen3-4b) is that model with random parameters; its last norm is
scaled such that logits have a deviation of 4.

Arms take turns, several times; completions have a fixed length, so that all arms do the same work. On a CPU every run
is a process of its own, for its peak memory; on a GPU, where the allocator counts it, all runs share one.
Reported, each as the ratio of medians to ``clip``: seconds per update (generation and scoring included), the same
without generation, the update alone, scoring a rollout, a rollout, and peak memory (resident set on a CPU, allocator
on a GPU). A run is refused if the bound does not hold in it, or the first update on a rollout starts outside.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ARMS = ("clip", "bucket", "floor")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "examples" / "trl"))
KEYS = ("seconds per update", "without generation", "update alone", "scoring", "rollout", "peak")
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


def random_model(shape: dict[str, Any], options: argparse.Namespace) -> tuple[Any, Any]:
    """A model of this shape that was never trained, on its device, and a tokenizer of bytes."""
    import tiny_models
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_models.tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(**shape, **special, tie_word_embeddings=True)
    torch.manual_seed(options.seed)
    with torch.device("cpu" if options.cpu else "cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if options.cpu else torch.bfloat16)
    torch.nn.init.constant_(model.model.norm.weight, 4 / (config.initializer_range * shape["hidden_size"] ** 0.5))
    return model, tokenizer


def build(options: argparse.Namespace, arm: str, folder: str) -> Any:
    """The trainer of one arm."""
    import tiny_models
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from troll.trl import TROLLConfig, TROLLTrainer

    class Timed(TROLLTrainer):
        """Notes how long rollouts and updates take."""

        def __init__(self, *args: Any, **named: Any) -> None:
            self.rollout_seconds: list[float] = []
            self.scoring_seconds: list[float] = []
            self.rolling = False
            super().__init__(*args, **named)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start = time.perf_counter()
            self.rolling = True
            self.scoring_seconds.append(0.0)
            result = super()._generate_and_score_completions(inputs)
            synchronise()
            self.rolling = False
            self.rollout_seconds.append(time.perf_counter() - start)
            return result

        def _get_per_token_logps_and_entropies(self, *args: Any, **named: Any) -> Any:
            if not self.rolling:
                return super()._get_per_token_logps_and_entropies(*args, **named)
            synchronise()
            start = time.perf_counter()
            result = super()._get_per_token_logps_and_entropies(*args, **named)
            synchronise()
            self.scoring_seconds[-1] += time.perf_counter() - start
            return result

    if options.model == "tiny":
        sizes = {"hidden_size": options.hidden, "num_hidden_layers": options.layers}
        model, tokenizer = tiny_models.build("dense", **sizes, intermediate_size=2 * options.hidden)
    elif options.model in SHAPES:
        model, tokenizer = random_model(SHAPES[options.model], options)
    else:
        dtype = torch.float32 if options.cpu else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    args = TROLLConfig(
        folder,
        trust_region="clip" if arm == "clip" else "troll",
        tail="bucket" if arm == "clip" else arm,
        kl_bound=0.05,
        use_cpu=options.cpu,
        bf16=not options.cpu,
        per_device_train_batch_size=options.batch,
        num_generations=8,
        max_completion_length=options.length,
        generation_kwargs={"min_new_tokens": options.length},
        max_steps=8 * options.rollouts,
        learning_rate=1e-5,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=options.seed,
    )
    prompts = Dataset.from_dict({"prompt": [f"Question {i}: what is {i} times {i + 3}? Answer:" for i in range(512)]})

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]

    return Timed(model, reward, args, prompts, processing_class=tokenizer)


def synchronise() -> None:
    """Wait for the accelerator."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(options: argparse.Namespace, arm: str) -> dict[str, Any]:
    """One run of one arm, in this process."""
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    held = 0
    if not options.cpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(options, arm, folder)
        ticks = [time.perf_counter()]
        step = trainer.training_step

        def timed(*args: Any, **named: Any) -> Any:
            result = step(*args, **named)
            synchronise()
            ticks.append(time.perf_counter())
            return result

        trainer.training_step = timed
        trainer.train()
    logs = trainer.state.log_history
    if arm != "clip":
        before, after = (
            [x[f"troll/kl_{when}/max"] for x in logs if "troll/regression" in x] for when in ("before", "after")
        )
        assert max(before[::8]) < (1e-9 if options.cpu else 1e-2) or options.model in SHAPES, before
        assert max(before) > 0, before
        assert max(after) <= 0.05 * (1 + 1e-5), after
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    rollouts, scoring = trainer.rollout_seconds, trainer.scoring_seconds
    assert (len(steps), len(rollouts)) == (8 * options.rollouts, options.rollouts)
    kept = range(1 if options.rollouts > 1 else 0, options.rollouts)  # the first rollout warms up
    sums = {i: sum(steps[8 * i : 8 * i + 8]) for i in kept}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "arm": arm,
        "seconds per update": [sums[i] / 8 for i in kept],
        "without generation": [(sums[i] - rollouts[i] + scoring[i]) / 8 for i in kept],
        "update alone": [steps[8 * i + j] for i in kept for j in range(1, 8)],  # those without a rollout before them
        "scoring": [scoring[i] for i in kept],
        "rollout": [rollouts[i] for i in kept],
        "peak": peak if options.cpu else torch.cuda.max_memory_allocated() - held,
        "largest KL at the first update": None if arm == "clip" else max(before[::8]),
        "projected": None
        if arm == "clip"
        else statistics.fmean(x["troll/projected_fraction"] for x in logs if "troll/regression" in x),
    }


def isolated(options: argparse.Namespace, arm: str) -> dict[str, Any]:
    """One run of one arm, in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[0][7:])
    return result


def main() -> None:
    """Take turns, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help=f"'tiny', {', '.join(SHAPES)}, a folder, or a hub name")
    parser.add_argument("--hidden", type=int, default=32, help="width of 'tiny'")
    parser.add_argument("--layers", type=int, default=2, help="layers of 'tiny'")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--batch", type=int, default=8, help="completions per update")
    parser.add_argument("--length", type=int, default=64, help="tokens per completion")
    parser.add_argument("--rollouts", type=int, default=3, help="of 8 updates each, per run; the first is not counted")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each arm")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, 0: all")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds within which a round of turns must end"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="append the result as a line of JSON")
    parser.add_argument("--table", type=Path, metavar="JSONL", help="print the table of earlier results, and no more")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return
    import torch

    options.cpu = not torch.cuda.is_available()
    if options.arm:
        print("RESULT " + json.dumps(measure(options, options.arm)))
        return
    arms = options.arms
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    start = time.perf_counter()
    for repeat in range(options.repeats):
        if repeat and (time.perf_counter() - start) * (repeat + 1) / repeat > options.limit:
            break  # another round would not end in time
        for arm in arms[repeat % len(arms) :] + arms[: repeat % len(arms)]:
            runs[arm].append((isolated if options.cpu else measure)(options, arm))
            seconds = statistics.median(runs[arm][-1]["seconds per update"])
            print(f"{repeat + 1}/{options.repeats} {arm}: {seconds:.4f} s per update", flush=True)
    rows = {arm: summary(results) for arm, results in runs.items()}
    print(f"\n{options.model}, {options.batch} x {options.length} tokens, {hardware(options)}\n")
    print("| arm | " + " | ".join(f"{key} | ratio" for key in KEYS) + " |\n" + "|---" * (1 + 2 * len(KEYS)) + "|")
    for arm, row in rows.items():
        cells = [f"{row[k]:.4g} | {row[k] / rows['clip'][k]:.3f}" for k in KEYS]
        print(f"| {arm} | " + " | ".join(cells) + " |")
    if options.output:
        entry = {
            "model": f"tiny, {options.layers} x {options.hidden}"
            if options.model == "tiny"
            else Path(options.model).name,
            "batch": options.batch,
            "length": options.length,
            "repeats": min(map(len, runs.values())),
            "random weights": options.model in SHAPES,
        }
        with options.output.open("a") as file:
            file.write(json.dumps({**entry, "hardware": hardware(options), "arms": rows}) + "\n")


def summary(results: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over all runs of an arm; memory in MiB."""
    row = {key: statistics.median(x for r in results for x in r[key]) for key in KEYS[:-1]}
    if results[0]["projected"] is not None:
        row["projected"] = statistics.median(r["projected"] for r in results)
    return {**row, "peak": statistics.median(r["peak"] for r in results) / 2**20}


def table(entries: list[dict[str, Any]]) -> str:
    """Ratios to clip of earlier results, in Markdown."""
    lines = ["| model, machine | tail | " + " | ".join(KEYS) + " |", "|---" * (2 + len(KEYS)) + "|"]
    for entry in entries:
        words = f"{entry['model']}, {entry['batch']} × {entry['length']} tokens, {entry['hardware']}"
        words += ", random weights" if entry.get("random weights") else ""
        clip = entry["arms"]["clip"]
        for arm in [arm for arm in entry["arms"] if arm != "clip"]:
            row = entry["arms"][arm]
            cells = [f"{row[k] / clip[k]:.3f}" if k in row and k in clip else "–" for k in KEYS]
            lines.append(f"| {words} | {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def hardware(options: argparse.Namespace) -> str:
    """The machine, in words."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.processor())
    return f"{name}, {options.threads or torch.get_num_threads()} threads, torch {torch.__version__}"


if __name__ == "__main__":
    main()
