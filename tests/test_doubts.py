"""Checks that wait for a device: raised at once, or together and in their order."""

from __future__ import annotations

import pytest
import torch

from troll.doubts import Doubt, Later, now_or, resolve


def doubt(justified: bool, name: str, seen: list[str]) -> Doubt:
    def explain() -> None:
        seen.append(name)
        raise ValueError(name)

    return Doubt(torch.tensor(justified), explain)


def test_only_a_justified_doubt_is_explained() -> None:
    seen: list[str] = []
    now_or(None, doubt(False, "a", seen))
    assert seen == []
    with pytest.raises(ValueError, match="b"):
        now_or(None, doubt(True, "b", seen))


def test_doubts_that_are_put_off_are_resolved_in_their_order() -> None:
    seen: list[str] = []
    later: Later = []
    for justified, name in ((False, "a"), (True, "b"), (True, "c")):
        now_or(later, doubt(justified, name, seen))
    assert seen == []
    with pytest.raises(ValueError, match="b"):
        resolve(later)
    assert seen == ["b"]


def test_all_are_brought_from_the_device_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: transfers.append(self.shape) or tolist(self))
    resolve([doubt(False, name, []) for name in "abc"])
    resolve([])
    assert transfers == [torch.Size([3])]
