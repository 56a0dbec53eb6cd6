#!/usr/bin/env bash
# Baselines at their best, with the same budget for each family: six settings of 60 steps on seeds 10 and 11, which report nothing.
#   plain DAPO    groups of 8, of 64 with three rates, of 128 with two
#   ECHO-style    groups of 64: four weights inline, a lower rate, and the state form
#   imitation     of own successes, in hindsight and with feedback, two rates each
#   research/baselines.sh            level 6, two runs at a time; LEVELS=2 research/baselines.sh 16 the sparse regime
#   ARMS='echo.*' research/baselines.sh 8
#   DEVICE=cuda HOURS=0.167 STEPS=300 research/baselines.sh 4     on a GPU: each run ended after ten minutes
# Runs land in runs/tuning-levelsN/ARM-SEED. The setting with the highest mean of `val` over its seeds at the last evaluation is
# what research/learnable.sh takes (RATE, ECHO_RATE, ECHO, and IMITATION_RATE for all that imitates there); copy metrics.jsonl (gzip -9n) and config.yaml of all of them into research/results/tuning.
# Outside the agent, what is learnable from the same replies (lookup, memory, linear classifier):
#   python -m research.world_model_bench --json seed=S
set -euo pipefail
cd "$(dirname "$0")/.."
levels=${LEVELS:-6} mini=${MINI:-1}
export FOLDER=${FOLDER:-runs/tuning-levels${levels//,/}} LFO=${LFO:-.venv/bin/lfo} HOURS=${HOURS:-12} OMP_NUM_THREADS=1
export COMMON="preset=tiny device=${DEVICE:-cpu} levels=$levels eval.tasks=200 eval.every=20 steps=${STEPS:-60} checkpoint_every=50 ${EXTRA:-}"
arms() {
  local shared="coupling=shared lookahead=off exploration.blind_share=0 optimizer.constant=true rollout.group_size=64 rollout.mini_batch_prompts=$mini"
  local imitate="algo=dapo internalise.rows=8"
  for seed in ${SEEDS:-10 11}; do
    for setting in 8:1e-3 64:5e-4 64:1e-3 64:2e-3 128:1e-3 128:2e-3; do
      local group=${setting%:*} rate=${setting#*:}
      echo "dapo-$group-$rate-$seed seed=$seed algo=dapo optimizer.constant=true policy.learning_rate=$rate rollout.group_size=$group rollout.mini_batch_prompts=$mini"
    done
    for setting in 0.01:1e-3 0.03:1e-3 0.1:1e-3 0.3:1e-3 0.03:5e-4; do
      local weight=${setting%:*} rate=${setting#*:}
      echo "echo-64-$weight-$rate-$seed seed=$seed $shared world_model.input=inline world_model.predict=all world_model.weight=$weight policy.learning_rate=$rate"
    done
    echo "shared-64-0.03-1e-3-$seed seed=$seed $shared world_model.weight=0.03 policy.learning_rate=1e-3"
    for rate in 1e-3 2e-3; do
      echo "imitation-$rate-$seed seed=$seed $imitate internalise.teacher=policy internalise.learning_rate=$rate"
      echo "hindsight-$rate-$seed seed=$seed $imitate internalise.teacher=hindsight internalise.learning_rate=$rate"
      echo "feedback-$rate-$seed seed=$seed $imitate feedback=own internalise.learning_rate=$rate"
    done
  done
}
chosen=$(arms | grep -E "^(${ARMS:-.*})-[0-9]+ ") || { echo "no arm matches ARMS=$ARMS" >&2; exit 2; }
if [ -n "${DRY:-}" ]; then echo "$chosen"; exit; fi
xargs -P "${1:-2}" -L 1 research/train_once.sh <<< "$chosen"
