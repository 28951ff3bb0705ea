"""Named settings of the trust region: ``"default"`` are ours, ``"paper"`` those of the paper.

                    default    paper
``kl_bound``        0.2        0.05      ε, the radius of the trust region
``regression_coef`` 1          1         α, the weight of the regression term
``tail``            bucket     floor     how dropped probability is treated (``troll.policy.align``)
``max_support``     64         64        K, the most tokens kept per position
``tail_mass``       1e-5       1e-5      δ, the probability that may be dropped per position

In functions and configurations these five default to None, "as the preset says"; an explicit value wins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from troll.errors import require_choice
from troll.policy import MAX_SUPPORT, TAIL, TAIL_MASS, Tail
from troll.projection import KL_BOUND

PresetName = Literal["default", "paper"]


@dataclass(frozen=True)
class Preset:
    """A complete setting of the trust region."""

    kl_bound: float = KL_BOUND
    regression_coef: float = 1.0
    tail: Tail = TAIL
    max_support: int = MAX_SUPPORT
    tail_mass: float = TAIL_MASS


PRESETS: dict[str, Preset] = {
    "default": Preset(),
    "paper": Preset(kl_bound=0.05, regression_coef=1.0, tail="floor", max_support=64, tail_mass=1e-5),
}


def resolve(
    preset: PresetName = "default",
    *,
    kl_bound: float | None = None,
    regression_coef: float | None = None,
    tail: Tail | None = None,
    max_support: int | None = None,
    tail_mass: float | None = None,
) -> Preset:
    """The preset with the explicit values (those that are not None) in place of its own.

    >>> resolve("paper", kl_bound=0.1)
    Preset(kl_bound=0.1, regression_coef=1.0, tail='floor', max_support=64, tail_mass=1e-05)
    """
    require_choice("preset", preset, get_args(PresetName))
    if tail is not None:
        require_choice("tail", tail, get_args(Tail), TAIL)
    explicit = {
        "kl_bound": kl_bound,
        "regression_coef": regression_coef,
        "tail": tail,
        "max_support": max_support,
        "tail_mass": tail_mass,
    }
    return replace(PRESETS[preset], **{name: x for name, x in explicit.items() if x is not None})  # type: ignore[arg-type]
