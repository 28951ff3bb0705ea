"""Which tokens move? The KL per token by place in the completion, by class of token, by sign of the advantage.

The counted tokens are sorted into groups; of each group, with KL the values and ε the bound:

    count, mean, p50, p99, max, outside = #{KL > ε} / count, share = Σ KL of the group / Σ KL of all

Percentiles are the nearest value from below, as in the metrics of the losses. A group without a token has zeros.
``token_classes`` gives the class of every token of a tokenizer's vocabulary.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from troll.diagnostics.inputs import as_mask, constant, counted_pair, per_token
from troll.errors import InputError
from troll.inputs import describe, is_integer, require_count, require_floats, require_integers
from troll.policy import SparsePolicy, Tail, align, token_kl
from troll.projection import KL_BOUND, check_kl_bound

__all__ = [
    "CLASSES",
    "Spectrum",
    "TokenClasses",
    "by_advantage",
    "by_class",
    "by_position",
    "classify",
    "kl_per_token",
    "token_classes",
]

CLASSES = ("digit", "word start", "word continuation", "punctuation", "whitespace", "special")
_DIGIT, _START, _CONTINUATION, _PUNCTUATION, _WHITESPACE, _SPECIAL = range(len(CLASSES))
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SIGNS = ("negative", "zero", "positive")


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Numbers per group [G], in the order of ``names``; constants."""

    names: tuple[str, ...]
    count: Tensor
    """[G] tokens."""
    mean: Tensor
    """[G] of the KL."""
    p50: Tensor
    """[G] median."""
    p99: Tensor
    """[G] 99th percentile."""
    max: Tensor
    """[G] largest."""
    outside: Tensor
    """[G] share of the group's tokens with KL > ε."""
    share: Tensor
    """[G] of the total KL of all groups; NaN where that is infinite."""

    def rows(self) -> list[dict[str, str | float]]:
        """One dict per group, ``group`` its name: for printing, or a table of any library."""
        numbers = {field.name: getattr(self, field.name).tolist() for field in fields(self) if field.name != "names"}
        return [
            {"group": name, **{key: column[i] for key, column in numbers.items()}} for i, name in enumerate(self.names)
        ]


def kl_per_token(proposal: SparsePolicy, old: SparsePolicy, loss_mask: Tensor, *, tail: Tail | None = None) -> Tensor:
    """KL(π̃ ‖ π_old) per token, [B, T], 0 where nothing counts: what the trust region bounds (``kl_before``)."""
    counted = counted_pair(proposal, old, loss_mask)
    kl = token_kl(*align(constant(proposal), constant(old), tail))
    return torch.where(counted, kl, 0.0)


def by_position(
    kl: Tensor,
    loss_mask: Tensor,
    *,
    kl_bound: float | Tensor = KL_BOUND,
    bins: int = 4,
    starts: Sequence[int] | None = None,
) -> Spectrum:
    """KL by place in the completion, counted in counted tokens.

    Args:
        kl: [B, T] KL per token, ≥ 0.
        loss_mask: [B, T] which tokens count.
        kl_bound: ε, one number or one per token [B, T].
        bins: relative places: token i of n is in bin ⌊i · bins / n⌋.
        starts: absolute places instead: where each bin starts, from 0, ascending; the last one is open.
    """
    counted = as_mask(loss_mask)
    place = counted.cumsum(-1) - 1
    if starts is None:
        require_count("bins", bins, "The default is 4, quarters of the completion")
        group = place * bins // counted.sum(-1, keepdim=True).clamp(min=1)
        names = [f"{100 * i / bins:.3g}–{100 * (i + 1) / bins:.3g} %" for i in range(bins)]
    else:
        _check_starts(starts)
        edges = torch.tensor(starts, device=place.device)
        group = torch.searchsorted(edges, place.contiguous(), right=True) - 1
        names = [f"{a}–{b - 1}" if b > a + 1 else f"{a}" for a, b in pairwise(starts)]
        names.append(f"{starts[-1]}–")
    return _spectrum(kl, counted, group, names, kl_bound)


def _check_starts(starts: Sequence[int]) -> None:
    fits = isinstance(starts, Sequence) and all(is_integer(x) for x in starts) and list(starts[:1]) == [0]
    if not fits or any(a >= b for a, b in pairwise(starts)):
        shown = list(starts) if isinstance(starts, (list, tuple)) else describe(starts)
        raise InputError(
            f"starts must be ascending integers from 0, got {shown}", "For example starts=(0, 16, 64, 256)"
        )


def by_class(
    kl: Tensor,
    loss_mask: Tensor,
    classes: Tensor,
    names: Sequence[str],
    *,
    kl_bound: float | Tensor = KL_BOUND,
) -> Spectrum:
    """KL by class of the token.

    Args:
        kl, loss_mask, kl_bound: as for ``by_position``.
        classes: [B, T] class of each token, from 0 to len(names) − 1: ``token_classes(tokenizer).of(sampled)``, or any.
        names: of the classes.
    """
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(x, str) for x in names):
        raise InputError(f"names must be a list of strings, got {describe(names)}", "Pass one name per class")
    return _spectrum(kl, as_mask(loss_mask), classes, names, kl_bound)


def by_advantage(kl: Tensor, loss_mask: Tensor, advantages: Tensor, *, kl_bound: float | Tensor = KL_BOUND) -> Spectrum:
    """KL by sign of the advantage: does the policy move to what it should do, or away from what it should not?

    Args:
        kl, loss_mask, kl_bound: as for ``by_position``.
        advantages: [B] or [B, T].
    """
    counted = as_mask(loss_mask)
    sign = per_token("advantages", advantages, counted).sign().long() + 1
    return _spectrum(kl, counted, sign, _SIGNS, kl_bound)


def _spectrum(kl: Tensor, counted: Tensor, group: Tensor, names: Sequence[str], kl_bound: float | Tensor) -> Spectrum:
    require_floats("kl", kl, "[B, T]", "Pass what kl_per_token returned")
    values = per_token("kl", kl, counted)[counted]  # [N]
    outside = values.to(kl.dtype) > _bounds(kl_bound, counted, kl.dtype)  # a KL of ε, rounded to fp32, is not above ε
    of = _checked(group, counted, names)
    G = len(names)
    count = torch.bincount(of, minlength=G)
    order = values.argsort()
    order = order[of[order].argsort(stable=True)]  # by group, and inside a group by value
    ordered = torch.cat([values[order], values.new_zeros(1)])
    first = count.cumsum(0) - count

    def at(rank: Tensor) -> Tensor:
        return torch.where(count > 0, ordered[torch.where(count > 0, first + rank, 0)], 0.0)

    def total(x: Tensor) -> Tensor:
        return values.new_zeros(G).index_add(0, of, x)

    sums, some = total(values), count.clamp(min=1)
    everything = sums.sum()
    return Spectrum(
        names=tuple(names),
        count=count,
        mean=sums / some,
        p50=at((count - 1) // 2),
        p99=at(99 * (count - 1) // 100),
        max=at(count - 1),
        outside=total(outside.to(values.dtype)) / some,
        share=torch.where(everything > 0, sums / everything, 0.0),
    )


def _bounds(kl_bound: float | Tensor, counted: Tensor, dtype: torch.dtype) -> Tensor:
    check_kl_bound(kl_bound)
    if not isinstance(kl_bound, Tensor) or kl_bound.dim() == 0:
        return torch.tensor(float(kl_bound), dtype=dtype, device=counted.device)
    return per_token("kl_bound", kl_bound, counted)[counted].to(dtype)


def _checked(group: Tensor, counted: Tensor, names: Sequence[str]) -> Tensor:
    fix = "Use token_classes(tokenizer).of(sampled)"
    require_integers("classes", group, "[B, T], one integer per token", fix)
    if group.shape != counted.shape:
        raise InputError(
            f"classes must be one integer per token, shape {list(counted.shape)} as loss_mask, got {list(group.shape)}",
            fix,
        )
    of = group.to(counted.device)[counted].long()
    if bool(((of < 0) | (of >= len(names))).any()):
        raise InputError(
            f"classes must be from 0 to {len(names) - 1} at every counted token, as there are {len(names)} names, got "
            f"classes from {int(of.min())} to {int(of.max())}",
            "Pass one name per class, or leave the other tokens out of loss_mask",
        )
    return of


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
