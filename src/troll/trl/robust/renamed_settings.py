"""Settings of troll 0.1.0 by their present names, for its checkpoints, ``run.json`` and ``config.yaml``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_Settings = Mapping[str, Any]


def _bound_schedule(old: _Settings) -> str | None:
    """``kl_bound_schedule`` of the former fields bound, bound_end, bound_rollouts, …"""
    kind = old.get("bound") or "fixed"
    values = {
        "schedule": {"end": old.get("bound_end"), "rollouts": old.get("bound_rollouts")},
        "projected": {"target": old.get("bound_target")},
        "network": {"target": old.get("bound_target")},
        "entropy": {"max": old.get("bound_highest")},
        "sequence": {"limit": old.get("sequence_kl_bound"), "by_prefix": old.get("sequence_by_prefix") or None},
    }
    if kind not in values:
        return None
    word = old.get("bound_curve") or "geometric" if kind == "schedule" else kind
    return schedule_text(word, values[kind])


def schedule_text(kind: str, values: Mapping[str, Any]) -> str:
    """A schedule in one line, as the settings have it: ``"geometric end=0.01 rollouts=50"``. None is left out."""
    words = [f"{name}={str(x).lower() if isinstance(x, bool) else x}" for name, x in values.items() if x is not None]
    return " ".join([kind, *words])


RENAMED_SETTINGS: dict[str, tuple[tuple[str, ...], Callable[[_Settings], Any]]] = {
    "kl_bound_schedule": (
        (
            *("bound", "bound_target", "bound_end", "bound_rollouts", "bound_curve", "bound_highest"),
            *("sequence_kl_bound", "sequence_by_prefix"),
        ),
        _bound_schedule,
    ),
    "regression_coef_schedule": (
        ("regression_tolerance",),
        lambda old: (
            None
            if old["regression_tolerance"] is None
            else schedule_text("projected", {"target": old["regression_tolerance"]})
        ),
    ),
    "on_invalid_reward": (
        ("reward_errors",),
        lambda old: {"stop": "raise"}.get(old["reward_errors"], old["reward_errors"]),
    ),
    "eval_size": (("held_out_size",), lambda old: old["held_out_size"]),
    "allow_unsandboxed_code": (
        ("dangerously_run_code_unsandboxed",),
        lambda old: old["dangerously_run_code_unsandboxed"],
    ),
}
"""New name → the former names it replaces, and its value as a function of the former settings."""


def translate_settings(old: _Settings) -> dict[str, Any]:
    """Settings of an earlier version (of a run's ``run.json`` or ``config.yaml``, or a checkpoint) by present names.

    >>> translate_settings({"bound": "projected", "bound_target": 0.03, "reward_errors": "stop", "seed": 0})
    {'seed': 0, 'kl_bound_schedule': 'projected target=0.03', 'on_invalid_reward': 'raise'}
    """
    former = {name for names, _ in RENAMED_SETTINGS.values() for name in names}
    new = {name: value for name, value in old.items() if name not in former}
    for name, (names, value) in RENAMED_SETTINGS.items():
        if new.get(name) is None and names[0] in old:
            new[name] = value(old)
    return new


def bound_kind(settings: _Settings) -> str:
    """Kind of the bound in a run's settings, of any version: ``fixed``, or the kind of its schedule."""
    schedule = translate_settings(settings).get("kl_bound_schedule")
    return schedule.split()[0] if schedule else "fixed"
