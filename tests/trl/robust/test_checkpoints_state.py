"""State goes into a file and comes back with the same types and the same bits, without pickle."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from troll.errors import InputError
from troll.trl.robust.state import load_state, save_state, state_bytes


def same(a: Any, b: Any) -> bool:
    """Bit for bit, type for type."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and [type(k) for k in a] == [type(k) for k in b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def there_and_back(path: Path, tree: Any) -> Any:
    save_state(path / "state", tree)
    return load_state(path / "state")


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TENSORS = st.sampled_from(
    [
        torch.tensor(3.0),
        torch.tensor([1.5, math.nan, -math.inf]).bfloat16(),
        torch.arange(6, dtype=torch.int64).reshape(2, 3).T,
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.arange(10.0)[2:5],
        torch.tensor([1, 255], dtype=torch.uint8),
        np.arange(4, dtype=np.uint32),
    ]
)
KEYS = st.text(max_size=3) | st.integers(0, 9)
TREES = st.recursive(
    PLAIN | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.tuples(inner)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60)
@given(TREES)
def test_any_tree_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    assert same(tree, there_and_back(tmp_path_factory.mktemp("state"), tree))


def test_tensors_that_share_memory_come_back_apart(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    back = there_and_back(tmp_path, [whole, whole, whole[:3]])
    assert same(back, [whole, whole, whole[:3]])
    back[0].zero_()
    assert torch.equal(back[1], whole)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.RMSprop])
def test_an_optimizer_goes_on_as_if_it_had_not_been_saved(tmp_path: Path, kind: Any) -> None:
    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, kind(model.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))

    def update(model: Any, optimizer: Any, times: int) -> None:
        for i in range(times):
            optimizer.zero_grad()
            (model(torch.ones(4, 3) * (i + 1)) ** 2).sum().backward()
            optimizer.step()

    straight, optimizer = made()
    update(straight, optimizer, 2)
    state = there_and_back(tmp_path, optimizer.state_dict())
    again, fresh = made()
    again.load_state_dict(straight.state_dict())
    fresh.load_state_dict(state)
    update(straight, optimizer, 3)
    update(again, fresh, 3)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), again.parameters(), strict=True))
    assert same(optimizer.state_dict(), fresh.state_dict())


def test_random_generators_draw_on_as_from_there(tmp_path: Path) -> None:
    from troll.trl.robust.state import random_state, restore_random_state

    def draw() -> tuple[float, ...]:
        old = np.random  # the one that others draw from
        return random.random(), random.gauss(), float(old.rand()), float(old.randn()), float(torch.rand(()))

    draw()
    state = there_and_back(tmp_path, random_state())
    expected = draw(), draw()
    restore_random_state(state)
    assert (draw(), draw()) == expected


def test_what_is_read_does_not_hold_the_file(tmp_path: Path) -> None:
    save_state(tmp_path / "state", [torch.zeros(1000)])
    (tensor,) = load_state(tmp_path / "state")
    (tmp_path / "state").unlink()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert not tensor.any()


@pytest.mark.parametrize("value", [object(), {1.5: 2}, {(1,): 2}, [lambda: 0], torch.float32])
def test_what_only_pickle_could_save_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InputError, match="optimizer's state"):
        save_state(tmp_path / "state", value)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("data", [b"", b"{}", b"\x80\x04K\x01.", bytes(100)])
def test_a_file_of_something_else_is_an_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "state").write_bytes(data)
    with pytest.raises(InputError, match="cannot be read"):
        load_state(tmp_path / "state")


def test_safetensors_of_somebody_else_are_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "state")
    with pytest.raises(InputError, match="cannot be read"):
        load_state(tmp_path / "state")


def test_bytes_are_those_of_the_tensors() -> None:
    assert state_bytes({"a": [torch.zeros(3, dtype=torch.float64), 5], "b": torch.zeros(2, dtype=torch.bfloat16)}) == 28
