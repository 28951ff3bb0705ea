"""Untrained models of a few thousand parameters, for the examples with ``--tiny`` and for tests.

A byte is a token. ``save(kind, folder)`` writes a model and its tokenizer or processor for ``from_pretrained``. Kinds:
``dense`` (Qwen3), ``moe`` (Qwen3-MoE), ``vision`` (Qwen2.5-VL) and ``reward`` (a classifier with one output).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPECIAL = [
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and a few special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=SPECIAL[3:],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
    )


def _text(tokens: PreTrainedTokenizerFast, **changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokens),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": tokens.pad_token_id,
        "eos_token_id": tokens.eos_token_id,
        "bos_token_id": None,
        "initializer_range": 0.2,
        **changes,
    }


def build(kind: str = "dense", seed: int = 0, **changes: Any) -> tuple[torch.nn.Module, Any]:
    """The model of this kind and its tokenizer or processor; ``changes`` go to the configuration."""
    tokens = tokenizer()
    torch.manual_seed(seed)
    text = _text(tokens, **changes)
    if kind == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**text)), tokens
    if kind == "reward":
        return Qwen3ForSequenceClassification(Qwen3Config(**text, num_labels=1)), tokens
    if kind == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**text, **experts, "router_aux_loss_coef": 0.01})), tokens
    if kind == "vision":
        return _vision(tokens, text)
    raise ValueError(f"kind {kind!r}: dense, moe, vision or reward")


class ImageProcessor(Qwen2_5_VLProcessor):
    """Qwen2.5-VL's processor for images alone: its videos would need torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **options: Any
    ) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def _vision(tokens: PreTrainedTokenizerFast, text: dict[str, Any]) -> tuple[torch.nn.Module, Any]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    text.pop("head_dim")
    special = {name: tokens.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    config = Qwen2_5_VLConfig(
        text_config={
            **text,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 4,
            "out_hidden_size": text["hidden_size"],
            "fullatt_block_indexes": [0],
            "window_size": 28,
        },
        image_token_id=special["image_pad"],
        video_token_id=special["video_pad"],
        vision_start_token_id=tokens.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokens.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56)
    return Qwen2_5_VLForConditionalGeneration(config), ImageProcessor(images, tokens, chat_template=CHAT_TEMPLATE)


def save(kind: str, folder: str | Path, **changes: Any) -> str:
    """Write model and tokenizer (or processor) to a folder, and return it as a string."""
    model, processing = build(kind, **changes)
    model.save_pretrained(folder)
    processing.save_pretrained(folder)
    return str(folder)


def settings() -> dict[str, Any]:
    """Training arguments for a tiny model: seconds on a CPU, with steps large enough for a trust region to act."""
    torch.set_num_threads(1)  # more threads only wait for each other: up to ten times slower
    return {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "max_steps": 16,
        "logging_steps": 1,
        "save_strategy": "no",
    }


def save_once(kind: str, folder: str | Path, args: Any) -> str:
    """``save`` where several processes run the same program: the first writes, the others wait for it."""
    with args.main_process_first():
        if args.local_process_index == 0:
            save(kind, folder)
    return str(folder)
