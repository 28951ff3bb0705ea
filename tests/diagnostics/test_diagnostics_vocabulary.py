"""Classes of tokens, with tokenizers that keep spaces in three different ways."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from troll import InputError
from troll.diagnostics import CLASSES, token_classes
from troll.diagnostics.spectrum import classify

WORDS = ["a", "the", "ing", "12", "3rd", ".", "(1", "é"]


def named(tokenizer, **options):
    """{token: name of its class}."""
    found = token_classes(tokenizer, **options)
    return {tokenizer.convert_ids_to_tokens(i): CLASSES[c] for i, c in enumerate(found.ids.tolist()[: len(tokenizer)])}


def wrap(tokenizer):
    tokenizer.add_special_tokens(["<unk>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.add_tokens([AddedToken("<|turn|>", special=True), AddedToken("plain", special=False)])
    return fast


def metaspace():
    tokens = [*WORDS, "▁the", "▁12", "▁(", "▁"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return wrap(tokenizer)


def byte_level():
    tokens = ["a", "Ġthe", "ing", "Ġ12", "Ċ", "ĊĊ", "Ġ", ").", "Ã", "©", "Ã©", "ĠÃ", ".Ċ"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return wrap(tokenizer)


def word_pieces():
    tokens = ["a", "the", "##ing", "12", "##3", ",", "<unk>"]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return wrap(tokenizer)


ADDED = {"<unk>": "special", "<|turn|>": "special", "plain": "word continuation"}


def test_spaces_as_a_mark_in_the_token():
    assert named(metaspace()) == ADDED | {
        "a": "word continuation",
        "the": "word continuation",
        "ing": "word continuation",
        "12": "digit",
        "3rd": "word continuation",
        ".": "punctuation",
        "(1": "digit",
        "é": "word continuation",
        "▁the": "word start",
        "▁12": "digit",
        "▁(": "punctuation",
        "▁": "whitespace",
    }


def test_bytes():
    assert named(byte_level()) == ADDED | {
        "a": "word continuation",
        "Ġthe": "word start",
        "ing": "word continuation",
        "Ġ12": "digit",
        "Ċ": "whitespace",
        "ĊĊ": "whitespace",
        "Ġ": "whitespace",
        ").": "punctuation",
        "Ã": "word continuation",  # half a character
        "©": "word continuation",
        "Ã©": "word continuation",
        "ĠÃ": "word start",
        ".Ċ": "punctuation",
    }


def test_pieces_of_words():
    found = named(word_pieces())
    assert (found["the"], found["##ing"], found["12"], found["##3"]) == (
        "word start",
        "word continuation",
        "digit",
        "digit",
    )
    assert (found[","], found["<|turn|>"], found["<unk>"]) == ("punctuation", "special", "special")


def test_a_tokenizer_as_models_have_it():
    tokenizer = tiny_models.tokenizer()
    found = token_classes(tokenizer, vocab_size=len(tokenizer) + 5)
    assert found.ids[len(tokenizer) :].tolist() == [CLASSES.index("special")] * 5
    ids = torch.tensor([tokenizer("a 1.\n<|im_end|>")["input_ids"]])
    expected = ["word continuation", "whitespace", "digit", "punctuation", "whitespace", "special"]
    assert [CLASSES[c] for c in found.of(ids)[0].tolist()] == expected
    assert CLASSES[int(found.of(torch.tensor(-1)))] == "special"
    with pytest.raises(InputError, match=f"ids of a vocabulary of {len(found.ids)}"):
        found.of(torch.tensor([len(found.ids)]))


def test_the_vocabulary_is_counted_once():
    """A fast tokenizer takes 16 ms for it with 49,152 tokens: once for each would be 13 minutes."""

    class Counting(PreTrainedTokenizerFast):
        counted = 0

        def __len__(self):
            Counting.counted += 1
            return super().__len__()

    tokenizer = Counting(tokenizer_object=byte_level().backend_tokenizer, unk_token="<unk>")
    Counting.counted = 0
    token_classes(tokenizer)
    assert Counting.counted == 1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "special"),
        (" ", "whitespace"),
        ("\u3000\t", "whitespace"),
        ("½", "digit"),
        ("٣", "digit"),
        ("漢", "word continuation"),
        (" नि", "word start"),
        ("\u093f", "word continuation"),  # a vowel sign alone
        ("🙂", "punctuation"),
        (" $", "punctuation"),
        ("\N{REPLACEMENT CHARACTER}", "word continuation"),
        ("_x1", "word continuation"),
    ],
)
def test_texts(text, name):
    assert CLASSES[classify(text)] == name


@settings(derandomize=True, deadline=None)
@given(st.text(min_size=1))
def test_a_space_in_front_changes_nothing_but_where_a_word_starts(text):
    plain, spaced = CLASSES[classify(text)], CLASSES[classify(" " + text)]
    assert spaced == ("word start" if plain.startswith("word") else plain)


def test_a_tokenizer_without_letters_is_refused():
    class Silent:
        all_special_ids = ()

        def encode(self, text, add_special_tokens):
            return []

    with pytest.raises(InputError, match="no token of 'a'"):
        token_classes(Silent())
