"""A tiny model in a Python package, as GGUF: what an embedded model is, in a few kilobytes."""

import hashlib
from pathlib import Path

import gguf
import numpy as np

from troll.lab.models import EmbeddedModel

H, FFN, LAYERS, HEADS, KV, CONTEXT = 16, 32, 2, 4, 2, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ", "12", "34"]
MERGES = ["1 2", "3 4"]  # transformers 5.10 cannot read a single one


def tiny_package(folder: Path) -> EmbeddedModel:
    """Write the package ``tiny-llm`` into ``folder``, which is to be on the path of imports."""
    package = folder / "tiny_llm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this package is not to be imported')\n")
    file = package / "tiny.gguf"
    _write(file)
    return EmbeddedModel(
        name="tiny-0.1m",
        title="Tiny",
        description="a tiny one",
        package="tiny-llm",
        version="7.0",
        file=file.name,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        megabytes=1,
    )


def _write(path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens = SPECIAL + LETTERS
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(H)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * len(LETTERS))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    kv = H // HEADS * KV
    shapes = {"token_embd": (len(tokens), H), "output_norm": (H,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (H,),
            f"blk.{i}.ffn_norm": (H,),
            f"blk.{i}.attn_q": (H, H),
            f"blk.{i}.attn_k": (kv, H),
            f"blk.{i}.attn_v": (kv, H),
            f"blk.{i}.attn_output": (H, H),
            f"blk.{i}.ffn_gate": (FFN, H),
            f"blk.{i}.ffn_up": (FFN, H),
            f"blk.{i}.ffn_down": (H, FFN),
        }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
