"""For all tests of the adapters."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _collect_only_what_is_new() -> Iterator[None]:
    """Training begins with a collection of garbage, most of whose time goes into the modules that are imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
