"""What each token adds to the text of a completion. What is recorded of a run is tested with the command line."""

from __future__ import annotations

import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from troll.lab.training.recorder import pieces

BYTES = tiny_models.tokenizer()


def encode(text: str) -> list[int]:
    return list(BYTES(text)["input_ids"])


def decode(tokens: list[int]) -> str:
    return str(BYTES.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12\n", ["1", "2", "\n"]),
        ("é1", ["", "é", "1"]),
        ("a🙂漢", ["a", "", "", "", "🙂", "", "", "漢"]),
        (" 1 . 2", [" ", "1", " ", ".", " ", "2"]),
        ("<|im_end|>x", ["<|im_end|>", "x"]),
        ("", []),
    ],
)
def test_a_character_stands_with_the_last_of_its_tokens(text: str, expected: list[str]) -> None:
    assert pieces(encode(text), decode) == expected


def test_half_a_character_is_shown_as_such() -> None:
    half = encode("🙂")[:2]
    assert "".join(pieces([*encode("a"), *half], decode)) == decode([*encode("a"), *half])
    broken = pieces([*half, *encode("ab")], decode)
    assert "".join(broken) == decode([*half, *encode("ab")])
    assert broken[-1] == "b"


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=40))
def test_there_is_one_piece_per_token_and_together_they_are_the_text(tokens: list[int]) -> None:
    found = pieces(tokens, decode)
    assert len(found) == len(tokens)
    assert "".join(found) == decode(tokens)


def test_spaces_that_a_tokenizer_keeps_with_the_word() -> None:
    """As with Llama: a token alone is decoded without the space in front of it."""
    words = Tokenizer(models.BPE({"▁the": 0, "▁cat": 1, "s": 2}, merges=[]))
    words.decoder = decoders.Metaspace()
    assert words.decode([1]) == "cat"
    assert pieces([0, 1, 2, 1], words.decode) == ["the", " cat", "s", " cat"]
