"""The numbers and sentences of a report, against what was written into the folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import report_cases as cases

from troll.lab.report import narrator, run_data
from troll.lab.report.rules import find
from troll.lab.report.run_data import (
    RunData,
    group_size,
    grouped,
    histogram_quantiles,
    kl_spread,
    series,
    smooth,
)
from troll.lab.runs import Run
from troll.lab.runs.formatting import duration, number, percent
from troll.lab.runs.statistics import finite


def read(folder: Path) -> RunData:
    return RunData.read(Run.open(folder))


def edit(folder: Path, name: str, change) -> None:
    path = folder / name
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    cases.lines(path, [row for row in map(change, rows) if row is not None])


def test_what_is_no_number_is_left_out():
    rows = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}, {"step": 3, "loss": float("nan")}, {"step": 4}]
    x, y = series([*rows, {"step": 5, "loss": True}, {"step": 6, "loss": "1"}, {"step": 7, "loss": -2}], "loss")
    assert (x.tolist(), y.tolist()) == ([1, 7], [0.5, -2])
    assert finite(float("inf")) is None


def test_smoothing_is_a_centred_mean_with_fewer_neighbours_at_the_ends():
    assert smooth(np.array([0.0, 3.0, 6.0, 0.0]), 3).tolist() == [1.5, 3.0, 3.0, 3.0]
    assert smooth(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [1.0, 2.0, 4.0, 6.0]  # one back, none ahead
    assert smooth(np.array([4.0]), 8).tolist() == [4.0]


def test_groups_hold_whole_rollouts_and_keep_the_largest():
    assert group_size(100, 200, 4) == 1
    assert group_size(1000, 300, 4) == 4
    assert group_size(1500, 300, 4) == 8
    assert grouped(np.array([1.0, 5.0, 2.0]), 2, np.max).tolist() == [5.0, 2.0]


def test_quantiles_of_a_histogram_are_those_of_its_values_up_to_a_bin():
    values = np.random.default_rng(0).lognormal(-5, 2, 4000)
    counts = np.histogram(values, cases.KL_EDGES)[0].tolist()
    found = histogram_quantiles(counts, cases.KL_EDGES)
    exact = np.quantile(values, [0.5, 0.9, 0.99, 1.0])
    bin_width = cases.KL_EDGES[2] / cases.KL_EDGES[1]
    assert (np.array(found) / exact < bin_width).all()
    assert (exact / np.array(found) < bin_width).all()
    assert histogram_quantiles([7, 0, 0], [0.0, 1e-8, 1e-7, 1e-6]) == (0, 0, 0, 0)


def test_no_token_is_drawn_above_the_largest_that_was_logged(tmp_path):
    run = read(cases.write_run(tmp_path / "run"))
    after, before = kl_spread(run, "after"), kl_spread(run, "before")
    logged = [row["troll/kl_after/max"] for row in run.metrics]
    assert after.values[:, 3].tolist() == logged
    assert (np.diff(after.values) >= 0).all()
    assert after.values.max() <= cases.BOUND < before.values.max()


def test_cards_say_what_was_measured(tmp_path):
    run = read(cases.write_run(tmp_path / "run"))
    cards = {card.label: card for card in narrator.cards(run.history)}
    rewards = [row["reward"] for row in run.metrics if "reward" in row]
    shares = [row["troll/projected_fraction"] for row in run.metrics]
    assert cards["sampled reward"].before == f"{rewards[0]:.3f}"
    assert cards["sampled reward"].value == f"{np.mean(rewards[-3:]):.3f}"
    assert cards["held-out reward"].before == "0.460"
    assert cards["held-out reward"].value == f"{run.evaluations[-1]['eval_reward']:.3f}"
    assert cards["tokens projected"].value == percent(float(np.mean(shares)))
    assert percent(max(shares)) in cards["tokens projected"].note
    assert cards["largest KL after projection"].note == "the bound is 0.05"
    first, second, third = narrator.lede(run.about, run.history)
    assert first.startswith("Held-out reward 0.460 (update 0) → ")
    assert first.endswith(f"{cards['held-out reward'].value} (update 100).")
    assert "of the tokens were projected" in second
    assert third.endswith("after projection 0.05; the bound is 0.05.")


def test_a_broken_bound_is_found_by_a_rule(tmp_path):
    folder = cases.write_run(tmp_path / "run", updates=8)
    edit(folder, "metrics.jsonl", lambda row: row | {"troll/kl_after/max": 0.0501} if row["step"] == 6 else row)
    assert "bound_exceeded" in [x.name for x in find(read(folder).history)]


@pytest.mark.parametrize(
    ("kind", "adapts"), [(None, False), ("sequence limit=2.0", False), ("network target=0.1", True)]
)
def test_a_bound_that_adapts_is_not_drawn_as_one_number(tmp_path, kind, adapts):
    folder = cases.write_run(tmp_path / "run", updates=8)
    about = json.loads((folder / "run.json").read_text())
    about["settings"]["kl_bound_schedule"] = kind
    (folder / "run.json").write_text(json.dumps(about))
    edit(folder, "metrics.jsonl", lambda row: row | {"troll/kl_after/max": 0.0501} if row["step"] == 6 else row)
    run = read(folder)
    assert run.bound == (None if adapts else 0.05)
    notes = " ".join(card.note for card in narrator.cards(run.history))
    assert ("bound_exceeded" in [x.name for x in find(run.history)]) == (not adapts)
    assert ("the bound adapts" in notes) == adapts
    assert any("the bound adapts, starting from" in x for x in narrator.lede(run.about, run.history)) == adapts


@pytest.mark.parametrize(
    ("arm", "reach", "said"),
    [
        ("troll", 1e-4, "No token was projected"),
        ("troll", 60.0, "of the tokens were projected"),
        ("clip", 1.0, "The clip removed the gradient of"),
        ("clip", 1e-6, "No token was clipped"),
        ("none", 1.0, "Nothing constrained the update"),
    ],
)
def test_the_sentence_fits_what_happened(tmp_path, arm, reach, said):
    run = read(cases.write_run(tmp_path / "run", arm, updates=12, reach=reach))
    told = " ".join(narrator.lede(run.about, run.history))
    assert said in told
    others = {"No token was", "tokens were projected", "The clip removed", "Nothing con"}
    assert sum(other in told for other in others) == 1


def test_a_fall_is_shown_with_its_peak(tmp_path):
    folder = cases.write_run(tmp_path / "run", updates=8)
    edit(
        folder,
        "metrics.jsonl",
        lambda row: row | {"eval_reward": 0.9 - row["step"] / 80} if "eval_reward" in row else row,
    )
    run = read(folder)
    assert narrator.lede(run.about, run.history)[0].startswith("Held-out reward 0.900 (update 0) → ")


def test_tokens_that_did_not_converge_are_a_finding(tmp_path):
    folder = cases.write_run(tmp_path / "run", updates=8)
    edit(folder, "metrics.jsonl", lambda row: row | {"troll/unconverged_tokens": 2.0} if row["step"] == 3 else row)
    (finding,) = [x for x in find(read(folder).history) if x.name == "unconverged"]
    assert "stopped early for 2 tokens" in finding.seen


@pytest.mark.parametrize(
    ("x", "text"), [(0.0, "0"), (0.05, "0.05"), (1234.6, "1,235"), (-0.5, "−0.5"), (5e-6, "5e−6"), (1.5e7, "1.5e7")]
)
def test_numbers_read_as_one_writes_them(x, text):
    assert number(x) == text


def test_shares_and_times():
    assert [percent(x) for x in (0, 0.0002, 0.0214, 0.25)] == [
        f"{x}\N{NO-BREAK SPACE}%" for x in ("0.0", "< 0.1", "2.1", "25")
    ]
    assert [duration(s) for s in (4.2, 369, 3599, 7500)] == ["4 s", "6 min", "1 h 00 min", "2 h 05 min"]


def test_what_is_invisible_or_acts_on_other_text_is_spelled_out():
    assert run_data.visible("a\n\tb\r\x00\x1b\x7f") == "a↵\n⇥\tb␍␀␛␡"
    assert run_data.visible("\u202e\u2066\ufeff\u200b\u2028\u00a0\ud800\ue000") == (
        "⟨U+202E⟩⟨U+2066⟩⟨U+FEFF⟩⟨U+200B⟩⟨U+2028⟩⟨U+00A0⟩⟨U+D800⟩⟨U+E000⟩"
    )
    assert run_data.visible("") == "∅"
    assert run_data.visible("naïve Ω 🙂 <b>") == "naïve Ω 🙂 <b>"


def test_the_bound_begins_a_level_of_the_scale():
    assert run_data.colour_level(0.05, 0.05) == 6
    assert run_data.colour_level(np.nextafter(0.05, 0), 0.05) == 5
    assert [run_data.colour_level(x, 0.05) for x in (None, 0.0, 1e-7, 100.0)] == [0, 0, 0, run_data.LEVELS - 1]
    legend = run_data.colour_legend(0.05)
    assert len(legend) == run_data.LEVELS
    assert legend[6] == "0.05"


def test_a_token_tells_its_numbers(tmp_path):
    folder = cases.write_run(tmp_path / "run", updates=4)
    row = {"step": 4, "update": 3, "prompt": "p", "tokens": ["a", "b", "c"], "kl": [0.2, 0.001, None]}
    row |= {"kl_after": [0.05, 0.001], "projected": [True, False, False], "ratio": [1.25, 0.8, 1], "reward": None}
    cases.lines(folder / "samples.jsonl", [row])
    ((step,), scale) = run_data.sample_steps(read(folder), 0.05), 0.05
    (sample,) = step.samples
    assert [token.tip for token in sample.tokens] == [
        "KL 0.2 → 0.05 (projected) · ratio 1.25",
        "KL 0.001 · ratio 0.8",
        "KL unknown · ratio 1",
    ]
    assert [token.projected for token in sample.tokens] == [True, False, False]
    assert [token.level for token in sample.tokens] == [run_data.colour_level(k, scale) for k in (0.2, 0.001, None)]
    assert (sample.reward, sample.advantage, sample.projected, step.update) == ("none", "none", 1, 3)


def test_of_many_completions_some_are_shown_first_and_last_among_them(tmp_path):
    folder = cases.write_run(tmp_path / "run", updates=4)
    row = {"update": 0, "prompt": "p", "tokens": ["x"] * 800, "kl": [0.0] * 800, "ratio": [1.0] * 800}
    cases.lines(folder / "samples.jsonl", [row | {"step": step} for step in range(1, 201)])
    shown = run_data.sample_steps(read(folder), 0.05)
    assert (shown[0].step, shown[-1].step, len(shown)) == (1, 200, run_data.MOST_STEPS)
    assert sum(len(x.tokens) for step in shown for x in step.samples) <= run_data.MOST_TOKENS
    assert all(len(x.tokens) + x.cut == 800 for step in shown for x in step.samples)


@pytest.mark.parametrize(
    ("says", "text"),
    [
        ("TROLL is better", "TROLL is better than clip ±0.2"),
        ("TROLL is worse than clip ±0.2", "TROLL is worse than clip ±0.2"),
        ("inconclusive", "TROLL, KL ≤ 0.05 against clip ±0.2: inconclusive"),
        ("no verdict", "TROLL, KL ≤ 0.05 against clip ±0.2: no verdict"),
    ],
)
def test_a_verdict_names_both_arms(says, text):
    assert narrator.verdict({"a": "troll", "b": "clip", "says": says}, cases.LABELS) == text
    assert narrator.verdicts([{"label": "reward, end", "verdicts": []}], cases.LABELS) == ""
