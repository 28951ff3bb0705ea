"""Time of generation in a training run: plain transformers, and without the work it repeats for every token.

    python benchmarks/trl/generation.py --model qwen2.5-1.5b --sequences 256 --prompt 256 --tokens 128
    python benchmarks/trl/generation.py --model smollm2-135m

fp32 parameters that train in bf16, as ``troll train`` has them; random parameters of a model's shape; prompts padded on
the left; no end before the last token. Arms take turns. Checked first: kept casts give the same tokens, grouped
attention the same logits in fp32. Reported: seconds, their ratio to ``plain``, the allocator's peak.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from overhead import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM

from troll.modeling import fast_decoding, gqa_decoding

Arm = Callable[[Accelerator], AbstractContextManager[Any]]
ARMS: dict[str, Arm] = {
    "plain": lambda _: nullcontext(),
    "casts kept": lambda accelerator: accelerator.autocast(),
    "grouped": lambda _: gqa_decoding(),
    "both": fast_decoding,
}


def generate(model: Any, inputs: dict[str, torch.Tensor], tokens: int, **how: Any) -> Any:
    """That many tokens for every sequence."""
    how = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0} | how
    with torch.no_grad():
        return model.generate(
            **inputs, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0, disable_compile=True, **how
        )


def check(model: Any, accelerator: Accelerator, inputs: dict[str, torch.Tensor]) -> float:
    """The largest difference of a logit in fp32; refuses other tokens with kept casts, and more than rounding."""
    few = {name: tensor[:8] for name, tensor in inputs.items()}
    found = {}
    for name in ("plain", "casts kept"):
        with ARMS[name](accelerator):
            torch.manual_seed(0)
            found[name] = generate(model, few, 16)
    assert torch.equal(found["plain"], found["casts kept"]), "kept casts gave other tokens"
    forward, model.forward = model.forward, model._original_forward  # fp32 throughout
    logits = []
    for name in ("plain", "grouped"):
        with ARMS[name](accelerator):
            made = generate(model, few, 2, do_sample=False, output_logits=True, return_dict_in_generate=True)
        logits.append(made.logits[1])
    model.forward = forward
    difference = (logits[0] - logits[1]).abs().max().item()
    assert difference <= 1e-5 * logits[0].abs().max().item(), f"grouped attention gave other logits, by {difference}"
    return difference


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and peak of every arm."""
    cuda = torch.cuda.is_available()
    accelerator = Accelerator(mixed_precision="bf16")
    torch.manual_seed(0)
    with torch.device(accelerator.device):
        config = AutoConfig.for_model(**SHAPES[options.model], tie_word_embeddings=True)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        ids = torch.randint(1, config.vocab_size, (options.sequences, options.prompt))
        start = torch.randint(options.prompt // 2, (options.sequences, 1))
        mask = (torch.arange(options.prompt) >= start).long()
    model = accelerator.prepare_model(model.train())
    inputs = {"input_ids": ids, "attention_mask": mask}
    difference = check(model, accelerator, inputs)
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    peaks: dict[str, float] = {}
    for _ in range(options.repeats + 1):  # the first warms up
        for name, arm in ARMS.items():
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            with arm(accelerator):
                generate(model, inputs, options.tokens)
            if cuda:
                torch.cuda.synchronize()
                peaks[name] = torch.cuda.max_memory_allocated() / 2**30
            times[name].append(time.perf_counter() - begin)
    seconds = {name: statistics.median(each[1:]) for name, each in times.items()}
    return {
        "model": options.model, "sequences": options.sequences, "prompt": options.prompt, "tokens": options.tokens,
        "machine": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__,
        "largest difference of a logit, fp32": difference, "seconds": seconds,
        "ratio": {name: value / seconds["plain"] for name, value in seconds.items()}, "peak GiB": peaks,
    }  # fmt: skip


def main() -> int:
    """Measure, print, and add a line to generation.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("generation.jsonl"))
    options = parser.parse_args()
    line = json.dumps(measure(options))
    print(line)
    with options.output.open("a") as file:
        file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
