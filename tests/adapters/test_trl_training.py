"""Every kind of model trains with the bound active, and the bound holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from trl_cases import furthest, logged, trainer, weights


@pytest.mark.parametrize("tail", ["bucket", "floor"])
def test_the_bound_acts_and_holds(tmp_path: Path, tail: str) -> None:
    run = trainer(tmp_path, tail=tail)
    before = weights(run)
    run.train()
    assert furthest(before, weights(run)) > 1e-2
    assert logged(run, "troll/kl_before/max")[0] < 1e-9  # the first update is made by the old policy itself
    assert min(logged(run, "troll/projected_fraction")[1:]) > 0.5
    assert min(logged(run, "troll/kl_before/max")[1:]) > 0.1
    assert max(logged(run, "troll/kl_after/max")) <= 0.05 * (1 + 1e-5)
