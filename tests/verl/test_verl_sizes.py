"""What travels: no more than promised, and the table of the documentation is what the script makes of the data."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "verl"


@pytest.fixture(scope="module")
def sizes() -> Any:
    spec = importlib.util.spec_from_file_location("verl_sizes", BENCHMARK / "sizes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setitem(sys.modules, "verl_sizes", module)  # where dataclasses look
    spec.loader.exec_module(module)
    monkeypatch.undo()
    return module


@pytest.fixture(scope="module")
def measured() -> Any:
    return json.loads((BENCHMARK / "sizes.json").read_text())


def test_bytes_of_a_token(sizes: Any, measured: Any) -> None:
    for kept, each in measured["bytes per token"].items():
        assert sizes.bytes_per_token(int(kept)) == each
    assert measured["bytes per token"]["8"] <= 70


def test_the_table_of_the_documentation(sizes: Any, measured: Any) -> None:
    engine = json.loads((BENCHMARK / "engine.json").read_text())
    assert sizes.table(measured, engine) in (ROOT / "docs" / "verl.md").read_text()
