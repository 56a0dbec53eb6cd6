#!/usr/bin/env bash
# The comparison: plain DAPO, both couplings with and without look-ahead, and the controls, several seeds each. Arms of
# docs/RESULTS.md with coupling=stacked or lookahead=environment are retired: research/LOG.md names the commit that can repeat them.
#   research/experiment.sh tiny 2                     the embedded base on level 2: about 5 minutes a run on one CPU core
#   research/experiment.sh tiny 2,3,4                 on levels 2 to 4
#   research/experiment.sh smollm2-135m 2,3,4 5       on one GPU, five runs at a time
# Runs land in runs/PRESET-levelsN/ARM-SEED; those that have ended are kept, started ones are resumed. Set ARMS to a regular
# expression to run some of them, as ARMS='dual|dapo', SEEDS, STEPS, DAPO_STEPS or LFO as you like, and EXTRA to settings for all
# arms, as EXTRA='policy.learning_rate=1e-4'.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:?a preset, such as tiny} levels=${2:?levels, such as 2 or 2,3,4} jobs=${3:-2}
export FOLDER=runs/$preset-levels${levels//,/} LFO=${LFO:-.venv/bin/lfo} OMP_NUM_THREADS=1
export COMMON="preset=$preset levels=$levels eval.splits=val,test_unseen_companies
  eval.final_splits=test_unseen_rules,test_unseen_phrasing checkpoint_every=50 ${EXTRA:-}"
steps=${STEPS:-$([ "$levels" = 2 ] && echo 60 || echo 120)}
arms() {
  for seed in ${SEEDS:-0 1 2}; do
    echo "dual-$seed seed=$seed steps=$steps"
    echo "frozen-$seed seed=$seed steps=$steps policy.frozen=true"
    echo "frozen-drafts4-$seed seed=$seed steps=$steps policy.frozen=true imagine.drafts=4"
    echo "internalise-$seed seed=$seed steps=100 eval.every=20 internalise.rows=8"
    echo "feedback-$seed seed=$seed steps=100 eval.every=20 internalise.rows=8 feedback=own algo=dapo"
    echo "both-$seed seed=$seed steps=100 eval.every=20 internalise.rows=8 feedback=own"
    echo "dapo-$seed seed=$seed steps=${DAPO_STEPS:-400} eval.every=20 algo=dapo"
    echo "memory-$seed seed=$seed steps=$steps lookahead_source=memory world_model.weight=0"
    echo "shuffled-$seed seed=$seed steps=$steps lookahead_source=shuffled"
    echo "untrained-$seed seed=$seed steps=$steps world_model.weight=0"
    echo "shared-lookahead-$seed seed=$seed steps=$steps coupling=shared"
    for coupling in separate shared; do
      echo "$coupling-$seed seed=$seed steps=$steps coupling=$coupling lookahead=off exploration.blind_share=0"
    done
    echo "truth-$seed seed=$seed steps=20 lookahead_source=truth"
  done
}
chosen=$(arms | grep -E "^(${ARMS:-.*})-[0-9]+ ") || { echo "no arm matches ARMS=$ARMS" >&2; exit 2; }
xargs -P "$jobs" -L 1 research/train_once.sh <<< "$chosen"
