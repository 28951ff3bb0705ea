#!/usr/bin/env bash
# Qwen3-8B on DAPO-Math on many nodes of 8 GPUs. The training is that of qwen3_dapo_math.sh: rollouts and updates have
# the same sizes, spread over more GPUs.
#
# Every node needs the same environment (REQUIRED_VERL.txt) and the model and data under the same path. Then:
#   on the first node:        ray start --head --port 6379 --num-gpus 8
#   on each of the others:    ray start --address FIRST:6379 --num-gpus 8
#   on the first, when `ray status` shows them all:
#                             NNODES=8 RAY_ADDRESS=auto ./qwen3_dapo_math_multinode.sh
#   in the end, on each:      ray stop
set -euo pipefail

NNODES=${NNODES:-8}

exec "$(dirname "${BASH_SOURCE[0]}")/qwen3_dapo_math.sh" \
  trainer.nnodes="$NNODES" \
  trainer.experiment_name="qwen3-dapo-math-$NNODES-nodes-${TRUST_REGION:-troll}" \
  "$@"
