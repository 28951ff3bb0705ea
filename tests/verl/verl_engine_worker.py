"""Scores and updates with verl's engine on every process of a launch: ``torchrun verl_engine_worker.py FOLDER``.

For every case in ``FOLDER/cases.json`` the engine scores the rollout with the old policy, updates with the new one, and
writes what came of it: ``FOLDER/<name>.<backend>.<processes>.pt``. Whatever the number of processes, an update is made
on the same sequences.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl_cases
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig, HFModelConfig, PolicyLossConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss

from troll.verl import TrollFSDPEngineConfig, TrollPolicyLossConfig
from troll.verl.transport import OLD_POLICY


def engine(folder: Path, case: dict[str, Any], model_type: str, backend: str = "fsdp2") -> Any:
    model = HFModelConfig(
        path=str(folder),
        external_lib="troll.verl",
        use_remove_padding=case.get("packed", True),
        enable_gradient_checkpointing=case.get("checkpointing", False),
        override_config={"attn_implementation": "sdpa"},
        lora_rank=case.get("lora_rank", 0),
    )
    model.model_type = model_type
    config = TrollFSDPEngineConfig(
        strategy=backend,
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        use_torch_compile=False,
        use_orig_params=True,
        max_support=verl_cases.MAX_SUPPORT,
        tail_mass=verl_cases.TAIL_MASS,
        forward_only=case.get("forward_only", False),
        ulysses_sequence_parallel_size=case.get("sequence_parallel", 1),
    )
    made = EngineRegistry.new(
        model_type=model_type,
        backend=backend,
        model_config=model,
        engine_config=config,
        optimizer_config=FSDPOptimizerConfig(lr=0.0, total_training_steps=10, weight_decay=0.0),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def batch(case: dict[str, Any]) -> TensorDict:
    """This process's share of the rollout."""
    parallel = case.get("sequence_parallel", 1)
    rank, size = dist.get_rank() // parallel, dist.get_world_size() // parallel
    share = slice(rank * verl_cases.B // size, (rank + 1) * verl_cases.B // size)
    fields = verl_cases.rollout()
    for name in case.get("without", []):
        del fields[name]
    data = TensorDict(
        {name: torch.nested.as_nested_tensor(rows[share], layout=torch.jagged) for name, rows in fields.items()},
        batch_size=verl_cases.B // size,
    )
    tu.assign_non_tensor(
        data,
        use_remove_padding=case.get("packed", True),
        use_dynamic_bsz=case.get("dynamic", False),
        max_token_len_per_gpu=24,
        micro_batch_size_per_gpu=2,
        temperature=case.get("temperature", 1.0),
        calculate_entropy=case.get("entropy_coeff", 0.0) != 0,
        global_batch_size=verl_cases.B,
        use_fused_kernels=False,
    )
    return data


def actor_config(case: dict[str, Any]) -> FSDPActorConfig:
    troll = case["loss"] == "troll"
    kind = TrollPolicyLossConfig if troll else partial(PolicyLossConfig, loss_mode=case["loss"])
    return FSDPActorConfig(
        strategy="fsdp2",
        ppo_micro_batch_size_per_gpu=2,
        rollout_n=1,
        policy_loss=kind(**case.get("options", {})),
        use_kl_loss=case.get("use_kl_loss", False),
        kl_loss_coef=0.1,
        entropy_coeff=case.get("entropy_coeff", 0.0),
        loss_agg_mode=case.get("loss_agg_mode", "token-mean"),
        loss_scale_factor=16 if case.get("loss_agg_mode") == "seq-mean-token-sum-norm" else None,
        **({} if troll else {"clip_ratio_low": 1e6, "clip_ratio_high": 1e6, "clip_ratio_c": 1e6}),
    )


def score(scorer: Any, case: dict[str, Any]) -> dict[str, Tensor]:
    """What the scoring pass returns to verl, which stores it."""
    with scorer.eval_mode():
        output: dict[str, Tensor] = scorer.infer_batch(batch(case))["model_output"]
    return output


def run(folder: Path, case: dict[str, Any], backend: str, engines: dict[Any, Any]) -> dict[str, Any]:
    """Score with the old policy, update with the new one."""
    key = (backend, case.get("packed", True), case["loss"] == "troll")
    model_type = "troll_lm" if case["loss"] == "troll" else "language_model"
    if key not in engines:
        both = (verl_cases.OLD, verl_cases.NEW)
        engines[key] = [engine(folder / which, case, model_type, backend) for which in both]
    scorer, learner = engines[key]
    scored = score(scorer, case)
    data = batch(case)
    responses = [
        row[len(prompt) - 1 : -1]
        for row, prompt in zip(scored["log_probs"].unbind(), data["prompts"].unbind(), strict=True)
    ]
    data["old_log_probs"] = torch.nested.as_nested_tensor(responses, layout=torch.jagged).cpu()
    if OLD_POLICY in scored:
        data[OLD_POLICY] = scored[OLD_POLICY].cpu()
    with learner.train_mode():
        learner.optimizer_zero_grad()
        output = learner.forward_backward_batch(data, partial(ppo_loss, config=actor_config(case)))
        parameters = learner.module.named_parameters()
        grads = {_plain(name): _whole(p.grad).view(p.shape) for name, p in parameters if p.grad is not None}
    loss = torch.tensor(sum(output["loss"]))
    dist.all_reduce(loss)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, output["metrics"])
    metrics = {
        name: Metric.aggregate_dp([m[name] for m in everyones])
        for name, value in output["metrics"].items()
        if isinstance(value, Metric)
    }
    packed: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(packed, [row.cpu() for row in scored[OLD_POLICY].unbind()] if OLD_POLICY in scored else [])
    return {
        "loss": loss / dist.get_world_size(),
        "grads": grads,
        "metrics": metrics,
        "old": [row for rows in packed for row in rows],
    }


def _whole(grad: Tensor) -> Tensor:
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().cpu().clone()


def _plain(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def main(folder: Path) -> None:
    """All cases, on engines that are made once."""
    verl_cases.join()
    engines: dict[Any, Any] = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        for backend in verl_cases.BACKENDS:
            result = run(folder, case, backend, engines)
            if dist.get_rank() == 0:
                torch.save(result, folder / f"{name}.{backend}.{dist.get_world_size()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
