#!/usr/bin/env bash
# One setting at a time: the default of the embedded base on level 2, and the same with one thing changed.
#   research/knobs.sh             every knob, seed 0, two runs at a time: about 5 minutes a run on one CPU core
#   KNOBS='rank|no-replay' SEEDS='0 1 2' research/knobs.sh 4
# Runs land in runs/knobs/KNOB-SEED; those that have ended are kept, started ones are resumed.
set -euo pipefail
cd "$(dirname "$0")/.."
export FOLDER=runs/knobs LFO=${LFO:-.venv/bin/lfo} OMP_NUM_THREADS=1
export COMMON="preset=tiny levels=2 steps=60 eval.splits=val,test_unseen_companies
  eval.final_splits=test_unseen_rules,test_unseen_phrasing checkpoint_every=50"
knobs() {
  cat <<'KNOBS'
no-replay world_model.replay=false
no-exploration exploration.blind_share=0
blind-steps exploration.blind_share=0 world_model.schedule=explore_first:30
predict-all world_model.predict=all
half-weight world_model.weight=0.5
surprise surprise=0.1
world-model-first world_model.schedule=world_model_first:20
alternating world_model.schedule=alternating
hierarchical world_model.schedule=hierarchical:4
rank-8 lora.rank=8
rank-32 lora.rank=32
attention-only lora.targets=q_proj,k_proj,v_proj,o_proj
slow-world-model world_model.learning_rate=1e-3
fast-world-model world_model.learning_rate=4e-3
slow-policy policy.learning_rate=1.25e-4
fast-policy policy.learning_rate=2e-3
KNOBS
}
settings() {
  for seed in ${SEEDS:-0}; do
    knobs | while read -r knob setting; do echo "$knob-$seed seed=$seed $setting"; done
  done
}
chosen=$(settings | grep -E "^(${KNOBS:-.*})-[0-9]+ ") || { echo "no knob matches KNOBS=$KNOBS" >&2; exit 2; }
xargs -P "${1:-2}" -L 1 research/train_once.sh <<< "$chosen"
