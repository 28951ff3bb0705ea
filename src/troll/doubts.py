"""Checks whose outcome a device has to compute first.

Asking for the outcome waits for the device, which has nothing to do meanwhile. Where several things are launched one
after another, their doubts are collected and resolved at the end, all in one transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Doubt(NamedTuple):
    """A check whose outcome a device has to compute first."""

    justified: Tensor
    """[] bool, whether something is wrong."""
    explain: Callable[[], None]
    """Raises what is wrong."""


Later = list[Doubt]
"""Doubts that wait until everything that the device has to do is launched."""


def now_or(later: Later | None, doubt: Doubt) -> None:
    """Resolve a doubt, or put it off where there is a list for that."""
    if later is None:
        resolve([doubt])
    else:
        later.append(doubt)


def resolve(doubts: Later) -> None:
    """Raise what is wrong, if anything, with one transfer from the device."""
    if doubts:
        for doubt, justified in zip(doubts, torch.stack([x.justified for x in doubts]).tolist(), strict=True):
            if justified:
                doubt.explain()
