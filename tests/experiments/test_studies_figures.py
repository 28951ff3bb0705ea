"""What is drawn: read back from the figures themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex
from studies_cases import cell, figures, line, network

from troll.lab.report.run_data import Missing
from troll.lab.report.style import PALETTE, save, style


@pytest.fixture(autouse=True)
def _styled():
    with style():
        yield


def drawn(ax, name):
    """The thick line of an arm: x and y."""
    (found,) = [x for x in ax.lines if x.get_linewidth() == 2 and to_hex(x.get_color()) == PALETTE[name][0]]
    return list(found.get_xdata()), list(found.get_ydata())


def texts(ax):
    return [text.get_text() for text in ax.texts]


RATES = [
    *cell([0.50, 0.52, 0.54], region="troll", rate="1e-05"),
    *cell([0.60, 0.62, 0.64], region="troll", rate="4e-05"),
    *cell([0.30, 0.40, 0.50], region="clip", rate="4e-05"),
]


def test_scores_over_rates_are_means_with_intervals_and_every_seed():
    (ax,) = figures.score_over_rates({"": RATES}, "rate", "region").axes
    x, y = drawn(ax, "troll")
    assert y == pytest.approx([0.52, 0.62])
    assert np.diff(x) == pytest.approx([1.0])
    x, y = drawn(ax, "clip")
    assert (len(x), y) == (1, [pytest.approx(0.4)])
    whiskers = [tuple(w.get_ydata()) for w in ax.lines if w.get_linewidth() == 1.1]
    half = 4.303 * 0.1 / math.sqrt(3)
    assert whiskers[2] == pytest.approx((0.4 - half, 0.4 + half))
    dots = sorted(y for w in ax.lines if w.get_linestyle() == "None" for y in w.get_ydata())
    assert dots == pytest.approx([0.3, 0.4, 0.5, 0.5, 0.52, 0.54, 0.6, 0.62, 0.64])
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1e-05", "4e-05"]
    assert texts(ax) == ["clip", "troll"]
    assert ax.get_xlabel() == "learning rate"


def test_an_axis_of_rewards_stays_between_0_and_1():
    wide = [*cell([0.1, 0.5, 0.9], region="troll", updates=1), *cell([0.5] * 3, region="troll", updates=16)]
    (ax,) = figures.over_updates({"": wide}, "updates", "region").axes  # Student's interval is 0.5 ± 1.0
    assert ax.get_ylim() == (-0.02, 1.02)
    assert ax.get_xlabel() == "updates per rollout"
    points = [*cell([1.0, 9.0], region="troll", updates=1)]
    (ax,) = figures.over_updates({"": points}, "updates", "region").axes
    assert ax.get_ylim()[1] > 9


def test_a_panel_per_task():
    tasks = {"easy": RATES, "hard": RATES, "harder": RATES}
    axes = figures.score_over_rates(tasks, "rate", "region").axes
    assert [ax.get_title(loc="left") for ax in axes] == [f"{x}: reward at the end" for x in tasks]


def test_curves_are_means_of_three_rollouts_and_go_to_0_with_a_failed_run():
    whole = line([0.0, 0.3, 0.6, 0.9, 0.9, 0.9], seed=0)
    failed = line([0.0, 0.3, 0.6], planned=6, status="failed", seed=1)
    (ax,) = figures.curves({"": {"troll": [whole, failed], "clip": []}}).axes
    x, y = drawn(ax, "troll")
    assert x == [2, 3, 4, 5]
    assert y == pytest.approx([0.3, (0.6 + 0.3) / 2, (0.8 + 0.2) / 2, 0.45])
    assert texts(ax) == ["troll"]
    assert not ax.collections  # no interval of two
    (ax,) = figures.curves({"": {"troll": [whole, failed, line([0.0, 0.3, 0.6, 0.45, 0.45, 0.45], seed=2)]}}).axes
    (band,) = ax.collections
    highest = 0.45 + 4.3027 * 0.45 / math.sqrt(3)  # at 5: 0.9, 0 and 0.45
    assert band.get_paths()[0].vertices[:, 1].max() == pytest.approx(highest, rel=1e-4)


def test_changes_are_differences_with_both_intervals():
    lines = [
        *cell([0.50, 0.60, 0.70], change="base"),
        *cell([0.30, 0.41, 0.52], change="K 16"),
        *cell([0.61, 0.70, 0.79], change="K 256"),
        *cell([0.50, 0.70, 0.90], change="other"),
    ]
    ax, _ = figures.changes({"": lines}, "change", "base").axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["K 16", "K 256", "other"]
    thin, thick = ([w for w in ax.lines if w.get_linewidth() == width] for width in (1.2, 3.2))
    half = 4.303 * 0.01 / math.sqrt(3)
    assert list(thin[0].get_xdata()) == pytest.approx([-0.19 - half, -0.19 + half])
    assert list(thick[0].get_xdata()) == pytest.approx([-0.2, -0.18])
    assert [w.get_ydata()[0] for w in thick] == [0, -1, -2]
    assert [to_hex(w.get_color()) for w in thick] == [PALETTE[x][0] for x in ("clip", "troll", "none")]
    assert any(list(w.get_xdata()) == [0, 0] for w in ax.lines)


def test_changes_are_drawn_at_the_end_and_over_the_whole_run():
    lines = [*cell([0.8, 0.8, 0.8], change="base")]
    lines += [line([0.0, 0.0, 0.0, 0.8 + 0.1 * i], seed=i, change="slow") for i in range(3)]
    axes = figures.changes({"": lines}, "change", "base").axes
    titles = ["reward at the end, against base", "reward over the whole run, against base"]
    assert [ax.get_title(loc="left") for ax in axes] == titles
    means = [w.get_xdata()[0] for ax in axes for w in ax.lines if w.get_markersize() == 7]
    assert means == pytest.approx([0.1, 0.9 / 4 - 0.8])


def test_variants_have_the_dashes_of_what_they_vary():
    arms = ("troll", "troll-1", "clip", "clip-0.4", "gspo")
    (ax,) = figures.curves({"": {arm: cell([0.5]) for arm in arms}}).axes
    troll, troll_1, clip, clip_04, gspo = (w._dash_pattern for w in ax.lines)
    assert troll == troll_1 != clip == clip_04 != gspo


def test_the_network_is_drawn_with_the_bound():
    troll = network(cell([0.5, 0.5]), kl_before__max=0.4, sequence_kl_before=2.0)
    clip = network(cell([0.5, 0.5]), kl_before__max=4.0, sequence_kl_before=0.0)
    troll[0]["rollouts"]["kl_before/max"] = [0.2, None, 0.2, 0.2]
    for run in troll:
        run["flags"] |= {"trust_region": "troll", "kl_bound": 0.1}
    for run in clip:
        run["flags"] |= {"trust_region": "clip"}
    token, sequence = figures.network({"": {"troll": troll, "clip": clip}}).axes
    assert drawn(token, "troll")[1] == pytest.approx([0.3, 0.4, 0.3, 0.3])
    assert drawn(token, "clip")[1] == [4.0] * 4
    assert token.get_yscale() == sequence.get_yscale() == "log"
    assert any(list(w.get_ydata()) == [0.1, 0.1] for w in token.lines)
    assert "bound 0.1" in texts(token)
    assert not any(text.startswith("bound") for text in texts(sequence))
    assert texts(sequence) == ["troll"]  # zeros have no place on a logarithmic axis
    assert token.get_ylim()[0] < 0.1 < 4.0 < token.get_ylim()[1]


def test_a_run_that_was_told_no_bound_has_the_default():
    (run,) = network(cell([0.5]), kl_before__max=0.4, sequence_kl_before=2.0)
    run["flags"]["trust_region"] = "troll"
    token, _ = figures.network({"": {"troll": [run]}}).axes
    assert "bound 0.05" in texts(token)
    token, _ = figures.network({"": {"troll": [run | {"settings": {"kl_bound": 0.2}}]}}).axes
    assert "bound 0.2" in texts(token)


def test_the_solver_and_the_kept_mass():
    runs = network(cell([0.5, 0.5]), solver_steps__mean=3.5, solver_steps__max=6.0, kept_mass__old=0.99)
    runs[1] = runs[1] | {"status": "failed", "rollouts": {k: v[:2] for k, v in runs[1]["rollouts"].items()}}
    runs[1]["rollouts"]["solver_steps/mean"] = [4.5, 4.5]
    steps, mass = figures.solver({"": {"troll": runs, "clip": cell([0.5])}}).axes
    assert drawn(steps, "troll")[1] == [4.0, 4.0, 3.5, 3.5]
    (largest,) = [w for w in steps.lines if w.get_linewidth() == 0.9]
    assert list(largest.get_ydata()) == [6.0] * 4
    assert drawn(mass, "troll")[1] == [0.99] * 4
    with pytest.raises(Missing, match="No run logged solver_steps/mean"):
        figures.solver({"": {"clip": cell([0.5])}})


def test_a_run_that_has_not_ended_is_not_drawn():
    with pytest.raises(ValueError, match="is interrupted"):
        figures.network({"": {"troll": [line([0.5], status="interrupted")]}})


def test_arms_have_colours_of_their_own():
    arms = ["troll", "troll-0.2", "clip", "clip-higher", "gspo", "none", "other"]
    names = figures.colours(arms)
    assert len({PALETTE[name][0] for name in names.values()}) == len(arms)
    assert names["troll"] == "troll"


def test_the_same_results_give_the_same_bytes():
    first, second = (save(figures.score_over_rates({"": RATES}, "rate", "region"), "svg", "x") for _ in range(2))
    assert first == second
    assert b"<dc:date>" not in first
    other = [*RATES[:-1], RATES[-1] | {"rollouts": RATES[1]["rollouts"]}]
    assert save(figures.score_over_rates({"": other}, "rate", "region"), "svg", "x") != first
