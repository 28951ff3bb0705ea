"""What ``troll.verl`` overrides, patches and calls of verl, and the versions of verl that have it.

A test compares these tables with the code: an import or an override that is missing here makes it fail.
"""

from __future__ import annotations

from troll.contract import ATTRIBUTE, EXISTS, Contract, check_contract

SUPPORTED = ">=0.9,<0.10"

_FSDP = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
_MEGATRON = "verl.workers.engine.megatron:MegatronEngineWithLMHead"
_SINGLE_TURN = "verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop"

CONFIG: Contract = {
    "verl.base_config:BaseConfig": EXISTS,
    "verl.workers.config:PolicyLossConfig": EXISTS,
    "verl.workers.config:FSDPEngineConfig": EXISTS,
    "verl.workers.config:FSDPEngineConfig.__post_init__": "self",
    "verl.workers.config:McoreEngineConfig": EXISTS,
    "verl.workers.config:McoreEngineConfig.__post_init__": "self",
}
LOSS: Contract = {
    "verl.trainer.ppo.core_algos:agg_loss": (
        "loss_mat, loss_mask, loss_agg_mode, *, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor"
    ),
    "verl.trainer.ppo.core_algos:register_policy_loss": "name",
    "verl.utils.metric:AggregationType": EXISTS,
    "verl.utils.metric:Metric": "aggregation, value",
    "verl.workers.utils.losses:ppo_loss": "*, config, model_output, data, dp_group",
    "verl.workers.utils.padding:no_padding_2_padding": "tensor, data",
}
ENGINE: Contract = {
    "verl.utils.tensordict_utils:assign_non_tensor": "tensor_dict, *, kwargs",
    "verl.utils.ulysses:ulysses_pad_and_slice_inputs": "input_ids_rmpad, *, sp_size, pad_value",
    "verl.workers.engine:MegatronEngine": EXISTS,
    "verl.workers.engine:BaseEngine": EXISTS,
    "verl.workers.engine:BaseEngine.initialize": "self",
    "verl.workers.engine:BaseEngine.forward_backward_batch": "self, data, loss_function, forward_only",
    "verl.workers.engine:BaseEngine.disable_adapter": "self",
    "verl.workers.engine:EngineRegistry.register": "*, model_type, backend, device",
    _FSDP: "model_config, engine_config, optimizer_config, checkpoint_config",
    f"{_FSDP}.initialize": "self",
    f"{_FSDP}.forward_backward_batch": "self, data, loss_function, forward_only",
    f"{_FSDP}.disable_adapter": "self",
    f"{_FSDP}.prepare_model_outputs": "self, output, output_args, micro_batch, logits_processor_func",
    f"{_FSDP}._gather_and_unpad_packed": "self, tensor, pad_size",
    f"{_FSDP}.module": ATTRIBUTE,
    f"{_FSDP}.engine_config": ATTRIBUTE,
    f"{_FSDP}.use_ulysses_sp": ATTRIBUTE,
    f"{_FSDP}.ulysses_sequence_parallel_size": ATTRIBUTE,
}
TRL_COMPAT: Contract = {"verl.models.transformers.monkey_patch:is_trl_available": ""}
MEGATRON: Contract = {
    "verl.models.mcore.util:preprocess_bshd_engine": "input_ids, *, use_fp8_padding, forced_max_seqlen",
    "verl.models.mcore.util:preprocess_thd_engine": "input_ids, *, use_fp8_padding, cp_layout",
    "verl.utils.tensordict_utils:get_non_tensor_data": "data, key, default",
    "verl.utils.megatron_utils:unwrap_model": "model",
    _MEGATRON: "model_config, engine_config, optimizer_config, checkpoint_config",
    f"{_MEGATRON}.initialize": "self",
    f"{_MEGATRON}.forward_backward_batch": "self, data, loss_function, forward_only",
    f"{_MEGATRON}.disable_adapter": "self",
    f"{_MEGATRON}.prepare_model_outputs": "self, output, data",
    f"{_MEGATRON}._lm_head_logits_processor": (
        "self, logits, label, temperature, *, calculate_sum_pi_squared, calculate_entropy, distillation_use_topk, "
        "distillation_only, logits_processor_func, batch, data_format"
    ),
    f"{_MEGATRON}._get_context_parallel_layout": "unwrapped_model",
    f"{_MEGATRON}.module": ATTRIBUTE,
    f"{_MEGATRON}.engine_config": ATTRIBUTE,
    f"{_MEGATRON}.tf_config": ATTRIBUTE,
}
"""Checked where Megatron is installed."""
DRIVER: Contract = {
    "verl.trainer.ppo.v1:AgentLoopManagerTQ": EXISTS,
    "verl.trainer.ppo.v1:AgentLoopManagerTQ._init_agent_loop_workers": "self",
    "verl.trainer.ppo.v1:AgentLoopManagerTQ.agent_loop_workers": ATTRIBUTE,
    "verl.trainer.ppo.v1:PPOTrainer": EXISTS,
    "verl.trainer.ppo.v1:PPOTrainer._compute_metrics": "self, batch, metrics, timing_raw, global_steps, epoch",
    "transfer_queue:kv_batch_get": "keys, partition_id, select_fields",
}
"""Checked by ``driver``: importing verl's trainer takes seconds, and workers do not need it."""
AGENT_LOOP: Contract = {
    "verl.experimental.agent_loop.agent_loop:AgentLoopOutput": EXISTS,
    _SINGLE_TURN: EXISTS,
    f"{_SINGLE_TURN}.run": "self, sampling_params, *, kwargs",
}
"""Checked by ``troll.lab.verl.stop_token_loop``."""


def check(*tables: Contract) -> None:
    """Raise an ``ImportError`` if the installed verl does not have what is in these tables."""
    for table in tables:
        check_contract({"verl": SUPPORTED}, table)
