#!/usr/bin/env bash
# All arms and seeds of train.py side by side on one GPU: all.sh MODEL_DIR GGUF_FILE OUTPUT_DIR SEED…
set -euo pipefail
model=$1 gguf=$2 output=$3
shift 3
for seed in "$@"; do
  for arm in floor bucket clip none; do
    python "$(dirname "$0")/train.py" --model "$model" --gguf "$gguf" --arm "$arm" --seed "$seed" \
      --output "$output/$arm-$seed.json" 2>&1 | grep rollout &
  done
done
wait
