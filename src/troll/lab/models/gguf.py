"""A GGUF file → a folder that transformers and TRL can train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def convert(source: Path, target: Path, repair: Callable[[Any, Any], None]) -> None:
    """GGUF → fp32 safetensors, configuration and tokenizer, after ``repair(model, tokenizer)`` has put them right.

    transformers reads GGUF but takes the model for a quantised one, which can be neither saved nor trained. So its
    weights go into an empty model of the same shape, which is saved.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    where = {"gguf_file": source.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    config = model.config
    repair(model, tokenizer)
    vars(config).pop("quantization_config", None)  # older versions of transformers do not set it
    config.pad_token_id = tokenizer.pad_token_id
    with torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(model.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    fresh.save_pretrained(target)
    tokenizer.save_pretrained(target)
