"""``choose``: every rule, and that it says why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from troll import implementation as choice
from troll.errors import InputError
from troll.implementation import Choice, choose
from troll.policy.scoring import KERNEL_SUPPORT, LogitTransform, choose_for

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton installed, nothing interpreted, nothing asked for, whatever is true here."""
    monkeypatch.setattr(choice, "_INSTALLED", True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(choice.VARIABLE, raising=False)


# ---- auto ----------------------------------------------------------------------------------------------------------


def test_auto_takes_what_fits_the_device() -> None:
    assert choose("auto", CPU) == Choice("torch", "tensors on a CPU")
    assert choose("auto", CUDA) == Choice("triton", "tensors on cuda, and Triton is installed")
    assert choose("auto", META).impl == "reference"
    assert "tensors are on meta" in choose("auto", META).why


def test_auto_on_a_cpu_needs_nothing_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_INSTALLED", False)
    assert choose("auto", CPU, "logits are fp64") == Choice("torch", "tensors on a CPU")


def test_auto_says_what_keeps_it_from_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("auto", CUDA, "logits are fp64") == Choice("reference", "logits are fp64")
    monkeypatch.setattr(choice, "_INSTALLED", False)
    assert choose("auto", CUDA) == Choice("reference", "Triton is not installed (pip install triton)")


def test_interpreted_kernels_are_only_taken_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choice.interpreted()
    assert choose("auto", CPU).impl == "torch"
    assert choose("triton", CPU) == Choice("triton", "asked for by impl='triton'")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not choice.interpreted()


# ---- by name -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [CPU, CUDA, META])
@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("cannot", [None, "logits are fp64"])
def test_what_is_asked_for_by_name_computes(impl: str, device: torch.device, cannot: str | None) -> None:
    assert choose(impl, device, cannot) == Choice(impl, f"asked for by impl={impl!r}")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "cannot", "installed", "obstacle"),
    [
        (CPU, None, True, "tensors are on cpu: Triton needs a CUDA device"),
        (META, None, True, "tensors are on meta"),
        (CUDA, "logits are fp64", True, "logits are fp64"),
        (CUDA, None, False, "Triton is not installed (pip install triton)"),
    ],
)
@pytest.mark.parametrize("asked", ["impl='triton'", "TROLL_IMPL=triton"])
def test_kernels_that_cannot_are_an_error_when_asked_for(
    asked: str,
    device: torch.device,
    cannot: str | None,
    installed: bool,
    obstacle: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "_INSTALLED", installed)
    if asked.startswith("TROLL"):
        monkeypatch.setenv("TROLL_IMPL", "triton")
    with pytest.raises(InputError) as caught:
        choose("auto" if asked.startswith("TROLL") else "triton", device, cannot)
    assert caught.value.problem.startswith(f"{asked} is not possible here: {obstacle}")
    assert caught.value.fix == ("Unset TROLL_IMPL" if asked.startswith("TROLL") else "Use impl='auto'")


def test_names_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"impl must be .*, got 'cuda'") as caught:
        choose("cuda", CPU)  # type: ignore[arg-type]
    for name in ("auto", "reference", "torch", "triton"):
        assert name in caught.value.problem
    monkeypatch.setenv("TROLL_IMPL", "fast")
    with pytest.raises(InputError, match=r"TROLL_IMPL must be .*, got 'fast'"):
        choose("auto", CPU)


# ---- the environment -----------------------------------------------------------------------------------------------


def test_the_variable_takes_the_place_of_auto_and_of_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROLL_IMPL", "reference")
    assert choose("auto", CPU) == Choice("reference", "asked for by TROLL_IMPL=reference")
    assert choose("auto", CUDA).impl == "reference"
    assert choose("torch", CPU) == Choice("torch", "asked for by impl='torch'")
    monkeypatch.setenv("TROLL_IMPL", "triton")
    assert choose("auto", CUDA) == Choice("triton", "asked for by TROLL_IMPL=triton")
    monkeypatch.setenv("TROLL_IMPL", "auto")
    assert choose("auto", CPU) == Choice("torch", "tensors on a CPU")
    monkeypatch.setenv("TROLL_IMPL", "")
    assert choose("auto", CUDA).impl == "triton"


# ---- torch.compile -------------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("impl", ["auto", "reference", "torch"])
def test_a_compiled_function_takes_plain_operators(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a real graph; the variable is not read there."""
    monkeypatch.setenv("TROLL_IMPL", "triton")

    def decide(x: Tensor) -> tuple[Tensor, str, str]:
        return x + 1, *choose(impl, x.device)  # type: ignore[arg-type]

    _, taken, why = torch.compile(decide, fullgraph=True, backend="eager")(torch.zeros(2))
    if impl == "torch":
        assert (taken, why) == ("torch", "asked for by impl='torch'")
    else:
        assert (taken, why) == ("reference", "inside torch.compile, which fuses plain operators itself")


def test_kernels_are_refused_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(
        InputError, match=r"impl='triton' is not possible here: torch\.compile traces PyTorch operators"
    ):
        choose("triton", CUDA)


# ---- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "support", "logit", "why"),
    [
        (torch.float64, 8, LogitTransform(), "logits are fp64"),
        (torch.bfloat16, KERNEL_SUPPORT + 1, LogitTransform(), f"max_support is {KERNEL_SUPPORT + 1}, above the 256"),
        (torch.float32, 8, LogitTransform(scale=-1.0), "the logit scale is -1.0"),
        (torch.float32, 8, LogitTransform(scale=0.0), "the logit scale is 0.0"),
    ],
)
def test_rows_that_the_kernels_cannot_score(dtype: torch.dtype, support: int, logit: LogitTransform, why: str) -> None:
    taken = choose_for("auto", CUDA, dtype, support, logit)
    assert taken.impl == "reference"
    assert taken.why.startswith(why)
    with pytest.raises(InputError, match="impl='triton' is not possible here:"):
        choose_for("triton", CUDA, dtype, support, logit)
    assert choose_for("auto", CPU, dtype, support, logit).impl == "torch"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_that_the_kernels_can_score(dtype: torch.dtype) -> None:
    for support in (1, KERNEL_SUPPORT):
        assert choose_for("auto", CUDA, dtype, support, LogitTransform(0.5, 30.0, 0.7)).impl == "triton"
