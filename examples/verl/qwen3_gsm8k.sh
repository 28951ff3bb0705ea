#!/usr/bin/env bash
# Qwen3-1.7B on GSM8K, one node of 8 GPUs. Arguments are further overrides.
#   TRUST_REGION=troll|clip   the trust region, or PPO's clip with the same settings otherwise
#   DRY_RUN=1                 print verl's configuration and exit
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-Qwen/Qwen3-1.7B}
DATA=${DATA:-data/gsm8k} # with train.parquet and test.parquet, see README.md

trust_region troll
train "${region[@]}" "${paper[@]}" "${engine[@]}" \
  actor_rollout_ref.model.path="$MODEL" \
  data.train_files="$DATA/train.parquet" \
  data.val_files="$DATA/test.parquet" \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  +data.apply_chat_template_kwargs.enable_thinking=false \
  actor_rollout_ref.actor.use_dynamic_bsz=true \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12288 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node=8 \
  trainer.total_epochs=15 \
  trainer.test_freq=5 \
  'trainer.logger=[console,file]' \
  trainer.project_name=troll \
  trainer.experiment_name="qwen3-gsm8k-$TRUST_REGION" \
  "$@"
