"""The exception this package raises for bad input: what was given, what was expected, what to try."""

from __future__ import annotations


class InputError(ValueError):
    """Input that cannot be used as it is.

    >>> raise InputError("kl_bound=-1", "a number ≥ 0", "0.2, the default")
    Traceback (most recent call last):
    troll.errors.InputError: given: kl_bound=-1; expected: a number ≥ 0; try: 0.2, the default
    """

    def __init__(self, given: str, expected: str, hint: str) -> None:
        super().__init__(f"given: {given}; expected: {expected}; try: {hint}")
        self.given, self.expected, self.hint = given, expected, hint


class TrainingError(InputError):
    """A run that cannot go on with the settings it was given."""


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a ``value`` of the option ``name`` that is not one of ``choices``."""
    if value not in choices:
        raise InputError(f"{name}={value!r}", " or ".join(map(repr, choices)), f"{name}={choices[0]!r}, the default")
