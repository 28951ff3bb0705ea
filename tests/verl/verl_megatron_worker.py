"""verl's Megatron engine on CPUs over gloo: ``torchrun verl_megatron_worker.py FOLDER``.

Megatron's own model, parallel layers and schedule run here; what does not are Transformer Engine (and with it packed
attention and attention in parallel over the context) and the bridge that loads checkpoints. So the model is built by
hand and given to verl's engine: either Megatron's ``GPTModel`` with attention in plain PyTorch, one packed sequence at
a time, or one without attention, whose logits depend on a token alone, for context parallelism.

The oracle is the core on the gathered logits of every sequence alone, differentiated through the same parallel model.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import verl_cases
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.config import HFModelConfig, McoreActorConfig, McoreOptimizerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron import MegatronEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

import troll
from troll.errors import InputError
from troll.objective import constrain, ratios
from troll.policy import SparsePolicy
from troll.verl import TrollMcoreEngineConfig, TrollPolicyLossConfig
from troll.verl.megatron import TrollMegatronEngine
from troll.verl.transport import OLD_POLICY, Positions, read

V = 268  # a byte's vocabulary of 263, made divisible: the last columns are no tokens
H = 16


def on_cpu() -> None:
    """The places where Megatron takes a GPU for granted. Its generator for dropout is not needed: there is none."""
    torch.cuda.current_device = lambda: "cpu"
    CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()
    CudaRNGStatesTracker.add = lambda self, name, seed: None
    torch.cuda.manual_seed = torch.cuda.synchronize = lambda *_: None
    zeros = torch.zeros

    def on_this_device(*args: Any, **named: Any) -> Tensor:
        return zeros(*args, **{**named, **({"device": "cpu"} if named.get("device") == "cuda" else {})})

    torch.zeros = on_this_device


def config(**named: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=H,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_dtype=torch.float32,
        init_method_std=0.35,  # distributions that are neither flat nor certain
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        **named,
    )


class PlainGPT(GPTModel):
    """Megatron's model; packed sequences go through it one by one, since plain attention cannot keep them apart."""

    def forward(self, input_ids: Tensor, packed_seq_params: Any = None, **_: Any) -> Tensor:
        if packed_seq_params is None:
            return self._causal(input_ids)
        ends = packed_seq_params.cu_seqlens_q_padded.tolist()
        parts = [self._causal(input_ids[:, start:end]) for start, end in pairwise(ends)]
        return torch.cat(parts, dim=1)

    def _causal(self, input_ids: Tensor) -> Tensor:
        s = input_ids.shape[1]
        later = torch.ones(s, s, dtype=torch.bool).triu(1)[None, None]
        logits: Tensor = super().forward(input_ids=input_ids, position_ids=None, attention_mask=later)
        return logits


def plain(how: TransformerConfig, **stage: bool) -> PlainGPT:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return PlainGPT(how, spec, V, 64, position_embedding_type="rope", **stage)


def whole(made: Any) -> torch.nn.Module:
    """The model with all of its pipeline stages."""
    stages = mpu.get_pipeline_model_parallel_world_size()
    if stages == 1:
        return made.module[0]
    weights: list[Any] = [None] * stages
    mine = {global_name(name): p.detach() for name, p in made.module[0].named_parameters()}
    dist.all_gather_object(weights, mine, group=mpu.get_pipeline_model_parallel_group())
    model = plain(config(tensor_model_parallel_size=mpu.get_tensor_model_parallel_world_size()))
    model.load_state_dict({name: x for stage in weights for name, x in stage.items()}, strict=False)
    return model


def global_name(name: str) -> str:
    """Of a weight of this stage, its name in the model: a stage numbers its one layer 0."""
    if mpu.get_pipeline_model_parallel_world_size() == 1:
        return name
    return name.replace("layers.0.", f"layers.{mpu.get_pipeline_model_parallel_rank()}.")


class Tokenwise(torch.nn.Module):
    """Logits that depend on the token at a position alone."""

    pre_process = post_process = True
    model_type = ModelType.encoder_or_decoder

    def __init__(self, how: TransformerConfig) -> None:
        super().__init__()
        self.config = how
        tp, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
        self.embedding = torch.nn.Parameter(0.5 * torch.randn(V, H))
        self.output = torch.nn.Parameter(torch.randn(V, H).chunk(tp)[rank].clone())
        self.output.tensor_model_parallel = True

    def set_input_tensor(self, _: Any) -> None:
        """Called by the schedule."""

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(self.embedding[input_ids])
        return hidden @ self.output.t()


def engine(folder: Path, case: dict[str, Any]) -> Any:
    """An engine of ours, with a model of ours."""
    tp, cp, pp = case.get("tp", 2), case.get("cp", 1), case.get("pp", 1)
    model = HFModelConfig(path=str(folder / verl_cases.OLD), use_remove_padding=case["packed"])
    model.model_type = "troll_lm"
    made = EngineRegistry.new(
        model_type="troll_lm",
        backend="megatron",
        model_config=model,
        engine_config=TrollMcoreEngineConfig(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            pipeline_model_parallel_size=pp,
            sequence_parallel=False,
            use_remove_padding=case["packed"],
            max_support=verl_cases.MAX_SUPPORT,
            tail_mass=verl_cases.TAIL_MASS,
        ),
        optimizer_config=McoreOptimizerConfig(lr=0.0, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    assert type(made) is TrollMegatronEngine
    torch.manual_seed(5)
    made.tf_config = config(
        tensor_model_parallel_size=tp, context_parallel_size=cp, pipeline_model_parallel_size=pp, batch_p2p_comm=False
    )
    if case.get("model") == "tokenwise":
        made.module = [Tokenwise(made.tf_config)]
    else:
        stage = {"pre_process": mpu.is_pipeline_first_stage(), "post_process": mpu.is_pipeline_last_stage()}
        made.module = [plain(made.tf_config, **stage)]
    return made


def move(made: Any, seed: int, scale: float) -> None:
    """Noise in every weight; the same in what every process has, its own in what is divided."""
    with torch.no_grad():
        for weight in made.module[0].parameters():
            divided = getattr(weight, "tensor_model_parallel", False)
            rank = mpu.get_tensor_model_parallel_rank() if divided else 0
            weight.add_(scale * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed * 100 + rank)))


def batch(case: dict[str, Any]) -> TensorDict:
    fields = verl_cases.rollout()
    del fields["rollout_is_weights"], fields["ref_log_prob"]
    data = TensorDict(
        {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in fields.items()},
        batch_size=verl_cases.B,
    )
    tu.assign_non_tensor(
        data,
        use_remove_padding=case["packed"],
        use_dynamic_bsz=case.get("dynamic", False),
        max_token_len_per_gpu=24,
        micro_batch_size_per_gpu=2,
        temperature=case.get("temperature", 1.0),
        calculate_entropy=case.get("entropy_coeff", 0.0) != 0,
        global_batch_size=verl_cases.B,
        use_fused_kernels=False,
    )
    return data


def options_of(case: dict[str, Any]) -> TrollPolicyLossConfig:
    return TrollPolicyLossConfig(**{"kl_bound": 0.003, **case.get("options", {})})  # half of the tokens are projected


def actor(case: dict[str, Any]) -> McoreActorConfig:
    return McoreActorConfig(
        ppo_micro_batch_size_per_gpu=2,
        rollout_n=1,
        policy_loss=options_of(case),
        entropy_coeff=case.get("entropy_coeff", 0.0),
    )


def completion_logits(model: torch.nn.Module, case: dict[str, Any]) -> Tensor:
    """[B, R, V] from every sequence alone, gathered."""
    rows = []
    fields = verl_cases.rollout()
    for ids, prompt in zip(fields["input_ids"], fields["prompts"], strict=True):
        shard = model(input_ids=ids[None])[0, len(prompt) - 1 : -1]
        rows.append(tensor_parallel.gather_from_tensor_model_parallel_region(shard) / case.get("temperature", 1.0))
    return verl_cases.padded(rows)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Those there are, and then none."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def oracle(made: Any, case: dict[str, Any], old: SparsePolicy) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by the core."""
    options, fields = options_of(case), verl_cases.rollout()
    mask = verl_cases.padded(fields["loss_mask"]).bool()
    sampled = verl_cases.padded(fields["responses"])
    model = whole(made)
    logits = completion_logits(model, case)
    if options.tail == "bucket":
        proposal = troll.restrict(logits, old)
    else:
        proposal = troll.sparsify(logits, sampled, verl_cases.MAX_SUPPORT, verl_cases.TAIL_MASS, loss_mask=mask)
    step = constrain(proposal, old, options.kl_bound, mask, tail=options.tail)  # type: ignore[arg-type]
    ratio = ratios(step.log_ratio, mask, options.importance_sampling_level)  # type: ignore[arg-type]
    losses = options.regression_coef * step.regression - ratio * verl_cases.padded(fields["advantages"])
    if case.get("entropy_coeff"):
        log_p = logits.log_softmax(-1)
        losses = losses + case["entropy_coeff"] * (log_p.exp() * log_p).sum(-1)
    loss = torch.where(mask, losses, 0.0).sum() / mask.sum()
    loss.backward()
    return loss.detach(), gradients(model)


def run(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Score with the old policy, update with the new one; the same by the core."""
    mpu.destroy_model_parallel()
    made = engine(folder, case)
    with torch.no_grad():
        scored = from_last_stage(made.forward_backward_batch(batch(case), None, forward_only=True))["model_output"]
        fields = verl_cases.rollout()
        mask, sampled = (verl_cases.padded(fields[name]) for name in ("loss_mask", "responses"))
        kept = (verl_cases.MAX_SUPPORT, verl_cases.TAIL_MASS)
        logits = completion_logits(whole(made), case)
        old = troll.sparsify(logits, sampled, *kept, loss_mask=mask.bool())
        true_log_probs = logits.log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
    data = batch(case)
    responses = [
        row[len(prompt) - 1 : -1]
        for row, prompt in zip(scored["log_probs"].unbind(), data["prompts"].unbind(), strict=True)
    ]
    data["old_log_probs"] = torch.nested.as_nested_tensor(responses, layout=torch.jagged)
    data[OLD_POLICY] = scored[OLD_POLICY]
    recorded = read(data, Positions.of(data), verl_cases.MAX_SUPPORT, V)
    move(made, 1, case.get("change", 0.01))
    output = from_last_stage(made.forward_backward_batch(data, partial(ppo_loss, config=actor(case))))
    grads = {global_name(name): grad for name, grad in gradients(made.module[0]).items()}
    if mpu.get_context_parallel_world_size() > 1:
        for grad in grads.values():  # averaged, as Megatron does
            dist.all_reduce(grad, group=mpu.get_context_parallel_group())
            grad /= mpu.get_context_parallel_world_size()
    loss, expected = oracle(made, case, old)
    metrics = {k: Metric.aggregate_dp([v]) for k, v in output["metrics"].items() if isinstance(v, Metric)}
    return {
        "loss": torch.tensor(sum(output["loss"])),
        "expected_loss": loss,
        "grads": grads,
        "expected_grads": expected,
        "recorded": _tensors(recorded[recorded.valid]),
        "old": _tensors(old[old.valid]),
        "fields": sorted(scored),
        "log_probs": verl_cases.padded(responses),
        "expected_log_probs": torch.where(mask.bool(), true_log_probs, 0.0),
        "mask": mask.bool(),
        "metrics": metrics,
    }


def from_last_stage(output: dict[str, Any]) -> dict[str, Any]:
    """The output of the last pipeline stage: the others have none."""
    assert mpu.is_pipeline_last_stage() == bool(output)
    shared = [{name: output.get(name) for name in ("model_output", "loss", "metrics")}]
    last, group = mpu.get_pipeline_model_parallel_last_rank(), mpu.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(shared, src=last, group=group)
    return shared[0]


def _tensors(policy: SparsePolicy) -> dict[str, Tensor]:
    return {"ids": policy.token_ids, "log_probs": policy.log_probs, "log_tail": policy.log_tail}


def refusals(folder: Path) -> dict[str, str]:
    """What the engine says of what it cannot do."""
    said = {}
    mpu.destroy_model_parallel()
    made = engine(folder, {"packed": True, "tp": dist.get_world_size()})
    with mock.patch.object(MegatronEngineWithLMHead, "initialize"):
        made.initialize()
        for name in ("hidden_dropout", "attention_dropout"):
            setattr(made.tf_config, name, 0.1)
            said[name] = _said(made.initialize)
            setattr(made.tf_config, name, 0.0)
    dynamic = TrollMcoreEngineConfig(dynamic_context_parallel=True, max_seqlen_per_dp_cp_rank=64)
    said["dynamic"] = _said(partial(TrollMegatronEngine, made.model_config, dynamic, None, None))
    case = {"packed": True}
    said["nothing recorded"] = _said(
        partial(made.forward_backward_batch, batch(case), partial(ppo_loss, config=actor(case)))
    )
    with mock.patch("troll.verl.megatron.preprocess_thd_engine", _shifted):
        said["another layout"] = _said(partial(made.forward_backward_batch, batch(case), None, True))
    return said


def _shifted(jagged: Tensor, **named: Any) -> Any:
    from verl.models.mcore.util import preprocess_thd_engine

    at, *rest = preprocess_thd_engine(jagged, **named)
    return at.roll(1, 1), *rest


def _said(call: Any) -> str:
    try:
        call()
    except InputError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    on_cpu()
    here = folder / str(dist.get_world_size())
    for name, case in json.loads((here / "cases.json").read_text()).items():
        torch.save(run(folder, case), here / f"{name}.{dist.get_rank()}.pt")
    torch.save(refusals(folder), here / f"refusals.{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
