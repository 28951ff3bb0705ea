"""verl's Megatron engine within a trust region, against the core: tensor, pipeline and context parallelism on CPUs.

Needs Megatron-core besides verl (``pip install megatron-core==0.16.1``); ``verl_megatron_worker`` says what of Megatron
runs on a CPU and what does not.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import verl_cases

PACKAGES = {"verl": "verl", "megatron": "megatron-core"}
MISSING = [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}"),
]

CONTEXT = {"model": "tokenwise", "change": 0.05, "cp": 2}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "packed": {"packed": True},
        "padded": {"packed": False},
        "floor": {"packed": True, "options": {"tail": "floor"}},
        "warm": {"packed": True, "temperature": 0.7, "dynamic": True},
        "entropy": {"packed": True, "entropy_coeff": 0.3},
        "sequence": {"packed": False, "options": {"importance_sampling_level": "sequence"}},
        "context": {"packed": True, "tp": 1, **CONTEXT},
        "context sequence": {"packed": False, "tp": 1, **CONTEXT, "options": {"importance_sampling_level": "sequence"}},
        "pipeline": {"packed": False, "tp": 1, "pp": 2},
    },
    4: {
        "four": {"packed": True, "tp": 4},
        "tensor and context": {"packed": True, **CONTEXT},
        "tensor and pipeline": {"packed": False, "pp": 2, "options": {"tail": "floor"}},
    },
}
ALL = [(processes, name) for processes, cases in CASES.items() for name in cases]
Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], list[Outcome]]:
    """How many processes and which case → what came of it on each of them."""
    folder = tmp_path_factory.mktemp("megatron")
    verl_cases.save_policies(folder)

    @functools.cache
    def launch(processes: int) -> tuple[Path, str]:
        here = folder / str(processes)
        here.mkdir()
        (here / "cases.json").write_text(json.dumps(CASES[processes]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHDYNAMO_DISABLE", "1")  # verl compiles a sum, which takes longer than everything else
            try:
                verl_cases.launch("verl_megatron_worker.py", folder, processes)
            except AssertionError as error:
                return here, str(error)
        return here, ""

    def outcome(processes: int, name: str) -> list[Outcome]:
        here, said = launch(processes)
        if said:
            pytest.fail(said, pytrace=False)
        return [torch.load(here / f"{name}.{rank}.pt", weights_only=False) for rank in range(processes)]

    return outcome


@pytest.mark.parametrize(("processes", "name"), ALL)
def test_the_old_policy_is_recorded_as_the_core_would(
    found: Callable[[int, str], list[Outcome]], processes: int, name: str
) -> None:
    """The same tokens, and their numbers within 1e-5: the model rounds differently when sequences are not alone."""
    for process in found(processes, name):
        recorded, old, mask = process["recorded"], process["old"], process["mask"]
        assert torch.equal(recorded["ids"], old["ids"])
        assert len(old["ids"]) == int(mask.sum()) > 30
        assert int((old["ids"] >= 0).sum(-1).min()) > 1
        used = old["ids"] >= 0
        assert (recorded["log_probs"][used] - old["log_probs"][used]).abs().max() < 1e-5
        assert (recorded["log_tail"] - old["log_tail"]).abs().max() < 1e-5
        assert (process["log_probs"] - process["expected_log_probs"])[mask].abs().max() < 1e-5
        entropy = ["entropy"] if "entropy" in name else []
        assert process["fields"] == [*entropy, "log_probs", "troll_old_policy"]


@pytest.mark.parametrize(("processes", "name"), ALL)
def test_loss_and_gradients_are_those_of_the_core(
    found: Callable[[int, str], list[Outcome]], processes: int, name: str
) -> None:
    """Within 1e-5 of the size of the gradients, as all adapters have to be, on tokens of which many are projected."""
    parts = found(processes, name)
    for process in parts:
        assert process["loss"].item() == pytest.approx(process["expected_loss"].item(), abs=1e-6, rel=1e-6)
        assert 0.2 < process["metrics"]["actor/troll/projected_fraction"] <= 1.0
        grads, expected = process["grads"], process["expected_grads"]
        largest = max(float(x.abs().max()) for x in expected.values())
        assert largest > 0.1
        for weight, grad in grads.items():
            assert (grad - expected[weight]).abs().max() < 1e-5 * max(1.0, largest), weight
    assert {weight for process in parts for weight in process["grads"]} == set(parts[0]["expected_grads"])


def test_what_it_cannot_do_is_refused(found: Callable[[int, str], list[Outcome]]) -> None:
    for said in found(2, "refusals"):
        assert "hidden_dropout=0.1" in said["hidden_dropout"]
        assert "attention_dropout=0.1" in said["attention_dropout"]
        assert "dynamic_context_parallel=True" in said["dynamic"]
        assert "'troll_old_policy'" in said["nothing recorded"]
        assert "another layout than their labels" in said["another layout"]
