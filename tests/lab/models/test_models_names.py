"""Model names: embedded models, folders and hub names, and the errors when one cannot be loaded."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from troll.errors import InputError
from troll.lab.models import embedded_models, load_config, load_model, load_tokenizer, resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model without a tokenizer."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "mine")
    return tmp_path / "mine"


def test_the_embedded_models_have_descriptions() -> None:
    assert "Apache-2.0" in embedded_models()["smollm2-135m"]


def test_a_folder_is_taken_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(folder)) == str(folder)
    monkeypatch.chdir(folder.parent)
    assert resolve_model("mine") == "mine"
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model("~/mine") == str(folder)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-0.5B-Instruct", "owner/a.b_c-d"])
def test_a_hub_name_passes_through(name: str) -> None:
    assert resolve_model(name) == name


@pytest.mark.parametrize("name", ["./nothing", "/no/where", "~/nothing", "a/b/c", "runs/", "a\\b", ""])
def test_a_path_to_nothing_is_no_hub_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"no model folder .*Qwen/Qwen2.5-0.5B-Instruct, or smollm2-135m\.$") as error:
        resolve_model(name)
    assert repr(name) in error.value.problem


@pytest.mark.parametrize("name", ["two words", "a--b", "owner/-x", "owner/na?me"])
def test_a_name_no_hub_can_have(name: str) -> None:
    with pytest.raises(InputError, match=r"not a valid model name\. Pass an existing folder, a hub name") as error:
        resolve_model(name)
    assert repr(name) in error.value.problem


def test_a_folder_that_lacks_a_file_is_told_which(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "elsewhere")
    with pytest.raises(InputError, match=r"mine has no model\.safetensors\. "):
        resolve_model(str(folder))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}))
    (folder / "model-1-of-2.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"has no model-2-of-2\.safetensors\. "):
        resolve_model(str(folder))
    (folder / "model-2-of-2.safetensors").write_bytes(b"")
    assert resolve_model(str(folder)) == str(folder)
    index.write_text("{")
    with pytest.raises(InputError, match=r"has no readable model\.safetensors\.index\.json"):
        resolve_model(str(folder))
    index.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert resolve_model(str(folder)) == str(folder)
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config\.json"):
        resolve_model(str(folder))


def test_a_folder_that_is_nearly_right_is_told_what_would_be(folder: Path) -> None:
    run = folder.parent / "run"
    run.mkdir()
    folder.rename(run / "model")
    with pytest.raises(InputError, match=r"Did you mean .*/run/model\?$"):
        resolve_model(str(run))
    with pytest.raises(InputError, match=r"is a file, not a folder\. Pass the folder with the config\.json"):
        resolve_model(str(run / "model" / "config.json"))
    adapter = folder.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"no config\.json.*merge_and_unload"):
        resolve_model(str(adapter))


def test_what_cannot_be_loaded_from_a_folder_is_said_in_one_line(folder: Path) -> None:
    for load in (load_tokenizer, load_model, load_config):
        (folder / "model.safetensors").write_bytes(b"not weights")
        if load is load_config:
            (folder / "config.json").write_text("{}")
        with pytest.raises(InputError, match=r"Cannot load the model '.*mine': .+ such as smollm2-135m\.$") as error:
            load(str(folder))
        assert "\n" not in str(error.value)


_ANSWERS = {"missing": (404, "RepoNotFound"), "gated": (403, "GatedRepo"), "forbidden": (401, None)}


class _Hub(http.server.BaseHTTPRequestHandler):
    def _refuse(self) -> None:
        code, reason = next((answer for name, answer in _ANSWERS.items() if name in self.path), (404, "RepoNotFound"))
        self.send_response(code)
        if reason:
            self.send_header("X-Error-Code", reason)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_POST = _refuse  # noqa: N815, the names http.server calls

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of a hub that has nothing for anyone."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


_LOAD = """
import json, sys
from troll.errors import InputError
from troll.lab.models import load_config, load_model, load_tokenizer
said = {}
for name in sys.argv[1:]:
    for load in (load_config, load_tokenizer, load_model):
        try:
            load(name)
        except InputError as error:
            said.setdefault(name, []).append(str(error))
print(json.dumps(said))
"""


def said(names: list[str], home: Path, **environment: str) -> dict[str, set[str]]:
    """What loading each of these says, by a process of its own: the hub's client reads its settings once."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    command = [sys.executable, "-c", _LOAD, *names]
    env |= {"HF_HOME": str(home), **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Retry" not in done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert all(len(messages) == 3 for messages in answers.values()), answers
    return {name: set(messages) for name, messages in answers.items()}


def test_a_hub_that_refuses(hub: str, tmp_path: Path) -> None:
    answers = said(["nobody/missing", "nobody/gated", "nobody/forbidden"], tmp_path, HF_ENDPOINT=hub)
    assert all("\n" not in message for messages in answers.values() for message in messages)
    (missing,) = answers["nobody/missing"]
    assert "'nobody/missing' is neither a local folder nor a public model" in missing
    assert missing.endswith("or use smollm2-135m.")
    (gated,) = answers["nobody/gated"]
    assert "'nobody/gated' is gated" in gated
    for forbidden in answers["nobody/forbidden"]:
        assert "The Hugging Face hub refused the model 'nobody/forbidden': " in forbidden
        assert "hf auth login" in forbidden


def test_without_a_network_loading_fails_at_once(tmp_path: Path) -> None:
    """The client of the hub would retry for half a minute."""
    start = time.monotonic()
    answers = said(["nobody/nothing"], tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert time.monotonic() - start < 25
    (offline,) = answers["nobody/nothing"]
    assert "not on this machine, and the Hugging Face hub cannot be reached" in offline


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    answers = said(["nobody/nothing"], tmp_path, HF_HUB_OFFLINE="1")
    (offline,) = answers["nobody/nothing"]
    assert "not on this machine, and the Hugging Face hub cannot be reached" in offline
    assert "smollm2-135m, which needs no hub" in offline
