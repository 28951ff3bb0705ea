"""Checks deferred until all kernels are launched.

The outcome of a check on a GPU tensor is known only when the device has computed it, and asking for it waits for the
device. Where several kernels are launched in a row, their checks are collected and run together at the end, with one
transfer from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class DeferredCheck(NamedTuple):
    """A check whose outcome a device has to compute first."""

    failed: Tensor
    """[] bool."""
    explain: Callable[[], None]
    """Raises the error."""


DeferredChecks = list[DeferredCheck]
"""Checks to run once everything is launched."""


def check_or_defer(deferred: DeferredChecks | None, check: DeferredCheck) -> None:
    """Run a check now, or add it to ``deferred`` if that is given."""
    if deferred is None:
        run_checks([check])
    else:
        deferred.append(check)


def run_checks(checks: DeferredChecks) -> None:
    """Raise the error of the first check that failed, if any, with one transfer from the device."""
    if checks:
        for check, failed in zip(checks, torch.stack([x.failed for x in checks]).tolist(), strict=True):
            if failed:
                check.explain()
