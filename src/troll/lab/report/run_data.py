"""The contents of a report, read once from the folder of a run or a comparison; missing values are left out.

Numbers for the figures, and completions in which every token has its KL and nothing a model wrote is taken as markup.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from troll.lab.report.rules import History
from troll.lab.runs import Comparison, Run, TokenHistory
from troll.lab.runs.formatting import number
from troll.lab.runs.statistics import finite

Array = NDArray[np.float64]
Line = dict[str, Any]
QUANTILES = (0.5, 0.9, 0.99, 1.0)


class Missing(Exception):  # noqa: N818, not an error: the page says it instead of drawing
    """Why a figure cannot be drawn, in one sentence."""


@dataclass(frozen=True)
class RunData:
    """One reading of a run: a report stays consistent while the run goes on."""

    about: Line
    metrics: list[Line]
    evaluations: list[Line]
    tokens: TokenHistory | None
    samples: list[Line]
    evaluation: Line | None

    @classmethod
    def read(cls, run: Run) -> RunData:
        """The present contents of a folder."""
        return cls(run.about, run.metrics(), run.evaluations(), run.tokens(), run.samples(), run.evaluation())

    @property
    def arm(self) -> str:
        """Which trust region was used."""
        return str(self.about.get("arm", "custom"))

    @property
    def bound(self) -> float | None:
        """The bound on the KL of a token; None without a bound, or if it is not one number."""
        return self.history.bound

    @property
    def projects(self) -> bool:
        """Whether the run projects onto a KL trust region."""
        return self.history.region == "troll"

    @cached_property
    def history(self) -> History:
        """The log as the rules and the narrator read it."""
        settings = {"trust_region": self.arm, **(self.about.get("settings") or {})}
        return History.of_run({**self.about, "settings": settings}, self.metrics, self.evaluations)

    @property
    def updates_per_rollout(self) -> int:
        """How many updates were made on a rollout."""
        if self.tokens and self.tokens.updates:
            return 1 + max(int(x.get("update") or 0) for x in self.tokens.updates)
        return int((self.about.get("settings") or {}).get("updates_per_generation") or 1)

    @property
    def rollout_starts(self) -> list[int]:
        """Steps that are the first on their rollout, where a rollout serves several."""
        if self.tokens is None or self.updates_per_rollout == 1:
            return []
        return [x["step"] for x in self.tokens.updates if x.get("update") == 0]

    def series(self, *keys: str) -> tuple[Array, Array]:
        """Steps and values of the first of ``keys`` that was logged."""
        for key in keys:
            x, y = series(self.metrics, key)
            if x.size:
                return x, y
        raise Missing(f"Not logged: {keys[0]}." if self.metrics else "No update has been logged yet.")

    def held_out(self) -> tuple[Array, Array]:
        """Steps and held-out reward."""
        return series(self.evaluations, "eval_reward")


@dataclass(frozen=True)
class Arm:
    """One way to train, and its runs."""

    arm: str
    label: str
    runs: list[RunData]


@dataclass(frozen=True)
class ComparisonData:
    """One reading of a comparison."""

    about: Line
    arms: list[Arm]

    @classmethod
    def read(cls, comparison: Comparison) -> ComparisonData:
        """The present contents of a folder."""
        about = comparison.about
        arms = [
            Arm(x["arm"], str(x.get("label", x["arm"])), [RunData.read(run) for run in comparison.runs(x["arm"])])
            for x in about["arms"]
        ]
        return cls(about, arms)

    @property
    def measures(self) -> list[Line]:
        """Tables and verdicts."""
        return list(self.about.get("measures") or [])


def series(rows: Iterable[Line], key: str) -> tuple[Array, Array]:
    """Steps and values of what was logged under a name, without what is no number."""
    pairs = [(row["step"], value) for row in rows if (value := finite(row.get(key))) is not None]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def window(run: RunData, x: Array) -> int:
    """Over how many values to average a curve: about a twelfth of it, in whole rollouts; 1 for a short one."""
    spacing = float(np.median(np.diff(x))) if x.size > 1 else 1.0
    per_rollout = max(1, round(run.updates_per_rollout / spacing))
    size = -(-x.size // (12 * per_rollout)) * per_rollout
    return size if x.size >= 3 * size else 1


def smooth(y: Array, window: int) -> Array:
    """Centred mean over ``window`` neighbours, fewer at the ends."""
    total = np.concatenate([[0.0], np.cumsum(y)])
    left = np.maximum(np.arange(y.size) - window // 2, 0)
    right = np.minimum(np.arange(y.size) + (window + 1) // 2, y.size)
    return np.asarray((total[right] - total[left]) / (right - left), dtype=np.float64)


def group_size(count: int, most: int, multiple: int = 1) -> int:
    """How many neighbours to draw as one so that at most ``most`` are drawn: 1, or whole rollouts."""
    size = -(-count // most)
    return size if size == 1 else -(-size // multiple) * multiple


def grouped(y: Array, size: int, how: Callable[..., Any] = np.mean) -> Array:
    """``how`` over every ``size`` neighbours (the last group may be smaller); along the first axis."""
    return np.array([how(y[i : i + size], axis=0) for i in range(0, len(y), size)], dtype=np.float64)


@dataclass(frozen=True)
class Spread:
    """Quantiles ``QUANTILES`` of the KL of the tokens of every update: values [U, 4]."""

    steps: Array
    values: Array


def kl_spread(run: RunData, when: str) -> Spread:
    """The spread of token KL ``when`` = "before" or "after" projection; the largest value is the logged one, exact."""
    logged = {int(x["step"]): finite(x.get(f"troll/kl_{when}/max")) for x in run.metrics}
    rows: list[tuple[float, ...]] = []
    for line in run.tokens.updates if run.tokens else []:
        inner = _quantiles(line, when, run.tokens.kl_edges) if run.tokens else None
        if inner is not None:
            top = logged.get(line["step"])
            top = inner[3] if top is None else top
            rows.append((line["step"], *(min(q, top) for q in inner[:3]), top))
    if not rows:
        raise Missing(f"No histogram of token KL {when} projection was recorded (tokens.jsonl).")
    table = np.array(rows, dtype=np.float64)
    return Spread(table[:, 0], table[:, 1:])


def _quantiles(line: Line, when: str, edges: list[float]) -> tuple[float, ...] | None:
    exact = [finite(x) for x in line.get("kl_quantiles") or []] if when == "before" else []
    if len(exact) == 4 and None not in exact:
        return tuple(x for x in exact if x is not None)
    counts = line.get("kl" if when == "before" else "kl_after")
    return histogram_quantiles(counts, edges) if counts and sum(counts) else None


def histogram_quantiles(counts: list[int], edges: list[float]) -> tuple[float, ...]:
    """The quantiles a histogram with logarithmic bins allows: the place in a bin by its logarithm, 0 in the first."""
    total = np.cumsum(counts)
    found = []
    for q in QUANTILES:
        wanted = q * total[-1]
        j = int(np.searchsorted(total, wanted))
        low, high = edges[j], edges[j + 1]
        inside = 1 - (total[j] - wanted) / counts[j]
        found.append(0.0 if low <= 0 else low * (high / low) ** inside)
    return tuple(found)


def log_ratio_counts(run: RunData, keep: Callable[[Line], bool]) -> Array:
    """Tokens per bin of log ratio, over the updates to keep."""
    bins = len(run.tokens.log_ratio_edges) - 1 if run.tokens else 0
    rows = [x["log_ratio"] for x in (run.tokens.updates if run.tokens else []) if x.get("log_ratio") and keep(x)]
    return np.asarray(np.array(rows, dtype=np.float64).reshape(-1, bins).sum(axis=0), dtype=np.float64)


# ---------------------------------------------------------------------- completions

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


def colour_level(kl: float | None, scale: float) -> int:
    """Place of a KL on the colour scale, whose upper third begins at ``scale``."""
    return 0 if kl is None else int(np.searchsorted(np.array(_STEPS) * scale, kl, side="right"))


def colour_legend(scale: float) -> list[str]:
    """The KL at which each level begins."""
    return ["0", *(number(step * scale) for step in _STEPS)]


def sample_steps(run: RunData, scale: float, tokens: int = MOST_TOKENS) -> list[Step]:
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
    return Token(text, colour_level(before, scale), bool(projected), " · ".join(parts))
