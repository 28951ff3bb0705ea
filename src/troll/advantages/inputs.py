"""Input checks of the advantage estimators.

A bad reward would otherwise go unnoticed. One infinite reward makes the standard deviation of its group infinite and
every advantage of the group 0 or NaN; a NaN on a padding token spreads through every sum it enters (0·NaN = NaN).
Therefore

- tensors are detached and converted to float32, or stay float64: no advantage carries a gradient or is computed in half
  precision;
- entries that count must be finite; entries under the mask are set to 0 and never read.

Invalid input raises :class:`troll.errors.InputError`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from troll.errors import InputError
from troll.inputs import require_number, require_positive, require_same_device, require_tensor

__all__ = [
    "as_floats",
    "as_mask",
    "as_rewards",
    "as_token_floats",
    "require_between",
    "require_eps",
    "require_finite",
]


def as_floats(name: str, x: Tensor, shape: str) -> Tensor:
    """Return ``x`` detached in float32 (float64 stays); it must be a non-empty tensor of shape "[B]" or "[B, T]"."""
    _require_tensor(name, x, shape)
    return x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def as_rewards(rewards: Tensor) -> Tensor:
    """Return one finite reward per sample, [B]."""
    r = as_floats("rewards", rewards, "[B]")
    _require_counted_finite("rewards", r, torch.ones_like(r, dtype=torch.bool))
    return r


def as_mask(loss_mask: Tensor) -> Tensor:
    """Return ``loss_mask`` [B, T] as bool; given as bool, or as 0 and 1 of any integer or floating dtype."""
    _require_tensor("loss_mask", loss_mask, "[B, T]")
    mask = loss_mask == 1
    other = ~mask & (loss_mask != 0)  # a NaN is neither and lands here
    if other.any():
        at = other.nonzero()[0].tolist()
        raise InputError(
            f"loss_mask must contain only 0 and 1, got loss_mask{at} = {loss_mask[tuple(at)].item()}",
            "If every non-zero entry counts, pass loss_mask != 0",
        )
    return mask


def as_token_floats(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """Return ``x`` [B, T] with 0 under the mask; what counts must be finite, what does not may be anything."""
    floats = as_floats(name, x, "[B, T]")
    require_same_device(name, floats, "loss_mask", mask)
    if floats.shape != mask.shape:
        raise InputError(
            f"{name} and loss_mask must have the same shape [B, T], got {tuple(floats.shape)} and {tuple(mask.shape)}",
            "Cut both to the completion tokens, without the prompt",
        )
    _require_counted_finite(name, floats, mask)
    return floats.masked_fill(~mask, 0.0)


def require_between(name: str, value: float, low: float, high: float) -> None:
    """Refuse a ``value`` that is not a number in [low, high]."""
    expected = f"a number from {low:g} to {high:g}"
    require_number(name, value, expected, lambda x: low <= x <= high, "The default is 1.0")


def require_eps(eps: float, default: float) -> None:
    """Refuse an ``eps`` that is not a finite number > 0: with 0, equal rewards would give 0/0."""
    require_positive("eps", eps, f"The default is {default}")


def require_finite(what: str, x: Tensor) -> Tensor:
    """Return ``x``, computed from finite numbers; refuse if it overflowed."""
    if not x.isfinite().all():
        limit = torch.finfo(x.dtype).max
        raise InputError(
            f"The {what} overflows {x.dtype}, whose largest number is {limit:.1e}",
            "Rescale the rewards, or pass them as float64",
        )
    return x


def _require_tensor(name: str, x: Tensor, shape: str) -> None:
    require_tensor(name, x, shape)
    if x.ndim != shape.count(",") + 1:
        raise InputError(
            f"{name} must have shape {shape}, got {tuple(x.shape)}",
            "B is the number of samples, T the number of completion tokens",
        )
    if x.numel() == 0:
        raise InputError(f"{name} must not be empty, got shape {tuple(x.shape)}", "Leave empty batches out")


def _require_counted_finite(name: str, x: Tensor, counted: Tensor) -> None:
    bad = counted & ~x.isfinite()
    if bad.any():
        at = bad.nonzero()[0].tolist()
        raise InputError(
            f"{name} must be finite where they count, got {name}{at} = {x[tuple(at)].item()}"
            f" (entries that are not finite: {int(bad.sum())})",
            "Check what produced this entry; leave out a group that has a sample without a reward, or mask the sample",
        )
