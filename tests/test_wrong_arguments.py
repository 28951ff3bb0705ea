"""Every public function refuses a wrong type, shape, device or value of every argument with an ``InputError``.

The message names the argument. No mistake ends in an error of Python or PyTorch from inside. What a function can use,
such as NumPy numbers for numbers, it may accept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import troll
from troll import InputError, advantages, diagnostics

B, T, V, H = 2, 3, 7, 5


def policies() -> tuple[Tensor, Tensor, troll.SparsePolicy, troll.SparsePolicy]:
    generator = torch.Generator().manual_seed(0)
    logits, sampled = torch.randn(B, T, V, generator=generator), torch.randint(V, (B, T), generator=generator)
    old = troll.sparsify(logits, sampled, 4)
    return logits, sampled, old, troll.restrict(logits + 0.3 * torch.randn(B, T, V, generator=generator), old)


LOGITS, SAMPLED, OLD, PROPOSAL = policies()
MASK = torch.ones(B, T)
LOG_P = LOGITS.log_softmax(-1)
HEAD = troll.Head(torch.randn(V, H, generator=torch.Generator().manual_seed(1)), torch.zeros(V))
HIDDEN = torch.randn(B, T, H, generator=torch.Generator().manual_seed(2))
BATCH = {"proposal": PROPOSAL, "old": OLD, "loss_mask": MASK}
LOSS = BATCH | {"advantages": torch.ones(B), "importance_weights": torch.ones(B), "total": 6, "impl": "auto"}
LOSS |= {"importance_sampling_level": "token", "aggregation": "token_mean", "tail": "bucket", "on_invalid": "raise"}
TROLL = {"preset": "default", "kl_bound": 0.1, "regression_coef": 1.0, "max_lost_mass": 0.1}
SPARSIFY = {"sampled": SAMPLED, "max_support": 4, "tail_mass": 1e-3, "temperature": 1.0, "loss_mask": MASK}
REWARDS = {"rewards": torch.tensor([0.0, 1.0]), "group_size": 2}
TOKENS = {"token_rewards": torch.randn(B, T), "loss_mask": MASK, "gamma": 0.9}
SPECTRUM = {"kl": torch.rand(B, T), "loss_mask": MASK, "kl_bound": 0.1}


class Letters:
    """A tokenizer of the letters a and b."""

    all_special_ids = ()

    def __len__(self) -> int:
        return 2

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return ["ab".index(x) for x in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join("ab"[i] for i in ids)


def token_loss(hidden: Tensor, target: Any, loss: Any, **options: Any) -> Tensor:
    return HEAD.token_loss(hidden, target, loss, **options)


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sparsify": (troll.sparsify, {"logits": LOGITS, **SPARSIFY, "on_invalid": "raise", "impl": "auto"}),
    "restrict": (
        troll.restrict,
        {"logits": LOGITS, "old": OLD, "loss_mask": MASK, "on_invalid": "raise", "impl": "auto"},
    ),
    "SparsePolicy": (
        troll.SparsePolicy,
        {
            "token_ids": OLD.token_ids,
            "log_probs": OLD.log_probs,
            "log_tail": OLD.log_tail,
            "vocab_size": V,
            "temperature": 1.0,
            "made_by": "sparsify",
        },
    ),
    "Head": (troll.Head, {"weight": HEAD.weight, "bias": HEAD.bias, "scale": 1.0, "softcap": 30.0}),
    "Head.sparsify": (HEAD.sparsify, {"hidden": HIDDEN, **SPARSIFY}),
    "Head.restrict": (HEAD.restrict, {"hidden": HIDDEN, "old": OLD, "loss_mask": MASK}),
    "Head.token_loss": (
        token_loss,
        {
            "hidden": HIDDEN,
            "target": OLD,
            "loss": lambda scored, at: scored.policy.log_tail.sum(),
            "loss_mask": MASK,
            "memory_budget": 1 << 20,
        },
    ),
    "PackedPolicy.of": (troll.PackedPolicy.of, {"policy": OLD}),
    "PackedPolicy.stack": (troll.PackedPolicy.stack, {"policies": [OLD.pack(), OLD.pack()]}),
    "PackedPolicy.cat": (troll.PackedPolicy.cat, {"policies": [OLD.pack(), OLD.pack()]}),
    "PackedPolicy.from_bytes": (
        troll.PackedPolicy.from_bytes,
        {"data": OLD[0].pack().to_bytes(), "positions": T, "slots": 4, "vocab_size": V, "temperature": 1.0},
    ),
    "project": (
        troll.project,
        {
            "proposal": LOG_P,
            "old": LOG_P.roll(1, 0),
            "kl_bound": 0.1,
            "solver": "newton",
            "max_lost_mass": 0.1,
            "impl": "auto",
        },
    ),
    "constrain": (
        troll.constrain,
        {"proposal": PROPOSAL, "old": OLD, "kl_bound": 0.1, "tail": "bucket", "solver": "newton", "impl": "auto"},
    ),
    "regression_loss": (troll.regression_loss, {"projection": troll.project(LOG_P, LOG_P, 0.1)}),
    "token_kl": (troll.token_kl, {"log_p": LOG_P, "log_q": LOG_P}),
    "aggregate": (
        troll.aggregate,
        {"values": torch.ones(B, T), "loss_mask": MASK, "rule": "constant", "max_length": 3, "total": 2},
    ),
    "troll_loss": (troll.troll_loss, {**LOSS, **TROLL, "solver": "newton"}),
    "clip_loss": (troll.clip_loss, {**LOSS, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
    "unconstrained_loss": (troll.unconstrained_loss, LOSS),
    "fused_troll_loss": (
        troll.fused_troll_loss,
        {
            "hidden": HIDDEN,
            "head": HEAD,
            "old": OLD,
            "advantages": torch.ones(B),
            "loss_mask": MASK,
            **TROLL,
            "tail": "bucket",
            "max_support": 4,
            "tail_mass": 1e-3,
            "aggregation": "token_mean",
            "memory_budget": 1 << 20,
        },
    ),
    "grpo": (advantages.grpo, {**REWARDS, "eps": 1e-4}),
    "grpo by id": (advantages.grpo, {"rewards": torch.tensor([0.0, 1.0]), "groups": torch.tensor([0, 0])}),
    "dr_grpo": (advantages.dr_grpo, REWARDS),
    "rloo": (advantages.rloo, REWARDS),
    "reinforce_pp_baseline": (advantages.reinforce_pp_baseline, {**REWARDS, "loss_mask": MASK}),
    "reinforce_pp": (advantages.reinforce_pp, TOKENS),
    "gae": (advantages.gae, {**TOKENS, "values": torch.randn(B, T), "lam": 0.9}),
    "whiten": (advantages.whiten, {"values": torch.randn(B, T), "loss_mask": MASK, "eps": 1e-8}),
    "kl_per_token": (diagnostics.kl_per_token, {**BATCH, "tail": "bucket"}),
    "by_position": (diagnostics.by_position, {**SPECTRUM, "bins": 4}),
    "by_position from": (diagnostics.by_position, {**SPECTRUM, "starts": (0, 2)}),
    "by_class": (diagnostics.by_class, {**SPECTRUM, "classes": torch.zeros(B, T, dtype=torch.int64), "names": ["a"]}),
    "by_advantage": (diagnostics.by_advantage, {**SPECTRUM, "advantages": torch.ones(B)}),
    "token_classes": (diagnostics.token_classes, {"tokenizer": Letters(), "vocab_size": 3}),
    "estimate_mean": (
        diagnostics.estimate_mean,
        {"values": torch.randn(4), "groups": torch.tensor([0, 0, 1, 1]), "confidence": 0.9},
    ),
    "sequence_terms": (diagnostics.sequence_terms, {**BATCH, "tail": "bucket"}),
    "estimate_sequence_kl": (
        diagnostics.estimate_sequence_kl,
        {**BATCH, "groups": torch.tensor([0, 1]), "tail": "bucket", "confidence": 0.9},
    ),
    "compare_gradients": (
        diagnostics.compare_gradients,
        {
            **BATCH,
            "advantages": torch.ones(B),
            "preset": "default",
            "kl_bound": 0.1,
            "regression_coef": 1.0,
            "clip_low": 0.2,
            "clip_high": 0.2,
        },
    ),
    "logit_gradient": (
        diagnostics.logit_gradient,
        {"loss": troll.unconstrained_loss, **BATCH, "advantages": torch.ones(B)},
    ),
    "solver_conditioning": (diagnostics.solver_conditioning, {**BATCH, "kl_bound": 0.1, "tail": "bucket"}),
    "sampler_mismatch": (
        diagnostics.sampler_mismatch,
        {"sampler": -torch.rand(B, T), "trainer": -torch.rand(B, T), "loss_mask": MASK},
    ),
}
ON_ONE_DEVICE = {
    *("sparsify", "restrict", "SparsePolicy", "Head.sparsify", "Head.restrict", "Head.token_loss", "project"),
    *("constrain", "token_kl", "aggregate", "troll_loss", "clip_loss", "unconstrained_loss", "fused_troll_loss"),
}
"""The others have one tensor, move their tensors, or check each of them where it is first."""
NUMBERS = ("kl_bound", "total")
"""Moved to the device of the others."""
ALSO: dict[str, tuple[str, ...]] = {
    "rule": ("aggregation",),
    "logits": ("sampled",),
    "sampled": ("logits",),
    "hidden": ("logits", "sampled", "old", "target"),
    "values": ("groups",),
    "target": ("old",),
}
"""What a message may name instead: the other one of two arguments that do not fit together."""


def wrong(value: Any) -> Iterator[tuple[str, Any]]:
    """Mistakes that people make in the place of this value."""
    yield from {
        "None": None,
        "a bool": True,
        "a word": "a",
        "a number as a word": "0.1",
        "a complex number": 1j,
        "a list": [[1.0, 2.0]],
        "a list of words": ["a", 1],
        "an array": np.ones((B, T)),
        "an object": object(),
        "a function": len,
        "a type": float,
        "a dict": {},
        "minus one": -1,
        "NaN": float("nan"),
        "a large number": 1e30,
        "a scalar tensor": torch.tensor(0.5),
        "logits": LOGITS,
        "log-probabilities": LOG_P,
        "a policy": OLD,
        "a policy of one sequence": OLD[0],
        "a packed policy": OLD.pack(),
        "an empty tensor": torch.ones(0),
    }.items()
    if isinstance(value, Tensor):
        yield "integers", value.long()
        yield "bool", value > 0
        yield "complex", value.to(torch.complex64)
        yield "float16", value.half()
        yield "a dimension more", value[None]
        yield "a last dimension more", value[..., None]
        yield "twice", torch.cat([value, value])
        if value.dim():
            yield "a dimension less", value[0]
            yield "one less", value[..., :-1]
        yield "NaN everywhere", torch.full(value.shape, float("nan"))
        yield "negative", -torch.ones_like(value)
        yield "another device", value.to("meta")
    if isinstance(value, troll.SparsePolicy):
        yield "fewer sequences", value[:1]
        yield "flattened", value.flatten()
        yield "another device", value.to("meta")
        yield "another vocabulary", replace(value, vocab_size=V + 1)
        yield "another temperature", replace(value, temperature=0.5)


CASES = [
    pytest.param(function, arguments, name, bad, id=f"{label}-{name}-{what}")
    for label, (function, arguments) in CALLS.items()
    for name, value in arguments.items()
    for what, bad in wrong(value)
    if what != "another device" or (label in ON_ONE_DEVICE and name not in NUMBERS)
    if name != "loss" or not callable(bad)
]


def refusal(function: Callable[..., Any], arguments: dict[str, Any]) -> InputError | None:
    """The error of a call; None if it is accepted."""
    try:
        function(**arguments)
    except InputError as error:
        return error
    return None


@pytest.mark.parametrize(("function", "arguments", "name", "bad"), CASES)
def test_a_wrong_argument_is_used_or_refused_by_name(
    function: Callable[..., Any], arguments: dict[str, Any], name: str, bad: Any
) -> None:
    error = refusal(function, arguments | {name: bad})
    if error is not None:
        assert any(word in error.problem for word in (name, *ALSO.get(name, ()))), error
        assert "Got " not in error.problem
        assert not error.fix.startswith("Try ")


@pytest.mark.parametrize("label", CALLS)
def test_the_arguments_of_the_cases_are_accepted(label: str) -> None:
    function, arguments = CALLS[label]
    function(**arguments)


@pytest.mark.parametrize(
    ("call", "problem", "fix"),
    [
        (
            partial(troll.troll_loss, **{**LOSS, "kl_bound": "0.1"}),
            "kl_bound must be a number ≥ 0, got '0.1'",
            "Pass kl_bound=0.1, without quotation marks",
        ),
        (
            partial(troll.project, LOG_P, LOG_P, "0.1"),
            "kl_bound must be a number ≥ 0, got '0.1'",
            "Pass kl_bound=0.1, without quotation marks",
        ),
        (
            partial(troll.troll_loss, **{**LOSS, "regression_coef": "a"}),
            "regression_coef must be a number ≥ 0, got 'a'",
            "The default is 1",
        ),
        (
            partial(troll.project, PROPOSAL, OLD, 0.1),
            "proposal must be a tensor of log-probabilities [..., K], got a SparsePolicy",
            "Use troll.constrain(proposal, old, kl_bound), which projects sparse policies",
        ),
        (
            partial(troll.restrict, LOGITS, LOGITS),
            "old must be a SparsePolicy, got a tensor [2, 3, 7]",
            "Make it with troll.sparsify(old_logits, sampled)",
        ),
        (
            partial(troll.restrict, LOGITS, OLD.pack()),
            "old must be a SparsePolicy, got a PackedPolicy",
            "Pass old.unpack()",
        ),
        (
            partial(troll.sparsify, LOGITS.long(), SAMPLED),
            "logits must have a floating-point dtype, got int64",
            "Pass the logits of the model, such as model(input_ids).logits",
        ),
        (
            partial(troll.sparsify, LOGITS, SAMPLED.tolist()),
            "sampled must be a tensor [...], got a list",
            "Convert it with torch.as_tensor(sampled)",
        ),
        (
            partial(troll.troll_loss, **{**LOSS, "loss_mask": MASK[:, :2]}),
            "loss_mask must have one entry per token of the policies, shape [2, 3], got [2, 2]",
            "Cut the mask to the tokens that were scored, one row per sequence",
        ),
        (
            partial(troll.troll_loss, **{**LOSS, "advantages": torch.ones(B, device="meta")}),
            "loss_mask and advantages must be on the same device, got cpu and meta",
            "Pass advantages.to(loss_mask.device)",
        ),
        (
            partial(troll.Head, torch.nn.Linear(3, 4)),
            "weight must be a tensor [V, H], got a Linear",
            "Pass the parameter of the output layer: model.lm_head.weight",
        ),
        (
            partial(advantages.grpo, np.ones(4), group_size=2),
            "rewards must be a tensor [B], got a numpy array [4]",
            "Convert it with torch.as_tensor(rewards)",
        ),
    ],
)
def test_the_two_sentences(call: Callable[[], object], problem: str, fix: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert (caught.value.problem, caught.value.fix) == (problem, fix)


def test_every_public_function_is_among_the_cases() -> None:
    tested = {function for function, _ in CALLS.values()}
    for module in (troll, advantages, diagnostics):
        for name in module.__all__:
            if inspect.isfunction(getattr(module, name)):
                assert getattr(module, name) in tested, name
