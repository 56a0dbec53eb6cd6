#!/usr/bin/env bash
# The level-2 comparison on a CPU: every arm, three to five seeds, from the default config of preset=tiny.
#   runs/level2.sh [JOBS]     about 5 minutes a run on one core; finished runs are kept, started ones are resumed
# Runs land in runs/level2/ARM-SEED. Committed metrics: results/level2 (dual, dapo); results/level2-whole-group has all arms as
# they were before advantages compared by condition.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=${1:-2}
export OMP_NUM_THREADS=1
common="preset=tiny eval.every=10 eval.splits=val,test_unseen_companies checkpoint_every=50"
arms() {
  for seed in 0 1 2 3 4; do
    echo "dual-$seed" "seed=$seed steps=60"
  done
  for seed in 0 1 2; do
    echo "dapo-$seed" "seed=$seed steps=200 algo=dapo"
    echo "shuffled-$seed" "seed=$seed steps=60 lookahead_source=shuffled"
    echo "truth-$seed" "seed=$seed steps=20 lookahead_source=truth"
    echo "memory-$seed" "seed=$seed steps=60 lookahead_source=memory world_model.weight=0"
    echo "untrained-$seed" "seed=$seed steps=60 world_model.weight=0"
    for coupling in shared stacked; do
      echo "$coupling-lookahead-$seed" "seed=$seed steps=60 coupling=$coupling"
    done
    for coupling in separate shared stacked; do
      echo "$coupling-$seed" "seed=$seed steps=60 coupling=$coupling lookahead=false exploration.blind_share=0"
    done
  done
}
run() {
  name=$1; shift
  folder=runs/level2/$name
  if [ -d "$folder/adapters" ]; then return; fi
  if [ -f "$folder/config.yaml" ]; then .venv/bin/lfo train --resume "$folder"; return; fi
  # shellcheck disable=SC2086
  .venv/bin/lfo train $COMMON output_dir="$folder" "$@"
}
export -f run
export COMMON=$common
arms | grep -E "${ARMS:-.}" | xargs -P "$jobs" -L 1 bash -c 'run "$@"' run
