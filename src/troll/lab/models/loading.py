"""Models by name: loading them from an embedded file, a local folder or the Hugging Face hub, and their sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troll.errors import InputError
from troll.lab.hub import fail_fast
from troll.lab.models.embedded import embedded_model, embedded_models

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_NAMES = f"an existing folder, a hub name such as Qwen/Qwen2.5-0.5B-Instruct, or {' or '.join(embedded_models())}"


def load_model(name: str, **kwargs: Any) -> Any:
    """The causal language model of this name, in fp32 unless ``dtype`` is given."""
    import torch
    from transformers import AutoModelForCausalLM

    with _readable_errors(name):
        return AutoModelForCausalLM.from_pretrained(resolve_model(name), **{"dtype": torch.float32, **kwargs})


def load_tokenizer(name: str, **kwargs: Any) -> Any:
    """The tokenizer of the model of this name."""
    from transformers import AutoTokenizer

    with _readable_errors(name):
        return AutoTokenizer.from_pretrained(resolve_model(name), **kwargs)


def load_config(name: str, **kwargs: Any) -> Any:
    """The configuration of the model of this name; the cheapest check that the model is available."""
    from transformers import AutoConfig

    with _readable_errors(name):
        return AutoConfig.from_pretrained(resolve_model(name), **kwargs)


def resolve_model(name: str) -> str:
    """What to pass to ``from_pretrained``: the folder of an embedded model, a local folder, or a hub name.

    An embedded model is converted on first use. ``./name`` refers to a local folder with the name of an embedded model.
    """
    model = embedded_model(name)
    if model is not None:
        return str(model.resolve())
    path = Path(name).expanduser()
    if name and path.exists():
        _check_folder(path)
        return str(path)
    if not name or name[0] in "./~" or name.count("/") > 1 or name.endswith("/") or "\\" in name:
        raise InputError(f"There is no model folder {name!r}", f"Pass {_NAMES}")
    _check_hub_name(name)
    return name


def _check_folder(path: Path) -> None:
    """Raise if a file of the model is missing."""
    if not path.is_dir():
        raise InputError(
            f"The model {path} is a file, not a folder", "Pass the folder with the config.json of the model"
        )
    missing = _missing_file(path)
    if not missing:
        return
    fix = "Save the model with save_pretrained, which writes config.json and model.safetensors"
    if (path / "model" / "config.json").is_file():
        fix = f"Did you mean {path / 'model'}?"
    elif (path / "adapter_config.json").is_file():
        fix = "It is an adapter. Merge it into its base model (merge_and_unload of peft) and save that"
    raise InputError(f"The model folder {path} has no {missing}", fix)


def _missing_file(path: Path) -> str | None:
    """The first file of a model that is missing in this folder, or None."""
    if not (path / "config.json").is_file():
        return "config.json"
    for weights in _WEIGHTS:
        if (path / weights).is_file():
            return None
        index = path / f"{weights}.index.json"
        if index.is_file():
            try:
                shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError):
                return f"readable {index.name}"
            return next((shard for shard in shards if not (path / shard).is_file()), None)
    return _WEIGHTS[0]


def _check_hub_name(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(f"{name!r} is not a valid model name", f"Pass {_NAMES}") from error


@contextmanager
def _readable_errors(name: str) -> Iterator[None]:
    """Convert exceptions of transformers and the hub to ``InputError``; without a network, fail at once."""
    from safetensors import SafetensorError

    local = embedded_model(name) is not None or Path(name).expanduser().exists()
    try:
        with nullcontext() if local else fail_fast():
            yield
    except InputError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise _input_error(name, error) from error


def _input_error(name: str, error: BaseException) -> InputError:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    embedded = " or ".join(embedded_models())
    causes = list(_causes(error))

    def caused_by(kind: type[Exception]) -> bool:
        return any(isinstance(cause, kind) for cause in causes)

    if caused_by(GatedRepoError):
        return InputError(
            f"The model {name!r} is gated: its terms must be accepted first",
            f"Accept them on its page and run hf auth login, or use another model such as {embedded}",
        )
    if caused_by(RepositoryNotFoundError):
        return InputError(
            f"The model {name!r} is neither a local folder nor a public model on the Hugging Face hub",
            f"Check the spelling, run hf auth login if it is private, or use {embedded}",
        )
    if caused_by(LocalEntryNotFoundError):
        return InputError(
            f"The model {name!r} is not on this machine, and the Hugging Face hub cannot be reached",
            f"Use {embedded}, which needs no hub, or a local folder, or check the connection and HF_HUB_OFFLINE",
        )
    if caused_by(HfHubHTTPError):
        return InputError(
            f"The Hugging Face hub refused the model {name!r}: {_first_line(error)}",
            f"Run hf auth login, or use {embedded}",
        )
    return InputError(
        f"Cannot load the model {name!r}: {_first_line(error)}",
        f"It must be a causal language model with its tokenizer, as save_pretrained writes them, such as {embedded}",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    """The first non-empty line, without the full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".:") if lines else type(error).__name__


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

                try:
                    model = get_peft_model(model, peft_config)
                except ValueError as error:
                    raise InputError(
                        f"PEFT rejected the adapter: {_first_line(error)}", "Correct the flags --lora_…"
                    ) from error
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
