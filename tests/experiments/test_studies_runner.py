"""From the file of a study to its runs, and from a run to its line: files by hand, runs with the real command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import yaml
from studies_cases import STUDIES, analyse, results, scores, study

from troll.lab.runs.folder import FORMAT


def read(folder: Path, **text):
    """A study with these parts."""
    path = folder / "made-up.yaml"
    path.write_text(yaml.safe_dump({"question": "Is it?", "shared": {}, **text}, sort_keys=False))
    return study.Study.read(path)


def test_the_runs_are_the_product_of_the_axes_with_seeds_slowest(tmp_path):
    found = read(
        tmp_path,
        shared={"max_steps": 8, "measure_kl": False},
        axes={
            "seed": [1, 0],
            "region": {"troll": {"trust_region": "troll"}, "none": None},
            "learning_rate": [1e-05, 4e-5],
        },
    )
    assert (found.name, found.question) == ("made-up", "Is it?")
    assert [case.name for case in found.cases] == [
        *("0-troll-1e-05", "0-troll-4e-05", "0-none-1e-05", "0-none-4e-05"),
        *("1-troll-1e-05", "1-troll-4e-05", "1-none-1e-05", "1-none-4e-05"),
    ]
    first, third = found.cases[0], found.cases[2]
    assert first.place == {"seed": "0", "region": "troll", "learning_rate": "1e-05"}
    told = {"max_steps": 8, "measure_kl": False, "seed": 0, "trust_region": "troll", "learning_rate": 1e-05}
    assert first.flags == {**study.ALWAYS, **told}
    assert "trust_region" not in third.flags


def test_an_axis_goes_before_what_is_shared(tmp_path):
    found = read(tmp_path, shared={"kl_bound": 0.05, "seed": 3}, axes={"bound": {"tight": {"kl_bound": 0.01}}})
    assert found.cases[0].flags["kl_bound"] == 0.01
    assert found.cases[0].flags["seed"] == 3


def test_two_axes_that_set_one_flag_are_a_mistake(tmp_path):
    axes = {"seed": [0], "bound": {"tight": {"kl_bound": 0.01, "seed": 1}}}
    with pytest.raises(ValueError, match="two axes set seed"):
        read(tmp_path, axes=axes)


def test_two_runs_of_one_name_are_a_mistake(tmp_path):
    with pytest.raises(ValueError, match="two runs of one name, K_16"):
        read(tmp_path, axes={"change": {"K 16": {"max_support": 16}, "K_16": {"max_support": 17}}})


def test_a_part_that_a_study_has_not_is_a_mistake(tmp_path):
    with pytest.raises(ValueError, match="axis; a study has question, shared and axes"):
        read(tmp_path, axes={"seed": [0]}, axis={"seed": [1]})


def test_paths_are_relative_to_the_study_and_names_stay_names(tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "own.py").write_text("")
    axes = {"task": {"own": {"task": "tasks/own.py"}, "gsm8k": {"task": "gsm8k"}}}
    own, other = read(tmp_path, axes=axes).cases
    assert own.flags["task"] == str((tmp_path / "tasks" / "own.py").resolve())
    assert other.flags["task"] == "gsm8k"
    assert [own.name, other.name] == ["own", "gsm8k"]


@pytest.mark.parametrize("path", sorted((STUDIES / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_study_can_be_read_and_its_results_understood(path):
    found = study.Study.read(path)
    assert found.question.strip()
    for case in found.cases:
        assert {"max_steps", "updates_per_generation"} <= case.flags.keys()  # which say how long a run is
        task = str(case.flags.get("task", ""))
        assert not task.endswith(".py") or Path(task).is_file()
    assert len({case.name for case in found.cases}) == len(found.cases)


def test_what_is_kept_of_each_rollout():
    lines = [
        {"step": 1, "reward": 0.123456, "entropy": 1.0, "troll/kl_before/mean": 0.0, "troll/kl_before/max": 0.0},
        {"step": 2, "entropy": 2.0, "troll/kl_before/mean": 0.2, "troll/kl_before/max": 7.0},
        {"step": 3, "entropy": 4.5, "troll/kl_before/mean": 0.1, "troll/kl_before/max": 3.0},
        {"step": 4, "reward": 0.5, "entropy": None, "troll/kl_before/mean": 0.4, "troll/kl_before/max": 2.0},
        {"step": 5, "troll/kl_before/mean": 0.3},
    ]
    assert results.by_rollout(lines) == {
        "step": [1.0, 4.0],
        "reward": [0.1235, 0.5],  # of the first update
        "entropy": [2.5, None],  # the mean
        "kl_before/mean": [0.1, 0.3],  # of the last
        "kl_before/max": [7.0, 2.0],  # the largest
    }


def test_a_result_has_no_path_of_the_machine_it_was_made_on(tmp_path):
    folder = tmp_path / "broken-0"
    folder.mkdir()
    about = {"status": "failed", "error": f"Its batches are in {folder}/skipped/update-000028.", "settings": {}}
    about |= {"task": {"name": "sorting"}, "model": {}, "seconds": 1.0, "machine": {}, "versions": {}, "format": FORMAT}
    (folder / "run.json").write_text(json.dumps(about))
    case = study.Case("some", {"seed": "0"}, {"task": "/elsewhere/sorting.py", "max_steps": 4})
    line = results.line_of(case, folder)
    assert line["error"] == "Its batches are in broken-0/skipped/update-000028."
    assert line["flags"] == {"max_steps": 4}


def test_no_stored_result_has_one():
    found = "".join(path.read_text() for path in results.RESULTS.glob("*.jsonl"))
    assert "H200" in found
    assert not re.findall(r'["\s]/\w+/\S*', found)  # kl_before/mean has a slash too, and something before it


@pytest.mark.parametrize("lines", [[], [{"step": 1, "loss": 0.5}]])
def test_a_run_that_failed_before_its_first_rollout_has_none(lines):
    assert results.by_rollout(lines) == {}


def test_the_share_that_was_clipped_is_kept():
    lines = [{"step": 1, "reward": 0.5, "clip_ratio/region_mean": 0.1}, {"step": 2, "clip_ratio/region_mean": 0.3}]
    run = {"study": "x", "name": "0", "place": {"seed": "0"}, "status": "finished", "held_out": []}
    run |= {"flags": {"max_steps": 2, "updates_per_generation": 2}, "rollouts": results.by_rollout(lines)}
    assert "20 %" in analyse.tables.network_table({"clip": [run]}).rows


def test_a_number_is_kept_with_four_digits():
    assert [results.short(x) for x in (0.123456, 12345.6, 1e-7 / 3, None)] == [0.1235, 12350.0, 3.333e-08, None]


def test_each_run_is_read_once_and_the_last_line_of_it(tmp_path):
    assert results.read(tmp_path, "none") == []
    lines = [{"name": "a", "x": 1}, {"name": "b", "x": 2}, {"name": "a", "x": 3}]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert results.read(tmp_path, "some") == [{"name": "a", "x": 3}, {"name": "b", "x": 2}]


KILLED = '''\
import os, signal

calls = 0

def killed(completions, **columns):
    """Ends the process on its second rollout."""
    global calls
    calls += 1
    if calls == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(text)) for text in completions]
'''
SHARED = {
    **{"task": "arithmetic", "max_steps": 4, "updates_per_generation": 2, "num_generations": 4},
    **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_completion_length": 4},
    **{"eval_size": 4, "eval_steps": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, and a study of three runs: one that ends well, one that cannot begin, one that is killed."""
    path = tmp_path_factory.mktemp("studies")
    tiny_models.save("dense", path / "model")
    (path / "reward.py").write_text(KILLED)
    seeds = {0: {"seed": 0}, 1: {"seed": 1, "trust_regoin": "troll"}}
    seeds[2] = {"seed": 2, "reward": f"{path / 'reward.py'}:killed", "eval_strategy": "no"}
    axes = {"region": {"troll": {"trust_region": "troll"}}, "seed": seeds}
    text = {"question": "Does it run?", "shared": SHARED, "axes": axes}
    (path / "tiny.yaml").write_text(yaml.safe_dump(text, sort_keys=False))
    return path


def run(folder, *more):
    where = ["--runs", folder / "runs", "--results", folder / "results", "--set", f"model={folder / 'model'}"]
    command = [sys.executable, STUDIES / "run.py", folder / "tiny.yaml", *where, *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.slow
def test_a_study_from_its_file_to_its_results(folder):
    code, said, error = run(folder, "--jobs", "3")
    assert (code, said[0]) == (1, "3 runs, 3 to do"), error
    whole, bad, killed = sorted(said[1:])
    assert whole.startswith("tiny/troll-0: finished, reward ")
    assert bad.startswith("tiny/troll-1: could not start (")
    assert "trust_regoin" in bad
    lines = {line["name"]: line for line in results.read(folder / "results", "tiny")}
    line = lines["troll-0"]
    assert (line["status"], line["place"]) == ("finished", {"region": "troll", "seed": "0"})
    assert line["rollouts"]["step"] == [1, 3]
    assert scores.end(line) == line["rollouts"]["reward"][-1]
    assert [step for step, _ in line["held_out"]] == [0, 4]
    assert scores.kl_max(line) is not None

    before = (folder / "results" / "tiny.jsonl").read_bytes()
    assert run(folder, "--seeds", "0")[:2] == (0, ["1 runs, 0 to do"])
    assert (folder / "results" / "tiny.jsonl").read_bytes() == before

    assert killed == "tiny/troll-2: interrupted"  # and so it has no result, and is still to do
    assert set(lines) == {"troll-0"}
    expected = ["tiny/troll-0: done", "tiny/troll-1: to do", "tiny/troll-2: to do"]
    assert run(folder, "--list")[:2] == (0, expected)
    assert run(folder, "--list", "--where", "region=troll", "seed=0,2")[:2] == (0, [expected[0], expected[2]])
    code, _, error = run(folder, "--list", "--where", "region=trol")
    assert (code, error) == (1, "--where region=trol: no run has trol there\n")
