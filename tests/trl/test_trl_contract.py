"""What the adapter relies on in TRL: names, signatures, the function inside the fused head, and what it computes.

The pin is ``trl>=1.16,<1.17``. When it is raised, these tests say what has moved; none of it is public.
"""

from __future__ import annotations

import ast
import inspect
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
import transformers
import trl.trainer.utils as trl_utils
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.kernels import ChunkedLogProbFunction
from trl_cases import stock_trainer, trainer

from troll.trl import TROLLTrainer
from troll.trl.passes import Forward, OldPolicyRecorder, ProjectedScorer, Scorer, TokenScores, _rows

HEAD_PARAMETERS = [
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
]


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


# ------------------------------------------------------------------ names and signatures

WRAPPED = {
    "_get_per_token_logps_and_entropies": ["self", "model", "input_ids", "attention_mask", "logits_to_keep"],
    "_generate_and_score_completions": ["self", "inputs"],
    "_compute_loss": ["self", "model", "inputs"],
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "_save_optimizer_and_scheduler": ["self", "output_dir"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "_get_train_sampler": ["self", "dataset"],
    "log": ["self", "logs"],
    "train": ["self", "resume_from_checkpoint"],
    "_finalize_training": ["self", "trial", "num_train_samples", "start_time"],
    "_generate": ["self", "prompts"],
    "_generate_single_turn": [
        "self",
        "prompt_ids",
        "images",
        "multimodal_fields",
        "num_generations",
        "has_tool_images",
    ],
    "_prepare_inputs": ["self", "generation_batch"],
    "compute_loss": ["self", "model", "inputs"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "_clip_grad_norm": ["self", "model"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
    "_get_output_dir": ["self", "trial"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_save_scaler": ["self", "output_dir"],
    "_save_rng_state": ["self", "output_dir"],
    "_load_rng_state": ["self", "checkpoint"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_issue_warnings_after_load": ["self", "load_result"],
    "_push_from_checkpoint": ["self", "checkpoint_folder"],
    "_run_epoch": ["self", "model", "epoch"],
    "__init__": ["self", "model", "reward_funcs", "args"],
}
PASSED_ON = (  # with *rest and **named of ours
    *("_get_per_token_logps_and_entropies", "log", "train", "compute_loss", "_run_epoch", "__init__"),
)
OURS = [kind for kind in TROLLTrainer.__mro__ if kind.__module__.startswith("troll.")]
STATE = {  # attributes that are not methods
    *(
        "_pass",
        "_rewards",
        "_sampler",
        "_staged",
        "_seals",
        "_to_push",
        "_resumed",
        "_renamed",
        "_fingerprint",
        "_changed",
    ),
    *("_makes_optimizer", "_update", "_reported_faults", "guards", "region"),
}


@pytest.mark.parametrize("method", WRAPPED)
def test_a_wrapped_method_of_TRL_takes_what_we_pass_and_ours_takes_what_TRL_passes(method: str) -> None:
    theirs, ours = getattr(GRPOTrainer, method), getattr(TROLLTrainer, method)
    assert ours is not theirs
    known = WRAPPED[method]
    assert parameters(theirs)[: len(known)] == known
    if method not in PASSED_ON:
        assert parameters(theirs) == known
    everything = dict.fromkeys(parameters(theirs))
    inspect.signature(ours).bind(**everything)
    inspect.signature(ours).bind(*everything.values())


def test_what_we_do_not_wrap_has_a_name_that_TRL_does_not_use() -> None:
    named = {"_tag_names", "_name", "_paper"}  # what TRL writes into a model card
    ours = {name for kind in OURS for name in vars(kind) if not name.startswith("__")} | STATE
    assert {name for name in ours if hasattr(GRPOTrainer, name)} == {*WRAPPED, *named} - {"__init__"}


class KeepMetrics(TrainerCallback):
    """Looks at the metrics before they are logged and dropped."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.trainer: Any = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.names |= set(self.trainer._metrics["train"])


def test_every_attribute_our_trainer_reads_is_one_of_TRLs_trainer_and_means_what_we_take_it_for(
    tmp_path: Path,
) -> None:
    stock = stock_trainer(tmp_path, max_steps=1, gradient_accumulation_steps=2, epsilon=0.1, epsilon_high=0.3)
    seen = KeepMetrics()
    seen.trainer = stock
    stock.add_callback(seen)
    stock.train()
    codes = [ast.parse(inspect.getsource(kind)) for kind in OURS]
    read = {
        node.attr
        for code in codes
        for node in ast.walk(code)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    known = {"epsilon_low", "epsilon_high", "_metrics", "_logs", "_buffered_inputs", "_step", "reward_weights"}
    assert known | {"current_gradient_accumulation_steps", "num_generations_eval"} <= read  # the source is read rightly
    own = {name for kind in OURS for name in vars(kind)} - set(WRAPPED) | STATE
    assert {name for name in read - own if not hasattr(stock, name)} == set()
    assert not STATE & vars(stock).keys()

    assert (stock.epsilon_low, stock.epsilon_high) == (0.1, 0.3)
    assert stock._step == 2  # passes, not updates
    assert stock.current_gradient_accumulation_steps == 2
    assert len(stock._buffered_inputs) == stock.args.steps_per_generation == 4
    masks = torch.cat([batch["completion_mask"] for batch in stock._buffered_inputs])
    for batch in stock._buffered_inputs:
        assert batch["num_items_in_batch"] == masks.sum()  # of the rollout, not of the batch
        assert batch["old_per_token_logps"].shape == batch["completion_ids"].shape == batch["completion_mask"].shape
        assert batch["advantages"].shape == (8,)
    advantages = torch.cat([batch["advantages"] for batch in stock._buffered_inputs])
    assert sorted(stock._logs["advantages"]) == sorted(advantages.tolist())  # float32, in exact agreement
    assert stock.reward_func_names == ["lower_case"]
    assert stock.reward_weights.tolist() == [1.0]
    assert {name for name in seen.names if name.startswith("clip_ratio/")} >= {"clip_ratio/region_mean"}


def test_our_function_takes_what_the_function_of_TRLs_fused_head_takes_in_the_same_order() -> None:
    assert parameters(ChunkedLogProbFunction.forward) == ["ctx", *HEAD_PARAMETERS]
    assert trl_utils._ChunkedLogProbFunction is ChunkedLogProbFunction  # the name TRL's forward looks up
    seen: list[list[str]] = []

    class Looks(FakeModel):
        def __call__(self, **inputs: Any) -> Any:
            seen.append(parameters(trl_utils._ChunkedLogProbFunction.apply))
            return super().__call__(**inputs)

    Scorer(Looks(), Halves(), 3)(**fake_inputs())
    assert seen == [HEAD_PARAMETERS]


def test_TRLs_forward_hands_its_head_what_we_read_once_per_forward_and_we_may_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = stock_trainer(tmp_path, temperature=0.7)
    calls: list[dict[str, Any]] = []

    def watch(*arguments: Any) -> Any:
        calls.append(dict(zip(HEAD_PARAMETERS, arguments, strict=True)))
        return ChunkedLogProbFunction.apply(*arguments)

    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", SimpleNamespace(apply=watch))
    ids, mask, T = sequences()
    result = stock._get_per_token_logps_and_entropies(stock.model, ids, mask, T, batch_size=3)
    assert len(result) == 3
    assert len(calls) == 2  # four sequences, three at a time
    for call, part, shown in zip(calls, (ids[:3], ids[3:]), (mask[:3], mask[3:]), strict=True):
        assert call["weight"] is stock.model.lm_head.weight
        assert (call["temperature"], call["logit_scale"], call["final_logit_softcapping"]) == (0.7, 1.0, None)
        assert set(call["outputs"]) == {"log_probs", "entropy"}
        assert len(call["hidden"]) == len(call["targets"]) == part[:, 1:].numel()  # off accelerators: all positions
        targets = call["targets"].view(len(part), -1)[:, -T:]
        assert torch.equal(targets, part[:, -T:] * shown[:, -T:])  # each row predicts its target, 0 without a label


# ------------------------------------------------------------------ the stand-in for the model


class Halves:
    """A pass whose scores say which token they belong to: half its id."""

    def __init__(self) -> None:
        self.forwards: list[Forward] = []

    def wants(self, model: Any) -> bool:
        return True

    def begin(self) -> None: ...

    def score(self, forward: Forward) -> TokenScores:
        self.forwards.append(forward)
        return TokenScores(forward.sampled / 2 + 0 * forward.hidden.sum(), -forward.sampled / 2)

    def finish(self, log_probs: Tensor) -> None: ...


class FakeModel:
    """As TRL's forward, on hidden states of ones, with its head used ``uses`` times."""

    def __init__(self, uses: int = 1, outputs: tuple[str, ...] = ("log_probs", "entropy"), extra_rows: int = 0) -> None:
        self.uses, self.outputs, self.extra_rows = uses, outputs, extra_rows
        self.inputs: dict[str, Any] = {}
        self.hidden = torch.ones(1, requires_grad=True)

    def __call__(self, **inputs: Any) -> Any:
        self.inputs = inputs
        labels = inputs["labels"][:, 1:]
        targets = torch.cat([labels.clamp(min=0).reshape(-1), labels.new_zeros(self.extra_rows)])
        hidden = self.hidden.expand(len(targets), 2)
        arguments = (hidden, torch.ones(9, 2), None, targets, 1.0, 8, None, 1.0, self.outputs)
        log_probs = entropy = torch.zeros(len(targets))
        for _ in range(self.uses):
            log_probs, entropy, *_ = trl_utils._ChunkedLogProbFunction.apply(*arguments)
        shape = labels.shape if not self.extra_rows else (1, -1)
        return trl_utils.FusedCausalLMOutput(log_probs=log_probs.view(shape), entropy=entropy.view(shape))


def fake_inputs() -> dict[str, Any]:
    """Two sequences of five, three of them completion, one of those padding."""
    labels = torch.tensor([[-100, -100, 4, 6, 8], [-100, -100, 2, 7, -100]])
    return {"input_ids": labels.clamp(min=0), "labels": labels, "fused_lm_head": True}


def test_the_model_receives_labels_and_fused_lm_head_and_its_rows_come_back_at_their_tokens() -> None:
    model, scoring = FakeModel(), Halves()
    inputs = fake_inputs()
    scorer = Scorer(model, scoring, 3)
    output = scorer(**inputs)
    assert model.inputs.keys() == inputs.keys()
    assert all(model.inputs[name] is value for name, value in inputs.items())
    assert output.log_probs.tolist() == [[2.0, 3.0, 4.0], [1.0, 3.5, 0.0]]
    assert output["entropy"].tolist() == [[-2.0, -3.0, -4.0], [-1.0, -3.5, 0.0]]
    scorer(**inputs)
    forwards = scoring.forwards
    assert [forward.sequences for forward in forwards] == [slice(0, 2), slice(2, 4)]
    assert forwards[0].labelled.tolist() == [[True, True, True], [True, True, False]]
    assert forwards[0].sampled.tolist() == [4, 6, 8, 2, 7]


@pytest.mark.parametrize("uses", [0, 2])
def test_a_forward_that_uses_its_head_never_or_twice_is_an_error_and_no_fallback(uses: int) -> None:
    with pytest.raises(RuntimeError, match=f"called its fused head {uses} times instead of once"):
        Scorer(FakeModel(uses), Halves(), 3)(**fake_inputs())
    assert trl_utils._ChunkedLogProbFunction is ChunkedLogProbFunction


def test_a_forward_that_asks_its_head_for_other_outputs_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="instead of log_probs and entropy"):
        Scorer(FakeModel(outputs=("log_probs",)), Halves(), 3)(**fake_inputs())
    assert trl_utils._ChunkedLogProbFunction is ChunkedLogProbFunction


def test_rows_that_do_not_fit_the_sequences_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="received 9 rows for 2 sequences of 3"):
        Scorer(FakeModel(extra_rows=1), Halves(), 3)(**fake_inputs())


def test_TRLs_function_is_in_its_place_before_and_after_a_forward_and_after_an_exception_in_it() -> None:
    class Fails(FakeModel):
        def __call__(self, **inputs: Any) -> Any:
            assert trl_utils._ChunkedLogProbFunction is not ChunkedLogProbFunction
            raise KeyError("out of memory, say")

    with pytest.raises(KeyError, match="out of memory"):
        Scorer(Fails(), Halves(), 3)(**fake_inputs())
    assert trl_utils._ChunkedLogProbFunction is ChunkedLogProbFunction
    Scorer(FakeModel(), Halves(), 3)(**fake_inputs())
    assert trl_utils._ChunkedLogProbFunction is ChunkedLogProbFunction


def test_the_trainer_scores_as_TRL_again_once_a_pass_has_failed(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    ids, mask, T = sequences()
    with pytest.raises(ZeroDivisionError), run._scored_by(Halves()):
        raise ZeroDivisionError
    result = run._get_per_token_logps_and_entropies(run.model, ids, mask, T)
    assert torch.equal(result[0], stock_scores(run, ids, mask, T)[0])


def test_an_output_that_a_wrapper_rounds_keeps_the_exact_value_and_its_gradient() -> None:
    """FSDP2 in mixed precision returns bf16: a log-ratio of 1e-3 would be lost."""

    class Weights(Halves):
        def score(self, forward: Forward) -> TokenScores:
            exact = forward.hidden[:, 0] * (1 + forward.sampled * 1e-4)
            return TokenScores(exact, exact)

    class Rounds(FakeModel):
        def __call__(self, **inputs: Any) -> Any:
            output = super().__call__(**inputs)
            return trl_utils.FusedCausalLMOutput(
                log_probs=output.log_probs.bfloat16(), entropy=output.entropy.bfloat16()
            )

    model = Rounds()
    inputs = fake_inputs()
    output = Scorer(model, Weights(), 3)(**inputs)
    tokens = inputs["labels"][:, -3:]
    expected = torch.where(tokens > 0, 1 + tokens * 1e-4, 0.0)
    assert (expected.bfloat16() != expected).sum() == 5
    assert torch.equal(output.log_probs, expected)
    assert torch.equal(output.entropy, expected)
    (gradient,) = torch.autograd.grad(output.log_probs.sum(), model.hidden)
    torch.testing.assert_close(gradient, expected.sum()[None], rtol=2**-8, atol=0)  # in bf16, as FSDP2 returns it


# ------------------------------------------------------------------ the rows of TRL's head


def rows(labelled: Tensor, total: int) -> list[int]:
    found = _rows(labelled, total)
    return list(range(total)) if found is None else found.tolist()  # None: all of them, in order


def test_rows_are_found_in_all_positions_in_labelled_tokens_alone_and_behind_virtual_tokens() -> None:
    labelled = torch.tensor([[True, True, False], [False, True, True]])
    assert rows(labelled, 2 * 3) == [0, 1, 4, 5]  # nothing but completions
    assert rows(labelled, 2 * 5) == [2, 3, 8, 9]  # two positions of prompt
    assert rows(labelled, 2 * 9) == [6, 7, 16, 17]  # and four virtual tokens in front of them
    assert rows(labelled, 4) == [0, 1, 2, 3]  # labelled tokens alone
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert rows(nothing, 0) == rows(nothing, 10) == []
    for total in (2, 5, 7, 11):
        with pytest.raises(RuntimeError, match=f"received {total} rows for 2 sequences of 3"):
            _rows(labelled, total)


# ------------------------------------------------------------------ log-probabilities and entropies are TRL's


def sequences(B: int = 4, P: int = 5, T: int = 6) -> tuple[Tensor, Tensor, int]:
    """Random tokens with padding on the left of a prompt, behind completions, and one completion all masked."""
    ids = torch.randint(7, 263, (B, P + T), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(B, P + T, dtype=torch.long)
    mask[0, :3] = 0
    mask[1, -2:] = 0
    mask[2, -T:] = 0
    return ids, mask, T


def stock_scores(run: TROLLTrainer, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    return GRPOTrainer._get_per_token_logps_and_entropies(run, run.model, *arguments, **named, compute_entropy=True)[:2]


def text(**changes: Any) -> dict[str, Any]:
    return tiny_models._text(tiny_models.tokenizer(), **changes)


def phi_with_a_bias() -> torch.nn.Module:
    model = transformers.PhiForCausalLM(transformers.PhiConfig(**text(tie_word_embeddings=False)))
    torch.nn.init.normal_(model.lm_head.bias)
    return model


def dense(**changes: Any) -> torch.nn.Module:
    return tiny_models.build("dense", **changes)[0]


# model, changes of the configuration of the trainer, what the head must be told
MODELS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "a tied head": (dense, {}, {"scale": 1.0, "softcap": None, "bias": None}),
    "an untied head": (lambda: dense(tie_word_embeddings=False), {}, {"scale": 1.0}),
    "a soft cap": (
        lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**text(final_logit_softcapping=2.0))),
        {},
        {"softcap": 2.0},
    ),
    "a logit scale": (
        lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**text(logit_scale=0.25))),
        {},
        {"scale": 0.25},
    ),
    "logits scaling": (
        lambda: transformers.GraniteForCausalLM(transformers.GraniteConfig(**text(logits_scaling=4.0))),
        {},
        {"scale": 0.25},
    ),
    "a bias": (phi_with_a_bias, {}, {}),
    "a temperature": (dense, {"temperature": 0.7}, {}),
    "a head in fp32": (
        lambda: dense(tie_word_embeddings=False).bfloat16(),
        {"cast_lm_head_to_fp32": True},
        {},
    ),
    "autocast to bf16": (dense, {"bf16": True}, {}),
    "a head in fp32 under autocast": (
        lambda: dense(tie_word_embeddings=False),
        {"cast_lm_head_to_fp32": True, "bf16": True},
        {},
    ),
    "weights in bf16": (lambda: dense().bfloat16(), {}, {}),
}


def measured(run: TROLLTrainer, score: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probabilities, entropies, and the gradient of a random combination of both at every parameter."""
    run.model.zero_grad()
    log_probs, entropy = score()[:2]
    weights = torch.randn(2, *log_probs.shape, generator=torch.Generator().manual_seed(1))
    (weights[0] * log_probs + 0.3 * weights[1] * entropy).sum().backward()
    grads = {name: p.grad.clone() for name, p in run.model.named_parameters() if p.requires_grad}
    return log_probs.detach(), entropy.detach(), grads


def assert_alike(ours: Any, stock: Any, half: bool) -> None:
    """Values to 3e-6: log-probabilities and entropies of up to 8 from fp32 sums over 263 tokens, in another order.

    Gradients to 2e-6 of a parameter's largest one. In bf16, two sums that differ in the order of their terms may be
    rounded to neighbouring numbers, so there the limit is the spacing of bf16 at the largest one: 2⁻⁷ of the power of
    two below it.
    """
    torch.testing.assert_close(ours[0], stock[0], rtol=0, atol=3e-6)
    torch.testing.assert_close(ours[1], stock[1], rtol=0, atol=3e-6)
    assert stock[0].abs().max() > 1
    assert stock[1].abs().max() > 1
    for name, expected in stock[2].items():
        largest = expected.abs().max()
        assert largest > 1e-2, f"{name} has no gradient to compare"
        spacing = torch.finfo(torch.bfloat16).eps * 2 ** largest.log2().floor()
        limit = spacing if half else 2e-6 * largest
        assert (ours[2][name] - expected).abs().max() <= limit, name


def drift(model: torch.nn.Module) -> None:
    """An update."""
    torch.manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn_like(p)


@pytest.mark.parametrize("compact", [False, True], ids=["all positions", "labelled tokens alone"])
@pytest.mark.parametrize("kind", MODELS)
def test_both_passes_score_as_TRL_does_in_value_and_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, compact: bool
) -> None:
    build, changes, told = MODELS[kind]
    torch.manual_seed(0)
    run = trainer(tmp_path, model=build(), kl_bound=math.inf, max_support=4, **changes)
    ids, mask, T = sequences()
    ours = {"compute_entropy": True}
    half = run.model.dtype == torch.bfloat16 or run.args.bf16
    stock = measured(run, lambda: stock_scores(run, ids, mask, T, batch_size=3))
    if compact:  # TRL's layout on accelerators; its function, which has a name of its own for this, stays on the CPU
        monkeypatch.setattr(trl_utils, "_use_triton", lambda device: True)

    record = Watched(run.model, run.args)

    def first() -> Any:
        with run._scored_by(record):
            return run._get_per_token_logps_and_entropies(run.model, ids, mask, T, batch_size=3, **ours)

    old = measured(run, first)
    assert_alike(old, stock, half)
    head = record.forwards[0].head
    assert {name: getattr(head, name) for name in told} == told
    assert (head.bias is not None) == (kind == "a bias")
    assert head.weight is run.model.get_output_embeddings().weight
    assert len(record.forwards[0].hidden) == int(mask[:3, -T:].sum())
    assert record.log_probs is not None
    assert torch.equal(record.log_probs, old[0])
    assert not old[0][mask[:, -T:] == 0].any()

    drift(run.model)
    stock = measured(run, lambda: stock_scores(run, ids, mask, T))
    assert (stock[0] - old[0]).abs().max() > 0.1  # the policy did move
    update = ProjectedScorer(record.policies, old[0], mask[:, -T:], run.args)

    def second() -> Any:
        with run._scored_by(update):
            return run._get_per_token_logps_and_entropies(run.model, ids, mask, T, **ours)

    assert_alike(measured(run, second), stock, half)


class Watched(OldPolicyRecorder):
    """Keeps what it was given."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.forwards: list[Forward] = []

    def score(self, forward: Forward) -> TokenScores:
        self.forwards.append(forward)
        return super().score(forward)


@pytest.mark.parametrize("kind", ["a soft cap", "a logit scale", "logits scaling", "a bias", "a temperature"])
def test_the_scores_are_those_of_the_logits_that_generation_samples_from(tmp_path: Path, kind: str) -> None:
    build, changes, _ = MODELS[kind]
    torch.manual_seed(0)
    run = trainer(tmp_path, model=build(), **changes)
    ids, mask, T = sequences()
    with torch.no_grad(), run._scored_by(OldPolicyRecorder(run.model, run.args)):
        log_probs, entropy, _ = run._get_per_token_logps_and_entropies(run.model, ids, mask, T, compute_entropy=True)
        logits = run.model(input_ids=ids, attention_mask=mask).logits[:, -T - 1 : -1] / run.temperature
    expected = logits.double().log_softmax(-1)
    counted = mask[:, -T:].bool()
    # fp32 logits of up to 6 round at 5e-7, and the sum over the vocabulary adds as much again.
    exact = expected.gather(-1, ids[:, -T:, None])[..., 0]
    torch.testing.assert_close(log_probs[counted].double(), exact[counted], rtol=0, atol=3e-6)
    exact = -(expected.exp() * expected).sum(-1)
    torch.testing.assert_close(entropy[counted].double(), exact[counted], rtol=0, atol=3e-6)


def test_virtual_tokens_of_prompt_tuning_in_front_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    tuned = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    run = trainer(tmp_path, peft_config=tuned, kl_bound=math.inf)
    ids, mask, T = sequences()
    stock = measured(run, lambda: stock_scores(run, ids, mask, T))
    for compact in (False, True):
        monkeypatch.setattr(trl_utils, "_use_triton", lambda device, compact=compact: compact)
        record = Watched(run.model, run.args)

        def score(record: OldPolicyRecorder = record) -> Any:
            with run._scored_by(record):
                return run._get_per_token_logps_and_entropies(run.model, ids, mask, T, compute_entropy=True)

        assert_alike(measured(run, score), stock, half=False)
        sampled = torch.stack([policy.unpack().sampled for policy in record.policies])
        assert torch.equal(sampled[mask[:, -T:] == 1], ids[:, -T:][mask[:, -T:] == 1])


def test_an_update_scored_in_pieces_is_an_error(tmp_path: Path) -> None:
    """The old policies are handed over for the whole batch: pieces would be held against those of others."""
    run = trainer(tmp_path)
    ids, mask, T = sequences()
    record = OldPolicyRecorder(run.model, run.args)
    with torch.no_grad(), run._scored_by(record):
        old = run._get_per_token_logps_and_entropies(run.model, ids, mask, T, batch_size=2)[0]
    step = ProjectedScorer(record.policies, old, mask[:, -T:], run.args)
    with run._scored_by(step), pytest.raises(RuntimeError, match=r"slice\(0, 2, None\) of an update of 4"):
        run._get_per_token_logps_and_entropies(run.model, ids, mask, T, batch_size=2)


@pytest.mark.parametrize("tail", ["bucket", "floor"])
@pytest.mark.parametrize("trust_region", ["troll", "none"])
def test_a_token_that_does_not_count_is_not_scored_and_gets_no_gradient(
    tmp_path: Path, tail: str, trust_region: str
) -> None:
    """A tool's: TRL labels it, and what it is given there is the old log-probability, a constant."""
    run = trainer(tmp_path, tail=tail, trust_region=trust_region, max_support=128)
    ids, mask, T = sequences()
    record = OldPolicyRecorder(run.model, run.args)
    with torch.no_grad(), run._scored_by(record):
        old = run._get_per_token_logps_and_entropies(run.model, ids, mask, T)[0]
    drift(run.model)
    counted = mask[:, -T:].bool()
    counted[:, 2] = False
    step = ProjectedScorer(record.policies, old, counted, run.args)
    with run._scored_by(step):
        log_probs, entropy, _ = run._get_per_token_logps_and_entropies(run.model, ids, mask, T, compute_entropy=True)
    assert torch.equal(log_probs[:, 2], old[:, 2])
    assert not entropy[:, 2].any()
    assert ((log_probs - old).abs() > 1e-3)[counted].float().mean() > 0.9
    assert torch.equal(step.stats[..., -1] > 0, counted)
    log_probs[:, 2].sum().backward()
    assert not any(p.grad.any() for p in run.model.parameters() if p.grad is not None)


def test_only_the_first_pass_of_the_policy_is_recorded_and_a_reference_model_is_scored_by_TRL(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    reference = dense(seed=1)
    trl_utils.add_fused_lm_head(reference, outputs=("log_probs", "entropy"))
    ids, mask, T = sequences()
    record = OldPolicyRecorder(run.model, run.args)
    with torch.no_grad(), run._scored_by(record):
        other = run._get_per_token_logps_and_entropies(reference, ids, mask, T)[0]
        assert record.policies == []
        first = run._get_per_token_logps_and_entropies(run.model, ids, mask, T)[0]
        policies = list(record.policies)
        drift(run.model)  # as a LoRA adapter that is switched off makes another model of the same object
        second = run._get_per_token_logps_and_entropies(run.model, ids, mask, T)[0]
        assert torch.equal(second, stock_scores(run, ids, mask, T)[0])
    assert record.policies == policies
    assert len(policies) == len(ids)
    assert record.of(first) == policies
    assert (first - other).abs().max() > 0.1
    for wrong in (second, first.clone()):
        with pytest.raises(RuntimeError, match="do not come from the first scoring pass"):
            record.of(wrong)
