"""verl's FSDP2 engine with a trust region against the core, TRL and verl's own loss: same batch, same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import verl_cases
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl_cases import BACKENDS, MAX_SUPPORT, PROCESSES, TAIL_MASS, B, padded

import troll
from troll.policy import PackedPolicy

BOUND = {"kl_bound": 0.01}  # most tokens are projected
TROLL: dict[str, Any] = {"loss": "troll", "without": ["rollout_is_weights", "ref_log_prob"], "options": BOUND}
CASES: dict[str, dict[str, Any]] = {
    "packed": TROLL,
    "padded": {**TROLL, "packed": False},
    "dynamic": {**TROLL, "dynamic": True},
    "floor": {**TROLL, "options": {"tail": "floor", "kl_bound": 3.0}},
    "wide": {**TROLL, "options": {"kl_bound": 0.03, "regression_coef": 0.3}},
    "sequence": {
        **TROLL,
        "options": {**BOUND, "importance_sampling_level": "sequence"},
        "loss_agg_mode": "seq-mean-token-mean",
    },
    "sequence_sum": {**TROLL, "loss_agg_mode": "seq-mean-token-sum"},
    "constant": {**TROLL, "loss_agg_mode": "seq-mean-token-sum-norm"},
    "weighted": {"loss": "troll", "without": ["ref_log_prob"], "options": BOUND},
    "hot": {**TROLL, "temperature": 1.7, "options": {"kl_bound": 0.004}},
    "unbounded": {"loss": "troll", "options": {"kl_bound": float("inf")}, "use_kl_loss": True, "entropy_coeff": 0.01},
    "unclipped": {"loss": "vanilla", "use_kl_loss": True, "entropy_coeff": 0.01},
    "unbounded_padded": {"loss": "troll", "options": {"kl_bound": float("inf")}, "use_kl_loss": True, "packed": False},
    "unclipped_padded": {"loss": "vanilla", "use_kl_loss": True, "packed": False},
    "unbounded_sum": {
        "loss": "troll",
        "options": {"kl_bound": float("inf")},
        "use_kl_loss": True,
        "loss_agg_mode": "seq-mean-token-sum",
    },
    "unclipped_sum": {"loss": "vanilla", "use_kl_loss": True, "loss_agg_mode": "seq-mean-token-sum"},
}
AGREE = 1e-5  # of the largest gradient: fp32, and sums in another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies and what engines on one and on two processes made of the rollout in all cases."""
    folder = tmp_path_factory.mktemp("engine")
    verl_cases.save_policies(folder)
    (folder / "cases.json").write_text(json.dumps(CASES))
    for processes in PROCESSES:
        verl_cases.launch("verl_engine_worker.py", folder, processes)
    return folder


def result(folder: Path, name: str, backend: str, processes: int) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / f"{name}.{backend}.{processes}.pt", weights_only=False)
    return loaded


def models(folder: Path) -> tuple[Any, Any]:
    return tuple(
        AutoModelForCausalLM.from_pretrained(folder / which, dtype=torch.float32)
        for which in (verl_cases.OLD, verl_cases.NEW)
    )


def by_core(folder: Path, case: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and metrics from ``troll.troll_loss`` on the whole rollout at once."""
    batch, options = verl_cases.rollout(), case["options"]
    old_model, model = models(folder)
    mask, sampled = padded(batch["loss_mask"]).bool(), padded(batch["responses"])
    common = {"temperature": case.get("temperature", 1.0), "loss_mask": mask}
    with torch.no_grad():
        logits = verl_cases.completion_logits(old_model, batch)
        old = troll.sparsify(logits, sampled, MAX_SUPPORT, TAIL_MASS, **common)
    logits = verl_cases.completion_logits(model, batch)
    if options.get("tail") == "floor":
        proposal = troll.sparsify(logits, sampled, MAX_SUPPORT, TAIL_MASS, **common)
    else:
        proposal = troll.restrict(logits, old, loss_mask=mask)
    rules = {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sequence_mean",
        "seq-mean-token-sum": "sequence_sum",
        "seq-mean-token-sum-norm": "constant",
    }
    rule = rules[case.get("loss_agg_mode", "token-mean")]
    weights = None if "rollout_is_weights" in case["without"] else padded(batch["rollout_is_weights"])
    loss, metrics = troll.troll_loss(
        proposal,
        old,
        padded(batch["advantages"]),
        mask,
        **{"tail": "bucket", **options},
        aggregation=rule,
        max_length=16 if rule == "constant" else None,
        total=None if rule == "token_mean" else B,  # verl divides by all sequences, also by those that do not count
        importance_weights=weights,
    )
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, metrics


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(g.abs().max()) for g in theirs.values())
    assert largest > 1e-3
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=AGREE * largest, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("un")])
def test_loss_and_gradients_are_those_of_the_core(folder: Path, name: str, backend: str, processes: int) -> None:
    loss, grads, metrics = by_core(folder, CASES[name])
    through_verl = result(folder, name, backend, processes)
    assert 0 < metrics["projected_fraction"] < 1
    torch.testing.assert_close(through_verl["loss"], loss, rtol=0, atol=AGREE)
    assert_same_gradients(through_verl["grads"], grads)


@pytest.mark.slow
@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["packed", "padded", "dynamic", "floor"])
def test_metrics_are_those_of_the_core(folder: Path, name: str, backend: str, processes: int) -> None:
    _, _, metrics = by_core(folder, CASES[name])
    logged = result(folder, name, backend, processes)["metrics"]
    sequences = B / (B - 1)  # verl also counts the sequence in which nothing counts
    for ours, factor in (
        *((key, 1.0) for key in ("kl_before/mean", "kl_before/max", "kl_after/mean", "kl_after/max", "regression")),
        *((key, 1.0) for key in ("ratio/mean", "ratio/max", "ratio/min", "projected_fraction", "mix", "lost_mass")),
        *((key, 1.0) for key in ("kept_mass/old", "kept_mass/proposal", "support_size/old", "entropy")),
        ("solver_steps/max", 1.0),
        *((key, sequences) for key in ("sequence_kl_before", "sequence_kl_after")),
        *((key, 1.0) for key in ("sequence_kl_before/max", "sequence_kl_after/max")),
    ):
        assert logged[f"actor/troll/{ours}"] * factor == pytest.approx(float(metrics[ours]), rel=1e-4, abs=1e-6), ours
    assert logged["actor/troll/unconverged_tokens"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_packed_old_policy_is_that_of_the_core(folder: Path, backend: str, processes: int) -> None:
    """Bit for bit what the core packs, up to the last digits of log-probabilities that were computed in a batch."""
    batch = verl_cases.rollout()
    old_model, _ = models(folder)
    with torch.no_grad():
        logits = verl_cases.completion_logits(old_model, batch)
    rows = result(folder, "packed", backend, processes)["old"]
    assert len(rows) == B
    for i, row in enumerate(rows):
        counted = batch["loss_mask"][i].bool()
        n = int(counted.sum())
        expected = troll.sparsify(logits[i, : len(counted)][counted], batch["responses"][i][counted], 8, TAIL_MASS)
        got = PackedPolicy.from_bytes(row[1:], n, MAX_SUPPORT, expected.vocab_size).unpack()
        assert torch.equal(got.token_ids, expected.token_ids)
        torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=0, atol=1e-5)
        torch.testing.assert_close(got.log_tail, expected.log_tail, rtol=0, atol=1e-5)
        assert len(row) == 1 + 6 * n + 7 * int(expected.support_size.sum())


@pytest.mark.slow
@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["", "_padded", "_sum"])
def test_without_a_bound_it_is_verls_loss_without_a_clip(folder: Path, form: str, backend: str, processes: int) -> None:
    """With importance weights, the reference KL and the entropy bonus, which stay verl's."""
    ours, theirs = (result(folder, name + form, backend, processes) for name in ("unbounded", "unclipped"))
    torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=0, atol=AGREE)
    assert_same_gradients(ours["grads"], theirs["grads"])
    for name in ("actor/pg_loss", "actor/ppo_kl", "kl_loss"):
        assert ours["metrics"][name] == pytest.approx(theirs["metrics"][name], abs=AGREE), name
    assert ours["metrics"]["actor/troll/projected_fraction"] == 0
    assert ours["metrics"]["actor/troll/kl_before/max"] > 0.03


@pytest.mark.slow
def test_trl_agrees_too(folder: Path, tmp_path: Path) -> None:
    import trl_cases

    from troll.trl.passes import OLD_POLICY

    batch = verl_cases.rollout()
    old_model, model = models(folder)
    mask, sampled = padded(batch["loss_mask"]), padded(batch["responses"])
    with torch.no_grad():
        logits = verl_cases.completion_logits(old_model, batch)
    old = troll.sparsify(logits, sampled, MAX_SUPPORT, TAIL_MASS)
    trainer = trl_cases.trainer(
        tmp_path, model=model, max_support=MAX_SUPPORT, tail_mass=TAIL_MASS, loss_type="bnpo", **BOUND
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    prompts = [x.flip(0) for x in batch["prompts"]]  # padded on the left
    inputs = {
        "prompt_ids": padded(prompts).flip(1),
        "prompt_mask": padded([torch.ones_like(x) for x in prompts]).flip(1),
        "completion_ids": sampled,
        "completion_mask": padded([torch.ones_like(x) for x in batch["responses"]]),
        "tool_mask": mask,
        "advantages": padded(batch["advantages"]),
        "old_per_token_logps": old.sampled_log_probs,
        "num_items_in_batch": mask.sum(),
        OLD_POLICY: old.pack().sequences(),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    through_verl = result(folder, "packed", "fsdp2", PROCESSES[-1])
    torch.testing.assert_close(through_verl["loss"], loss.detach(), rtol=0, atol=AGREE)
    assert_same_gradients(through_verl["grads"], {name: p.grad for name, p in trainer.model.named_parameters()})
