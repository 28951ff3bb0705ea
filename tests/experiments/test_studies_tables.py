"""Every table of a tiny study, to the letter."""

from __future__ import annotations

import pytest
from studies_cases import cell, flat, line, network, scores, tables

SWEEP = [
    *cell([0.50, 0.52, 0.54], region="troll", rate="1e-05"),
    *cell([0.60, 0.62, 0.64], region="troll", rate="4e-05"),
    *cell([0.60, 0.60, 0.60], region="clip", rate="1e-05"),
    *cell([0.10, 0.20], region="clip", rate="4e-05"),
]


def test_a_sweep():
    # Student: 4.303 · 0.02 / √3 = 0.050; none of two. 90 % of 0.62 is 0.558, of 0.6 it is 0.54.
    assert tables.sweep_table(SWEEP, "region", "rate").rows.splitlines() == [
        "| arm \\ learning rate | 1e-05 | 4e-05 | ≥ 90 % of the best | ≥ 90 % of this arm's best |",
        "| --- | --- | --- | --- | --- |",
        "| troll | 0.520 ± 0.050 | **0.620 ± 0.050** | 1 (×1) | 1 (×1) |",
        "| clip | **0.600 ± 0.000** | 0.150 (n = 2) | 1 (×1) | 1 (×1) |",
    ]
    assert "± Student's 95 % confidence interval, 3 seeds." in tables.sweep_table(SWEEP, "region", "rate").note
    holes = [x for x in SWEEP if x["place"] != {"seed": "0", "region": "clip", "rate": "4e-05"}]
    assert "0.200 (n = 1)" in tables.sweep_table(holes, "region", "rate").rows
    holes = [x for x in holes if not (x["place"]["region"] == "clip" and x["place"]["rate"] == "4e-05")]
    assert "| clip | **0.600 ± 0.000** | – | 1 (×1) | 1 (×1) |" in tables.sweep_table(holes, "region", "rate").rows


def test_best_against_best_on_the_same_seeds():
    found = tables.best_table(scores.finalists(SWEEP, "region", "rate"), "clip", "rate")
    # Differences 0, 0.02, 0.04: bootstrap of three seeds from the smallest to the largest.
    assert found.rows.splitlines() == [
        "| arm | learning rate | end | whole run | held-out | largest drop "
        "| end, against clip | whole run, against clip |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| troll | 4e-05 | 0.620 ± 0.050 | 0.620 ± 0.050 | 0.620 ± 0.050 | 0.000 ± 0.000 "
        "| +0.020 ± 0.050 (+0.000 to +0.040), inconclusive | +0.020 ± 0.050 (+0.000 to +0.040), inconclusive |",
        "| clip | 1e-05 | 0.600 ± 0.000 | 0.600 ± 0.000 | 0.600 ± 0.000 | 0.000 ± 0.000 | – | – |",
    ]
    assert (
        "The best learning rate of each arm by `end` on seeds 0, 1, 2; evaluated on the same seeds, which" in found.note
    )


def test_best_against_best_on_fresh_seeds():
    fresh = [
        *cell([0.70, 0.71, 0.72], first=7, region="troll", rate="4e-05"),
        *cell([0.60, 0.60, 0.60], first=7, region="clip", rate="1e-05"),
        *cell([0.99, 0.99, 0.99], first=7, region="clip", rate="4e-05"),
    ]
    found = tables.best_table(scores.finalists(SWEEP, "region", "rate", fresh), "clip", "rate", "final")
    assert "| +0.110 ± 0.025 (+0.100 to +0.120), **better** |" in found.rows
    assert "| clip | 1e-05 | 0.600 ± 0.000 |" in found.rows
    assert "by `end` on seeds 0, 1, 2; evaluated on fresh seeds 7, 8, 9 of `final`." in found.note
    none = tables.best_table(scores.finalists(SWEEP, "region", "rate", fresh[3:]), "clip", "rate", "final")
    assert "| troll | 4e-05 | – | – | – | – | – | – |" in none.rows


FAST_OR_HIGH = [
    *(line([0.9, 0.9, 0.9, 0.5], seed=i, region="troll", rate="1e-05") for i in range(3)),  # 0.8 over the run
    *(line([0.0, 0.4, 0.6, 0.6], seed=i, region="troll", rate="4e-05") for i in range(3)),  # 0.4
]


def test_rates_can_be_chosen_by_the_whole_run():
    ends = tables.sweep_table(FAST_OR_HIGH, "region", "rate")
    assert "| troll | 0.500 ± 0.000 | **0.600 ± 0.000** | 1 (×1) | 1 (×1) |" in ends.rows
    whole = tables.sweep_table(FAST_OR_HIGH, "region", "rate", scores.mean)
    assert "| troll | **0.800 ± 0.000** | 0.400 ± 0.000 | 1 (×1) | 1 (×1) |" in whole.rows
    assert whole.note.startswith("Mean sampled reward over the whole run ± ")
    found = scores.finalists(FAST_OR_HIGH, "region", "rate", measure=scores.mean)
    assert found["troll"].value == "1e-05"
    assert "by the whole run on seeds 0, 1, 2" in tables.best_table(found, "clip", "rate", "", scores.mean).note


def test_ours_against_every_other():
    arms = {"troll": [0.50, 0.51, 0.52], "troll-1": [0.3, 0.4, 0.53], "clip": [0.40, 0.40, 0.40], "none": [0.7, 0.7]}
    lines = [x for arm, levels in arms.items() for x in cell(levels, region=arm)]
    found = tables.pairs_table(scores.finalists(lines, "region", None))
    # troll − clip: 0.10, 0.11, 0.12, 4.303 · 0.01 / √3 = 0.025; troll-1 − clip: −0.1, 0, 0.13; none has two seeds;
    # troll-1 − troll: −0.20, −0.11, 0.01, 4.303 · 0.1054 / √3 = 0.262.
    assert found.rows.splitlines() == [
        "| whole run, row − column | clip | none | troll |",
        "| --- | --- | --- | --- |",
        "| troll | **+0.110 ± 0.025** | −0.195 ± 0.064 | – |",
        "| troll-1 | +0.010 ± 0.287 | −0.350 ± 0.635 | −0.100 ± 0.262 |",
    ]
    assert tables.pairs_table(scores.finalists(cell([0.5], region="troll"), "region", None)) is None


def test_every_arm_on_every_task():
    sums = [*cell([0.5, 0.6, 0.7], region="troll", rate="1e-5"), *cell([0.2], region="troll", rate="3e-5")]
    words = [*cell([0.3], region="clip", rate="1e-6"), *cell([0.4], region="troll", rate="1e-6")]
    tasks = {"sums": scores.finalists(sums, "region", "rate"), "words": scores.finalists(words, "region", "rate")}
    # 0.6 ± 4.303 · 0.1 / √3
    assert tables.overview_table(tasks).rows.splitlines() == [
        "| arm | sums, 3 seeds | words, one seed |",
        "| --- | --- | --- |",
        "| troll | 0.600 ± 0.248 at 1e-5 | 0.400 at 1e-6 |",
        "| clip | – | 0.300 at 1e-6 |",
    ]


def test_a_difference_that_is_not_paired_is_marked():
    lines = [*cell([0.50, 0.51, 0.52], region="troll"), *cell([0.40, 0.41, 0.40], region="clip")]
    for i, each in enumerate(lines):
        each["rollouts"]["completions/mean_length"] = [float(i)] * 4
    found = scores.finalists(lines, "region", None)
    row = tables.best_table(found, "clip", None).rows.splitlines()[2]
    # Variances 1e-4 and 3.33e-5, a third of each: √4.444e-5 = 0.006667; 3.2 degrees of freedom, 3.182.
    assert row.endswith("| +0.107 ± 0.021° (+0.097 to +0.117), **better** |")
    together = [{"troll": lines[:3], "clip": lines[3:]}] * 2
    assert tables.overall_table(together, "clip").rows.splitlines()[2].startswith("| troll | 0.510 |")
    assert "| +0.107 |" in tables.overall_table(together, "clip").rows


def test_the_whole_run_is_compared_on_its_own():
    late = [line([0.0, 0.0, 0.04 * i, 0.8 + 0.02 * i], seed=i, region="troll") for i in range(3)]
    soon = [line([0.8, 0.8, 0.8, 0.8], seed=i, region="clip") for i in range(3)]
    found = tables.best_table(scores.finalists([*late, *soon], "region", None), "clip", None)
    # End 0, 0.02, 0.04 above; the whole run 0.6, 0.585, 0.57 below: 4.303 · 0.015 / √3 = 0.037.
    assert "| +0.020 ± 0.050 (+0.000 to +0.040), inconclusive |" in found.rows
    assert "| −0.585 ± 0.037 (−0.600 to −0.570), worse |" in found.rows


def test_a_table_without_a_sweep_has_no_column_for_it():
    lines = [*cell([0.1, 0.2], region="troll"), *cell([0.3, 0.3], region="clip")]
    found = tables.best_table(scores.finalists(lines, "region", None), "clip", None)
    # 12.706 · 0.0707 / √2 = 0.635
    assert found.rows.splitlines()[2].endswith("| −0.150 ± 0.635 (−0.200 to −0.100), inconclusive |")
    assert "rate" not in found.rows
    assert "chosen" not in found.note


def test_failed_runs_are_counted_and_said():
    lines = [*cell([0.5, 0.5], region="clip"), line([0.5] * 2, planned=4, status="failed", seed=2, region="clip")]
    text = tables.score(lines, scores.end, 3)
    assert text == "0.333 ± 0.717 (1 failed)"  # (0.5 + 0.5 + 0) / 3, 4.303 · 0.2887 / √3
    assert tables.score(lines, scores.eval_reward, 3) == "0.500 (n = 2, 1 failed)"
    assert tables.score([], scores.end, 3) == "–"
    assert tables.score(lines[2:], scores.eval_reward, 1) == "– (1 failed)"


def test_the_table_of_the_readme():
    arms = {"troll-0.2": [0.5, 0.6, 0.7], "clip": [0.4, 0.5, 0.6], "none": [0.1, 0.2, 0.3]}
    best = scores.finalists([x for arm, y in arms.items() for x in cell(y, region=arm)], "region", None)
    high = {"troll-0.2": [line([0.0, 0.0, 0.0, 0.8])], "clip": cell([0.3, 0.4])}
    found = tables.readme_table({"sums": best}, {"sums": high}, "1e-4")
    # 4.303 · 0.1 / √3 = 0.248; at the high rate the last quarter of the rollouts, at the best the whole run.
    assert found.rows.splitlines()[2:] == [
        "| sums, best learning rate | 0.600 ± 0.248 | 0.500 ± 0.248 | – | – | 0.200 ± 0.248 |",
        "| sums, learning rate 1e-4 | 0.800 | 0.350 | – | – | – |",
    ]
    assert "3 fresh seeds. Learning rate 1e-4:" in found.note


def test_differences_have_a_corrected_p():
    arms = {"troll-0.2": [0.50, 0.51, 0.52], "clip": [0.40, 0.40, 0.40], "none": [0.50, 0.61, 0.42]}
    tasks = {"sums": scores.finalists([x for arm, y in arms.items() for x in cell(y, region=arm)], "region", None)}
    found = tables.differences_table(tasks, ("troll-0.2",), ("clip", "none"))
    # 0.11 / (0.01 / √3) = 19.05, p = 0.00274, twice that; 0, −0.1, 0.1: p = 1.
    assert found.rows.splitlines()[2:] == [
        "| sums | troll-0.2 − clip | +0.110 ± 0.025 | **0.005** | +0.110 ± 0.025 | **0.005** |",
        "| sums | troll-0.2 − none | +0.000 ± 0.248 | 1.00 | +0.000 ± 0.248 | 1.00 |",
    ]
    assert "Holm-corrected over the 2 comparisons" in found.note


def test_an_axis_is_bold_where_it_is_better_than_the_base():
    lines = [
        *cell([0.50, 0.51, 0.52], region="troll", updates=8),
        *cell([0.40, 0.40, 0.40], region="clip", updates=8),
        *cell([0.10, 0.11, 0.12], region="troll", updates=32),
        *cell([0.40, 0.40, 0.40], region="clip", updates=32),
        *cell([0.40, 0.40, 0.40], region="clip", updates=1),
        *cell([0.41, 0.50, 0.59], region="none", updates=1),
    ]
    assert tables.axis_table(lines, "updates", "region", "clip").rows.splitlines() == [
        "| updates per rollout \\ arm | troll | clip | none |",
        "| --- | --- | --- | --- |",
        "| 1 | – | 0.400 ± 0.000 | 0.500 ± 0.224 |",  # ahead, and not for sure
        "| 8 | **0.510 ± 0.025** | 0.400 ± 0.000 | – |",
        "| 32 | 0.110 ± 0.025 | 0.400 ± 0.000 | – |",
    ]


def test_changes_are_paired_with_the_base_by_seed():
    lines = [
        *cell([0.50, 0.60, 0.70], change="base"),
        *cell([0.71, 0.62, 0.50], change="K 16")[::-1],
        *cell([0.30, 0.41, 0.52], change="K 256"),
        *cell([0.55], first=1, change="tail floor"),
    ]
    found = tables.changes_table(lines, "change", "base").rows.splitlines()
    assert found[0] == "| change | end | whole run | end, against base | whole run, against base |"
    k16, k256 = "+0.010 ± 0.510 (−0.200 to +0.210), inconclusive", "−0.190 ± 0.025 (−0.200 to −0.180), worse"
    one = "−0.050 (–), insufficient data"
    assert found[2:] == [
        "| base | 0.600 ± 0.248 | 0.600 ± 0.248 | – | – |",
        f"| K 16 | 0.610 ± 0.262 | 0.610 ± 0.262 | {k16} | {k16} |",
        f"| K 256 | 0.410 ± 0.273 | 0.410 ± 0.273 | {k256} | {k256} |",
        f"| tail floor | 0.550 (n = 1) | 0.550 (n = 1) | {one} | {one} |",
    ]


def test_changes_are_compared_at_the_end_and_over_the_whole_run():
    soon = [line([0.8, 0.8, 0.8, 0.8], seed=i, change="base") for i in range(3)]
    late = [line([0.0, 0.0, 0.04 * i, 0.8 + 0.02 * i], seed=i, change="slow") for i in range(3)]
    row = tables.changes_table([*soon, *late], "change", "base").rows.splitlines()[-1]
    assert row.endswith(
        "| +0.020 ± 0.050 (+0.000 to +0.040), inconclusive | −0.585 ± 0.037 (−0.600 to −0.570), worse |"
    )


def test_all_tasks_together():
    easy = {"troll": cell([0.9, 0.9]), "clip": cell([0.8, 0.8]), "none": []}
    hard = {"troll": cell([0.3, 0.3]), "clip": cell([0.3, 0.3]), "none": cell([0.1, 0.1])}
    assert tables.overall_table([easy, hard], "clip").rows.splitlines()[2:] == [
        "| troll | 0.600 | 0.600 to 0.600 | +0.050 | +0.050 to +0.050 |",
        "| clip | 0.550 | 0.550 to 0.550 | – | – |",
    ]


def test_what_the_network_did():
    moved = {"kl_before__mean": 0.0206, "kl_before__max": 24.67, "sequence_kl_before": 0.3, "sequence_kl_after": 0.1}
    solved = {
        "solver_steps__mean": 3.46,
        "solver_steps__max": 6.0,
        "kept_mass__old": 0.99314,
        "support_size__old": 38.6,
    }
    troll = network(cell([0.5, 0.5, 0.5]), projected_fraction=0.0779, entropy=0.5, **moved, **solved)
    troll[0]["rollouts"]["kl_before/max"][1] = 25.67
    clip = network(cell([0.5, 0.5]), **{"clip_ratio__region_mean": 0.021})
    found = tables.network_table({"troll": troll, "clip": clip, "gspo": []}).rows.splitlines()
    assert found[0] == (
        "|  | token KL | largest token KL | sequence KL, network | sequence KL, projected "
        "| tokens projected or clipped | solver steps | kept mass | tokens kept | entropy, end |"
    )
    assert found[2:] == [
        "| troll | 0.0206 ± 0.0000 | 25.0 ± 1.4 | 0.300 ± 0.000 | 0.100 ± 0.000 | 7.79 % "
        "| 3.5 (6) | 0.9931 | 38.6 | 0.500 ± 0.000 |",
        "| clip | – | – | – | – | 2.1 % | – | – | – | – |",
    ]


def test_two_seeds_have_no_interval_and_it_is_said():
    found = tables.sweep_table(cell([0.5, 0.6], region="troll", rate="1e-05"), "region", "rate")
    assert "| **0.550** |" in found.rows
    assert "2 seeds, too few for an interval." in found.note


def test_one_seed_has_no_interval_and_it_is_said():
    found = tables.sweep_table([flat(0.5, region="troll", rate="1e-05")], "region", "rate")
    assert "| **0.500** |" in found.rows
    assert "one seed, too few for an interval." in found.note


def test_notes_stand_once_where_they_are_the_same():
    one, other = tables.Table("| a |", "Said."), tables.Table("| b |", "Said differently.")
    assert tables.joined({"": one}) == "| a |\n\nSaid."
    assert tables.joined({"x": one, "y": one}) == "**x**\n\n| a |\n\n**y**\n\n| a |\n\nSaid."
    assert tables.joined({"x": one, "y": other}) == "**x**\n\n| a |\n\nSaid.\n\n**y**\n\n| b |\n\nSaid differently."


@pytest.mark.parametrize(
    ("mean", "text"), [(0.0206, "0.0206"), (24.67, "24.7"), (1234.5, "1234"), (0.0, "0.000"), (-0.5, "−0.500")]
)
def test_three_digits(mean, text):
    assert tables.significant(scores.Interval(mean, None, None)) == text
