#!/usr/bin/env bash
# Qwen3-4B on programming problems, one node of 8 GPUs. The model's programs run in troll's sandbox, on the
# machines of verl's reward workers (run `troll doctor` there to test it). Arguments are further overrides.
#   TRUST_REGION=troll|clip   the trust region, or PPO's clip with the same settings otherwise
#   DRY_RUN=1                 print verl's configuration and exit
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-Qwen/Qwen3-4B}
DATA=$(realpath -m "${DATA:-data/code}") # as prepare_data.py writes it, see README.md

trust_region troll
train "${region[@]}" "${paper[@]}" "${engine[@]}" \
  actor_rollout_ref.model.path="$MODEL" \
  data.train_files="$DATA/train.parquet" \
  data.val_files="$DATA/held_out.parquet" \
  data.max_prompt_length=1024 \
  data.max_response_length=4096 \
  data.filter_overlong_prompts=true \
  reward.custom_reward_function.path=pkg://troll.lab.verl.data \
  reward.custom_reward_function.name=score \
  +reward.custom_reward_function.reward_kwargs.task="$DATA/task.json" \
  actor_rollout_ref.actor.use_dynamic_bsz=true \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10240 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node=8 \
  trainer.total_training_steps=100 \
  trainer.total_epochs=100 \
  trainer.test_freq=10 \
  'trainer.logger=[console,file]' \
  trainer.project_name=troll \
  trainer.experiment_name="qwen3-code-$TRUST_REGION" \
  "$@"
