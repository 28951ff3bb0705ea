"""The sizes of a model, computed without loading its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from troll.lab.models.loading import load_config


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that determine its memory and time."""

    parameters: int
    trainable: int
    body: int
    """Parameters in the matrix products of the layers, without embedding and head."""
    vocabulary: int
    hidden: int
    inner: int
    """Width of the feed-forward layers."""
    layers: int
    keys: int
    """Total width of the keys, and of the values, over all heads."""
    experts: bool

    @classmethod
    def of(cls, model_path: str, peft_config: Any = None, **kwargs: Any) -> ModelShape:
        """From the configuration of a model."""
        import torch
        import transformers

        config = load_config(model_path, **kwargs)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            model = kind(config) if kind else transformers.AutoModelForCausalLM.from_config(config, **kwargs)
            sizes = {id(p): p.numel() for p in model.parameters()}
            ends = {id(x.weight): x.weight.numel() for x in _ends(model)}
            if peft_config is not None:
                from peft import get_peft_model

                model = get_peft_model(model, peft_config)
        text = config.get_text_config()
        heads = text.num_attention_heads
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
            body=sum(sizes.values()) - sum(ends.values()),
            vocabulary=text.vocab_size,
            hidden=text.hidden_size,
            inner=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            layers=text.num_hidden_layers,
            keys=(getattr(text, "num_key_value_heads", None) or heads)
            * (getattr(text, "head_dim", None) or text.hidden_size // heads),
            experts=any("expert" in key for key in text.to_dict()),
        )

    @property
    def activations(self) -> int:
        """Values per token that a layer keeps for its backward: inputs of norms, matrix products and the gate."""
        return 8 * self.hidden + 2 * self.keys + 4 * self.inner

    @property
    def forward(self) -> float:
        """Floating-point operations of the layers per token."""
        return 2.0 * self.body

    @property
    def head(self) -> float:
        """Floating-point operations of the head per token."""
        return 2.0 * self.hidden * self.vocabulary


def _ends(model: Any) -> Iterator[Any]:
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is not None:
            yield module
