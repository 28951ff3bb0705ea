"""The page shows what its program prints, and names everything there is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from troll import diagnostics

PAGE = (Path(__file__).parents[2] / "docs" / "diagnostics.md").read_text()


def test_the_program_prints_what_the_page_shows(capsys):
    """Words exactly, numbers as far as another machine may round: exponentials of sums over 24 tokens, to 5 %."""
    code, shown = (re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[1] for kind in ("python", "text"))
    exec(compile(code, "diagnostics.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    number = re.compile(r"-?\d+\.?\d*(?:e-\d+)?")
    assert number.sub("#", printed).split() == number.sub("#", shown).split()
    found, expected = ([float(x) for x in number.findall(text)] for text in (printed, shown))
    assert found == pytest.approx(expected, rel=0.05, abs=0.02)


@pytest.mark.parametrize(
    "answer",
    [
        diagnostics.Spectrum,
        diagnostics.SequenceKL,
        diagnostics.GradientKept,
        diagnostics.GradientComparison,
        diagnostics.Conditioning,
        diagnostics.Mismatch,
    ],
)
def test_every_number_is_explained(answer):
    for field in fields(answer):
        assert field.name in ("names", "tokens") or f"`{field.name}`" in PAGE, field.name


def test_every_function_is_named():
    for name in diagnostics.__all__:
        if name[0].islower():
            assert f"`{name}`" in PAGE or f"diagnostics.{name}(" in PAGE, name
