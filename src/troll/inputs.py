"""Checks of arguments, shared by all public functions: is this a tensor, of which shape and device; is it a number?

No check here reads the entries of a tensor, so none waits for a GPU; ``troll.deferred`` is for those that must.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from troll.errors import InputError


def describe(x: object) -> str:
    """What the user passed, for the end of "… must be …, got …"."""
    if x is None or isinstance(x, (bool, int, float, complex, str, np.generic)):
        return repr(x.item() if isinstance(x, np.generic) else x)
    if isinstance(x, Tensor):
        return f"a tensor {list(x.shape)}"
    if isinstance(x, np.ndarray):
        return f"a numpy array {list(x.shape)}"
    name = type(x).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def is_number(x: object) -> bool:
    """Whether ``x`` is a real number of Python or NumPy; a bool is not."""
    return isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)


def is_integer(x: object) -> bool:
    """Whether ``x`` is an integer of Python or NumPy; a bool is not."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def require_number(name: str, x: object, expected: str, fits: Callable[[float], bool], fix: str) -> None:
    """Refuse what is not a number, and a number that does not fit; ``expected`` is "a number > 0" or the like."""
    if not is_number(x):
        raise InputError(f"{name} must be {expected}, got {describe(x)}", _unquoted(name, x) or fix)
    if not fits(x):  # type: ignore[arg-type]
        raise InputError(f"{name} must be {expected}, got {describe(x)}", fix)


def require_positive(name: str, x: object, fix: str) -> None:
    """Refuse what is not a finite number > 0."""
    require_number(name, x, "a finite number > 0", lambda value: math.isfinite(value) and value > 0, fix)


def require_count(name: str, x: object, fix: str) -> None:
    """Refuse what is not an integer ≥ 1."""
    if not is_integer(x) or x < 1:  # type: ignore[operator]
        raise InputError(f"{name} must be an integer ≥ 1, got {describe(x)}", _unquoted(name, x) or fix)


def _unquoted(name: str, x: object) -> str | None:
    """The fix for a number in quotation marks."""
    try:
        return f"Pass {name}={x}, without quotation marks" if isinstance(x, str) and math.isfinite(float(x)) else None
    except ValueError:
        return None


def require_tensor(name: str, x: object, what: str, fix: str | None = None) -> None:
    """Refuse what is not a dense tensor of real numbers; ``what`` is its shape, "[B, T]", or more words.

    ``fix`` is for a wrong type; lists, tuples, NumPy arrays and numbers are told to become tensors.
    """
    if not isinstance(x, Tensor):
        convertible = isinstance(x, (list, tuple, np.ndarray)) or is_number(x)
        advice = f"Convert it with torch.as_tensor({name})" if convertible else fix
        raise InputError(f"{name} must be a tensor {what}, got {describe(x)}", advice or f"Pass a tensor {what}")
    if x.is_complex():
        raise InputError(f"{name} must have real entries, got {_dtype(x)}", f"Pass {name}.real")


def require_floats(name: str, x: object, what: str, fix: str) -> None:
    """Refuse what is not a tensor of a floating-point type."""
    require_tensor(name, x, what, fix)
    if not x.is_floating_point():  # type: ignore[attr-defined]
        raise InputError(f"{name} must have a floating-point dtype, got {_dtype(x)}", fix)


def require_integers(name: str, x: object, what: str, fix: str) -> None:
    """Refuse what is not a tensor of an integer type."""
    require_tensor(name, x, what, fix)
    if x.is_floating_point() or x.dtype == torch.bool:  # type: ignore[attr-defined]
        raise InputError(f"{name} must have an integer dtype, got {_dtype(x)}", fix)


def require_same_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse two tensors on different devices."""
    if x.device != other.device:
        raise InputError(
            f"{name} and {other_name} must be on the same device, got {x.device} and {other.device}",
            f"Pass {other_name}.to({name}.device)",
        )


def _dtype(x: object) -> str:
    return str(x.dtype).removeprefix("torch.")  # type: ignore[attr-defined]
