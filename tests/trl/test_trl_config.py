"""``TROLLConfig``: schedules, refusals with their reasons, command lines, and what is checked and said at the start."""

from __future__ import annotations

import copy
import functools
import logging
import math
import pickle
import re
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, TrlParser
from trl_cases import DEFAULTS, config, logged, lower_case, prompts, stock_trainer, trainer

from troll.errors import InputError
from troll.trl import TROLLConfig, TROLLTrainer
from troll.trl import trainer as trainer_module
from troll.trl.checks import check_datasets


def plain(folder: Path, **changes: Any) -> TROLLConfig:
    """Without the schedule of ``trl_cases``."""
    return TROLLConfig(str(folder), **{**DEFAULTS, **changes})


# ------------------------------------------------------------------ the schedule


@pytest.mark.parametrize(
    ("given", "steps", "updates"),
    [
        ({}, 8, 8),
        ({"gradient_accumulation_steps": 3}, 24, 8),
        ({"updates_per_generation": 4}, 4, 4),
        ({"updates_per_generation": 1}, 1, 1),
        ({"updates_per_generation": 4, "gradient_accumulation_steps": 2}, 8, 4),
        ({"updates_per_generation": 6, "num_iterations": 3}, 2, 6),
        ({"updates_per_generation": 6, "num_iterations": 3, "gradient_accumulation_steps": 2}, 4, 6),
        ({"steps_per_generation": 2}, 2, 2),
        ({"steps_per_generation": 1}, 1, 1),
        ({"generation_batch_size": 32}, 4, 4),
        ({"num_iterations": 3}, 1, 3),
        ({"num_iterations": 3, "gradient_accumulation_steps": 2}, 2, 3),
        ({"steps_per_generation": 4, "num_iterations": 3, "gradient_accumulation_steps": 2}, 4, 6),
        ({"steps_per_generation": 4, "updates_per_generation": 4}, 4, 4),
        ({"generation_batch_size": 32, "updates_per_generation": 2, "gradient_accumulation_steps": 2}, 4, 2),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, 3, None),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 4}, 2, None),
    ],
)
def test_a_schedule_is_eight_updates_or_what_was_set(
    tmp_path: Path, given: dict[str, int], steps: int, updates: int | None
) -> None:
    args = plain(tmp_path, **given)
    assert args.steps_per_generation == steps
    assert args.generation_batch_size == 8 * steps
    assert args.updates_per_generation == updates
    assert args.num_iterations == given.get("num_iterations", 1)
    assert args.steps_per_rollout == steps * args.num_iterations


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"updates_per_generation": 4, "steps_per_generation": 2}, "steps_per_generation=2"),
        ({"updates_per_generation": 4, "generation_batch_size": 64}, "steps_per_generation=8"),
        ({"updates_per_generation": 8, "steps_per_generation": 8, "num_iterations": 2}, "num_iterations=2"),
        (
            {"updates_per_generation": 4, "steps_per_generation": 4, "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps=2",
        ),
        (
            {"updates_per_generation": 1, "steps_per_generation": 3, "gradient_accumulation_steps": 2},
            "steps_per_generation=3",
        ),
        ({"updates_per_generation": 0, "steps_per_generation": 4}, "updates_per_generation=0"),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused(tmp_path: Path, given: dict[str, int], named: str) -> None:
    with pytest.raises(InputError, match="is the number of updates") as refusal:
        plain(tmp_path, **given)
    assert named in refusal.value.problem
    assert f"updates_per_generation={given['updates_per_generation']}" in refusal.value.problem
    assert refusal.value.fix == "Set updates_per_generation alone"


@pytest.mark.parametrize("updates", [0, -1])
def test_a_rollout_is_used_for_at_least_one_update(tmp_path: Path, updates: int) -> None:
    with pytest.raises(InputError, match=f"updates_per_generation must be ≥ 1, got {updates}"):
        plain(tmp_path, updates_per_generation=updates)


@pytest.mark.parametrize(
    "given",
    [
        {"updates_per_generation": 5, "num_iterations": 2},
        {"updates_per_generation": 1, "num_iterations": 2},
        {"updates_per_generation": 3, "num_iterations": 4, "gradient_accumulation_steps": 2},
    ],
)
def test_updates_that_do_not_go_evenly_into_a_rollout_are_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be a multiple of num_iterations") as refusal:
        plain(tmp_path, **given)
    for name, value in given.items():
        assert f"{name}={value}" in refusal.value.problem


def test_TRLs_own_refusals_stay(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can not be both configured"):
        plain(tmp_path, steps_per_generation=2, generation_batch_size=16)
    with pytest.raises(ValueError, match="divisible by num_generations"):
        plain(tmp_path, updates_per_generation=1, num_generations=3)


@pytest.mark.parametrize(
    ("accumulation", "steps", "iterations", "acts"),
    [
        (1, 1, 1, False),
        (1, 2, 1, True),
        (1, 1, 2, True),
        (2, 2, 1, False),
        (4, 2, 1, False),
        (4, 2, 2, False),
        (2, 2, 2, True),
        (3, 2, 1, True),
        (2, 3, 1, True),
    ],
)
def test_a_trust_region_can_act_where_TRL_keeps_old_log_probabilities(
    tmp_path: Path, accumulation: int, steps: int, iterations: int, acts: bool
) -> None:
    schedule = {
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": steps,
        "num_iterations": iterations,
        "per_device_train_batch_size": 4,
        "max_completion_length": 2,
    }
    assert plain(tmp_path, **schedule).trust_region_can_act is acts
    stock = stock_trainer(tmp_path, **schedule)
    stock.model.train()
    batch = stock._prepare_inputs(next(iter(stock.get_train_dataloader())))
    assert ("old_per_token_logps" in batch) is acts


# ------------------------------------------------------------------ what is refused, and why


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("trust_region", "kl", "'troll' or 'clip' or 'none'"),
        ("tail", "drop", "'bucket'"),
        ("advantage_estimator", "gae", "'reinforce_pp_baseline'"),
        ("kl_bound", -0.05, "-0.05"),
        ("kl_bound", math.nan, "nan"),
        ("regression_coef", -1.0, "-1.0"),
        ("regression_coef", math.inf, "inf"),
        ("regression_coef", math.nan, "nan"),
        ("max_support", 0, "got 0"),
        ("tail_mass", -1e-5, "-1e-05"),
        ("tail_mass", 1.5, "1.5"),
        ("tail_mass", math.nan, "nan"),
    ],
)
def test_a_value_without_meaning_is_refused_by_name(tmp_path: Path, name: str, value: Any, named: str) -> None:
    with pytest.raises(InputError, match=name) as refusal:
        plain(tmp_path, **{name: value})
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    "given",
    [
        {"kl_bound": 0.0},
        {"kl_bound": math.inf},
        {"regression_coef": 0.0},
        {"max_support": 1},
        {"tail_mass": 0.0},
        {"trust_region": "clip"},
        {"trust_region": "none"},
        {"tail": "floor"},
        {"advantage_estimator": "rloo"},
    ],
)
def test_values_at_the_edge_are_accepted(tmp_path: Path, given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    assert getattr(plain(tmp_path, **given), name) == value


@pytest.mark.parametrize("trust_region", ["troll", "none"])
@pytest.mark.parametrize(("loss_type", "instead"), [("cispo", "dapo"), ("vespo", "dapo"), ("sapo", "grpo")])
def test_a_loss_that_bounds_the_ratio_in_its_own_way_is_refused(
    tmp_path: Path, loss_type: str, instead: str, trust_region: str
) -> None:
    with pytest.raises(InputError, match="bounds or reweights the ratio itself") as refusal:
        plain(tmp_path, loss_type=loss_type, trust_region=trust_region)
    assert f"loss_type={loss_type!r}" in refusal.value.problem
    assert f"trust_region={trust_region!r}" in refusal.value.problem
    for allowed in ("dapo", "grpo", "bnpo", "dr_grpo", "luspo"):
        assert allowed in refusal.value.problem
    assert f"'{instead}'" in refusal.value.fix
    assert f"'{loss_type}'" in refusal.value.fix
    assert "trust_region='clip'" in refusal.value.fix
    assert plain(tmp_path, loss_type=loss_type, trust_region="clip").loss_type == loss_type


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "luspo"])
def test_losses_without_a_bound_once_epsilon_is_infinite_are_accepted(tmp_path: Path, loss_type: str) -> None:
    assert plain(tmp_path, loss_type=loss_type).loss_type == loss_type


@pytest.mark.parametrize("trust_region", ["troll", "none"])
def test_a_second_clip_is_refused(tmp_path: Path, trust_region: str) -> None:
    with pytest.raises(InputError, match="an upper clip of the ratio, cannot be combined") as refusal:
        plain(tmp_path, delta=4.0, trust_region=trust_region)
    assert "delta=4.0" in refusal.value.problem
    assert f"trust_region={trust_region!r}" in refusal.value.problem
    assert plain(tmp_path, delta=4.0, trust_region="clip").delta == 4.0


@pytest.mark.parametrize("estimator", ["dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
def test_options_that_only_TRLs_own_estimator_reads_are_refused_with_another(tmp_path: Path, estimator: str) -> None:
    with pytest.raises(
        InputError, match=f"scale_rewards='batch' has no effect with advantage_estimator='{estimator}'"
    ) as refusal:
        plain(tmp_path, advantage_estimator=estimator, scale_rewards="batch")
    assert "only advantage_estimator='grpo' uses it" in refusal.value.fix
    with pytest.raises(InputError, match="one reward per sample") as refusal:
        plain(tmp_path, advantage_estimator=estimator, multi_objective_aggregation="normalize_then_sum")
    assert "'normalize_then_sum'" in refusal.value.problem
    assert estimator in refusal.value.problem
    for scale in ("group", "none"):
        assert plain(tmp_path, advantage_estimator=estimator, scale_rewards=scale).scale_rewards == scale


def test_TRLs_own_estimator_keeps_all_its_options(tmp_path: Path) -> None:
    args = plain(tmp_path, scale_rewards="batch", multi_objective_aggregation="normalize_then_sum")
    assert (args.advantage_estimator, args.scale_rewards) == ("grpo", "batch")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("kl_bound", "0.1", "kl_bound must be a number, got the str '0.1'. Write kl_bound=0.1."),
        ("kl_bound", True, "kl_bound must be a number, got the bool True. Pass a number."),
        ("kl_bound", [0.1], "kl_bound must be a number, got the list [0.1]. Pass a number."),
        ("max_support", 64.0, "max_support must be a whole number, got the float 64.0. Write max_support=64."),
        ("updates_per_generation", 2.5, "updates_per_generation must be a whole number, got the float 2.5."),
        ("measure_kl", "yes", "measure_kl must be True or False, got the str 'yes'. Pass True or False."),
        ("num_generations", "8", "num_generations must be a whole number, got the str '8'. Write num_generations=8."),
        ("num_generations", "8.5", "num_generations must be a whole number, got the str '8.5'. Pass a whole number."),
        ("max_steps", True, "max_steps must be a whole number, got the bool True. Pass a whole number."),
        ("learning_rate", "1e-5", "learning_rate must be a number, got the str '1e-5'. Write learning_rate=1e-05."),
        ("learning_rate", None, "learning_rate must be a number, got None. The default is 1e-06."),
        ("use_vllm", "False", "use_vllm must be True or False, got the str 'False'. Write use_vllm=False."),
        ("loss_type", 1, "loss_type must be a string, got the int 1. Pass a string."),
        ("lr_scheduler_type", 1, "lr_scheduler_type must be a string, got the int 1. Pass a string."),
        ("report_to", 1, "report_to must be a string or a list, got the int 1. Pass a string or a list."),
        ("reward_weights", 1.0, "reward_weights must be a list, got the float 1.0. Pass a list."),
        ("generation_kwargs", 1, "generation_kwargs must be a dictionary or a string, got the int 1."),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_field_and_the_type(
    tmp_path: Path, name: str, value: Any, sentence: str
) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        plain(tmp_path, **{name: value})


@pytest.mark.parametrize("entry", fields(TROLLConfig), ids=lambda entry: str(entry.name))
def test_every_field_of_TRL_refuses_a_value_of_another_type_by_name(tmp_path: Path, entry: Any) -> None:
    if entry.name in {"scale_rewards", "fsdp", "parallelism_config", "trackio_static_space_id"}:
        return  # TRL and transformers take more types than they declare, or a class
    hint = str(get_type_hints(TROLLConfig)[entry.name])
    wrong = 3 if "str" in hint and "int" not in hint else [0.5] if "int" in hint and "str" in hint else "wrong"
    given = {"output_dir": str(tmp_path), "report_to": "none", "bf16": False, entry.name: wrong}
    if entry.name == "include_num_input_tokens_seen":
        given[entry.name] = 2.5
    with pytest.raises(InputError, match=rf"^{entry.name} must be "):
        TROLLConfig(**given)


def test_values_of_the_declared_types_are_accepted(tmp_path: Path) -> None:
    made = TROLLConfig(tmp_path / "run", bf16=np.bool_(False), max_steps=np.int64(3), learning_rate=1, report_to=[])
    assert made.learning_rate == 1
    assert TROLLConfig(str(tmp_path), scale_rewards=False, bf16=False).scale_rewards == "none"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("kl_bounds", "kl_bound"),
        ("update_per_generation", "updates_per_generation"),
        ("learning_rates", "learning_rate"),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest(tmp_path: Path, name: str, near: str) -> None:
    with pytest.raises(InputError, match=f"TROLLConfig has no field '{name}'\\. Did you mean '{near}'\\?"):
        plain(tmp_path, **{name: 0.1})
    with pytest.raises(InputError, match=r"no field 'zzz'\. docs/settings\.md lists all fields"):
        plain(tmp_path, zzz=1)


def test_a_configuration_can_be_copied_and_subclassed(tmp_path: Path) -> None:
    @dataclass
    class Mine(TROLLConfig):
        extra: int = 1

    assert Mine(str(tmp_path), **DEFAULTS, extra=2).extra == 2
    with pytest.raises(InputError, match="Did you mean 'extra'"):
        Mine(str(tmp_path), **DEFAULTS, extr=2)
    args = plain(tmp_path, kl_bound=0.07)
    for again in (copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert again.to_dict() == args.to_dict()


def test_a_preset_fills_in_what_is_not_set(tmp_path: Path) -> None:
    names = ("kl_bound", "regression_coef", "tail", "max_support", "tail_mass")
    values = {
        preset: [getattr(plain(tmp_path, preset=preset), name) for name in names] for preset in ("default", "paper")
    }
    assert values == {"default": [0.2, 1.0, "bucket", 64, 1e-5], "paper": [0.05, 1.0, "floor", 64, 1e-5]}
    mine = plain(tmp_path, preset="paper", kl_bound=0.3, tail="bucket")
    assert (mine.kl_bound, mine.tail, mine.max_support) == (0.3, "bucket", 64)
    with pytest.raises(InputError, match=r"preset must be 'default' or 'paper', got 'papers'\. Did you mean 'paper'"):
        plain(tmp_path, preset="papers")


# ------------------------------------------------------------------ fields, command lines, dictionaries


FLAGS = {
    "trust_region": "troll",
    "kl_bound": 0.1,
    "regression_coef": 0.5,
    "max_support": 32,
    "tail_mass": 1e-4,
    "tail": "floor",
    "updates_per_generation": 2,
    "advantage_estimator": "rloo",
    "measure_kl": True,
    "kl_bound_schedule": "linear end=0.01 rollouts=5",
    "disable_dropout": False,
}


def default_of(entry: Field[Any]) -> Any:
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def test_every_new_field_says_what_it_is_and_only_dropout_has_another_default() -> None:
    theirs = {entry.name: entry for entry in fields(GRPOConfig)}
    ours = {entry.name: entry for entry in fields(TROLLConfig)}
    new = ours.keys() - theirs.keys()
    assert new >= FLAGS.keys() - {"disable_dropout"}
    assert new >= {"preset", "kl_bound_schedule", "regression_coef_schedule", "on_invalid_reward"}
    for name in {*new, "disable_dropout"}:
        assert len(ours[name].metadata["help"]) > 20, name
    changed = {name for name in theirs if default_of(ours[name]) != default_of(theirs[name])}
    assert changed == {"disable_dropout"}
    assert ours["disable_dropout"].default is True


def test_a_command_line_sets_every_field(tmp_path: Path) -> None:
    line = ["--output_dir", str(tmp_path), "--use_cpu", "True", "--bf16", "False"]
    (defaults,) = TrlParser(TROLLConfig).parse_args_and_config(args=line)
    assert isinstance(defaults, TROLLConfig)
    assert (defaults.kl_bound, defaults.updates_per_generation, defaults.tail) == (0.2, 8, "bucket")
    for name, value in FLAGS.items():
        line += [f"--{name}", str(value)]
    (args,) = TrlParser(TROLLConfig).parse_args_and_config(args=line)
    assert {name: getattr(args, name) for name in FLAGS} == FLAGS
    assert args.steps_per_generation == 2


def test_a_YAML_file_sets_every_field_and_the_command_line_goes_first(tmp_path: Path) -> None:
    lines = [f"{name}: {str(value).lower() if isinstance(value, bool) else value}" for name, value in FLAGS.items()]
    lines[4] = "tail_mass: 1.0e-4"  # a number to YAML, which reads 1e-4 as a word
    file = tmp_path / "run.yaml"
    file.write_text("\n".join([f"output_dir: {tmp_path}", "use_cpu: true", "bf16: false", *lines]))
    (args,) = TrlParser(TROLLConfig).parse_args_and_config(args=["--config", str(file)])
    assert {name: getattr(args, name) for name in FLAGS} == FLAGS
    (args,) = TrlParser(TROLLConfig).parse_args_and_config(args=["--config", str(file), "--kl_bound", "0.2"])
    assert {name: getattr(args, name) for name in FLAGS} == {**FLAGS, "kl_bound": 0.2}


def test_a_command_line_with_an_unknown_choice_names_the_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        TrlParser(TROLLConfig).parse_args_and_config(args=["--output_dir", str(tmp_path), "--trust_region", "ppo"])
    assert "'troll', 'clip', 'none'" in capsys.readouterr().err


@pytest.mark.parametrize("left_out", ["generation_batch_size", "steps_per_generation"])  # TRL takes one of the two
@pytest.mark.parametrize("changes", [{}, {"num_iterations": 2}, {**FLAGS, "gradient_accumulation_steps": 2}])
def test_a_configuration_survives_its_dictionary(tmp_path: Path, left_out: str, changes: dict[str, Any]) -> None:
    args = plain(tmp_path, **changes)
    again = TROLLConfig(**{name: value for name, value in args.to_dict().items() if name != left_out})
    assert again.to_dict() == args.to_dict()
    for name in ("kl_bound", "tail", "updates_per_generation", "steps_per_generation", "advantage_estimator"):
        assert getattr(again, name) == getattr(args, name)


# ------------------------------------------------------------------ what is said at the start


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("troll") and record.levelno >= logging.WARNING
    ]


@pytest.mark.parametrize("trust_region", ["troll", "clip"])
@pytest.mark.parametrize(
    "schedule",
    [
        {"updates_per_generation": 1},
        {"updates_per_generation": 1, "gradient_accumulation_steps": 2},
        {"updates_per_generation": None, "steps_per_generation": 1, "gradient_accumulation_steps": 2},
    ],
)
def test_a_schedule_on_which_nothing_can_act_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trust_region: str, schedule: dict[str, int]
) -> None:
    run = trainer(tmp_path, trust_region=trust_region, max_steps=2, max_completion_length=2, **schedule)
    run.train()
    (message,) = warnings_of(caplog)
    assert "has no effect on this schedule" in message
    assert f"gradient_accumulation_steps={run.args.gradient_accumulation_steps}" in message
    assert f"trust_region={trust_region!r} has no effect" in message
    assert "Set updates_per_generation=8." in message


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trust_region": "none", "updates_per_generation": 1},
        {"trust_region": "clip", "epsilon": 0.3, "epsilon_high": 0.4},
        {"trust_region": "none", "measure_kl": True},
    ],
)
def test_a_schedule_on_which_everything_acts_needs_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    trainer(tmp_path, **changes)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("changes", [{"epsilon": 0.3}, {"epsilon_high": 0.28}])
def test_a_clip_without_effect_is_said_once_and_has_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, float]
) -> None:
    run = trainer(tmp_path, kl_bound=0.07, **changes)
    (message,) = warnings_of(caplog)
    assert f"epsilon={changes.get('epsilon', 0.2)} and epsilon_high={changes.get('epsilon_high')}" in message
    assert "have no effect" in message
    assert "kl_bound=0.07" in message
    assert run.epsilon_low == run.epsilon_high == math.inf


@pytest.mark.parametrize(("trust_region", "expected"), [("clip", (0.1, 0.3)), ("none", (math.inf, math.inf))])
def test_epsilon_is_TRLs_with_clip_and_infinite_with_none(
    tmp_path: Path, trust_region: str, expected: tuple[float, float]
) -> None:
    run = trainer(tmp_path, trust_region=trust_region, epsilon=0.1, epsilon_high=0.3)
    assert (run.epsilon_low, run.epsilon_high) == expected


NEVER = "warmup_steps={} is not below max_steps=4: the learning rate never reaches 0.01"
NO_WARMUP = "warmup_steps={} has no effect with lr_scheduler_type='{}': the first update already has learning rate 0.01"


@pytest.mark.parametrize(
    ("warmup", "scheduler", "expected"),
    [
        *((4, scheduler, NEVER.format(4)) for scheduler in ("linear", "cosine", "constant_with_warmup")),
        (9, "linear", NEVER.format(9)),
        *((3, scheduler, None) for scheduler in ("linear", "constant_with_warmup")),
        *((0, scheduler, None) for scheduler in ("linear", "constant", "constant_with_warmup")),
        *((warmup, "constant", NO_WARMUP.format(warmup, "constant")) for warmup in (0.5, 3, 9)),
        (3, "reduce_lr_on_plateau", NO_WARMUP.format(3, "reduce_lr_on_plateau")),
    ],
)
def test_a_warmup_that_never_ends_or_has_no_effect_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, warmup: float, scheduler: str, expected: str | None
) -> None:
    plateau = {"eval_strategy": "steps", "eval_steps": 2} if scheduler == "reduce_lr_on_plateau" else {}
    trainer(tmp_path, warmup_steps=warmup, max_steps=4, lr_scheduler_type=scheduler, eval_dataset=prompts(), **plateau)
    found = [message for message in warnings_of(caplog) if "warmup_steps" in message]
    assert len(found) == (expected is not None)
    assert all(str(expected) in message for message in found)


@pytest.mark.parametrize(("scheduler", "first"), [("constant", 0.01), ("constant_with_warmup", 0.0)])
def test_the_warning_agrees_with_transformers(tmp_path: Path, scheduler: str, first: float) -> None:
    run = trainer(tmp_path, warmup_steps=2, max_steps=4, lr_scheduler_type=scheduler)
    run.create_optimizer_and_scheduler(4)
    assert run.lr_scheduler.get_last_lr() == [first] * len(run.optimizer.param_groups)


def test_a_warm_up_without_effect_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path, warmup_steps=2, max_steps=4, lr_scheduler_type="constant")
    assert ["has no effect with lr_scheduler_type='constant'" in message for message in warnings_of(caplog)] == [True]


# ------------------------------------------------------------------ what is checked at the start


LIKELY = 'Rename the column with the prompts, for example dataset.rename_column("{}", "prompt")'


@pytest.mark.parametrize(
    ("columns", "fix"),
    [
        (["answer", "question"], LIKELY.format("question")),
        (["id", "problem"], LIKELY.format("problem")),
        (["id", "answer"], "Add a column 'prompt', with a string or a list of messages per row"),
    ],
)
@pytest.mark.parametrize("which", ["train_dataset", "eval_dataset", "several"])
def test_a_dataset_without_prompts_is_refused_before_the_model_is_loaded(
    tmp_path: Path, columns: list[str], fix: str, which: str
) -> None:
    data = Dataset.from_dict({name: ["x"] * 64 for name in columns})
    given = {"train_dataset": prompts(), **({"eval_dataset": {"a": data}} if which == "several" else {which: data})}
    named = "eval_dataset['a']" if which == "several" else which
    with pytest.raises(InputError, match=re.escape(f"{named} has no column 'prompt', its columns are")) as refusal:
        TROLLTrainer("there/is-no-such-model", lower_case, config(tmp_path), **given)
    assert refusal.value.fix == fix
    assert ", ".join(map(repr, columns)) in refusal.value.problem


ROWS = [{"prompt": "a"}]
TYPE = "must be a Dataset or an IterableDataset of the library datasets, got a"


@pytest.mark.parametrize(
    ("given", "problem", "fix"),
    [
        ({}, "train_dataset is missing", "Pass a datasets.Dataset with a column 'prompt'"),
        ({"train_dataset": None}, "train_dataset is missing", "Pass a datasets.Dataset with a column 'prompt'"),
        ({"train_dataset": ROWS}, f"train_dataset {TYPE} list", "Convert it with datasets.Dataset.from_list(…)"),
        ({"train_dataset": []}, f"train_dataset {TYPE} list", "For example datasets.Dataset.from_list("),
        ({"train_dataset": "gsm8k"}, f"train_dataset {TYPE} str", "datasets.load_dataset('gsm8k', split='train')"),
        ({"train_dataset": {"train": ROWS}}, f"train_dataset {TYPE} dict", "Pass one of its parts: 'train'"),
        ({"eval_dataset": ROWS}, f"eval_dataset {TYPE} list", "Convert it with"),
        ({"eval_dataset": {"a": ROWS}}, f"eval_dataset['a'] {TYPE} list", "Convert it with"),
    ],
)
def test_what_is_no_dataset_is_refused_before_the_model_is_loaded(
    tmp_path: Path, given: dict[str, Any], problem: str, fix: str
) -> None:
    if "eval_dataset" in given:
        given = {"train_dataset": prompts(), **given}
    with pytest.raises(InputError) as refusal:
        TROLLTrainer("there/is-no-such-model", lower_case, config(tmp_path), **given)
    assert refusal.value.problem == problem
    assert fix in refusal.value.fix


def test_an_environment_may_own_the_prompts() -> None:
    check_datasets("model", lower_case, environment_factory=object)


def test_a_data_set_smaller_than_a_rollout_is_refused(tmp_path: Path) -> None:
    """TRL drops what does not fill a rollout, and would end before its first step."""
    with pytest.raises(InputError, match="train_dataset has 7 prompts, fewer than the 8 of one rollout") as refusal:
        trainer(tmp_path, train_dataset=prompts(7))
    assert "generation_batch_size=32" in refusal.value.problem
    assert "num_generations=4" in refusal.value.problem
    assert "fewer updates_per_generation" in refusal.value.fix
    run = trainer(tmp_path, train_dataset=prompts(8), max_steps=1, max_completion_length=2)
    run.train()
    assert run.state.global_step == 1


def test_a_data_set_of_unknown_length_is_taken(tmp_path: Path) -> None:
    run = trainer(tmp_path, train_dataset=prompts(8).to_iterable_dataset(), max_steps=1, max_completion_length=2)
    run.train()
    assert run.state.global_step == 1


def with_dropout(**rates: float) -> torch.nn.Module:
    torch.manual_seed(0)
    text = tiny_models._text(tiny_models.tokenizer(), **rates)
    return transformers.PhiForCausalLM(transformers.PhiConfig(**text))


def test_dropout_is_switched_off_by_default_and_the_policy_is_itself_again(tmp_path: Path) -> None:
    model = with_dropout(resid_pdrop=0.5, embd_pdrop=0.5)
    rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert max(rates) == 0.5
    run = trainer(tmp_path, model=model, max_steps=1)
    assert not any(module.p for module in run.model.modules() if isinstance(module, torch.nn.Dropout))
    run.train()
    assert logged(run, "troll/kl_before/max")[0] < 1e-9


@pytest.mark.parametrize("rates", [{"resid_pdrop": 0.25}, {"embd_pdrop": 0.25}, {"attention_dropout": 0.25}])
def test_dropout_that_stays_on_is_refused(tmp_path: Path, rates: dict[str, float]) -> None:
    with pytest.raises(InputError, match=r"the model has dropout \(.*=0\.25\)") as refusal:
        trainer(tmp_path, model=with_dropout(**rates), disable_dropout=False)
    assert "scored twice" in refusal.value.problem
    assert "disable_dropout=True" in refusal.value.fix


def test_dropout_inside_attention_is_none_that_TRL_can_switch_off_and_is_refused_by_default(tmp_path: Path) -> None:
    model = tiny_models.build("dense", attention_dropout=0.1)[0]
    with pytest.raises(InputError, match=r"layers\.0\.self_attn\.attention_dropout=0\.1") as refusal:
        trainer(tmp_path, model=model)
    assert "to 0.0 in the configuration of the model" in refusal.value.fix


@pytest.mark.parametrize("trust_region", ["clip", "none"])
def test_dropout_is_left_to_TRL_without_a_projection(tmp_path: Path, trust_region: str) -> None:
    run = trainer(tmp_path, model=with_dropout(resid_pdrop=0.25), disable_dropout=False, trust_region=trust_region)
    assert max(module.p for module in run.model.modules() if isinstance(module, torch.nn.Dropout)) == 0.25


def test_a_model_without_dropout_needs_nothing_switched_off(tmp_path: Path) -> None:
    run = trainer(tmp_path, model=with_dropout(), disable_dropout=False)
    assert run.args.disable_dropout is False


def test_a_configuration_of_TRL_is_refused_with_the_one_to_use(tmp_path: Path) -> None:
    model, processing = tiny_models.build("dense")
    args = GRPOConfig(str(tmp_path), **DEFAULTS)
    with pytest.raises(InputError, match="args must be a TROLLConfig, got a GRPOConfig") as refusal:
        TROLLTrainer(model, lower_case, args, prompts(), processing_class=processing)
    assert refusal.value.fix == "Use TROLLConfig(...)"


@pytest.mark.parametrize("as_name", [True, False], ids=["a name", "a model"])
def test_without_args_the_defaults_are_taken_and_the_folder_is_called_after_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_name: bool
) -> None:
    """The default of TRL is bf16 on an accelerator; here it is told that there is none."""
    monkeypatch.setattr(trainer_module, "TROLLConfig", functools.partial(TROLLConfig, use_cpu=True, bf16=False))
    monkeypatch.chdir(tmp_path)
    name = tiny_models.save("dense", tmp_path / "makers" / "tiny")
    model, processing = tiny_models.build("dense")
    model.config._name_or_path = "makers/tiny"
    run = TROLLTrainer(name if as_name else model, lower_case, train_dataset=prompts(), processing_class=processing)
    assert isinstance(run.args, TROLLConfig)
    assert run.args.output_dir == "tiny-TROLL"
    assert (run.args.trust_region, run.args.kl_bound, run.args.updates_per_generation) == ("troll", 0.2, 8)


def test_args_and_data_may_be_passed_by_position_as_to_TRL(tmp_path: Path) -> None:
    model, processing = tiny_models.build("dense")
    data, held_out = prompts(), prompts(8)
    run = TROLLTrainer(model, lower_case, config(tmp_path), data, held_out, processing)
    assert run.train_dataset is data
    assert run.eval_dataset is held_out
    assert run.args.updates_per_generation == 4
