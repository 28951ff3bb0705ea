"""The parts of an estimate against closed formulas, and against what a real model, cache and trainer hold."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from troll import sparsify
from troll.errors import InputError
from troll.lab.models import ModelShape
from troll.lab.training.estimate import ResourceEstimate, Speed, estimate
from troll.policy import PackedPolicy
from troll.trl import TROLLConfig, TROLLTrainer

CPU = torch.device("cpu")
V, H, FFN, LAYERS, KEYS = 64, 32, 80, 3, 16
SPEED = Speed(flops=1e9, bandwidth=1e9, operation=1e-6)
FREE = float("inf")


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return save(tmp_path / "model", tie_word_embeddings=request.param)


@pytest.fixture
def tied(tmp_path: Path) -> str:
    return save(tmp_path / "model")


def save(folder: Path, **changes: Any) -> str:
    options = {
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    LlamaForCausalLM(LlamaConfig(**{**options, **changes})).save_pretrained(folder)
    return str(folder)


def settings(**changes: Any) -> TROLLConfig:
    options = {
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "updates_per_generation": 4,
        "gradient_checkpointing": False,
        "max_steps": 10,
        "report_to": "none",
    }
    return TROLLConfig("unused", **{**options, **changes})


def of(path: str, prompt: float = 10, speed: Speed = SPEED, **changes: Any) -> ResourceEstimate:
    own = {name: changes.pop(name) for name in ("prompts", "eval_size", "peft_config") if name in changes}
    return estimate(settings(**changes), path, prompt, CPU, speed=speed, **own)


def test_the_shape_is_that_of_the_model(path: str) -> None:
    shape = ModelShape.of(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    assert shape.parameters == shape.trainable == sum(p.numel() for p in model.parameters())
    assert shape.body == shape.parameters - sum(p.numel() for p in {id(p): p for p in ends}.values())
    assert (shape.vocabulary, shape.hidden, shape.inner, shape.layers, shape.keys) == (V, H, FFN, LAYERS, KEYS)
    assert not shape.experts


def test_an_adapter_has_few_weights_to_train(tied: str) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    real = get_peft_model(AutoModelForCausalLM.from_pretrained(tied), config)
    shape = ModelShape.of(tied, config)
    assert (shape.trainable, shape.parameters) == real.get_nb_trainable_parameters()
    assert shape.body == ModelShape.of(tied).body
    memory = of(tied, peft_config=config, beta=0.1).memory
    assert (memory["gradients"], memory["optimizer"]) == (4 * shape.trainable, 8 * shape.trainable)
    assert memory["reference model"] == 0


@pytest.mark.parametrize("kind", ["moe", "vision"])
def test_other_kinds_of_models(kind: str, tmp_path: Path) -> None:
    model, _ = tiny_models.build(kind)
    tiny_models.save(kind, tmp_path)
    shape = ModelShape.of(str(tmp_path))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.experts == (kind == "moe")


def test_weights_gradients_and_optimizer(tied: str) -> None:
    n = ModelShape.of(tied).parameters
    memory = of(tied).memory
    assert (memory["parameters"], memory["gradients"], memory["optimizer"]) == (4 * n, 4 * n, 8 * n)
    assert memory["reference model"] == memory["vLLM"] == memory["parameters in half precision"] == 0
    assert of(tied, beta=0.1).memory["reference model"] == 4 * n
    for optimizer, expected in (("adamw_8bit", 2 * n), ("sgd", 0), ("adafactor", 0), ("lion_32bit", 4 * n)):
        assert of(tied, optim=optimizer).memory["optimizer"] == expected
    half = of(tied, model_init_kwargs={"dtype": "bfloat16"}).memory
    assert (half["parameters"], half["gradients"], half["optimizer"]) == (2 * n, 2 * n, 4 * n)
    mixed = of(tied, bf16=True).memory
    assert (mixed["parameters"], mixed["parameters in half precision"]) == (4 * n, 2 * n)


def test_the_activations_are_those_autograd_saves(tied: str) -> None:
    model = LlamaForCausalLM.from_pretrained(tied)
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    saved: dict[int, Any] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.model(torch.randint(V, (8, 16)))
    real = sum(x.untyped_storage().nbytes() for x in saved.values())
    assert of(tied).memory["activations"] == pytest.approx(real, rel=0.03)


def test_checkpointing_keeps_one_layer(tied: str) -> None:
    shape = ModelShape.of(tied)
    tokens = 8 * (10 + 6)
    expected = 4 * tokens * (LAYERS * H + shape.activations + 2 * H)
    assert of(tied, gradient_checkpointing=True).memory["activations"] == expected
    assert expected < of(tied).memory["activations"]


def test_the_cache_is_that_of_generation(tied: str) -> None:
    model = LlamaForCausalLM.from_pretrained(tied)
    with torch.no_grad():
        cache = model(torch.randint(V, (32, 16)), use_cache=True).past_key_values
    real = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    assert of(tied).memory["key-value cache"] == real
    assert of(tied, updates_per_generation=8).memory["key-value cache"] == 2 * real


def test_the_old_policy_is_at_most_what_is_packed(tied: str) -> None:
    packed = PackedPolicy.of(sparsify(torch.zeros(32, 6, V), torch.zeros(32, 6, dtype=torch.long), max_support=16))
    tensors = (packed.counts, packed.token_ids, packed.log_probs, packed.log_tail)
    kept = of(tied, max_support=16).memory["old policy of a rollout"]
    assert kept == sum(x.nbytes for x in tensors)
    assert of(tied, trust_region="clip").memory["old policy of a rollout"] == 0
    assert of(tied, trust_region="clip", measure_kl=True, max_support=16).memory["old policy of a rollout"] == kept


def test_the_fullest_moment_is_learning_or_generating(tied: str) -> None:
    learning = ("gradients", "activations", "logits and head")
    generating = ("key-value cache", "generation buffers")
    for changes, out in (({"updates_per_generation": 1}, generating), ({"updates_per_generation": 64}, learning)):
        found = of(tied, **changes)
        assert found.most == sum(x for name, x in found.memory.items() if name not in out)
        assert found.fits
        assert "DOES NOT FIT" not in str(found)


def test_what_does_not_fit_is_said(tied: str) -> None:
    found = of(tied, prompt=1e12)
    assert not found.fits
    assert "DOES NOT FIT" in str(found)


def test_time_is_operations_over_their_rate(tied: str) -> None:
    """With memory and launches for nothing, only the products count."""
    shape = ModelShape.of(tied)
    speed = Speed(flops=1e6, bandwidth=FREE, operation=0)
    parts = of(tied, speed=speed).update
    per_token = 2 * shape.body + 2 * 16 * H * LAYERS
    head = 2 * H * V
    assert parts["learn"] == pytest.approx((3 * 8 * 16 * per_token + 4 * 8 * 6 * head) / 1e6)
    assert parts["score"] == pytest.approx((32 * 16 * per_token + 32 * 6 * head) / 1e6 / 4)
    prefill = 32 * 10 * (2 * shape.body + 2 * 10 * H * LAYERS)
    assert parts["generate"] == pytest.approx((prefill + 6 * 32 * (2 * shape.body + head)) / 1e6 / 4)
    assert parts["optimizer"] == 0
    again = of(tied, speed=speed, gradient_checkpointing=True).update
    assert again["learn"] - parts["learn"] == pytest.approx(8 * 16 * per_token / 1e6)
    twice = of(tied, speed=speed, gradient_accumulation_steps=2).update
    assert twice["learn"] == pytest.approx(2 * parts["learn"])
    assert twice["generate"] == pytest.approx(2 * parts["generate"])
    assert of(tied, speed=speed, trust_region="clip", updates_per_generation=1).update["score"] == 0
    assert of(tied, speed=speed, beta=0.1).update["score"] == pytest.approx(2 * parts["score"])


def test_reading_the_weights_takes_its_time(tied: str) -> None:
    n = ModelShape.of(tied).parameters
    parts = of(
        tied, prompt=0, speed=Speed(flops=FREE, bandwidth=1e6, operation=0), per_device_train_batch_size=4
    ).update
    assert parts["optimizer"] == pytest.approx(12 * 4 * n / 1e6)
    step = 4 * n + 16 * (6 * LAYERS * 2 * KEYS * 4 + 40 * V)
    assert parts["generate"] == pytest.approx(6 * step / 1e6 / 4)
    launches = of(tied, speed=Speed(flops=FREE, bandwidth=FREE, operation=1e-3)).update
    assert launches["learn"] == pytest.approx(3 * LAYERS * 100 * 1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_train_epochs": 2.5},
        {"gradient_accumulation_steps": 2},
        {"num_iterations": 2, "updates_per_generation": None, "steps_per_generation": 2},
        {"max_steps": 7},
    ],
)
def test_the_updates_are_those_the_trainer_makes(changes: dict[str, Any], tied: str, tmp_path: Path) -> None:
    model, tokenizer = tiny_models.build("dense")
    options = {"max_steps": -1, "num_train_epochs": 1, "max_completion_length": 1, "save_strategy": "no", **changes}
    args = settings(disable_tqdm=True, logging_strategy="no", **options)
    args.output_dir = str(tmp_path)
    trainer = TROLLTrainer(
        model=model,
        args=args,
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 35}),
        processing_class=tokenizer,
    )
    trainer.train()
    assert of(tied, prompts=35, **options).updates == trainer.state.global_step


def test_the_run_is_its_updates_and_evaluations(tied: str) -> None:
    found = of(tied)
    assert found.updates == 10
    assert found.evaluation == 0
    assert found.total == pytest.approx(10 * found.per_update)
    unknown = of(tied, max_steps=-1)
    assert (unknown.updates, unknown.total) == (None, None)
    assert "the run" not in str(unknown)
    evaluated = {"eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 8, "num_generations_eval": 1}
    one = of(tied, eval_size=8, **evaluated).evaluation / 2  # after 4 and 8 of 10
    assert of(tied, eval_size=24, eval_on_start=True, **evaluated).evaluation == pytest.approx(9 * one)
    assert of(tied, eval_size=8, **{**evaluated, "eval_steps": 0.5}).evaluation == pytest.approx(2 * one)
    assert of(tied, **evaluated).evaluation == 0


def test_what_is_printed(tied: str) -> None:
    lines = str(of(tied, prompt=12)).splitlines()
    headings = [line for line in lines if line and not line.startswith(" ")]
    assert headings == ["Estimated memory", "Estimated time", "Assumptions"]
    text = "\n".join(" ".join(line.split()) for line in lines)
    found = of(tied, prompt=12)
    assert f"parameters {4 * ModelShape.of(tied).parameters / 1e6:.1f} MB" in text
    assert f"{ModelShape.of(tied).parameters:,} parameters in fp32" in text
    assert "10 updates; between" in text
    assert "prompts of 12 tokens, completions of 6 tokens, the maximum" in text
    assert "1 GFLOP/s and 1 GB/s, measured just now" in text
    assert "vLLM" not in text
    assert found.device == "cpu"


def test_durations_are_told_in_units_of_people(tied: str) -> None:
    def run(flops: float) -> Iterator[str]:
        for line in str(of(tied, speed=Speed(flops, FREE, 0))).splitlines():
            if line.strip().startswith("the run"):
                yield " ".join(line.split()[2:4])

    seconds = of(tied, speed=Speed(1e6, FREE, 0)).total
    assert seconds is not None
    work = seconds * 1e6
    assert [next(run(work / t)) for t in (1.24, 42, 600, 7200)] == ["1.2 s", "42 s", "10 min", "2.0 h"]


def test_the_speed_is_measured() -> None:
    speed = Speed.measure(CPU, torch.float32)
    assert 1e8 < speed.flops < 1e15
    assert 1e8 < speed.bandwidth < 1e13
    assert 1e-8 < speed.operation < 1e-3


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no model folder"):
        of(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InputError, match=r"no model\.safetensors"):
        of(str(tmp_path))
