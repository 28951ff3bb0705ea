"""Time to save a checkpoint: TROLLTrainer and TRL in turns, with the same model, optimizer and disk.

    python benchmarks/checkpoints/saving.py [--model FOLDER] [--folder SOMEWHERE_ON_THE_DISK]

Without ``--model``: random parameters in the shapes of SmolLM2-135M and of a model a tenth its size. Both trainers make
one real update, so that the optimizer has a state, and then save in turns, each on a disk with nothing left to write.
TRL returns while its files are still in memory; so beside the time until a save returns stands the time until all of
it is on the disk. Writes results.json beside this file.
"""

# ruff: noqa: E402, examples have the tokenizer
from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "examples" / "trl"))

import tiny_models
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from troll.lab.training.settings import machine
from troll.trl import TROLLConfig, TROLLTrainer
from troll.trl.robust import store
from troll.trl.robust.store import last_good

SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SMALL = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 12, "num_attention_heads": 3}
SHAPES = {"SmolLM2-135M's shape": {**SMOLLM2, "num_key_value_heads": 3}, "a tenth": {**SMALL, "num_key_value_heads": 3}}
VOCABULARY = {"SmolLM2-135M's shape": 49_152, "a tenth": 32_768}
UPDATES = 8  # on each rollout


def model_of(name: str) -> tuple[Any, Any]:
    """A model and its tokenizer, from a folder or with random parameters."""
    if name not in SHAPES:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), AutoTokenizer.from_pretrained(name)
    tokens = tiny_models.tokenizer()
    config = AutoConfig.for_model(
        "llama",
        **SHAPES[name],
        vocab_size=VOCABULARY[name],
        tie_word_embeddings=True,
        pad_token_id=tokens.pad_token_id,
        eos_token_id=tokens.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokens


def trained(kind: str, name: str, folder: Path, length: int) -> Any:
    """A trainer after its first update."""
    model, tokens = model_of(name)
    trainer, config = (TROLLTrainer, TROLLConfig) if kind == "troll" else (GRPOTrainer, GRPOConfig)
    args = config(
        str(folder / kind),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=4,
        num_generations=4,
        steps_per_generation=UPDATES,
        max_completion_length=length,
        generation_kwargs={"min_new_tokens": length},
        gradient_checkpointing=False,
        max_steps=1,
        save_strategy="no",
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
    )
    prompts = Dataset.from_dict({"prompt": [f"Question {i}: what is {i} times {i + 3}? Answer:" for i in range(64)]})

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]

    run = trainer(model, reward, args, prompts, processing_class=tokens)
    run.train()
    return run


@contextlib.contextmanager
def timed(parts: dict[str, float], *places: tuple[Any, str, str]) -> Iterator[None]:
    """Add up what functions of objects and modules take, by the name of a part."""

    def wrapped(real: Any, part: str) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*args, **named)
            finally:
                parts[part] = parts.get(part, 0.0) + time.perf_counter() - began

        return call

    with contextlib.ExitStack() as stack:
        for owner, name, part in places:
            stack.enter_context(patch.object(owner, name, wrapped(getattr(owner, name), part)))
        yield


def save(run: Any, kind: str, step: int) -> dict[str, Any]:
    """Time of one checkpoint on an idle disk."""
    run.state.global_step = step
    gc.collect()
    os.sync()
    parts: dict[str, float] = {}
    places = [(run, "save_model", "weights"), (run, "_save_optimizer_and_scheduler", "optimizer and rollout")]
    places += [(run, "create_model_card", "model card")]
    if kind == "troll":
        places += [
            (sys.modules["troll.trl.robust.checkpoints"], "save_rollout", "rollout"),
            (store, "verify", "read again"),
            (store, "_publish", "rename"),
        ]
        places += [(sys.modules["troll.trl.robust.checkpoints"], "commit", "commit")]
        places += [(sys.modules["troll.trl.robust.checkpoints"], "rotate", "delete the old one")]
        places += [(store, "sync_file", "sync (sum over threads)"), (store, "checksum", "checksums (sum over threads)")]
    with timed(parts, *places):
        began = time.perf_counter()
        run._save_checkpoint(run.model, trial=None)
        seconds = time.perf_counter() - began
    os.sync()
    durable = time.perf_counter() - began
    place = Path(run.args.output_dir) / f"checkpoint-{step}"
    size = sum(x.stat().st_size for x in place.rglob("*") if x.is_file())
    return {"seconds": seconds, "until on the disk": durable, "bytes": size, "parts": parts}


def found_again(folder: Path, cold: bool) -> float:
    """Seconds that ``last_good`` takes; ``cold``: with nothing of the checkpoint in memory."""
    if cold:
        os.sync()
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
    began = time.perf_counter()
    assert last_good(folder).path is not None
    return time.perf_counter() - began


def measure(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both trainers, in turns."""
    with contextlib.redirect_stdout(io.StringIO()):
        runs = {kind: trained(kind, name, folder, options.length) for kind in ("trl", "troll")}
    saves: dict[str, list[dict[str, Any]]] = {kind: [] for kind in runs}
    for repeat in range(options.repeats + 1):
        order = list(runs) if repeat % 2 else list(runs)[::-1]
        for kind in order:
            found = save(runs[kind], kind, repeat + 1)
            if repeat:  # the first one has no old one to delete
                saves[kind].append(found)
            print(f"{name}, {kind}: {found['seconds']:.2f} s, {found['until on the disk']:.2f} s", flush=True)
    medians = {
        kind: {key: statistics.median(x[key] for x in of) for key in ("seconds", "until on the disk", "bytes")}
        for kind, of in saves.items()
    }
    parts = {
        kind: {part: round(statistics.median(x["parts"].get(part, 0.0) for x in of), 4) for part in of[-1]["parts"]}
        for kind, of in saves.items()
    }
    pairs = list(zip(saves["troll"], saves["trl"], strict=True))
    result = {
        "parameters": sum(x.numel() for x in runs["troll"].model.parameters()),
        "seconds": {kind: round(x["seconds"], 4) for kind, x in medians.items()},
        "seconds until on the disk": {kind: round(x["until on the disk"], 4) for kind, x in medians.items()},
        "bytes": {kind: x["bytes"] for kind, x in medians.items()},
        "ratio": round(medians["troll"]["seconds"] / medians["trl"]["seconds"], 3),
        "ratios of each turn": [round(a["seconds"] / b["seconds"], 3) for a, b in pairs],
        "ratio until on the disk": round(
            medians["troll"]["until on the disk"] / medians["trl"]["until on the disk"], 3
        ),
        "ratios of each turn until on the disk": [
            round(a["until on the disk"] / b["until on the disk"], 3) for a, b in pairs
        ],
        "parts": parts,
        "seconds to find the last good one": {
            "in memory": round(found_again(folder / "troll", cold=False), 4),
            "from the disk": round(found_again(folder / "troll", cold=True), 4),
        },
    }
    print(json.dumps(result, indent=1), flush=True)
    return result


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=list(SHAPES), help="folders; without it, random parameters")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; without it, the temporary one")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--length", type=int, default=64, help="tokens per completion, of 32 completions per rollout")
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load before": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "versions": {name: metadata.version(name) for name in ("torch", "trl", "transformers", "safetensors")},
        "python": platform.python_version(),
        "repeats": options.repeats,
        "models": {},
    }
    for name in options.model:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            results["models"][name if name in SHAPES else Path(name).name] = measure(name, options, folder)
        finally:
            shutil.rmtree(folder)
    options.results.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
