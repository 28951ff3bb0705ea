"""verl's Megatron engine with a trust region: the vocabulary is split among tensor-parallel processes.

The last pipeline stage has the logits of its columns, [b, s, V / tp], in one of verl's two layouts: packed (``thd``) or
padded (``bshd``), with sequences padded to a length that tensor and context parallelism divide. To find which position
stands where, verl's own functions lay out the numbers of the positions. Columns that Megatron adds to make the
vocabulary divisible are part of the softmax, as they are in verl.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor
from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
from verl.utils import tensordict_utils as tu
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron import MegatronEngineWithLMHead

from troll.deferred import DeferredCheck, run_checks
from troll.errors import InputError
from troll.policy import SparsePolicy
from troll.policy.parallel import restrict_parallel, sparsify_parallel
from troll.verl.config import MODEL_TYPE
from troll.verl.engine import TrustRegion
from troll.verl.loss import TrustRegionLoss, options_of
from troll.verl.transport import OLD_POLICY, Positions, write

_RECORDED = ("troll_token_ids", "troll_log_probs", "troll_log_tail")


@EngineRegistry.register(model_type=MODEL_TYPE, backend="megatron")
class TrollMegatronEngine(TrustRegion, MegatronEngineWithLMHead):
    """Megatron, with tensor, pipeline and static context parallelism."""

    _at: Tensor
    """[b, s] position of the micro-batch at each place of the logits; the last position in padding."""
    _vocab_size: int
    """V, including the columns that Megatron adds."""

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        if engine_config.dynamic_context_parallel:
            raise InputError(
                "megatron.dynamic_context_parallel=True: verl's hook for logits does not support it",
                "Set actor_rollout_ref.actor.megatron.dynamic_context_parallel=False and context_parallel_size",
            )
        super().__init__(model_config, engine_config, *args, **kwargs)

    def initialize(self) -> None:
        """Initialise as verl does; refuse a model with dropout."""
        super().initialize()
        for name in ("hidden_dropout", "attention_dropout"):
            if getattr(self.tf_config, name) > 0 and not self.engine_config.forward_only:
                raise InputError(
                    f"the model has dropout ({name}={getattr(self.tf_config, name)}), so that two scorings of the "
                    "same tokens differ by noise",
                    f"Set actor_rollout_ref.actor.megatron.override_transformer_config.{name}=0.0",
                )

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The parts of the model that this process has."""
        return list(self.module)

    def _lm_head_logits_processor(
        self,
        logits: Tensor,
        label: Tensor,
        temperature: Tensor,
        *,
        logits_processor_func: Any,
        batch: Any,
        data_format: str,
        **flags: Any,
    ) -> dict[str, Tensor]:
        """As verl, with a hook that records the old policy when scoring and projects when updating."""
        if self._records or isinstance(logits_processor_func, TrustRegionLoss):
            self._at = self._layout(batch, data_format)
            positions = Positions.of(batch)
            other = (label.flatten() != self._local(positions.sampled)) & self._local(positions.counted)
            run_checks([DeferredCheck(other.any(), _refuse_layout)])
            logits_processor_func = self._record if self._records else partial(self._project, logits_processor_func)
            flags["distillation_use_topk"] = True
        output: dict[str, Tensor] = super()._lm_head_logits_processor(
            logits,
            label,
            temperature,
            logits_processor_func=logits_processor_func,
            batch=batch,
            data_format=data_format,
            **flags,
        )
        return output

    def prepare_model_outputs(self, output: dict[str, Tensor], data: Any) -> dict[str, Tensor]:
        """verl's outputs; when a rollout is scored, also the old policy."""
        outputs: dict[str, Tensor] = super().prepare_model_outputs(output, data)
        if self._records:
            ids, log_probs, log_tail = (outputs.pop(name).values() for name in _RECORDED)
            policy = SparsePolicy.trusted(ids, log_probs, log_tail, self._vocab_size, temperature=1.0)
            outputs[OLD_POLICY] = write(policy, Positions.of(data))
        return outputs

    def _record(self, student_logits: Tensor, data: Any, data_format: str) -> dict[str, Tensor]:
        """Logits [b, s, V / tp] → the sparse policy as tensors [b, s, …], which verl turns back into sequences."""
        positions = Positions.of(data)
        policy, _ = sparsify_parallel(
            student_logits.detach().flatten(0, 1),
            self._local(positions.sampled),
            self._max_support,
            self._tail_mass,
            group=mpu.get_tensor_model_parallel_group(),
            loss_mask=self._local(positions.counted),
        )
        self._vocab_size = policy.vocab_size
        tensors = (policy.token_ids, policy.log_probs, policy.log_tail)
        return {name: self._laid_out(x) for name, x in zip(_RECORDED, tensors, strict=True)}

    def _project(self, loss: TrustRegionLoss, student_logits: Tensor, data: Any, data_format: str) -> dict[str, Tensor]:
        """Logits [b, s, V / tp] → values per position, each [b, s]."""
        output = loss(student_logits=student_logits.flatten(0, 1).unsqueeze(0), data=data)
        return {name: self._laid_out(x[0]) for name, x in output.items()}

    def _trust_region_loss(self, loss_function: Any) -> TrustRegionLoss:
        floor = options_of(loss_function).tail == "floor"
        group = mpu.get_tensor_model_parallel_group()

        def score(logits: Tensor, old: SparsePolicy, sampled: Tensor) -> SparsePolicy:
            if floor:
                kept = (self._max_support, self._tail_mass)
                policy, _ = sparsify_parallel(logits, sampled, *kept, group=group, loss_mask=old.valid)
            else:
                policy, _ = restrict_parallel(logits, _over(old, logits.shape[-1] * group.size()), group=group)
            return _over(policy, old.vocab_size)

        return TrustRegionLoss(loss_function, self._max_support, score, self._local)

    def _local(self, values: Tensor) -> Tensor:
        """Values of all positions [T, …] → of the positions whose logits this process has, [b · s, …]."""
        return values[self._at.flatten()]

    def _laid_out(self, values: Tensor) -> Tensor:
        """Values of rows [b · s, …] → [b, s, …]."""
        return values.reshape(*self._at.shape, *values.shape[1:])

    def _layout(self, batch: Any, data_format: str) -> Tensor:
        ids = batch["input_ids"]
        T = len(ids.values())
        numbers = torch.arange(1, T + 1, device=ids.device)  # 0 is what verl pads with
        jagged = torch.nested.nested_tensor_from_jagged(numbers, ids.offsets())
        eight_bits = self.tf_config.fp8 in ("e4m3", "hybrid")
        if data_format == "thd":
            layout = self._get_context_parallel_layout(unwrap_model(self.module[-1]))
            at = preprocess_thd_engine(jagged, use_fp8_padding=eight_bits, cp_layout=layout)[0]
        else:
            longest = tu.get_non_tensor_data(batch, key="forced_max_seqlen", default=None)
            at = preprocess_bshd_engine(jagged, use_fp8_padding=eight_bits, forced_max_seqlen=longest)[0]
        return torch.where(at > 0, at - 1, T - 1)


def _over(policy: SparsePolicy, vocab_size: int) -> SparsePolicy:
    """The same policy with another ``vocab_size``: ``TrustRegionLoss`` takes the width of its logits for V."""
    return SparsePolicy.trusted(policy.token_ids, policy.log_probs, policy.log_tail, vocab_size, policy.temperature)


def _refuse_layout() -> None:
    raise InputError(
        "the logits have another layout than their labels, which does not happen with verl 0.9",
        "Install verl>=0.9,<0.10, or report this",
    )
