"""What verl's engine does in passes that are not the usual ones, and what it refuses: ``torchrun … FOLDER``.

One process writes ``FOLDER/passes.json``. Two processes share the tokens of every sequence (Ulysses) and write
``FOLDER/shared.pt``; no attention on a CPU can do that, so both are given the logits of whole sequences.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import verl_cases
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu
from verl.utils.ulysses import get_ulysses_sequence_parallel_rank, set_ulysses_sequence_parallel_group
from verl.workers.config import HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss, sft_loss
from verl_engine_worker import actor_config, batch, engine, score

from troll.errors import InputError
from troll.verl import TrollFSDPEngineConfig
from troll.verl.transport import OLD_POLICY


def message(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except InputError as error:
        return str(error)
    return "nothing was refused"


def passes(folder: Path) -> dict[str, Any]:
    """Which passes record, and what is refused."""
    case: dict[str, Any] = {"loss": "troll"}
    actor = engine(folder / verl_cases.OLD, case, "troll_lm")
    reference = engine(folder / verl_cases.OLD, {**case, "forward_only": True}, "troll_lm")
    adapted = engine(folder / verl_cases.OLD, {**case, "lora_rank": 2}, "troll_lm")
    plain = engine(folder / verl_cases.OLD, case, "language_model")
    scored = score(actor, case)
    records = {"actor": OLD_POLICY in scored, "reference": OLD_POLICY in score(reference, case)}
    records["adapted"] = OLD_POLICY in score(adapted, case)
    with adapted.eval_mode(), adapted.disable_adapter():
        records["adapter disabled"] = OLD_POLICY in adapted.infer_batch(batch(case))["model_output"]
    records["adapter back"] = OLD_POLICY in score(adapted, case)

    def update(which: Any, loss: Any, **fields: Any) -> None:
        data = batch(case)
        data["old_log_probs"] = data["advantages"]
        for name, value in fields.items():
            data[name] = value
        with which.train_mode():
            which.forward_backward_batch(data, loss)

    troll, vanilla = (partial(ppo_loss, config=actor_config({"loss": loss})) for loss in ("troll", "vanilla"))
    recorded = scored[OLD_POLICY]
    other_order = torch.nested.as_nested_tensor(list(recorded.unbind())[::-1], layout=torch.jagged)
    other_format = torch.nested.as_nested_tensor([row + 1 for row in recorded.unbind()], layout=torch.jagged)
    wrong_tokens = torch.nested.as_nested_tensor([row.clone() for row in recorded.unbind()], layout=torch.jagged)
    first = wrong_tokens.unbind()[0]
    first[1 + 2 * int(verl_cases.rollout()["loss_mask"][0].sum())] ^= 1  # one bit of the first token id
    refused = {
        "no old policy": message(lambda: update(actor, troll)),
        "verl's loss": message(lambda: update(actor, vanilla)),
        "another loss": message(lambda: update(actor, partial(sft_loss, config=None))),
        "verl's engine": message(lambda: update(plain, troll)),
        "another order": message(lambda: update(actor, troll, **{OLD_POLICY: other_order})),
        "another format": message(lambda: update(actor, troll, **{OLD_POLICY: other_format})),
        "another token": message(lambda: update(actor, troll, **{OLD_POLICY: wrong_tokens})),
        "dropout": message(lambda: engine(folder / "dropout", case, "troll_lm")),
    }

    def build(backend: str, **changes: Any) -> Any:
        model = HFModelConfig(path=str(folder / verl_cases.OLD), use_fused_kernels=changes.pop("fused", False))
        config = TrollFSDPEngineConfig(**changes)
        object.__setattr__(config, "strategy", backend)
        return EngineRegistry.new(
            model_type="troll_lm",
            backend=backend,
            model_config=model,
            engine_config=config,
            optimizer_config=None,
            checkpoint_config=None,
        )

    refused["fused kernels"] = message(lambda: build("fsdp2", fused=True))
    refused["padding"] = message(lambda: build("fsdp2", pad_to_length=True))
    for backend in ("veomni", "torchtitan", "automodel", "fsdp_turbo"):
        refused[backend] = message(lambda backend=backend: build(backend))
    forms = {name: [x.dim(), str(x.dtype)] for name, x in scored.items()}
    return {"records": records, "refused": refused, "forms": forms}


def shared(folder: Path) -> dict[str, Any]:
    """The old policy, the loss and the gradients of the logits, with the tokens of sequences on two processes."""
    case: dict[str, Any] = {"loss": "troll", "without": ["rollout_is_weights", "ref_log_prob"], "sequence_parallel": 2}
    case["options"] = {"kl_bound": 0.01}
    made = engine(folder / verl_cases.NEW, case, "troll_lm")
    data = batch(case)
    rollout = verl_cases.rollout()
    logits = []
    for which in (verl_cases.OLD, verl_cases.NEW):
        model = AutoModelForCausalLM.from_pretrained(folder / which, dtype=torch.float32)
        with torch.no_grad():
            logits.append(torch.cat([model(ids[None]).logits[0] for ids in rollout["input_ids"]]))
    whole = logits[1].requires_grad_()
    set_ulysses_sequence_parallel_group(made.ulysses_parallel_group)

    def part(of: torch.Tensor) -> Any:
        n = -(-len(of) // 2)
        padding = torch.zeros(2 * n - len(of), of.shape[1])
        rank = get_ulysses_sequence_parallel_rank()
        return SimpleNamespace(logits=torch.cat([of, padding])[rank * n : (rank + 1) * n][None])

    _, arguments = made.prepare_model_inputs(data)
    made._records = True
    recorded = made.prepare_model_outputs(part(logits[0]), arguments, data, None)
    made._records = False
    data = batch(case)
    data[OLD_POLICY], data["old_log_probs"] = recorded[OLD_POLICY], data["advantages"]
    for name, value in (("dp_size", 1), ("batch_num_tokens", int(data["loss_mask"].values().sum()))):
        tu.assign_non_tensor(data, **{name: value})
    update = made._trust_region_loss(partial(ppo_loss, config=actor_config(case)))
    tu.assign_non_tensor(data, distillation_use_topk=True, distillation_only=True)
    output = made.prepare_model_outputs(part(whole), arguments, data, update)
    loss, metrics = update(model_output=output, data=data)
    loss.backward()
    grad = whole.grad
    dist.all_reduce(grad)
    return {
        "loss": loss.detach(),
        "grad": grad,
        "old": [row.clone() for row in recorded[OLD_POLICY].unbind()],
        "metrics": {name: metric.aggregate() for name, metric in metrics.items() if hasattr(metric, "aggregate")},
    }


if __name__ == "__main__":
    verl_cases.join()
    target = Path(sys.argv[1])
    if dist.get_world_size() == 1:
        (target / "passes.json").write_text(json.dumps(passes(target)))
    else:
        result = shared(target)
        if dist.get_rank() == 0:
            torch.save(result, target / "shared.pt")
    dist.destroy_process_group()
