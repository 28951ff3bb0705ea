"""The errors this package raises for bad input: two sentences, what is wrong and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Input that cannot be used as it is: ``problem`` says what is wrong, ``fix`` what to do, a sentence each.

    >>> raise InputError("kl_bound must be ≥ 0, got -1", "The default is 0.2")
    Traceback (most recent call last):
    troll.errors.InputError: kl_bound must be ≥ 0, got -1. The default is 0.2.
    """

    def __init__(self, problem: str, fix: str) -> None:
        self.problem, self.fix = problem, fix
        super().__init__(f"{_ended(problem)} {_ended(fix)}")


class TrainingError(InputError):
    """A run that cannot continue with the settings it was given."""


def require_choice(name: str, value: str, choices: Iterable[str], default: str | None = None) -> None:
    """Refuse a ``value`` of the option ``name`` that is not one of ``choices``; the first is the default."""
    known = tuple(choices)
    if not isinstance(value, str) or value not in known:
        near = suggestion(value, known)
        fix = f"Did you mean {near!r}?" if near else f"The default is {default or known[0]!r}"
        raise InputError(f"{name} must be {' or '.join(map(repr, known))}, got {value!r}", fix)


def suggestion(word: object, known: Iterable[str]) -> str | None:
    """The known word that ``word`` was probably meant to be, if any; in whatever case it was written.

    >>> suggestion("Geometrc", ["linear", "geometric"])
    'geometric'
    """
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(str(word).lower(), by_lower, n=1, cutoff=0.75)
    return by_lower[found[0]] if found else None


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith((".", "?", "!", "…")) else f"{sentence}."
