"""The arms of a comparison: trust regions and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from troll.trl.robust.fingerprint import bound_kind

ARMS: dict[str, dict[str, Any]] = {
    "troll": {"trust_region": "troll"},
    "clip": {"trust_region": "clip", "epsilon": 0.2},
    "clip-higher": {"trust_region": "clip", "epsilon": 0.2, "epsilon_high": 0.28},
    "gspo": {
        "trust_region": "clip",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "none": {"trust_region": "none"},
}
"""PPO's clip, DAPO's higher upper clip, GSPO's clip of the sequence's ratio, each with its authors' settings."""

OTHER_CLIPS = ("cispo", "sapo", "vespo")
"""Losses of TRL that bound or reweight the ratio differently."""


def arm_of(settings: Mapping[str, Any]) -> tuple[str, str]:
    """The arm of a run with these settings, and its label."""
    region, level = settings["trust_region"], settings.get("importance_sampling_level", "token")
    by_sequence = level == "sequence"
    if region == "none":
        return ("custom" if by_sequence else "none"), "no trust region" + (", sequence ratio" if by_sequence else "")
    if region == "troll":
        kind = bound_kind(settings)
        label = f"TROLL, KL ≤ {settings['kl_bound']:g}" if kind == "fixed" else f"TROLL, {kind} bound"
        return ("custom" if by_sequence else "troll"), label + (", sequence ratio" if by_sequence else "")
    if settings.get("loss_type") in OTHER_CLIPS:
        return "custom", f"TRL's {settings['loss_type']}"
    low, high = settings["epsilon"], settings.get("epsilon_high")
    high = None if high == low else high
    label = f"clip ±{low:g}" if high is None else f"clip −{low:g}, +{high:g}"
    label = label.replace("clip", "GSPO clip") if by_sequence else label
    for arm, given in ARMS.items():
        full = {"importance_sampling_level": "token", "epsilon_high": None} | given
        if full == {"trust_region": region, "importance_sampling_level": level, "epsilon": low, "epsilon_high": high}:
            return arm, label
    return "custom", label
