"""Models by name: one that comes with a package, a folder on this machine, or a name on the Hugging Face hub."""

from troll.lab.models.embedded import EmbeddedModel, cache_folder, embedded_model, embedded_models
from troll.lab.models.loading import load_config, load_model, load_tokenizer
from troll.lab.models.names import resolve_model
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
