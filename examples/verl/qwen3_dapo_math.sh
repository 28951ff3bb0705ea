#!/usr/bin/env bash
# Qwen3-8B on DAPO-Math, one node of 8 GPUs. Arguments are further overrides.
#   TRUST_REGION=troll|clip   the trust region, or PPO's clip with the same settings otherwise
#   DRY_RUN=1                 print verl's configuration and exit
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-Qwen/Qwen3-8B}
DATA=${DATA:-data/dapo_math} # with train.parquet and test.parquet, see README.md
PROMPT=${PROMPT:-1024} RESPONSE=${RESPONSE:-8192}

trust_region troll
train "${region[@]}" "${paper[@]}" "${engine[@]}" \
  actor_rollout_ref.model.path="$MODEL" \
  data.train_files="$DATA/train.parquet" \
  data.val_files="$DATA/test.parquet" \
  data.max_prompt_length="$PROMPT" \
  data.max_response_length="$RESPONSE" \
  data.filter_overlong_prompts=true \
  data.filter_overlong_prompts_workers=16 \
  actor_rollout_ref.actor.use_dynamic_bsz=true \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((PROMPT + RESPONSE)) \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.val_kwargs.do_sample=true \
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
  actor_rollout_ref.rollout.val_kwargs.n=8 \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node=8 \
  trainer.total_training_steps=200 \
  trainer.test_freq=10 \
  trainer.save_freq=20 \
  'trainer.logger=[console,file]' \
  trainer.project_name=troll \
  trainer.experiment_name="qwen3-dapo-math-$TRUST_REGION" \
  "$@"
