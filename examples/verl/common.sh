# Sourced by the scripts in this folder: the paper's settings, the trust region or the clip, and the start of verl.

PYTHON=${PYTHON:-python}
TRUST_REGION=${TRUST_REGION:-troll}

# 256 prompts × 8 samples per rollout, updates on 32 prompts: 8 updates on each rollout. No reference KL.
paper=(
  algorithm.adv_estimator=grpo
  data.train_batch_size=256
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.temperature=1.0
  actor_rollout_ref.actor.ppo_mini_batch_size=32
  actor_rollout_ref.actor.ppo_epochs=1
  actor_rollout_ref.actor.use_kl_loss=false
  algorithm.use_kl_in_reward=false
  actor_rollout_ref.actor.entropy_coeff=0
  actor_rollout_ref.actor.loss_agg_mode=token-mean
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.optim.weight_decay=0.0
  actor_rollout_ref.actor.optim.clip_grad=1.0
)

engine=(
  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.actor.optim.lr_scheduler_type=constant
)

# The two arms differ in these keys alone. The preset sets KL ≤ 0.05, α = 1, tail = floor, K = 64 and δ = 1e-5.
trust_region() { # name of the config group in troll.verl.configs
  case $TRUST_REGION in
    troll)
      region=(
        'hydra.searchpath=[pkg://troll.verl.configs]'
        "+trust_region=$1"
        actor_rollout_ref.actor.policy_loss.preset=paper
      )
      ;;
    clip)
      region=(
        actor_rollout_ref.actor.policy_loss.loss_mode=vanilla
        actor_rollout_ref.actor.clip_ratio_low=0.2
        actor_rollout_ref.actor.clip_ratio_high=0.2
      )
      ;;
    *)
      echo "TRUST_REGION must be troll or clip, got $TRUST_REGION" >&2
      exit 2
      ;;
  esac
}

train() {
  exec "$PYTHON" -m verl.trainer.main_ppo "$@" ${DRY_RUN:+--cfg job}
}
