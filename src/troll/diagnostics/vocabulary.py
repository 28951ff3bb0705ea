"""A tokenizer → the class of every token of its vocabulary, for ``by_class``."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from troll.errors import InputError
from troll.inputs import describe, require_count, require_integers

__all__ = ["CLASSES", "TokenClasses", "classify", "token_classes"]

CLASSES = ("digit", "word start", "word continuation", "punctuation", "whitespace", "special")
_DIGIT, _START, _CONTINUATION, _PUNCTUATION, _WHITESPACE, _SPECIAL = range(len(CLASSES))
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, eq=False)
class TokenClasses:
    """Which class each token of a vocabulary is of."""

    ids: Tensor
    """[V] class of each token, an index into ``names``."""
    names: tuple[str, ...] = CLASSES

    def of(self, tokens: Tensor) -> Tensor:
        """Classes of token ids [...]; a negative id, where nothing was sampled, is special."""
        require_integers("tokens", tokens, "[...]", "Pass token ids")
        if bool((tokens >= len(self.ids)).any()):
            raise InputError(
                f"tokens must be ids of a vocabulary of {len(self.ids)}, got {int(tokens.max())}",
                "Use token_classes(tokenizer, vocab_size=model.config.vocab_size)",
            )
        ids = self.ids.to(tokens.device)[tokens.clamp(min=0)]
        return ids.masked_fill(tokens < 0, self.names.index("special"))


def classify(text: str) -> int:
    """Class of what a token adds to a text, an index into ``CLASSES``; special where it adds nothing.

    A token with a letter is a word, a start where white space stands before it in the token; one with a digit and no
    letter is a digit; else with anything visible, punctuation. Part of a character counts as a word's continuation.

    >>> [CLASSES[classify(text)] for text in (" the", "ing", " 12", ").", "\\n\\n")]
    ['word start', 'word continuation', 'digit', 'punctuation', 'whitespace']
    """
    if not text:
        return _SPECIAL
    kinds = {"W" if c == _REPLACEMENT else unicodedata.category(c)[0] for c in text if not c.isspace()}
    if not kinds:
        return _WHITESPACE
    if kinds & set("LMW"):  # letters, the marks on them, and parts of either
        return _START if text[0].isspace() else _CONTINUATION
    return _DIGIT if "N" in kinds else _PUNCTUATION


def token_classes(tokenizer: Any, vocab_size: int | None = None) -> TokenClasses:
    """Sort the vocabulary of a ``transformers`` tokenizer into digits, words, punctuation, white space and the rest.

    A token is classified by what it adds to a text that ends with a letter, so that a space which the tokenizer
    separates from the word is seen. A word at the beginning of a line has no space before it: it is a continuation.

    Args:
        tokenizer: with ``encode``, ``decode``, ``all_special_ids`` and, where it has them, ``added_tokens_decoder``.
        vocab_size: of the model, which may have more rows than the tokenizer has tokens; the others are special.
    """
    missing = [name for name in ("encode", "all_special_ids") if not hasattr(tokenizer, name)]
    if missing:
        raise InputError(
            f"tokenizer must be a tokenizer of transformers, got {describe(tokenizer)}, which has no {missing[0]}",
            "Pass AutoTokenizer.from_pretrained(…)",
        )
    if vocab_size is not None:
        require_count("vocab_size", vocab_size, "Pass model.config.vocab_size, or leave it out")
    letter = tokenizer.encode("a", add_special_tokens=False)[-1:]
    if not letter:
        raise InputError(
            "the tokenizer makes no token of 'a', so it is not one for text", "Pass your own classes to by_class"
        )
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = set(tokenizer.all_special_ids) | {i for i, token in added.items() if getattr(token, "special", False)}
    known = len(tokenizer)  # once: a fast tokenizer counts its vocabulary anew
    before = _decode(tokenizer, letter)
    ids = [
        _SPECIAL if i in special or i >= known else classify(_decode(tokenizer, [*letter, i])[len(before) :])
        for i in range(known if vocab_size is None else vocab_size)
    ]
    return TokenClasses(torch.tensor(ids))


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
