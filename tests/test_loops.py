"""The tables of the test loops in conftest.py name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import conftest
import pytest

TESTS = Path(__file__).parent
NAMES = [*conftest.CORE, *conftest.SLOW, *conftest.SLOW_AFTER_THE_FIRST_CASE]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_the_tables_is_that_of_a_test(name: str) -> None:
    file, _, test = name.partition("[")[0].partition("::")
    assert re.search(rf"^def {test or 'test_'}", (TESTS / file).read_text(), flags=re.MULTILINE)


def test_a_name_stands_in_one_table() -> None:
    assert len(set(NAMES)) == len(NAMES)


def test_the_core_has_an_oracle_and_a_trl_update() -> None:
    assert any("oracle" in name for name in conftest.CORE)
    assert any(name.startswith("trl/") for name in conftest.CORE)
