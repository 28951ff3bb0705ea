"""One command: results in, tables and figures out; and ``--check``, which sees whether they still belong together."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from studies_cases import STUDIES, analyse, cell, line, network, write

MOVED = {"kl_before__mean": 0.02, "kl_before__max": 0.5, "sequence_kl_before": 0.2, "kept_mass__old": 0.99}
SOLVED = {"projected_fraction": 0.05, "solver_steps__mean": 3.0, "solver_steps__max": 5.0}


def arms(levels, first=0, **place):
    """TROLL is ahead of the clip by a tenth, a little more by seed."""
    ahead = [level + 0.1 + 0.002 * i for i, level in enumerate(levels)]
    return [
        *network(cell(ahead, first, region="troll", **place), **MOVED, **SOLVED),
        *network(cell(levels, first, region="clip", **place), **MOVED),
    ]


def everything(folder):
    """A result of every study, some with tasks and some without."""
    places = [{"task": task, "rate": rate} for task in ("easy", "hard") for rate in ("1e-05", "4e-05")]
    write(folder, "regions", [x for place in places for x in arms([0.3, 0.4, 0.5], **place)])
    write(folder, "final", [x for place in places for x in arms([0.2, 0.3, 0.4, 0.5], first=10, **place)])
    write(folder, "updates", [x for updates in (1, 8) for x in arms([0.3, 0.4], updates=updates)])
    write(folder, "stories", arms([0.3, 0.4]))
    some(folder)


def some(folder):
    """Results of two studies."""
    changes = [x for i, name in enumerate(("base", "K 16")) for x in cell([0.3 + 0.1 * i, 0.4], change=name)]
    write(folder, "changes", changes)
    write(folder, "gsm8k", arms([0.3, 0.4]))


@pytest.fixture
def run(tmp_path):
    """The command, in a folder of its own."""

    def run(*flags):
        where = ["--results", tmp_path / "results", "--pages", tmp_path / "page.md", "--out", tmp_path / "out"]
        return analyse.main([*map(str, where), *flags])

    return run


def test_bounds_are_compared_with_the_best_fixed_one_of_another_study(tmp_path):
    write(tmp_path, "changes", [*cell([0.1, 0.2], change="base"), *cell([0.5, 0.6], change="bound 1")])
    write(tmp_path, "bounds", [*cell([0.3, 0.4], change="base"), *cell([0.7, 0.9], change="by entropy")])
    found = analyse.made(tmp_path)[0]["bounds-changes"].splitlines()
    assert found[0].endswith("| end, against fixed at 1 | whole run, against fixed at 1 |")
    assert [row.split(" | ")[:2] for row in found[2:5]] == [
        ["| base", "0.350"],
        ["| by entropy", "0.800"],
        ["| fixed at 1", "0.550"],
    ]
    assert "fixed at 1" not in analyse.made(tmp_path)[0]["changes-changes"]


def test_the_rates_of_stories_are_chosen_by_the_whole_run(tmp_path):
    late, soon = [0.0, 0.0, 0.0, 1.0], [0.9, 0.9, 0.9, 0.9]
    write(tmp_path, "stories", [line(late, region="clip", rate="1e-5"), line(soon, region="clip", rate="3e-5")])
    assert "| clip | 3e-5 |" in analyse.made(tmp_path)[0]["stories-best"]


def table_of(text, name):
    return text.split(f"<!-- table: {name} -->")[1].split("<!-- end of table -->")[0].strip()


def test_what_is_stored_is_what_the_results_say(capsys):
    assert analyse.main(["--check"]) == 0, capsys.readouterr().out


def test_from_results_to_tables_and_figures(tmp_path, run, capsys):
    everything(tmp_path / "results")
    assert run("--check") == 1
    assert not (tmp_path / "out").exists()
    assert run() == 0
    assert run("--check") == 0
    found = {path.stem for path in (tmp_path / "out" / "figures").iterdir()}
    assert found == {
        *(f"regions-{name}" for name in ("rates", "curves", "network", "solver")),
        *("updates-updates", "changes-changes"),
        *(f"{study}-{name}" for study in ("gsm8k", "stories") for name in ("curves", "network", "solver")),
    }
    text = (tmp_path / "out" / "tables.md").read_text()
    best = table_of(text, "regions-best")
    assert best.count("evaluated on fresh seeds 10, 11, 12, 13 of `final`") == 1
    assert [x for x in best.splitlines() if x.startswith("**")] == ["**easy**", "**hard**", "**all together**"]
    # Ahead by 0.1, 0.102, 0.104, 0.106; 3.182 · 0.00258 / √4 = 0.004, and a bootstrap that must be narrower.
    assert best.count("| troll | 1e-05 | 0.453 ± 0.210 | 0.453 ± 0.210 | 0.453 ± 0.210 | 0.000 ± 0.000 |") == 2
    assert best.count("+0.103 ± 0.004 (+0.101 to +0.105), **better** |") == 4
    assert "| troll | 0.453 |" in best
    assert "**" not in table_of(text, "changes-changes").replace("**better**", "")
    assert "| troll, 1e-05 | 0.0200 ± 0.0000 |" in table_of(text, "regions-network")
    assert "| clip, 4e-05 |" in table_of(text, "regions-network-rates")
    assert "| troll, 8 |" in table_of(text, "updates-network")
    assert "evaluated on" not in table_of(text, "gsm8k-best")
    assert "regions-best" not in capsys.readouterr().err


def test_a_check_sees_a_changed_result_and_a_changed_file(tmp_path, run, capsys):
    some(tmp_path / "results")
    run()
    results = tmp_path / "results" / "changes.jsonl"
    before = results.read_text()
    lines = [json.loads(text) for text in before.splitlines()]
    lines[0]["rollouts"]["reward"][-1] += 0.2
    write(tmp_path / "results", "changes", lines)
    capsys.readouterr()
    assert run("--check") == 1
    said = capsys.readouterr().out
    assert "tables.md: differs" in said
    assert "changes-changes.svg: differs" in said
    assert "gsm8k" not in said
    results.write_text(before)
    assert run("--check") == 0
    figure = tmp_path / "out" / "figures" / "gsm8k-curves.svg"
    figure.write_bytes(figure.read_bytes().replace(b"clip", b"CLIP", 1))
    assert run("--check") == 1
    run()
    (tmp_path / "out" / "figures" / "of-another-time.svg").write_text("")
    assert run("--check") == 1
    run()
    assert not (tmp_path / "out" / "figures" / "of-another-time.svg").exists()
    assert run("--check") == 0


def test_tables_go_to_their_place_on_the_page(tmp_path, run):
    some(tmp_path / "results")
    page = tmp_path / "page.md"
    places = ["gsm8k-best", "changes-changes", "updates-updates"]
    page.write_text("# Ours\n\n" + "\n".join(f"<!-- table: {x} -->\nold\n<!-- end of table -->\nprose" for x in places))
    assert run() == 0
    text = page.read_text()
    assert text.startswith("# Ours\n\n<!-- table: gsm8k-best -->\n\n| arm | end |")
    assert text.count("prose") == 3
    assert table_of(text, "updates-updates") == "old"  # a study without results leaves its place alone
    assert table_of(text, "changes-changes").startswith("| change | end |")
    rest = (tmp_path / "out" / "tables.md").read_text()
    assert "gsm8k-best" not in rest
    assert "gsm8k-network" in rest
    assert run("--check") == 0
    page.write_text(text.replace("| K 16 | 0.400 ", "| K 16 | 0.500 "))
    assert run("--check") == 1


def test_a_place_for_a_table_that_nobody_makes_is_an_error(tmp_path, run, capsys):
    (tmp_path / "page.md").write_text("<!-- table: regions-bets -->\n<!-- end of table -->")
    assert run() == 1
    said = capsys.readouterr().err
    assert said.startswith("error: no table is called regions-bets; there are ")
    assert "regions-best" in said


def test_a_run_that_has_not_ended_stops_it_all(tmp_path, run, capsys):
    write(tmp_path / "results", "code", [line([0.5], region="troll", status="interrupted")])
    assert run() == 1
    assert capsys.readouterr().err.startswith("error: code/0-troll is interrupted: only a run that finished or failed")
    assert not (tmp_path / "out").exists()


def test_without_results_nothing_is_written(tmp_path, run):
    assert run() == 0
    assert run("--check") == 0
    assert list(tmp_path.iterdir()) == []


def test_another_process_writes_the_same_bytes(tmp_path, run):
    some(tmp_path / "results")
    run()
    where = {"--results": "results", "--pages": "page.md", "--out": "out"}
    flags = [word for flag, name in where.items() for word in (flag, str(tmp_path / name))]
    command = [sys.executable, str(STUDIES / "analyse.py"), "--check", *flags]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}  # another order in every set
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
