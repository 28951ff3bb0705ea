"""Completions as the page shows them: every token with its KL, and nothing a model wrote taken as markup."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np

from troll.lab.report.run_data import Line, RunData
from troll.lab.runs.formatting import number
from troll.lab.runs.statistics import finite

LEVELS = 9  # of the colour scale: level 6 begins at the bound
_STEPS = (1e-4, 1e-3, 1e-2, 1e-1, 0.3, 1.0, 3.0, 10.0)  # of the bound, where a level begins
MOST_STEPS, MOST_TOKENS = 24, 12_000
_SHOWN = {"\n": "↵\n", "\t": "⇥\t", "\r": "␍", "\x7f": "␡", "": "∅"}


@dataclass(frozen=True)
class Token:
    """A piece of text, its colour, and what is said when it is pointed at."""

    text: str
    level: int
    projected: bool
    tip: str


@dataclass(frozen=True)
class Sample:
    """A completion."""

    prompt: str
    tokens: list[Token]
    reward: str
    advantage: str
    projected: int | None
    cut: int


@dataclass(frozen=True)
class Step:
    """The completions shown of one update."""

    step: int
    update: int
    samples: list[Sample]


def visible(text: str) -> str:
    """The text with everything that is invisible or acts on other characters spelled out."""
    return "".join(_visible(character) for character in text) or _SHOWN[""]


def _visible(character: str) -> str:
    if character in _SHOWN:
        return _SHOWN[character]
    if ord(character) < 32:
        return chr(0x2400 + ord(character))
    category = unicodedata.category(character)
    if category[0] == "C" or category in ("Zl", "Zp") or (category == "Zs" and character != " "):
        return f"⟨U+{ord(character):04X}⟩"
    return character


def level(kl: float | None, scale: float) -> int:
    """Place of a KL on the colour scale, whose upper third begins at ``scale``."""
    return 0 if kl is None else int(np.searchsorted(np.array(_STEPS) * scale, kl, side="right"))


def legend(scale: float) -> list[str]:
    """The KL at which each level begins."""
    return ["0", *(number(step * scale) for step in _STEPS)]


def steps(run: RunData, scale: float, tokens: int = MOST_TOKENS) -> list[Step]:
    """The completions to show: of a long run some steps, evenly chosen, first and last among them."""
    by_step: dict[int, list[Line]] = {}
    for line in run.samples:
        by_step.setdefault(int(line["step"]), []).append(line)
    chosen = sorted(by_step)
    if len(chosen) > MOST_STEPS:
        chosen = [chosen[i] for i in np.linspace(0, len(chosen) - 1, MOST_STEPS).round().astype(int)]
    share = max(20, tokens // max(1, sum(len(by_step[step]) for step in chosen)))
    return [
        Step(step, int(by_step[step][0].get("update") or 0), [_sample(x, scale, share) for x in by_step[step]])
        for step in chosen
    ]


def _sample(line: Line, scale: float, most: int) -> Sample:
    texts = [visible(str(x)) for x in line.get("tokens") or []]
    texts[-1:] = [text.rstrip("\n") for text in texts[-1:]]  # the sign for it stays
    columns = {key: _column(line.get(key), len(texts)) for key in ("kl", "kl_after", "ratio", "projected")}
    tokens = [_token(texts[i], **{key: x[i] for key, x in columns.items()}, scale=scale) for i in range(len(texts))]
    marked = sum(token.projected for token in tokens) if line.get("projected") is not None else None
    reward, advantage = finite(line.get("reward")), finite(line.get("advantage"))
    return Sample(
        prompt=visible(str(line.get("prompt", ""))),
        tokens=tokens[:most],
        reward="none" if reward is None else number(reward),
        advantage="none" if advantage is None else ("+" if advantage > 0 else "") + number(advantage),
        projected=marked,
        cut=max(0, len(tokens) - most),
    )


def _column(values: Any, length: int) -> list[Any]:
    given = list(values)[:length] if isinstance(values, list) else []
    return given + [None] * (length - len(given))


def _token(text: str, kl: Any, kl_after: Any, ratio: Any, projected: Any, scale: float) -> Token:
    before, after, ratio = finite(kl), finite(kl_after), finite(ratio)
    parts = ["KL unknown" if before is None else f"KL {number(before)}"]
    if after is not None and projected:
        parts[0] += f" → {number(after)} (projected)"
    if ratio is not None:
        parts.append(f"ratio {number(ratio)}")
    return Token(text, level(before, scale), bool(projected), " · ".join(parts))
