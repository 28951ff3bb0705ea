"""What is drawn: read back from the figures themselves."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import report_cases as cases
from matplotlib.patches import PathPatch

from troll.lab.report.figures import COMPARISON_FIGURES, RUN_FIGURES
from troll.lab.report.run_data import ComparisonData, Missing, RunData
from troll.lab.report.style import PALETTE, SMALL, End, inline_svg, label_ends, panels, save, style, tick
from troll.lab.runs import Comparison, Run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunData:
    return RunData.read(Run.open(cases.write_run(tmp_path_factory.mktemp("runs") / "run")))


def bars(ax) -> np.ndarray:
    """Tops of the upright bars."""
    found = [p.get_path().vertices[:, 1].max() for p in ax.patches if isinstance(p, PathPatch)]
    return np.array(found)


def texts(figure) -> list[str]:
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def test_after_projection_no_bar_reaches_above_the_bound(run):
    with style():
        before, after = RUN_FIGURES["kl"].draw(run).axes
    assert bars(before).max() == max(row["troll/kl_before/max"] for row in run.metrics)
    assert bars(after).max() == max(row["troll/kl_after/max"] for row in run.metrics) <= cases.BOUND
    for ax in (before, after):
        (level,) = [line for line in ax.lines if len(set(line.get_ydata())) == 1]
        assert level.get_ydata()[0] == cases.BOUND
        assert ax.get_ylim() == before.get_ylim()


def test_the_lines_of_groups_are_what_was_logged(run):
    few = RunData(run.about, run.metrics[:5], [], run.tokens, [], None)  # too few to be smoothed
    with style():
        figure = RUN_FIGURES["kl_groups"].draw(few)
    names = (("kl_by_sign", ("positive", "negative")), ("kl_by_quarter", "1234"))
    for ax, (stem, keys) in zip(figure.axes, names, strict=True):
        drawn = [line for line in ax.lines if line.get_linewidth() == 2]
        assert len(drawn) == len(keys)
        for line, key in zip(drawn, keys, strict=True):
            np.testing.assert_allclose(line.get_ydata(), [row[f"troll/{stem}/{key}"] for row in few.metrics])
        assert ax.get_ylim() == figure.axes[0].get_ylim()
        assert ax.get_ylim()[0] == 0
    assert sorted(texts(figure)) == ["first", "last", "negative", "positive", "second", "third"]


def test_a_group_that_was_not_logged_has_no_line(run):
    rows = [{"step": 1, "troll/kl_by_sign/positive": 0.5}, {"step": 2, "troll/kl_by_sign/positive": 0.25}]
    with style():
        figure = RUN_FIGURES["kl_groups"].draw(RunData(run.about, rows, [], None, [], None))
    assert texts(figure) == ["positive"]


def test_reward_shows_every_rollout_and_every_evaluation(run):
    with style():
        (ax,) = RUN_FIGURES["reward"].draw(run).axes
    raw, _, held_out = ax.lines
    np.testing.assert_allclose(raw.get_ydata(), [row["reward"] for row in run.metrics if "reward" in row])
    np.testing.assert_allclose(held_out.get_ydata(), [row["eval_reward"] for row in run.evaluations])
    assert held_out.get_xdata()[0] == 0


def test_seconds_add_up(run):
    with style():
        figure = RUN_FIGURES["times"].draw(run)
    shares = dict(re.fullmatch(r"(\w+) (?:< )?(\d+) %", text).groups() for text in texts(figure))
    total = sum(value for row in run.metrics for key, value in row.items() if key.startswith("time/"))
    backward = sum(row["time/backward"] for row in run.metrics)
    assert int(shares["backward"]) == round(100 * backward / total)
    assert abs(sum(map(int, shares.values())) - 100) <= len(shares)


def test_a_time_with_an_unknown_name_counts_as_other(run):
    rows = [{"step": 1, "time/generate": 1.0, "time/save": 3.0}]
    with style():
        figure = RUN_FIGURES["times"].draw(RunData(run.about, rows, [], None, [], None))
    assert set(texts(figure)) == {"generate 25 %", "other 75 %"}


def test_ratio_histograms_are_shares_of_the_right_updates(run):
    with style():
        within, _ = RUN_FIGURES["ratio"].draw(run).axes
    lines = [p for p in within.patches if not p.get_fill()]
    first, last = (np.array(p.get_data().values) for p in lines)
    assert first.max() == 1.0  # the first update on a rollout starts from ratio 1 everywhere
    counts = np.sum([u["log_ratio"] for u in run.tokens.updates if u["update"] == 3], axis=0)
    np.testing.assert_allclose(last[counts > 0], (counts / counts.sum())[counts > 0])


def test_solver_steps_are_those_of_all_updates(run):
    with style():
        figure = RUN_FIGURES["solver_steps"].draw(run)
    counts = [sum(u["solver_steps"].get(str(k), 0) for u in run.tokens.updates) for k in (3, 4, 5)]
    assert texts(figure) == [f"{100 * c / sum(counts):.0f} %" for c in counts]


def test_small_numbers_are_drawn_in_powers_of_ten(run):
    with style():
        (ax,) = RUN_FIGURES["learning_rate"].draw(run).axes
    assert ax.get_title(loc="left").endswith("× 10⁻⁵")
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [1e5 * row["learning_rate"] for row in run.metrics])


@pytest.mark.parametrize(
    ("y", "text"), [(0, "0"), (1e-4, "10⁻⁴"), (-1e-5, "−10⁻⁵"), (1.5e-5, "1.5·10⁻⁵"), (0.05, "0.05")]
)
def test_ticks_are_written_as_one_reads_them(y, text):
    assert tick(y) == text


def test_names_at_the_ends_of_lines_do_not_touch():
    with style():
        _, (ax,) = panels(SMALL, ["x"])
        ax.set_ylim(0, 1)
        label_ends(ax, SMALL, [End(y, f"{i}", "ink") for i, y in enumerate((0.99, 0.5, 0.985, 0.98, 0.5))])
    places = {text.get_text(): text.get_position()[1] * ax.bbox.height * 72 / ax.figure.dpi for text in ax.texts}
    gaps = np.diff(sorted(places.values()))
    assert gaps.min() >= 1.2 * SMALL.font - 1e-6
    assert places["0"] > places["2"] > places["3"] > places["1"]
    assert max(places.values()) <= ax.bbox.height * 72 / ax.figure.dpi + 1e-6


def test_a_label_stands_where_its_line_ends_on_axes_that_scale_by_themselves() -> None:
    with style():
        _, (ax,) = panels(SMALL, ["x"], labels=4)
        ax.plot([0, 1], [100.0, 200.0])
        label_ends(ax, SMALL, [End(120.0, "low", "ink"), End(200.0, "high", "ink")])
        places = {text.get_text(): text.get_position()[1] for text in ax.texts}
        low, high = ax.get_ylim()
    assert places["low"] == pytest.approx((120 - low) / (high - low))
    assert places["high"] == pytest.approx((200 - low) / (high - low))


def test_the_page_gets_variables_for_colours_and_ids_of_its_own(run):
    made = [inline_svg(lambda e=entry: e.draw(run, e.size), name, entry.title) for name, entry in RUN_FIGURES.items()]
    ids = [i for svg in made for i in re.findall(r' id="([^"]+)"', svg)]
    used = {i for svg in made for i in re.findall(r'(?:href="#|url\(#)([^")]+)', svg)}
    assert ids
    assert len(ids) == len(set(ids))
    assert used == set(ids)
    for svg in made:
        ET.fromstring(svg)
        assert "<text" in svg
        assert not set(re.findall(r"#[0-9a-f]{6}\b", svg)) - {"#ffffff"}
        assert set(re.findall(r"var\(--([\w-]+)\)", svg)) <= set(PALETTE)


def test_paper_figures_have_colours_and_no_date(run):
    with style():
        figure = RUN_FIGURES["kl"].draw(run)
    svg = save(figure, "svg", "kl").decode()
    assert PALETTE["troll"][0] in svg
    assert "var(--" not in svg
    assert "dc:date" not in svg
    for kind in ("svg", "png", "pdf"):
        assert save(figure, kind, "kl") == save(figure, kind, "kl")


def test_every_colour_of_the_palette_is_told_apart():
    for shade in (0, 1):
        colours = [pair[shade] for pair in PALETTE.values()]
        assert len(set(colours)) == len(colours)


def test_what_cannot_be_drawn_says_why(run):
    empty = RunData(run.about, [], [], None, [], None)
    for name, entry in RUN_FIGURES.items():
        with pytest.raises(Missing) as why:
            entry.draw(empty)
        assert str(why.value).endswith("."), name


def test_a_comparison_draws_the_mean_over_seeds_and_their_range(tmp_path):
    data = ComparisonData.read(Comparison.open(cases.write_comparison(tmp_path / "c", ("troll", "clip"), updates=8)))
    with style():
        (ax,) = COMPARISON_FIGURES["held_out"].draw(data).axes
    curves = np.array([[row["eval_reward"] for row in run.evaluations] for run in data.arms[0].runs])
    mean = ax.lines[3]  # after three seeds
    np.testing.assert_allclose(mean.get_ydata(), curves.mean(0))
    for line, curve in zip(ax.lines[:3], curves, strict=True):
        np.testing.assert_allclose(line.get_ydata(), curve)
    assert texts(ax.figure) == ["clip", "TROLL"]
    with style():
        (ax,) = COMPARISON_FIGURES["largest_kl"].draw(data).axes
    largest = [
        [max(r["troll/kl_after/max"] for r in run.metrics[i : i + 4]) for i in (0, 4)] for run in data.arms[0].runs
    ]
    np.testing.assert_allclose(ax.lines[3].get_ydata(), np.mean(largest, axis=0))


def test_a_comparison_draws_every_interval(tmp_path):
    folder = cases.write_comparison(tmp_path / "c", ("troll", "clip"), updates=4)
    data = ComparisonData.read(Comparison.open(folder))
    with style():
        figure = COMPARISON_FIGURES["intervals"].draw(data)
    measures = json.loads((folder / "comparison.json").read_text())["measures"]
    assert [ax.get_title(loc="left") for ax in figure.axes] == [m["label"] for m in measures]
    for ax, measure in zip(figure.axes, measures, strict=True):
        for row, lines in zip(measure["table"], np.array(ax.lines).reshape(-1, 3), strict=True):
            interval, seeds, mean = (line.get_xdata() for line in lines)
            assert list(interval) == [row["low"], row["high"]]
            assert list(seeds) == row["values"]
            assert list(mean) == [row["mean"]]
