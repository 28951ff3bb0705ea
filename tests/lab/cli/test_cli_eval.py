"""``troll eval``: a run before and after, any model on any task, and everything it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny_models
from cli_cases import shared, start, train

from troll.errors import InputError
from troll.lab.cli import check_command, main
from troll.lab.runs import Run

REWARDS = '''
def even(completions, **_):
    """Earned by any model half of the time."""
    return [float(sum(map(ord, text)) % 2 == 0) for text in completions]

def loud(completions, **_):
    return [7.0] * len(completions)
'''


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("eval")
    (folder / "rewards.py").write_text(REWARDS)
    more = ("--learning_rate", "3e-2", "--reward", f"{folder / 'rewards.py'}:even", "--write_report", "true")
    return train(folder / "runs", *more, reward=None)


def test_a_run_before_and_after(trained, capsys):
    before = (trained.path / "report.html").read_text()
    words = ["eval", trained.path.name, "--runs_dir", str(trained.path.parent), "--samples", "6", "--k", "1", "2", "6"]
    assert main(words) == 0
    out = capsys.readouterr().out
    found = trained.evaluation()
    assert found is not None
    assert [model["label"] for model in found["models"]] == ["before", "after"]
    assert (found["task"], found["problems"], found["samples"], found["temperature"]) == ("arithmetic", 8, 6, 1.0)
    assert found["max_completion_length"] == 4  # the run's
    measures = ["pass@1", "pass@2", "pass@6", "majority"]
    for model in found["models"]:
        assert [key for key in model if key != "label"] == [*measures, "by_difficulty"]
        assert 0 <= model["pass@1"]["value"] <= model["pass@2"]["value"] <= model["pass@6"]["value"] <= 1
        assert model["pass@1"]["low"] <= model["pass@1"]["value"] <= model["pass@1"]["high"]
        assert model["pass@6"]["value"] * 8 == int(model["pass@6"]["value"] * 8)  # of 8 problems
    assert found["models"][0] != {**found["models"][1], "label": "before"}
    for name in measures:
        first, last = (model[name]["value"] for model in found["models"])
        assert found["difference"][name]["value"] == pytest.approx(last - first)
        assert re.search(rf"^{name} +{100 * first:.1f} %  \(.* to .*\)  +{100 * last:.1f} %  \(", out, re.MULTILINE)
    assert f"Written: {trained.path / 'eval.json'}\nReport: {trained.path / 'report.html'}\n" in out
    assert "8 held-out problems of arithmetic" in (trained.path / "report.html").read_text()
    assert "8 held-out problems of arithmetic" not in before

    kept = (trained.path / "eval.json").read_bytes()
    assert main(words) == 0
    assert (trained.path / "eval.json").read_bytes() == kept  # the same seed
    output = trained.path.parent / "deep" / "x.json"
    assert main([*words, "--seed", "1", "--problems", "3", "--output", str(output)]) == 0
    assert json.loads(output.read_text())["problems"] == 3
    assert (trained.path / "eval.json").read_bytes() == kept


def test_before_is_the_base_model_and_after_is_the_trained_one(trained, tmp_path):
    """Each alone, as any model: the same numbers."""
    reward = yaml_reward(trained)
    flags = ["--samples", "4", "--problems", "8", "--max_completion_length", "4", "--seed", "5"]
    alone = []
    for model in (shared() / "model", trained.path / "model"):
        output = tmp_path / "out.json"
        words = ["eval", "--model", str(model), "--task", "arithmetic", "--reward", reward, *flags]
        assert main([*words, "--output", str(output)]) == 0
        alone.append(json.loads(output.read_text())["models"][0])
    output = tmp_path / "both.json"
    assert main(["eval", str(trained.path), *flags, "--output", str(output)]) == 0
    both = json.loads(output.read_text())["models"]
    assert [{**x, "label": ""} for x in both] == [{**x, "label": ""} for x in alone]
    assert both[0]["pass@1"] != both[1]["pass@1"]


def yaml_reward(run: Run) -> str:
    (line,) = [x for x in (run.path / "config.yaml").read_text().splitlines() if "rewards.py:even" in x]
    return line.removeprefix("- ").strip()


def test_a_model_in_a_process_of_its_own(tmp_path):
    words = ["eval", "--model", str(shared() / "model"), "--problems", "3", "--samples", "2"]
    process = start(words, cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, ""), err
    assert out.startswith("arithmetic: 3 held-out problems, 2 samples each\n")
    assert re.search(r"^pass@2 +\d+\.0 %|^pass@2 +\d+\.\d %", out, re.MULTILINE)
    assert not list(tmp_path.iterdir())  # nothing was asked to be written


def test_an_adapter_is_put_on_its_base(trained, tmp_path):
    from peft import LoraConfig, get_peft_model

    run = tmp_path / "lora"
    run.mkdir()
    for name in ("run.json", "config.yaml"):
        (run / name).write_bytes((trained.path / name).read_bytes())
    model, _ = tiny_models.build("dense")
    adapted = get_peft_model(
        model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_alpha=64)
    )
    adapted.save_pretrained(run / "model")
    assert main(["eval", str(run), "--samples", "4"]) == 0
    before, after = Run(run).evaluation()["models"]
    assert {**before, "label": ""} != {**after, "label": ""}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Pass a run or --model"),
        (["x", "--model", "y"], "Pass either the run x or --model"),
        (["x", "--task", "arithmetic"], "--task cannot be set for a run"),
        (["x", "--samples", "4", "--k", "8"], "--k must be between 1 and the number of samples, 4, got 8"),
        (["x", "--k", "0"], "--k must be between 1 and the number of samples, 8, got 0"),
        (["x", "--k", "1", "1"], "--k 1 1 repeats a value"),
        (["x", "--problems", "0"], "--problems must be at least 1, got 0"),
        (["x", "--samples", "none"], "--samples must be an integer, got 'none'"),
        (["x", "--batch_size", "-3"], "--batch_size must be at least 1, got -3"),
        (["x", "--top_p", "0.9"], "--top_p"),
    ],
)
def test_flags_that_cannot_be_are_one_sentence(words, said, capsys):
    assert main(["eval", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    with pytest.raises(InputError):
        check_command(["eval", *words])


def test_what_is_not_there(trained, tmp_path, capsys):
    def refused(*words: str) -> str:
        assert main(["eval", *words]) == 2
        return capsys.readouterr().err

    assert "There is no run 'nowhere' in" in refused("nowhere", "--runs_dir", str(tmp_path))
    assert "There is no model folder './nowhere'" in refused("--model", "./nowhere")
    assert "There is no task 'nothing'" in refused("--model", str(shared() / "model"), "--task", "nothing")
    assert "--problems 9, but the run held out only 8 problems" in refused(str(trained.path), "--problems", "9")
    assert "temperature=0" in refused(str(trained.path), "--temperature", "0")
    reward = yaml_reward(trained).replace(":even", ":loud")
    assert "needs rewards from 0 (wrong) to 1 (right), got 7" in refused(
        "--model", str(shared() / "model"), "--reward", reward
    )
    bare = tmp_path / "bare"
    bare.mkdir()
    for status, hint in (("finished", "--save_model false"), ("interrupted", f"troll train --resume {bare}")):
        (bare / "run.json").write_text(json.dumps({**trained.about, "status": status}))
        said = refused(str(bare))
        assert "has no trained model" in said
        assert hint in said
    several = tmp_path / "several"
    several.mkdir()
    (several / "comparison.json").write_text('{"format": 1}')
    assert f"such as {several / 'troll-0'}" in refused(str(several))
    blocked = Path(trained.path / "run.json" / "x.json")
    assert f"Cannot write --output {blocked}: " in refused(
        "--model", str(shared() / "model"), "--problems", "1", "--samples", "1", "--output", str(blocked)
    )


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["eval", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for example in re.findall(r"^  troll (eval.*?)(?:  .*)?$", out, re.MULTILINE):
        check_command(example.split())
    assert "95 % confidence intervals over problems" in out
