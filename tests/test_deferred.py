"""Checks that wait for a device: raised at once, or together and in their order."""

from __future__ import annotations

import pytest
import torch

from troll.deferred import DeferredCheck, DeferredChecks, check_or_defer, run_checks


def check(failed: bool, name: str, seen: list[str]) -> DeferredCheck:
    def explain() -> None:
        seen.append(name)
        raise ValueError(name)

    return DeferredCheck(torch.tensor(failed), explain)


def test_only_a_justified_doubt_is_explained() -> None:
    seen: list[str] = []
    check_or_defer(None, check(False, "a", seen))
    assert seen == []
    with pytest.raises(ValueError, match="b"):
        check_or_defer(None, check(True, "b", seen))


def test_doubts_that_are_put_off_are_resolved_in_their_order() -> None:
    seen: list[str] = []
    deferred: DeferredChecks = []
    for failed, name in ((False, "a"), (True, "b"), (True, "c")):
        check_or_defer(deferred, check(failed, name, seen))
    assert seen == []
    with pytest.raises(ValueError, match="b"):
        run_checks(deferred)
    assert seen == ["b"]


def test_all_are_brought_from_the_device_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: transfers.append(self.shape) or tolist(self))
    run_checks([check(False, name, []) for name in "abc"])
    run_checks([])
    assert transfers == [torch.Size([3])]
