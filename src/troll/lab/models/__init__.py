"""Models by name: embedded in a Python package, in a local folder, or on the Hugging Face hub."""

from troll.lab.models.embedded import EmbeddedModel, cache_folder, embedded_model, embedded_models
from troll.lab.models.loading import load_config, load_model, load_tokenizer, resolve_model
from troll.lab.models.shape import ModelShape

__all__ = [
    "EmbeddedModel",
    "ModelShape",
    "cache_folder",
    "embedded_model",
    "embedded_models",
    "load_config",
    "load_model",
    "load_tokenizer",
    "resolve_model",
]
