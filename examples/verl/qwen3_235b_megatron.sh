#!/usr/bin/env bash
# Qwen3-235B-A22B, a mixture of experts, on DAPO-Math with Megatron: 128 nodes of 8 GPUs, Ray as in
# qwen3_dapo_math_multinode.sh. A starting point: the sizes are not measured, and the script has not been run.
#   TRUST_REGION=troll|clip   the trust region, or PPO's clip with the same settings otherwise
#   DRY_RUN=1                 print verl's configuration and exit
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-Qwen/Qwen3-235B-A22B}
DATA=${DATA:-data/dapo_math}
NNODES=${NNODES:-128}
PROMPT=${PROMPT:-1024} RESPONSE=${RESPONSE:-16384}

trust_region troll_megatron
train --config-name=ppo_megatron_trainer "${region[@]}" "${paper[@]}" \
  actor_rollout_ref.actor.optim.lr_decay_style=constant \
  actor_rollout_ref.model.path="$MODEL" \
  data.train_files="$DATA/train.parquet" \
  data.val_files="$DATA/test.parquet" \
  data.max_prompt_length="$PROMPT" \
  data.max_response_length="$RESPONSE" \
  data.filter_overlong_prompts=true \
  data.filter_overlong_prompts_workers=16 \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8 \
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
  actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
  actor_rollout_ref.actor.megatron.param_offload=true \
  actor_rollout_ref.actor.megatron.optimizer_offload=true \
  actor_rollout_ref.actor.use_dynamic_bsz=true \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((PROMPT + RESPONSE)) \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
  trainer.nnodes="$NNODES" \
  trainer.n_gpus_per_node=8 \
  trainer.total_training_steps=200 \
  trainer.test_freq=10 \
  trainer.save_freq=20 \
  'trainer.logger=[console,file]' \
  trainer.project_name=troll \
  trainer.experiment_name="qwen3-235b-dapo-math-$TRUST_REGION" \
  "$@"
