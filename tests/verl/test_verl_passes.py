"""verl's engine beside the straight path: which passes record, what is refused, sequences shared by processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import verl_cases
from transformers import AutoModelForCausalLM
from verl_cases import MAX_SUPPORT, TAIL_MASS, B, padded

import troll
from troll.policy import PackedPolicy

REFUSED = {
    "no old policy": "the batch has no field 'troll_old_policy'",
    "verl's loss": "the engine troll_lm needs policy_loss.loss_mode=troll, got vanilla",
    "another loss": "supports verl's ppo_loss only",
    "verl's engine": "policy_loss.loss_mode=troll needs the engine troll_lm",
    "another order": "6 bytes per position and 7 per kept token",
    "another format": "in format 2, the batch has 2 sequences and needs format 1. Install the same version of troll",
    "another token": "the old policy in this batch was recorded for other tokens",
    "dropout": "dropout (model.layers.0.self_attn.attention_dropout=0.1)",
    "fused kernels": "use_fused_kernels=True: verl's fused kernels compute no logits",
    "padding": "pad_to_length=True",
    **{name: f"got actor.strategy={name}" for name in ("veomni", "torchtitan", "automodel", "fsdp_turbo")},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("passes")
    verl_cases.save_policies(folder)
    tiny_models.save("dense", folder / "dropout", attention_dropout=0.1)
    for processes in (1, 2):
        verl_cases.launch("verl_passes_worker.py", folder, processes)
    return folder


@pytest.fixture(scope="module")
def passes(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "passes.json").read_text())
    return read


@pytest.mark.slow
def test_only_the_policy_itself_is_recorded(passes: dict[str, Any]) -> None:
    """With an adapter, the reference is the same model without it: its pass must not overwrite the old policy."""
    assert passes["records"] == {
        "actor": True,
        "reference": False,
        "adapted": True,
        "adapter disabled": False,
        "adapter back": True,
    }


@pytest.mark.slow
def test_what_leaves_the_worker_has_no_dimension_of_the_support(passes: dict[str, Any]) -> None:
    """Jagged [B, …] only, so nothing of [T, K] is stored or moved."""
    assert passes["forms"] == {"log_probs": [2, "torch.float32"], "troll_old_policy": [2, "torch.uint8"]}


@pytest.mark.slow
@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_setup_does_not_train(passes: dict[str, Any], what: str) -> None:
    assert REFUSED[what] in passes["refused"][what]


@pytest.mark.slow
def test_all_refusals_are_looked_at(passes: dict[str, Any]) -> None:
    assert passes["refused"].keys() == REFUSED.keys()


@pytest.mark.slow
def test_sequences_shared_by_two_processes(folder: Path) -> None:
    """The old policy, the loss, its gradient and the metrics are those of whole sequences."""
    shared = torch.load(folder / "shared.pt", weights_only=False)
    batch = verl_cases.rollout()
    logits = []
    for which in (verl_cases.OLD, verl_cases.NEW):
        model = AutoModelForCausalLM.from_pretrained(folder / which, dtype=torch.float32)
        with torch.no_grad():
            logits.append([model(ids[None]).logits[0] for ids in batch["input_ids"]])
    mask, sampled = padded(batch["loss_mask"]).bool(), padded(batch["responses"])
    starts = [len(prompt) - 1 for prompt in batch["prompts"]]
    old, new = (padded([x[at:-1] for x, at in zip(rows, starts, strict=True)]) for rows in logits)
    new.requires_grad_()
    policy = troll.sparsify(old, sampled, MAX_SUPPORT, TAIL_MASS, loss_mask=mask)
    for i in range(B):
        row, counted = shared["old"][i], mask[i]
        got = PackedPolicy.from_bytes(row[1:], int(counted.sum()), MAX_SUPPORT, policy.vocab_size).unpack()
        assert torch.equal(got.token_ids, policy.token_ids[i][counted])
        torch.testing.assert_close(got.log_probs, policy.log_probs[i][counted], rtol=0, atol=1e-5)
    loss, metrics = troll.troll_loss(
        troll.restrict(new, policy), policy, padded(batch["advantages"]), mask, tail="bucket", kl_bound=0.01
    )
    loss.backward()
    torch.testing.assert_close(shared["loss"], loss.detach(), rtol=0, atol=1e-6)
    rows = torch.split(shared["grad"], [len(x) for x in batch["input_ids"]])
    grad = padded([x[at:-1] for x, at in zip(rows, starts, strict=True)])
    largest = float(new.grad.abs().max())
    assert largest > 1e-3
    # verl multiplies what it gathers by the processes of a sequence, since FSDP averages over them
    torch.testing.assert_close(grad, new.grad * 2, rtol=0, atol=1e-5 * largest)
    assert metrics["projected_fraction"] > 0
    for name in ("projected_fraction", "kl_before/max", "regression"):
        assert shared["metrics"][f"actor/troll/{name}"] == pytest.approx(float(metrics[name]), rel=1e-5), name
