"""Loading by name with transformers; what goes wrong becomes one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from troll.errors import InputError
from troll.lab.models.embedded import embedded_models
from troll.lab.models.names import resolve_model


def load_model(name: str, **kwargs: Any) -> Any:
    """The causal language model of this name, in fp32 unless ``dtype`` says otherwise."""
    import torch
    from transformers import AutoModelForCausalLM

    with _explained(name):
        return AutoModelForCausalLM.from_pretrained(resolve_model(name), **{"dtype": torch.float32, **kwargs})


def load_tokenizer(name: str, **kwargs: Any) -> Any:
    """The tokenizer of the model of this name."""
    from transformers import AutoTokenizer

    with _explained(name):
        return AutoTokenizer.from_pretrained(resolve_model(name), **kwargs)


def load_config(name: str, **kwargs: Any) -> Any:
    """The configuration of the model of this name: the cheapest way to learn whether it can be had."""
    from transformers import AutoConfig

    with _explained(name):
        return AutoConfig.from_pretrained(resolve_model(name), **kwargs)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what loading raises into an ``InputError``."""
    from safetensors import SafetensorError

    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise _explanation(name, error) from error


def _explanation(name: str, error: BaseException) -> InputError:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    embedded = " or ".join(embedded_models())
    causes = list(_causes(error))

    def caused_by(kind: type[Exception]) -> bool:
        return any(isinstance(cause, kind) for cause in causes)

    if caused_by(GatedRepoError):
        return InputError(
            f"model {name!r}, which is open only to those who accepted its terms",
            "a model you have access to",
            f"accepting them on its page, then hf auth login; or another model, such as {embedded}",
        )
    if caused_by(RepositoryNotFoundError):
        return InputError(
            f"model {name!r}, which is neither a folder here nor a public model on the Hugging Face hub",
            "a hub name, a folder, or an embedded model",
            f"checking the spelling, hf auth login if it is private, or {embedded}",
        )
    if caused_by(LocalEntryNotFoundError):
        return InputError(
            f"model {name!r}, which is not on this machine, and the Hugging Face hub cannot be reached",
            "a model that is here, or a connection (and HF_HUB_OFFLINE not set)",
            f"{embedded}, which needs no hub; or the path of a folder",
        )
    if caused_by(HfHubHTTPError):
        return InputError(
            f"model {name!r}, which the Hugging Face hub does not give out ({_first_line(error)})",
            "a public model, or one you have access to",
            f"hf auth login, or {embedded}",
        )
    return InputError(
        f"model {name!r}, which cannot be loaded ({_first_line(error)})",
        "a causal language model with its tokenizer, as save_pretrained writes them",
        f"another model, such as {embedded}",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    """The first line with something in it, without the full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".:") if lines else type(error).__name__
