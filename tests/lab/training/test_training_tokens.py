"""Tokens as histograms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from troll.lab.training.recorder import HEADER, KL_EDGES, LOG_RATIO_EDGES, TokenHistogram


def line_of(kl: list[float], ratio: list[float] | None = None, counted: list[bool] | None = None, **more: list[float]):  # type: ignore[no-untyped-def]
    histogram = TokenHistogram()
    stats = {"kl_before": kl, "ratio": ratio or [1.0] * len(kl), **more}
    mask = torch.tensor([counted or [True] * len(kl)])
    histogram.add({name: torch.tensor([values]) for name, values in stats.items()}, mask)
    return histogram.line()


def filled(counts: list[int]) -> dict[int, int]:
    return {i: n for i, n in enumerate(counts) if n}


def test_edges() -> None:
    assert KL_EDGES[:2] == [0.0, 1e-8]
    assert KL_EDGES[-1] == 100.0
    steps = np.diff(np.log10(KL_EDGES[1:]))
    assert steps == pytest.approx([1 / 6] * 60)
    assert pytest.approx([i / 10 for i in range(-30, 31)], abs=1e-12) == LOG_RATIO_EDGES
    assert HEADER == {"format": 1, "kl_edges": KL_EDGES, "log_ratio_edges": LOG_RATIO_EDGES}


@pytest.mark.parametrize(
    ("kl", "bin"),
    [
        (0.0, 0),
        (5e-9, 0),
        (2e-8, 2),
        (0.05, 41),
        (99.0, 60),
        (100.0, 60),
        (1e9, 60),
        (math.inf, 60),
        (math.nan, 60),
        (-1e-9, 0),
    ],
)
def test_a_KL_is_counted_between_the_edges_around_it(kl: float, bin: int) -> None:
    assert filled(line_of([kl])["kl"]) == {bin: 1}
    if 0 <= kl < 100:
        assert KL_EDGES[bin] <= kl < KL_EDGES[bin + 1]


@pytest.mark.parametrize(("ratio", "bin"), [(1.0, 30), (1.05, 30), (0.99, 29), (2.72, 40), (1e6, 59), (0.0, 0)])
def test_a_ratio_is_counted_by_its_logarithm(ratio: float, bin: int) -> None:
    assert filled(line_of([0.0], [ratio])["log_ratio"]) == {bin: 1}


def test_only_tokens_that_count_are_counted() -> None:
    line = line_of([0.01, 50.0, 0.02], [1.0, 9.0, 2.0], [True, False, True])
    assert line["count"] == sum(line["kl"]) == sum(line["log_ratio"]) == 2
    assert line["kl_quantiles"][-1] == pytest.approx(0.02)


def test_quantiles() -> None:
    """The nearest from below, as the metrics have it: not a mean with an infinite neighbour."""
    kl = torch.linspace(0, 1, 101).tolist()
    assert line_of(kl)["kl_quantiles"] == pytest.approx([0.5, 0.9, 0.99, 1.0], abs=1e-6)
    assert line_of([0.0, 1.0, 2.0, math.inf])["kl_quantiles"] == [1.0, 2.0, 2.0, math.inf]


def test_passes_are_added_up() -> None:
    histogram = TokenHistogram()
    for kl in ([0.1, 0.2], [0.3, 0.1]):
        stats = {"kl_before": torch.tensor([kl]), "ratio": torch.ones(1, 2)}
        histogram.add(stats, torch.tensor([[True, True]]))
    line = histogram.line()
    assert line is not None
    assert line["count"] == 4
    assert line["kl_quantiles"][-1] == pytest.approx(0.3)


def test_of_projected_tokens() -> None:
    line = line_of(
        [0.1, 0.2, 0.01, 0.3],
        counted=[True, True, True, False],
        kl_after=[0.05, 0.05, 0.01, 0.05],
        projected=[1.0, 1.0, 0.0, 1.0],
        solver_steps=[3.0, 12.0, 0.0, 7.0],
    )
    assert sum(line["kl_after"]) == 3
    assert line["solver_steps"] == {"3": 1, "12": 1}
    assert list(line["solver_steps"]) == ["3", "12"]
    assert "kl_after" not in line_of([0.1])


def test_without_a_token_there_is_no_line() -> None:
    assert TokenHistogram().line() is None
    assert line_of([0.1, 0.2], counted=[False, False]) is None
