"""Models by name: one that comes with a package, a folder on this machine, or a name on the Hugging Face hub."""

from troll.models.embedded import EmbeddedModel, cache_folder, embedded_model, embedded_models
from troll.models.loading import load_config, load_model, load_tokenizer
from troll.models.names import resolve_model
from troll.models.shape import ModelShape

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
