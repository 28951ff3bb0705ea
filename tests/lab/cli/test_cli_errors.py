"""Bad input: one sentence on stderr that says what was given and what to try, exit code 2, and no folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from cli_cases import flags, shared, start, train

from troll.lab.cli import main

Case = tuple[Callable[[Path], list[str]], str]


def _plain(*more: str, reward: str | None = "spread") -> Callable[[Path], list[str]]:
    return lambda runs: flags(runs, *more, reward=reward)


def _config(text: str | bytes | None) -> Callable[[Path], list[str]]:
    """With a YAML file; None for one that is not there."""

    def argv(runs: Path) -> list[str]:
        path = runs.parent / "c.yaml"
        if text is not None:
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return flags(runs, "--config", str(path))

    return argv


def _data(text: str, *more: str) -> Callable[[Path], list[str]]:
    def argv(runs: Path) -> list[str]:
        path = runs.parent / "problems.jsonl"
        path.write_text(text)
        return flags(runs, "--task", "data", "--data", str(path), *more)

    return argv


def _broken_weights(runs: Path) -> list[str]:
    model = runs.parent / "broken"
    model.mkdir()
    for file in (shared() / "model").iterdir():
        (model / file.name).write_bytes(file.read_bytes()[: 2000 if file.suffix == ".safetensors" else None])
    return flags(runs, "--model", str(model))


def _file_in_the_way(runs: Path) -> list[str]:
    (runs.parent / "file").write_text("")
    return flags(runs.parent / "file" / "runs")


def _rows(n: int) -> str:
    return "".join(json.dumps({"prompt": f"{i} ="}) + "\n" for i in range(n))


CASES: dict[str, Case] = {
    "model path": (_plain("--model", "./nowhere"), r"There is no model folder './nowhere'"),
    "model name": (_plain("--model", "a b/c!"), r"'a b/c!'.*hub name"),
    "model offline": (_plain("--model", "nobody/nothing"), r"nobody/nothing.*cannot be reached.*smollm2-135m"),
    "model weights": (_broken_weights, r"Cannot load the model .*broken"),
    "task": (_plain("--task", "arithmetics"), r"There is no task 'arithmetics'. Did you mean 'arithmetic'"),
    "task option": (_plain("--task_options", "digits"), r"The task option 'digits' is not of the form key=value"),
    "task option name": (_plain("--task_options", "digit=2"), r"no option 'digit'. Did you mean 'digits'"),
    "flag": (_plain("--kl_bund", "1"), r"Unknown flag --kl_bund on the command line. Did you mean --kl_bound"),
    "flag with dashes": (_plain("--max-stepz=3"), r"Unknown flag --max-stepz=3 .*Did you mean --max_steps"),
    "word": (_plain("--seed", "1", "arithmetic"), r"troll train does not take 'arithmetic'\. See troll train --help"),
    "type": (_plain("--kl_bound", "small"), r"--kl_bound must be a number, got 'small'\. See troll train --help"),
    "whole number": (_plain("--max_steps", "1.5"), r"--max_steps must be an integer, got '1.5'"),
    "switch": (_plain("--save_model", "maybe"), r"--save_model must be true or false, got 'maybe'"),
    "value of a switch": (_plain("--help_all=3"), r"--help_all takes no value"),
    "no value": (_plain("--kl_bound"), r"--kl_bound needs a value, a number\."),
    "no text": (_plain("--task"), r"--task needs a value\."),
    "choice": (_plain("--trust_region", "ppo"), r"--trust_region must be troll, clip or none, got 'ppo'"),
    "similar choice": (_plain("--trust_region", "cilp"), r"got 'cilp'\. Did you mean clip\?$"),
    "rate below 0": (_plain("--learning_rate", "-1"), r"--learning_rate must be at least 0, got -1\."),
    "rate that is no number": (_plain("--learning_rate", "nan"), r"--learning_rate must be at least 0, got nan\."),
    "temperature": (_plain("--temperature", "0"), r"--temperature must be above 0, got 0\."),
    "empty batch": (_plain("--per_device_train_batch_size", "0"), r"--per_device_train_batch_size must be at least 1"),
    "JSON": (_plain("--model_init_kwargs", "{bad"), r"--model_init_kwargs is not valid JSON: "),
    "adapter": (_plain("--use_peft", "--lora_r", "0", "--dry_run"), r"PEFT rejected the adapter: .*--lora_"),
    "range": (_plain("--kl_bound", "-1"), r"kl_bound must be a number ≥ 0, got -1"),
    "no file": (_config(None), r"Cannot read --config .*c.yaml: No such file"),
    "binary file": (_config(b"\xff\xfe\x00"), r"c.yaml is not valid YAML"),
    "not YAML": (_config("a: [1"), r"c.yaml is not valid YAML.*line 1"),
    "a list": (_config("- kl_bound\n"), r"c.yaml contains a list, not flags"),
    "empty file": (_config(""), r"c.yaml contains a NoneType, not flags"),
    "key": (_config("kl_bund: 1\n"), r"Unknown flag --kl_bund in .*c.yaml.*--kl_bound"),
    "number as key": (_config("1: 1\n"), r"Unknown flag --1 in .*c.yaml"),
    "type of a key": (_config("kl_bound: small\n"), r"c.yaml: kl_bound must be a number, got 'small'"),
    "list of a key": (_config("kl_bound: [1, 2]\n"), r"c.yaml: kl_bound must be a number, got \[1, 2\]"),
    "choice of a key": (
        _config("trust_region: ppo\n"),
        r"c.yaml: trust_region must be troll, clip or none",
    ),
    "switch of a key": (_config("save_model: maybe\n"), r"c.yaml: save_model must be true or false, got 'maybe'"),
    "file in a file": (_config("config: d.yaml\n"), r"Unknown flag --config in .*c.yaml"),
    "TRL's name of the model": (_plain("--model_name_or_path", "x"), r"no effect here\. Use --model\.$"),
    "TRL's folder": (_plain("--output-dir=x"), r"--output_dir has no effect here.*--runs_dir and --run_name"),
    "TRL's checkpoint": (_config("resume_from_checkpoint: x\n"), r"no effect here.*--resume"),
    "empty data": (_data(""), r"problems.jsonl"),
    "broken data": (_data(_rows(3) + '{"prompt": \n' + _rows(3)), r"problems.jsonl(:|, line )4"),
    "data without prompts": (_data(_rows(2) + '{"question": "?"}\n'), r"problems.jsonl(:|, line )3"),
    "little data": (_data(_rows(5), "--eval_size", "1"), r"4 .*rollout|rollout.* 4"),
    "no data": (_plain("--task", "data"), r"--task data needs --data"),
    "reward that fails": (_plain(reward="fails"), r"reward function 'fails' raised RuntimeError: cannot \[31mjudge"),
    "reward of another length": (_plain(reward="short"), r"the reward function 'short' returned 1 rewards for 8"),
    "reward of another type": (_plain(reward="text"), r"the reward function 'text' returned 'good' for completion 0"),
    "reward that is not there": (_plain(reward="nothing"), r"rewards.py defines no function 'nothing'"),
    "name up": (_plain("--run_name", "../x"), r"the run name '../x'.*--runs_dir"),
    "name below": (_plain("--run_name", "a/b"), r"the run name 'a/b'"),
    "empty name": (_plain("--run_name", ""), r"the run name ''"),
    "name of the parent": (_plain("--run_name", ".."), r"the run name '..'"),
    "long name": (_plain("--run_name", "x" * 101), r"at most 100"),
    "runs below a file": (_file_in_the_way, r"cannot create .*file/runs/arithmetic-troll \(Not a directory\)"),
    "resume nothing": (lambda runs: ["train", "--resume", "x", "--runs_dir", str(runs)], r"There is no run 'x'"),
    "resume a path": (lambda runs: ["train", "--resume", str(runs / "x")], r"There is no run '.*/x'"),
    "resume up": (lambda runs: ["train", "--resume", "..", "--runs_dir", str(runs)], r"'\.\.'"),
    "TRL": (_plain("--num_generations", "3"), r"TRL rejected the configuration: .*num_generations"),
    "TRL's loss": (_plain("--loss_type", "nonsense"), r"nonsense"),
    "TRL's trainer": (_plain("--use_vllm", "true", "--vllm_mode", "x"), r"vllm"),
    "a schedule": (_plain("--updates_per_generation", "0"), r"updates_per_generation must be ≥ 1, got 0"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_in_one_sentence(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    argv, says = CASES[case]
    runs = tmp_path / "runs"
    words = argv(runs)
    capfd.readouterr()  # what saving the model has said
    assert main(words) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("troll: ")
    assert err.endswith("\n")
    assert "Traceback" not in err
    assert err.removesuffix("\n").isprintable()
    assert re.search(says, err), err
    assert not list(runs.glob("*"))


@pytest.mark.slow
def test_one_sentence_is_all_there_is_on_a_terminal_of_ones_own(tmp_path: Path) -> None:
    """The same in a fresh process, where no test has quietened anything; offline, and in a poor encoding."""
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "ascii"}
    process = start(flags(tmp_path / "runs", "--model", "nobody/nothing"), env=environment, cwd=tmp_path)
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert re.fullmatch(r"troll: The model 'nobody/nothing' is not on this machine.*\n", err), err
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, "--save_strategy", "no")
    argv = ["train", "--resume", run.path.name, "--runs_dir", str(tmp_path)]
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert main(argv) == 2
    assert "is finished and cannot be resumed" in capsys.readouterr().err
    about = run.path / "run.json"
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    about.write_text('{"format": 99}')
    assert main(argv) == 2
    assert "format 99" in capsys.readouterr().err
    about.write_text("{")
    assert main(argv) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_config_that_was_changed_by_hand_is_checked_on_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, "--save_steps", "4")
    about = run.path / "run.json"
    about.write_text(about.read_text().replace('"finished",', '"failed",', 1))
    config = run.path / "config.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "kl_bound": "wide"}))
    assert main(["train", "--resume", str(run.path)]) == 2
    assert "config.yaml: kl_bound must be a number, got 'wide'" in capsys.readouterr().err
