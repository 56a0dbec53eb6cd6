#!/usr/bin/env bash
# Two worlds that others wrote, on the embedded base taught how their tools are called and nothing else. One core a run.
#   runs/foreign.sh              both worlds, every arm, seeds 0 to 2, two runs at a time
#   WORLDS=lake ARMS='dual|dapo' SEEDS=0 runs/foreign.sh 4
# It needs pip install 'learn-from-observation[textarena]'.
#   lake        Gymnasium's FrozenLake-v1, not slippery: the agent is told the number of its field and nothing of the map. The map is
#               the same in every task, so what was heard in one tells where the holes are in the next; random play wins 1-2 %.
#               Every task starts on the same field, so a greedy evaluation is all or nothing: read `success`, that of training.
#   secretary   TextArena's Secretary-v0: five values one by one, accept one; won if it was the highest. How often a value wins at
#               which draw carries over; random play wins 22 %, and who knows the distribution at best 64 %.
# Names of few states are numbers here that matter, so none are swapped (world_model.swap_names=0), and states are not cut short.
# Runs land in runs/foreign/WORLD/ARM-SEED, the bases beside them; what has ended is kept. Then: lfo compare runs/foreign/lake
set -euo pipefail
cd "$(dirname "$0")/.."
export LFO=${LFO:-.venv/bin/lfo} HOURS=${HOURS:-12} OMP_NUM_THREADS=1
# shellcheck disable=SC2034
lake="gymnasium:FrozenLake-v1 is_slippery=false" secretary="textarena:Secretary-v0"
steps=${STEPS:-150}
arms() {
  local shared="coupling=shared lookahead=off exploration.blind_share=0"
  for seed in ${SEEDS:-0 1 2}; do
    echo "dapo-$seed seed=$seed steps=$steps algo=dapo"
    echo "dapo-64-$seed seed=$seed steps=$steps algo=dapo rollout.group_size=64"
    echo "echo-$seed seed=$seed steps=$steps $shared world_model.input=inline world_model.predict=all world_model.weight=${ECHO:-0.03}"
    echo "imitation-$seed seed=$seed steps=$steps algo=dapo internalise.rows=8 internalise.teacher=policy"
    echo "dual-$seed seed=$seed steps=$steps"
    echo "internalise-$seed seed=$seed algo=internalise internalise.until=0 steps=$steps"
    echo "frozen-$seed seed=$seed steps=$steps policy.frozen=true"
    echo "shuffled-$seed seed=$seed steps=$steps lookahead_source=shuffled"
  done
}
for world in ${WORLDS:-lake secretary}; do
  read -r env argument <<< "${!world}"
  export FOLDER=runs/foreign/$world
  base=$FOLDER/base
  if [ ! -d "$base" ]; then
    rm -rf "$base-unchecked"
    "$LFO" pretrain --env "$env" ${argument:+--env-arg "$argument"} --base tiny --output-dir "$base-unchecked" --device cpu
    "$LFO" pretrain --env "$env" ${argument:+--env-arg "$argument"} --check --model "$base-unchecked" --device cpu
    mv "$base-unchecked" "$base"
  fi
  export COMMON="preset=tiny threads=1 model=$base env=$env ${argument:+env_args.$argument} world_model.swap_names=0
    world_model.wording=1 world_model.state_tokens=384 world_model.examples_per_mini_batch=6 eval.every=10 eval.tasks=200 checkpoint_every=50 ${EXTRA:-}"
  chosen=$(arms | grep -E "^(${ARMS:-.*})-[0-9]+ ") || { echo "no arm matches ARMS=$ARMS" >&2; exit 2; }
  xargs -P "${1:-2}" -L 1 runs/train_once.sh <<< "$chosen" || failed=1
done
exit "${failed:-0}"
