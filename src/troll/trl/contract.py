"""What ``troll.trl`` overrides, replaces and reads of TRL and transformers, and the versions of TRL that have it.

A test compares these tables with the code: an override or an attribute that is missing here makes it fail.
"""

from __future__ import annotations

import functools

from troll.contract import ATTRIBUTE, EXISTS, Contract, check_contract

SUPPORTED = ">=1.16,<1.17"
TRANSFORMERS = ">=5.3"
"""Of transformers, whose ``Trainer`` has many of the methods below."""

_TRAINER = "trl:GRPOTrainer"

METHODS: dict[str, str] = {
    # trainer.py
    "__init__": "self, model, reward_funcs, args, train_dataset, eval_dataset, processing_class",
    "_generate_single_turn": "self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images",
    "_generate_and_score_completions": "self, inputs",
    "_get_per_token_logps_and_entropies": (
        "self, model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy"
    ),
    "_compute_loss": "self, model, inputs",
    "_calculate_rewards": "self, inputs, prompts, completions, completion_ids_list",
    "log": "self, logs, start_time",
    "add_callback": "self, callback",
    # robust
    "train": "self, resume_from_checkpoint, trial, ignore_keys_for_eval",
    "training_step": "self, model, inputs, num_items_in_batch",
    "compute_loss": "self, model, inputs, return_outputs, num_items_in_batch",
    "_prepare_inputs": "self, generation_batch",
    "_generate": "self, prompts",
    "_clip_grad_norm": "self, model",
    "_get_grad_norm": "self, model, grad_norm",
    "_save_checkpoint": "self, model, trial",
    "_save_optimizer_and_scheduler": "self, output_dir",
    "_save_scaler": "self, output_dir",
    "_save_rng_state": "self, output_dir",
    "_get_output_dir": "self, trial",
    "_push_from_checkpoint": "self, checkpoint_folder",
    "_load_from_checkpoint": "self, resume_from_checkpoint, model",
    "_load_optimizer_and_scheduler": "self, checkpoint",
    "_load_rng_state": "self, checkpoint",
    "_issue_warnings_after_load": "self, load_result",
    "_get_train_sampler": "self, dataset",
    "_run_epoch": (
        "self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial, "
        "ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, steps_trained_in_current_epoch"
    ),
    "_finalize_training": "self, trial, num_train_samples, start_time",
    "get_optimizer_cls_and_kwargs": "args, model",
    # troll.lab.training.recorder
    "evaluate": "self, eval_dataset, ignore_keys, metric_key_prefix",
}
"""Methods of ``GRPOTrainer`` that we override or call → their first parameters."""
ATTRIBUTES = (
    *("_buffered_inputs", "_step", "_metrics", "_logs", "_tokenizer", "_tag_names", "_name", "_paper"),
    *("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_last_world_entropy", "_entropy_window_stats"),
    *("accelerator", "args", "control", "state", "model", "ref_model", "optimizer", "lr_scheduler"),
    *("train_dataset", "eval_dataset", "processing_class", "reward_funcs", "reward_func_names", "reward_weights"),
    *("epsilon_low", "epsilon_high", "beta", "temperature", "loss_type", "entropy_coef", "num_iterations"),
    *("num_generations", "num_generations_eval", "max_completion_length", "current_gradient_accumulation_steps"),
    *("use_vllm", "use_transformers_continuous_batching", "vllm_importance_sampling_correction"),
    *("is_fsdp_enabled", "is_deepspeed_enabled", "log_completions"),
)
"""Attributes of ``GRPOTrainer`` that we read, set or override."""
TRAINER: Contract = {
    **{f"{_TRAINER}.{name}": parameters for name, parameters in METHODS.items()},
    **{f"{_TRAINER}.{name}": ATTRIBUTE for name in ATTRIBUTES},
}
FUNCTIONS: Contract = {
    "trl.trainer.utils:_ChunkedLogProbFunction.forward": (
        "ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs"
    ),
    "trl.trainer.utils:maybe_gather_lm_head_ctx": EXISTS,
    "trl.trainer.utils:split_pixel_values_by_grid": "batch",
    "trl.trainer.utils:unsplit_pixel_values_by_grid": "batch",
    "trl.trainer.utils:RepeatSampler.shuffle": ATTRIBUTE,
    "trl.trainer.utils:RepeatSampler.generator": ATTRIBUTE,
    "accelerate.state:GradientState._set_sync_gradients": "self, sync_gradients",
    "torch:_foreach_norm": EXISTS,
    "torch.optim.lr_scheduler:LRScheduler._last_lr": ATTRIBUTE,
    "transformers:PreTrainedConfig._name_or_path": ATTRIBUTE,
}
"""Functions and attributes of other modules."""


@functools.cache
def check() -> None:
    """Raise an ``ImportError`` if the installed TRL or transformers does not have what is in these tables."""
    check_contract({"trl": SUPPORTED, "transformers": TRANSFORMERS}, {**TRAINER, **FUNCTIONS})
