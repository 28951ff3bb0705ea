"""What a model is trained on: prompts, a reward that can be checked, problems held out to measure progress."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from troll.errors import InputError
from troll.rewards.text import text_of as text_of

Reward = Callable[..., Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Prompts and how to judge what a model makes of them.

    Attributes:
        name: as it is asked for, for example ``gym:gcd``.
        description: one line, for reports.
        train: the column ``prompt`` (a string is plain text, a list is chat messages), the columns the reward takes,
            and ``difficulty``, a number, where it is known.
        held_out: the same, of problems that are not in ``train``; the same ones whatever the seed.
        reward_funcs: TRL's reward functions, ``f(prompts, completions, **columns) -> list[float | None]``.
        answer_of: the answer a completion gives, in one way of writing; None if it gives none. For majority votes.
        stop: a completion ends at this string as well as at the end token.
        settings: what the task recommends to TRL, for example ``max_completion_length``.
    """

    name: str
    description: str
    train: Dataset
    held_out: Dataset
    reward_funcs: list[Reward]
    answer_of: Callable[[str], str | None]
    stop: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """What was asked of a task: where its data is, how much of it, which variant."""

    name: str
    data: str | None = None
    eval_data: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    train_size: int | None = None
    held_out_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("train_size", "held_out_size"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise InputError(f"{name}={size}", "a number of problems, at least 1", f"leaving {name} out")

    def choose(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The options given, over the defaults; an option the task does not have, or of another type, is refused."""
        chosen = dict(defaults)
        for key, value in self.options.items():
            if key not in defaults:
                known = ", ".join(f"{name}={default!r}" for name, default in defaults.items())
                raise InputError(f"the option {key}={value!r} of {self.name}", known or "no options", "one of these")
            chosen[key] = _typed(value, defaults[key], f"{key}={value!r} of {self.name}")
        return chosen

    def refuse_data(self) -> None:
        """For tasks that make their own problems."""
        for name in ("data", "eval_data"):
            if getattr(self, name) is not None:
                raise InputError(
                    f"{name}={getattr(self, name)!r} for the task {self.name}",
                    f"no {name}: this task makes its own problems",
                    'the task "data" for a file of your own',
                )


def _typed(value: Any, default: Any, given: str) -> Any:
    """``value`` as the type of ``default``; from the command line it comes as a string."""
    if isinstance(value, str) and not isinstance(default, str):
        try:
            value = ast.literal_eval(value.capitalize() if value.lower() in ("true", "false", "none") else value)
        except (ValueError, SyntaxError):
            if default is not None:
                raise InputError(given, f"{type(default).__name__}, e.g. {default!r}", "that type") from None
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, tuple | list) and isinstance(value, tuple | list):
        return type(default)(value)
    if default is not None and value is not None and type(value) is not type(default):
        raise InputError(given, f"{type(default).__name__}, e.g. {default!r}", "that type")
    return value


def first_line(text: str) -> str | None:
    """The answer to a plain few-shot prompt: the text up to the first newline; None if that is empty.

    >>> first_line(" 12\\n3 + 4 = 7")
    '12'
    """
    return text.split("\n", 1)[0].strip() or None


def exact_match(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the first line is exactly the answer, else 0."""
    return [float(first_line(text_of(c)) == a) for c, a in zip(completions, answer, strict=True)]
