"""Tables of what the network did, from runs that never were."""

from __future__ import annotations

import json

from studies_cases import STUDIES, network_runs, results


def rollout(**changed):
    return {
        "reward": 0.5,
        **{f"kept mass, {size}": 0.9 for size in (16, 64, 256)},
        **{f"positions with 1 - 1e-5, {size}": 0.25 for size in (16, 64, 256)},
        "projected": 0.02,
        "near the kink": 0.01,
        "token KL mean": 0.1,
        "token KL p99": 0.4,
        "token KL max": 2.0,
        "tokens outside the bound": 0.05,
        "sequence KL(old, new) mean": 1.0,
        **changed,
    }


def run(seed, rollouts, arm="clip", rate=1e-5, task="easy"):
    return {
        "task": task,
        "arm": arm,
        "seed": seed,
        "learning_rate": rate,
        "kl_bound": 0.2,
        "rollouts": rollouts,
    }


def test_what_was_reached_is_a_mean_over_rollouts_then_seeds_and_the_largest_is_the_largest():
    runs = [
        run(0, [rollout(), rollout(**{"token KL mean": 0.3, "token KL max": 5.0, "reward": 0.6})]),
        run(1, [rollout(), rollout(**{"token KL mean": 0.3, "token KL max": 3.0, "reward": 0.6})]),
        run(2, [rollout(), rollout(**{"token KL mean": 0.3, "token KL max": 4.0, "reward": 0.6})]),
    ]
    row = network_runs.reached(runs).rows.splitlines()[2]
    # Student of 5, 3 and 4: 4.303 · 1 / √3.
    assert row.startswith("| easy, clip, 1e-5 | 0.200 ± 0.000 | 0.400 ± 0.000 | 4.00 ± 2.48 |")
    assert row.endswith("| 1.00 ± 0.00 | – | 0.600 ± 0.000 |")


def test_arms_rates_and_tasks_are_told_apart():
    runs = [run(0, [rollout()]), run(0, [rollout()], arm="troll"), run(0, [rollout()], rate=3e-5)]
    rows = network_runs.reached(runs).rows.splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [
        "| easy, troll 0.2, 1e-5",
        "| easy, clip, 1e-5",
        "| easy, clip, 3e-5",
    ]


def test_the_solver_is_asked_where_tokens_were_outside():
    solved = {"steps mean": 3.0, "steps max": 6.0, "mix median": 0.5, "variance median": 0.8, "variance min": 0.1}
    harder = solved | {"steps mean": 5.0, "steps max": 10.0, "variance min": 0.05}
    runs = [run(0, [rollout(), rollout(**solved), rollout(**harder)], arm="troll"), run(0, [rollout()], arm="none")]
    rows = network_runs.solver(runs).rows.splitlines()[2:]
    assert rows == ["| easy, troll 0.2, 1e-5 | 2.0 % | 4.00 (10) | 0.500 | 0.800 | 0.05 | 1.0 % |"]


def test_kept_mass_in_the_first_and_the_last_rollout():
    runs = [run(i, [rollout(**{"kept mass, 64": 0.8}), rollout(**{"kept mass, 64": 0.9 + 0.02 * i})]) for i in (0, 1)]
    rows = network_runs.kept(runs).rows.splitlines()[2:]
    assert rows[0] == "| easy, clip, 1e-5, first rollout | 0.9000 (25.0 %) | 0.8000 (25.0 %) | 0.9000 (25.0 %) |"
    assert rows[1].split(" | ")[2] == "0.9100 (25.0 %)"


def test_without_runs_there_are_no_tables(tmp_path):
    assert network_runs.written(tmp_path) == {}
    (tmp_path / "network.jsonl").write_text(json.dumps(run(0, [rollout()])) + "\n")
    assert set(network_runs.written(tmp_path)) == set(network_runs.TABLES)


def test_the_stored_runs_can_be_read():
    assert results.RESULTS == STUDIES / "results"
    assert {"network-reached", "network-solver", "network-kept"} == set(network_runs.written(results.RESULTS))
