"""Models by name: embedded in a Python package, in a local folder, or on the Hugging Face hub."""

from troll.lab.models.embedded import EmbeddedModel, cache_folder, embedded_model, embedded_models
from troll.lab.models.loading import ModelShape, load_config, load_model, load_tokenizer, resolve_model

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
