"""What the name of a model stands for."""

from __future__ import annotations

import json
from pathlib import Path

from troll.errors import InputError
from troll.lab.models.embedded import embedded_model, embedded_models

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def resolve_model(name: str) -> str:
    """What to load for this name: the folder of an embedded model, a checked local folder, or the hub name as it is.

    An embedded model is converted when it is first asked for. A folder of the same name is meant by ``./name``.
    """
    model = embedded_model(name)
    if model is not None:
        return str(model.resolve())
    path = Path(name).expanduser()
    if name and path.exists():
        _check_folder(path)
        return str(path)
    if not name or name[0] in "./~" or name.count("/") > 1 or name.endswith("/") or "\\" in name:
        raise InputError(f"model {name!r}, where there is no folder", "the folder of a model", _names())
    _check_hub_name(name)
    return name


def _names() -> str:
    return f"an existing folder, a hub name such as Qwen/Qwen2.5-0.5B-Instruct, or {' or '.join(embedded_models())}"


def _check_folder(path: Path) -> None:
    """Refuse a folder without the files that make a model."""
    expected = "a folder with config.json and model.safetensors, as save_pretrained writes it"
    if not path.is_dir():
        raise InputError(f"model {path}, which is a file", expected, f"{path.parent}")
    missing = _missing(path)
    if not missing:
        return
    hint = "saving the model with save_pretrained"
    if (path / "model" / "config.json").is_file():
        hint = f"{path / 'model'}"
    elif (path / "adapter_config.json").is_file():
        hint = "merging this adapter into its base model (merge_and_unload of peft) and saving that"
    raise InputError(f"model {path}, which has no {missing}", expected, hint)


def _missing(path: Path) -> str | None:
    """The first file that is missing for a model in this folder."""
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
        raise InputError(f"model {name!r}", "a hub name, owner/name, or an existing folder", _names()) from error
