"""Flags: all of TRL's and ours, on the command line or in a file, and back into a file."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl import ModelConfig

from troll.errors import InputError
from troll.lab.cli import check_command, main
from troll.lab.cli.flags import _DEFAULTS, _REPLACED, GROUPS, Flags
from troll.lab.cli.main import as_words
from troll.lab.cli.train import options_of
from troll.lab.tasks.data import MAX_EVAL_SIZE
from troll.lab.tasks.generated import ARITHMETIC_SIZES, GYM_SIZES
from troll.lab.training.settings import GENERAL, SMALL, RunSettings, defaults
from troll.trl import TROLLConfig

CPU = {"use_cpu": True, "bf16": False}


def resolved(*argv: str, **more: Any) -> dict[str, Any]:
    """What ``config.yaml`` would say."""
    flags = Flags(list(argv))
    flags.configs({**CPU, **more}, "unused")
    return flags.resolved()


def from_file(tmp_path: Path, text: str, *argv: str) -> Flags:
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    return Flags(["--config", str(tmp_path / "c.yaml"), *argv])


ROUND_TRIPS: list[tuple[list[str], dict[str, Any]]] = [
    (["--save_model", "false"], {"save_model": False}),
    (["--no_save_model"], {"save_model": False}),
    (["--no-save-model"], {"save_model": False}),
    (["--save_model"], {"save_model": True}),
    (["--save-model=true"], {"save_model": True}),
    (["--write_report", "false"], {"write_report": False}),
    (["--disable_dropout", "false"], {"disable_dropout": False}),
    (["--shuffle_dataset", "false"], {"shuffle_dataset": False}),
    (["--measure_kl"], {"measure_kl": True}),
    (["--use_peft", "true", "--lora_target_modules", "a", "b"], {"use_peft": True, "lora_target_modules": ["a", "b"]}),
    (["--kl-bound", "0.02"], {"kl_bound": 0.02}),
    (["--kl_bound=inf"], {"kl_bound": math.inf}),
    (["--learning_rate", "1e-6"], {"learning_rate": 1e-6}),
    (["--gradient_accumulation_steps", "1"], {"gradient_accumulation_steps": 1}),  # TRL's own default
    (["--lr_scheduler_type", "cosine"], {"lr_scheduler_type": "cosine"}),
    (["--save_strategy", "no"], {"save_strategy": "no"}),
    (["--reward", "a:b", "c.py:d"], {"reward": ["a:b", "c.py:d"]}),
    (["--reward_weights", "1", "0.5"], {"reward_weights": [1.0, 0.5]}),
    (["--task_options", "digits=2", "operations=+-"], {"task_options": ["digits=2", "operations=+-"]}),
    (["--model_init_kwargs", '{"dtype": "bfloat16"}'], {"model_init_kwargs": '{"dtype": "bfloat16"}'}),
    (["--data", "größe 1.jsonl", "--task", "data"], {"data": "größe 1.jsonl", "task": "data"}),
    (["--train_size", "0012"], {"train_size": 12}),
    (["--optim", "sgd", "--seed", "7"], {"optim": "sgd", "seed": 7}),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "expected"), ROUND_TRIPS)
def test_what_is_written_to_a_file_means_the_same_when_it_is_read(
    argv: list[str], expected: dict[str, Any], tmp_path: Path
) -> None:
    said = resolved(*argv)
    assert {name: said[name] for name in said if name not in CPU} == expected
    flags = from_file(tmp_path, yaml.safe_dump(said, allow_unicode=True))
    args, model = flags.configs({}, "unused")
    assert flags.resolved() == said
    first = Flags(argv)
    assert first.run() == flags.run()
    expected_args, expected_model = first.configs(CPU, "unused")
    assert args.to_dict() == expected_args.to_dict()
    assert model == expected_model


def test_defaults_are_written_down_even_where_they_are_those_of_TRL(tmp_path: Path) -> None:
    """A later version, or another task, may have others."""
    stock = TROLLConfig("unused", **CPU)
    told = {"gradient_accumulation_steps": stock.gradient_accumulation_steps, "learning_rate": 3e-6}
    assert resolved(**told) == {**CPU, **told}


def test_the_command_line_goes_before_the_file_and_the_file_before_defaults(tmp_path: Path) -> None:
    flags = from_file(tmp_path, "kl_bound: 0.1\nmax_steps: 3\nreward: [a:b]\n", "--kl_bound", "0.2")
    args, _ = flags.configs({**CPU, "max_steps": 5, "learning_rate": 2e-6}, "somewhere")
    assert (args.kl_bound, args.max_steps, args.learning_rate, args.output_dir) == (0.2, 3, 2e-6, "somewhere")
    assert flags.run().reward == ["a:b"]
    assert flags.given == {"config", "kl_bound", "max_steps", "reward"}
    assert (flags.value("max_steps", 9), flags.value("seed", 9)) == (3, 9)


FILES = [
    ("save_model: no\n", {"save_model": False}),
    ("save_strategy: no\n", {"save_strategy": "no"}),  # which YAML reads as false
    ("save_strategy: 'no'\n", {"save_strategy": "no"}),
    ("eval-steps: 3\n", {"eval_steps": 3.0}),
    ("learning_rate: 1e-6\n", {"learning_rate": 1e-6}),  # which YAML reads as text
    ("reward: a:b\n", {"reward": ["a:b"]}),
    ("reward: []\ndata: null\nseed: 1\n", {"seed": 1}),
    ("model_init_kwargs: {dtype: bfloat16}\n", {"model_init_kwargs": '{"dtype": "bfloat16"}'}),
    ("model: -dashed\n", {"model": "-dashed"}),
    ("bf16: off\n", {}),
    ("kl_bound: .inf\n", {"kl_bound": math.inf}),
]


@pytest.mark.parametrize(("text", "expected"), FILES)
def test_what_YAML_makes_of_words(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    flags = from_file(tmp_path, text)
    flags.configs(CPU, "unused")
    assert {name: value for name, value in flags.resolved().items() if name not in CPU} == expected


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--kl_bond", "--kl_bound"),
        ("--kl-bond=1", "--kl_bound"),
        ("--trust-regions", "--trust_region"),
        ("--zzzzzz", "troll train --help_all"),
    ],
)
def test_an_unknown_flag_is_told_what_it_may_have_meant(flag: str, hint: str) -> None:
    with pytest.raises(InputError) as error:
        Flags([flag])
    assert error.value.fix == (f"Did you mean {hint}?" if hint.startswith("--") else f"{hint} lists all flags")


def test_abbreviations_are_refused() -> None:
    with pytest.raises(InputError, match="--kl "):
        Flags(["--kl", "0.1"])


def test_a_value_may_be_a_number_below_zero_but_not_a_flag() -> None:
    args = Flags(["--repetition_penalty", "1.5", "--max_grad_norm", "-1"]).configs(CPU, "unused")[0]
    assert args.max_grad_norm == -1
    with pytest.raises(InputError, match="--kl_bound needs a value, a number"):
        Flags(["--kl_bound", "--seed", "1"])


@pytest.mark.parametrize("columns", [80, 120])
def test_help(columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 120
    for field in dataclasses.fields(RunSettings):
        assert f"--{field.name}" in out, field.name
    for flag in ("--trust_region", "--kl_bound", "--learning_rate", "--run_name", "--config", "--help_all", "--seed"):
        assert f"{flag} " in out or f"{flag}\n" in out
    for example in ("troll train --task gym:gcd", "troll train --resume", "accelerate launch -m troll train"):
        assert example in out
    assert len(out.splitlines()) < 170
    for switch in ("--save_model true|false", "--write_report true|false", "--bf16 true|false", "--dry_run  "):
        assert switch in out
    assert "--hub_token" not in out


def _help_of(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Flag → its help on one line."""
    assert main([command, "--help_all"]) == 0
    parts = re.split(r"\n  (?=-)", capsys.readouterr().out)
    return {part.split()[0].removeprefix("--"): " ".join(part.split("\n\n")[0].split()) for part in parts[1:]}


def test_the_help_shows_the_defaults_that_apply(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _help_of("train", capsys)
    for name, default in {
        "kl_bound": "0.2; 0.05 with --preset paper",
        "tail": "bucket; floor with --preset paper",
        "max_support": "64",
        "tail_mass": "1e-05",
        "regression_coef": "1; 0.1 with smollm2-135m and no --preset",
        "learning_rate": "1e-06; 5e-06 with smollm2-135m",
        "keep_checkpoints": "true; false with smollm2-135m",
        "max_steps": "as num_train_epochs says; 80 with smollm2-135m",
        "updates_per_generation": "8",
        "measure_kl": "true",
        "train_size": f"all; {ARITHMETIC_SIZES[0]} for arithmetic, {GYM_SIZES[0]} for gym:NAME",
        "eval_size": f"all, or a tenth of --data but at most {MAX_EVAL_SIZE}; {ARITHMETIC_SIZES[1]} for "
        f"arithmetic, {GYM_SIZES[1]} for gym:NAME",
    }.items():
        assert shown[name].endswith(f"(default: {default})"), shown[name]
        assert shown[name].count("default:") == 1
    assert not [line for line in shown.values() if "default: None" in line]


@pytest.mark.parametrize("model", ["smollm2-135m", "other"])
def test_the_defaults_in_the_help_are_those_of_a_run(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    args, _ = Flags([]).configs(defaults(model, {}, False), "unused")
    ours = {*GENERAL, *SMALL, *(name for names in GROUPS.values() for name in names)} - _DEFAULTS.keys()
    for name, line in _help_of("train", capsys).items():
        found = re.search(r"\(default: (.*)\)$", line)
        if found is None or not hasattr(args, name) or name not in ours:
            continue
        by_model = dict(reversed(part.split(" with ", 1)) for part in found[1].split("; ")[1:])
        shown = next((by_model[x] for x in by_model if x.startswith(model)), found[1].split(";")[0])
        value = getattr(args, name)
        value = getattr(value, "value", value)  # of an Enum
        assert shown == as_words("none" if value == [] else value), name


def test_metavars_name_the_kind_of_value(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _help_of("train", capsys)
    for flag in ("updates_per_generation N ", "gpus_per_node N ", "report_to NAME ", "kl_bound NATS ", "resume RUN "):
        assert shown[flag.split()[0]].startswith(f"--{flag}")
    assert shown["task_options"].startswith("--task_options KEY=VALUE [KEY=VALUE ...]")


def test_the_help_of_a_comparison_leaves_out_what_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _help_of("compare", capsys)
    assert {"arms", "kl_bound", "learning_rate"} <= shown.keys()
    assert not {"trust_region", "seed", "save_model", "measure_kl"} & shown.keys()


def test_the_examples_in_the_help_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    commands = [line.partition("   ")[0].split()[1:] for line in lines if line.startswith("troll train")]
    assert len(commands) >= 7
    for command in commands:
        if "--config" not in command:  # of a file that the reader has
            check_command(command)


def test_help_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help-all"]) == 0
    out = capsys.readouterr().out
    for kind in (RunSettings, TROLLConfig, ModelConfig):
        for field in dataclasses.fields(kind):
            refused = field.name in _REPLACED
            assert not field.init or (f"--{field.name} " in out.replace("\n", " ")) != refused, field.name


def test_options() -> None:
    assert options_of(["a=1", "b=1.5", "c=x=y", "d=", "e=yes", "f=[1", "g=[1, 2]"]) == {
        "a": 1, "b": 1.5, "c": "x=y", "d": "", "e": True, "f": "[1", "g": "[1, 2]",
    }  # fmt: skip
    for wrong in ("a", "=1", ""):
        with pytest.raises(InputError, match="key=value"):
            options_of([wrong])


def test_flags_of_another_command() -> None:
    @dataclasses.dataclass
    class More:
        jobs: int = 1

    flags = Flags(["--jobs", "3", "--seed", "2"], prog="troll other", extra=[More])
    assert flags.own(More).jobs == 3
    with pytest.raises(InputError, match="troll other --help"):
        Flags(["--jobs", "x"], prog="troll other", extra=[More])


def test_the_config_of_an_older_run_is_read_with_the_present_names(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("held_out_size: 4\ndangerously_run_code_unsandboxed: true\nseed: 3\n")
    with pytest.raises(InputError, match="Unknown flag --held_out_size"):
        Flags(["--config", str(tmp_path / "c.yaml")])
    (tmp_path / "run.json").write_text("{}")
    flags = Flags(["--config", str(tmp_path / "c.yaml")])
    assert (flags.run().eval_size, flags.run().allow_unsandboxed_code, flags.value("seed", 0)) == (4, True, 3)


def test_an_explicit_preset_wins_over_the_settings_of_the_embedded_model() -> None:
    """Which has a regression coefficient of its own, 0.1."""
    usual, chosen = (defaults("smollm2-135m", {}, False, preset_given=x) for x in (False, True))
    assert usual["regression_coef"] == 0.1
    assert "regression_coef" not in chosen
    args, _ = Flags(["--preset", "paper"]).configs(chosen, "runs")
    assert (args.kl_bound, args.regression_coef, args.tail) == (0.05, 1.0, "floor")
