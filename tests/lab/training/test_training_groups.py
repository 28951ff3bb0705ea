"""The means by sign and quarter against loops and against the diagnostics of the same batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troll.diagnostics import by_advantage, by_position
from troll.lab.training.recorder import kl_by_group


def test_by_hand() -> None:
    kl = torch.tensor([[1.0, 2.0, 4.0, 8.0, 99.0], [16.0, 99.0, 32.0, 99.0, 99.0]])
    counted = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 1, 0, 0]]).bool()
    advantages = torch.tensor([[1.0, 1.0, 0.0, -1.0, 1.0], [-2.0, 3.0, -2.0, 3.0, 3.0]])
    assert kl_by_group(kl, counted, advantages) == {
        "kl_by_sign/positive": 1.5,
        "kl_by_sign/negative": pytest.approx(56 / 3),
        "kl_by_quarter/1": 8.5,  # tokens 0 of 4 and 0 of 2
        "kl_by_quarter/2": 2.0,
        "kl_by_quarter/3": 18.0,  # tokens 2 of 4 and 1 of 2
        "kl_by_quarter/4": 8.0,
    }


def test_a_group_without_a_token_is_left_out() -> None:
    found = kl_by_group(torch.ones(1, 2), torch.tensor([[True, False]]), torch.zeros(1, 2))
    assert found == {"kl_by_quarter/1": 1.0}
    assert kl_by_group(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool), torch.ones(1, 2)) == {}


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 30))
def test_they_are_those_of_the_diagnostics(seed: int, B: int, T: int) -> None:
    g = torch.Generator().manual_seed(seed)
    counted = torch.rand(B, T, generator=g) < 0.8
    kl = torch.rand(B, T, generator=g).masked_fill(~counted, math.nan)
    advantages = torch.randint(-1, 2, (B, T), generator=g).float()
    found = kl_by_group(kl, counted, advantages)
    signs, quarters = by_advantage(kl, counted, advantages), by_position(kl, counted, bins=4)
    expected = {f"kl_by_sign/{row['group']}": row["mean"] for row in signs.rows() if row["count"]}
    expected.pop("kl_by_sign/zero", None)
    expected |= {f"kl_by_quarter/{i + 1}": row["mean"] for i, row in enumerate(quarters.rows()) if row["count"]}
    assert found == pytest.approx(expected, rel=1e-12)
