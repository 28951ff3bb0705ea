"""What holds before anything is imported, and how test processes (``pytest -n``) share a machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a test process and what it starts: more only wait for each other

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported

ALONE = {  # files that must not run beside each other, by what they share
    "the threads and the processes of one user": ("selftest/", "sandbox/", "test_cli_code", "test_rewards_code"),
    "the cores, which a cluster needs": ("test_cli_verl", "test_verl_main_ppo"),
}


@pytest.fixture
def hangups() -> Iterator[None]:
    """A closed terminal is heard of, also where the tests are run with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def together(nodeid: str) -> str:
    """The tests that one process runs, one after the other: those of a file, or of some files."""
    file = nodeid.partition("::")[0]
    return next((name for name, parts in ALONE.items() if any(part in file for part in parts)), file)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files begin first, so that no process is left with one when the others are done."""
    if hasattr(config, "workerinput"):
        slow = {together(item.nodeid) for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: together(item.nodeid) not in slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file share its fixtures, and stay in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

    config.option.loadscopereorder = False
    return Together(config, log)
