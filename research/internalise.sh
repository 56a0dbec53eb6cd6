#!/usr/bin/env bash
# What look-ahead achieves becomes part of the policy's weights: the tables of research/LOG.md, sections 31 and 36. Level 2, embedded base.
#   research/internalise.sh              every arm, seeds 0 to 4, two runs at a time: about 20 minutes a run on a core of its own
#   ARMS='lookahead|imitation' SEEDS='0 1' research/internalise.sh 4
# Runs land in runs/internalise/ARM-SEED; those that have ended are kept, started ones are resumed. Then, for each seed, whether
# DAPO after step 120 gains more than going on with imitation does:
#   lfo eval runs/internalise/lookahead-0 --blind --tasks 1000 --against runs/internalise/imitation-0
set -euo pipefail
cd "$(dirname "$0")/.."
export FOLDER=${FOLDER:-runs/internalise} LFO=${LFO:-.venv/bin/lfo} OMP_NUM_THREADS=1
export COMMON="preset=tiny levels=2 eval.every=20 eval.tasks=100 eval.splits=val,test_unseen_companies
  eval.final_splits=test_unseen_rules checkpoint_every=40 env_args.counts.val=1000 env_args.counts.test_unseen_companies=1000 ${EXTRA:-}"
arms() {
  local feedback="algo=dapo feedback=own internalise.rows=8"
  for seed in ${SEEDS:-0 1 2 3 4}; do
    echo "none-$seed seed=$seed algo=dapo steps=120"
    echo "feedback-$seed seed=$seed $feedback steps=120"
    # After step 120 one goes on by plain DAPO, the other by imitation. Before, their rates differ: one decays until step 120, the other until 160.
    echo "lookahead-$seed seed=$seed algo=internalise internalise.until=120"
    echo "imitation-$seed seed=$seed algo=internalise"
    echo "both-$seed seed=$seed algo=internalise feedback=own steps=120"
    # Controls that must not help, and the upper bound: true replies instead of predictions.
    echo "other-task-$seed seed=$seed $feedback feedback=other_task steps=60"
    echo "shuffled-$seed seed=$seed algo=internalise lookahead_source=shuffled steps=60"
    echo "truth-$seed seed=$seed algo=internalise lookahead_source=truth steps=60"
  done
}
chosen=$(arms | grep -E "^(${ARMS:-.*})-[0-9]+ ") || { echo "no arm matches ARMS=$ARMS" >&2; exit 2; }
if [ -n "${DRY:-}" ]; then echo "$chosen"; exit; fi
xargs -P "${1:-2}" -L 1 research/train_once.sh <<< "$chosen"
