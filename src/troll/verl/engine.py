"""verl's FSDP engine with a trust region: ``actor_rollout_ref.model.model_type=troll_lm``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from verl.models.transformers import monkey_patch
from verl.utils import tensordict_utils as tu
from verl.utils.ulysses import ulysses_pad_and_slice_inputs
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from troll.errors import InputError
from troll.modeling import check_dropout
from troll.policy import SparsePolicy, restrict, sparsify
from troll.verl.config import MODEL_TYPE, recorded
from troll.verl.loss import TrustRegionLoss, options_of
from troll.verl.transport import OLD_POLICY, Positions, write

_DEVICES = ["cuda", "npu"]


class TrustRegion(BaseEngine):
    """Mix-in for one of verl's language-model engines.

    When the actor scores a rollout (no loss function), the engine also records the sparse old policy. When the actor is
    updated (verl's ``ppo_loss``), the loss becomes a ``TrustRegionLoss``. Passes of the reference policy, which is a
    separate engine or the actor without its adapter, are unchanged.
    """

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        model_config.model_type = "language_model"  # the base class asserts it
        _refuse(model_config, engine_config)
        self._adapter_disabled = False
        self._records = False
        self._max_support, self._tail_mass = recorded(engine_config)
        super().__init__(model_config, engine_config, *args, **kwargs)

    def initialize(self) -> None:
        """Initialise as verl does; refuse a model with dropout."""
        super().initialize()
        if not self.engine_config.forward_only:
            for module in self.modules:
                check_dropout(module, "Set it to 0.0 in actor_rollout_ref.model.override_config")

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The parts of the model that this process has."""
        return [self.module]

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """Record the old policy when scoring, use the trust region when updating; otherwise as verl."""
        if loss_function is None:
            self._records = forward_only and not self._adapter_disabled and not self.engine_config.forward_only
            try:
                return super().forward_backward_batch(data, None, forward_only)
            finally:
                self._records = False
        loss = self._trust_region_loss(loss_function)
        tu.assign_non_tensor(data, distillation_use_topk=True, distillation_only=True)  # only the hook sees the logits
        return super().forward_backward_batch(data, loss, forward_only)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Disable the adapter, as verl does for a reference pass, and remember that it is disabled."""
        with super().disable_adapter():
            self._adapter_disabled = True
            try:
                yield
            finally:
                self._adapter_disabled = False

    def _trust_region_loss(self, loss_function: Any) -> TrustRegionLoss:
        raise NotImplementedError


@EngineRegistry.register(model_type=MODEL_TYPE, backend=["fsdp", "fsdp2"], device=_DEVICES)
class TrollFSDPEngine(TrustRegion, FSDPEngineWithLMHead):
    """FSDP and FSDP2, packed or padded, with Ulysses sequence parallelism or without."""

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """verl's outputs; when a rollout is scored, also the old policy."""
        if not self._records:
            outputs: dict[str, Tensor] = super().prepare_model_outputs(
                output, output_args, micro_batch, logits_processor_func
            )
            return outputs
        positions = Positions.of(micro_batch)
        policies: list[SparsePolicy] = []

        def record(student_logits: Tensor, data: Any) -> dict[str, Tensor]:
            with torch.autocast(student_logits.device.type, enabled=False):
                policies.append(
                    sparsify(
                        student_logits[0],
                        self._local(positions.sampled),
                        self._max_support,
                        self._tail_mass,
                        loss_mask=self._local(positions.counted),
                    )
                )
            return {}

        tu.assign_non_tensor(micro_batch, distillation_use_topk=True)
        outputs = super().prepare_model_outputs(output, output_args, micro_batch, record)
        policy = policies[0]._map(lambda x: self._gather_and_unpad_packed(x, output_args.get("pad_size", 0)))
        outputs[OLD_POLICY] = write(policy, positions)
        return outputs

    def _trust_region_loss(self, loss_function: Any) -> TrustRegionLoss:
        floor = options_of(loss_function).tail == "floor"

        def score(logits: Tensor, old: SparsePolicy, sampled: Tensor) -> SparsePolicy:
            if floor:
                return sparsify(logits, sampled, self._max_support, self._tail_mass, loss_mask=old.valid)
            return restrict(logits, old)

        return TrustRegionLoss(loss_function, self._max_support, score, self._local)

    def _local(self, values: Tensor) -> Tensor:
        """Values of all positions [T, …] → of the positions whose logits this process has, padded as verl does."""
        if not self.use_ulysses_sp:
            return values
        last = len(values) - 1  # predicts no token
        at = torch.arange(last + 1, device=values.device).unsqueeze(0)
        at, _, _ = ulysses_pad_and_slice_inputs(at, sp_size=self.ulysses_sequence_parallel_size, pad_value=last)
        return values[at[0]]


@EngineRegistry.register(
    model_type=MODEL_TYPE, backend=["veomni", "torchtitan", "automodel", "fsdp_turbo"], device=_DEVICES
)
class RefusedEngine(BaseEngine):
    """Backends of verl without a trust region."""

    def __init__(self, *_: Any, engine_config: Any, **__: Any) -> None:
        raise InputError(
            f"model_type={MODEL_TYPE} supports the backends fsdp, fsdp2 and megatron, got "
            f"actor.strategy={engine_config.strategy}",
            "Set actor_rollout_ref.actor.strategy=fsdp2",
        )


def _refuse(model_config: Any, engine_config: Any) -> None:
    """Refuse settings under which verl's hook for logits is not called, or is called with other positions."""
    if model_config.use_fused_kernels or engine_config.use_fused_kernels:
        raise InputError(
            "use_fused_kernels=True: verl's fused kernels compute no logits, and the trust region needs them",
            "Set actor_rollout_ref.model.use_fused_kernels=False, the default",
        )
    if engine_config.get("pad_to_length", False):
        raise InputError(
            "actor.pad_to_length=True: verl's hook for logits does not support this padding",
            "Set actor_rollout_ref.actor.pad_to_length=False, the default",
        )


# ---------------------------------------------------------------------- models in an environment with a recent TRL


@cache
def has_value_head() -> bool:
    """Whether TRL has the class that verl patches, in one of the two modules verl imports it from.

    verl 0.9 patches TRL's ``AutoModelForCausalLMWithValueHead`` whenever TRL is installed. Recent versions of TRL no
    longer have that class, so that verl fails with an ``ImportError`` for every model. ``troll train --engine verl``
    needs both packages in one environment: it takes its flags from TRL's configuration.
    """
    for name in ("trl.experimental.ppo", "trl"):
        try:
            import_module(name).AutoModelForCausalLMWithValueHead  # noqa: B018
        except (ImportError, AttributeError):
            continue
        return True
    return False


monkey_patch.is_trl_available = has_value_head  # "is TRL installed?" becomes "does TRL have that class?"
