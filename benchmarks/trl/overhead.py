"""What the trust region costs: TROLL against clipping in the same trainer, model, data and schedule.

    python benchmarks/trl/overhead.py --model tiny
    python benchmarks/trl/overhead.py --model PATH_OR_NAME --repeats 3 --rollouts 2

Arms take turns, each in a process of its own (for its peak memory), several times; completions have a fixed length, so
that all arms do the same work. Reported: seconds per update (generation and scoring included), seconds of the update
alone, and peak memory (resident set on a CPU, allocator on a GPU), each as the ratio of medians to ``clip``. Before
anything is timed, the process checks that the bound holds and that the first update on a rollout has KL 0.
"""

from __future__ import annotations

import argparse
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


def build(options: argparse.Namespace, arm: str, folder: str) -> Any:
    """The trainer of one arm."""
    import tiny_models
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from troll.adapters.trl import TROLLConfig, TROLLTrainer

    class Timed(TROLLTrainer):
        """Notes how long rollouts and updates take."""

        def __init__(self, *args: Any, **named: Any) -> None:
            self.rollout_seconds: list[float] = []
            super().__init__(*args, **named)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start = time.perf_counter()
            result = super()._generate_and_score_completions(inputs)
            synchronise()
            self.rollout_seconds.append(time.perf_counter() - start)
            return result

    if options.model == "tiny":
        sizes = {"hidden_size": options.hidden, "num_hidden_layers": options.layers}
        model, tokenizer = tiny_models.build("dense", **sizes, intermediate_size=2 * options.hidden)
    else:
        dtype = torch.float32 if options.cpu else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    args = TROLLConfig(
        folder,
        trust_region="clip" if arm == "clip" else "troll",
        tail="bucket" if arm == "clip" else arm,
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
        assert max(before[::8]) < (1e-9 if options.cpu else 1e-2), before
        assert max(before) > 0, before
        assert max(after) <= 0.05 * (1 + 1e-5), after
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    rollouts = trainer.rollout_seconds
    assert (len(steps), len(rollouts)) == (8 * options.rollouts, options.rollouts)
    kept = range(8 if options.rollouts > 1 else 0, len(steps))  # the first rollout warms up
    totals = [sum(steps[i : i + 8]) / 8 for i in kept[::8]]
    updates = [steps[i] for i in kept if i % 8]  # those without a rollout before them
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    peak = peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "arm": arm,
        "seconds per update": totals,
        "update alone": updates,
        "rollout": rollouts[-len(totals) :],
        "peak": peak,
    }


def main() -> None:
    """Take turns, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="'tiny', a folder, or a hub name")
    parser.add_argument("--hidden", type=int, default=32, help="width of 'tiny'")
    parser.add_argument("--layers", type=int, default=2, help="layers of 'tiny'")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--batch", type=int, default=8, help="completions per update")
    parser.add_argument("--length", type=int, default=64, help="tokens per completion")
    parser.add_argument("--rollouts", type=int, default=3, help="of 8 updates each, per run; the first is not counted")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each arm")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="append the result as a line of JSON")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    options.cpu = not torch.cuda.is_available()
    if options.arm:
        print("RESULT " + json.dumps(measure(options, options.arm)))
        return
    arms = options.arms
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for repeat in range(options.repeats):
        for arm in arms[repeat % len(arms) :] + arms[: repeat % len(arms)]:
            command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm]
            done = subprocess.run(command, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if done.returncode or not lines:
                sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
            runs[arm].append(json.loads(lines[0][7:]))
            seconds = statistics.median(runs[arm][-1]["seconds per update"])
            print(f"{repeat + 1}/{options.repeats} {arm}: {seconds:.4f} s per update", flush=True)
    rows = {arm: summary(results) for arm, results in runs.items()}
    print(f"\n{options.model}, {options.batch} x {options.length} tokens, {hardware(options)}\n")
    print(
        "| arm | s per update | ratio | update alone | ratio | rollout | ratio | peak MiB | ratio |\n"
        + "|---" * 9
        + "|"
    )
    for arm, row in rows.items():
        cells = [
            f"{row[k]:.4g} | {row[k] / rows['clip'][k]:.3f}"
            for k in ("seconds per update", "update alone", "rollout", "peak")
        ]
        print(f"| {arm} | " + " | ".join(cells) + " |")
    if options.output:
        entry = {
            "model": f"tiny, {options.layers} x {options.hidden}"
            if options.model == "tiny"
            else Path(options.model).name,
            "batch": options.batch,
            "length": options.length,
            "repeats": options.repeats,
        }
        with options.output.open("a") as file:
            file.write(json.dumps({**entry, "hardware": hardware(options), "arms": rows}) + "\n")


def summary(results: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over all runs of an arm; memory in MiB."""
    row = {
        key: statistics.median(x for r in results for x in r[key])
        for key in ("seconds per update", "update alone", "rollout")
    }
    return {**row, "peak": statistics.median(r["peak"] for r in results) / 2**20}


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
