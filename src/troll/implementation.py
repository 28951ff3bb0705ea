"""Which code computes. Everything that has a kernel asks ``choose``, and ``choose`` can say why.

``reference``  plain PyTorch, written to be read: the definition, for every device and type.
``torch``      the same numbers from PyTorch operators arranged for CPUs: nothing is sorted that need not be, nothing of
               the size of the vocabulary is made twice.
``triton``     fused kernels for NVIDIA GPUs.
``auto``       what fits the tensors at hand. The environment variable ``TROLL_IMPL`` takes its place.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, cast, get_args

import torch

from troll.errors import InputError, require_choice

Impl = Literal["auto", "reference", "torch", "triton"]
VARIABLE = "TROLL_IMPL"
_INSTALLED = importlib.util.find_spec("triton") is not None


class Choice(NamedTuple):
    """What computes, and why."""

    impl: Literal["reference", "torch", "triton"]
    why: str


def choose(impl: Impl, device: torch.device, cannot: str | None = None) -> Choice:
    """Decide for tensors on ``device``; ``cannot`` says what about them the kernels cannot do, if anything.

    What is asked for by name is what computes, or an error. ``auto`` never fails.
    """
    require_choice("impl", impl, get_args(Impl))
    if torch.compiler.is_compiling() and impl in ("auto", "reference"):
        return Choice("reference", "inside torch.compile, which fuses plain operators itself")
    asked = f"impl={impl!r}"
    if impl == "auto" and os.environ.get(VARIABLE):
        asked = f"{VARIABLE}={os.environ[VARIABLE]}"
        impl = cast(Impl, os.environ[VARIABLE])
        require_choice(VARIABLE, impl, get_args(Impl))
    obstacle = cannot or _no_triton(device)
    if impl == "triton" and obstacle is not None:
        fix = "Use impl='auto'" if asked.startswith("impl") else f"Unset {VARIABLE}"
        raise InputError(f"{asked} is not possible here: {obstacle}", fix)
    if impl != "auto":
        return Choice(impl, f"asked for by {asked}")
    if device.type == "cpu":
        return Choice("torch", "tensors on a CPU")
    if obstacle is not None:
        return Choice("reference", obstacle)
    return Choice("triton", f"tensors on {device.type}, and Triton is installed")


def _no_triton(device: torch.device) -> str | None:
    """Why Triton cannot work on tensors of this device, or None."""
    if torch.compiler.is_compiling():
        return "torch.compile traces PyTorch operators"
    if not _INSTALLED:
        return "Triton is not installed (pip install triton)"
    if device.type != "cuda" and not interpreted():
        return f"tensors are on {device.type}: Triton needs a CUDA device (or TRITON_INTERPRET=1, for tests)"
    return None


def interpreted() -> bool:
    """Whether kernels are interpreted on the CPU, as the tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which kernels are launched on this device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
