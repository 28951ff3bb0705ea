"""A task: prompts to train on, reward functions that verify completions, and held-out problems for evaluation."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from troll.errors import InputError, suggestion
from troll.rewards.answers import text_of as text_of

Reward = Callable[..., Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Prompts and the reward functions that score their completions.

    Attributes:
        name: as passed to ``load_task``, for example ``gym:gcd``.
        description: one line for reports.
        train_dataset: has a column ``prompt`` (a string is plain text, a list is chat messages), the columns the
            reward functions take, and optionally ``difficulty``, a number.
        eval_dataset: the same columns for the held-out problems. None of them is in ``train_dataset``, and they do not
            depend on the seed.
        reward_funcs: TRL's reward functions, ``f(prompts, completions, **columns) -> list[float | None]``.
        answer_of: returns the normalised answer of a completion, or None if it has none. Used for majority votes.
        stop: a completion also ends at this string.
        settings: TRL arguments that the task recommends, for example ``max_completion_length``.
    """

    name: str
    description: str
    train_dataset: Dataset
    eval_dataset: Dataset
    reward_funcs: list[Reward]
    answer_of: Callable[[str], str | None]
    stop: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """The arguments of ``load_task``: data, sizes, options and seed."""

    name: str
    data: str | None = None
    eval_data: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    train_size: int | None = None
    eval_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("train_size", "eval_size"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise InputError(f"{name} must be at least 1, got {size}", f"Leave {name} out for the default")

    def choose(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The defaults updated with the given options. Raises for an unknown option or a wrong type."""
        options = dict(defaults)
        for key, value in self.options.items():
            if key not in defaults:
                known = ", ".join(f"{name}={default!r}" for name, default in defaults.items())
                near = suggestion(key, defaults)
                fix = f"Did you mean {near!r}?" if near else f"The options are {known}" if known else "Leave it out"
                which = f"has no option {key!r}" if known else f"takes no options, got {key}={value!r}"
                raise InputError(f"The task {self.name} {which}", fix)
            options[key] = _typed(key, value, defaults[key])
        return options

    def refuse_data(self) -> None:
        """Raise if data was given to a task that generates its problems."""
        for name in ("data", "eval_data"):
            if getattr(self, name) is not None:
                raise InputError(
                    f"The task {self.name} generates its problems and takes no {name}, got {getattr(self, name)!r}",
                    "Use --task data for prompts in a file",
                )


def _typed(key: str, value: Any, default: Any) -> Any:
    """``value`` converted to the type of ``default``; values from the command line are strings."""
    given = value
    if isinstance(value, str) and not isinstance(default, str):
        try:
            value = ast.literal_eval(value.capitalize() if value.lower() in ("true", "false", "none") else value)
        except (ValueError, SyntaxError):
            if default is not None:
                raise _wrong_type(key, given, default) from None
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, tuple | list) and isinstance(value, tuple | list):
        return type(default)(value)
    if default is not None and value is not None and type(value) is not type(default):
        raise _wrong_type(key, given, default)
    return value


def _wrong_type(key: str, value: Any, default: Any) -> InputError:
    kind = type(default).__name__
    return InputError(f"The task option {key} must be of type {kind}, got {value!r}", f"The default is {default!r}")


def first_line(text: str) -> str | None:
    """The text up to the first newline, the answer to a plain few-shot prompt; None if it is empty.

    >>> first_line(" 12\\n3 + 4 = 7")
    '12'
    """
    return text.split("\n", 1)[0].strip() or None


def exact_match(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the first line is exactly the answer, else 0."""
    return [float(first_line(text_of(c)) == a) for c, a in zip(completions, answer, strict=True)]
