"""The hydra group and what it refuses: verl builds the actor's configuration before it starts anything."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import HFModelConfig

import troll.verl as adapter
from troll.errors import InputError
from troll.objective import PRESETS, Preset
from troll.verl import config, engine
from troll.verl.loss import options_of

GROUP = "hydra.searchpath=[pkg://troll.verl.configs]"
MICRO = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.name=hf"]
LOSS = "actor_rollout_ref.actor.policy_loss"
VERL = Path(importlib.util.find_spec("verl").origin).parent  # type: ignore[union-attr, arg-type]


def composed(*overrides: str, name: str = "ppo_trainer", group: str = "troll") -> Any:
    with initialize_config_dir(str(VERL / "trainer" / "config"), version_base=None):
        return compose(name, [GROUP, f"+trust_region={group}", *MICRO, *overrides])


def actor(*overrides: str, **named: str) -> Any:
    return omega_conf_to_dataclass(composed(*overrides, **named).actor_rollout_ref.actor)


def test_the_group_sets_everything() -> None:
    whole = composed()
    model, made = whole.actor_rollout_ref.model, omega_conf_to_dataclass(whole.actor_rollout_ref.actor)
    assert (model.model_type, model.external_lib) == ("troll_lm", "troll.verl")
    assert isinstance(made.policy_loss, adapter.TrollPolicyLossConfig)
    assert isinstance(made.engine, adapter.TrollFSDPEngineConfig)
    assert made.policy_loss == adapter.TrollPolicyLossConfig(
        _target_=made.policy_loss._target_,
        rollout_correction=made.policy_loss.rollout_correction,
        run=made.policy_loss.run,
    )
    assert (made.engine.max_support, made.engine.tail_mass) == (64, 1e-5) == config.recorded(made.engine)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("trainer", "group"), [("ppo_trainer", "troll"), ("ppo_megatron_trainer", "troll_megatron")])
def test_the_yaml_has_the_presets_of_the_core(name: str, trainer: str, group: str) -> None:
    parallel = [] if group == "troll" else ["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"]
    made = actor(f"{LOSS}.preset={name}", *parallel, name=trainer, group=group)
    loss, (max_support, tail_mass) = made.policy_loss, config.recorded(made.engine)
    assert PRESETS[name] == Preset(loss.kl_bound, loss.regression_coef, loss.tail, max_support, tail_mass)  # type: ignore[arg-type]
    assert actor(*parallel, name=trainer, group=group).policy_loss.preset == "default"


def test_explicit_keys_win_over_the_preset() -> None:
    made = actor(f"{LOSS}.preset=paper", f"{LOSS}.kl_bound=0.3", "actor_rollout_ref.actor.fsdp_config.max_support=16")
    assert (made.policy_loss.kl_bound, made.policy_loss.tail, made.engine.max_support) == (0.3, "floor", 16)


def test_its_options_need_no_plus() -> None:
    made = actor(
        f"{LOSS}.kl_bound=0.02",
        f"{LOSS}.regression_coef=0.5",
        f"{LOSS}.tail=floor",
        f"{LOSS}.importance_sampling_level=sequence",
        "actor_rollout_ref.actor.fsdp_config.max_support=16",
        "actor_rollout_ref.actor.fsdp_config.tail_mass=1e-4",
        "actor_rollout_ref.actor.strategy=fsdp2",
    )
    loss = made.policy_loss
    assert (loss.kl_bound, loss.regression_coef, loss.tail, loss.importance_sampling_level) == (
        0.02,
        0.5,
        "floor",
        "sequence",
    )
    assert config.recorded(made.engine) == (16, 1e-4)
    assert actor(f"{LOSS}.kl_bound=inf").policy_loss.kl_bound == math.inf


def test_megatron_has_a_group_of_its_own() -> None:
    parallel = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    made = actor(
        parallel,
        "actor_rollout_ref.actor.megatron.max_support=32",
        name="ppo_megatron_trainer",
        group="troll_megatron",
    )
    assert isinstance(made.engine, adapter.TrollMcoreEngineConfig)
    assert config.recorded(made.engine) == (32, 1e-5)
    assert isinstance(made.policy_loss, adapter.TrollPolicyLossConfig)


def test_verls_own_engine_configuration_means_the_defaults() -> None:
    from verl.workers.config import FSDPEngineConfig

    assert config.recorded(FSDPEngineConfig()) == (64, 1e-5)


def test_verl_accepts_it() -> None:
    whole = composed("data.train_batch_size=256", "actor_rollout_ref.actor.ppo_mini_batch_size=32")
    whole.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu = 1
    validate_config(whole, use_reference_policy=False, use_critic=False)


REFUSED = {
    "trainer.use_v1=False": "trainer.use_v1=False: verl's old trainer does not pass the old policy on",
    "algorithm.rollout_correction.bypass_mode=True": "bypass_mode=True: the sampler would provide the old policy",
    "distillation.enabled=True": "distillation.enabled=True: distillation and the trust region need the same hook",
    "actor_rollout_ref.model.use_fused_kernels=True": "use_fused_kernels=True: verl's fused kernels compute no logits",
    "actor_rollout_ref.model.model_type=language_model": "which records the old policy, got model_type=language_model",
    f"{LOSS}.loss_mode=vanilla": "needs policy_loss.loss_mode=troll, got vanilla",
    f"{LOSS}.kl_bound=-1": "kl_bound",
    f"{LOSS}.kl_bound_schedule=projected": "policy_loss.kl_bound_schedule=projected is not supported",
    f"{LOSS}.preset=papers": "preset",
    f"{LOSS}.regression_coef=-0.1": "regression_coef",
    f"{LOSS}.tail=drop": "tail",
    f"{LOSS}.importance_sampling_level=word": "importance_sampling_level",
    "actor_rollout_ref.actor.fsdp_config.max_support=0": "max_support",
    "actor_rollout_ref.actor.fsdp_config.tail_mass=1.5": "tail_mass",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_cannot_work_ends_in_the_first_second(override: str) -> None:
    with pytest.raises(Exception, match="InputError") as refusal:
        actor(override)
    assert REFUSED[override] in str(refusal.value)


@pytest.mark.parametrize(
    ("batch", "mini", "epochs", "acts"), [(256, 32, 1, True), (32, 32, 1, False), (32, 32, 2, True), (16, 32, 1, False)]
)
def test_a_schedule_without_effect_is_warned_about(
    caplog: pytest.LogCaptureFixture, batch: int, mini: int, epochs: int, acts: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        actor(
            f"data.train_batch_size={batch}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}",
            f"actor_rollout_ref.actor.ppo_epochs={epochs}",
        )
    warned = [record.message for record in caplog.records if "The trust region has no effect" in record.message]
    assert bool(warned) is not acts


def test_the_loss_alone_refuses_to_train() -> None:
    """``loss_mode=troll`` with verl's own engine: nothing has made the ratios."""
    loss = core_algos.get_policy_loss_fn("troll")
    one = torch.zeros(1, 1)
    with pytest.raises(InputError, match="loss_mode=troll needs the engine troll_lm"):
        loss(one, one, one, one.bool())


def test_the_engine_alone_refuses_to_train() -> None:
    """``model_type=troll_lm`` with verl's own loss."""
    from verl.workers.utils.losses import ppo_loss

    with initialize_config_dir(str(VERL / "trainer" / "config"), version_base=None):
        vanilla = omega_conf_to_dataclass(compose("ppo_trainer", MICRO).actor_rollout_ref.actor)
    with pytest.raises(InputError, match=r"troll_lm needs policy_loss\.loss_mode=troll, got vanilla"):
        options_of(partial(ppo_loss, config=vanilla))
    with pytest.raises(InputError, match="supports verl's ppo_loss only"):
        options_of(ppo_loss)


def test_verl_finds_the_plugin() -> None:
    (found,) = (plugin for plugin in entry_points(group="verl.plugins") if plugin.name == "troll")
    assert found.load() is adapter


def test_rollout_servers_are_given_no_keys_they_do_not_know() -> None:
    """verl hands the configuration of the model to its servers, which refuse what they do not know."""
    model = OmegaConf.to_container(composed().actor_rollout_ref.model, resolve=True)
    known = set(HFModelConfig.__dataclass_fields__)
    with initialize_config_dir(str(VERL / "trainer" / "config"), version_base=None):
        stock = OmegaConf.to_container(compose("ppo_trainer", MICRO).actor_rollout_ref.model, resolve=True)
    assert set(model) - set(stock) == {"model_type"} <= known  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("modules", "has"),
    [
        ({"trl.experimental.ppo": True, "trl": False}, True),
        ({"trl.experimental.ppo": False, "trl": True}, True),
        ({"trl.experimental.ppo": False, "trl": False}, False),
        ({}, False),
    ],
)
def test_verl_looks_for_the_class_and_not_for_trl(
    monkeypatch: pytest.MonkeyPatch, modules: dict[str, bool], has: bool
) -> None:
    def imported(name: str) -> Any:
        if name not in modules:
            raise ImportError(name)
        return type("Module", (), {"AutoModelForCausalLMWithValueHead": None} if modules[name] else {})

    monkeypatch.setattr(engine, "import_module", imported)
    look: Callable[[], bool] = engine.has_value_head.__wrapped__
    assert look() is has


def test_verl_asks_us() -> None:
    from verl.models.transformers import monkey_patch

    assert monkey_patch.is_trl_available is engine.has_value_head
