"""The Hugging Face hub without a network: the cache or an error at once, instead of half a minute of retries."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fail_fast() -> Iterator[None]:
    """In this block the hub is offline if it cannot be reached: cached files are used, and others fail at once."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _reachable()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@functools.cache
def _reachable() -> bool:
    """Whether the hub replies, even with an error; asked once per process."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:  # many kinds: name resolution, proxies, timeouts
        return False
    return True
